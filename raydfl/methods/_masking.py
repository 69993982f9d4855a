"""Methods with masked networks. Masks keep the network's size; _cutting.py builds smaller networks."""

from __future__ import annotations

from abc import ABC
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.types import Batch
from raydfl.methods._method import Method
from raydfl.methods._pruning import MASK, Kind, masked, take_masks
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class MaskingMethod(Method, ABC):
    """FedAvg over masked networks, whose clients send their masks; a subclass prunes in ``local``."""

    additions: ClassVar[tuple[str, ...]] = (MASK,)

    prune: Annotated[
        tuple[Kind, ...], Field(description="layers that are pruned; linear: hidden ones, the last one never")
    ] = ("convolution", "recurrent")

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss of the masked network."""
        with masked(step, "model"):
            return super().loss(step, batch)

    def take_masked(self, step: Step) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Remove the masks from ``step.state``; return the masked shared tensors, and the masks, by tensor name."""
        masks = take_masks(step)
        tensors = {name: value for name, value in step.floating_state().items() if self.shared(name)}
        return tensors | {name: tensors[name] * mask for name, mask in masks.items()}, masks
