"""Spectra of a batch on their way into training: to power and back, z-scores, noise and masks.

In every function ``x`` is float32 [..., frames, bands], with any leading dimensions, and may be overwritten; ``frames`` is
int64 [...]: an example's frames that are no padding. Padding is not looked at; what stands in it afterwards has no
meaning. An example's numbers do not depend on those beside it, nor on how much padding it has.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from raydfl.core.ops._backend import compiled_for

_LEAST_NORMAL = 2e-37
"""Least power: below it the compiled exponential and logarithm are not exact."""


@functools.lru_cache(maxsize=256)
def places(size: int, device: torch.device) -> Tensor:
    """Return 0 to ``size`` - 1: int64 [size], to be read only. It is made once, for every batch asks for it."""
    return torch.arange(size, device=device)


def inside(x: Tensor, frames: Tensor) -> Tensor:
    """Return 1 for frames that are no padding and 0 for the others: float32 [..., frames, 1]."""
    return (places(x.shape[-2], x.device) < frames.unsqueeze(-1)).unsqueeze(-1).float()


def to_power(x: Tensor, frames: Tensor, least: float, factor: float) -> Tensor:
    """Return the power of spectra of which :func:`to_logarithm`, with the same numbers, makes ``x`` again."""
    operators = compiled_for(x)
    if operators is None or least < _LEAST_NORMAL:
        return x.mul_(1 / factor).exp_()
    x = x.contiguous()
    operators.to_power(x, frames, 1 / factor)
    return x


def to_logarithm(x: Tensor, frames: Tensor, least: float, factor: float) -> Tensor:
    """Return ``factor`` times the natural logarithm of power, or of ``least`` where it is smaller."""
    operators = compiled_for(x)
    if operators is None or least < _LEAST_NORMAL:
        return x.clamp_min_(least).log_().mul_(factor)
    x = x.contiguous()
    operators.to_logarithm(x, frames, least, factor)
    return x


def to_z_scores(x: Tensor, frames: Tensor, epsilon: float) -> Tensor:
    """Return the z-scores of each band over an example's frames.

    Args:
        epsilon: added to the standard deviation, by which is divided.
    """
    operators = compiled_for(x)
    if operators is not None:
        x = x.contiguous()
        operators.to_z_scores(x, frames, epsilon)
        return x
    # Multiplied and not filled by a mask: that is vectorised, and takes a tenth of the time.
    real = inside(x, frames)
    count = frames.clamp_min(1)[..., None, None]
    x = x.mul_(real)
    x = x.sub_(x.sum(dim=-2, keepdim=True).div_(count)).mul_(real)
    return x.div_(x.square().sum(dim=-2, keepdim=True).div_(count).sqrt_().add_(epsilon))


def add_noise(x: Tensor, frames: Tensor, noise: Tensor, first: Tensor, ratio: Tensor) -> Tensor:
    """Return power with noise.

    Args:
        noise: power float32 [frames, bands], whose frames have a mean sum of 1; after its last comes its first.
        first: int64 [...]: the noise's frame at an example's first.
        ratio: float32 [...]: power of the noise to that of the example, a mean of its frames.
    """
    operators = compiled_for(x)
    if operators is not None:
        x = x.contiguous()
        operators.add_noise(x, frames, noise, first, ratio)
        return x
    mean = (x * inside(x, frames)).sum(dim=(-2, -1)) / frames.clamp_min(1)
    rows = (first.unsqueeze(-1) + places(x.shape[-2], x.device)) % len(noise)
    stretch = noise.index_select(0, rows.flatten()).view(*rows.shape, x.shape[-1])
    return x.addcmul_(stretch, (ratio * mean)[..., None, None])


def mask(x: Tensor, frames: Tensor, firsts: Tensor, lengths: Tensor, lowest: Tensor, widths: Tensor) -> Tensor:
    """Return spectra with stretches of frames and of bands that have the mean of the example.

    Args:
        firsts: int64 [..., masks]: first frame of each stretch of frames.
        lengths: their frames.
        lowest: int64 [..., masks]: lowest band of each stretch of bands.
        widths: their bands.
    """
    operators = compiled_for(x)
    if operators is not None:
        x = x.contiguous()
        operators.mask(x, frames, firsts, lengths, lowest, widths)
        return x
    mean = (x * inside(x, frames)).sum(dim=(-2, -1)) / (frames.clamp_min(1) * x.shape[-1])
    kept = _left(firsts, lengths, x.shape[-2]).unsqueeze(-1) * _left(lowest, widths, x.shape[-1]).unsqueeze(-2)
    return x.mul_(kept).addcmul_(1 - kept, mean[..., None, None])


def _left(first: Tensor, length: Tensor, size: int) -> Tensor:
    """Return which of ``size`` places no mask covers: float32 [..., size], 1 or 0."""
    place = places(size, first.device)
    first = first.unsqueeze(-1)
    return ((place < first) | (place >= first + length.unsqueeze(-1))).all(dim=-2).float()
