"""Group normalisation that does not see padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raydfl.core.ops import group_norm


class GroupNorm(nn.GroupNorm):
    """Normalisation over groups of channels, each with the statistics of the frames that count."""

    def forward(self, x: Tensor, lengths: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """Return x normalised, with the statistics of the frames that count; the others become 0.

        Args:
            x: float32 [batch, channels, frames, bands].
            lengths: int64 [batch]: frames that count; ``None``: all.
            relu: ReLU follows.
        """
        return normalised([x.permute(0, 2, 3, 1)], [self], lengths, relu=relu).permute(0, 3, 1, 2)


def normalised(
    xs: Sequence[Tensor],
    norms: Sequence[GroupNorm],
    lengths: Tensor | None = None,
    *,
    relu: bool = False,
    pool: int = 0,
    ceil: bool = False,
) -> Tensor:
    """Return some images, each normalised by its layer, channels joined; see :func:`raydfl.core.ops.group_norm`.

    Args:
        xs: float32 [batch, frames, bands, channels] each.
        norms: of as many groups each.
    """
    weights, biases = [norm.weight for norm in norms], [norm.bias for norm in norms]
    first = norms[0]
    return group_norm(
        xs, weights, biases, first.num_groups, first.eps, relu=relu, pool=pool, ceil=ceil, lengths=lengths
    )


def inside_of(x: Tensor, lengths: Tensor) -> Tensor:
    """Return which frames of x [batch, frames, ...] count: [batch, frames, 1, 1], 1 or 0.

    Args:
        lengths: int64 [batch]: frames that count.
    """
    counting = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
    return counting.to(x.dtype)[:, :, None, None]
