"""Option types shared by several transforms."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _check_ascending(value: tuple[float, float]) -> tuple[float, float]:
    if not value[0] <= value[1]:
        raise ValueError(
            f"the range is reversed: give the lowest value ({value[1]:g}) first, then the highest ({value[0]:g})"
        )
    return value


Range = Annotated[tuple[float, float], AfterValidator(_check_ascending)]
"""Lowest and highest value of a uniform draw."""
