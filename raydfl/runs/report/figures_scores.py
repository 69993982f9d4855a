"""The figure of a report that shows how normal and anomalous clips score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from raydfl.runs.report.figures import INK, SERIES, axes_of, legend, style

_BINS = 24


@dataclass(frozen=True, slots=True)
class Histogram:
    """Scores of one machine's clips."""

    label: str
    normal: NDArray[np.float64]
    """[clips]."""
    anomalous: NDArray[np.float64]
    """[clips]."""
    threshold: float | None
    """``None``: not known."""


def score_histograms(machines: Sequence[Histogram]) -> Figure:
    """Draw the scores of each machine's clips, one below the other on a common axis.

    Args:
        machines: at least one.
    """
    everything = np.concatenate([np.r_[each.normal, each.anomalous] for each in machines])
    everything = everything[np.isfinite(everything)]
    low, high = (float(everything.min()), float(everything.max())) if len(everything) else (0.0, 1.0)
    edges = np.linspace(low, high, _BINS + 1).tolist()
    with style():
        figure, rows = axes_of(0.9 + 0.9 * len(machines), len(machines))
        for axes, each in zip(rows, machines, strict=True):
            for number, (name, scores) in enumerate((("normal", each.normal), ("anomalous", each.anomalous))):
                axes.hist(scores, edges, color=SERIES[number], alpha=0.6, label=name)
            if each.threshold is not None:
                axes.axvline(each.threshold, color=INK, linewidth=1.0, linestyle="--")
            axes.set_ylabel(each.label, rotation=0, ha="right", va="center")
            axes.set_yticks([])
        rows[-1].set_xlabel("score")
        legend(figure, rows[0])
    return figure
