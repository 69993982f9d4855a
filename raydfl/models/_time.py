"""Operations over time that leave padding out. ``lengths`` is int64 [batch]: frames that count, from the first on."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_over_time(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean of x [batch, frames, channels] over the frames that count: [batch, channels]."""
    if lengths is None:
        return x.mean(dim=1)
    outside = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
    return x.masked_fill(outside.unsqueeze(2), 0.0).sum(dim=1) / lengths.clamp_min(1).unsqueeze(1)
