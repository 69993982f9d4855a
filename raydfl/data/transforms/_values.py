"""Values that several transforms need: types of options."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _ascending(value: tuple[float, float]) -> tuple[float, float]:
    if not value[0] <= value[1]:
        raise ValueError(f"the lowest, {value[0]:g}, comes first and then the highest, {value[1]:g}")
    return value


Range = Annotated[tuple[float, float], AfterValidator(_ascending)]
"""Lowest and highest value of what is drawn."""
