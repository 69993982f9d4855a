"""Building blocks of a report's figures: colours, curves and the conversion to SVG. Each section draws its own figures.

Colours are from the colour-blind safe palette of Okabe and Ito. Curves also differ in their dashes. In a page, colours are CSS
variables (``--series-0`` ..., ``currentColor``), so a figure suits light and dark pages.
"""

from __future__ import annotations

import html
import io
import itertools
import logging
import re
import textwrap
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
    "Plot",
    "Series",
    "label_rounds",
    "make_integer_locator",
    "plot",
    "plot_curves",
    "scale_percent",
]

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#777777")
"""Colours of curves. A page replaces each colour by ``var(--series-<index>)``."""
INK = "#010203"
"""Colour of text and axes. A page replaces it by ``currentColor``."""
SHARES = LinearSegmentedColormap.from_list("shares", [f"{SERIES[0]}00", SERIES[0]])
"""Colour map of a matrix's cells, from transparent to opaque."""
_DASHES = ("-", "--", "-.", ":")
_WIDTH = 5.4  # inches: a phone shows letters of 8 pixels
_MARKED = 300
"""Maximum number of points of a curve with markers, which show their values."""
_LABEL = 68
"""Longest line of a legend, in letters."""
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
    "text.parse_math": False,  # Names may contain dollar signs.
}


