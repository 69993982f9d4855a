"""A module under training at the server: one vector for each part of a federation, in entries of the server's state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raydfl.core.part_names import beside
from raydfl.core.types import State

MODULE, MOMENTS = "generator", "generator/moments"
"""Keys of the server's state."""
VECTOR, FIRST, SECOND = "generator/vector", "moments/first", "moments/second"
"""Names of the vector and of Adam's moments under these keys: float32 [elements]. The vector's end is not trained."""
STEPS = "generator_steps"
"""Name of the number of steps in the state's extra facts."""


class ServerModule:
    """The module of one part, taken from a state."""

    def __init__(self, state: State, name: str) -> None:
        self.vector = state.tensors[MODULE][name]
        first, second = (state.tensors[MOMENTS][beside(moment, name)] for moment in (FIRST, SECOND))
        self.moments = first, second
        self.steps = int(state.extra[beside(STEPS, name)])
        self._name = name

    def train(self, loss: Callable[[Tensor], tuple[Tensor, Tensor]], lr: float, weight_decay: float) -> None:
        """Take one step.

        Args:
            loss: returns the loss of a vector, and the new end of the vector.
            lr: learning rate.
            weight_decay: added to the gradient, times the vector.
        """
        first, second = self.moments
        trained = self.vector[: len(first)]
        leaf = trained.clone().requires_grad_()
        value, end = loss(torch.cat([leaf, self.vector[len(first) :]]))
        (gradient,) = torch.autograd.grad(value, leaf)
        gradient = gradient + weight_decay * trained
        self.steps += 1
        # PyTorch's Adam with its default betas and eps.
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient.square()
        deviation = (second / (1 - 0.999**self.steps)).sqrt() + 1e-8
        self.moments = first, second
        self.vector = torch.cat([trained - lr / (1 - 0.9**self.steps) * first / deviation, end])

    def store(self, tensors: dict[str, dict[str, Tensor]], extra: dict[str, object]) -> None:
        """Put the module into the tensors and the extra facts of a new state."""
        tensors[MODULE][self._name] = self.vector
        for moment, value in zip((FIRST, SECOND), self.moments, strict=True):
            tensors[MOMENTS][beside(moment, self._name)] = value
        extra[beside(STEPS, self._name)] = self.steps
