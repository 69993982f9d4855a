"""FedAdam, FedYogi and FedAdagrad, without the update of the second moment. Their own files have the equations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import OURS, PAPER
from raydfl.methods._server_optimiser import ServerOptimiser


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptimiser(ServerOptimiser, ABC):
    """Base of FedAdagrad, FedAdam and FedYogi: algorithm 2 without its second moment."""

    server_lr: Annotated[
        float, Field(gt=0, description="Server learning rate. The paper tries 0.001 to 0.1 and more."), OURS
    ] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1, description="Decay of the first moment. 0: no momentum."), PAPER] = 0.9
    tau: Annotated[float, Field(gt=0, description="Adaptivity. Large values approach plain averaging."), PAPER] = 1e-3

    @abstractmethod
    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the second moment after a change.

        Args:
            v: The second moment, of any shape.
            squared: The squared change of each element, of the same shape.
        """

    def moments(self) -> Mapping[str, float]:
        """Return the initial values of both moments."""
        return {"m": 0.0, "v": self.tau**2}

    def move(
        self, old: Tensor, mean: Tensor, moments: Mapping[str, Tensor], number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Take one step of algorithm 2."""
        delta = mean - old
        m = self.beta1 * moments["m"] + (1 - self.beta1) * delta
        v = self.second_moment(moments["v"], delta.square())
        return old + self.server_lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}
