"""The figures of a report: one function each, from plain numbers to a figure; :func:`to_svg` makes it part of a page.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart, and every curve also has its own dashes.
In a page the colours are CSS variables (``--series-0`` ..., ``currentColor``), so that one figure suits a light and a
dark page.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#777777")
"""Colours of curves; a page replaces each by ``var(--series-<index>)``."""
INK = "#010203"
"""Colour of text and axes: ``currentColor`` in a page."""
_DASHES = ("-", "--", "-.", ":")
_WIDTH = 6.4  # inches
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.parse_math": False,  # a name with dollar signs is a name
}


class ShownFigure(Figure):
    """A figure that a notebook shows as the value of a cell, also where nobody has imported pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Series:
    """One curve."""

    label: str
    x: NDArray[np.float64]
    """[points], rising."""
    y: NDArray[np.float64]
    """[points]; NaN leaves a gap."""
    low: NDArray[np.float64] | None = None
    """[points]: lower edge of a band around the curve."""
    high: NDArray[np.float64] | None = None
    """[points]: upper edge."""
    colour: int = 0
    """Index into :data:`SERIES`, taken modulo its length."""
    dash: int = 0
    """0 solid, 1 dashed, 2 dash-dotted, 3 dotted."""


@contextmanager
def style() -> Iterator[None]:
    """Draw in our look, and quietly: names may hold letters that the measuring font lacks, but the page's fonts have."""
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # whatever the user's matplotlibrc says
        mpl.rcParams.update(_STYLE)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        logger.setLevel(logging.ERROR)
        yield
    logger.setLevel(level)


def axes_of(height: float = 3.2, rows: int = 1, width: float = _WIDTH) -> tuple[Figure, list[Axes]]:
    """Return a figure of its own: no global state, so reports can be made in any thread."""
    figure = ShownFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])


def _draw(axes: Axes, series: Sequence[Series]) -> None:
    for item in series:
        colour, dash = SERIES[item.colour % len(SERIES)], _DASHES[item.dash % len(_DASHES)]
        marker = "o" if len(item.x) <= 30 else None
        axes.plot(item.x, item.y, color=colour, linestyle=dash, linewidth=1.4, marker=marker, markersize=3)
        # Set afterwards: a label given to plot() is left out of the legend when it starts with an underscore.
        axes.lines[-1].set_label(" " + item.label if item.label.startswith("_") else item.label)
        if item.low is not None and item.high is not None:
            axes.fill_between(item.x, item.low, item.high, color=colour, alpha=0.15, linewidth=0)


def whole_numbers(ticks: int = 9) -> MaxNLocator:
    """Return a locator of at most so many ticks, at whole numbers only: on an axis with one whole number just one."""
    return MaxNLocator(ticks, integer=True, min_n_ticks=1)


def round_axis(axes: Axes) -> None:
    """Put rounds along the x axis."""
    axes.set_xlabel("round")
    first, last = axes.get_xlim()
    if last - first < 1:  # one round alone
        axes.set_xlim((first + last) / 2 - 0.5, (first + last) / 2 + 0.5)
    axes.xaxis.set_major_locator(whole_numbers())


