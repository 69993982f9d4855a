from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from raydfl.core.errors import DataError
from raydfl.core.seeds import generator
from raydfl.core.yaml import parse_yaml
from raydfl.data.split import HoldOutSettings, SplitSettings, hold_out, split_clips


def manifest(clips: int = 200, official: bool = True, **columns: list[Any]) -> pa.Table:
    numbers = range(clips)
    return pa.table(
        {
            "clip": [f"c{i}" for i in numbers],
            "label": [f"w{i % 7}" for i in numbers],
            "group": [f"g{i % 11}" for i in numbers],
            "split": [("train", "train", "validation", "test")[i % 4] if official else None for i in numbers],
            "fold": [i % 5 + 1 for i in numbers],
            **columns,
        }
    )


def split(table: pa.Table, seed: int = 1, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parts = split_clips(table, SplitSettings(**options), seed)
    everything = np.concatenate([parts.train, parts.validation, parts.test])
    assert len(np.unique(everything)) == len(everything)  # never in two
    return parts.train, parts.validation, parts.test


def test_official_split() -> None:
    numbers = np.arange(200)
    train, validation, test = split(manifest())
    np.testing.assert_array_equal(test, numbers[numbers % 4 == 3])
    np.testing.assert_array_equal(train, numbers[numbers % 4 != 3])
    assert not len(validation)
    train, validation, _ = split(manifest(), official_validation="validation")
    np.testing.assert_array_equal(validation, numbers[numbers % 4 == 2])
    np.testing.assert_array_equal(train, numbers[numbers % 4 < 2])
    train, validation, _ = split(manifest(), official_validation="drop")
    np.testing.assert_array_equal(train, numbers[numbers % 4 < 2])
    assert not len(validation)


def test_values_of_a_column() -> None:
    _, _, test = split(manifest(), test={"by": "fold", "values": [1, "3"]})
    numbers = np.arange(200)
    np.testing.assert_array_equal(test, numbers[np.isin(numbers % 5, [0, 2])])
    _, _, test = split(manifest(), test={"by": "split", "values": ["test", "validation"]})
    np.testing.assert_array_equal(test, numbers[numbers % 4 >= 2])


def test_none() -> None:
    train, _, test = split(manifest(), test=None)
    assert (len(train), len(test)) == (200, 0)


def test_whole_groups() -> None:
    table = manifest()
    train, _, test = split(table, test={"by": "group", "fraction": 0.3})
    groups = np.array(table.column("group").to_pylist())
    assert len(set(groups[test])) == 3  # of 11, rounded
    assert not set(groups[test]) & set(groups[train])
    assert len(train) + len(test) == 200
    drawn = {
        tuple(sorted(set(groups[split(table, seed, test={"by": "group", "fraction": 0.3})[2]]))) for seed in range(20)
    }
    assert len(drawn) > 10
    np.testing.assert_array_equal(test, split(table, test={"by": "group", "fraction": 0.3})[2])


def test_a_share_of_every_label() -> None:
    table = manifest(203)
    _, _, test = split(table, test={"by": "clip", "fraction": 0.25})
    labels = np.arange(203) % 7
    assert np.bincount(labels[test]).tolist() == [7] * 7  # 29 clips each: 7.25
    other = split(table, 2, test={"by": "clip", "fraction": 0.25})[2]
    assert set(test) != set(other)
    np.testing.assert_array_equal(test, split(table, test={"by": "clip", "fraction": 0.25})[2])


def test_local_hold_out_is_rounded_and_leaves_one() -> None:
    sizes = {count: int(hold_out(count, 0.2, generator(1, 0, "a", "t")).sum()) for count in range(1, 9)}
    assert sizes == {1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 2}
    assert hold_out(2, 0.99, generator(1, 0, "a", "t")).sum() == 1
    assert hold_out(1, 0.99, generator(1, 0, "a", "t")).sum() == 0
    first = np.mean([hold_out(10, 0.3, generator(seed, 0, "a", "t")) for seed in range(2000)], axis=0)
    np.testing.assert_allclose(first, 0.3, atol=0.05)  # everyone alike


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (
            manifest(official=False),
            {},
            r"no clip has 'test' in column 'split' \(the column is empty\).*\{by: clip, fraction",
        ),
        (
            manifest(),
            {"test": {"by": "fold", "values": [6]}},
            "no clip has '6' in column 'fold' .*known: 1, 2, 3, 4, 5",
        ),
        (manifest(), {"test": {"by": "fodl", "values": [1]}}, "no column 'fodl'; did you mean 'fold'"),
        (manifest(), {"test": {"by": "group", "fraction": 0.99}}, "0.99 of 11 values of column 'group' leaves none"),
        (
            manifest(10),
            {"test": {"by": "clip", "fraction": 0.01}},
            "0.01 of 10 clips of 7 labels is no clip: .*set data.split.test.fraction=0.25 or more",
        ),
        (manifest(7), {"test": {"by": "clip", "fraction": 0.5}}, "no label has more than one clip; hold out whole"),
        (
            manifest(),
            {"test": {"values": ["train", "validation", "test"]}},
            "no clips are left to train on: 200 of 200",
        ),
        (
            manifest(4, group=["a", None, "b", None]),
            {"test": {"by": "group", "fraction": 0.5}},
            "2 clips have no 'group' by which to hold them out: c1, c3",
        ),
    ],
)
def test_splits_that_cannot_be(table: pa.Table, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_clips(table, SplitSettings(**options), 1)


def test_what_a_message_proposes_can_be_done() -> None:
    """Also where the usual share would be no clip, and never a column whose values are whole labels."""
    tables = {
        "groups": (manifest(), ["fold", "clip", "group"]),
        "no groups": (manifest(group=[None] * 200), ["fold", "clip"]),
        "few clips": (manifest(14, word=[f"w{i % 7}" for i in range(14)]), ["fold", "clip"]),
    }
    for table, expected in tables.values():
        with pytest.raises(DataError) as error:
            split_clips(table, SplitSettings(test=HoldOutSettings(by="fold", values=(9,))), 1)
        proposals = re.findall(r"data\.split\.test='(\{.*?\})'", str(error.value))
        settings = [HoldOutSettings(**parse_yaml(text, "")) for text in proposals]
        assert sorted(each.by for each in settings) == sorted(expected)
        for each in settings:
            parts = split_clips(table, SplitSettings(test=each), 1)
            assert len(parts.test)
            assert set(table.column("label").take(pa.array(parts.train)).to_pylist()) == {f"w{i}" for i in range(7)}
        assert ("data.partition='{by: dirichlet" in str(error.value)) == (table.column("group").null_count > 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "group"}, "by: group needs either values or fraction"),
        ({"by": "group", "values": ["a"], "fraction": 0.1}, "either values or fraction"),
        ({"by": "clip", "values": ["a"]}, "by: clip needs fraction"),
        ({"by": "clip", "fraction": 1.0}, "less than 1"),
        ({"by": "fold", "values": []}, "at least 1 item"),
    ],
)
def test_settings_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HoldOutSettings(**options)
