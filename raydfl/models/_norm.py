"""Group normalisation that does not see padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GroupNorm(nn.GroupNorm):
    """Normalisation over groups of channels, each with the statistics of the frames that count."""

    def forward(self, x: Tensor, inside: Tensor | None = None) -> Tensor:
        """Return x [batch, channels, frames, bands] normalised, with the statistics of the frames where ``inside`` is 1.

        Args:
            x: float32.
            inside: float32 [batch, 1, frames, 1], 1 or 0; ``None``: all frames count.
        """
        if inside is None:
            return super().forward(x)
        groups = (x * inside).view(x.shape[0], self.num_groups, -1, x.shape[3])
        # Zeros in padding add nothing to the sums.
        count = (inside.sum(dim=(1, 2, 3)) * (x.shape[1] // self.num_groups * x.shape[3])).clamp_min(1.0)[:, None]
        mean = groups.sum(dim=(2, 3)) / count
        variance = (groups.square().sum(dim=(2, 3)) / count - mean.square()).clamp_min(0.0)
        scale, shift = (
            each.repeat_interleave(x.shape[1] // self.num_groups, dim=1)[:, :, None, None]
            for each in ((variance + self.eps).rsqrt(), mean)
        )
        return (x - shift) * scale * self.weight[:, None, None] + self.bias[:, None, None]


def inside_of(x: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Return which frames of x [batch, channels, frames, bands] count: [batch, 1, frames, 1], 1 or 0; ``None``: all.

    Args:
        lengths: int64 [batch]: frames that count; ``None``: all.
    """
    if lengths is None:
        return None
    counting = torch.arange(x.shape[2], device=x.device) < lengths.unsqueeze(1)
    return counting.to(x.dtype)[:, None, :, None]
