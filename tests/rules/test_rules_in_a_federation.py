"""Every rule in a tiny federation: configured, recorded, stopped and resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import differ, known

from raydfl.cluster.server import Server
from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.types import Update
from raydfl.engine.config import Config
from raydfl.engine.storage import record as influence
from raydfl.engine.storage.record import MetricRow, read_rows, rows_path, to_rows, write_rows
from raydfl.methods.fedavg import FedAvg
from raydfl.rules import RULES
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation
from raydfl.training.step import Step

Tiny = Callable[..., Config]
QUICK = ["train.cohort=1.0", "train.rounds=2", "evaluate.every=9", "evaluate.clients=none", "evaluate.server=false"]
ROBUST = [name for name in RULES if name not in ("weighted_mean", "uniform_mean", "product_mean", "lpa", "gaussian")]


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        pytest.param(method, rule, marks=[] if method == "fedavg" or rule in few else [pytest.mark.slow])
        for method, few in (("fedavg", ()), ("fedmlac", ("median", "foolsgold")), ("fedadam", ("krum", "foolsgold")))
        for rule in ROBUST
    ],
)
def test_any_method_takes_any_rule_by_name(tiny: Tiny, method: str, rule: str) -> None:
    mean = known(tiny(*QUICK, "method.rule=weighted_mean", method=method))
    robust = train_federation(tiny(*QUICK, "run.name=robust", f"method.rule={rule}", method=method))
    assert differ(mean, robust)
    assert set(mean) == {name for name in robust if not name.startswith("server foolsgold/")}


@pytest.mark.parametrize("rule", ["foolsgold", "{name: dnc, sample: 20}"])
def test_rules_with_a_memory_or_random_draws_resume_to_the_same_bits(tiny: Tiny, rule: str) -> None:
    setting = [*QUICK, "train.cohort=0.5", "train.rounds=4", f"method.rule={rule}"]
    reference = known(tiny(*setting))
    config = tiny(*setting, "run.name=stopped")
    server = start_server(config)
    for _ in range(2):
        server.round()
    server.finish()
    server.close()
    run_dir = Path(config.run.dir) / "stopped"
    server = Server(run_dir, config)
    while server.round_index < config.train.rounds:
        server.round()
    server.finish()
    server.close()
    assert_same_bits(reference, read_tensors(run_dir))
    assert any(name.startswith("server foolsgold/global ") for name in reference) == (rule == "foolsgold")


def test_the_metrics_table_contains_the_influence_of_each_client(tiny: Tiny) -> None:
    config = tiny(*QUICK, "method.rule={name: multi_krum, byzantine: 0.34}")
    train_federation(config)
    rows = [row for row in to_rows(read_rows(Path(config.run.dir) / "tiny")) if row.round == 2]
    by_name = {row.metric: row for row in rows if not row.client}
    cohort = [row.client for row in rows if row.client and row.metric == "loss"]
    influences = by_name["rule/influences"].array
    assert influences is not None
    assert len(influences) == len(cohort) == 6
    assert set(influences) == {0.0, 1.0}
    run_dir = Path(config.run.dir) / "tiny"
    by_round = influence.influences(run_dir)
    assert set(by_round) == {1, 2}
    assert by_round[2] == dict(zip(cohort, influences, strict=True))
    (excluded,) = (client for client, value in by_round[2].items() if value == 0)
    assert influence.influences(run_dir, until_round=1).keys() <= {1, 2}
    left_out = by_name["rule/left_out"]
    assert excluded in cohort
    assert (
        left_out.value * left_out.count == np.count_nonzero(influences == 0) == 1
    )  # f is 2 of 6, but at most (6 - 3) / 2
    assert (by_name["multi_krum/byzantine"].value * 6, by_name["multi_krum/byzantine"].count) == (1, 6)


def test_clients_with_rejected_updates_have_no_influence(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected updates are not in the array, and the influences of accepted updates stay with their clients."""
    config = tiny(*QUICK, "run.max_failed=1.0", "method.rule=krum")
    server = start_server(config)
    local = FedAvg.local

    def broken(self: FedAvg, step: Step) -> Update:
        update = local(self, step)
        if step.client.index == 2:
            return dataclasses.replace(
                update, tensors={name: value * float("nan") for name, value in update.tensors.items()}
            )
        return update

    monkeypatch.setattr(FedAvg, "local", broken)
    while server.round_index < 2:
        server.round()
    server.finish()
    server.close()
    influences = influence.influences(Path(config.run.dir) / "tiny")
    assert [len(of_round) for of_round in influences.values()] == [5, 5]
    assert [sum(of_round.values()) for of_round in influences.values()] == [1.0, 1.0]


def test_rules_without_influences_list_no_client_and_a_torn_metrics_table_is_an_error(
    tiny: Tiny, tmp_path: Path
) -> None:
    config = tiny(*QUICK, "method.rule=median")
    train_federation(config)
    assert influence.influences(Path(config.run.dir) / "tiny") == {}
    (tmp_path / "torn" / "rows").mkdir(parents=True)
    row = MetricRow(1, "train", "", "server", "rule/influences", float("nan"), 1.0, np.array([1.0]))
    write_rows(rows_path(tmp_path / "torn", 1), [row])
    with pytest.raises(RunDirectoryError, match="round 1 has influences of 1 updates, but rows of 0 clients"):
        influence.influences(tmp_path / "torn")


@pytest.mark.parametrize("rule", [name for name, cls in RULES.items() if cls.relative])
def test_rules_relative_to_the_server_are_rejected_for_methods_that_send_changes(tiny: Tiny, rule: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"method.rule: rule {RULES[rule].__name__} needs updates near .*'scaffold' also sends changes",
    ):
        tiny(f"method.rule={rule}", method="scaffold")


@pytest.mark.parametrize("rule", ["median", "multi_krum", "geometric_median", "dnc"])
def test_rules_work_with_control_variates(tiny: Tiny, rule: str) -> None:
    mean = known(tiny(*QUICK, method="scaffold"))
    assert differ(mean, train_federation(tiny(*QUICK, "run.name=robust", f"method.rule={rule}", method="scaffold")))
