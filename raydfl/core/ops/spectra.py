"""Transforms of a batch's spectrograms before training: power and logarithm, z-scores, noise and masks.

In every function ``x`` is float32 [..., frames, bands] with any leading dimensions, and may be overwritten. ``frames`` is int64
[...]: each example's valid frames. Padding is ignored, and undefined in the result. An example's values depend neither on its batch
nor on the amount of padding.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from raydfl.core.ops._backend import select_operators

_LEAST_NORMAL = 2e-37
"""Minimum power for the compiled exponential and logarithm. Below it they are not exact."""


@functools.lru_cache(maxsize=256)
def make_range(size: int, device: torch.device) -> Tensor:
    """Return 0 to ``size`` - 1: int64 [size]. The tensor is cached for all batches, so do not modify it."""
    return torch.arange(size, device=device)


def make_frame_mask(x: Tensor, frames: Tensor) -> Tensor:
    """Return a mask of the valid frames, 1 or 0: float32 [..., frames, 1]."""
    return (make_range(x.shape[-2], x.device) < frames.unsqueeze(-1)).unsqueeze(-1).float()


def to_power(x: Tensor, frames: Tensor, least: float, factor: float) -> Tensor:
    """Convert log spectrograms to power, the inverse of :func:`to_logarithm` with the same arguments."""
    operators = select_operators(x)
    if operators is None or least < _LEAST_NORMAL:
        return x.mul_(1 / factor).exp_()
    x = x.contiguous()
    operators.to_power(x, frames, 1 / factor)
    return x


def to_logarithm(x: Tensor, frames: Tensor, least: float, factor: float) -> Tensor:
    """Convert power to ``factor`` times its natural logarithm, after clamping it to at least ``least``."""
    operators = select_operators(x)
    if operators is None or least < _LEAST_NORMAL:
        return x.clamp_min_(least).log_().mul_(factor)
    x = x.contiguous()
    operators.to_logarithm(x, frames, least, factor)
    return x


def to_z_scores(x: Tensor, frames: Tensor, epsilon: float) -> Tensor:
    """Normalise each band to z-scores over an example's frames.

    Args:
        x: float32 [..., frames, bands].
        frames: int64 [...]: valid frames.
        epsilon: added to the standard deviation in the divisor.
    """
    operators = select_operators(x)
    if operators is not None:
        x = x.contiguous()
        operators.to_z_scores(x, frames, epsilon)
        return x
    # Multiplication by a mask is vectorised, and takes a tenth of the time of masked_fill.
    real = make_frame_mask(x, frames)
    count = frames.clamp_min(1)[..., None, None]
    x = x.mul_(real)
    x = x.sub_(x.sum(dim=-2, keepdim=True).div_(count)).mul_(real)
    return x.div_(x.square().sum(dim=-2, keepdim=True).div_(count).sqrt_().add_(epsilon))


def add_noise(x: Tensor, frames: Tensor, noise: Tensor, first: Tensor, ratio: Tensor) -> Tensor:
    """Add noise to power spectrograms.

    Args:
        x: power, float32 [..., frames, bands].
        frames: int64 [...]: valid frames.
        noise: power of the noise, float32 [frames, bands], scaled to a mean of 1 of the frames' sums. It repeats cyclically.
        first: int64 [...]: the noise's frame for each example's first frame.
        ratio: float32 [...]: power ratio of noise to example, on average over its frames.
    """
    operators = select_operators(x)
    if operators is not None:
        x = x.contiguous()
        operators.add_noise(x, frames, noise, first, ratio)
        return x
    mean = (x * make_frame_mask(x, frames)).sum(dim=(-2, -1)) / frames.clamp_min(1)
    rows = (first.unsqueeze(-1) + make_range(x.shape[-2], x.device)) % len(noise)
    stretch = noise.index_select(0, rows.flatten()).view(*rows.shape, x.shape[-1])
    return x.addcmul_(stretch, (ratio * mean)[..., None, None])


def mask(x: Tensor, frames: Tensor, firsts: Tensor, lengths: Tensor, lowest: Tensor, widths: Tensor) -> Tensor:
    """Replace ranges of frames and of bands by the example's mean (SpecAugment).

    Args:
        x: float32 [..., frames, bands].
        frames: int64 [...]: valid frames.
        firsts: int64 [..., masks]: first frame of each time mask.
        lengths: int64 [..., masks]: number of frames in each time mask.
        lowest: int64 [..., masks]: lowest band of each frequency mask.
        widths: int64 [..., masks]: number of bands in each frequency mask.
    """
    operators = select_operators(x)
    if operators is not None:
        x = x.contiguous()
        operators.mask(x, frames, firsts, lengths, lowest, widths)
        return x
    mean = (x * make_frame_mask(x, frames)).sum(dim=(-2, -1)) / (frames.clamp_min(1) * x.shape[-1])
    visible = _is_visible(firsts, lengths, x.shape[-2]).unsqueeze(-1)
    visible = visible * _is_visible(lowest, widths, x.shape[-1]).unsqueeze(-2)
    return x.mul_(visible).addcmul_(1 - visible, mean[..., None, None])


def _is_visible(first: Tensor, length: Tensor, size: int) -> Tensor:
    """Return 1 for positions outside all masks and 0 inside: float32 [..., size]."""
    place = make_range(size, first.device)
    first = first.unsqueeze(-1)
    return ((place < first) | (place >= first + length.unsqueeze(-1))).all(dim=-2).float()
