"""Transform: the base of everything that changes training examples at random.

What is random is drawn on the CPU, a few numbers for each example, from a generator of its own for each batch: a function of where
the client's generator stands at the beginning of its training, and of the number of the batch. The change itself is tensor
operations on any device and for any number of leading dimensions. So a client's examples are the same whoever computes it, alone or
together with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.settings import StrictTypes
from raydfl.data.features.kinds import AnyFeatures

Drawn = Mapping[str, np.ndarray]
"""Random numbers drawn for the examples of a batch: [examples, ...] each, by name."""


@dataclass(frozen=True, kw_only=True)
class Transform(StrictTypes):
    """Base of every transform. The fields of a subclass (a frozen pydantic dataclass) are its options."""

    power: ClassVar[bool] = False
    """True where it acts on the power in bands: then features are normalised after it, as each batch is made."""

    kinds: ClassVar[tuple[str, ...]] = ("logmel", "kaldi", "file", "model")
    """Kinds of features that it can act on."""

    def least(self) -> tuple[int, int]:
        """Return the frames and bands (of images: rows and columns) that an example must have for it to make sense."""
        return 1, 1

    def check(self, features: AnyFeatures) -> None:
        """Refuse features that it is not defined for, with a ConfigError."""

    def table(self, features: AnyFeatures, seed: int) -> np.ndarray | None:
        """Return what it needs of the outside world (recordings of noise, say), kept with the population: float32.

        Args:
            features: of the view that it acts on.
            seed: the run's.

        Raises:
            DataError: that cannot be read.
        """
        return None

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw what is random about the examples of a batch: a few numbers for each.

        Args:
            frames: int64 [examples]: frames that each example has, padding left out; of images rows.
            bands: of a frame; of images columns.
            table: see :meth:`table`.
        """
        raise NotImplementedError(f"{type(self).__name__} must draw, in draw(), what apply() is to do")

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Return the changed examples; ``x`` may be overwritten.

        Args:
            x: float32 [..., examples, frames, bands]: features, or with ``power`` the power in bands (not negative, 0 in padding);
                of images [..., examples, channels, rows, columns].
            frames: int64 [..., examples]: frames that are no padding; what is changed in padding is made 0 again.
            drawn: see :meth:`draw`: [..., examples, ...] each.
            table: see :meth:`table`.
        """
        raise NotImplementedError(f"{type(self).__name__} must change the examples in apply()")
