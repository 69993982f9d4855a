"""Networks on the mean of a clip's frames: small and quick, for first tries, tests and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.ops import mean_over_time
from raydfl.models._width import Channels, Width, narrowed


class MeanLinear(nn.Module):
    """Logistic regression on the mean frame."""

    def __init__(self, inputs: int, classes: int) -> None:
        """Build it for frames of ``inputs`` features."""
        super().__init__()
        self.output = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits [batch, classes] for x float32 [batch, frames, inputs] of which ``lengths`` int64 [batch] frames count."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the mean frame, float32 [batch, inputs]."""
        return mean_over_time(x, lengths)


class MeanMLP(nn.Module):
    """One hidden layer of ReLU units on the mean frame."""

    def __init__(self, inputs: int, classes: int, hidden: Annotated[int, Field(ge=1)] = 32, width: Width = 1.0) -> None:
        """Build it for frames of ``inputs`` features, with ``hidden`` units, or the share ``width`` of them."""
        super().__init__()
        hidden = narrowed(hidden, width)
        self.hidden = nn.Linear(inputs, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits [batch, classes] for x float32 [batch, frames, inputs] of which ``lengths`` int64 [batch] frames count."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the hidden layer's output, float32 [batch, hidden]."""
        return self.hidden(mean_over_time(x, lengths)).relu()  # type: ignore[no-any-return]

    def channels(self) -> Channels:
        """Return what belongs to the hidden units."""
        return {"hidden.weight": (("hidden",), ()), "hidden.bias": (("hidden",),), "output.weight": ((), ("hidden",))}


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "linear": (MeanLinear, {}),
    "mlp": (MeanMLP, {}),
}
