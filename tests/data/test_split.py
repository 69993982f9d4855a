from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from raydfl.core.errors import DataError
from raydfl.core.seeds import generator
from raydfl.core.yaml import parse_yaml
from raydfl.data import Assignment
from raydfl.data.manifest import make_manifest
from raydfl.data.steps.listing import make_assignment
from raydfl.data.steps.split import HoldOutSettings, SplitSettings, draw_share, split_clips


def listed(clips: int = 200, official: bool = True, **columns: list[Any]) -> Assignment:
    numbers = range(clips)
    return make_assignment(
        make_manifest(
            {
                "clip": [f"c{i}" for i in numbers],
                "path": [None] * clips,
                "label": [f"w{i % 7}" for i in numbers],
                "group": [f"g{i % 11}" for i in numbers],
                "split": [("train", "train", "validation", "test")[i % 4] if official else None for i in numbers],
                "fold": [i % 5 + 1 for i in numbers],
                **columns,
            },
            "made up",
        ),
        [f"w{i}" for i in range(7)],
    )


def split(listed: Assignment, seed: int = 1, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The clips for training, the server's validation and its test."""
    tables = split_clips(listed, SplitSettings(**options), seed)
    clips = tables.codes("clip")
    assert len(np.unique(clips)) == len(clips)  # never in two
    train, validation, test = (clips[tables.has_role(role)] for role in ("train", "server_validation", "test"))
    return train, validation, test


def test_official_split() -> None:
    numbers = np.arange(200)
    train, validation, test = split(listed())
    np.testing.assert_array_equal(test, numbers[numbers % 4 == 3])
    np.testing.assert_array_equal(train, numbers[numbers % 4 != 3])
    assert not len(validation)
    train, validation, _ = split(listed(), official_validation="validation")
    np.testing.assert_array_equal(validation, numbers[numbers % 4 == 2])
    np.testing.assert_array_equal(train, numbers[numbers % 4 < 2])
    train, validation, _ = split(listed(), official_validation="drop")
    np.testing.assert_array_equal(train, numbers[numbers % 4 < 2])
    assert not len(validation)


def test_values_of_a_column() -> None:
    _, _, test = split(listed(), test={"by": "fold", "values": [1, "3"]})
    numbers = np.arange(200)
    np.testing.assert_array_equal(test, numbers[np.isin(numbers % 5, [0, 2])])
    _, _, test = split(listed(), test={"by": "split", "values": ["test", "validation"]})
    np.testing.assert_array_equal(test, numbers[numbers % 4 >= 2])


def test_none() -> None:
    train, _, test = split(listed(), test=None)
    assert (len(train), len(test)) == (200, 0)


def test_whole_groups() -> None:
    table = listed()
    train, _, test = split(table, test={"by": "group", "fraction": 0.3})
    groups = np.array(table.texts("group", ""))
    assert len(set(groups[test])) == 3  # of 11, rounded
    assert not set(groups[test]) & set(groups[train])
    assert len(train) + len(test) == 200
    drawn = {
        tuple(sorted(set(groups[split(table, seed, test={"by": "group", "fraction": 0.3})[2]]))) for seed in range(20)
    }
    assert len(drawn) > 10
    np.testing.assert_array_equal(test, split(table, test={"by": "group", "fraction": 0.3})[2])


def test_a_share_of_every_label() -> None:
    table = listed(203)
    _, _, test = split(table, test={"by": "clip", "fraction": 0.25})
    labels = np.arange(203) % 7
    assert np.bincount(labels[test]).tolist() == [7] * 7  # 29 clips each: 7.25
    other = split(table, 2, test={"by": "clip", "fraction": 0.25})[2]
    assert set(test) != set(other)
    np.testing.assert_array_equal(test, split(table, test={"by": "clip", "fraction": 0.25})[2])


def test_local_hold_out_is_rounded_and_leaves_one() -> None:
    sizes = {count: int(draw_share(count, 0.2, generator(1, 0, "a", "t")).sum()) for count in range(1, 9)}
    assert sizes == {1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 2}
    assert draw_share(2, 0.99, generator(1, 0, "a", "t")).sum() == 1
    assert draw_share(1, 0.99, generator(1, 0, "a", "t")).sum() == 0
    first = np.mean([draw_share(10, 0.3, generator(seed, 0, "a", "t")) for seed in range(2000)], axis=0)
    np.testing.assert_allclose(first, 0.3, atol=0.05)  # everyone alike


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (
            listed(official=False),
            {},
            r"no clip has 'test' in column 'split'. The column is empty.*\{by: clip, fraction",
        ),
        (
            listed(),
            {"test": {"by": "fold", "values": [6]}},
            "no clip has '6' in column 'fold'. Choose one of 1, 2, 3, 4, 5",
        ),
        (
            listed(),
            {"test": {"by": "fodl", "values": [1]}},
            "data.split.test: the recordings have no column 'fodl'. Did you mean 'fold'",
        ),
        (listed(), {"test": {"by": "group", "fraction": 0.99}}, "0.99 of 11 values of column 'group' leaves none"),
        (
            listed(10),
            {"test": {"by": "clip", "fraction": 0.01}},
            "0.01 of 10 clips of 7 labels is no clip: .*Set data.split.test.fraction=0.25 or more",
        ),
        (listed(7), {"test": {"by": "clip", "fraction": 0.5}}, "no label has more than one clip. Hold out whole"),
        (
            listed(),
            {"test": {"values": ["train", "validation", "test"]}},
            "no clips are left to train on: 200 of 200",
        ),
        (
            listed(4, group=["a", None, "b", None]),
            {"test": {"by": "group", "fraction": 0.5}},
            "2 clips have no value in column 'group': c1, c3",
        ),
    ],
)
def test_splits_that_cannot_be(table: Assignment, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split(table, **options)


def test_what_a_message_proposes_can_be_done() -> None:
    """Also where the usual share would be no clip, and never a column whose values are whole labels."""
    tables = {
        "groups": (listed(), ["fold", "clip", "group"]),
        "no groups": (listed(group=[None] * 200), ["fold", "clip"]),
        "few clips": (listed(14, word=[f"w{i % 7}" for i in range(14)]), ["fold", "clip"]),
    }
    for table, expected in tables.values():
        with pytest.raises(DataError) as error:
            split(table, test={"by": "fold", "values": (9,)})
        proposals = re.findall(r"data\.split\.test='(\{.*?\})'", str(error.value))
        settings = [HoldOutSettings(**parse_yaml(text, "")) for text in proposals]
        assert sorted(each.by for each in settings) == sorted(expected)
        for each in settings:
            train, _, test = split(table, test=each)
            assert len(test)
            assert set(table.codes("label")[train]) == set(range(7))
        assert ("data.partition='{by: dirichlet" in str(error.value)) == (None in table.texts("group", ""))


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
