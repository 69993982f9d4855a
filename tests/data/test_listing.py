"""Labels left out, and clips of nobody dealt out to the groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raydfl.core.errors import ConfigError, DataError
from raydfl.data.build import build_population, list_clips
from raydfl.data.manifest import make_manifest
from raydfl.data.settings import DataSettings
from raydfl.data.steps.leave_out import deal_ungrouped
from raydfl.engine.config import make_config

Make = Callable[..., DataSettings]


def test_labels_left_out_are_not_read(made: Make) -> None:
    settings = made(leave_out=["w3", "w1"])
    population = build_population(settings, 1)
    assert population.classes == ("w0", "w2")
    assert len(population.stores[0]) == 60  # of 120
    whole = build_population(made(), 1)
    assert population.label_counts().tolist() == whole.label_counts()[:, [0, 2]].tolist()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["w33"], "data.leave_out: no clip has the label 'w33'. Did you mean 'w3'"),
        (["silence"], "no clip has the label 'silence'. Choose one of w0, w1, w2, w3"),
        (["w0", "w1", "w2", "w3"], "data.leave_out names every label"),
    ],
)
def test_labels_that_cannot_be_left_out(made: Make, labels: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_clips(made(leave_out=labels), 1)


def test_neither_setting_changes_the_digest_of_runs_without_it(made: Make) -> None:
    def digest(**data: Any) -> str:
        return make_config({"method": "fedavg", "data": made(**data).model_dump(mode="json")}).digest()

    assert digest(leave_out=[], ungrouped="keep") == digest()
    assert digest(leave_out=["w1", "w0"]) == digest(leave_out=["w0", "w1"]) != digest()
    assert digest(ungrouped="deal") != digest()


def test_one_label_is_not_a_list(made: Make) -> None:
    with pytest.raises((ConfigError, ValueError), match=r"write a list of labels, like \[_silence_\]"):
        made(leave_out="w0")


def silence(split: bool) -> pa.Table:
    """20 speakers of 1 to 3 words in training, 5 in the test; 33 clips of silence in training, 4 in the test."""
    rows: list[dict[str, str | None]] = []
    for number in range(25):
        part = ("test" if number >= 20 else "train") if split else None
        clips = [f"{number}-{take}" for take in range(number % 3 + 1)]
        rows += [{"clip": clip, "label": "yes", "group": f"s{number}", "split": part} for clip in clips]
    for number in range(37):
        part = ("test" if number >= 33 else "train") if split else None
        rows.append({"clip": f"silence-{number}", "label": "silence", "group": None, "split": part})
    return make_manifest([row | {"path": None} for row in rows], "silence")


@pytest.mark.parametrize("split", [True, False])
def test_clips_of_nobody_are_dealt_evenly_and_stay_in_their_part(split: bool) -> None:
    before, after = silence(split), deal_ungrouped(silence(split), 1)
    groups, owned = after.column("group").to_pylist(), before.column("group").to_pylist()
    assert all(new == old for new, old in zip(groups, owned, strict=True) if old is not None)
    parts = after.column("split").to_pylist()
    dealt = {
        part: Counter(g for g, old, p in zip(groups, owned, parts, strict=True) if old is None and p == part)
        for part in set(parts)
    }
    for part, counts in dealt.items():
        there = {g for g, p in zip(owned, parts, strict=True) if g is not None and p == part}
        assert set(counts) <= there
        assert {counts[name] for name in there} <= {
            sum(counts.values()) // len(there),
            -(-sum(counts.values()) // len(there)),
        }
    assert deal_ungrouped(before, 1).equals(after)
    assert not deal_ungrouped(before, 2).equals(after)
    assert after.drop(["group"]).equals(before.drop(["group"]))


def test_without_any_group_nothing_can_be_dealt() -> None:
    manifest = silence(split=True)
    with pytest.raises(DataError, match="no clip has a group. Set data.ungrouped=keep"):
        deal_ungrouped(manifest.filter(pa.array([clip.as_py() is None for clip in manifest["group"]])), 1)


def test_a_part_of_the_official_split_without_groups_gives_to_all() -> None:
    manifest = silence(split=True)
    test = np.array([part == "test" for part in manifest["split"].to_pylist()])
    nobodys = np.array([group is None for group in manifest["group"].to_pylist()])
    dealt = deal_ungrouped(manifest.filter(pa.array(~test | nobodys)), 1)
    assert dealt.column("group").null_count == 0
