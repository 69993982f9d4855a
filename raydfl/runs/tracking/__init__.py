"""Trackers copy a run's metrics to MLflow, TensorBoard or Weights & Biases. Each further tracker is a file here.

To add a tracker, write a subclass of :class:`FilesTracker` and set ``track.also=[my_file.py:Class]``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from raydfl.core import registry
from raydfl.engine import TrackSettings
from raydfl.runs.tracking._mlflow import MlflowTracker
from raydfl.runs.tracking._tracker import FilesTracker, Status, Tracker, Trackers, metric_name

__all__ = ["FilesTracker", "MlflowTracker", "Status", "Tracker", "make_tracker", "metric_name"]


def make_tracker(
    settings: TrackSettings, runs_dir: Path, run_dir: Path, warn: Callable[[str], None] | None = None
) -> Tracker:
    """Create the configured trackers, combined into one.

    Args:
        settings: The section ``track`` of the configuration.
        runs_dir: The folder of all runs, for MLflow's default store.
        run_dir: This run's folder.
        warn: Receives a message when a tracker fails, and when MLflow answers again. Defaults to a logger's warning.

    Raises:
        ConfigError: ``track.also`` names an unknown tracker.
    """
    first = MlflowTracker(settings, runs_dir, run_dir, warn) if settings.mlflow else Tracker()
    further = {
        name: registry.find("raydfl.runs.tracking", name, FilesTracker, "tracker")(run_dir, settings.experiment)
        for name in settings.also
    }
    return Trackers(first, further, warn or logging.getLogger(__name__).warning) if further else first
