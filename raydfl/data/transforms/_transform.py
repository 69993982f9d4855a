"""Transform: base class of random augmentations of training examples.

The CPU draws a few random numbers for each example. Each batch has its own generator, seeded by the state of the client's
generator at the start of its training and the number of the batch. Tensor operations then change the examples on any device,
with any number of leading dimensions. A client's examples are therefore the same in batched and unbatched training.
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
"""Random values for the examples of a batch by name, each [examples, ...]."""


@dataclass(frozen=True, kw_only=True)
class Transform(StrictTypes):
    """Base class of transforms. The fields of a subclass (a frozen pydantic dataclass) are its options."""

    power: ClassVar[bool] = False
    """Whether the transform acts on the power in bands. Normalisation then happens in each batch, after the transform."""

    kinds: ClassVar[tuple[str, ...]] = ("logmel", "kaldi", "file", "model")
    """Supported kinds of features."""

    def least(self) -> tuple[int, int]:
        """Return the least numbers of frames and bands (images: rows and columns) of an example."""
        return 1, 1

    def check(self, features: AnyFeatures) -> None:
        """Check that the transform supports the features.

        Raises:
            ConfigError: it does not.
        """

    def table(self, features: AnyFeatures, seed: int) -> np.ndarray | None:
        """Load external data of the transform, such as recordings of noise. The population stores it.

        Args:
            features: features of the view.
            seed: seed of the run.

        Returns:
            A float32 array, or ``None`` without external data.

        Raises:
            DataError: a recording cannot be read.
        """
        return None

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw the random values for the examples of a batch.

        Args:
            rng: generator of the batch.
            frames: frame counts without padding (images: rows), int64 [examples].
            bands: bands of a frame (images: columns).
            table: result of :meth:`table`.

        Returns:
            Arrays [examples, ...] by name, for :meth:`apply`.
        """
        raise NotImplementedError(f"{type(self).__name__}.draw() must return the random values for apply().")

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Transform the examples of a batch. It may overwrite ``x``.

        Args:
            x: features float32 [..., examples, frames, bands], or with ``power`` the power in bands (not negative, 0 in
                padding). Images are [..., examples, channels, rows, columns].
            frames: frame counts without padding, int64 [..., examples]. The pipeline resets padding to 0 afterwards.
            drawn: values from :meth:`draw`, each [..., examples, ...].
            table: result of :meth:`table`.
        """
        raise NotImplementedError(f"{type(self).__name__}.apply() must return the transformed examples.")
