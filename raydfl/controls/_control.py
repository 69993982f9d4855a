"""The score of a control with its standard error, and its form in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

RAW = "raw features: "
"""Prefix of the names of raw-feature controls."""


@dataclass(frozen=True, slots=True)
class Control:
    """The score of a control on a test set."""

    name: str
    """``chance``, ``majority``, or the classifier or detector with the prefix :data:`RAW`."""
    split: str
    """The test set: ``test``, ``client_test`` (the clients' own tests) or ``validation`` (the clients' held-out clips)."""
    metric: str
    """Name of the score, such as ``accuracy``. With several parts of the data ``PART/accuracy``."""
    value: float
    count: int
    """Number of test clips."""
    standard_error: float | None = None
    """Standard error of a score on a test set of this size. ``None``: unknown."""

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


def auc_error(anomalous: int, normal: int) -> float:
    """Return the standard error of the AUC of random scores (J. A. Hanley, B. J. McNeil, Radiology 143, 1982).

    >>> round(auc_error(20, 20), 3)
    0.092
    """
    return math.sqrt((anomalous + normal + 1) / (12 * anomalous * normal)) if anomalous and normal else math.nan


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
