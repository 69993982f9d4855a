"""Held-out clips of clients and of the server: by value, by fraction, stratified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raydfl.cli.describe import describe_data
from raydfl.core.errors import DataError
from raydfl.core.seeds import generator
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
from raydfl.data.steps.split import draw_stratified

Make = Callable[..., DataSettings]


def list_clips(population: Population, role: str) -> list[list[int]]:
    """List the clips of each client with this role."""
    return [sorted(set(getattr(population.data(i), role).clips.tolist())) for i in range(len(population))]


def list_training_clips(population: Population) -> list[int]:
    return [clip for client in list_clips(population, "train") for clip in client]


def find_takes(settings: DataSettings, rows: list[int]) -> set[int]:
    return set(settings.source.open().manifest().column("take").take(rows).to_pylist())


def test_clients_have_no_test_clips_by_default(make_data: Make) -> None:
    population = build_population(make_data(split={"validation": 0.2}), 1)
    assert not any(list_clips(population, "test"))
    assert all(list_clips(population, "validation"))


def test_held_out_clips_stay_with_their_owner(make_data: Make) -> None:
    settings = make_data(
        split={"client_test": {"by": "take", "values": [4]}, "validation": {"by": "take", "values": [3]}}
    )
    population = build_population(settings, 1)
    groups = settings.source.open().manifest().column("group").to_pylist()
    for i in range(len(population)):
        data = population.data(i)
        assert find_takes(settings, data.test.clips.tolist()) == {4}
        assert find_takes(settings, data.validation.clips.tolist()) == {3}
        assert find_takes(settings, data.train.clips.tolist()) == {1, 2}
        for part in (data.test, data.validation, data.train):
            assert {groups[c] for c in part.clips.tolist()} == {population.ids[i]}
    assert sum(map(len, list_clips(population, "test"))) == 24


def test_server_validation_does_not_change_the_test_set(make_data: Make) -> None:
    plain = build_population(make_data(), 1)
    by_value = make_data(split={"server_validation": {"by": "take", "values": [2, 3]}})
    population = build_population(by_value, 1)
    assert find_takes(by_value, population.validation.clips.tolist()) == {2, 3}
    assert find_takes(by_value, list_training_clips(population)) == {1, 4}
    by_share = make_data(split={"server_validation": {"fraction": 0.25, "stratify": True}})
    stratified = build_population(by_share, 1)
    labels = Counter(stratified.validation.labels.tolist())
    assert labels == dict.fromkeys(range(4), 6)  # per label, a quarter of the 4 takes of 6 groups
    for result in (population, stratified):
        assert result.test.clips.tolist() == plain.test.clips.tolist()
        assert sorted(list_training_clips(result) + result.validation.clips.tolist()) == sorted(
            list_training_clips(plain)
        )
        assert [(s.start, s.stop) for s in result.shards if s.split == "server_validation"] == [
            (0, len(result.validation))
        ]
    with pytest.raises(DataError, match="data.split.server_validation: no remaining clip has '7' in column 'take'"):
        build_population(make_data(split={"server_validation": {"by": "take", "values": [7]}}), 1)


def test_client_tests_come_from_the_training_and_validation_clips(make_data: Make) -> None:
    """Holding out test clips does not move clips between clients."""
    plain = build_population(make_data(split={"validation": 0.25}), 1)
    population = build_population(
        make_data(split={"validation": 0.25, "client_test": {"by": "clip", "fraction": 0.25, "stratify": True}}), 1
    )
    all_clips = [
        sorted(a + b) for a, b in zip(list_clips(plain, "train"), list_clips(plain, "validation"), strict=True)
    ]
    parts = [list_clips(population, role) for role in ("train", "validation", "test")]
    assert [sorted(a + b + c) for a, b, c in zip(*parts, strict=True)] == all_clips
    for i in range(len(population)):
        assert set(Counter(population.data(i).test.labels.tolist()).values()) == {1}, "one of four takes of each label"


def test_a_stratified_share_is_rounded_for_each_label_and_never_complete() -> None:
    labels = np.repeat([0, 1, 2], [10, 4, 1])
    chosen = draw_stratified(labels, 0.3, generator(0, 0, "a", "test"))
    assert np.bincount(labels[chosen], minlength=3).tolist() == [3, 1, 0]
    assert not draw_stratified(np.zeros(1, int), 0.9, generator(0, 0, "a", "test")).all()
    selections = [draw_stratified(labels, 0.5, generator(seed, 0, "a", "t"))[:10] for seed in range(500)]
    assert np.mean(selections, axis=0) == pytest.approx(np.full(10, 0.5), abs=0.08)


def test_pools_and_client_tests_by_value_can_be_combined(make_data: Make) -> None:
    """In anomaly detection, clients train on normal clips and test on further clips."""
    settings = make_data(
        pools={"normal": {"column": "take", "values": [1, 2]}},
        split={"test": None, "client_test": {"by": "take", "values": [0, 4]}},
    )
    population = build_population(settings, 1)
    for i in range(len(population)):
        assert find_takes(settings, population.data(i).train.clips.tolist()) == {1, 2}
        assert find_takes(settings, population.data(i).test.clips.tolist()) == {0, 4}


def test_unseen_test_labels_raise_or_are_kept(make_data: Make) -> None:
    held_out: dict[str, Any] = {"test": {"by": "label", "values": ["w3"]}}
    with pytest.raises(DataError, match="no client has a clip of label 'w3'"):
        build_population(make_data(split=held_out), 1)
    population = build_population(make_data(split=held_out, unseen="keep"), 1)
    assert population.classes == ("w0", "w1", "w2", "w3")
    assert set(population.test.labels.tolist()) == {3}
    assert population.label_counts()[:, 3].sum() == 0


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"client_test": {"by": "take", "values": [9]}}, "data.split.client_test: no remaining clip has '9' in"),
        (
            {"validation": {"by": "tak", "values": [1]}},
            "data.split.validation: the recordings have no column 'tak'. Did you mean 'take'",
        ),
        ({"client_test": {"by": "take", "values": [1, 2, 3, 4]}}, "holds out all 96 clips and leaves none to train on"),
        ({"client_test": {"by": "group", "values": ["g0"]}}, "client 'g0' would hold out all its 16 clips"),
    ],
)
def test_impossible_roles_are_rejected(make_data: Make, split: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_population(make_data(split=split), 1)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"by": "take"}, "by: take needs either values or fraction"),
        ({"by": "clip", "values": [1]}, "by: clip needs fraction, not values"),
        ({"by": "take", "fraction": 0.5, "stratify": True}, "stratify has no effect with by: take"),
    ],
)
def test_incomplete_and_contradictory_held_out_settings_are_rejected(
    make_data: Make, group: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_data(split={"client_test": group})


# Machines: normal and anomalous clips


MACHINES: dict[str, Any] = {
    "name": "machines",
    "kinds": ["fan"],
    "clips": 10,
    "test_clips": 4,
    "seconds": 0.25,
    "features": {"bands": 8, "window_ms": 64, "hop_ms": 32},
}


def count_conditions(settings: DataSettings, rows: list[int]) -> Counter[str]:
    return Counter(settings.source.open().manifest().column("condition").take(rows).to_pylist())


def test_clients_test_on_all_anomalies_and_a_share_of_normal_clips(make_data: Make) -> None:
    split = {"test": None, "client_test": {"by": "condition", "values": ["anomaly"], "others": 0.25}, "validation": 0.2}
    settings = make_data(split=split, **MACHINES)
    population = build_population(settings, 1)
    for i in range(2):
        data = population.data(i)
        roles = [part.clips.tolist() for part in (data.train, data.validation, data.test)]
        # A quarter of 14 normal clips (3.5, rounded up) is tested_inputs, and a fifth of the remaining 10 is validated.
        assert [count_conditions(settings, clips) for clips in roles] == [
            {"normal": 8},
            {"normal": 2},
            {"normal": 4, "anomaly": 4},
        ]
        assert len({clip for clips in roles for clip in clips}) == 18
    with pytest.raises(ValueError, match="others is a fraction of the clips without the chosen values"):
        make_data(split={"client_test": {"fraction": 0.5, "others": 0.5}})


def test_as_published_tests_on_training_clips(make_data: Make) -> None:
    settings = make_data(split={"test": None, "as_published": True}, **MACHINES)
    population = build_population(settings, 1)
    for i in range(2):
        data = population.data(i)
        assert count_conditions(settings, data.train.clips.tolist()) == {"normal": 14, "anomaly": 3}  # 0.2 * 14 = 2.8
        assert count_conditions(settings, data.test.clips.tolist()) == {"normal": 14, "anomaly": 4}
        assert set(data.train.clips.tolist()) < set(data.test.clips.tolist())
        pairs = zip(data.test.clips.tolist(), data.test.batch(np.arange(len(data.test))).x.numpy(), strict=True)
        tested_inputs = dict(pairs)
        for clip, x in zip(
            data.train.clips.tolist(), data.train.batch(np.arange(len(data.train))).x.numpy(), strict=True
        ):
            assert np.array_equal(tested_inputs[clip], x)
    assert any("data.split.as_published: training clips are also test clips" in m for m in population.messages)
    with pytest.raises(
        ValueError, match="as_published has each client test on all its clips. Set test and client_test to null"
    ):
        make_data(split={"as_published": True})
    takes_are_normal = make_data(split={"test": None, "as_published": {"column": "take", "normal": [0, 1, 2, 3, 4]}})
    with pytest.raises(DataError, match="all of 120 clips are normal .0, 1, 2, 3, 4 in column 'take'."):
        build_population(takes_are_normal, 1)


def test_data_info_counts_conditions_of_each_machine(make_data: Make) -> None:
    lines = "\n".join(describe_data(make_data(split={"test": None}, **MACHINES), 1))
    assert "conditions        fan_00: 14 normal, 4 anomaly; fan_01: 14 normal, 4 anomaly" in lines
