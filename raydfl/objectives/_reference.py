"""Distances between the outputs of recordings and of training clips."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from raydfl.data import Examples
from raydfl.training import Step, predict

Reference = Literal["own_centre", "mahalanobis", "nearest"]

_RIDGE = 1e-6
"""Constant added to each variance, so that identical outputs have an invertible covariance."""

_FARTHEST = 4.0
"""Squared distance of opposite points on the unit sphere."""


def compare_with_training(
    kind: Reference,
    step: Step,
    name: str,
    examples: Examples,
    normal: Examples,
    batch_size: int,
    excluded: Tensor | None = None,
) -> Tensor:
    """Compute the distances of a model's outputs, scaled to length 1, from its outputs for normal training clips.

    Args:
        kind: See :func:`distances`.
        step: Step with the model and its data.
        name: The model.
        examples: Clips or segments to score.
        normal: Normal training clips, cut for tests.
        batch_size: Examples of a forward pass.
        excluded: bool [examples, normal], true for training clips that are no reference of an example. ``None``: none. Only for
            the kind ``nearest``.

    Returns:
        float64 [examples, 1].
    """
    reference, z = (F.normalize(predict(step, name, clips, batch_size).double(), dim=1) for clips in (normal, examples))
    same = torch.from_numpy(examples.clips[:, None] == normal.clips[None, :])
    return distances(kind, z, reference, same if excluded is None else same | excluded)[:, None]


def distances(kind: Reference, z: Tensor, reference: Tensor, same: Tensor | None = None) -> Tensor:
    """Compute the squared distance of outputs from reference outputs.

    Args:
        kind: ``own_centre``: distance from the mean of the reference. ``mahalanobis``: Mahalanobis distance from the mean, with
            the covariance shrunk as in O. Ledoit and M. Wolf (2004). ``nearest``: distance from the nearest reference row of
            another clip.
        z: float64 [rows, size], outputs.
        reference: float64 [clips or segments, size], reference outputs, at least one.
        same: bool [rows, clips or segments], true for rows of the same clip, which are no neighbours. ``None``: all clips differ.

    Returns:
        float64 [rows].
    """
    if kind == "nearest":
        away = torch.cdist(z, reference, compute_mode="donot_use_mm_for_euclid_dist").square()
        nearest: Tensor = (away if same is None else away.masked_fill(same, _FARTHEST)).amin(dim=1)
        return nearest
    away = z - reference.mean(dim=0)
    if kind == "own_centre":
        return away.square().sum(dim=1)
    from sklearn.covariance import ledoit_wolf  # takes a second to import, and most runs do not need it

    covariance = _RIDGE * torch.eye(z.shape[1], dtype=z.dtype)
    if len(reference) > 1:
        covariance = covariance + torch.from_numpy(ledoit_wolf(reference.numpy())[0])
    mahalanobis: Tensor = (away * torch.linalg.solve(covariance, away.T).T).sum(dim=1)
    return mahalanobis
