"""Doing a search: trials side by side with Ray Tune, each a whole federation in a placement group of its own.

The state of a search is its journal and its trials' run folders. Ray Tune's own files are thrown away: the same command builds a
new experiment of what is left to do, and the judge knows from the journal all that was decided before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raydfl.cluster.trial_resources import Bundle, bundles_of, check_trial_fits
from raydfl.core.errors import ResourcesError, RunDirectoryError
from raydfl.engine.storage.store import RunStore
from raydfl.experiments.metric import keys_of
from raydfl.experiments.search.controller import SearchController
from raydfl.experiments.search.journal import Journal
from raydfl.experiments.search.plan import Search, Trial, claim, corners, trial_name
from raydfl.experiments.search.tracking import SearchTracker
from raydfl.experiments.sweep.run import prepare
from raydfl.runs.progress import Progress
from raydfl.runs.report import write_report
from raydfl.runs.stopping import StopSignals

_MESSAGE = 300
"""Characters of a failure that a line repeats; the log has all."""


@dataclass
class SearchOutcome:
    """How a search ended, by the numbers of its trials."""

    finished: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    """Those that the scheduler, or patience, ended early."""
    failed: dict[int, str] = field(default_factory=dict)
    """Why, by number."""
    open: int = 0
    """Trials that are left to do, or to be finished, after an interruption."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return not self.failed and not self.open


