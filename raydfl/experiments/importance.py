"""The importance of each domain of a study.

A random forest learns the scores from the settings. The importance of a setting is the mean rise of the squared error when the
setting is shuffled, as a fraction of the sum over all settings. It is measured on the trials that the forest learned from: it shows
what the forest used, and with few trials it shows little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raydfl.core.seeds import seed_for
from raydfl.experiments.study import Study

FEWEST = 8
"""Scores without which no importance is given."""
_TREES = 200
_SHUFFLES = 20


def measure_importance(study: Study, scored: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """Return the importance of each domain, adding up to 1; empty: there are too few scores, or no setting mattered.

    Args:
        scored: draws with their scores; those that are not finite are left out.
    """
    known = [(values, score) for values, score in scored if math.isfinite(score)]
    domains = study.settings.domains
    if not domains or len(known) < FEWEST:
        return {}
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    places = np.array([[domain.position(values[key]) for key, domain in domains.items()] for values, _ in known])
    scores = np.array([score for _, score in known])
    state = seed_for(study.settings.seed, 0, "", "search importance") % 2**32
    forest = RandomForestRegressor(_TREES, random_state=state, n_jobs=1).fit(places, scores)
    rise = permutation_importance(
        forest, places, scores, scoring="neg_mean_squared_error", n_repeats=_SHUFFLES, random_state=state, n_jobs=1
    ).importances_mean
    rise = np.maximum(rise, 0.0)
    if rise.sum() <= 0:
        return {}
    return {key: float(share) for key, share in zip(domains, rise / rise.sum(), strict=True)}
