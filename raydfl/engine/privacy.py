"""Differential privacy of a run by the rule ``gaussian``: its checks, its accounting and its noise."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import numpy as np
import torch

from raydfl.core.errors import ConfigError, RunDirectoryError, translate_failures
from raydfl.core.noise_key import NoiseKey
from raydfl.core.types import Metrics, Ratio, State, Update
from raydfl.engine.accounting import ExampleMechanism, Mechanism, check_library
from raydfl.engine.banded_noise import BandedNoise
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.initial_state import make_initial_state
from raydfl.engine.networks import build_variants
from raydfl.engine.storage.folder import read_about
from raydfl.engine.telemetry import TIMELINE, RoundReport, RoundRows
from raydfl.rules import AdaptiveClip, Gaussian, NoisySum

_Mechanism = TypeVar("_Mechanism", Mechanism, ExampleMechanism)

_CLIP = "gaussian"
"""Entry of the state with the clip of the next round."""
STUDY = "for study: anyone who knows the seed can subtract the noise"
"""Mark of every epsilon of a run with ``privacy.key: seed``."""


def plan_mechanism(config: Config, clients: int) -> Mechanism:
    """Return the mechanism of a run with the rule ``gaussian``, with its noise calibrated to ``method.rule.epsilon``.

    Args:
        config: Configuration of the run.
        clients: Number of eligible clients.

    Raises:
        ConfigError: The cohort exceeds the clients, no noise reaches the epsilon, the adaptive clip has too little noise, or
            dp-accounting is missing.
    """
    check_library()
    rule, settings = cast(Gaussian, config.components.rule), config.privacy
    cohort, simulated, stated = config.train.cohort_size(clients), 0, settings.as_if
    if stated is not None:
        clients, cohort, simulated = stated.clients, stated.cohort, cohort
    delta = float(max(clients, 2) ** -1.1) if settings.delta is None else settings.delta
    rest = 1 if config.train.clients is None else config.train.clients.rest
    mechanism = Mechanism(clients, cohort, config.train.draw, rule.noise or 0.0, delta, rest, simulated)
    if rule.epsilon is not None:
        mechanism = mechanism.calibrate(rule.epsilon, config.train.rounds)
    rule.split_noise(mechanism.noise, cohort)  # rejects too little noise in an adaptive clip
    return mechanism


def count_parameters(config: Config, clients: Clients) -> int:
    """Count the elements of the global model, for the noise.

    Args:
        config: Configuration of the run.
        clients: Clients of the run.

    Raises:
        ConfigError: The method has no global model, or the rule does not fit it.
    """
    variants = build_variants(config.components.method, clients.variants_of_parts(), config.run.seed)
    return sum(
        tensor.numel() for tensor in make_initial_state(config, clients, variants).tensors[Gaussian.key].values()
    )


def describe_epsilon(mechanism: Mechanism, rounds: int, epsilon: float, secret: bool) -> str:
    """Describe a guarantee in words: ``epsilon 1.99 (delta 0.0111, by adding or removing one client) after 100 rounds``."""
    mark = "".join(f"; {text}" for text in list_warnings(mechanism, secret))
    return (
        f"epsilon {epsilon:.3g} (delta {mechanism.delta:.3g}, {mechanism.neighbours}) after {rounds} rounds with noise "
        f"{mechanism.noise:.4g}{mark}"
    )


def list_warnings(mechanism: Mechanism, secret: bool) -> list[str]:
    """List the reasons why an epsilon is no guarantee for the clients of the run."""
    return [text for text in (mechanism.assumption, "" if secret else STUDY) if text]


def mark_epsilon(warnings: Sequence[str]) -> str:
    """Return the mark to print after an epsilon; empty without warnings."""
    return f" ({'; '.join(warnings)})" if warnings else ""


def describe_run(stored: Mapping[str, Any], rounds: int) -> tuple[float, str]:
    """Compute the epsilon of a run after a number of rounds, and describe it.

    Args:
        stored: Group ``privacy`` of the run's ``run.json``.
        rounds: Completed rounds.

    Raises:
        RunDirectoryError: The group is damaged.
    """
    mechanism = read_mechanism(Mechanism, stored)
    epsilon = mechanism.compute_epsilon(rounds)
    return epsilon, describe_epsilon(mechanism, rounds, epsilon, stored.get("key") is not None)


def prepare_privacy(config: Config, run_dir: Path, clients: int) -> dict[str, Any]:
    """Create the key of a new run, and return its mechanism for ``run.json``.

    Args:
        config: Configuration of the run.
        run_dir: Folder of the run.
        clients: Number of eligible clients.

    Raises:
        ConfigError: The mechanism is impossible, or the first round exceeds ``run.stop.epsilon``.
        RunDirectoryError: The folder has an unusable key.
    """
    mechanism = plan_mechanism(config, clients)
    limit = None if config.run.stop is None else config.run.stop.epsilon
    secret = config.privacy.key == "secret"
    warnings = list_warnings(mechanism, secret)
    if limit is not None and not mechanism.count_rounds(limit, 1):
        raise ConfigError(
            f"run.stop.epsilon: the first round already has epsilon {mechanism.compute_epsilon(1):.3g}{mark_epsilon(warnings)}, "
            f"more than {limit:g}. Raise method.rule.noise, or run.stop.epsilon"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    key = NoiseKey.create(run_dir).fingerprint if secret else None
    mark = {"warning": "; ".join(warnings)} if warnings else {}
    values = {
        field.name: value
        for field in dataclasses.fields(Mechanism)
        if (value := getattr(mechanism, field.name)) != field.default
    }
    return {**values, "neighbours": mechanism.neighbours, "key": key, **mark}


@dataclass(frozen=True, slots=True)
class PrivateRun:
    """Noise and accounting of a run with the rule ``gaussian``."""

    mechanism: Mechanism
    key: NoiseKey
    noise: BandedNoise
    """Noise of the sums, drawn from the key."""
    secret: bool
    """Whether the key is a secret; False: it comes from the run's seed."""
    outside: bool
    """Whether metrics of clients are recorded, outside the guarantee."""
    limit: int | None
    """Number of rounds within ``run.stop.epsilon``; ``None``: no limit."""

    @classmethod
    def open(cls, config: Config, run_dir: Path) -> PrivateRun | None:
        """Read the mechanism and the key of a run; ``None`` without the rule ``gaussian``.

        Raises:
            RunDirectoryError: The mechanism or the key is missing, or the key is unusable.
        """
        if not isinstance(config.components.rule, Gaussian):
            return None
        stored = read_about(run_dir).get("privacy")
        if stored is None:
            raise RunDirectoryError(f"{run_dir / 'run.json'} lacks the group privacy. Restore it from a copy")
        mechanism, settings = read_mechanism(Mechanism, stored), config.privacy
        secret = settings.key == "secret"
        key = NoiseKey.read(run_dir, stored["key"]) if secret else NoiseKey.from_seed(config.run.seed)
        limit = None if config.run.stop is None else config.run.stop.epsilon
        rounds = None if limit is None else mechanism.count_rounds(limit, config.train.rounds)
        if rounds == config.train.rounds:
            rounds = None  # train.rounds ends the training first
        noise = BandedNoise(key, config.components.rule.bands)
        return cls(mechanism, key, noise, secret, settings.metrics == "outside", rounds)

    def sum_updates(self, rule: Gaussian, updates: Iterable[Update], state: State) -> NoisySum:
        """Add up a round's updates with noise. Further computations with the sum keep the guarantee.

        Args:
            rule: Aggregation rule of the run.
            updates: Updates in client order. They can be read once.
            state: State before the round.

        Returns:
            The noisy sum. Its metrics are empty unless ``privacy.metrics`` records metrics of clients, except for the clip of the
            round (``gaussian/clip``) if it is adaptive. It depends on noisy counts only.
        """
        normals = functools.partial(self.noise.draw, state.round_index)
        clip = float(state.tensors[_CLIP]["clip"]) if _CLIP in state.tensors else None
        of_run = self.mechanism
        summed = rule.sum_privately(updates, state.tensors, of_run.run_cohort, of_run.run_noise, normals, clip)
        metrics: Metrics = summed.metrics if self.outside else {}
        if isinstance(rule.clip, AdaptiveClip):
            metrics = {**metrics, "gaussian/clip": Ratio(rule.first_clip if clip is None else clip, 1)}
        return dataclasses.replace(summed, metrics=metrics)

    def keep_clip(self, rule: Gaussian, summed: NoisySum, state: State) -> State:
        """Store the clip of the next round in the state, if it changes from round to round."""
        if not isinstance(rule.clip, AdaptiveClip):
            return state
        clip = {"clip": torch.tensor(summed.clip, dtype=torch.float32)}
        return dataclasses.replace(state, tensors={**state.tensors, _CLIP: clip})

    @property
    def metric(self) -> str:
        """Name of epsilon in the metrics table. It marks guarantees for other numbers of clients than the run's."""
        return "privacy/epsilon_as_if" if self.mechanism.simulated else "privacy/epsilon"

    def describe(self, rounds: int, epsilon: float) -> str:
        """Describe the guarantee after a number of rounds."""
        return describe_epsilon(self.mechanism, rounds, epsilon, self.secret)

    def keep_rows(self, rows: RoundRows, report: RoundReport) -> None:
        """Remove a round's metrics of clients from its rows and its report, unless ``privacy.metrics`` records them."""
        if not self.outside:
            report.loss = math.nan
            rows[:] = [row for row in rows if not row.client and row.split != "train" and row.metric != TIMELINE]

    def generator(self, round_index: int, purpose: str) -> np.random.Generator | None:
        """Return a generator for secret draws of a round; ``None``: use the run's seed."""
        return self.key.generator(round_index, purpose) if self.secret else None

    def check_plan(self, planned: int, drawn: int, name: str) -> None:
        """Reject methods with a sampling of clients of their own, because the accounting would not hold.

        Raises:
            ConfigError: The numbers differ.
        """
        if planned != drawn:
            raise ConfigError(
                f"method {name!r} plans {planned} clients where {drawn} are drawn, so the sampling of clients is unknown. Rule "
                f"gaussian needs a method with the default cohort"
            )

    def explain_end(self, rounds: int) -> str:
        """Return the reason of ``run.stop`` to end the training after a number of rounds; empty: it continues."""
        if self.limit is None or rounds < self.limit:
            return ""
        now, mark = self.mechanism.compute_epsilon(rounds), mark_epsilon(list_warnings(self.mechanism, self.secret))
        return f"another round would exceed run.stop.epsilon, now {now:.3g}{mark}"


def read_mechanism(kind: type[_Mechanism], stored: Mapping[str, Any]) -> _Mechanism:
    """Read the mechanism of a run from the group ``privacy`` of its ``run.json``.

    Raises:
        RunDirectoryError: A value is missing or of a wrong type.
    """
    with translate_failures(
        lambda reason: RunDirectoryError(f"run.json: the group privacy is damaged ({reason}). Restore it from a copy")
    ):
        types = get_type_hints(kind)
        values = {
            field.name: stored[field.name]
            if field.default is dataclasses.MISSING
            else stored.get(field.name, field.default)
            for field in dataclasses.fields(kind)
        }
        if any(type(value) is not types[name] for name, value in values.items()):
            raise ValueError("a value has a wrong type")
        return kind(**values)
