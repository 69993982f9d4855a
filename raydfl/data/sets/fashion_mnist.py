"""Fashion-MNIST (H. Xiao, K. Rasul, R. Vollgraf, arXiv:1708.07747): grey images of clothes, in MNIST's layout.

The whole set was not available: the reader is tested on small files in this layout.
"""

from __future__ import annotations

from typing import ClassVar

from raydfl.data.dataset import Card
from raydfl.data.sets.mnist import MNIST


class FashionMNIST(MNIST):
    """Images of clothes, without owners."""

    card: ClassVar[Card] = Card(
        title="Fashion-MNIST",
        layout=MNIST.card.layout,
        licence="MIT",
        url="https://github.com/zalandoresearch/fashion-mnist",
        classes=10,
    )
    below: ClassVar = ("raw", "FashionMNIST/raw")
    published: ClassVar = (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    )
