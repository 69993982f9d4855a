"""Suggestions in messages: splits and partitions that fit the clips."""

from __future__ import annotations

from collections import Counter

import numpy as np

from raydfl.data.steps.listing import Assignment

_FRACTION = 0.2
"""Suggested fraction of held-out values or clips."""
_MOST = 3
"""Largest number of suggestions in a message."""


def suggest_split(tables: Assignment) -> str:
    """Suggest settings of data.split.test, and of data.partition if a clip has no group."""
    labels = tables.texts("label", "data.split")
    names = ["group", *(name[7:] for name in tables.clips.schema.names if name.startswith("column:"))]
    splits = []
    for name in names:
        values = tables.texts(name, "data.split")
        if None in values:
            continue
        held_out = max(1, int(_FRACTION * len(set(values)) + 0.5))
        pairs = set(zip(labels.tolist(), values.tolist(), strict=True))
        if min(Counter(label for label, _ in pairs).values()) > held_out:  # every label keeps training clips
            splits.append(f"{{by: {name}, fraction: {_FRACTION}}}")
    least = find_least_fraction(labels)
    if least is not None:
        # Second, so that a message with few suggestions includes it.
        splits.insert(1, f"{{by: clip, fraction: {max(_FRACTION, least):g}}}")
    text = "choose data.split.test differently"
    if splits:
        text += ", for example " + " or ".join(f"data.split.test='{split}'" for split in splits[:_MOST])
    if tables.column("group", "data.split").null_count:
        clips = len(labels)
        text += f". The clips have no groups to be clients: choose data.partition too, for example {suggest_dirichlet(clips)}"
    return text


def suggest_dirichlet(clips: int) -> str:
    """Suggest a partition by labels for this number of clips."""
    return f"data.partition='{{by: dirichlet, clients: {min(10, max(2, clips // 10))}, alpha: 0.5}}'"


def find_least_fraction(labels: np.ndarray) -> float | None:
    """Find a fraction that holds out a clip of every label with at least two clips; ``None`` without such labels."""
    known = labels[[label is not None for label in labels]]
    counts = np.unique(known.astype(str), return_counts=True)[1]
    divisible = counts[counts > 1]
    # Half a clip rounds up to a whole one.
    return float(np.ceil(1000 * 0.5 / divisible.min()) / 1000) if len(divisible) else None
