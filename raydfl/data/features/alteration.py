"""Attackers' alterations of recordings before feature extraction: a trigger sound or damage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from raydfl.data.features.extractor import FeatureExtractor

UNALTERED = -1
"""Seed of a clip without alteration."""


@dataclass(frozen=True)
class Alteration(ABC):
    """Base class of changes to waveforms. A subclass's ``repr`` must contain all parameters: it is part of the cache key."""

    @abstractmethod
    def __call__(self, wave: np.ndarray, extractor: FeatureExtractor, seed: int) -> np.ndarray:
        """Return the altered waveform, with the same length.

        Args:
            wave: float32 [samples] at the extractor's rate, cut to the length used by the features.
            extractor: Computes features, for alterations that need them.
            seed: The clip's seed. Equal clips and seeds yield equal waves.
        """


@dataclass(frozen=True)
class Alterations:
    """An alteration of the waveforms of some clips."""

    alteration: Alteration
    seeds: tuple[int, ...]
    """A seed for each clip, at least 0, or :data:`UNALTERED`."""

    def part(self, start: int, stop: int) -> Alterations:
        """Return the alterations of clips ``start`` to ``stop - 1``."""
        return Alterations(self.alteration, self.seeds[start:stop])
