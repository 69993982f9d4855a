"""Mixed precision: matrix products, convolutions and recurrent layers in fewer bits, everything else in float32.

It affects only the inside of ``fit`` and ``predict``. Parameters, gradients, the optimiser, messages, private state and the
logits of ``step.forward`` are float32. PyTorch's autocast chooses the type of each operation. raydfl.ops follow autocast on a
GPU, and compute in float32 on a CPU.
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
"""Initial loss scale. A power of two scales without rounding. A larger scale preserves smaller gradients, but overflows cost
some of a client's few steps, because each participation starts with this scale."""


def check_device(precision: Precision, device: torch.device) -> None:
    """Check the support of a precision by a device.

    Raises:
        ConfigError: float16 or tf32 without a CUDA device.
    """
    if precision in ("float16", "tf32") and device.type != "cuda":
        raise ConfigError(
            f"train.precision: {precision} needs a GPU, but clients train on the {device.type.upper()}. Give every client actor a "
            "share of a GPU (ray.gpus above 0, ray.cpu_actors 0, nodes with CUDA), or choose bfloat16 or float32."
        )


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Run eligible operations in a lower precision inside a ``with`` block, like ``torch.autocast``.

    Args:
        precision: ``float32`` and ``tf32`` change nothing.
        device: device of the operations.
    """
    if precision in ("float32", "tf32"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """Let this process's GPU operations round the factors of float32 products to 10 bits, or forbid it.

    The flags hold for the backward pass too, which is outside of :func:`autocast`. PyTorch's defaults differ: cuDNN rounds,
    matrix products do not.

    Args:
        precision: Only ``tf32`` allows the rounding.
        device: device of the operations.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


class GradientScale:
    """Loss scale against underflow of float16 gradients: multiplies the loss and divides the gradients.

    A gradient that is not finite means that the scale was too large. As in ``torch.amp.GradScaler``, the step is skipped and
    the scale is halved. Every client has its own scale, so that batched and unbatched results agree. The scale never grows:
    GradScaler's grows after 2,000 steps, longer than a client's training.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Create the scale.

        Args:
            shape: (), or (clients,) for stacked parameters [clients, ...].
            device: device of the parameters.
        """
        self.scale = torch.full(shape, _FIRST_SCALE, device=device)
        """Scale of each client, float32."""

    def truncate(self, clients: int) -> None:
        """Drop all but the first clients."""
        self.scale = self.scale[:clients]

    def advance(self, optimiser: Optimiser, clip: Callable[[], object]) -> None:
        """Unscale the gradients, and take a step for clients with finite gradients.

        Args:
            optimiser: optimiser of parameters with gradients of scaled losses.
            clip: clips the unscaled gradients in place.
        """
        parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        finite = torch.ones_like(self.scale, dtype=torch.bool)
        for parameter in parameters:
            finite = finite & torch.isfinite(parameter.grad).reshape(*self.scale.shape, -1).all(dim=-1)
        for parameter in parameters:
            valid = self._expand_like(finite, parameter)
            parameter.grad = torch.where(valid, parameter.grad / self._expand_like(self.scale, parameter), 0.0)
        # Branching on `finite` would synchronise a GPU: take the step for all clients, then undo it for the overflowed ones.
        before = [
            (parameter, parameter.detach().clone(), _get_moments(optimiser, parameter)) for parameter in parameters
        ]
        clip()
        optimiser.advance()
        with torch.no_grad():
            for parameter, value, moments in before:
                valid = self._expand_like(finite, parameter)
                parameter.copy_(torch.where(valid, parameter, value))
                for name, moment in _get_moments(optimiser, parameter, copy=False).items():
                    moment.copy_(torch.where(valid, moment, moments.get(name, torch.zeros_like(moment))))
        self.scale = torch.where(finite, self.scale, self.scale / 2)

    def _expand_like(self, values: Tensor, parameter: Tensor) -> Tensor:
        """Add trailing dimensions to values [clients] for broadcasting against a parameter."""
        return values.view(*values.shape, *[1] * (parameter.ndim - values.ndim))


def _get_moments(optimiser: Optimiser, parameter: Tensor, copy: bool = True) -> dict[str, Tensor]:
    """Return the optimiser's element-wise state of a parameter, without the step count."""
    return {
        name: value.clone() if copy else value
        for name, value in optimiser.state.get(parameter, {}).items()
        if name != "step" and isinstance(value, Tensor)
    }
