"""Normalisations of networks with padding: group normalisation, and constant batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.ops import group_norm


class GroupNorm(nn.GroupNorm):
    """Group normalisation with the statistics of valid frames only."""

    def forward(self, x: Tensor, lengths: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """Normalise x. Frames of padding become 0.

        Args:
            x: float32 [batch, channels, frames, bands].
            lengths: int64 [batch], number of valid frames. ``None``: all.
            relu: apply ReLU to the result.
        """
        return normalise([x.permute(0, 2, 3, 1)], [self], lengths, relu=relu).permute(0, 3, 1, 2)


class FrozenBatchNorm(nn.BatchNorm2d):
    """Batch normalisation with constant statistics, scales and shifts, in training too. Names are those of PyTorch's layer.

    Examples of a batch do not influence each other. The tensors are frozen: they are never trained or sent.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.requires_grad_(False)

    def forward(self, x: Tensor, lengths: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """Normalise x, with the arguments of :meth:`GroupNorm.forward`."""
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if relu:
            y = y.relu_()
        return y if lengths is None else y * mask_frames(y.movedim(1, -1), lengths).movedim(-1, 1)


def normalise(
    xs: Sequence[Tensor],
    norms: Sequence[GroupNorm],
    lengths: Tensor | None = None,
    *,
    relu: bool = False,
    pool: int = 0,
    ceil: bool = False,
) -> Tensor:
    """Normalise tensors by their layers and concatenate their channels with :func:`raydfl.core.ops.group_norm`.

    Args:
        xs: float32 [batch, frames, bands, channels] each.
        norms: a layer for each tensor, all with the same number of groups.
        lengths: int64 [batch], number of valid frames. ``None``: all.
        relu: apply ReLU.
        pool: size of max pooling. 0: none.
        ceil: keep a last incomplete pooling window.
    """
    weights, biases = [norm.weight for norm in norms], [norm.bias for norm in norms]
    first = norms[0]
    return group_norm(
        xs, weights, biases, first.num_groups, first.eps, relu=relu, pool=pool, ceil=ceil, lengths=lengths
    )


def mask_frames(x: Tensor, lengths: Tensor) -> Tensor:
    """Compute the mask of valid frames: [batch, frames, 1, 1] of 1 or 0.

    Args:
        x: [batch, frames, ...].
        lengths: int64 [batch], number of valid frames.
    """
    valid = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
    return valid.to(x.dtype)[:, :, None, None]
