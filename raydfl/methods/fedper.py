"""FedPer: base layers are averaged, the last layers stay with each client.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, Federated Learning with Personalization Layers, 2019, algorithms 1-2:
clients train base and personal layers together and send the base only; the server averages it weighted by examples.

Personal layers start from the same initial values at every client. Deviation: the paper counts personal layers from the output
(K_P); here they are named by the beginnings of their tensors' names, which works for any network.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.methods._method import Method


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """Federated averaging of all but the personal layers."""

    tensor_options: ClassVar[tuple[str, ...]] = ("personal",)

    personal: Annotated[
        tuple[str, ...],
        Field(description="beginnings of the names of personal tensors, e.g. [model/output]; empty is FedAvg"),
    ] = ("model/output",)

    def shared(self, name: str) -> bool:
        """Share all but the personal layers."""
        return not name.startswith(self.personal)
