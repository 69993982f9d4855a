"""Excluded labels, and clips without a group that are dealt to the groups."""

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


def test_excluded_labels_are_not_read(make_data: Make) -> None:
    settings = make_data(leave_out=["w3", "w1"])
    population = build_population(settings, 1)
    assert population.classes == ("w0", "w2")
    assert len(population.stores[0]) == 60  # of 120
    whole = build_population(make_data(), 1)
    assert population.label_counts().tolist() == whole.label_counts()[:, [0, 2]].tolist()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["w33"], "data.leave_out: no clip has the label 'w33'. Did you mean 'w3'"),
        (["silence"], "no clip has the label 'silence'. Choose one of w0, w1, w2, w3"),
        (["w0", "w1", "w2", "w3"], "data.leave_out names every label"),
    ],
)
def test_impossible_exclusions_are_rejected(make_data: Make, labels: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_clips(make_data(leave_out=labels), 1)


def test_default_settings_leave_the_digest_unchanged(make_data: Make) -> None:
    def digest(**data: Any) -> str:
        return make_config({"method": "fedavg", "data": make_data(**data).model_dump(mode="json")}).digest()

    assert digest(leave_out=[], ungrouped="keep") == digest()
    assert digest(leave_out=["w1", "w0"]) == digest(leave_out=["w0", "w1"]) != digest()
    assert digest(ungrouped="deal") != digest()


def test_a_label_outside_a_list_is_rejected(make_data: Make) -> None:
    with pytest.raises((ConfigError, ValueError), match=r"write a list of labels, like \[_silence_\]"):
        make_data(leave_out="w0")


def make_manifest_with_silence(split: bool) -> pa.Table:
    """List 20 training and 5 test speakers with 1 to 3 words each, and 33 training and 4 test clips of silence."""
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
def test_ungrouped_clips_are_dealt_evenly_within_their_split(split: bool) -> None:
    before, after = make_manifest_with_silence(split), deal_ungrouped(make_manifest_with_silence(split), 1)
    groups, original_groups = after.column("group").to_pylist(), before.column("group").to_pylist()
    assert all(new == old for new, old in zip(groups, original_groups, strict=True) if old is not None)
    parts = after.column("split").to_pylist()
    dealt = {
        part: Counter(g for g, old, p in zip(groups, original_groups, parts, strict=True) if old is None and p == part)
        for part in set(parts)
    }
    for part, counts in dealt.items():
        recipients = {g for g, p in zip(original_groups, parts, strict=True) if g is not None and p == part}
        assert set(counts) <= recipients
        assert {counts[name] for name in recipients} <= {
            sum(counts.values()) // len(recipients),
            -(-sum(counts.values()) // len(recipients)),
        }
    assert deal_ungrouped(before, 1).equals(after)
    assert not deal_ungrouped(before, 2).equals(after)
    assert after.drop(["group"]).equals(before.drop(["group"]))


def test_dealing_needs_a_group() -> None:
    manifest = make_manifest_with_silence(split=True)
    with pytest.raises(DataError, match="no clip has a group. Set data.ungrouped=keep"):
        deal_ungrouped(manifest.filter(pa.array([clip.as_py() is None for clip in manifest["group"]])), 1)


def test_a_split_without_groups_deals_to_all_groups() -> None:
    manifest = make_manifest_with_silence(split=True)
    test = np.array([part == "test" for part in manifest["split"].to_pylist()])
    ungrouped = np.array([group is None for group in manifest["group"].to_pylist()])
    dealt = deal_ungrouped(manifest.filter(pa.array(~test | ungrouped)), 1)
    assert dealt.column("group").null_count == 0
