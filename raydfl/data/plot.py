"""Who has what: a picture of a partition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from raydfl.data.population import Population

_MOST_NAMES = 64
_MOST_ROWS = 400
_CELL_NUMBERS = 1_000


def plot_partition(population: Population, path: Path) -> None:
    """Draws training clips by client and class, and clips by client, as an image (by ``path``'s ending: png, svg, pdf).

    The clients are in the population's order. More than 400 are drawn by neighbours: a row of the map is the mean of some
    clients, and to the right are the least, the mean and the most clips among them.
    """
    counts = population.label_counts()
    clients, classes = counts.shape
    each = -(-clients // _MOST_ROWS)
    starts = np.arange(0, clients, each)
    sizes = counts.sum(axis=1)
    members = np.diff(starts, append=clients)
    shown = np.add.reduceat(counts, starts, axis=0) / members[:, None]

    rows = len(starts)
    height = float(np.clip(2.2 + 0.19 * rows, 4.0, 12.0))
    width = float(np.clip(4.6 + 0.32 * classes, 7.5, 18.0))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    cells, bars = figure.subplots(1, 2, sharey=True, width_ratios=[max(2.0, 0.32 * classes), 1.4])
    _draw_cells(figure, cells, shown, population, each)
    _draw_sizes(bars, sizes, starts, members)
    cells.set_ylim(rows - 0.5, -0.5)
    figure.suptitle(
        f"{clients:,} clients, {int(sizes.sum()):,} training clips, {classes} classes; clips of a client: "
        f"{sizes.min():,} to {sizes.max():,}, median {np.median(sizes):g}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _draw_cells(figure: Figure, axes: Axes, shown: np.ndarray, population: Population, each: int) -> None:
    """The map of clients x classes; cells without a clip stay white."""
    rows, classes = shown.shape
    filled = np.ma.masked_equal(shown, 0)
    most = float(shown.max())
    least = float(filled.min())
    scale = LogNorm(least, most) if most > 20 * least else None
    image = axes.imshow(
        filled, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=scale, vmin=None if scale else 0
    )
    axes.set_facecolor("white")
    axes.set_xlabel("class")
    crowded = classes > 12 or any(len(name) > 5 for name in population.classes)
    if classes <= _MOST_NAMES:
        axes.set_xticks(range(classes), population.classes, rotation=90 if crowded else 0, fontsize=8)
    if each > 1:
        axes.set_ylabel(f"clients, {each} in a row")
        axes.yaxis.set_major_formatter(lambda row, _: f"{int(round(row)) * each:,}")
    elif rows <= _MOST_NAMES:
        axes.set_yticks(range(rows), list(population.ids), fontsize=7 if rows > 30 else 8)
        axes.set_ylabel("client")
    else:
        axes.set_ylabel("client (number)")
    if rows * classes <= _CELL_NUMBERS and each == 1:
        for (row, column), value in np.ndenumerate(shown):
            if value:
                bright = image.norm(value) > 0.5
                axes.text(column, row, f"{value:g}", ha="center", va="center", fontsize=6, color="w" if bright else "k")
    bar = figure.colorbar(image, ax=axes, location="top", shrink=0.7, pad=0.01, aspect=40)
    bar.set_label("clips of a class" + (f" (mean of {each} clients)" if each > 1 else ""), fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _draw_sizes(axes: Axes, sizes: np.ndarray, starts: np.ndarray, members: np.ndarray) -> None:
    """Bars of the clips of each row; with several clients in a row their range as a line."""
    rows = np.arange(len(starts))
    axes.barh(
        rows, np.add.reduceat(sizes, starts) / members, height=0.8 if len(rows) <= _MOST_NAMES else 1.0, color="#4c72b0"
    )
    if members.max() > 1:
        least, most = np.minimum.reduceat(sizes, starts), np.maximum.reduceat(sizes, starts)
        axes.hlines(rows, least, most, color="#222222", linewidth=0.6, alpha=0.6)
    axes.set_xlabel("clips")
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", left=False, labelleft=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
