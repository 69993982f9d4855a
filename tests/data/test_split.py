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


def list_clips(clips: int = 200, official: bool = True, **columns: list[Any]) -> Assignment:
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


def split(table: Assignment, seed: int = 1, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split a table and return the clips of the training, server validation and server test sets."""
    tables = split_clips(table, SplitSettings(**options), seed)
    clips = tables.codes("clip")
    assert len(np.unique(clips)) == len(clips)  # each clip has a single role
    train, validation, test = (clips[tables.has_role(role)] for role in ("train", "server_validation", "test"))
    return train, validation, test


def test_the_official_split_is_used_by_default() -> None:
    numbers = np.arange(200)
    train, validation, test = split(list_clips())
    np.testing.assert_array_equal(test, numbers[numbers % 4 == 3])
    np.testing.assert_array_equal(train, numbers[numbers % 4 != 3])
    assert not len(validation)
    train, validation, _ = split(list_clips(), official_validation="validation")
    np.testing.assert_array_equal(validation, numbers[numbers % 4 == 2])
    np.testing.assert_array_equal(train, numbers[numbers % 4 < 2])
    train, validation, _ = split(list_clips(), official_validation="drop")
    np.testing.assert_array_equal(train, numbers[numbers % 4 < 2])
    assert not len(validation)


def test_column_values_select_the_test_set() -> None:
    _, _, test = split(list_clips(), test={"by": "fold", "values": [1, "3"]})
    numbers = np.arange(200)
    np.testing.assert_array_equal(test, numbers[np.isin(numbers % 5, [0, 2])])
    _, _, test = split(list_clips(), test={"by": "split", "values": ["test", "validation"]})
    np.testing.assert_array_equal(test, numbers[numbers % 4 >= 2])


def test_the_test_set_may_be_empty() -> None:
    train, _, test = split(list_clips(), test=None)
    assert (len(train), len(test)) == (200, 0)


def test_whole_groups_are_held_out() -> None:
    table = list_clips()
    train, _, test = split(table, test={"by": "group", "fraction": 0.3})
    groups = np.array(table.texts("group", ""))
    assert len(set(groups[test])) == 3  # of 11, rounded
    assert not set(groups[test]) & set(groups[train])
    assert len(train) + len(test) == 200
    test_groups = {
        tuple(sorted(set(groups[split(table, seed, test={"by": "group", "fraction": 0.3})[2]]))) for seed in range(20)
    }
    assert len(test_groups) > 10
    np.testing.assert_array_equal(test, split(table, test={"by": "group", "fraction": 0.3})[2])


def test_a_fraction_of_each_label_is_held_out() -> None:
    table = list_clips(203)
    _, _, test = split(table, test={"by": "clip", "fraction": 0.25})
    labels = np.arange(203) % 7
    assert np.bincount(labels[test]).tolist() == [7] * 7  # 29 clips each: 7.25
    other = split(table, 2, test={"by": "clip", "fraction": 0.25})[2]
    assert set(test) != set(other)
    np.testing.assert_array_equal(test, split(table, test={"by": "clip", "fraction": 0.25})[2])


def test_a_local_held_out_share_is_rounded_and_leaves_a_training_clip() -> None:
    sizes = {count: int(draw_share(count, 0.2, generator(1, 0, "a", "t")).sum()) for count in range(1, 9)}
    assert sizes == {1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 2}
    assert draw_share(2, 0.99, generator(1, 0, "a", "t")).sum() == 1
    assert draw_share(1, 0.99, generator(1, 0, "a", "t")).sum() == 0
    first = np.mean([draw_share(10, 0.3, generator(seed, 0, "a", "t")) for seed in range(2000)], axis=0)
    np.testing.assert_allclose(first, 0.3, atol=0.05)  # each clip is equally likely


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (
            list_clips(official=False),
            {},
            r"no clip has 'test' in column 'split'. The column is empty.*\{by: clip, fraction",
        ),
        (
            list_clips(),
            {"test": {"by": "fold", "values": [6]}},
            "no clip has '6' in column 'fold'. Choose one of 1, 2, 3, 4, 5",
        ),
        (
            list_clips(),
            {"test": {"by": "fodl", "values": [1]}},
            "data.split.test: the recordings have no column 'fodl'. Did you mean 'fold'",
        ),
        (list_clips(), {"test": {"by": "group", "fraction": 0.99}}, "0.99 of 11 values of column 'group' leaves none"),
        (
            list_clips(10),
            {"test": {"by": "clip", "fraction": 0.01}},
            "0.01 of 10 clips of 7 labels is no clip: .*Set data.split.test.fraction=0.25 or more",
        ),
        (list_clips(7), {"test": {"by": "clip", "fraction": 0.5}}, "no label has more than one clip. Hold out whole"),
        (
            list_clips(),
            {"test": {"values": ["train", "validation", "test"]}},
            "no clips are left to train on: 200 of 200",
        ),
        (
            list_clips(4, group=["a", None, "b", None]),
            {"test": {"by": "group", "fraction": 0.5}},
            "2 clips have no value in column 'group': c1, c3",
        ),
    ],
)
def test_impossible_splits_are_rejected(table: Assignment, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split(table, **options)


def test_proposals_of_messages_work() -> None:
    """No proposal is an empty share or a column that determines the label."""
    tables = {
        "groups": (list_clips(), ["fold", "clip", "group"]),
        "no groups": (list_clips(group=[None] * 200), ["fold", "clip"]),
        "few clips": (list_clips(14, word=[f"w{i % 7}" for i in range(14)]), ["fold", "clip"]),
    }
    for table, expected in tables.values():
        with pytest.raises(DataError) as error:
            split(table, test={"by": "fold", "values": (9,)})
        proposals = re.findall(r"data\.split\.test='(\{.*?\})'", str(error.value))
        settings = [HoldOutSettings(**parse_yaml(text, "")) for text in proposals]
        assert sorted(proposal.by for proposal in settings) == sorted(expected)
        for proposal in settings:
            train, _, test = split(table, test=proposal)
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
def test_contradictory_settings_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HoldOutSettings(**options)
