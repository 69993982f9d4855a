"""The importance of each setting of a search: what a random forest loses when one setting's values are shuffled.

The forest learns the trials' last scores from their settings (each as its place between its ends, in its logarithm where it was
drawn so). Permutation importance: the mean rise of its squared error over shufflings of one setting, as a share of the sum over
all settings; negative ones count as 0. It is measured on the trials that the forest learned from, so it says what the forest
used, and with few trials it says little.
"""

from __future__ import annotations

import math

import numpy as np

from raydfl.core.seeds import seed_for
from raydfl.experiments.search.journal import TrialRecord
from raydfl.experiments.search.plan import Search

FEWEST = 8
"""Trials with a score without which nothing is said."""
_TREES = 200
_SHUFFLES = 20


def importances(search: Search, records: list[TrialRecord]) -> dict[str, float]:
    """Return the share of each setting, 0 to 1, adding up to 1; empty when there are too few trials, or nothing mattered."""
    known = [record for record in records if math.isfinite(record.score)]
    if len(known) < FEWEST:
        return {}
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    space = search.settings.space
    places = np.array([[domain.position(record.values[key]) for key, domain in space.items()] for record in known])
    scores = np.array([record.score for record in known])
    state = seed_for(search.settings.seed, 0, "", "search importance") % 2**32
    forest = RandomForestRegressor(_TREES, random_state=state, n_jobs=1).fit(places, scores)
    rise = permutation_importance(
        forest, places, scores, scoring="neg_mean_squared_error", n_repeats=_SHUFFLES, random_state=state, n_jobs=1
    ).importances_mean
    rise = np.maximum(rise, 0.0)
    if rise.sum() <= 0:
        return {}
    return {key: float(share) for key, share in zip(space, rise / rise.sum(), strict=True)}
