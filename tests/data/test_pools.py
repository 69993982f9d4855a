"""Pools of training clips: hidden labels, and clips selected by a column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic.dataclasses import dataclass
from tiny_sets import Made

from raydfl.cli.describe import describe_data
from raydfl.core.errors import ConfigError, DataError
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
from raydfl.engine.config import make_config
from raydfl.testing import describe_population

Make = Callable[..., DataSettings]


def list_clips(population: Population, pool: str) -> list[int]:
    return sorted(c for i in range(len(population)) for c in population.data(i).pools[pool].clips.tolist())


def test_the_chosen_share_of_each_label_is_kept_and_the_rest_hidden(make_data: Make, tmp_path: Path) -> None:
    whole = build_population(make_data(), 1)
    population = build_population(make_data(unlabelled={"keep": 0.25, "use": 0.5}), 1)
    labels = Counter(label for i in range(len(whole)) for label in whole.data(i).train.labels.tolist())
    labelled_counts = Counter(
        label for i in range(len(population)) for label in population.data(i).train.labels.tolist()
    )
    assert labelled_counts == {label: int(0.25 * count) for label, count in labels.items()}
    labelled, unlabelled = list_clips(population, "labelled"), list_clips(population, "unlabelled")
    all_clips = list_clips(whole, "train")
    assert len(unlabelled) == (len(all_clips) - len(labelled)) // 2
    assert set(labelled) | set(unlabelled) <= set(all_clips)
    assert not set(labelled) & set(unlabelled)
    population.save(tmp_path)
    for restored in (population, Population.load(tmp_path)):
        parts = [whole.data(i).train for i in range(len(whole))]
        truth = {
            clip: label for part in parts for clip, label in zip(part.clips.tolist(), part.labels.tolist(), strict=True)
        }
        for i in range(len(restored)):
            data = restored.data(i)
            assert [*data.pools] == ["labelled", "unlabelled"]
            hidden = data.pools["unlabelled"]
            assert set(hidden.labels.tolist()) <= {-100}, "hidden labels must not reach training"
            assert hidden.columns["hidden_label"].tolist() == [truth[c] for c in hidden.clips.tolist()]
            assert set(data.train.columns["hidden_label"].tolist()) <= {-1}


def test_a_number_of_clips_of_each_label_stay_labelled(make_data: Make) -> None:
    population = build_population(make_data(unlabelled={"keep_clips": 2}), 1)
    assert population.label_counts().sum(axis=0).tolist() == [2, 2, 2, 2]


def test_a_pool_may_have_its_own_partition(make_data: Make) -> None:
    """As in table 5 of FedSTAR, labelled clips are dealt by class and unlabelled clips evenly.

    A client may have no labelled clip.
    """
    hidden = {"keep_clips": 2, "partition": {"by": "iid", "clients": 10}}
    partition = {"by": "dirichlet", "clients": 10, "alpha": 0.1, "minimum": 1}
    population = build_population(make_data(partition=partition, unlabelled=hidden), 1)
    sizes = [population.profile(i)["pools"] for i in range(len(population))]
    assert np.ptp([size["unlabelled"] for size in sizes]) <= 1
    assert min(size["labelled"] for size in sizes) == 0 < max(size["labelled"] for size in sizes)
    assert [size["labelled"] for size in sizes] == [population.num_examples(i) for i in range(len(population))]


def test_hidden_labels_affect_only_the_hidden_column(make_data: Make) -> None:
    """Pools and clients do not depend on the true labels of unlabelled clips."""

    def describe(shift: int) -> dict[str, Any]:
        options = {"name": f"{__file__}:PartlyLabelled", "shift": shift, "partition": {"by": "iid", "clients": 5}}
        return describe_population(build_population(make_data(unlabelled={}, **options), 3), False)

    assert describe(0) == describe(1)


@dataclass(frozen=True, kw_only=True)
class PartlyLabelled(Made):
    """Tones in which every third clip has no label. ``shift`` has no visible effect."""

    shift: int = 0

    def manifest(self) -> pa.Table:
        table = super().manifest()
        labels = [None if i % 3 == 0 else label for i, label in enumerate(table.column("label").to_pylist())]
        return table.set_column(table.column_names.index("label"), "label", pa.array(labels, pa.string()))


def test_clips_without_a_label_are_trained_unlabelled_and_never_tested(make_data: Make) -> None:
    population = build_population(make_data(name=f"{__file__}:PartlyLabelled", unlabelled={}), 1)
    assert (population.test.labels >= 0).all()
    assert len(population.test) == 16
    hidden = [population.data(i).pools["unlabelled"] for i in range(len(population))]
    assert {c for h in hidden for c in h.columns["hidden_label"].tolist()} == {-1}
    assert sum(map(len, hidden)) == sum(i % 3 == 0 and i % 5 != 0 for i in range(120))


def test_data_info_counts_pools_and_clips_without_a_label(make_data: Make) -> None:
    lines = "\n".join(describe_data(make_data(name=f"{__file__}:PartlyLabelled", unlabelled={}), 1))
    assert "without a label   40 clips" in lines
    assert "pools             labelled (64), unlabelled (32)" in lines
    assert "test set          16 clips" in lines


def test_a_test_share_counts_only_labelled_clips(make_data: Make) -> None:
    split = {"test": {"by": "clip", "fraction": 0.25}}
    population = build_population(make_data(name=f"{__file__}:PartlyLabelled", unlabelled={}, split=split), 1)
    assert np.bincount(population.test.labels).tolist() == [5, 5, 5, 5]


def test_pools_select_clips_by_a_column(make_data: Make) -> None:
    pools = {"late": {"column": "take", "values": [3, 4]}, "early": {"column": "take", "values": [2]}}
    population = build_population(make_data(pools=pools, columns=["take"]), 1)
    takes = {
        name: {
            population.columns["take"][c]
            for i in range(len(population))
            for c in population.data(i).pools[name].columns["take"]
        }
        for name in ("late", "early")
    }
    assert takes == {"late": {"3", "4"}, "early": {"2"}}
    assert population.data(0).train is not None
    assert population.data(0).train.clips.tolist() == population.data(0).pools["late"].clips.tolist()


def test_clients_hold_out_clips_of_each_labelled_pool(make_data: Make) -> None:
    """Half of each labelled pool is held out. Clips with hidden labels cannot be measured, so they are not held out."""
    pools = {"late": {"column": "take", "values": [3, 4]}, "early": {"column": "take", "values": [2]}}
    for validation in (0.5, {"by": "clip", "fraction": 0.5}):
        population = build_population(make_data(pools=pools, columns=["take"], split={"validation": validation}), 1)
        takes = population.columns["take"]
        for i in range(len(population)):
            data = population.data(i)
            held_out = Counter(takes[c] for c in data.validation.columns["take"].tolist())
            assert held_out["2"] == len(data.pools["early"]) > 0
            assert held_out["3"] + held_out["4"] == len(data.pools["late"]) > 0
    population = build_population(make_data(unlabelled={"keep": 0.5}, split={"validation": 0.5}), 1)
    data = population.data(0)
    assert len(data.validation) == len(data.pools["labelled"]) < len(data.pools["unlabelled"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"unlabelled": {"keep": 0.01}},
            r"keep 0.01 of \d+ training clips of label 'w0' is none. Set keep to at least 0.0",
        ),
        ({"unlabelled": {}}, "unlabelled is empty at every client: 0 of 96 training clips are without a label"),
        (
            {"name": f"{__file__}:PartlyLabelled"},
            r"40 of 120 clips have no label, the first w0/g0/0. .*data.unlabelled='\{\}'",
        ),
        (
            {"pools": {"a": {"column": "tak", "values": [1]}}},
            "data.pools.a: the recordings have no column 'tak'. Did you mean 'take'",
        ),
        (
            {"pools": {"a": {"column": "take", "values": [9]}}},
            "data.pools.a: no training clip has '9' in column 'take'",
        ),
        (
            {"pools": {"a": {"column": "take", "values": [2, 3]}, "b": {"column": "take", "values": [3]}}},
            "24 clips are both in 'a' and in 'b', the first w0/",
        ),
        (
            {"pools": {"a": {"column": "take", "values": [2]}}, "partition": {"by": "iid", "clients": 40}},
            "fewer than data.partition.minimum 1",
        ),
    ],
)
def test_impossible_pools_are_rejected(make_data: Make, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_population(make_data(**data), 1)


def test_pools_and_unlabelled_exclude_each_other(make_data: Make) -> None:
    with pytest.raises((ConfigError, ValueError), match="Remove either of them"):
        make_data(unlabelled={}, pools={"a": {"column": "take", "values": [2]}})


def test_empty_pools_leave_the_digest_unchanged(make_data: Make) -> None:
    def digest(**data: Any) -> str:
        return make_config({"method": "fedavg", "data": make_data(**data).model_dump(mode="json")}).digest()

    assert digest(pools={}, unlabelled=None) == digest() != digest(unlabelled={"keep": 0.5})
