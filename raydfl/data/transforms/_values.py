"""Values that several transforms need: types of options, and the places of an example."""

from __future__ import annotations

import functools
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor


def _ascending(value: tuple[float, float]) -> tuple[float, float]:
    if not value[0] <= value[1]:
        raise ValueError(f"the lowest, {value[0]:g}, comes first and then the highest, {value[1]:g}")
    return value


Range = Annotated[tuple[float, float], AfterValidator(_ascending)]
"""Lowest and highest value of what is drawn."""


@functools.lru_cache(maxsize=256)
def places(size: int, device: torch.device) -> Tensor:
    """Return 0 to ``size`` - 1: int64 [size], to be read only. It is made once, for every batch asks for it."""
    return torch.arange(size, device=device)
