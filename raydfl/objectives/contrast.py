"""Contrast: self-supervised pretraining by matching two crops of the same clip.

A. Saeed, D. Grangier, N. Zeghidour, Contrastive Learning of General-Purpose Audio Representations, ICASSP 2021 (COLA):

    g(x)   tanh(LayerNorm(output of the network for a crop)), ``size`` dimensions
    s_ij   g(a_i)^T W g(b_j), with two crops a_i and b_i of clip i
    loss   mean over the batch of -log softmax_j(s_ij) at j = i

W and the layer norm are tensors of the network (``model/objective...``). The first frame of a crop is drawn for each clip and
step with the step's seed. Clips shorter than a crop are used whole. Evaluations match the first frames of each clip with the
last frames of all clips in its evaluation batch (``evaluate.batch_size``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, cast

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.ops import uniform
from raydfl.core.types import Batch, Metrics, ModelSpec, Ratio, same_view
from raydfl.data import Examples
from raydfl.objectives._objective import Objective
from raydfl.training import Step, predict


@dataclass(frozen=True, kw_only=True)
class Contrast(Objective):
    """Contrastive pretraining: match two crops of the same clip within a batch."""

    headline: ClassVar[str] = "accuracy"

    frames: Annotated[
        int, Field(ge=1, description="Length of a crop in frames. Must be below the length of clips.")
    ] = 96
    size: Annotated[int, Field(ge=2, description="Outputs of the network for a crop.")] = 64

    def check(self, classes: Sequence[str], length: int | None) -> None:
        """Check that crops are shorter than clips."""
        if length is not None and length <= self.frames:
            raise ConfigError(
                f"objective.frames is {self.frames}, but clips have {length} frames, so both crops would be the whole clip. Set "
                f"objective.frames to less than {length}."
            )

    def outputs(self, classes: int) -> int:
        """Return ``size``."""
        return self.size

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the index of each output as its name."""
        return tuple(str(index) for index in range(self.size))

    def extension(self, spec: ModelSpec) -> nn.Module:
        """Build the similarity of two crops.

        Raises:
            ConfigError: the network reads images.
        """
        if not isinstance(spec.inputs, int):
            raise ConfigError(
                "objective: contrast needs frames of features, but the network reads images. Set objective=compact."
            )
        return _Similarity(self.size)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean cross-entropy of matching a clip's crops within the batch."""
        network = step.models[name]
        first, second = (step.forward(name, self._crop(batch, network)) for _ in range(2))
        similar = cast(Any, network).objective(first, second)
        if batch.weight is not None:
            similar = similar.masked_fill(batch.weight.unsqueeze(0) == 0, -1e4)  # padding must not match any crop
        return batch.mean(similar.logsumexp(dim=1) - similar.diagonal())

    def _crop(self, batch: Batch, network: nn.Module) -> Batch:
        """Crop the network's input of each clip at a random first frame."""
        x, lengths = batch.input_of(network)
        counts = torch.full_like(x[:, 0, 0], x.shape[1]) if lengths is None else lengths.float()
        latest = (counts - self.frames).clamp_min(0)
        # Rounding may make the product latest + 1, so the minimum is needed.
        begin = (uniform(len(x), x.device) * (latest + 1)).floor().minimum(latest).long()
        return batch.with_input_of(network, *_crop_frames(x, lengths, begin, self.frames))

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Compute ``loss`` and ``accuracy`` of matching the first and the last crop of each example."""
        network = step.models[name]
        first, last = (
            predict(
                dataclasses.replace(
                    step, models={**step.models, name: same_view(_EdgeCrop(network, self.frames, last), network)}
                ),
                name,
                examples,
                batch_size,
            )
            for last in (False, True)
        )
        similarity = cast(Any, network).objective
        loss = correct = 0.0
        with torch.no_grad():
            for starts, ends in zip(torch.split(first, batch_size), torch.split(last, batch_size), strict=True):
                similar = similarity(starts.to(step.device), ends.to(step.device)).double()
                loss += float((similar.logsumexp(dim=1) - similar.diagonal()).sum())
                correct += float((similar.argmax(dim=1) == torch.arange(len(starts), device=step.device)).sum())
        return {"loss": Ratio(loss, len(first)), "accuracy": Ratio(correct, len(first))}


class _Similarity(nn.Module):
    """Bilinear similarity of crops: [batch, size] and [batch, size] -> [batch, batch]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.weight = nn.Parameter(torch.eye(size) / size**0.5 + torch.randn(size, size) * 0.01)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        similar: Tensor = self.norm(first.float()).tanh() @ self.weight @ self.norm(second.float()).tanh().T
        return similar


class _EdgeCrop(nn.Module):
    """Network applied to the first or the last frames of each clip."""

    def __init__(self, network: nn.Module, frames: int, last: bool) -> None:
        super().__init__()
        self.network = network
        self.frames = frames
        self.last = last

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        counts = torch.full_like(x[:, 0, 0], x.shape[1]) if lengths is None else lengths
        latest = (counts - self.frames).clamp_min(0).long() if self.last else torch.zeros_like(counts).long()
        outputs: Tensor = self.network(*_crop_frames(x, lengths, latest, self.frames))
        return outputs


def _crop_frames(x: Tensor, lengths: Tensor | None, begin: Tensor, frames: int) -> tuple[Tensor, Tensor | None]:
    """Crop ``frames`` frames of each example, starting at frame ``begin`` (int64 [batch]), with their lengths."""
    frames = min(frames, x.shape[1])
    index = (begin.unsqueeze(1) + torch.arange(frames, device=x.device)).clamp_max(x.shape[1] - 1)
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2])), (
        None if lengths is None else lengths.clamp_max(frames)
    )
