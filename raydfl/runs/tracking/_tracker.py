"""Base classes of trackers. A tracker copies a run's metrics during training. The run's folder remains authoritative."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc

from raydfl.engine.storage import MetricRow, read_rows, to_rows

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""Status of an ended run in MLflow. KILLED: stopped by the user, so it can be resumed."""

WORK = "work"
"""Name of the split ``"server"`` in MLflow. MLflow orders charts by the prefix of their names. With ``work/``, the scores
(``test/``, ``train/``, ``validation/``) come before bytes and seconds."""
SERVER = "server"

KEY_LENGTH = 250
"""Maximum number of characters of a metric's name in MLflow."""


def metric_name(row: MetricRow, work: str = WORK) -> str:
    """Return a row's metric name in MLflow: ``split/metric``, prefixed by the phase unless it is train or evaluate.

    Characters that MLflow rejects become ``_``. A short hash at the end keeps such names unique.

    Args:
        row: A row of the metrics table.
        work: Name of the split ``"server"``.
    """
    phase = "" if row.phase in ("train", "evaluate") else row.phase
    split = work if row.split == SERVER else row.split
    name = "/".join(part for part in (phase, split, row.metric) if part)
    allowed = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    allowed = "/".join("_" if part in ("", ".", "..") else part for part in allowed.split("/"))
    if allowed == name and len(name) <= KEY_LENGTH:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{allowed[: KEY_LENGTH - 9]}_{digest}"


class Tracker:
    """Base class of trackers, without any effect. Use trackers only in the driver's process."""

    def start(
        self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None = None
    ) -> str:
        """Start or resume tracking a run.

        Args:
            run_name: Displayed name of the run.
            params: The configuration as a flat mapping, such as ``"train.rounds" -> 200``.
            tags: Any further facts about the run.
            run_id: Value returned by an earlier start, if any.

        Returns:
            The run's id for a later start. By default ``run_id``, or an empty string.

        Raises:
            InputError: The tracker cannot be used. The run has not started yet.
        """
        return run_id or ""

    def log_rows(self, rows: Iterable[MetricRow]) -> None:
        """Copy the rows of newly committed rounds. Each call receives whole rounds."""

    def log_artifact(self, path: Path) -> None:
        """Store a copy of a file, or of a folder's contents."""

    def finish(self, status: Status) -> None:
        """Stop tracking the run. A resumed run starts the tracker again."""


class FilesTracker(Tracker):
    """Base class of trackers with files in the run's folder.

    Each start or resume of the run rewrites the files from the metrics table, so rows are neither duplicated nor lost.
    """

    def __init__(self, run_dir: Path, project: str) -> None:
        """Initialise the tracker.

        Args:
            run_dir: The run's folder.
            project: Name of the runs' project, ``track.experiment``.
        """
        self.run_dir = run_dir
        self.project = project
        self._last_round = -1

    def start(
        self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None = None
    ) -> str:
        """Write the settings and all rounds of the metrics table."""
        self.open(run_name, params, tags)
        self.log_rows(to_rows(read_rows(self.run_dir, where=pc.field("client") == "")))
        return run_id or ""

    def log_rows(self, rows: Iterable[MetricRow]) -> None:
        """Write the server's and pooled metrics of new rounds. The step is the round."""
        rounds: dict[int, dict[str, float]] = {}
        for row in rows:
            if row.round > self._last_round and not row.client and row.array is None:
                rounds.setdefault(row.round, {})[metric_name(row)] = row.value
        # Writers expect increasing steps.
        for number in sorted(rounds):
            self.write(number, rounds[number])
            self._last_round = number

    def open(self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Replace the files of an earlier start by new files. Takes the arguments of :meth:`start`."""
        raise NotImplementedError

    def write(self, number: int, metrics: Mapping[str, float]) -> None:
        """Write a round's metrics.

        Args:
            number: Number of the round.
            metrics: Value of each metric, by name.
        """
        raise NotImplementedError


class Trackers(Tracker):
    """Several trackers in one: MLflow's or none, and further trackers. A failed further tracker is dropped with a warning."""

    def __init__(self, first: Tracker, further: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        """Combine trackers.

        Args:
            first: MLflow's tracker or a tracker without effect. Its id of the run is stored.
            further: Further trackers by name.
            warn: Receives a message when a further tracker fails.
        """
        self._first, self._further, self._warn = first, dict(further), warn

    def start(
        self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None = None
    ) -> str:
        """Start all trackers.

        Raises:
            InputError: A tracker cannot be used.
        """
        identity = self._first.start(run_name, params, tags, run_id)
        for tracker in self._further.values():
            tracker.start(run_name, params, tags)
        return identity

    def log_rows(self, rows: Iterable[MetricRow]) -> None:
        """Pass rows to all trackers."""
        rows = list(rows)
        self._first.log_rows(rows)
        self._call_further(lambda tracker: tracker.log_rows(rows))

    def log_artifact(self, path: Path) -> None:
        """Pass a file or folder to all trackers."""
        self._first.log_artifact(path)
        self._call_further(lambda tracker: tracker.log_artifact(path))

    def finish(self, status: Status) -> None:
        """Finish all trackers."""
        self._first.finish(status)
        self._call_further(lambda tracker: tracker.finish(status))

    def _call_further(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._further.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  (no failure of a tracker may end the run)
                del self._further[name]
                self._warn(
                    f"track.also: {name} failed ({type(error).__name__}: {error}). The run continues without it. Resuming the run "
                    f"rewrites its files."
                )
