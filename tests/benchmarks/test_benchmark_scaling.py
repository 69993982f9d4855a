"""The synthetic populations and runs of benchmarks/scaling.py have their documented properties."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import scaling

from raydfl.cluster.server import Server
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.engine.storage.store import RunStore
from raydfl.runs.folder import write_new_run

SMALL = scaling.Variant("small", clients=8, cohort=3, examples=7, model={"name": "mlp"}, aged=True)


def build_scaled_population(variant: scaling.Variant, folder: Path) -> Population:
    config = scaling.configuration(variant, "fedavg", folder, 0)
    return scaling.enlarge(build_population(config.data, 0), variant.clients, variant.examples)


def test_clients_get_consecutive_clips(tmp_path: Path) -> None:
    population = build_scaled_population(SMALL, tmp_path)
    assert len(population) == 8
    assert {population.num_examples(index) for index in range(8)} == {7}
    everything = np.concatenate([population.data(index).train.clips for index in range(8)])
    assert everything.tolist() == list(range(56))
    store, examples = population.stores[0], population.data(3).train
    batch = examples.batch(np.arange(7))
    assert np.array_equal(batch.x[2].numpy(), store.clip(3 * 7 + 2))
    # Noise assigns its clips to the classes in turn.
    assert batch.y.tolist() == [clip % 10 for clip in range(21, 28)]


def test_clips_repeat_if_clients_need_more(tmp_path: Path) -> None:
    population = build_scaled_population(dataclasses.replace(SMALL, clients=100), tmp_path)
    assert population.data(99).train.clips.tolist() == [clip % 60 for clip in range(693, 700)]


def test_an_aged_run_can_be_continued(tmp_path: Path) -> None:
    config = scaling.configuration(SMALL, "fedper", tmp_path, 0)
    run_dir = tmp_path / "run"
    population = scaling.enlarge(build_population(config.data, 0), SMALL.clients, SMALL.examples)
    write_new_run(run_dir, config, population, {})
    scaling.age(run_dir, config, population)
    store = RunStore(run_dir)
    commit = store.load(store.latest() or "")
    assert list(commit.private) == list(range(8))
    assert len({ref.segment for ref in commit.private.values()}) == 3  # eight clients, three in each round
    server = Server(run_dir, config)
    assert server.round().round == 4
    server.close()


@pytest.mark.parametrize("method", list(scaling.METHODS))
def test_every_method_can_be_measured(method: str, tmp_path: Path) -> None:
    seconds = scaling.measure([SMALL], method, tmp_path, actors=0, turns=2, rounds=1)
    assert [set(turn) for turn in seconds["small"]] == [{"train_and_aggregate", "commit", "round", "opening"}] * 2
    assert all(turn["round"] >= turn["train_and_aggregate"] > 0 for turn in seconds["small"])


def test_the_table_contains_ratios_within_a_turn() -> None:
    variants = [SMALL, dataclasses.replace(SMALL, label="large", cohort=6)]
    turn = {"train_and_aggregate": 0.5, "commit": 0.25, "opening": 1.0}
    seconds = {
        "small": [{**turn, "round": 1.0}, {**turn, "round": 4.0}, {**turn, "round": 3.0}],
        "large": [{**turn, "round": 1.5}, {**turn, "round": 6.0}, {**turn, "round": 4.5}],
    }
    _, small, large = scaling.table(variants, seconds).splitlines()
    assert small.split() == ["small", "3000.0", "1000.00", "500.0", "250.0", "1000", "1.000", "(1.00-1.00)"]
    assert large.split() == ["large", "4500.0", "750.00", "500.0", "250.0", "1000", "1.500", "(1.50-1.50)"]