def legend(figure: Figure, axes: Axes) -> None:
    """Below the plot, where it hides nothing, in as many columns as long names allow."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        longest = max(len(label) for label in labels)
        columns = max(1, min(3, len(labels), 100 // (longest + 8)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def curves(series: Sequence[Series], unit: str, percent: bool = False) -> Figure:
    """Draw learning curves.

    Args:
        series: x: rounds completed; y: the score.
        unit: label of the y axis, with its unit.
        percent: y is a share, shown as 0 to 100 %.
    """
    with style():
        height = 2.9 + 0.16 * len(series)
        figure, (axes,) = axes_of(height)
        _draw(axes, series)
        round_axis(axes)
        axes.set_ylabel(unit)
        if percent:
            _percent(axes, series)
        legend(figure, axes)
    return figure


def _percent(axes: Axes, series: Sequence[Series]) -> None:
    """From 0, and to 100 % where the curves come near: so that pages of different runs look alike."""
    top = max((float(np.nanmax(item.y)) for item in series if np.isfinite(item.y).any()), default=1.0)
    axes.set_ylim(0, 1.0 if top > 0.5 else None)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")


def client_spread(scores: Sequence[Series], unit: str) -> Figure:
    """Draw clients' scores, sorted: how uneven the federation is. The worst tenth is shaded.

    Args:
        scores: y: one score a client, 0 to 1, in any order; x is not used.
        unit: label of the y axis, with its unit.
    """
    with style():
        figure, (axes,) = axes_of(2.9 + 0.16 * len(scores))
        ordered = []
        for item in scores:
            count = len(item.y)
            x = (np.arange(count) + 0.5) / count
            ordered.append(Series(item.label, x, np.sort(item.y), colour=item.colour, dash=item.dash))
        axes.axvspan(0, 0.1, color=INK, alpha=0.08, linewidth=0)
        transform = axes.get_xaxis_transform()
        axes.text(0.05, 1.01, "worst\ntenth", transform=transform, ha="center", va="bottom", fontsize=7)
        _draw(axes, ordered)
        _percent(axes, ordered)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")
        axes.set_xlabel("clients from the worst to the best (%)")
        axes.set_ylabel(unit)
        legend(figure, axes)
    return figure


def confusion(matrix: ArrayLike, classes: Sequence[str]) -> Figure:
    """Draw a confusion matrix: the larger a cell's share of its row, the stronger its colour; with counts where there is room.

    Args:
        matrix: [classes, classes] counts; row: truth, column: prediction.
        classes: names, in the matrix's order.
    """
    counts = np.asarray(matrix, np.float64)
    number = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    with style():
        side = min(_WIDTH, max(3.2, 0.34 * number + 1.2))
        figure, (axes,) = axes_of(side, width=side)
        strength = shares**0.6  # so that one confusion in fifty is still seen
        colours = np.dstack([np.broadcast_to(to_rgb(SERIES[0]), (number, number, 3)), strength])
        if number <= 40:
            cells = [Rectangle((column - 0.5, row - 0.5), 1, 1) for row, column in np.argwhere(counts > 0)]
            axes.add_collection(PatchCollection(cells, facecolors=colours[counts > 0], edgecolors="none"))
        else:  # one picture instead of thousands of shapes, at the price of the same blue on light and dark pages
            axes.imshow(colours, interpolation="nearest")
        if number <= 14:
            for row, column in np.argwhere(counts > 0):
                colour = "white" if strength[row, column] > 0.6 else INK
                axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_xlim(-0.5, number - 0.5)
        axes.set_ylim(number - 0.5, -0.5)
        axes.set_aspect("equal")
        axes.grid(visible=False)
        every = max(1, -(-number // 60))  # more labels than that would overlap
        ticks = range(0, number, every)
        size = 8 if number <= 20 else max(4, 160 / (number / every))
        axes.set_xticks(ticks, classes[::every], rotation=90, fontsize=size)
        axes.set_yticks(ticks, classes[::every], fontsize=size)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
    return figure


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of one colour: one in each group."""

    label: str
    values: NDArray[np.float64]
    """[groups]; NaN where there is nothing to show."""
    spread: NDArray[np.float64]
    """[groups]: half the length of the line on each bar; NaN: none."""
    marks: NDArray[np.float64]
    """[groups]: a second value for comparison, shown as a mark across the bar; NaN: none."""


def bars(series: Sequence[Bars], groups: Sequence[str], unit: str, marks: str = "") -> Figure:
    """Draw values side by side, a colour for each series.

    Args:
        series: at least one.
        groups: names along the x axis.
        unit: label of the y axis, with its unit.
        marks: what the marks across the bars are.
    """
    with style():
        figure, (axes,) = axes_of(3.0 + 0.12 * len(series))
        x, width = np.arange(len(groups)), 0.8 / len(series)
        marked = False
        for index, item in enumerate(series):
            place = x + (index - (len(series) - 1) / 2) * width
            colour = SERIES[index % len(SERIES)]
            alpha = 0.9 if index < len(SERIES) else 0.5
            axes.bar(place, np.nan_to_num(item.values), width * 0.92, color=colour, alpha=alpha, label=item.label)
            some = np.isfinite(item.spread)
            axes.errorbar(place[some], item.values[some], item.spread[some], fmt="none", ecolor=INK, elinewidth=0.9)
            some = np.isfinite(item.marks)
            if some.any():
                half = width * 0.46
                lines = axes.hlines(item.marks[some], place[some] - half, place[some] + half, color=INK, linewidth=1.4)
                if not marked:
                    lines.set_label(marks)
                marked = True
        axes.set_xticks(x, list(groups))
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        legend(figure, axes)
    return figure


