"""Fusion: the part of a multimodal network behind its encoders, a small classifier on their features end to end.

One hidden layer of 64 units with ReLU and dropout of 0.1: the classifier of FedMultimodal (T. Feng et al., FedMultimodal: A
Benchmark For Multimodal Federated Learning, KDD 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.ops import Dropout


class Fusion(nn.Module):
    """A classifier of features that several encoders give."""

    on_features: ClassVar[bool] = True
    """It is no network for recordings or images."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        hidden: Annotated[int, Field(ge=1)] = 64,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1,
    ) -> None:
        """Build it.

        Args:
            inputs: features of all encoders together.
            classes: outputs.
            hidden: units of the hidden layer.
            dropout: share of these zeroed while training, 0..1.
        """
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits float32 [batch, classes] of features float32 [batch, inputs]."""
        logits: Tensor = self.output(self.embed(x))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return what the last layer sees: float32 [batch, hidden]."""
        hidden: Tensor = self.dropout(self.hidden(x).relu())
        return hidden


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"fusion": (Fusion, {})}
