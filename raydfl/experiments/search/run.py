"""A search done: trials side by side, which settings come next and which trials stop decided by a controller.

The state of a search is its journal and its trials' run folders; from the journal the controller knows all that was decided before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from raydfl.cluster import Bundle, bundles_of
from raydfl.core.errors import RunDirectoryError
from raydfl.data import build_population
from raydfl.engine.storage import RunStore
from raydfl.experiments.execute import Decision, Executor, RunConfig, first_words
from raydfl.experiments.metric import keys_of
from raydfl.experiments.plan import prepare
from raydfl.experiments.search.controller import SearchController
from raydfl.experiments.search.journal import Journal
from raydfl.experiments.search.page import write_page
from raydfl.experiments.search.plan import Search, claim, trial_name
from raydfl.experiments.search.results import SearchResults, collect, write_tables
from raydfl.experiments.search.tracking import SearchTracker
from raydfl.experiments.trial import REASON, ROUND, SCORE, TrialOrder
from raydfl.runs import Progress, default_progress
from raydfl.runs.report import write_report


@contextlib.contextmanager
def opened(search: Search) -> Iterator[Journal]:
    """Open the search's journal, for this process alone.

    Raises:
        RunDirectoryError: the folder holds another search, or another process is at work in it.
    """
    claim(search)
    store = RunStore(search.folder)
    try:
        store.lock(wait=1.0)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"the search in {error}") from error
    try:
        yield Journal(search.output("journal.jsonl"))
    finally:
        store.unlock()


def run_search(
    search: Search, progress: Progress | None = None, run_config: RunConfig | None = None, table_only: bool = False
) -> SearchResults:
    """Do all trials that are not over, and write tables and page. Ctrl-C lets those under way stop after their round.

    The same call goes on with what is left.

    Args:
        run_config: settings for Ray Tune, see :class:`~raydfl.experiments.execute.Executor`.
        table_only: whether only tables and page of what is there are wanted.

    Raises:
        InputError: recordings cannot be used, a package is missing, or the cluster cannot hold a trial; no trial was started.
        RunDirectoryError: the folder holds another search, or another process is at work in it.
    """
    progress = progress or default_progress()
    if table_only and not search.output("search.json").exists():
        raise RunDirectoryError(f"there is no search in {search.folder}; without --table the command begins it there")
    with opened(search) as journal:
        tracker = None if table_only else SearchTracker(search, journal, progress.message)
        try:
            if tracker is not None:
                _do(search, journal, tracker, progress, run_config)
        finally:
            for number in journal.trials:  # the pages of trials that were stopped: those of finished ones are there
                folder = search.folder / trial_name(number)
                if (folder / "LATEST").exists() and not (folder / "report.html").exists():
                    write_report([folder], folder / "report.html")
            results = collect(search, journal)
            written = [*write_tables(results), write_page(results)]
            if tracker is not None:
                tracker.close(written, results.complete)
    return results


def _do(
    search: Search, journal: Journal, tracker: SearchTracker, progress: Progress, run_config: RunConfig | None
) -> None:
    controller = SearchController(search, journal)
    over = sum(record.over for record in journal.trials.values())
    if over:
        progress.message(f"{over} of {search.trials} trials are over already")
    if over >= search.trials:
        return
    config, settings = search.first, search.settings
    parallel = settings.parallel
    if parallel is None and config.data.sites and config.ray.actors:
        parallel = 1  # their actors are in no placement group: several trials could wait for each other
    with Executor(config, search.folder, progress, settings.retries, parallel, run_config) as executor:
        begun = [search.trial(number, record.values) for number, record in journal.trials.items()]
        prepare([*begun, *search.foreseen], progress, executor.run_chunks)
        clients = 0
        if config.ray.actors == "per_client" and not config.data.sites:
            quiet, needed = Progress("quiet"), config.labels_needed
            clients = len(
                build_population(config.data, config.run.seed, quiet, executor.run_chunks, labels_needed=needed)
            )
        bundles = bundles_of(config, settings.cpus, clients)
        executor.room(bundles, search.trials)
        executor.run(_Trials(search, controller, tracker, executor, tuple(bundles), progress))


class _Trials:
    """The trials of a search, as a study: the controller decides, and the user and MLflow are told."""

    def __init__(
        self,
        search: Search,
        controller: SearchController,
        tracker: SearchTracker,
        executor: Executor,
        bundles: tuple[Bundle, ...],
        progress: Progress,
    ) -> None:
        self._search = search
        self._controller = controller
        self._records = controller.journal.trials
        self._tracker = tracker
        self._executor = executor
        self._bundles = bundles
        self._progress = progress

    def turns(self) -> Iterator[int]:
        for turn in range(len(self._search.turns)):
            if not self._controller.open_turn(turn):
                return
            if self._controller.left:
                yield self._controller.left

    def next(self) -> TrialOrder | None:
        trial = self._controller.suggest()
        if trial is None:
            return None
        self._tracker.begun(trial)
        return TrialOrder(
            number=trial.number,
            name=trial.name,
            config=trial.config.model_dump(mode="json"),
            bundles=self._bundles,
            keys=tuple(keys_of(trial.config, self._search.settings.metric)),
            stop=str(self._executor.stop_file),
            log=str(self._executor.logs / f"{trial.name}.log"),
            reported=self._records[trial.number].reported,
            parent=None if trial.parent is None else str(self._search.folder / trial_name(trial.parent)),
        )

    def begun(self, number: int) -> None:
        record = self._records[number]
        after = f" (going on after round {record.reported})" if record.reported else ""
        copy = f" (a copy of {trial_name(record.parent)})" if record.parent is not None and not record.reported else ""
        self._progress.message(f"started: {trial_name(number)}: {record.text}{after}{copy}")

    def scored(self, number: int, round_index: int, score: float) -> Decision:
        known = self._records[number].reported
        decision = self._controller.result(number, round_index, score)
        if self._records[number].reported > known:
            self._tracker.scored(number)
        return decision

    def ended(self, number: int, status: Literal["finished", "stopped", "failed"], result: Mapping[str, Any]) -> None:
        if status == "finished":
            self._controller.ended(number, status, result[REASON], result[ROUND], result[SCORE])
        else:
            reason = self._controller.rule_of(number) if status == "stopped" else result[REASON]
            self._controller.ended(number, status, reason)
        record, metric, name = self._records[number], self._search.settings.metric, trial_name(number)
        if status == "failed":
            self._progress.message(f"failed: {name}: {first_words(record.reason)}")
            return
        where = "" if status == "finished" else f" after round {record.reported} ({record.reason})"
        worthless = f"; worthless: {record.reason}" if record.worthless else ""
        done = sum(each.over for each in self._records.values())
        self._progress.message(
            f"{record.status}: {name}{where}, {metric.title} {metric.scale * record.score:.2f} ({done} of "
            f"{self._search.trials} are over){worthless}"
        )
