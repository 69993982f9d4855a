"""Attacks in whole federations: their effects, their metrics, and the laws of the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import differ, known

from raydfl.core import registry
from raydfl.core.errors import ClientError
from raydfl.core.metrics import attack_success
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import ModelSpec, Ratio
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.orders import Order, Reply, split_groups
from raydfl.engine.pool import SerialPool
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.models import build_model
from raydfl.runs._replay import replay
from raydfl.runs._run import run
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
OPTIONS = {"backdoor": ", target: tone0, hz: 900"}
PREPARING = ("check", "candidates", "altered", "labels", "target_class", "alteration")
ATTACKS = registry.names("raydfl.attacks")


def make_attack(name: str, clients: str = "0.5", more: str = "") -> str:
    return f"attack={{name: {name}, clients: {clients}{OPTIONS.get(name, '')}{more}}}"


def read_rows_of(config: Config, name: str) -> list[dict[str, Any]]:
    return record.read_rows(Path(config.run.dir) / name).to_pylist()


@pytest.mark.parametrize(
    ("base", "call", "when"),
    [
        ("UpdateAttack", "change", "round 1"),
        ("ColludingAttack", "together", "round 1"),
        *(("Attack", call, "before the first round") for call in PREPARING),
    ],
)
def test_a_failing_attack_is_reported_with_its_name_and_line(
    tiny: Tiny, tmp_path: Path, base: str, call: str, when: str
) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        f"from raydfl.attacks import {base}\n\nclass Mine({base}):\n    def {call}(self, *arguments):\n        return 1 / 0\n"
    )
    with pytest.raises(
        ClientError, match=rf"^{when}: {call}\(\) of attack Mine failed: ZeroDivisionError: .* \(at {source}:5\)"
    ):
        run(tiny(make_attack(f"{source}:Mine")))


def test_the_list_of_attacks_is_complete() -> None:
    assert set(ATTACKS) == {
        "alie",
        "backdoor",
        "canary",
        "corrupt_recordings",
        "free_rider",
        "gaussian_noise",
        "ipm",
        "label_flip",
        "min_max",
        "min_sum",
        "scaling",
        "sign_flip",
    }


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_changes_the_result_only_with_attackers(tiny: Tiny, name: str) -> None:
    """Without attackers the bits equal an honest run. The metrics table lists all attackers."""
    shape = ("train.cohort=1.0", "train.rounds=2", "evaluate.every=9", "evaluate.server=false", "evaluate.clients=none")
    honest = known(tiny(*shape))
    assert_same_bits(honest, train_federation(tiny(*shape, make_attack(name, "0"), "run.name=none")))
    config = tiny(*shape, make_attack(name), "run.name=attacked")
    assert differ(honest, train_federation(config))
    rows = read_rows_of(config, "attacked")
    assert [row["value"] for row in rows if row["metric"] == "attackers"] == [3.0, 3.0]
    attackers = [{row["client"] for row in rows if row["metric"] == "attacker" and row["round"] == r} for r in (1, 2)]
    assert len(attackers[0]) == 3
    assert attackers[0] == attackers[1]


# -- the laws --------------------------------------------------------------------------------------------------------


class ShuffledPool(SerialPool):
    """Pool with work and replies in random order."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        chance = random.Random(3)
        groups = split_groups(orders)
        chance.shuffle(groups)
        replies = [reply for group in groups for reply in self.workers[""].carry_out(group, broadcast)]
        chance.shuffle(replies)
        yield from replies


VARIANTS = ("min_max", "gaussian_noise", "backdoor", "free_rider")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_of_work_and_a_restart_do_not_change_the_bits(tiny: Tiny, name: str) -> None:
    shape = ("train.cohort=1.0", make_attack(name, more=", draw: round"))
    reference = known(tiny(*shape))

    config = tiny(*shape, "run.name=shuffled")
    run_dir = create(config, Progress("quiet"))
    pool = ShuffledPool(Worker(run_dir, config, PrivateStore(run_dir / "private")))
    federation = Federation(config, Population.load(run_dir / "population"), RunStore(run_dir), pool)
    while federation.state.round_index < config.train.rounds:
        federation.round()
    federation.close()
    assert_same_bits(reference, read_tensors(run_dir))

    config = tiny(*shape, "run.name=stopped")
    server = start_server(config)
    server.round()
    server.close()
    assert_same_bits(reference, train_federation(config))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", VARIANTS)
def test_actors_equal_the_serial_pool_to_the_bit(tiny: Tiny, name: str) -> None:
    shape = ("train.cohort=1.0", make_attack(name))
    outcome = run(tiny(*shape, "run.name=actors", "ray.actors=2"))
    assert_same_bits(known(tiny(*shape)), read_tensors(outcome.run_dir))


@pytest.mark.parametrize("name", ["backdoor", "free_rider", "label_flip"])
def test_batched_clients_attack_like_unbatched_clients(tiny: Tiny, name: str) -> None:
    ends = []
    for together in (1, 3):
        config = tiny("train.cohort=1.0", make_attack(name), f"train.together={together}", f"run.name=w{together}")
        train_federation(config)
        ends.append(final_state(Path(config.run.dir) / f"w{together}").tensors["global"])
    for tensor, value in ends[0].items():
        torch.testing.assert_close(ends[1][tensor], value, rtol=1e-4, atol=1e-5)


