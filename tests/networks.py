"""Networks with frozen layers, for tests."""

from __future__ import annotations

from torch import Tensor, nn

WIDTH = 24


class FrozenStem(nn.Module):
    """A frozen encoder with batch normalisation and dropout, and a head."""

    def __init__(self, inputs: int, classes: int, frozen: bool = True, dropout: float = 0.5) -> None:
        super().__init__()
        layers = (nn.Linear(inputs, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(dropout))
        self.stem = nn.Sequential(*layers).requires_grad_(not frozen)
        self.output = nn.Linear(WIDTH, classes)

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.stem(x.mean(dim=1))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.embed(x, lengths))  # type: ignore[no-any-return]


class NarrowStem(nn.Module):
    """An encoder of one frozen layer, whose channels methods can cut, and a head."""

    def __init__(self, inputs: int, classes: int, width: float = 1.0) -> None:
        super().__init__()
        kept = round(WIDTH * width)
        self.stem = nn.Linear(inputs, kept).requires_grad_(False)
        self.output = nn.Linear(kept, classes)

    def channels(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        return {
            "stem.weight": (("stem",), ()),
            "stem.bias": (("stem",),),
            "output.weight": ((), ("stem",)),
        }

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.stem(x.mean(dim=1)).relu())  # type: ignore[no-any-return]


class FrozenLinear(nn.Module):
    """An encoder of one layer, optionally frozen."""

    def __init__(self, inputs: int, classes: int, frozen: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, WIDTH).requires_grad_(not frozen)
        self.output = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.stem(x.mean(dim=1)).relu())  # type: ignore[no-any-return]
