"""Reconstruct: a clip is given back from a few numbers, and one that cannot be is strange (an autoencoder).

    t_i   the features of clip i, averaged in ``bins`` equal parts of its time: [bins, bands]
    z_i   what the network gives for it: ``size`` numbers
    loss  mean over clips, bins and bands of (d(z_i) - t_i)^2

d is a decoder with one hidden layer, a part of the network (``model/objective...``), which travels as the network does. A
recording's score is its own mean squared error. A part of a clip's time may begin within a frame: then the frame counts in both
by its share.
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
    """An autoencoder; a recording's score is the error with which it is given back."""

    size: Annotated[int, Field(ge=1, description="numbers that a clip is given back from")] = 32
    bins: Annotated[int, Field(ge=1, description="equal parts of a clip's time whose mean frames are given back")] = 16
    hidden: Annotated[int, Field(ge=1, description="units of the decoder's hidden layer")] = 128

    def outputs(self, classes: int) -> int:
        """Return ``size``."""
        return self.size

    def extension(self, spec: ModelSpec) -> nn.Module:
        """Return the decoder.

        Raises:
            ConfigError: the network reads images.
        """
        if not isinstance(spec.inputs, int):
            raise ConfigError(
                "objective: reconstruct gives frames of features back, and the network reads images; take objective=compact"
            )
        return nn.Sequential(
            nn.Linear(self.size, self.hidden), nn.ReLU(), nn.Linear(self.hidden, self.bins * spec.inputs)
        )

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Mean squared error."""
        network = cast(Any, step.models[name])
        given_back = network.objective(step.forward(name, batch))
        return batch.mean(_errors(given_back, *batch.input_of(network), self.bins))

    def predictor(self, network: nn.Module) -> nn.Module:
        """Return the network with its decoder and the error."""
        return _Error(network, self.bins)


class _Error(nn.Module):
    """From features to the mean squared error of what is given back: float32 [batch, 1]."""

    def __init__(self, network: nn.Module, bins: int) -> None:
        super().__init__()
        self.network = network
        self.bins = bins

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        given_back = cast(Any, self.network).objective(self.network(x, lengths))
        return _errors(given_back, x, lengths, self.bins).unsqueeze(1)


def _errors(given_back: Tensor, x: Tensor, lengths: Tensor | None, bins: int) -> Tensor:
    """Mean squared error of each example, float32 [batch].

    Args:
        given_back: [batch, bins * bands].
        x: [batch, frames, bands].
        lengths: int64 [batch] or ``None``.
        bins: parts of the time.
    """
    return (given_back.float() - in_bins(x, lengths, bins).flatten(1)).square().mean(dim=1)


def in_bins(x: Tensor, lengths: Tensor | None, bins: int) -> Tensor:
    """Return the mean frames of equal parts of the time: [batch, bins, bands].

    Args:
        x: float32 [batch, frames, bands].
        lengths: int64 [batch]: frames that count; ``None``: all.
        bins: how many.
    """
    frames = x.shape[1]
    counts = torch.full_like(x[:, 0, 0], frames) if lengths is None else lengths.to(x.dtype)
    width = (counts / bins).view(-1, 1, 1)  # frames of a bin
    begin = torch.arange(bins, device=x.device).view(1, -1, 1) * width
    frame = torch.arange(frames, device=x.device).view(1, 1, -1)
    overlap = (torch.minimum(frame + 1, begin + width) - torch.maximum(frame, begin)).clamp_min(0)
    return (overlap / width) @ x
