"""Methods with masked networks. Masks keep the network's size; _cutting.py builds smaller networks."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import OURS
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, State, Update
from raydfl.methods._method import Method
from raydfl.methods._profiles import read_number
from raydfl.methods._pruning import MASK, Kind, PrunableLayer, apply_masks, count_kept, put_masks, take_masks
from raydfl.training import Step, fit


@dataclass(frozen=True, kw_only=True)
class MaskingMethod(Method, ABC):
    """FedAvg over masked networks. A subclass prunes in ``local``."""

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss of the masked network."""
        with apply_masks(step, "model"):
            return super().loss(step, batch)

    def local(self, step: Step) -> Update:
        """Train without pruning, and count the weights."""
        return step.update({**fit(step, self.loss), **count_kept(step, {})})


@dataclass(frozen=True, kw_only=True)
class PruningMethod(MaskingMethod, ABC):
    """Masking of whole units, with new masks in each round. Clients send their masks."""

    additions: ClassVar[tuple[str, ...]] = (MASK,)

    prune: Annotated[
        tuple[Kind, ...],
        Field(description="Types of layers to prune. linear: hidden layers only, never the last layer."),
        OURS,
    ] = ("convolution", "recurrent")

    def train_masked(
        self, step: Step, layers: Sequence[PrunableLayer], masks: Mapping[str, Tensor]
    ) -> tuple[Metrics, dict[str, Tensor]]:
        """Train with masks by layer name. Return the metrics and the masked shared tensors."""
        put_masks(step, layers, masks)
        metrics = fit(step, self.loss)
        tensors, tensor_masks = self.take_masked(step)
        return {**metrics, **count_kept(step, tensor_masks)}, tensors

    def take_masked(self, step: Step) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Remove the masks from ``step.state``. Return the masked shared tensors and the masks, by tensor name."""
        masks = take_masks(step)
        tensors = {name: value for name, value in step.floating_state().items() if self.shared(name)}
        return tensors | {name: tensors[name] * mask for name, mask in masks.items()}, masks


@dataclass(frozen=True, kw_only=True)
class RatioMasking(MaskingMethod, ABC):
    """Masking of a fraction of the weights, equal for all clients or read from their profiles."""

    ratio: Annotated[
        float, Field(ge=0, lt=1, description="Fraction of each layer that every client prunes. 0 is FedAvg."), OURS
    ] = 0.5
    ratio_from: Annotated[
        str | None, Field(description="Profile column with each client's ratio. null: ratio for all clients."), OURS
    ] = None

    @property
    def prunes(self) -> bool:
        """True if any client may prune."""
        return self.ratio > 0 or self.ratio_from is not None

    def ratio_for(self, client: Client) -> float:
        """Return a client's pruning ratio.

        Raises:
            ConfigError: The client's profile has no valid ratio.
        """
        if self.ratio_from is None:
            return self.ratio
        meaning = "the fraction of weights to prune, from 0 to below 1"
        owner = f"client {client.id!r}"
        return read_number(client.profile, self.ratio_from, "ratio_from", meaning, lambda ratio: 0 <= ratio < 1, owner)

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state.

        Raises:
            ConfigError: A client's profile has no valid ratio.
        """
        for client in clients if self.ratio_from is not None else ():
            self.ratio_for(client)
        return super().init(clients, models, rng)