def heat_map(values: ArrayLike, rows: Sequence[str], columns: Sequence[str], axes_names: tuple[str, str]) -> Figure:
    """Draw a matrix of numbers: the larger a number among all, the stronger its colour; cells without one are hatched.

    Args:
        values: [rows, columns]; NaN: nothing to show.
        rows: names from the top.
        columns: names from the left.
        axes_names: what the rows and what the columns are.
    """
    matrix = np.asarray(values, np.float64)
    known = matrix[np.isfinite(matrix)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    with style():
        width = min(11.0, max(3.6, 0.75 * len(columns) + 2.2))
        figure, (axes,) = axes_of(max(2.4, 0.42 * len(rows) + 1.6), width=width)
        for row, column in np.ndindex(matrix.shape):
            value = matrix[row, column]
            corner = (column - 0.5, row - 0.5)
            if not np.isfinite(value):
                axes.add_patch(
                    Rectangle(corner, 1, 1, facecolor="none", edgecolor=INK, hatch="//", linewidth=0, alpha=0.3)
                )
                continue
            strength = 0.05 + 0.9 * (value - low) / (high - low) if high > low else 0.5
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=SERIES[0], alpha=strength, linewidth=0))
            colour = "white" if strength > 0.6 else INK
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.set_xticks(range(len(columns)), list(columns), rotation=40, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylabel(axes_names[0])
        axes.set_xlabel(axes_names[1])
    return figure


def pruned(layers: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]) -> Figure:
    """Draw clients that layer-wise pruning left out, over the rounds, a strip for each layer.

    Args:
        layers: by layer: rounds, and the number of clients left out in them.
    """
    with style():
        figure, strips = axes_of(0.7 + 0.55 * len(layers), rows=len(layers))
        top = max((float(number.max()) for _, number in layers.values() if len(number)), default=0.0)
        for axes, (layer, (rounds, number)) in zip(strips, layers.items(), strict=True):
            axes.step(rounds, number, where="mid", color=SERIES[0], linewidth=1.2)
            axes.set_ylim(0, max(1.0, top * 1.15))
            axes.yaxis.set_major_locator(whole_numbers(2))
            axes.set_title(layer, loc="left", fontsize=8, pad=2)
        round_axis(strips[-1])
        figure.supylabel("clients left out", fontsize=9)
    return figure


def groups_over_rounds(
    rounds: NDArray[np.float64], groups: NDArray[np.float64], kinds: Sequence[tuple[str, int]]
) -> Figure:
    """Draw which group each client is in, a line for each client, a colour for each group.

    Args:
        rounds: float64 [rounds], rising; a group holds until the next one.
        groups: [clients, rounds]: numbers of groups; 0: in none.
        kinds: names from the top, and how many clients each has, in the order of the lines; empty: not known.
    """
    clients = len(groups)
    with style():
        figure, (axes,) = axes_of(min(8.0, max(2.2, 0.12 * clients + 1.2)))
        stops = np.r_[rounds[1:], rounds[-1] + (rounds[-1] - rounds[-2] if len(rounds) > 1 else 1)]
        for number in np.unique(groups[groups > 0]).astype(int).tolist():
            cells = [
                Rectangle((rounds[column], row), stops[column] - rounds[column], 1)
                for row, column in zip(*np.nonzero(groups == number), strict=True)
            ]
            colour, again = SERIES[(number - 1) % len(SERIES)], (number - 1) // len(SERIES)
            axes.add_collection(
                PatchCollection(cells, facecolor=colour, alpha=0.85 / (1 + again), linewidth=0, label=f"_{number}")
            )
            axes.plot([], [], color=colour, alpha=0.85 / (1 + again), linewidth=5, label=f"group {number}")
        axes.set_xlim(rounds[0], stops[-1])
        axes.set_ylim(clients, 0)
        axes.grid(visible=False)
        axes.set_ylabel("clients")
        if kinds:
            edges = np.cumsum([0, *(count for _, count in kinds)])
            axes.set_yticks((edges[1:] + edges[:-1]) / 2, [name for name, _ in kinds])
            for edge in edges[1:-1].tolist():
                axes.axhline(edge, color=INK, linewidth=0.8)
        else:
            axes.set_yticks([])
        round_axis(axes)
        legend(figure, axes)
    return figure


