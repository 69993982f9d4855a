"""Dense networks on the mean frame of a clip: small and fast, for first experiments, tests and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.ops import mean_over_time
from raydfl.models._width import Channels, Width, scale_channels


class MeanLinear(nn.Module):
    """Logistic regression on the mean frame."""

    def __init__(self, inputs: int, classes: int) -> None:
        """Initialise the network for frames of ``inputs`` features."""
        super().__init__()
        self.output = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits [batch, classes] from x float32 [batch, frames, inputs] with ``lengths`` int64 [batch] valid frames."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Average the frames: float32 [batch, inputs]."""
        return mean_over_time(x, lengths)


class MeanMLP(nn.Module):
    """Multilayer perceptron on the mean frame, with one hidden layer of ReLU units."""

    def __init__(self, inputs: int, classes: int, hidden: Annotated[int, Field(ge=1)] = 32, width: Width = 1.0) -> None:
        """Initialise the network for frames of ``inputs`` features, with a fraction ``width`` of ``hidden`` units."""
        super().__init__()
        hidden = scale_channels(hidden, width)
        self.hidden = nn.Linear(inputs, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits [batch, classes] from x float32 [batch, frames, inputs] with ``lengths`` int64 [batch] valid frames."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute the output of the hidden layer: float32 [batch, hidden]."""
        return self.hidden(mean_over_time(x, lengths)).relu()  # type: ignore[no-any-return]

    def channels(self) -> Channels:
        """Return the groups of channels: the hidden units."""
        return {"hidden.weight": (("hidden",), ()), "hidden.bias": (("hidden",),), "output.weight": ((), ("hidden",))}


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "linear": (MeanLinear, {}),
    "mlp": (MeanMLP, {}),
}
