"""1-d convolution over time, optionally fused with ReLU and max pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raydfl.core.ops import _torch
from raydfl.core.ops._backend import (
    autocast_type,
    check_group,
    second_derivative_error,
    select_operators,
    stack_clients,
    torch_is_better,
)

_LARGEST_POOL = 254  # the backward pass needs the argmax of each pool, saved in a byte


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    padding: int = 0,
    *,
    pool: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Convolve over time with stride 1. With ``pool``, apply ReLU and max pooling.

    Args:
        x: float [batch, frames, inputs], or [clients, batch, frames, inputs] with weights and lengths of each client.
        weight: as in torch.nn.Conv1d: [outputs, inputs, kernel], or [clients, outputs, inputs, kernel].
        bias: [outputs] or [clients, outputs]. ``None``: 0.
        padding: frames of zeros at either end, 0 to kernel - 1.
        pool: size of the pooling windows in frames, 1 to 254. An incomplete window at the end is dropped. ``None``: neither pooling
            nor ReLU.
        lengths: int64 [batch] or [clients, batch]: valid frames of ``x``. Padding counts as zeros. ``None``: all.

    Returns:
        [..., frames + 2 * padding - kernel + 1, outputs], with the frames divided by ``pool`` and rounded down.
    """
    if bias is None:
        bias = weight.new_zeros(weight.shape[:-2])
    dtype = autocast_type(x)
    if dtype is not None:
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = weight.to(dtype), bias.to(dtype)
            return conv1d(x.to(dtype), weight, bias, padding, pool=pool, lengths=lengths)
    operators = select_operators(x)
    forward = _ConvolutionFunction.apply if operators is None else operators.conv_forward
    output: Tensor = forward(x, weight, bias, lengths, padding, pool or 0)[0]
    return output


class Conv1d(nn.Conv1d):
    """Fast replacement of torch.nn.Conv1d. Unsupported options, such as strides, fall back to torch's implementation."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x [batch, channels, frames] to [batch, channels, frames], like torch.nn.Conv1d."""
        if not self._supports(x):
            return super().forward(x)
        return conv1d(x.transpose(-1, -2), self.weight, self.bias, int(self.padding[0])).transpose(-1, -2)

    def pooled(self, x: Tensor, pool: int, lengths: Tensor | None = None) -> Tensor:
        """Convolve, apply ReLU and max-pool, with time before channels.

        Args:
            x: float [batch, frames, channels].
            pool: size of the pooling windows in frames.
            lengths: int64 [batch]: valid frames. Padding counts as zeros. ``None``: all.
        """
        if self._supports(x) and pool <= _LARGEST_POOL:
            return conv1d(x, self.weight, self.bias, int(self.padding[0]), pool=pool, lengths=lengths)
        if lengths is not None:
            outside = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
            x = x.masked_fill(outside.unsqueeze(2), 0.0)
        return nn.functional.max_pool1d(super().forward(x.transpose(1, 2)).relu(), pool).transpose(1, 2)

    def _supports(self, x: Tensor) -> bool:
        """Return whether :func:`conv1d` implements the module's options, and is faster for ``x``."""
        return (
            not torch_is_better(x)
            and x.dim() == 3
            and self.stride == self.dilation == (1,)
            and self.groups == 1
            and self.padding_mode == "zeros"
            and not isinstance(self.padding, str)
            and self.padding[0] < self.kernel_size[0]
        )


class _ConvolutionFunction(torch.autograd.Function):
    forward = staticmethod(_torch.conv_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, lengths, ctx.padding, ctx.pool = inputs
        codes = output[1]
        ctx.mark_non_differentiable(codes)
        ctx.set_materialize_grads(False)  # otherwise autograd would allocate zero gradients for codes
        ctx.save_for_backward(codes, x, weight, lengths)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        codes, x, weight, lengths = ctx.saved_tensors
        needed = ctx.needs_input_grad[0]
        # torch.func may map the gradient, too, so there it must be an operation with a vmap rule.
        backward = _ConvolutionBackward.apply if torch.is_grad_enabled() else _torch.conv_backward
        dx, dweight, dbias = backward(dy, codes, x, weight, lengths, ctx.padding, ctx.pool, needed)
        return dx if needed else None, dweight, dbias, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        stacked = stack_clients(info.batch_size, in_dims, values)
        check_group("Conv1d", stacked[0])
        return _ConvolutionFunction.apply(*stacked), (0, 0)


class _ConvolutionBackward(torch.autograd.Function):
    forward = staticmethod(_torch.conv_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing, because backward raises an error."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise second_derivative_error("Conv1d")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        stacked = stack_clients(info.batch_size, in_dims, values)
        return _ConvolutionBackward.apply(*stacked), (0, 0, 0)
