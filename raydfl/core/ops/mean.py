"""The mean over time that leaves padding out."""

from __future__ import annotations

import torch
from torch import Tensor

from raydfl.core.ops._backend import compiled_for


def mean_over_time(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the mean of x [batch, frames, channels] over the frames that count: [batch, channels].

    Args:
        x: float, one frame or more.
        lengths: int64 [batch]: frames that count, from the first on; without any the mean is 0. ``None``: all.
    """
    operators = compiled_for(x)
    if operators is not None and x.dim() == 3:
        mean: Tensor = operators.mean_forward(x, lengths)
        return mean
    if lengths is None:
        return x.mean(dim=1)
    outside = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
    return x.masked_fill(outside.unsqueeze(2), 0.0).sum(dim=1) / lengths.clamp_min(1).unsqueeze(1)
