"""The figures that only a search's page has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from raydfl.runs.report.figures import INK, SERIES, axes_of, style


@dataclass(frozen=True, slots=True)
class Axis:
    """One upright line of :func:`parallel_coordinates`."""

    label: str
    ticks: Sequence[tuple[float, str]]
    """Places, 0 at the foot to 1 at the top, and what stands there."""


def parallel_coordinates(
    lines: ArrayLike, strength: ArrayLike, axes_: Sequence[Axis], dashed: Sequence[bool], unit: str
) -> Figure:
    """A line for each of several things across an upright axis for each of its numbers; the better one is, the stronger its line.

    Args:
        lines: [things, axes]: places on the axes, 0 to 1.
        strength: [things]: 0 for the worst, 1 for the best, which is drawn last and in another colour.
        axes_: from left to right.
        dashed: which lines are dashed.
        unit: what the strength is of.
    """
    places, strengths = np.asarray(lines, np.float64), np.asarray(strength, np.float64)
    with style():
        figure, (axes,) = axes_of(3.6)
        x = np.arange(len(axes_))
        best = int(np.argmax(strengths)) if len(strengths) else -1
        for index in np.argsort(strengths, kind="stable"):
            colour, width = (SERIES[1], 2.0) if index == best else (SERIES[0], 1.0)
            alpha = 1.0 if index == best else 0.15 + 0.7 * strengths[index]
            dash = "--" if dashed[index] else "-"
            axes.plot(x, places[index], color=colour, alpha=alpha, linewidth=width, linestyle=dash)
        for place, axis in zip(x, axes_, strict=True):
            axes.axvline(float(place), color=INK, linewidth=0.8)
            for height, text in axis.ticks:
                axes.text(place + 0.03, height, text, fontsize=7, va="center", ha="left")
        axes.set_xticks(x, [axis.label for axis in axes_], rotation=20, ha="right", rotation_mode="anchor")
        axes.set_yticks([])
        axes.set_ylim(-0.05, 1.05)
        axes.set_xlim(-0.2, len(axes_) - 0.5)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_ylabel(unit)
    return figure


def shares(values: Mapping[str, float], unit: str) -> Figure:
    """Shares as lying bars, the largest at the top.

    Args:
        values: 0 to 1, by name.
        unit: label of the x axis.
    """
    ordered = sorted(values.items(), key=lambda item: item[1])
    with style():
        figure, (axes,) = axes_of(0.9 + 0.3 * len(ordered))
        axes.barh([name for name, _ in ordered], [100 * share for _, share in ordered], color=SERIES[0], height=0.7)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0)
        axes.set_xlabel(unit)
    return figure
