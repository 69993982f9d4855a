"""2-d convolution, and group normalisation fused with ReLU and max pooling.

Functions take images with channels last, [batch, rows, columns, channels]. A spectrogram is an image of frames and bands. The
compiled operators compute in this layout, and take all clients of torch.func.vmap in a single call. Otherwise, PyTorch's operations
compute on views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.ops._backend import autocast_type, select_operators

_LARGEST_POOL = 15  # the backward pass needs the argmax of each pool, saved in a byte


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> Tensor:
    """Convolve over rows and columns.

    Args:
        x: float [batch, rows, columns, inputs].
        weight: as in torch.nn.Conv2d: [outputs, inputs, kernel rows, kernel columns].
        bias: [outputs]. ``None``: 0.
        stride: in rows and columns.
        padding: rows and columns of zeros above, left, below and right.

    Returns:
        [batch, rows, columns, outputs] with (rows + above + below - kernel rows) // stride + 1 rows, and columns by the same
        formula.
    """
    dtype = autocast_type(x)
    if dtype is not None and x.device.type == "cpu":
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast("cpu", enabled=False):
            return conv2d(x, weight, bias, stride=stride, padding=padding)
    operators = select_operators(x)
    fits = padding[0] < weight.shape[2] > padding[2] and padding[1] < weight.shape[3] > padding[3]
    if operators is not None and fits:
        weight, padding = _trim_kernel(x, weight, stride, padding)
        output: Tensor = operators.conv2d_forward(x, weight, bias, stride, padding)
        return output
    above, left, below, right = padding
    x = _rows_last(x)
    if (above, left) == (below, right):
        return _channels_last(F.conv2d(x, weight, bias, stride, (above, left)))
    return _channels_last(F.conv2d(F.pad(x, (left, right, above, below)), weight, bias, stride))


def group_norm(
    xs: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor],
    groups: int,
    epsilon: float,
    *,
    relu: bool = False,
    pool: int = 0,
    ceil: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """Normalise over groups of channels like torch.nn.GroupNorm, optionally followed by ReLU and max pooling.

    Args:
        xs: float [batch, rows, columns, channels], or a sequence of tensors with different channels. Each has its own groups, and
            the outputs are concatenated over channels.
        weight: [channels], or a sequence with an item for each tensor.
        bias: [channels], or a sequence with an item for each tensor.
        groups: number of groups in each tensor.
        epsilon: added to the variance.
        relu: whether to apply ReLU.
        pool: rows and columns of the pooling windows, up to 15. 0: no pooling. It requires ``relu``.
        ceil: whether to keep incomplete windows at the ends.
        lengths: int64 [batch]: valid rows. Padding is excluded from the statistics, and becomes 0. ``None``: all.

    Returns:
        [batch, rows, columns, channels], with rows and columns divided by ``pool``.
    """
    images = (xs,) if isinstance(xs, Tensor) else xs
    weights = (weight,) if isinstance(weight, Tensor) else weight
    biases = (bias,) if isinstance(bias, Tensor) else bias
    dtype = autocast_type(images[0])
    if dtype is not None and images[0].device.type == "cpu":
        images = [image.to(dtype) for image in images]
    operators = select_operators(images[0])
    if operators is not None and pool <= _LARGEST_POOL:
        output: Tensor = operators.norm_forward(images, weights, biases, lengths, groups, epsilon, relu, pool, ceil)[0]
        return output
    parts = zip(images, weights, biases, strict=True)
    outputs = [_rows_last(_group_norm(x, scale, shift, groups, epsilon, lengths)) for x, scale, shift in parts]
    y = _channels_last(torch.cat(outputs, dim=1)) if len(outputs) > 1 else _channels_last(outputs[0])
    return _relu_and_pool(y, relu, pool, ceil, lengths)


def relu_pool(x: Tensor, pool: int, *, ceil: bool = False) -> Tensor:
    """Apply ReLU and max-pool ``pool`` x ``pool`` windows of x [batch, rows, columns, channels].

    Args:
        x: float images, channels last.
        pool: rows and columns of a window.
        ceil: whether to keep incomplete windows at the ends.
    """
    operators = select_operators(x)
    if operators is not None and pool <= _LARGEST_POOL:
        output: Tensor = operators.norm_forward((x,), (), (), None, 0, 0.0, True, pool, ceil)[0]
        return output
    return _relu_and_pool(x, True, pool, ceil, None)


class Conv2d(nn.Conv2d):
    """Fast replacement of torch.nn.Conv2d. Unsupported options, such as dilation, fall back to torch's implementation."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x [batch, channels, rows, columns] to the same layout, like torch.nn.Conv2d."""
        if x.dim() != 4 or select_operators(x) is None:
            return super().forward(x)
        return _rows_last(self.channels_last(_channels_last(x)))

    def channels_last(self, x: Tensor) -> Tensor:
        """Convolve x [batch, rows, columns, channels] to the same layout."""
        plain = self.dilation == (1, 1) and self.groups == 1 and self.padding_mode == "zeros"
        if not plain or isinstance(self.padding, str):
            return _channels_last(super().forward(_rows_last(x)))
        rows, columns = (int(size) for size in self.padding)
        stride = (int(self.stride[0]), int(self.stride[1]))
        return conv2d(x, self.weight, self.bias, stride=stride, padding=(rows, columns, rows, columns))


def _trim_kernel(
    x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int, int, int]
) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Remove a kernel's outer taps that see only padding in very small images. Returns the kernel and its padding."""
    around = list(padding)
    for dim in (0, 1):
        size, kernel, before, after = x.shape[1 + dim], weight.shape[2 + dim], padding[dim], padding[2 + dim]
        results = (size + before + after - kernel) // stride[dim] + 1
        first, last = max(0, before - (results - 1) * stride[dim]), min(kernel - 1, size - 1 + before)
        if 0 < last - first + 1 < kernel:
            weight = weight.narrow(2 + dim, first, last - first + 1)
            around[dim], around[2 + dim] = before - first, after - (kernel - 1 - last)
    return weight, (around[0], around[1], around[2], around[3])


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def _rows_last(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _make_row_mask(x: Tensor, lengths: Tensor) -> Tensor:
    """Return a mask of the valid rows of x [batch, rows, ...], 1 or 0: [batch, rows, 1, 1]."""
    return (torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)).to(x.dtype)[:, :, None, None]


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, epsilon: float, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return _channels_last(F.group_norm(_rows_last(x), groups, weight, bias, epsilon))
    valid = _make_row_mask(x, lengths)
    channels = x.shape[3] // groups
    grouped = x.reshape(*x.shape[:3], groups, channels)
    mask = valid.unsqueeze(4)
    count = (valid.sum(dim=(1, 2, 3)) * (x.shape[2] * channels)).clamp_min(1.0)[:, None, None, None, None]
    centred = (grouped - (grouped * mask).sum(dim=(1, 2, 4), keepdim=True) / count) * mask
    variance = centred.square().sum(dim=(1, 2, 4), keepdim=True) / count
    output: Tensor = (centred * (variance + epsilon).rsqrt()).flatten(3) * weight + bias
    return output


def _relu_and_pool(y: Tensor, relu: bool, pool: int, ceil: bool, lengths: Tensor | None) -> Tensor:
    if relu:
        y = y.relu()
    if lengths is not None:
        y = y * _make_row_mask(y, lengths)  # after ReLU no value is negative, so padding of 0 is never the maximum
    return _channels_last(F.max_pool2d(_rows_last(y), pool, ceil_mode=ceil)) if pool else y