def cumulative_bytes(series: Sequence[Series]) -> Figure:
    """Draw bytes sent since the first round.

    Args:
        series: y: bytes of each round, not yet added up.
    """
    with style():
        figure, (axes,) = axes_of()
        sums = [Series(i.label, i.x, np.cumsum(np.nan_to_num(i.y)), colour=i.colour, dash=i.dash) for i in series]
        largest = max((float(item.y[-1]) for item in sums if len(item.y)), default=0.0)
        unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= s), ("bytes", 1.0))
        _draw(axes, [Series(i.label, i.x, i.y / scale, colour=i.colour, dash=i.dash) for i in sums])
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"sent so far ({unit})")
        round_axis(axes)
        legend(figure, axes)
    return figure


def round_seconds(series: Sequence[Series]) -> Figure:
    """Draw seconds that the parts of each round took."""
    with style():
        figure, (axes,) = axes_of(2.9 + 0.1 * len(series))
        _draw(axes, series)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("time per round (s)")
        round_axis(axes)
        legend(figure, axes)
    return figure


def failures(series: Sequence[Series]) -> Figure:
    """Draw updates that were not used, a bar for each round that had any, the kinds on top of each other.

    Args:
        series: y: number of updates; all with the same x.
    """
    with style():
        figure, (axes,) = axes_of(2.6)
        x = series[0].x
        width = float(np.clip(300 / (x[-1] - x[0] + 1), 1, 12))  # in points: the axes are some 400 wide
        below = np.zeros(len(x))
        for item in series:
            above, some = below + item.y, item.y > 0
            colour = SERIES[item.colour % len(SERIES)]
            axes.vlines(
                x[some], below[some], above[some], color=colour, linewidth=width, capstyle="butt", label=item.label
            )
            below = above
        axes.set_xlim(x[0] - 1, x[-1] + 1)
        axes.set_ylim(0, None)
        axes.set_ylabel("updates not used")
        axes.yaxis.set_major_locator(whole_numbers())
        round_axis(axes)
        legend(figure, axes)
    return figure


@dataclass(frozen=True, slots=True)
class Axis:
    """One upright line of :func:`parallel_coordinates`."""

    label: str
    ticks: Sequence[tuple[float, str]]
    """Places, 0 at the foot to 1 at the top, and what stands there."""


def parallel_coordinates(
    lines: ArrayLike, strength: ArrayLike, axes_: Sequence[Axis], dashed: Sequence[bool], unit: str
) -> Figure:
    """Draw a line for each of several things across an upright axis for each of its numbers; the best is drawn strongest.

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


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Return the figure as an ``<svg>`` element for an HTML page: of any size, self-contained, colours as CSS variables.

    Args:
        figure: from one of the functions above.
        name: distinguishes the figures of a page.
        description: what it shows, for readers who do not see it.
    """
    buffer = io.StringIO()
    with style(), mpl.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # an HTML parser knows what svg is
    text = text.replace("xlink:href", "href")
    text = re.sub(r"font-family: [^;]*; ", "", text)  # the page's
    used = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
    for index, colour in enumerate(SERIES):
        text = text.replace(colour, f"var(--series-{index})")
    text = text.replace(INK, "currentColor")
    label = re.sub(r"[<>&\"]", " ", description)
    width = f"{figure.get_figwidth() / _WIDTH * 44:.4g}rem"  # wider would only be larger letters
    return text.replace("<svg", f'<svg role="img" aria-label="{label}" style="max-width: {width}"', 1).strip()