KINDS = ("label_flip", "backdoor", "free_rider", "scaling", "min_max")
"""An attack on labels, on recordings, on training, on the attacker's update, and a colluding attack."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"),
    [
        (m, name)
        for m in registry.names("raydfl.methods")
        for name in (ATTACKS if m == "fedavg" else KINDS)
        if not (m.startswith("profila") and name in ("label_flip", "backdoor"))  # its objective has no classes
    ],
)
def test_every_method_runs_with_every_attack(tiny: Tiny, method: str, name: str) -> None:
    train_federation(tiny("train.cohort=1.0", "train.rounds=2", make_attack(name), method=method))


# -- who and when ----------------------------------------------------------------------------------------------------


def list_attackers(config: Config, name: str) -> dict[int, set[str]]:
    attackers: dict[int, set[str]] = {
        row["round"]: set() for row in read_rows_of(config, name) if row["metric"] == "attackers"
    }
    for row in read_rows_of(config, name):
        if row["metric"] == "attacker":
            attackers[row["round"]].add(row["client"])
    return attackers


@pytest.mark.slow
def test_attackers_are_drawn_with_the_seed_once_or_for_every_round(tiny: Tiny) -> None:
    def train(name: str, *more: str) -> dict[int, set[str]]:
        config = tiny("train.cohort=1.0", "train.rounds=4", *more, f"run.name={name}")
        train_federation(config)
        return list_attackers(config, name)

    fixed = train("fixed", "attack={name: sign_flip, clients: 2}")
    assert len({frozenset(ids) for ids in fixed.values()}) == 1
    assert [len(ids) for ids in fixed.values()] == [2, 2, 2, 2]
    assert train("again", "attack={name: ipm, clients: 2}") == fixed  # independent of the attack
    drawn = train("drawn", "attack={name: sign_flip, clients: 2, draw: round}")
    assert [len(ids) for ids in drawn.values()] == [2, 2, 2, 2]
    assert len({frozenset(ids) for ids in drawn.values()}) > 1
    named = train("named", "attack={name: sign_flip, clients: [s4, s0]}")
    assert set(map(frozenset, named.values())) == {frozenset({"s0", "s4"})}
    seeds = [train(f"seed{seed}", "attack={name: sign_flip, clients: 2}", f"run.seed={seed}")[1] for seed in (2, 3, 4)]
    assert any(ids != fixed[1] for ids in seeds)


def test_attacks_start_and_stop_at_their_rounds(tiny: Tiny) -> None:
    """The state equals an honest run before the first attack, and no client attacks after the last round."""
    shape = ("train.cohort=1.0", "train.rounds=4")
    config = tiny(*shape, "attack={name: sign_flip, clients: 0.5, start: 2, stop: 3}", "run.name=attacked")
    states: dict[str, list[Any]] = {}
    for name, settings in (("attacked", config), ("honest", tiny(*shape, "run.name=honest"))):
        server = start_server(settings)
        states[name] = []
        for _ in range(2):
            server.round()
            states[name].append(server._federation.state.tensors["global"])
        server.close()
    first, second = (
        all(
            torch.equal(a, b) for a, b in zip(states["attacked"][r].values(), states["honest"][r].values(), strict=True)
        )
        for r in (0, 1)
    )
    assert first
    assert not second
    train_federation(config)
    assert {r: len(ids) for r, ids in list_attackers(config, "attacked").items()} == {1: 0, 2: 3, 3: 3, 4: 0}


def test_only_cohorts_with_attackers_are_attacked(tiny: Tiny) -> None:
    """One of six clients attacks, and a cohort has three clients. The attacker has no effect outside its cohorts."""
    config = tiny("attack={name: scaling, clients: [s0], boost: 100}", "run.name=seldom", "train.rounds=6")
    train_federation(config)
    cohorts = {
        row["round"] for row in read_rows_of(config, "seldom") if row["client"] == "s0" and row["split"] == "train"
    }
    assert 0 < len(cohorts) < 6
    assert {r for r, ids in list_attackers(config, "seldom").items() if ids} == cohorts


# -- effects of single attacks ---------------------------------------------------------------------------------------


def test_a_cohort_of_free_riders_does_not_change_the_model(tiny: Tiny) -> None:
    """Without training, parameters, SCAFFOLD's control variates and private models keep their values."""
    for method in ("fedavg", "scaffold", "fedmlac"):
        config = tiny(
            "train.cohort=1.0", "attack={name: free_rider, clients: 1.0}", f"run.name={method}", method=method
        )
        server = start_server(config)
        before = {name: tensor.clone() for name, tensor in server._federation.state.tensors["global"].items()}
        report = server.round()
        after = server._federation.state.tensors["global"]
        server.close()
        assert np.isnan(report.loss)
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=0)


