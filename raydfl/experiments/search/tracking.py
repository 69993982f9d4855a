"""The search in MLflow: one run for the search, and below it one for each trial.

All of it is written by the driver, which reads the trials' run folders: a database has one writer, however many trials go on at
a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.compute as pc

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import write_durably
from raydfl.core.nested import flatten
from raydfl.engine.storage import RunStore, read_rows, round_of, to_rows
from raydfl.experiments.search.journal import Journal
from raydfl.experiments.search.plan import Search, Trial
from raydfl.runs import Tracker, make_tracker

_PARENT = "mlflow.parentRunId"
"""MLflow's own tag: its pages show the run below the other one."""


class SearchTracker:
    """MLflow's view of a search and its trials, and further trackers' of the trials."""

    def __init__(self, search: Search, journal: Journal, warn: Callable[[str], None]) -> None:
        """Begin the search's run, or go on with it.

        Raises:
            InputError: MLflow's store cannot be used.
            RunDirectoryError: ``mlflow.json`` is damaged.
        """
        self._search = search
        self._journal = journal
        self._warn = warn
        self._settings = search.track
        self._ids = self._known()
        self._open: dict[int, tuple[Tracker, Path]] = {}
        self._sent: dict[int, int] = {}
        if not self._settings.mlflow:
            self._search_run = Tracker()
            return
        alone = self._settings.model_copy(update={"also": []})  # a search has no rounds
        self._search_run = make_tracker(alone, search.folder, search.folder, warn)
        identity = {key: value for key, value in search.identity.items() if key != "space"}
        params = {
            **flatten(identity),
            **{f"space.{key}": str(value) for key, value in search.identity["space"].items()},
        }
        self._ids["search"] = self._search_run.start(
            search.settings.title, params, {"raydfl.search": str(search.file)}, self._ids.get("search")
        )
        self._keep()

    def _known(self) -> dict[str, str]:
        path = self._search.output("mlflow.json")
        try:
            return {str(key): str(value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise RunDirectoryError(
                f"{path} is damaged; remove it, and the search gets a new run in MLflow, filled from the record"
            ) from error

    def _keep(self) -> None:
        write_durably(self._search.output("mlflow.json"), json.dumps(self._ids, indent=2).encode())

    # -- what happens to trials ----------------------------------------------------------------------------------------

    def begun(self, trial: Trial) -> None:
        """Begin a run below the search's, or go on with it."""
        if not (self._settings.mlflow or self._settings.also):
            return
        tracker = make_tracker(self._settings, self._search.folder, trial.run_dir, self._warn)
        params = {
            **flatten(trial.config.model_dump(mode="json")),
            "search.trial": trial.number,
            "search.parent": trial.parent,
        }
        self._ids[trial.name] = tracker.start(
            trial.name,
            params,
            {
                **({_PARENT: self._ids["search"]} if self._settings.mlflow else {}),
                "raydfl.digest": trial.config.digest(),
            },
            self._ids.get(trial.name),
        )
        self._keep()
        self._open[trial.number] = (tracker, trial.run_dir)

    def scored(self, number: int) -> None:
        """Log what the trial has committed since."""
        if number not in self._open:
            return
        tracker, folder = self._open[number]
        latest = RunStore(folder).latest()
        if latest is None:
            return
        until, sent = round_of(latest), self._sent.get(number, -1)
        if until > sent:
            where = (pc.field("client") == "") & (pc.field("round") > sent)
            tracker.log_rows(to_rows(read_rows(folder, until, where=where)))
            self._sent[number] = until

    def close(self, results: Sequence[Path], complete: bool) -> None:
        """Log all that is left, when no trial runs any more.

        Args:
            results: the search's page and tables.
            complete: whether no trial is left to do.
        """
        for number, (tracker, _) in self._open.items():
            self.scored(number)
            status = self._journal.trials[number].status
            tracker.finish("FINISHED" if status == "finished" else "FAILED" if status == "failed" else "KILLED")
        self._open.clear()
        for path in results:
            self._search_run.log_artifact(path)
        self._search_run.finish("FINISHED" if complete else "KILLED")
