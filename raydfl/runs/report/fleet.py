"""Plot of a forecast of asynchronous training: round trips, and arrivals over virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from raydfl.engine import Forecast

_BINS = 40


def plot_fleet(forecast: Forecast, path: Path) -> None:
    """Plot the distribution of round trips, and the arrivals per hour over virtual time.

    Args:
        forecast: The forecast.
        path: Path of the image. Its extension (png, svg, pdf) sets the format.
    """
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.hist(forecast.round_trips, bins=min(_BINS, 1 + len(np.unique(forecast.round_trips))))
    left.set_xlabel("round trip (s)")
    left.set_ylabel("arrivals")
    counts, edges = np.histogram(forecast.arrivals, bins=_BINS, range=(0, forecast.seconds))
    right.stairs(counts * 3600 * _BINS / forecast.seconds, edges, fill=True)
    right.set_xlabel("virtual time (s)")
    right.set_ylabel("arrivals per hour")
    figure.savefig(path)
