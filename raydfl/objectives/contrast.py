"""Contrast: which two crops are of one clip? No labels are needed, and what is learnt serves as a beginning for other objectives.

A. Saeed, D. Grangier, N. Zeghidour, Contrastive Learning of General-Purpose Audio Representations, ICASSP 2021 (COLA):

    g(x)   tanh(LayerNorm(what the network gives for a crop)), ``size`` numbers
    s_ij   g(a_i)^T W g(b_j), a_i and b_i two crops of clip i
    loss   mean over the batch of -log softmax_j(s_ij) at j = i

W and the layer norm are a part of the network (``model/objective...``). Each crop begins at a frame that is drawn for each clip
anew in each step, from the step's seed; a clip that is shorter than a crop is taken whole. In tests the first frames of each clip
are held against the last ones of those that are in one evaluation batch with it (``evaluate.batch_size``).
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
    """Two crops of one clip are told from those of other clips."""

    headline: ClassVar[str] = "accuracy"

    frames: Annotated[int, Field(ge=1, description="frames of a crop")] = 96
    size: Annotated[int, Field(ge=2, description="numbers that the network gives for a crop")] = 64

    def check(self, classes: Sequence[str], length: int | None) -> None:
        """Refuse crops that are as long as the clips: both would be the same."""
        if length is not None and length <= self.frames:
            raise ConfigError(
                f"objective.frames is {self.frames}, but clips have {length} frames, so both crops would be the whole clip; set "
                f"objective.frames to less than {length}"
            )

    def outputs(self, classes: int) -> int:
        """Return ``size``."""
        return self.size

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return a number for each output: they have no meaning one by one."""
        return tuple(str(number) for number in range(self.size))

    def extension(self, spec: ModelSpec) -> nn.Module:
        """Return the similarity of two crops.

        Raises:
            ConfigError: the network reads images.
        """
        if not isinstance(spec.inputs, int):
            raise ConfigError(
                "objective: contrast takes crops of a clip's frames, and the network reads images; take objective=compact"
            )
        return _Similarity(self.size)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Mean cross-entropy of finding a clip's other crop among the batch's."""
        network = step.models[name]
        first, second = (step.forward(name, self._cropped(batch, network)) for _ in range(2))
        similar = cast(Any, network).objective(first, second)
        if batch.weight is not None:
            similar = similar.masked_fill(batch.weight.unsqueeze(0) == 0, -1e4)  # padding is nobody's other crop
        return batch.mean(similar.logsumexp(dim=1) - similar.diagonal())

    def _cropped(self, batch: Batch, network: nn.Module) -> Batch:
        """Return a crop of what a network reads of each clip of a batch, which begins at random."""
        x, lengths = batch.input_of(network)
        counts = torch.full_like(x[:, 0, 0], x.shape[1]) if lengths is None else lengths.float()
        latest = (counts - self.frames).clamp_min(0)
        begin = (uniform(len(x), x.device) * (latest + 1)).floor().minimum(latest).long()
        return batch.with_input_of(network, *_crops(x, lengths, begin, self.frames))

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Measure ``loss`` and ``accuracy`` of finding the last crop of each example by its first."""
        network = step.models[name]
        first, last = (
            predict(
                dataclasses.replace(
                    step, models={**step.models, name: same_view(_OfCrop(network, self.frames, last), network)}
                ),
                name,
                examples,
                batch_size,
            )
            for last in (False, True)
        )
        similarity = cast(Any, network).objective
        loss = right = 0.0
        with torch.no_grad():
            for one, other in zip(torch.split(first, batch_size), torch.split(last, batch_size), strict=True):
                similar = similarity(one.to(step.device), other.to(step.device)).double()
                loss += float((similar.logsumexp(dim=1) - similar.diagonal()).sum())
                right += float((similar.argmax(dim=1) == torch.arange(len(one), device=step.device)).sum())
        return {"loss": Ratio(loss, len(first)), "accuracy": Ratio(right, len(first))}


class _Similarity(nn.Module):
    """The bilinear similarity of crops: two times [batch, size] -> [batch, batch]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.weight = nn.Parameter(torch.eye(size) / size**0.5 + torch.randn(size, size) * 0.01)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        similar: Tensor = self.norm(first.float()).tanh() @ self.weight @ self.norm(second.float()).tanh().T
        return similar


class _OfCrop(nn.Module):
    """A network on the first or the last frames of each clip."""

    def __init__(self, network: nn.Module, frames: int, last: bool) -> None:
        super().__init__()
        self.network = network
        self.frames = frames
        self.last = last

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        counts = torch.full_like(x[:, 0, 0], x.shape[1]) if lengths is None else lengths
        latest = (counts - self.frames).clamp_min(0).long() if self.last else torch.zeros_like(counts).long()
        found: Tensor = self.network(*_crops(x, lengths, latest, self.frames))
        return found


def _crops(x: Tensor, lengths: Tensor | None, begin: Tensor, frames: int) -> tuple[Tensor, Tensor | None]:
    """Cut ``frames`` frames of each example, from frame ``begin`` (int64 [batch]) on, with their lengths."""
    frames = min(frames, x.shape[1])
    index = (begin.unsqueeze(1) + torch.arange(frames, device=x.device)).clamp_max(x.shape[1] - 1)
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2])), (
        None if lengths is None else lengths.clamp_max(frames)
    )
