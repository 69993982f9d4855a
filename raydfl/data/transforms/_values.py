"""Types of options common to several transforms."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _check_ascending(value: tuple[float, float]) -> tuple[float, float]:
    if not value[0] <= value[1]:
        raise ValueError(f"the lower limit, {value[0]:g}, exceeds the upper limit, {value[1]:g}; swap the two")
    return value


Range = Annotated[tuple[float, float], AfterValidator(_check_ascending)]
"""Lower and upper limit of a random value."""
