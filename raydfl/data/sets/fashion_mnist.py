"""Fashion-MNIST (H. Xiao, K. Rasul, R. Vollgraf, arXiv:1708.07747): grey images of clothes, in MNIST's layout."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card
from raydfl.data.sets.mnist import MNIST

_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(MNIST):
    """Images of clothes; nobody owns them."""

    card: ClassVar[Card] = Card(
        title="Fashion-MNIST",
        layout=MNIST.card.layout,
        licence="MIT",
        url="https://github.com/zalandoresearch/fashion-mnist",
        classes=10,
    )
    below: ClassVar[tuple[str, ...]] = ("raw", "FashionMNIST/raw")

    @property
    def published(self) -> tuple[str, ...]:
        """See :class:`ArraySet`."""
        return _NAMES
