"""Distances of recordings' outputs from those of training clips."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reference = Literal["own_centre", "mahalanobis", "nearest"]

_RIDGE = 1e-6
"""Added to each variance, so that outputs that are all one point have a covariance that can be inverted."""


_FARTHEST = 4.0
"""The squared distance of opposite points of length 1."""


def distances(kind: Reference, z: Tensor, reference: Tensor, same: Tensor | None = None) -> Tensor:
    """Return a squared distance for each of z: float64 [rows].

    ``own_centre``: from the mean of the reference. ``mahalanobis``: from it, by the reference's covariance, which is shrunk towards
    a multiple of the identity as far as O. Ledoit and M. Wolf found best (2004). ``nearest``: from the nearest one of another clip.

    Args:
        kind: which distance.
        z: float64 [rows, size].
        reference: float64 [clips or segments, size], at least one.
        same: bool [rows, clips or segments]: which are of one clip; ``None``: none are.
    """
    if kind == "nearest":
        away = torch.cdist(z, reference, compute_mode="donot_use_mm_for_euclid_dist").square()
        nearest: Tensor = (away if same is None else away.masked_fill(same, _FARTHEST)).amin(dim=1)
        return nearest
    away = z - reference.mean(dim=0)
    if kind == "own_centre":
        return away.square().sum(dim=1)
    from sklearn.covariance import ledoit_wolf  # a second that most runs need not spend

    covariance = _RIDGE * torch.eye(z.shape[1], dtype=z.dtype)
    if len(reference) > 1:
        covariance = covariance + torch.from_numpy(ledoit_wolf(reference.numpy())[0])
    mahalanobis: Tensor = (away * torch.linalg.solve(covariance, away.T).T).sum(dim=1)
    return mahalanobis
