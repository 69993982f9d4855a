"""Boosting: an attacker's change made larger, so that the others' cannot outweigh it."""

from __future__ import annotations

import numpy as np

from raydfl.attack import Cohort


def boosted(change: np.ndarray, boost: float | None, cohort: Cohort) -> np.ndarray:
    """``boost`` times the change (float64 [elements]); ``None``: as much as makes up for the others' weight in the mean."""
    factor = 1 / cohort.share if boost is None else boost
    return change if factor == 1 else factor * change
