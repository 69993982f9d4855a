"""The score of a control with its standard error, intervals of scores, and the form of controls in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scipy.optimize import brentq

RAW = "raw features: "
"""Prefix of the names of raw-feature controls."""
_Z = 1.959963984540054
"""Quantile of the normal distribution for 95 %."""
_NEAR = 1e-9


@dataclass(frozen=True, slots=True)
class Control:
    """The score of a control on a test set."""

    name: str
    """``chance``, ``majority``, or the classifier or detector with the prefix :data:`RAW`."""
    split: str
    """The test set: ``test``, ``client_test`` (the clients' own tests), ``validation`` (the clients' held-out clips) or
    ``server_validation`` (the server's)."""
    metric: str
    """Name of the score, such as ``accuracy``. With several parts of the data ``PART/accuracy``."""
    value: float
    count: int
    """Number of test clips."""
    standard_error: float | None = None
    """Standard error of a score on a test set of this size. ``None``: unknown."""
    positives: int | None = None
    """Number of anomalous test clips. ``None``: unknown, or the score is not an AUC."""

    @property
    def raw(self) -> bool:
        """True for a raw-feature control."""
        return self.name.startswith(RAW)


def binomial_error(share: float, count: int) -> float:
    """Return the standard error of a share of ``count`` clips.

    >>> binomial_error(0.5, 100)
    0.05
    """
    return math.sqrt(share * (1 - share) / count)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share of ``count`` clips (E. B. Wilson, JASA 22, 1927).

    SciPy's interval takes a whole number of successes, but a run stores the share.

    For 5 of 10 clips, the centre is (5 + 1.92) / 13.84 = 0.5, and the half-width is 1.96 * sqrt(2.5 + 0.96) / 13.84 = 0.263.

    >>> [round(end, 3) for end in wilson_interval(0.5, 10)]
    [0.237, 0.763]
    """
    total = count + _Z**2
    centre = (share * count + _Z**2 / 2) / total
    half = _Z * math.sqrt(share * (1 - share) * count + _Z**2 / 4) / total
    return max(0.0, centre - half), min(1.0, centre + half)


def auc_error(anomalous: int, normal: int, auc: float = 0.5) -> float:
    """Return the standard error of an AUC (J. A. Hanley, B. J. McNeil, Radiology 143, 1982). By default, of random scores.

    >>> round(auc_error(20, 20), 3)
    0.092
    """
    if not anomalous or not normal:
        return math.nan
    two_anomalous, two_normal = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + (anomalous - 1) * (two_anomalous - auc**2) + (normal - 1) * (two_normal - auc**2)
    return math.sqrt(max(0.0, variance) / (anomalous * normal))


def auc_interval(auc: float, anomalous: int, normal: int) -> tuple[float, float]:
    """Return the 95 % score interval of an AUC: each end is 1.96 of its own standard errors away from the AUC.

    Score intervals stay in 0..1 and have a width at an AUC of 1 (R. G. Newcombe, Statistics in Medicine 25, 2006). The standard
    errors come from :func:`auc_error`.

    >>> [round(end, 3) for end in auc_interval(0.5, 20, 20)]
    [0.331, 0.669]
    """

    def distance(value: float) -> float:
        return abs(auc - value) - _Z * auc_error(anomalous, normal, value)

    # The distance is negative near the AUC, but 0 at an AUC of 0 or 1.
    low = brentq(distance, 0.0, auc - _NEAR) if auc > _NEAR else 0.0
    high = brentq(distance, auc + _NEAR, 1.0) if auc < 1 - _NEAR else 1.0
    return float(low), float(high)


def to_json(controls: Sequence[Control], note: str) -> str:
    """Convert the results of :func:`raydfl.controls.measure_controls` to JSON."""
    return json.dumps({"controls": [asdict(control) for control in controls], "note": note}, indent=2)


def from_json(text: str) -> tuple[list[Control], str]:
    """Convert the result of :func:`to_json` back.

    Raises:
        ValueError, KeyError, TypeError: the text is damaged.
    """
    content = json.loads(text)
    return [Control(**values) for values in content["controls"]], str(content["note"])
