"""The vocabulary of figures: colours, curves, and the way into a page. Each figure is drawn beside the content that it shows.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart, and every curve also has its own dashes.
In a page the colours are CSS variables (``--series-0`` ..., ``currentColor``), so that one figure suits a light and a
dark page.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

__all__ = [
    "INK",
    "SERIES",
    "SHARES",
    "Axes",
    "Picture",
    "Series",
    "curves",
    "label_rounds",
    "plot",
    "scale_percent",
    "whole_numbers",
]

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#777777")
"""Colours of curves; a page replaces each by ``var(--series-<index>)``."""
INK = "#010203"
"""Colour of text and axes: ``currentColor`` in a page."""
SHARES = LinearSegmentedColormap.from_list("shares", [f"{SERIES[0]}00", SERIES[0]])
"""Colours of cells, from transparent to strong."""
_DASHES = ("-", "--", "-.", ":")
_WIDTH = 6.4  # inches
_STYLE: dict[str, Any] = {
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
class Picture:
    """A figure of a page, which is drawn when somebody wants to see it."""

    title: str
    caption: str
    draw: Callable[..., None]
    """Draws on axes, one below the other."""
    height: float = 3.2
    """Height in inches."""
    rows: int = 1
    """The number of axes."""
    width: float = _WIDTH
    label: str = ""
    """Label of the y axes together."""

    def figure(self) -> Figure:
        """Draw the figure with its legend below, where it hides nothing, in as many columns as long names allow.

        It belongs to no global state, so reports can be made in any thread.
        """
        with _style():
            figure = ShownFigure(figsize=(self.width, self.height), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots(self.rows, 1, sharex=True, squeeze=False)[:, 0]
            self.draw(*axes)
            if self.label:
                figure.supylabel(self.label, fontsize=9)
            handles, labels = axes[0].get_legend_handles_labels()
            if labels:
                columns = max(1, min(3, len(labels), 100 // (max(map(len, labels)) + 8)))
                figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        return figure

    def to_svg(self, name: str) -> str:
        """Return the figure as an ``<svg>`` element for an HTML page: of any size, self-contained, colours as CSS variables.

        Args:
            name: distinguishes the figures of a page.
        """
        buffer = io.StringIO()
        figure = self.figure()
        with _style({"svg.hashsalt": name}):
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(buffer, format="svg", metadata=nothing)
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for size in ("width", "height"):
            text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
        text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # an HTML parser knows what svg is
        text = text.replace("xlink:href", "href")
        text = re.sub(r"font-family: [^;]*; ", "", text)  # the page's
        used = set(re.findall(r"#([\w.-]+)", text))
        text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
        for index, colour in enumerate(SERIES):
            text = text.replace(colour, f"var(--series-{index})")
        text = text.replace(INK, "currentColor")
        label = re.sub(r"[<>&\"]", " ", f"{self.title}. {self.caption}")
        width = f"{self.width / _WIDTH * 44:.4g}rem"  # wider would only be larger letters
        return text.replace("<svg", f'<svg role="img" aria-label="{label}" style="max-width: {width}"', 1).strip()


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


def curves(
    title: str, caption: str, series: Sequence[Series], unit: str, percent: bool = False, lowest: float | None = None
) -> Picture:
    """Return a picture of curves over the rounds.

    Args:
        title: of the picture.
        caption: of the picture.
        series: x: rounds completed.
        unit: label of the y axis, with its unit.
        percent: y is a share, shown as 0 to 100 %.
        lowest: the least value of the y axis; ``None``: as the curves need.
    """

    def draw(axes: Axes) -> None:
        plot(axes, series)
        axes.set_ylabel(unit)
        if lowest is not None:
            axes.set_ylim(bottom=lowest)
        label_rounds(axes)
        if percent:
            scale_percent(axes, series)

    return Picture(title, caption, draw, 2.9 + 0.16 * len(series))


def plot(axes: Axes, series: Sequence[Series]) -> None:
    """Draw curves with their bands."""
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


def label_rounds(axes: Axes) -> None:
    """Put rounds along the x axis."""
    axes.set_xlabel("round")
    first, last = axes.get_xlim()
    if last - first < 1:  # one round alone
        axes.set_xlim((first + last) / 2 - 0.5, (first + last) / 2 + 0.5)
    axes.xaxis.set_major_locator(whole_numbers())


def scale_percent(axes: Axes, series: Sequence[Series]) -> None:
    """Show y in per cent from 0, and to 100 % where the curves come near: pages of different runs then look alike."""
    top = max((float(np.nanmax(item.y)) for item in series if np.isfinite(item.y).any()), default=1.0)
    axes.set_ylim(0, 1.0 if top > 0.5 else None)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")


@contextmanager
def _style(more: dict[str, Any] | None = None) -> Iterator[None]:
    """Draw in our look, and quietly: names may hold letters that the measuring font lacks, but the page's fonts have."""
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    # After a reset: whatever the user's matplotlibrc says.
    with matplotlib.style.context(_STYLE | (more or {}), after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        logger.setLevel(logging.ERROR)
        yield
    logger.setLevel(level)
