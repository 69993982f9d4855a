"""FedPer: the server averages the base layers, and each client keeps its personal layers.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, Federated Learning with Personalization Layers, 2019, algorithms 1-2:
clients train base and personal layers together and send only the base. The server averages it, weighted by examples.

Personal layers start from the same initial values at every client. Deviation: the paper counts personal layers from the output
(K_P). Here name prefixes of tensors select them, in any network.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.options import OURS
from raydfl.methods._method import Method


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """Federated averaging of all but the personal layers."""

    tensor_options: ClassVar[tuple[str, ...]] = ("personal",)

    personal: Annotated[
        tuple[str, ...],
        Field(description="Name prefixes of personal tensors, such as [model/output]. Empty is FedAvg."),
        OURS,
    ] = ("model/output",)

    def shared(self, name: str) -> bool:
        """Share all but the personal layers."""
        return not name.startswith(self.personal)
