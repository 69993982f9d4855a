"""Operations over time that leave padding out. ``lengths`` is int64 [batch]: frames that count, from the first on."""

from __future__ import annotations

import torch
from torch import Tensor


def masked(x: Tensor, lengths: Tensor, dim: int) -> Tensor:
    """``x`` with 0 in its padding; time is dimension ``dim``, the batch dimension 0."""
    shape = [1] * x.ndim
    shape[dim] = -1
    frames = torch.arange(x.shape[dim], device=x.device).view(shape)
    return x.masked_fill(frames >= lengths.view(-1, *[1] * (x.ndim - 1)), 0.0)


def mean_over_time(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean of x [batch, frames, channels] over the frames that count: [batch, channels]."""
    if lengths is None:
        return x.mean(dim=1)
    return masked(x, lengths, dim=1).sum(dim=1) / lengths.clamp_min(1).unsqueeze(1)


def reversed_in_time(x: Tensor, lengths: Tensor) -> Tensor:
    """The frames that count of x [batch, frames, channels] in reverse order, and the padding where it was."""
    frames = torch.arange(x.shape[1], device=x.device)
    ends = lengths.unsqueeze(1)
    order = torch.where(frames < ends, ends - 1 - frames, frames)
    return x.gather(1, order.unsqueeze(2).expand_as(x))
