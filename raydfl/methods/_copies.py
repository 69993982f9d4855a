"""Copies of a network that a client retains between its participations, in ``step.state`` under a prefix."""

from __future__ import annotations

from torch import Tensor

from raydfl.core.types import Tensors
from raydfl.training import Step


def retain(step: Step, prefix: str, tensors: Tensors) -> None:
    """Retain a copy of some tensors, in place of the last copy."""
    step.state.update({prefix + name: value.clone() for name, value in tensors.items()})


def find_retained(step: Step, prefix: str) -> dict[str, Tensor]:
    """Return the retained copy by the tensors' names. It is empty before the first participation."""
    return {name.removeprefix(prefix): value for name, value in step.state.items() if name.startswith(prefix)}
