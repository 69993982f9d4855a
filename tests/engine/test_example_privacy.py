"""Runs with ``train.optimiser.private``. Oracles: dp_accounting, equal bits, and the bytes of all files."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from helpers import finish_in, stop_after
from tiny_federation import TESTS

from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.noise_key import KEY_FILE, NoiseKey
from raydfl.data import Population
from raydfl.engine.accounting import ExampleMechanism
from raydfl.engine.config import Config
from raydfl.engine.storage import read_about, read_rows, to_rows
from raydfl.runs import Progress, replay, resume, run
from raydfl.runs.folder import create
from raydfl.testing import assert_same_bits, read_tensors, train_federation

pytest.importorskip("dp_accounting")
Tiny = Callable[..., Config]
PRIVATE = ("train.optimiser.private={clip: 0.5, noise: 1.5}", "evaluate.clients=none")
SEED = "privacy.key=seed"


def folder_of(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def rows_of(run_dir: Path, metric: str) -> list[Any]:
    return to_rows(read_rows(run_dir, 10**6, where=pc.field("metric") == metric))


def compute_by_hand(noise: float, batch: int, clips: int, steps: int, delta: float) -> float:
    """Compose the events of dp_accounting without raydfl."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3)
    event = dp_accounting.PoissonSampledDpEvent(min(batch, clips) / clips, dp_accounting.GaussianDpEvent(noise))
    return float(accountant.compose(event, steps).get_epsilon(delta))


@pytest.mark.parametrize(
    ("noise", "batch", "clips", "steps", "delta"),
    [(1.1, 16, 60, 8, 0.01), (0.7, 4, 40, 30, 1e-3), (2.0, 8, 8, 5, 0.1), (1.0, 8, 5, 3, 0.1)],
)
def test_epsilon_equals_a_manual_accounting(noise: float, batch: int, clips: int, steps: int, delta: float) -> None:
    found = ExampleMechanism(batch, noise, delta).compute_epsilon(clips, steps)
    assert found == pytest.approx(compute_by_hand(noise, batch, clips, steps, delta), abs=1e-9)


def test_the_median_is_over_clients_and_groups_are_upper_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = ExampleMechanism(4, 2.0, 0.05)
    clients = {(n, 2 + n % 3): 1 + n % 2 for n in range(5, 11)}
    exact = sorted(
        epsilon for (n, steps), count in clients.items() for epsilon in [mechanism.compute_epsilon(n, steps)] * count
    )
    assert mechanism.summarise(clients) == (exact[-1], float(np.median(exact)))
    monkeypatch.setattr("raydfl.engine.accounting._MOST_EPSILONS", 2)
    largest, median = mechanism.summarise(clients)
    assert largest >= exact[-1]
    assert median >= float(np.median(exact))
    assert mechanism.summarise({}) == (0.0, 0.0)


def test_the_steps_within_a_limit_are_the_most_that_reach_it() -> None:
    mechanism = ExampleMechanism(4, 2.0, 0.05)
    limit = mechanism.compute_epsilon(10, 7)
    assert mechanism.count_steps(limit, {10: 100, 1000: 5}) == {10: 7, 1000: 5}


@pytest.mark.parametrize("rest", [(), ("train.optimiser.keep=true", "train.optimiser.momentum=0.9")])
def test_a_resumed_run_draws_the_same_batches_and_noise(tiny: Tiny, rest: tuple[str, ...]) -> None:
    config = tiny(*PRIVATE, *rest)
    stop_after(config, 1)
    run_dir = folder_of(config)
    key = (run_dir / KEY_FILE).read_bytes()
    copy = run_dir.with_name("copy")
    create(tiny(*PRIVATE, *rest, "run.name=copy"), Progress("quiet"))
    (copy / KEY_FILE).write_bytes(key)
    about = json.loads((copy / "run.json").read_text())
    about["privacy"]["key"] = NoiseKey(key).fingerprint
    (copy / "run.json").write_text(json.dumps(about))
    assert_same_bits(finish_in(run_dir, config), finish_in(copy, tiny(*PRIVATE, *rest, "run.name=copy")))


def test_two_runs_have_different_keys_unless_the_seed_is_the_key(tiny: Tiny) -> None:
    first, second = (train_federation(tiny(*PRIVATE, "train.rounds=1", f"run.name={name}")) for name in "ab")
    assert first != second
    first, second = (train_federation(tiny(*PRIVATE, SEED, "train.rounds=1", f"run.name={name}")) for name in "cd")
    assert_same_bits(first, second)


