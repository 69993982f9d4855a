"""Differential privacy by example of a run (``train.optimiser.private``): its accounting and the keys of its clients.

Every client has a guarantee of its own. It depends on the number of the client's clips and on its steps: every client of a round
counts as trained, whether its update arrives or not. The sampling of cohorts does not enter the accounting.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.noise_key import NoiseKey
from raydfl.data import Population
from raydfl.engine.accounting import ExampleMechanism, check_library
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.networks import build_models
from raydfl.engine.privacy import STUDY, mark_epsilon, read_mechanism
from raydfl.engine.storage.folder import read_about
from raydfl.engine.storage.record import read_rows
from raydfl.engine.telemetry import RoundReport, RoundRows
from raydfl.training import check_networks, count_steps, find_fixed_tensors

STEPS = "privacy/steps"
"""Metric of the private steps of a client in a round."""


def plan_examples(config: Config, population: Population, clients: Clients) -> tuple[ExampleMechanism, dict[int, int]]:
    """Return the mechanism of a run with ``train.optimiser.private``, and the eligible clients by number of clips.

    Args:
        config: Configuration of the run.
        population: Clients of the run and their data.
        clients: The same clients.

    Raises:
        ConfigError: dp-accounting is missing, a model mixes clips, or no client has clips.
    """
    check_library()
    settings = config.train.optimiser.private
    assert settings is not None  # noqa: S101 - the caller's condition
    for combinations in clients.variants_of_parts().values():
        for specs in combinations:
            models = build_models(config.components.method, specs, config.run.seed)
            check_networks(models, find_fixed_tensors(models, config.components.method.fixed))
    counts = Counter(_count_clips(population, clients).values())
    if not counts:
        raise ConfigError("train.optimiser.private: no client has training clips. Change data.split or train.clients")
    delta = choose_delta(config.privacy.delta, counts)
    return ExampleMechanism(config.train.batch_size, settings.noise, delta), dict(counts)


def choose_delta(delta: float | None, clips: Iterable[int]) -> float:
    """Return the configured delta, or the default for the largest number of a client's clips."""
    return float(max(*clips, 2) ** -1.1) if delta is None else delta


def _count_clips(population: Population, clients: Clients) -> dict[str, int]:
    """Count the training clips of each eligible client that has any, by its id."""
    sizes = np.asarray(population.sizes())
    eligible = np.ones(len(sizes), bool) if clients.draw is None else clients.draw.chances > 0
    return {population.ids[int(index)]: int(sizes[index]) for index in np.flatnonzero(eligible & (sizes > 0))}


def expect_steps(config: Config, examples: int, eligible: int) -> int:
    """Compute the steps of a client in all rounds, if it takes part in the expected number of rounds.

    Args:
        config: Configuration of the run.
        examples: Number of the client's clips.
        eligible: Number of eligible clients.
    """
    train = config.train
    rounds = math.ceil(train.rounds * train.cohort_size(eligible) / eligible)
    return rounds * count_steps(examples, train.batch_size, train.local_epochs)


