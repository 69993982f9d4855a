"""Trackers: where a run's numbers are mirrored while it goes on. The truth of a run is its directory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc

from raydfl.engine.storage import MetricRow, read_rows, to_rows

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""The end of a run in MLflow's words; KILLED: stopped by the user, can be resumed."""

WORK = "work"
"""The name of the split ``"server"`` in MLflow, whose pages order charts by the part of their names before the last slash: the
scores (``test/...``, ``train``, ``validation/...``) shall come before bytes and seconds."""
SERVER = "server"

KEY_LENGTH = 250
"""Characters of a metric's name, which is MLflow's limit."""


def metric_name(row: MetricRow, work: str = WORK) -> str:
    """Return the name of a row's metric in MLflow: ``split/metric``, after the phase where that is not train or evaluate.

    Characters that MLflow refuses become ``_``, with a short hash at the end so that different names stay different.

    Args:
        row: of the record.
        work: what the split ``"server"`` is called.
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
    """Base of trackers, which by itself mirrors nothing. Use it in one process only: the driver."""

    def start(
        self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None = None
    ) -> str:
        """Begin the mirror of a run, or go on with it.

        Args:
            run_name: to be shown.
            params: the configuration, flat, ``"train.rounds" -> 200``.
            tags: any.
            run_id: what an earlier start returned.

        Returns:
            What a later start needs to go on; by default ``run_id``, or nothing.

        Raises:
            InputError: the tracker cannot be used. Nothing is lost yet.
        """
        return run_id or ""

    def log_rows(self, rows: Iterable[MetricRow]) -> None:
        """Mirror newly committed rounds, all rows of a round in one call."""

    def log_artifact(self, path: Path) -> None:
        """Keep a copy of a file, or of a folder's contents."""

    def finish(self, status: Status) -> None:
        """End the mirror. The run may be started again later."""


class FilesTracker(Tracker):
    """Base of trackers that write files into a folder of the run.

    The files are made anew from the run's record whenever the run begins or is resumed, so that nothing is in them twice and
    nothing is missing.
    """

    def __init__(self, run_dir: Path, project: str) -> None:
        """Take note of where to write.

        Args:
            run_dir: the run's folder.
            project: what runs belong to, ``track.experiment``.
        """
        self.run_dir = run_dir
        self.project = project
        self._written = -1  # the last round

    def start(
        self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None = None
    ) -> str:
        """Write the settings, and all rounds that are in the record."""
        self.open(run_name, params, tags)
        self.log_rows(to_rows(read_rows(self.run_dir, where=pc.field("client") == "")))
        return run_id or ""

    def log_rows(self, rows: Iterable[MetricRow]) -> None:
        """Write the server's and pooled numbers of rounds that are not written; step = round."""
        rounds: dict[int, dict[str, float]] = {}
        for row in rows:
            if row.round > self._written and not row.client and row.array is None:
                rounds.setdefault(row.round, {})[metric_name(row)] = row.value
        for number in sorted(rounds):
            self.write(number, rounds[number])
            self._written = number

    def open(self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Remove what an earlier start has written, and begin anew: see :meth:`start`."""
        raise NotImplementedError

    def write(self, number: int, metrics: Mapping[str, float]) -> None:
        """Write what a round's metrics are.

        Args:
            number: of the round.
            metrics: by name.
        """
        raise NotImplementedError


class Trackers(Tracker):
    """MLflow's tracker, or none, and others beside it. When one of these fails the run goes on without it."""

    def __init__(self, first: Tracker, others: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        """Take note of the trackers.

        Args:
            first: whose identity of the run is kept.
            others: by name.
            warn: told in one sentence when one fails.
        """
        self._first, self._others, self._warn = first, dict(others), warn

    def start(
        self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None = None
    ) -> str:
        """Start all.

        Raises:
            InputError: one cannot be used.
        """
        identity = self._first.start(run_name, params, tags, run_id)
        for other in self._others.values():
            other.start(run_name, params, tags)
        return identity

    def log_rows(self, rows: Iterable[MetricRow]) -> None:
        """Tell all."""
        given = list(rows)
        self._first.log_rows(given)
        self._each(lambda other: other.log_rows(given))

    def log_artifact(self, path: Path) -> None:
        """Tell all."""
        self._first.log_artifact(path)
        self._each(lambda other: other.log_artifact(path))

    def finish(self, status: Status) -> None:
        """Tell all."""
        self._first.finish(status)
        self._each(lambda other: other.finish(status))

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, other in list(self._others.items()):
            try:
                do(other)
            except Exception as error:  # noqa: BLE001  (whatever it is, a run must not end because of its mirror)
                del self._others[name]
                self._warn(
                    f"track.also: {name} failed ({type(error).__name__}: {error}); the run goes on without it, and when it is "
                    f"resumed its files are made anew"
                )
