"""Reconstruct: anomaly detection with an autoencoder, scored by the reconstruction error.

    t_i   features of clip i, averaged in ``bins`` intervals of equal duration: [bins, bands]
    z_i   output of the network for clip i, ``size`` dimensions
    loss  mean over clips, bins and bands of (d(z_i) - t_i)^2

The decoder d has one hidden layer. Its tensors belong to the network (``model/objective...``) and are sent with it. The score
of a recording is its mean squared error. If an interval starts within a frame, the frame counts in both intervals by its
fractions.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, ModelSpec
from raydfl.objectives._anomaly import AnomalyObjective
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class Reconstruct(AnomalyObjective):
    """Autoencoder: a recording's score is its reconstruction error."""

    size: Annotated[int, Field(ge=1, description="Dimension of the bottleneck, the network's outputs.")] = 32
    bins: Annotated[int, Field(ge=1, description="Time intervals of a clip with reconstructed mean features.")] = 16
    hidden: Annotated[int, Field(ge=1, description="Units of the decoder's hidden layer.")] = 128

    def outputs(self, classes: int) -> int:
        """Return ``size``."""
        return self.size

    def extension(self, spec: ModelSpec) -> nn.Module:
        """Build the decoder.

        Raises:
            ConfigError: the network reads images.
        """
        if not isinstance(spec.inputs, int):
            raise ConfigError(
                "objective: reconstruct needs frames of features, but the network reads images. Set objective=compact."
            )
        return nn.Sequential(
            nn.Linear(self.size, self.hidden), nn.ReLU(), nn.Linear(self.hidden, self.bins * spec.inputs)
        )

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean squared error."""
        network = cast(Any, step.models[name])
        reconstruction = network.objective(step.forward(name, batch))
        return batch.mean(_compute_errors(reconstruction, *batch.input_of(network), self.bins))

    def predictor(self, network: nn.Module) -> nn.Module:
        """Wrap the network and its decoder to compute the reconstruction error."""
        return _ReconstructionError(network, self.bins)


class _ReconstructionError(nn.Module):
    """Autoencoder with the mean squared error as its output: float32 [batch, 1]."""

    def __init__(self, network: nn.Module, bins: int) -> None:
        super().__init__()
        self.network = network
        self.bins = bins

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        reconstruction = cast(Any, self.network).objective(self.network(x, lengths))
        return _compute_errors(reconstruction, x, lengths, self.bins).unsqueeze(1)


def _compute_errors(reconstruction: Tensor, x: Tensor, lengths: Tensor | None, bins: int) -> Tensor:
    """Compute the mean squared error of each example: float32 [batch].

    Args:
        reconstruction: [batch, bins * bands].
        x: [batch, frames, bands].
        lengths: int64 [batch] or ``None``.
        bins: number of intervals.
    """
    return (reconstruction.float() - average_bins(x, lengths, bins).flatten(1)).square().mean(dim=1)


def average_bins(x: Tensor, lengths: Tensor | None, bins: int) -> Tensor:
    """Average frames in time intervals of equal duration.

    Args:
        x: float32 [batch, frames, bands].
        lengths: int64 [batch], number of valid frames. ``None``: all.
        bins: number of intervals.

    Returns:
        [batch, bins, bands].
    """
    frames = x.shape[1]
    counts = torch.full_like(x[:, 0, 0], frames) if lengths is None else lengths.to(x.dtype)
    width = (counts / bins).view(-1, 1, 1)  # frames of a bin
    begin = torch.arange(bins, device=x.device).view(1, -1, 1) * width
    frame = torch.arange(frames, device=x.device).view(1, 1, -1)
    # Overlap of each interval with each frame, in frames: [batch, bins, frames].
    overlap = (torch.minimum(frame + 1, begin + width) - torch.maximum(frame, begin)).clamp_min(0)
    return (overlap / width) @ x
