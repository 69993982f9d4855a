"""Alterations that an attacker makes to its recordings before their features are computed: a trigger sound mixed in, or damage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from raydfl.data.features.extractor import FeatureExtractor

UNALTERED = -1
"""In place of a clip's seed: the clip stays as it is."""


@dataclass(frozen=True)
class Alteration(ABC):
    """One way to alter waves. The ``repr`` of a subclass names all that decides the result: it goes into the cache's key."""

    @abstractmethod
    def __call__(self, wave: np.ndarray, extractor: FeatureExtractor, seed: int) -> np.ndarray:
        """Return the altered wave, as long as it was.

        Args:
            wave: float32 [samples] at the extractor's rate, cut to the length that features are made of.
            seed: of the clip; the same clip and seed give the same wave.
        """


@dataclass(frozen=True)
class Alterations:
    """Alterations to the waves of some clips."""

    what: Alteration
    seeds: tuple[int, ...]
    """One for each clip, at least 0; :data:`UNALTERED` leaves the clip as it is."""

    def part(self, start: int, stop: int) -> Alterations:
        """Return what is done to clips ``start`` to ``stop - 1``."""
        return Alterations(self.what, self.seeds[start:stop])
