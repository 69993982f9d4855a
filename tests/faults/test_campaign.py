"""Kills at random moments on a cluster of several nodes, by benchmarks/kills.py with fewer kills."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from kills import PLAN, Kill, campaign, make_tiny_config, run_undisturbed, table

from raydfl.core import registry
from raydfl.testing import read_tensors

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("espeakng_loader") is None, reason="the package espeakng-loader is not installed"
)


def test_the_table_lists_kills_and_their_effects() -> None:
    rows = [Kill("fedavg", 1, "node", 7, 2.04, True), Kill("fedavg", 3, "driver", 9, 3.5, False)]
    assert table(rows).splitlines()[2:] == [
        "| fedavg | 1 | node | after round 7 | 2.0 s | yes |",
        "| fedavg | 3 | driver | after round 9 | 3.5 s | **no** |",
    ]


@pytest.mark.slow
def test_runs_are_compared_bit_by_bit(tmp_path: Path) -> None:
    short = ["ray.actors=0", "train.rounds=2"]
    runs = [
        read_tensors(run_undisturbed(make_tiny_config("fedmlac", tmp_path, f"run{number}", *short, f"run.seed={seed}")))
        for number, seed in enumerate((1, 1, 2))
    ]
    assert runs[0] == runs[1]
    assert runs[0].keys() == runs[2].keys()
    assert runs[0] != runs[2]
    assert any(name.startswith("client ") for name in runs[0])


@pytest.mark.parametrize("method", registry.names("raydfl.methods"))
def test_every_method_has_a_campaign(tmp_path: Path, method: str) -> None:
    assert make_tiny_config(method, tmp_path, "x").components.method is not None


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    plans = {"fedmlac": PLAN[:4], "scaffold": ("driver", "client actor")}
    kills = list(campaign(plans, 11, tmp_path))
    assert [(kill.method, kill.what) for kill in kills] == [
        (method, what) for method, plan in plans.items() for what in plan
    ]
    assert all(kill.equal for kill in kills), table(kills)
