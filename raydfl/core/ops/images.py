"""Images: convolution in two dimensions, and the group normalisation, ReLU and maximum pooling that follow it in one pass.

Functions take images with channels last, [batch, rows, columns, channels]; sounds are images of frames and bands. On a CPU the
compiled operators compute them so; everywhere else they are PyTorch's operations on views of the same tensors. Under
torch.func.vmap the compiled ones take all clients in one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.ops._backend import autocast_type, compiled_for

_LARGEST_POOL = 15  # which place of its pool a maximum was is kept in a byte


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
        weight: as torch.nn.Conv2d's, [outputs, inputs, kernel rows, kernel columns].
        bias: [outputs]; ``None`` is 0.
        stride: of rows and of columns.
        padding: rows and columns of zeros around: above, left, below, right.

    Returns:
        [batch, rows, columns, outputs]; rows are (rows + above + below - kernel rows) // stride + 1, columns likewise.
    """
    dtype = autocast_type(x)
    if dtype is not None and x.device.type == "cpu":
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast("cpu", enabled=False):
            return conv2d(x, weight, bias, stride=stride, padding=padding)
    operators = compiled_for(x)
    fits = padding[0] < weight.shape[2] > padding[2] and padding[1] < weight.shape[3] > padding[3]
    if operators is not None and fits:
        weight, padding = _seen(x, weight, stride, padding)
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
    """Normalise over groups of channels, see torch.nn.GroupNorm; with ``relu`` and ``pool`` followed by ReLU and pooling.

    Args:
        xs: float [batch, rows, columns, channels], or several that differ in channels only. Each has its own groups; the results
            are joined, channels of the first first.
        weight: [channels], or as many as there are ``xs``.
        bias: likewise.
        groups: of the channels of each of ``xs``.
        epsilon: added to the variance.
        relu: ReLU follows.
        pool: rows, and columns, of which the maximum is kept, up to 15; 0: no pooling. It needs ``relu``.
        ceil: a pool at the end that is not whole counts too; else it is dropped.
        lengths: int64 [batch]: rows that count; statistics leave out the others, which become 0. ``None``: all.

    Returns:
        [batch, rows, columns, channels], rows and columns divided by ``pool``.
    """
    several = (xs,) if isinstance(xs, Tensor) else xs
    weights = (weight,) if isinstance(weight, Tensor) else weight
    biases = (bias,) if isinstance(bias, Tensor) else bias
    dtype = autocast_type(several[0])
    if dtype is not None and several[0].device.type == "cpu":
        several = [each.to(dtype) for each in several]
    operators = compiled_for(several[0])
    if operators is not None and pool <= _LARGEST_POOL:
        output: Tensor = operators.norm_forward(several, weights, biases, lengths, groups, epsilon, relu, pool, ceil)[0]
        return output
    parts = zip(several, weights, biases, strict=True)
    normed = [_rows_last(_group_norm(x, own, shift, groups, epsilon, lengths)) for x, own, shift in parts]
    y = _channels_last(torch.cat(normed, dim=1)) if len(normed) > 1 else _channels_last(normed[0])
    return _after(y, relu, pool, ceil, lengths)


def relu_pool(x: Tensor, pool: int, *, ceil: bool = False) -> Tensor:
    """Return the maximum of ReLU over each ``pool`` x ``pool`` of x [batch, rows, columns, channels]; see :func:`group_norm`."""
    operators = compiled_for(x)
    if operators is not None and pool <= _LARGEST_POOL:
        output: Tensor = operators.norm_forward((x,), (), (), None, 0, 0.0, True, pool, ceil)[0]
        return output
    return _after(x, True, pool, ceil, None)


class Conv2d(nn.Conv2d):
    """torch.nn.Conv2d, [batch, channels, rows, columns] to the same; dilation, groups and so on are torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, see torch.nn.Conv2d."""
        if x.dim() != 4 or compiled_for(x) is None:
            return super().forward(x)
        return _rows_last(self.channels_last(_channels_last(x)))

    def channels_last(self, x: Tensor) -> Tensor:
        """Convolve images whose channels come last: [batch, rows, columns, channels] to the same."""
        plain = self.dilation == (1, 1) and self.groups == 1 and self.padding_mode == "zeros"
        if not plain or isinstance(self.padding, str):
            return _channels_last(super().forward(_rows_last(x)))
        rows, columns = (int(size) for size in self.padding)
        stride = (int(self.stride[0]), int(self.stride[1]))
        return conv2d(x, self.weight, self.bias, stride=stride, padding=(rows, columns, rows, columns))


def _seen(
    x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int, int, int]
) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Return a kernel without the taps at its edges that see nothing but padding, as in a very small image, and its padding."""
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


def _inside(x: Tensor, lengths: Tensor) -> Tensor:
    """Return 1 where a row of x [batch, rows, ...] counts, and 0 elsewhere: [batch, rows, 1, 1]."""
    return (torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)).to(x.dtype)[:, :, None, None]


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, epsilon: float, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return _channels_last(F.group_norm(_rows_last(x), groups, weight, bias, epsilon))
    inside = _inside(x, lengths)
    each = x.shape[3] // groups
    apart = x.reshape(*x.shape[:3], groups, each)
    mask = inside.unsqueeze(4)
    count = (inside.sum(dim=(1, 2, 3)) * (x.shape[2] * each)).clamp_min(1.0)[:, None, None, None, None]
    centred = (apart - (apart * mask).sum(dim=(1, 2, 4), keepdim=True) / count) * mask
    variance = centred.square().sum(dim=(1, 2, 4), keepdim=True) / count
    normed: Tensor = (centred * (variance + epsilon).rsqrt()).flatten(3) * weight + bias
    return normed


def _after(y: Tensor, relu: bool, pool: int, ceil: bool, lengths: Tensor | None) -> Tensor:
    if relu:
        y = y.relu()
    if lengths is not None:
        y = y * _inside(y, lengths)  # nothing is below 0 after ReLU, so padding is never the maximum
    return _channels_last(F.max_pool2d(_rows_last(y), pool, ceil_mode=ceil)) if pool else y