def prepare_examples(
    config: Config, run_dir: Path, population: Population, clients: Clients
) -> tuple[dict[str, Any], str]:
    """Create the key of a new run, and return its mechanism for ``run.json`` with a description.

    Args:
        config: Configuration of the run.
        run_dir: Folder of the run.
        population: Clients of the run and their data.
        clients: The same clients.

    Raises:
        ConfigError: The mechanism is impossible, or the first round exceeds ``run.stop.epsilon``.
        RunDirectoryError: The folder has an unusable key.
    """
    mechanism, counts = plan_examples(config, population, clients)
    secret = config.privacy.key == "secret"
    limit = None if config.run.stop is None else config.run.stop.epsilon
    if limit is not None:
        first = {n: count_steps(n, mechanism.batch, config.train.local_epochs) for n in counts}
        least = {n: allowed for n, allowed in mechanism.count_steps(limit, first).items() if allowed < first[n]}
        if least:
            size = min(least)
            raise ConfigError(
                f"run.stop.epsilon: the first round of a client with {size} clips already has epsilon "
                f"{mechanism.compute_epsilon(size, first[size]):.3g}{mark_epsilon([] if secret else [STUDY])}, more than "
                f"{limit:g}. Raise train.optimiser.private.noise, or run.stop.epsilon"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    key = NoiseKey.create(run_dir).fingerprint if secret else None
    expected = {(n, expect_steps(config, n, clients.eligible)): number for n, number in counts.items()}
    largest, median = mechanism.summarise(expected)
    stored = {"unit": "clip", **dataclasses.asdict(mechanism), "neighbours": mechanism.neighbours, "key": key}
    if not secret:
        stored["warning"] = STUDY
    return stored, describe_examples(mechanism, config.train.rounds, largest, median, secret)


def describe_examples(mechanism: ExampleMechanism, rounds: int, largest: float, median: float, secret: bool) -> str:
    """Describe the guarantees of clients in words."""
    mark = "" if secret else f"; {STUDY}"
    return (
        f"epsilon {largest:.3g} (largest of the clients; median {median:.3g}; delta {mechanism.delta:.3g}, "
        f"{mechanism.neighbours}) after {rounds} rounds with noise {mechanism.noise:.4g}{mark}"
    )


def measure_examples(run_dir: Path, stored: Mapping[str, Any], rounds: int) -> tuple[float, float, str]:
    """Compute the largest and the median epsilon of a run's clients, and describe them.

    Args:
        run_dir: Folder of the run.
        stored: Group ``privacy`` of the run's ``run.json``.
        rounds: Completed rounds.

    Raises:
        RunDirectoryError: The group is damaged.
    """
    mechanism = read_mechanism(ExampleMechanism, stored)
    largest, median = mechanism.summarise(Counter(_read_pairs(run_dir, rounds).values()))
    return largest, median, describe_examples(mechanism, rounds, largest, median, stored.get("key") is not None)


def measure_clients(run_dir: Path, stored: Mapping[str, Any], rounds: int, clients: Collection[str]) -> float:
    """Compute the largest epsilon of some of a run's clients. 0 if none of them took part.

    Args:
        run_dir: Folder of the run.
        stored: Group ``privacy`` of the run's ``run.json``.
        rounds: Completed rounds.
        clients: Ids of the clients.

    Raises:
        RunDirectoryError: The group is damaged.
    """
    pairs = _read_pairs(run_dir, rounds)
    return read_mechanism(ExampleMechanism, stored).summarise(Counter(pairs[c] for c in clients if c in pairs))[0]


def _read_pairs(run_dir: Path, rounds: int) -> dict[str, tuple[int, int]]:
    """Return the numbers of clips and of private steps of each client that took part, by its id."""
    population = Population.load(run_dir / "population", features=False)
    sizes = dict(zip(population.ids, map(int, population.sizes()), strict=True))
    return {client: (sizes[client], count) for client, count in read_steps(run_dir, rounds).items()}


def read_steps(run_dir: Path, rounds: int) -> Counter[str]:
    """Read the number of private steps of each client from the metrics table.

    Args:
        run_dir: Folder of the run.
        rounds: Completed rounds. Later rows do not count.
    """
    where = (pc.field("metric") == STEPS) & (pc.field("round") <= rounds)
    table = read_rows(run_dir, rounds, where=where, columns=["client", "value"])
    steps: Counter[str] = Counter()
    for client, value in zip(table["client"].to_pylist(), table["value"].to_pylist(), strict=True):
        steps[client] += int(value)
    return steps


@dataclass(frozen=True, slots=True)
class PrivateExamples:
    """Keys and accounting of a run with ``train.optimiser.private``."""

    mechanism: ExampleMechanism
    key: NoiseKey
    secret: bool
    """Whether the key is a secret; False: it comes from the run's seed."""
    outside: bool
    """Whether metrics of clients are recorded, outside the guarantee."""
    clips: Mapping[str, int]
    """Number of clips of each eligible client, by its id."""
    epochs: int
    rounds: int
    """``train.rounds``."""
    limits: Mapping[int, int] | None
    """Steps within ``run.stop.epsilon`` by number of clips; ``None``: no limit."""

    @classmethod
    def open(cls, config: Config, run_dir: Path, population: Population, clients: Clients) -> PrivateExamples | None:
        """Read the mechanism and the key of a run; ``None`` without ``train.optimiser.private``.

        Raises:
            RunDirectoryError: The mechanism or the key is missing, or the key is unusable.
        """
        if config.train.optimiser.private is None:
            return None
        stored = read_about(run_dir).get("privacy")
        if stored is None:
            raise RunDirectoryError(f"{run_dir / 'run.json'} lacks the group privacy. Restore it from a copy")
        mechanism, secret, train = (
            read_mechanism(ExampleMechanism, stored),
            config.privacy.key == "secret",
            config.train,
        )
        key = NoiseKey.read(run_dir, stored["key"]) if secret else NoiseKey.from_seed(config.run.seed)
        clips, limits = _count_clips(population, clients), None
        limit = None if config.run.stop is None else config.run.stop.epsilon
        if limit is not None:
            most = {n: train.rounds * count_steps(n, mechanism.batch, train.local_epochs) for n in set(clips.values())}
            limits = mechanism.count_steps(limit, most)
        outside = config.privacy.metrics == "outside"
        return cls(mechanism, key, secret, outside, clips, train.local_epochs, train.rounds, limits)

    def derive_key(self, round_index: int, client_id: str, phase: str) -> NoiseKey:
        """Derive the key of a client's batches and noise in a round."""
        return self.key.derive(round_index, f"client {client_id}, {phase}")

    def count_steps(self, client_id: str) -> int:
        """Count the steps of a client in a round."""
        return count_steps(self.clips.get(client_id, 0), self.mechanism.batch, self.epochs)

    def measure(self, steps: Mapping[str, int]) -> tuple[float, float]:
        """Compute the largest and the median epsilon of the clients with steps.

        Args:
            steps: Number of steps of each client, by its id.
        """
        return self.mechanism.summarise(
            Counter((self.clips[client], count) for client, count in steps.items() if count)
        )

    def keep_rows(self, rows: RoundRows, report: RoundReport) -> None:
        """Remove a round's metrics of the training from its rows and its report, unless ``privacy.metrics`` records them."""
        if not self.outside:
            report.loss = math.nan
            rows[:] = [row for row in rows if row.split != "train"]

    def explain_end(self, rounds: int, steps: Mapping[str, int]) -> str:
        """Return the reason of ``run.stop`` to end the training after a number of rounds; empty: it continues.

        Args:
            rounds: Completed rounds.
            steps: Number of steps of each client, by its id.
        """
        if self.limits is None or rounds >= self.rounds:
            return ""
        for client, clips in self.clips.items():
            if steps.get(client, 0) + self.count_steps(client) > self.limits[clips]:
                now = self.mechanism.compute_epsilon(clips, steps.get(client, 0))
                mark = mark_epsilon([] if self.secret else [STUDY])
                return f"another round of client {client!r} would exceed run.stop.epsilon, now {now:.3g}{mark}"
        return ""