@pytest.mark.parametrize("actors", [1, 2])
def test_actors_give_the_same_bits(tiny: Tiny, ray_session: None, actors: int) -> None:
    serial = train_federation(tiny(*PRIVATE, SEED, "run.name=serial"))
    config = tiny(*PRIVATE, SEED, f"ray.actors={actors}", "ray.cpus=0.5", "run.name=parallel")
    run(config, Progress("quiet"))
    assert_same_bits(serial, read_tensors(folder_of(config)))


def test_batches_of_clients_do_not_change_a_private_run(tiny: Tiny) -> None:
    alone = train_federation(tiny(*PRIVATE, SEED, "train.rounds=1", "run.name=alone"))
    grouped = train_federation(tiny(*PRIVATE, SEED, "train.rounds=1", "train.together=3", "run.name=grouped"))
    assert_same_bits(alone, grouped)


def _expect(config: Config) -> tuple[ExampleMechanism, Mapping[str, int]]:
    population = Population.load(folder_of(config) / "population", features=False)
    clips = dict(zip(population.ids, map(int, population.sizes()), strict=True))
    return ExampleMechanism(config.train.batch_size, 1.5, max(clips.values()) ** -1.1), clips


def test_epsilon_is_in_the_table_the_description_and_the_report(tiny: Tiny) -> None:
    """The oracle counts the steps of the clients in each round's own rows."""
    shown, config = io.StringIO(), tiny(*PRIVATE, SEED)
    result = run(config, Progress("lines", shown))
    mechanism, clips = _expect(config)
    steps: Counter[str] = Counter()
    for row in rows_of(result.run_dir, "privacy/steps"):
        assert row.value == math.ceil(clips[row.client] / 8)
        steps[row.client] += int(row.value)
    assert len(rows_of(result.run_dir, "privacy/steps")) == 9  # three clients in three rounds
    epsilons = [mechanism.compute_epsilon(clips[client], count) for client, count in steps.items()]
    assert rows_of(result.run_dir, "privacy/epsilon")[-1].value == max(epsilons)
    assert rows_of(result.run_dir, "privacy/epsilon_median")[-1].value == float(np.median(epsilons))
    privacy = read_about(result.run_dir)["privacy"]
    assert (privacy["epsilon"], privacy["median"], privacy["rounds"]) == (max(epsilons), float(np.median(epsilons)), 3)
    mark = "for study: anyone who knows the seed can subtract the noise"
    assert (privacy["key"], privacy["unit"], privacy["warning"]) == (None, "clip", mark)
    lines = shown.getvalue().splitlines()
    line = next(line for line in lines if line.startswith("round 3/3"))
    assert f"epsilon {max(epsilons):.3g}, median {float(np.median(epsilons)):.3g} ({mark})" in line
    assert "loss" not in line
    page = (result.run_dir / "report.html").read_text()
    assert f"epsilon {max(epsilons):.3g} (largest of the clients; median" in page
    assert mark in page
    assert not [row for row in to_rows(read_rows(result.run_dir, 10**6)) if row.split == "train"]
    assert "learning rate" not in page


def test_metrics_of_clients_are_recorded_only_outside_the_guarantee(tiny: Tiny) -> None:
    config = tiny(*PRIVATE, "privacy.metrics=outside", "train.rounds=1")
    result = run(config, Progress("quiet"))
    losses = [row for row in rows_of(result.run_dir, "loss") if row.client]
    assert len(losses) == 3
    assert "outside this guarantee" in (result.run_dir / "report.html").read_text()
    assert replay(result.run_dir, 1, losses[0].client).metrics["loss"] == losses[0].value


