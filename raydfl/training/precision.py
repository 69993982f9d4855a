"""Mixed precision: matrix products, convolutions and recurrent layers in a short floating type, everything else in float32.

Only what happens inside of ``fit`` and ``predict`` is affected: parameters, the optimiser, gradients, what is sent and what is
kept are float32, and so are logits when a loss gets them from ``step.forward``. PyTorch's autocast decides operation by operation;
raydfl.ops follow it on a GPU, and compute in float32 on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.training.optimiser import Optimiser
from raydfl.training.settings import Precision

_FIRST_SCALE = 1024.0
"""A power of two, so that scaling rounds nothing. Larger ones catch smaller gradients, but lose a client's first steps to
overflows, and it has few: every participation begins anew."""


def check_device(precision: Precision, device: torch.device) -> None:
    """Refuse what does not work on a device.

    Raises:
        ConfigError: float16 on anything but a CUDA device.
    """
    if precision == "float16" and device.type != "cuda":
        raise ConfigError(
            f"train.precision: float16 needs a GPU, but here the {device.type.upper()} works on clients: give every client "
            "actor a share of a GPU (ray.gpus above 0, ray.cpu_actors 0, nodes with CUDA), or take bfloat16 or float32"
        )


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Inside, operations that gain by it compute in this type."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


class GradientScale:
    """Keeps float16's gradients above 0: losses are multiplied by a scale, and gradients divided by it.

    Where a gradient is not finite, the scale was too large: that step is left out and the scale halved, as by torch.amp.GradScaler.
    Every client has a scale of its own, so that it ends as it would alone. (GradScaler's scale also grows, after 2,000 steps;
    a client's training is shorter.)
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Begin.

        Args:
            shape: (), or (clients,) where several are stacked: then all parameters have a dimension of clients in front.
            device: where the parameters are.
        """
        self.scale = torch.full(shape, _FIRST_SCALE, device=device)
        """float32 of that shape."""

    def keep(self, clients: int) -> None:
        """Go on with the first clients only."""
        self.scale = self.scale[:clients]

    def advance(self, optimiser: Optimiser, clip: Callable[[], object]) -> None:
        """Divide the gradients by the scale, and do a step for whom they are finite.

        Args:
            optimiser: whose parameters have gradients of scaled losses.
            clip: limits the gradients.
        """
        parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        finite = torch.ones_like(self.scale, dtype=torch.bool)
        for parameter in parameters:
            finite = finite & torch.isfinite(parameter.grad).reshape(*self.scale.shape, -1).all(dim=-1)
        for parameter in parameters:
            whole = self._like(finite, parameter)
            parameter.grad = torch.where(whole, parameter.grad / self._like(self.scale, parameter), 0.0)
        before = [(parameter, parameter.detach().clone(), _state(optimiser, parameter)) for parameter in parameters]
        clip()
        optimiser.advance()
        with torch.no_grad():
            for parameter, value, state in before:
                whole = self._like(finite, parameter)
                parameter.copy_(torch.where(whole, parameter, value))
                for name, moment in _state(optimiser, parameter, copied=False).items():
                    moment.copy_(torch.where(whole, moment, state.get(name, torch.zeros_like(moment))))
        self.scale = torch.where(finite, self.scale, self.scale / 2)

    def _like(self, of_clients: Tensor, parameter: Tensor) -> Tensor:
        """Return one number for each client as something that fits to a parameter."""
        return of_clients.view(*of_clients.shape, *[1] * (parameter.ndim - of_clients.ndim))


def _state(optimiser: Optimiser, parameter: Tensor, copied: bool = True) -> dict[str, Tensor]:
    """Return what the optimiser keeps for each element of a parameter."""
    return {
        name: value.clone() if copied else value
        for name, value in optimiser.state.get(parameter, {}).items()
        if name != "step" and isinstance(value, Tensor)
    }
