"""Copies of a network, retained in ``step.state`` under a prefix or in a second model of the client."""

from __future__ import annotations

import torch
from torch import Tensor

from raydfl.core.types import Tensors
from raydfl.training import Step


def retain(step: Step, prefix: str, tensors: Tensors) -> None:
    """Retain a copy of some tensors, and replace the previous copy."""
    step.state.update({prefix + name: value.clone() for name, value in tensors.items()})


def find_retained(step: Step, prefix: str) -> dict[str, Tensor]:
    """Return the retained copy by the tensors' names. It is empty before the first participation."""
    return {name.removeprefix(prefix): value for name, value in step.state.items() if name.startswith(prefix)}


@torch.no_grad()
def copy_model(step: Step, source: str, target: str) -> None:
    """Copy the parameters and floating buffers of a model into another one with the same architecture."""
    for value, other in zip(step.floating_state(target).values(), step.floating_state(source).values(), strict=True):
        value.copy_(other)