@pytest.mark.slow
def test_the_epsilon_limit_ends_the_training_before_a_client_exceeds_it(tiny: Tiny) -> None:
    all_clients = (*PRIVATE, "train.cohort=1.0")
    run(tiny(*all_clients, "train.rounds=1", "run.name=first"), Progress("quiet"))
    mechanism, clips = _expect(tiny(*all_clients, "run.name=first"))
    spent = [max(mechanism.compute_epsilon(n, r * math.ceil(n / 8)) for n in clips.values()) for r in (1, 2, 3)]
    limit = (spent[1] + spent[2]) / 2
    result = run(tiny(*all_clients, "train.rounds=9", f"run.stop={{epsilon: {limit}}}"), Progress("quiet"))
    assert (result.round, result.finished) == (2, True)
    assert "would exceed run.stop.epsilon" in result.ended
    assert resume(result.run_dir).round == 2
    assert resume(result.run_dir, ["run.stop=null", "train.rounds=3"]).round == 3
    assert read_about(result.run_dir)["privacy"]["epsilon"] == spent[2]
    early = tiny(*all_clients, f"run.stop={{epsilon: {spent[0] / 2}}}", "run.name=early")
    with pytest.raises(ConfigError, match=r"run.stop.epsilon: the first round of a client with .* already has epsilon"):
        run(early, Progress("quiet"))


@pytest.mark.slow
def test_the_key_is_in_no_other_file(tiny: Tiny, tmp_path: Path) -> None:
    result = run(tiny(*PRIVATE, "track={mlflow: true}"), Progress("quiet"))
    key = (result.run_dir / KEY_FILE).read_bytes()
    derived = NoiseKey(key).derive(0, "client c0, train")
    assert (result.run_dir / KEY_FILE).stat().st_mode & 0o777 == 0o600
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and path.name != KEY_FILE):
        content = path.read_bytes()
        assert key not in content, path
        assert derived._secret not in content, path


@pytest.mark.parametrize(
    "change",
    [
        "train.optimiser.private.clip=0.6",
        "train.optimiser.private.noise=1.0",
        "train.optimiser.private=null",
        "privacy.key=seed",
        "train.batch_size=4",
    ],
)
def test_a_resumed_run_keeps_its_mechanism(tiny: Tiny, change: str) -> None:
    config = tiny(*PRIVATE)
    stop_after(config, 1)
    with pytest.raises(RunDirectoryError, match=change.partition("=")[0].rpartition(".")[2]):
        resume(folder_of(config), [change])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["evaluate.clients=cohort"], "evaluate.clients: cohort measures models on the clients' clips"),
        (
            ["method.rule={name: gaussian, noise: 1.0}"],
            "method.rule: .* gaussian protects clients. Choose another rule",
        ),
        (["objective=contrast"], "objective: .*contrast compares the clips of a batch"),
        (["data.unlabelled={keep: 0.5}"], "data.unlabelled: .*several pools"),
        (["data.segment={frames: 8, stride: 8}", "data.features.seconds=null"], "data.segment: .*several segments"),
        (["train.deadline=5"], "train.deadline: .*the number of steps would depend on the time"),
        (["train.class_weights=balanced"], "train.class_weights: .*the weights come from a client's labels"),
        (["train.groups={name: ifca, groups: 2}"], "train.groups: .*clients would choose their group by their clips"),
        (
            ["method.name=fedmp", "method.speed_from=null"],
            "method: .*FedMP uses metrics of clients, which carry no noise",
        ),
        (["train.optimiser.clip_norm=1.0"], "Remove clip_norm"),
        (["run.reference={pooled: true}"], "run.reference: reference runs train on the clients' data"),
        (["train.optimiser.private.noise=0", "run.stop={epsilon: 1}"], "without noise epsilon is infinite"),
        (["train.optimiser.private.noise=-1"], "train.optimiser.private.noise"),
        (["train.optimiser.private.clip=.inf"], "clip is .inf, so no noise can hide a clip"),
    ],
)
def test_settings_outside_the_guarantee_are_rejected(tiny: Tiny, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*PRIVATE, *settings)


def test_batch_normalisation_is_rejected_before_the_first_round(tiny: Tiny) -> None:
    network = f"models.model={{name: {TESTS / 'networks.py:FrozenStem'}, frozen: false, dropout: 0.0}}"
    config = tiny(*PRIVATE, network)
    with pytest.raises(ConfigError, match=r"the layer 'stem.1' of models.model is a BatchNorm1d. It mixes examples"):
        run(config, Progress("quiet"))
    assert not folder_of(config).exists()
    frozen = network.replace("frozen: false", "frozen: true")
    assert run(tiny(*PRIVATE, frozen, "train.rounds=1", "run.name=frozen"), Progress("quiet")).finished


def test_a_method_that_reads_clips_outside_of_training_is_rejected(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"the method reads step.data.train, and noise protects only"):
        run(tiny(*PRIVATE, method="fedlc"), Progress("quiet"))