class ShownFigure(Figure):
    """A figure with a display in notebooks, even without an import of pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of a page, drawn on demand."""

    title: str
    caption: str
    draw: Callable[..., None]
    """Function that draws on the axes. Its arguments are the axes from top to bottom."""
    height: float = 3.2
    """Height in inches."""
    rows: int = 1
    """Number of axes."""
    width: float = _WIDTH
    """Width in inches."""
    label: str = ""
    """Common label of the y axes."""

    def figure(self) -> Figure:
        """Draw the figure, with its legend below the axes.

        It uses no global state of pyplot, so any thread can draw figures.
        """
        with _apply_style():
            figure = ShownFigure(figsize=(self.width, self.height), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots(self.rows, 1, sharex=True, squeeze=False)[:, 0]
            self.draw(*axes)
            if self.label:
                figure.supylabel(self.label, fontsize=9)
            handles, labels = axes[0].get_legend_handles_labels()
            if labels:
                labels = [textwrap.fill(label, _LABEL, drop_whitespace=False) for label in labels]
                columns = max(1, min(3, len(labels), 84 // (max(map(len, labels)) + 8)))
                figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        return figure

    def to_svg(self, name: str) -> str:
        """Return the figure as a scalable, self-contained ``<svg>`` element with CSS variables as colours.

        Args:
            name: Unique name of the figure in its page.
        """
        buffer = io.StringIO()
        figure = self.figure()
        with _apply_style({"svg.hashsalt": name}):
            no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(buffer, format="svg", metadata=no_metadata)
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for size in ("width", "height"):
            text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
        text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # HTML needs no namespaces.
        text = _add_values(text.replace("xlink:href", "href"), figure)
        text = re.sub(r"font-family: [^;]*; ", "", text)  # Use the page's font.
        used = set(re.findall(r"#([\w.-]+)", text))
        text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
        for index, colour in enumerate(SERIES):
            text = text.replace(colour, f"var(--series-{index})")
        text = text.replace(INK, "currentColor")
        label = re.sub(r"[<>&\"]", " ", f"{self.title}. {self.caption}")
        width = f"{self.width / _WIDTH * 44:.4g}rem"  # A wider figure would only have larger letters.
        return text.replace("<svg", f'<svg role="img" aria-label="{label}" style="max-width: {width}"', 1).strip()


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a figure."""

    label: str
    x: NDArray[np.float64]
    """x values [points], increasing."""
    y: NDArray[np.float64]
    """y values [points]. NaN leaves a gap."""
    low: NDArray[np.float64] | None = None
    """Lower edge [points] of a band around the curve."""
    high: NDArray[np.float64] | None = None
    """Upper edge [points] of the band."""
    colour: int = 0
    """Index into :data:`SERIES`, modulo its length."""
    dash: int = 0
    """0 solid, 1 dashed, 2 dash-dotted, 3 dotted."""
    dots: NDArray[np.float64] | None = None
    """Values [curves, points] of single runs, drawn as dots."""


def plot_curves(
    title: str,
    caption: str,
    series: Sequence[Series],
    unit: str,
    percent: bool = False,
    lowest: float | None = None,
    level: float | None = None,
    virtual: bool = False,
) -> Plot:
    """Return a plot of curves over the rounds, or over virtual time.

    Args:
        title: Title of the plot.
        caption: Caption of the plot.
        series: Curves with the number of completed rounds as x, or with virtual seconds.
        unit: Label of the y axis with its unit.
        percent: Show y values in 0..1 as per cent.
        lowest: Lower limit of the y axis. ``None`` fits it to the curves.
        level: Value of a dotted horizontal line. ``None``: no line.
        virtual: Whether x is virtual time in seconds.
    """

    def draw(axes: Axes) -> None:
        plot(axes, series)
        axes.set_ylabel(unit)
        if level is not None:
            axes.axhline(level, color=INK, linestyle=":", linewidth=0.9)
        if lowest is not None:
            axes.set_ylim(bottom=lowest)
        if virtual:
            axes.set_xlabel("virtual time (s)")
        else:
            label_rounds(axes)
        if percent:
            scale_percent(axes, series)

    return Plot(title, caption, draw, 2.9 + 0.16 * len(series))


def plot(axes: Axes, series: Sequence[Series]) -> None:
    """Plot curves with their bands."""
    for item in series:
        colour, dash = SERIES[item.colour % len(SERIES)], _DASHES[item.dash % len(_DASHES)]
        marker, size = "o" if len(item.x) <= _MARKED else None, 3 if len(item.x) <= 30 else 1
        axes.plot(item.x, item.y, color=colour, linestyle=dash, linewidth=1.4, marker=marker, markersize=size)
        axes.lines[-1].set_gid(f"curve-{axes.figure.axes.index(axes)}-{len(axes.lines)}")
        # Matplotlib omits labels with a leading underscore from the legend, so set the label afterwards with a space before it.
        axes.lines[-1].set_label(" " + item.label if item.label.startswith("_") else item.label)
        if item.low is not None and item.high is not None:
            axes.fill_between(item.x, item.low, item.high, color=colour, alpha=0.15, linewidth=0)
        if item.dots is not None:
            x = np.broadcast_to(item.x, item.dots.shape)
            axes.scatter(x, item.dots, s=6, color=colour, alpha=0.6, linewidths=0)


def make_integer_locator(ticks: int = 9) -> MaxNLocator:
    """Return a locator with 1 to ``ticks`` ticks at whole numbers."""
    return MaxNLocator(ticks, integer=True, min_n_ticks=1)


def label_rounds(axes: Axes) -> None:
    """Label the x axis with rounds."""
    axes.set_xlabel("round")
    first, last = axes.get_xlim()
    if last - first < 1:  # a single round
        axes.set_xlim((first + last) / 2 - 0.5, (first + last) / 2 + 0.5)
    axes.xaxis.set_major_locator(make_integer_locator())


def scale_percent(axes: Axes, series: Sequence[Series]) -> None:
    """Show y in per cent from 0, and up to 100 % if a curve exceeds 50 %."""
    # Equal scales make the reports of different runs comparable.
    top = max((float(np.nanmax(item.y)) for item in series if np.isfinite(item.y).any()), default=1.0)
    axes.set_ylim(0, 1.0 if top > 0.5 else None)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")
    axes.fmt_ydata = lambda value: f"{100 * value:.1f} %"


def _add_values(text: str, figure: Figure) -> str:
    """Add the values of curves to the markers of an SVG, which browsers show below the pointer.

    Args:
        text: The SVG.
        figure: Its figure.
    """
    for line in itertools.chain.from_iterable(axes.lines for axes in figure.axes):
        start = text.find(f'<g id="{line.get_gid()}">')
        if start < 0 or line.axes is None:
            continue
        format_y = line.axes.fmt_ydata or "{:.4g}".format
        head, rest = text[:start], text[start:]
        end = rest.index("</g>")
        points = np.column_stack(line.get_data()).astype(float)
        points = points[np.isfinite(points).all(axis=1)]
        uses = re.findall(r'<use [^>]*? x="([^"]*)" y="([^"]*)"', rest[:end])
        if len(uses) != len(points):  # Matplotlib omits markers outside the figure.
            continue
        label = f"{line.get_label()}, {line.axes.get_xlabel()}".strip()
        targets = (
            f'<circle cx="{cx}" cy="{cy}" r="6" fill="transparent">'
            f"<title>{html.escape(f'{label} {x:g}: {format_y(y)}')}</title></circle>"
            for (cx, cy), (x, y) in zip(uses, points.tolist(), strict=True)
        )
        text = head + rest[:end] + "".join(targets) + rest[end:]
    return text


@contextmanager
def _apply_style(extra: dict[str, Any] | None = None) -> Iterator[None]:
    """Set the report's style and silence warnings about missing glyphs."""
    # Names may contain letters missing in matplotlib's font. The page's fonts have them.
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    # The reset ignores the user's matplotlibrc.
    with matplotlib.style.context(_STYLE | (extra or {}), after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        logger.setLevel(logging.ERROR)
        yield
    logger.setLevel(level)