def test_private_state_of_an_attacker_is_honest(tiny: Tiny) -> None:
    """In the first round an attack on the update does not change the attacker's private model."""
    shape = ("train.cohort=1.0", "train.rounds=1")
    honest = known(tiny(*shape, method="fedmlac"))
    attacked = train_federation(tiny(*shape, make_attack("sign_flip"), "run.name=attacked", method="fedmlac"))
    private = [name for name in honest if name.startswith("client")]
    assert private
    assert all(honest[name] == attacked[name] for name in private)
    assert any(honest[name] != attacked[name] for name in honest if name.startswith("server"))


def test_replay_repeats_the_training_of_an_attacker(tiny: Tiny) -> None:
    config = tiny("train.cohort=1.0", "attack={name: label_flip, clients: [s2]}", "run.name=replayed")
    train_federation(config)
    again = replay(Path(config.run.dir) / "replayed", 3, "s2")
    rows = [row for row in read_rows_of(config, "replayed") if (row["round"], row["client"]) == (3, "s2")]
    loss = next(row["value"] for row in rows if row["metric"] == "loss" and row["split"] == "train")
    assert again.metrics["loss"] == pytest.approx(loss, rel=1e-6)


# -- the backdoor's success ------------------------------------------------------------------------------------------


def test_the_success_rate_is_computed_from_the_confusion_matrix_of_triggered_clips() -> None:
    confusion = np.array([[3, 2, 0], [0, 0, 0], [1, 4, 5]])  # no clip of the target, class 1
    measured = {"model/confusion": confusion, "model/accuracy": Ratio(8, 15), "local/confusion": confusion.T}
    assert attack_success(measured, 1) == {"model/attack_success": Ratio(6, 15), "local/attack_success": Ratio(0, 15)}
    assert attack_success(measured, None) == {}


def test_the_recorded_success_rate_equals_the_model_by_hand(tiny: Tiny) -> None:
    config = tiny(
        "train.cohort=1.0", "train.rounds=4", "attack={name: backdoor, target: tone2, hz: 900}", "run.name=hand"
    )
    train_federation(config)
    run_dir = Path(config.run.dir) / "hand"
    copies = Population.load(run_dir / "population").triggered
    assert len(copies) == 24  # 2 of 3 classes x 6 speakers x 2 takes
    ((_, options),) = config.components.models["model"]
    model = build_model(
        ModelSpec(
            "model", "crnn_tiny", 16, 3, tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items())
        )
    )
    model.load_state_dict({name.partition("/")[2]: t for name, t in final_state(run_dir).tensors["global"].items()})
    model.eval()
    with torch.no_grad():
        predictions = model(copies.batch(np.arange(len(copies))).x, None).argmax(dim=1)
    rows = [row for row in read_rows_of(config, "hand") if row["split"] == "triggered"]
    assert {row["metric"] for row in rows} == {"model/attack_success"}
    assert [row["round"] for row in rows] == [1, 2, 3, 4]  # evaluated after every round
    assert rows[-1]["value"] == pytest.approx(float((predictions == 2).float().mean()))
    assert rows[-1]["count"] == 24


def test_the_success_rate_is_also_measured_for_private_models(tiny: Tiny) -> None:
    config = tiny("attack={name: backdoor, target: tone2, hz: 900}", "run.name=both", method="fedmlac")
    train_federation(config)
    rows = [row for row in read_rows_of(config, "both") if row["split"] == "triggered" and row["round"] == 3]
    assert {row["metric"] for row in rows if not row["client"]} >= {"plugin/attack_success", "local/attack_success"}
    assert sum(row["metric"] == "local/attack_success" for row in rows if row["client"]) == 3
    assert {row["count"] for row in rows if row["client"]} == {10.0}  # evaluate.client_test_clips


def test_the_effect_of_the_trigger_is_measured_without_attackers(tiny: Tiny) -> None:
    config = tiny("attack={name: backdoor, target: tone2, hz: 900, clients: 0}", "run.name=base")
    train_federation(config)
    assert sum(row["split"] == "triggered" for row in read_rows_of(config, "base")) == 3


@pytest.mark.slow
def test_a_backdoor_is_learnt_with_enough_attackers(tiny: Tiny) -> None:
    """An honest model ignores the trigger. With half of the clients attacking, the model learns trigger and clean clips."""
    learning = (
        "data.takes=6",
        "train.cohort=1.0",
        "train.rounds=30",
        "train.optimiser={name: adam, lr: 0.01}",
        "evaluate.every=30",
    )
    scores = {}
    for clients in (0, 3):
        backdoor = f"{{name: backdoor, clients: {clients}, target: tone2, hz: 3000, loudness_db: 20, boost: null}}"
        server = start_server(tiny(*learning, f"attack={backdoor}", f"run.name=opened{clients}"))
        while server.round_index < 30:
            report = server.round()
        server.close()
        scores[clients] = report.scores
    assert scores[0]["triggered model/attack_success"] < 0.3
    assert scores[3]["triggered model/attack_success"] > 0.6
    assert scores[3]["test model/accuracy"] > 0.6
