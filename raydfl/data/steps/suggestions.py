"""Suggestions in messages: another split or partition that fits the clips."""

from __future__ import annotations

from collections import Counter

import numpy as np

from raydfl.data.steps.listing import Assignment

_SHARE = 0.2
"""Share of the values or clips that is held out in the suggestions."""
_WAYS = 3
"""Suggestions of a message."""


def suggest_split(tables: Assignment) -> str:
    """Suggest other settings of data.split.test, and of data.partition where clips have no group."""
    labels = tables.texts("label", "data.split")
    names = ["group", *(name[7:] for name in tables.clips.schema.names if name.startswith("column:"))]
    ways = []
    for name in names:
        values = tables.texts(name, "data.split")
        if None in values:
            continue
        held_out = max(1, int(_SHARE * len(set(values)) + 0.5))
        pairs = set(zip(labels.tolist(), values.tolist(), strict=True))
        if min(Counter(label for label, _ in pairs).values()) > held_out:  # clips of every label are left
            ways.append(f"{{by: {name}, fraction: {_SHARE}}}")
    enough = enough_of_each_label(labels)
    if enough is not None:
        ways.insert(1, f"{{by: clip, fraction: {max(_SHARE, enough):g}}}")
    text = "choose data.split.test differently"
    if ways:
        text += ", for example " + " or ".join(f"data.split.test='{way}'" for way in ways[:_WAYS])
    if tables.column("group", "data.split").null_count:
        clips = len(labels)
        text += f". The clips have no groups to be clients: choose data.partition too, for example {suggest_dirichlet(clips)}"
    return text


def suggest_dirichlet(clips: int) -> str:
    """Return a setting with which this many clips without owners can be dealt."""
    return f"data.partition='{{by: dirichlet, clients: {min(10, max(2, clips // 10))}, alpha: 0.5}}'"


def enough_of_each_label(labels: np.ndarray) -> float | None:
    """Return a share of which every label with at least two clips gives one; ``None`` when there is no such label."""
    known = labels[[label is not None for label in labels]]
    counts = np.unique(known.astype(str), return_counts=True)[1]
    several = counts[counts > 1]
    return float(np.ceil(1000 * 0.5 / several.min()) / 1000) if len(several) else None
