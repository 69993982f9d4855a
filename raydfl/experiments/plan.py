"""What sweeps, searches and trials of one's own Tuner have in common before the first run starts: their configurations."""

from __future__ import annotations

import dataclasses

from raydfl.methods import Method

_COUNTS = ("train.local_epochs", "train.batch_size")
CHANGEABLE = (
    f"it can change train.optimiser.*, {', '.join(_COUNTS)} and those fields of a method that are numbers with a decimal "
    f"point"
)
"""Says for what :func:`fits_state` holds."""


def fits_state(key: str, method: Method) -> bool:
    """Return whether a setting may change in the middle of a training: whatever its value is, it fits the state."""
    group, _, name = key.partition(".")
    fields = {item.name: item.type for item in dataclasses.fields(method)}
    rate = group == "method" and "float" in str(fields.get(name, ""))
    return rate or key in _COUNTS or (key.startswith("train.optimiser.") and key != "train.optimiser.name")
