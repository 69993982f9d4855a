"""Tracking: a run's numbers mirrored in MLflow, and by name in further trackers, of which each is a file here.

One's own is a subclass of :class:`FilesTracker`, named ``track.also=[my_file.py:Class]``.
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
    """Return the tracker that the settings ask for.

    Args:
        settings: which, and where to.
        runs_dir: the folder of all runs, for MLflow's default store.
        run_dir: this run's folder.
        warn: told in one sentence when a tracker fails, and when MLflow answers again.

    Raises:
        ConfigError: ``track.also`` names a tracker that there is not.
    """
    first = MlflowTracker(settings, runs_dir, run_dir, warn) if settings.mlflow else Tracker()
    others = {
        name: registry.find("raydfl.runs.tracking", name, FilesTracker, "tracker")(run_dir, settings.experiment)
        for name in settings.also
    }
    return Trackers(first, others, warn or logging.getLogger(__name__).warning) if others else first
