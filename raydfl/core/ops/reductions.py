"""Reductions: the mean over time that leaves padding out, and the term of a loss that keeps clients from drifting apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raydfl.core.ops._backend import compiled_for


def drift_term(
    weights: Sequence[Tensor],
    pull: float | Tensor = 0.0,
    anchors: Sequence[Tensor] = (),
    slopes: Sequence[Tensor] = (),
) -> Tensor:
    """Return pull / 2 sum ||w - a||^2 + sum <w - a, s> over the weights w of a network, their anchors a and slopes s: a scalar.

    With anchors it is FedProx's proximal term, with slopes SCAFFOLD's correction, with both FedDC's. On a CPU all weights are read
    once forward and once backward, in one call. It has gradients, pull (w - a) + s, for the weights alone, and once.

    Args:
        weights: float, of any shapes, not none.
        pull: a number, or a scalar of the weights' type; under vmap over clients it may be each client's own.
        anchors: one for each weight, of its shape; none: all 0.
        slopes: likewise.

    Raises:
        ValueError: they are not as many as the weights.
    """
    if any(len(each) not in (0, len(weights)) for each in (anchors, slopes)):
        raise ValueError(
            f"{len(weights)} weights have {len(anchors)} anchors and {len(slopes)} slopes: each has one, or none has"
        )
    operators = compiled_for(weights[0])
    if operators is not None and all(weight.dtype == torch.float32 for weight in weights):
        if not isinstance(pull, Tensor):
            pull = torch.full((), pull, dtype=torch.float32)
        term: Tensor = operators.drift_forward(weights, anchors, slopes, pull)
        return term
    aways = [weight - anchor for weight, anchor in zip(weights, anchors, strict=True)] if anchors else weights
    terms = [(away * slope).sum() for away, slope in zip(aways, slopes, strict=True)] if slopes else []
    if isinstance(pull, Tensor) or pull or not slopes:
        terms.append(pull / 2 * torch.stack([away.square().sum() for away in aways]).sum())
    return torch.stack(terms).sum()


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