@contextlib.contextmanager
def opened(search: Search) -> Iterator[Journal]:
    """The search's journal, for this process alone.

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
    search: Search, journal: Journal, mirror: SearchTracker | None = None, progress: Progress | None = None
) -> SearchOutcome:
    """Do all trials that are not over. Ctrl-C lets those under way stop after their round; the same call goes on with them.

    Args:
        journal: from :func:`opened`.
        mirror: told of what happens to trials.

    Raises:
        InputError: recordings cannot be used, a package is missing, or the cluster cannot hold a trial; no trial was started.
    """
    progress = progress or Progress("quiet")
    judge = SearchController(search, journal)
    over = sum(record.over for record in journal.trials.values())
    if over:
        progress.message(f"{over} of {search.trials} trials are over already")
    if over < search.trials:
        _Session(search, judge, mirror, progress).run()
    return outcome_of(search, journal)


def outcome_of(search: Search, journal: Journal) -> SearchOutcome:
    """Where the trials stand."""
    outcome = SearchOutcome(open=search.trials - len(journal.trials))
    for number, record in sorted(journal.trials.items()):
        if record.status == "finished":
            outcome.finished.append(number)
        elif record.status == "stopped":
            outcome.stopped.append(number)
        elif record.status == "failed":
            outcome.failed[number] = record.reason
        else:
            outcome.open += 1
    return outcome


class _Session:
    """One call of the command."""

    def __init__(
        self, search: Search, judge: SearchController, mirror: SearchTracker | None, progress: Progress
    ) -> None:
        self._search = search
        self._judge = judge
        self._progress = progress
        self._observers: list[Any] = [
            _Lines(search, judge.journal, progress),
            *([mirror] if mirror is not None else []),
        ]
        self._logs = search.folder / "logs"
        self._stop_file = self._logs / f".stop-{os.getpid()}"
        self._signals = StopSignals(
            progress, "trials stop after their round", "them", self._stop_file.touch, _end_experiment
        )
        self._waited: ResourcesError | None = None

    def run(self) -> None:
        """Every turn; without pbt there is one."""
        from raydfl.cluster.features import on_the_cluster
        from raydfl.cluster.session import connected

        config = self._search.first
        self._stop_file.parent.mkdir(parents=True, exist_ok=True)
        self._stop_file.unlink(missing_ok=True)
        address = config.ray.address or os.environ.get("RAY_ADDRESS")
        with _quiet_tune(), connected(config.ray.address, quiet=True):
            clients = self._prepare(on_the_cluster if address else None)
            bundles = bundles_of(config, self._search.settings.cpus, clients)
            check_trial_fits(bundles, config.ray.autoscale)
            try:
                with self._signals:
                    for turn in range(len(self._search.turns)):
                        if self._signals.asked or not self._judge.open_turn(turn):
                            break
                        if self._judge.left:
                            self._tune(bundles)
            finally:
                self._stop_file.unlink(missing_ok=True)
        if self._waited is not None:
            raise self._waited

    def _prepare(self, run_chunks: Any) -> int:
        """Make the features that all trials need, and find out what recordings do not allow; the number of clients."""
        from raydfl.data.build import build_population

        known = [record.values for record in self._judge.journal.trials.values()]
        drawn = self._search.settings.searcher != "optuna"
        coming = (
            [self._search.drawn(number) for number in range(self._search.samples)]
            if drawn
            else list(corners(self._search.settings))
        )
        prepare([self._search.trial(0, values) for values in known + coming], self._progress, run_chunks)
        config = self._search.first
        if config.ray.actors != "per_client":
            return 0
        return len(
            build_population(
                config.data, config.run.seed, Progress("quiet"), run_chunks, labels_needed=config.labels_needed
            )
        )

    def _tune(self, bundles: list[Bundle]) -> None:
        """The trials that the judge has left, by Ray Tune."""
        from ray import tune

        from raydfl.experiments.search.tuning import JudgeScheduler, JudgeSearcher, Watchdog
        from raydfl.experiments.trial import FederationTrial, TrialOrder

        def order(trial: Trial) -> TrialOrder:
            parent = None if trial.parent is None else str(self._search.folder / trial_name(trial.parent))
            return TrialOrder(
                number=trial.number,
                config=trial.config.model_dump(mode="json"),
                keys=tuple(keys_of(trial.config, self._search.settings.metric)),
                stop=str(self._stop_file),
                log=str(self._logs / f"{trial.name}.log"),
                reported=self._judge.journal.trials[trial.number].reported,
                parent=parent,
            )

        def name(trial: Any) -> str:
            return trial_name(trial.config["order"].number)

        config, place = self._search.first, self._search.folder / "tune"
        shutil.rmtree(place, ignore_errors=True)
        placed = tune.PlacementGroupFactory(list(bundles), strategy="PACK")
        tuner = tune.Tuner(
            tune.with_resources(FederationTrial, placed),
            tune_config=tune.TuneConfig(
                num_samples=self._judge.left,
                search_alg=JudgeSearcher(self._judge, order, self._stop_file, self._observers),
                scheduler=JudgeScheduler(self._judge, self._observers),
                max_concurrent_trials=self._search.settings.parallel or 0,
                reuse_actors=True,
                trial_name_creator=name,
                trial_dirname_creator=name,
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(place),
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=self._search.settings.retries),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the run folders have their commits
                callbacks=[Watchdog(bundles, config.ray.ready_timeout, self._progress.message, self._give_up)],
            ),
        )
        tuner.fit()
        shutil.rmtree(place, ignore_errors=True)

    def _give_up(self, error: ResourcesError) -> None:
        """No trial could begin for too long."""
        if self._waited is None and not self._signals.asked:
            self._waited = error
            _end_experiment()


def _end_experiment() -> None:
    signal.raise_signal(signal.SIGUSR1)  # what Ray Tune ends an experiment for


class _Lines:
    """A line for what happens to a trial."""

    def __init__(self, search: Search, journal: Journal, progress: Progress) -> None:
        self._search = search
        self._journal = journal
        self._progress = progress

    def begun(self, trial: Trial) -> None:
        """With its settings, or where it goes on."""
        reported = self._journal.trials[trial.number].reported
        after = f" (going on after round {reported})" if reported else ""
        copy = f" (a copy of {trial_name(trial.parent)})" if trial.parent is not None and not reported else ""
        self._progress.message(f"started: {trial.name}: {trial.text}{after}{copy}")

    def scored(self, number: int) -> None:
        """Nothing: a line for each evaluation of many trials would help nobody."""

    def over(self, number: int) -> None:
        """How, where, and with which score."""
        record, metric = self._journal.trials[number], self._search.settings.metric
        name = trial_name(number)
        if record.status == "failed":
            first = (record.reason.splitlines() or [""])[0][:_MESSAGE]
            self._progress.message(f"failed: {name}: {first}")
            return
        score = f"{metric.title} {metric.scale * record.score:.2f}"
        done = sum(each.over for each in self._journal.trials.values())
        where = "" if record.status == "finished" else f" after round {record.reported} ({record.reason})"
        worthless = f"; worthless: {record.reason}" if record.worthless else ""
        self._progress.message(
            f"{record.status}: {name}{where}, {score} ({done} of {self._search.trials} are over){worthless}"
        )


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """Ray Tune without its own files for other tools, tables, warnings about both, and handler of Ctrl-C."""
    own = {
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    }
    before = {name: os.environ.get(name) for name in own}
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.train")]
    levels = [logger.level for logger in loggers]
    os.environ.update(own)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def write_reports(search: Search, journal: Journal) -> None:
    """The pages of trials that were stopped: those of finished ones are there."""
    for number in journal.trials:
        folder = search.folder / trial_name(number)
        if (folder / "LATEST").exists() and not (folder / "report.html").exists():
            write_report([folder], folder / "report.html")
