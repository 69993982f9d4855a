"""The figures of a report that show where time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from raydfl.runs.report.figures import INK, SERIES, axes_of, legend, round_axis, style, whole_numbers

_STEPS = 150
"""Steps that the parts of a round are drawn in: of more rounds, means over neighbours are shown."""
_USUAL = 4.0
"""Times the median up to which a round's time sets the scale."""
_LANES = 32
"""Actors that a timeline shows."""
_LABELLED = 0.06
"""Share of the width that a client's name needs."""


def round_parts(rounds: NDArray[np.float64], parts: Mapping[str, NDArray[np.float64]]) -> Figure:
    """Draw the parts of each round's time on top of each other; what a label begins with ``_`` is drawn pale.

    Args:
        rounds: [rounds], rising.
        parts: by label, the first at the bottom: seconds [rounds].
    """
    with style():
        figure, (axes,) = axes_of(3.1)
        groups = np.array_split(np.arange(len(rounds)), min(_STEPS, len(rounds)))
        edges = np.array([rounds[group[0]] - 0.5 for group in groups] + [rounds[-1] + 0.5])
        x = np.repeat(edges, 2)[1:-1]
        below = np.zeros(len(x))
        for number, (label, seconds) in enumerate(parts.items()):
            above = below + np.repeat([seconds[group].mean() for group in groups], 2)
            pale = label.startswith("_")
            colour, strength = (INK, 0.15) if pale else (SERIES[number % len(SERIES)], 0.9)
            axes.fill_between(x, below, above, color=colour, alpha=strength, linewidth=0, label=label.removeprefix("_"))
            below = above
        axes.set_xlim(edges[0], edges[-1])
        # A first round that loads what all later ones use shall not make those flat.
        usual = _USUAL * float(np.median(below))
        axes.set_ylim(0, 1.1 * max(float(below[below <= usual].max(initial=0.0)), 1e-6))
        for step in np.flatnonzero(below[::2] > usual):
            place = (edges[step] + edges[step + 1]) / 2
            axes.annotate(
                f"{below[2 * step]:.3g} s", (place, 1), xycoords=axes.get_xaxis_transform(), ha="center", fontsize=7
            )
        axes.set_ylabel("time of a round (s)")
        round_axis(axes)
        legend(figure, axes)
    return figure


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one round: which actor worked on which client."""

    round: int
    bars: Sequence[tuple[int, str, int, float, float]]
    """Number of the actor, the client's name, a number that its colour is taken from, begin and end in seconds of the round."""


def actors(rounds: Sequence[Work]) -> Figure:
    """Draw which actor worked on which client when: a strip for each round, in it a lane for each actor.

    Args:
        rounds: at least one. Actors beyond the first 32 are left out.
    """
    lanes = min(_LANES, 1 + max((bar[0] for work in rounds for bar in work.bars), default=0))
    with style():
        figure, strips = axes_of(0.6 + len(rounds) * (0.45 + 0.22 * lanes), rows=len(rounds))
        width = max((bar[4] for work in rounds for bar in work.bars), default=0.0) or 1.0
        for axes, work in zip(strips, rounds, strict=True):
            shown = [bar for bar in work.bars if bar[0] < lanes]
            cells = [Rectangle((begin, actor - 0.4), end - begin, 0.8) for actor, _, _, begin, end in shown]
            colours = [SERIES[number % len(SERIES)] for _, _, number, _, _ in shown]
            axes.add_collection(
                PatchCollection(cells, facecolors=colours, edgecolors="white", linewidths=0.4, alpha=0.9)
            )
            for actor, client, _, begin, end in shown:
                if end - begin > _LABELLED * width:
                    most = int((end - begin) / width * 80)  # letters for which there is room
                    name = client if len(client) <= most else f"…{client[-max(1, most - 1) :]}"  # ids often begin alike
                    axes.text((begin + end) / 2, actor, name, ha="center", va="center", fontsize=6, color="white")
            axes.set_xlim(0, width * 1.01)
            axes.set_ylim(lanes - 0.5, -0.5)
            axes.yaxis.set_major_locator(whole_numbers(8))
            axes.grid(visible=False)
            axes.set_title(f"round {work.round}", loc="left", fontsize=8, pad=2)
        strips[-1].set_xlabel("seconds since the round began")
        figure.supylabel("actor", fontsize=9)
    return figure
