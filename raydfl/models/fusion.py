"""Fusion: classifier on the concatenated features of a multimodal network's encoders.

It has one hidden layer of 64 units with ReLU and dropout of 0.1, as in T. Feng et al., FedMultimodal: A Benchmark For
Multimodal Federated Learning, KDD 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.ops import Dropout


class Fusion(nn.Module):
    """Classifier on the concatenated features of several encoders."""

    on_features: ClassVar[bool] = True
    """True: the network reads features of encoders, not recordings or images."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        hidden: Annotated[int, Field(ge=1)] = 64,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1,
    ) -> None:
        """Initialise the network.

        Args:
            inputs: total number of features of all encoders.
            classes: number of outputs.
            hidden: units of the hidden layer.
            dropout: dropout probability of the hidden layer.
        """
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits float32 [batch, classes] from features float32 [batch, inputs]."""
        logits: Tensor = self.output(self.embed(x))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute the input of the last layer: float32 [batch, hidden]."""
        hidden: Tensor = self.dropout(self.hidden(x).relu())
        return hidden


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"fusion": (Fusion, {})}
