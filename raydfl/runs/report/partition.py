"""Plot of a partition: the number of clips by client and class."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from raydfl.data import Population, describe_sizes

_MOST_NAMES = 64
_MOST_ROWS = 400
_MOST_NUMBERS = 1_000
_CHUNK = 1_000_000
"""Clients per chunk when counting clips."""


@mpl.rc_context({"text.parse_math": False})  # Names may contain dollar signs.
def plot_partition(population: Population, path: Path) -> None:
    """Plot the training clips by client and class, and by client.

    Up to 400 clients are shown in the population's order. Of more clients, 400 are shown, evenly spaced in the order of their size.

    Args:
        population: The clients with their clips.
        path: Path of the image. Its extension (png, svg, pdf) sets the format.
    """
    clients, classes = len(population), len(population.classes)
    chunks = (slice(start, start + _CHUNK) for start in range(0, clients, _CHUNK))
    sizes = np.concatenate([population.label_counts(clients=chunk).sum(axis=1) for chunk in chunks])
    shown = np.arange(clients)
    if clients > _MOST_ROWS:
        shown = np.argsort(-sizes, kind="stable")[np.linspace(0, clients - 1, _MOST_ROWS).round().astype(int)]
    rows = len(shown)

    width = float(np.clip(4.6 + 0.32 * classes, 7.5, 18.0))
    figure = Figure(figsize=(width, float(np.clip(2.2 + 0.19 * rows, 4.0, 12.0))), layout="constrained")
    FigureCanvasAgg(figure)
    cells, bars = figure.subplots(1, 2, sharey=True, width_ratios=[max(2.0, 0.32 * classes), max(1.4, 0.06 * classes)])
    _draw_cells(figure, cells, population.label_counts(clients=shown))
    _draw_sizes(bars, sizes[shown])
    cells.set_ylim(rows - 0.5, -0.5)
    _name_classes(cells, population.classes)
    if clients > _MOST_ROWS:
        cells.set_ylabel(f"{rows} of {clients:,} clients, from most to fewest clips")
        cells.set_yticks([])
    elif clients <= _MOST_NAMES:
        cells.set_yticks(range(rows), list(population.ids), fontsize=7 if rows > 30 else 8)
        cells.set_ylabel("client")
    else:
        cells.set_ylabel("client (number)")
    figure.suptitle(
        f"{clients:,} clients, {int(sizes.sum()):,} training clips, {classes} classes; {describe_sizes(sizes)}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _draw_cells(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    """Draw the map of clients x classes. Cells without a clip stay white."""
    most, least = int(counts.max()), int(counts[counts > 0].min())
    scale: Normalize = LogNorm(least, most) if most > 20 * least else Normalize(0, most)
    colours = ListedColormap(mpl.colormaps["Blues"](np.linspace(0.12, 1.0, 256)))  # White means no clip.
    image = axes.imshow(np.ma.masked_equal(counts, 0), aspect="auto", interpolation="nearest", cmap=colours, norm=scale)
    axes.set_facecolor("white")
    if counts.size <= _MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(counts):
            if value:
                dark = float(scale(float(value))) > 0.55
                axes.text(column, row, f"{value}", ha="center", va="center", fontsize=6, color="w" if dark else "k")
    ticks = LogLocator(subs=(1, 2, 5)) if isinstance(scale, LogNorm) else MaxNLocator(integer=True)
    bar = figure.colorbar(
        image,
        ax=axes,
        location="top",
        shrink=0.6,
        pad=0.01,
        aspect=40,
        ticks=ticks,
        format=StrMethodFormatter("{x:,.0f}"),
    )
    bar.set_label("clips of the class", fontsize=8)
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=7)


def _draw_sizes(axes: Axes, sizes: np.ndarray) -> None:
    axes.barh(np.arange(len(sizes)), sizes, height=0.8 if len(sizes) <= _MOST_NAMES else 1.0, color="#2a6fb0")
    axes.set_xlabel("clips")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(axis="y", left=False, labelleft=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _name_classes(axes: Axes, classes: tuple[str, ...]) -> None:
    axes.set_xlabel("class")
    if len(classes) <= _MOST_NAMES:
        crowded = len(classes) > 12 or max(map(len, classes)) > 5
        axes.set_xticks(range(len(classes)), classes, rotation=90 if crowded else 0, fontsize=8)
