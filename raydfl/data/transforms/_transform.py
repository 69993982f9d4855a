"""Transform: the base class of random augmentations.

Random numbers are drawn on the CPU, a few for each example. Every batch has its own generator, seeded by the state of the client's
generator before local training and by the index of the batch. The augmentation itself consists of tensor operations on any device
and with any number of leading dimensions. A client's examples are therefore the same in batched and unbatched training.
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
    """Base class of transforms. The fields of a subclass (a frozen pydantic dataclass) are its options."""

    power: ClassVar[bool] = False
    """True if the transform acts on the power in bands. Features are then normalised after it, in every batch."""

    kinds: ClassVar[tuple[str, ...]] = ("logmel", "kaldi", "file", "model")
    """Supported kinds of features."""

    def least(self) -> tuple[int, int]:
        """Return the smallest supported example: frames and bands, or rows and columns of an image."""
        return 1, 1

    def check(self, features: AnyFeatures) -> None:
        """Raise a ConfigError if the transform does not support the features."""

    def table(self, features: AnyFeatures, seed: int) -> np.ndarray | None:
        """Read external data, such as recordings of noise, into a float32 table stored with the population.

        Args:
            features: feature settings of the view.
            seed: seed of the run.

        Returns:
            The table, or ``None`` if the transform needs no data.

        Raises:
            DataError: a recording cannot be read.
        """
        return None

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw the random numbers of a batch, a few for each example.

        Args:
            frames: frames of each example without padding, or rows of images, int64 [examples].
            bands: bands of a frame, or columns of an image.
            table: the result of :meth:`table`.

        Returns:
            Arrays [examples, ...] by name.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement draw()")

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Augment the examples of a batch. ``x`` may be overwritten.

        Args:
            x: features, float32 [..., examples, frames, bands], or images [..., examples, channels, rows, columns]. With ``power``,
                the power in bands: non-negative, and 0 in padding.
            frames: frames without padding, int64 [..., examples]. The caller resets padding to 0 afterwards.
            drawn: random numbers from :meth:`draw`, [..., examples, ...] each.
            table: the result of :meth:`table`.

        Returns:
            Tensor of the shape of ``x``.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement apply()")
