"""Fashion-MNIST (H. Xiao, K. Rasul, R. Vollgraf, arXiv:1708.07747): grey images of clothes, in MNIST's layout.

Images of 28 x 28: 60,000 for training and 10,000 for the test, the official split. The reader is tested on small files in this
layout, not on the whole set.
"""

from __future__ import annotations

from typing import ClassVar

from raydfl.data.dataset import Card
from raydfl.data.sets.mnist import MNIST


class FashionMNIST(MNIST):
    """Images of clothes, without owners.

    Images have no owner (group is null). Extra column: ``number`` (int64).
    """

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
