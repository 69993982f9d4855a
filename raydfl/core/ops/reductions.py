"""Reductions: the mean over time without padding, and the loss term against client drift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raydfl.core.ops._backend import select_operators


def drift_term(
    weights: Sequence[Tensor],
    pull: float | Tensor = 0.0,
    anchors: Sequence[Tensor] = (),
    slopes: Sequence[Tensor] = (),
) -> Tensor:
    """Compute pull / 2 sum ||w - a||^2 + sum <w - a, s> over weights w, anchors a and slopes s: a scalar.

    With anchors it is FedProx's proximal term, with slopes SCAFFOLD's correction, and with both FedDC's. On a CPU it reads all
    weights once forward and once backward, in a single call. Only weights have a gradient, pull (w - a) + s. It has no second
    gradient.

    Args:
        weights: at least one float tensor, of any shapes.
        pull: a number, or a scalar of the weights' dtype. Under vmap over clients it may differ between clients.
        anchors: a tensor for each weight, of its shape. Empty: 0.
        slopes: a tensor for each weight, of its shape. Empty: 0.

    Raises:
        ValueError: the number of anchors or slopes is neither 0 nor the number of weights.
    """
    if any(len(tensors) not in (0, len(weights)) for tensors in (anchors, slopes)):
        raise ValueError(
            f"drift_term: {len(weights)} weights have {len(anchors)} anchors and {len(slopes)} slopes. Give an anchor and a slope "
            f"for each weight, or an empty sequence."
        )
    operators = select_operators(weights[0])
    if operators is not None and all(weight.dtype == torch.float32 for weight in weights):
        if not isinstance(pull, Tensor):
            pull = torch.full((), pull, dtype=torch.float32)
        term: Tensor = operators.drift_forward(weights, anchors, slopes, pull)
        return term
    drifts = [weight - anchor for weight, anchor in zip(weights, anchors, strict=True)] if anchors else weights
    terms = [(drift * slope).sum() for drift, slope in zip(drifts, slopes, strict=True)] if slopes else []
    if isinstance(pull, Tensor) or pull or not slopes:
        terms.append(pull / 2 * torch.stack([drift.square().sum() for drift in drifts]).sum())
    return torch.stack(terms).sum()


def mean_over_time(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Average over the valid frames: [batch, channels].

    Args:
        x: float [batch, frames, channels], with at least one frame.
        lengths: int64 [batch]: valid frames. The mean of 0 frames is 0. ``None``: all.
    """
    operators = select_operators(x)
    if operators is not None and x.dim() == 3:
        mean: Tensor = operators.mean_forward(x, lengths)
        return mean
    if lengths is None:
        return x.mean(dim=1)
    outside = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
    return x.masked_fill(outside.unsqueeze(2), 0.0).sum(dim=1) / lengths.clamp_min(1).unsqueeze(1)
