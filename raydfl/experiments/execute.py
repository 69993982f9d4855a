"""Execution of a study by Ray Tune: trials side by side, each a whole federation in a placement group of its own.

A :class:`Study` says which trials there are and what becomes of them. What a trial has learned lies in its run folder, and what a
study has decided in files of its own: Ray Tune's files are thrown away, and the same study is executed again to go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from ray import train, tune
from ray.train.constants import DEFAULT_STORAGE_PATH
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from raydfl.cluster import (
    Bundle,
    check_trial_fits,
    connected,
    granted,
    on_the_cluster,
    placement_groups,
    room_for,
    waiting_text,
)
from raydfl.core.errors import ConfigError, RaydflError, ResourcesError
from raydfl.data.features import RunChunks
from raydfl.engine import Config
from raydfl.experiments.plan import rounds_done
from raydfl.experiments.trial import REASON, ROUND, SCORE, STATUS, FederationTrial, TrialOrder
from raydfl.runs import Advance, Progress, StopSignals

T = TypeVar("T")
Decision = Literal["CONTINUE", "STOP"]
RunConfig = tune.RunConfig | train.RunConfig
"""Ray's own settings of an experiment, from whoever starts a study from Python."""

_QUIET = 10.0
"""Seconds without a running trial after which the user reads what is waited for."""
_LOOK = 0.5
"""Seconds between two looks at the rounds that trials have done."""
_MESSAGE = 300
"""Characters of a failure that a line repeats; the log has all."""
_LOST = "its process was lost again and again, for lack of memory perhaps"


class Study(Protocol):
    """Trials and the decisions about them, all made in the process of the command."""

    def turns(self) -> Iterator[int]:
        """Yield how many trials there are to do, and once these are done, how many in the next turn."""

    def next(self) -> TrialOrder | None:
        """Return the next trial of the turn; ``None``: there is none."""

    def begun(self, number: int) -> None:
        """Take note of a trial whose process has started."""

    def scored(self, number: int, round_index: int, score: float) -> Decision:
        """Return what becomes of a trial after an evaluation."""

    def ended(self, number: int, status: Literal["finished", "stopped", "failed"], result: Mapping[str, Any]) -> None:
        """Take note of a trial that is over.

        Args:
            status: ``stopped``: because of what :meth:`scored` returned.
            result: with the keys REASON and, of a finished one, ROUND and SCORE.
        """


def first_words(reason: str) -> str:
    """Return as much of a failure's reason as a line has room for."""
    return (reason.splitlines() or [""])[0][:_MESSAGE]


class Executor:
    """Ray, connected inside a ``with`` block, and Ray Tune at work on a study. Ctrl-C lets trials stop after their round."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        progress: Progress,
        retries: int,
        parallel: int | None,
        run_config: RunConfig | None = None,
        local_cpus: int | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            config: ``ray`` of any trial: the cluster's address, and how long to wait for resources.
            folder: the study's, which all nodes must see.
            progress: is told what is waited for and who was lost; on a terminal it has a bar for each running trial.
            retries: times a trial goes on elsewhere after its process or node was lost.
            parallel: trials at a time; ``None``: as many as there is room for.
            run_config: settings for Ray Tune: ``storage_path`` and ``name`` (its files are kept there), ``failure_config`` and
                ``callbacks``.
            local_cpus: CPUs of a local Ray; ``None``: those of the machine.

        Raises:
            ConfigError: ``run_config`` asks for what a study does not have.
        """
        self._config = config
        self._folder = folder
        self._progress = progress
        self._retries = retries
        self._parallel = parallel
        self._run_config = run_config
        self._local_cpus = local_cpus
        self.logs = folder / "logs"
        self.stop_file = self.logs / f".stop-{os.getpid()}"
        """A file at whose appearance trials stop after their round."""
        self._signals = StopSignals(
            progress, "runs stop after their round", "them", self._stop_in_order, self._stop_at_once
        )
        self._error: Exception | None = None
        self._at_once = False
        _check_run_config(run_config)

    @property
    def run_chunks(self) -> RunChunks | None:
        """All nodes of a cluster, to compute features; ``None``: this machine does."""
        return on_the_cluster if self._config.ray.address or os.environ.get("RAY_ADDRESS") else None

    def __enter__(self) -> Executor:
        """Connect to the cluster that is named, or start a Ray of this process alone."""
        with contextlib.ExitStack() as opened:
            opened.enter_context(_quiet_tune())
            opened.enter_context(connected(self._config.ray.address, quiet=True, local_cpus=self._local_cpus))
            self.logs.mkdir(parents=True, exist_ok=True)
            self.stop_file.unlink(missing_ok=True)
            opened.callback(self.stop_file.unlink, missing_ok=True)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def room(self, bundles: Sequence[Bundle], most: int) -> int:
        """Return how many trials with such a placement group run at a time.

        Args:
            most: trials that there are.

        Raises:
            ResourcesError: the cluster can never hold one.
        """
        check_trial_fits(bundles, self._config.ray.autoscale)
        return min(room_for(bundles, most), self._parallel or most)

    def run(self, study: Study, ahead: int = 1) -> None:
        """Do the trials of a study until there are no more, or the user stops it.

        Args:
            ahead: trials that may be asked for before there is room for them: one, where the next depends on results.

        Raises:
            ResourcesError: no trial could begin within ``ray.ready_timeout`` seconds.
            RaydflError: Ray Tune failed. What the study itself raises goes through, once the trials have stopped after their round.
        """
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(ahead)
        asked = _Asked(study, self._fail)
        with self._signals:
            for count in study.turns():
                if not self._signals.asked and self._error is None:
                    self._fit(asked, count)
        if self._error is not None:
            raise self._error

    def _fit(self, study: _Asked, trials: int) -> None:
        place = self._folder / f".tune-{os.getpid()}"
        own = tune.RunConfig(
            name="trials",
            storage_path=str(place),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=self._retries),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the run folders have their commits
            callbacks=[_Watch(study, self._config.ray.ready_timeout, self._progress, self._over)],
        )
        given = self._run_config
        if given is not None:
            if given.storage_path not in (None, DEFAULT_STORAGE_PATH):
                own.storage_path, own.name = given.storage_path, given.name
                own.storage_filesystem = given.storage_filesystem
            if given.failure_config is not None and given.failure_config.max_failures:
                own.failure_config = tune.FailureConfig(max_failures=given.failure_config.max_failures)
            own.callbacks = [*(own.callbacks or []), *(given.callbacks or [])]
        try:
            tune.Tuner(
                FederationTrial,
                tune_config=tune.TuneConfig(
                    num_samples=trials,
                    search_alg=_Searcher(study, self.stop_file),
                    scheduler=_Scheduler(study),
                    max_concurrent_trials=self._parallel or 0,
                    reuse_actors=True,
                    trial_name_creator=_folder_name,
                    trial_dirname_creator=_folder_name,
                ),
                run_config=own,
            ).fit()
        except _EndedError:
            pass
        except ResourcesError as error:
            self._error = self._error or error
        except Exception as error:  # noqa: BLE001 - Ray's, or that of a callback of the user's
            if self._error is None:
                self._error = self._described(error)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _described(self, error: Exception) -> RaydflError:
        """Return what the user reads of a failure of Ray Tune's, which is told in full in a log."""
        log = self.logs / "ray-tune.log"
        with contextlib.suppress(OSError):
            log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        last = (str(error).strip().splitlines() or [""])[-1]  # of a TuneError, which holds a whole traceback
        described = RaydflError(
            f"Ray Tune failed: {type(error).__name__}: {last[:_MESSAGE]} (in full in {log}); what runs have committed is kept, and "
            f"the same command goes on"
        )
        described.__cause__ = error
        return described

    def _fail(self, error: Exception) -> None:
        """Let trials stop after their round because the study failed."""
        self._error = error
        self._stop_in_order()

    def _stop_in_order(self) -> None:
        try:
            self.stop_file.touch()
        except OSError:  # the disk is full, or the folder is gone
            self._at_once = True

    def _stop_at_once(self) -> None:
        self._at_once = True

    def _over(self, running: bool) -> bool:
        """Return whether the experiment ends now: at once, or because it shall stop and no trial is under way."""
        return self._at_once or (not running and (self._signals.asked or self._error is not None))


class _EndedError(Exception):
    """The end of an experiment whose trials have not ended. Ray Tune stops these, and passes it on to who began the experiment."""


def _check_run_config(given: RunConfig | None) -> None:
    if given is None:
        return
    if any(not isinstance(each, tune.Callback) for each in given.callbacks or []):
        raise ConfigError("run_config: its callbacks must be of Ray Tune; give them in a ray.tune.RunConfig")
    if not isinstance(given, tune.RunConfig):  # Ray Train's has none of what follows
        return
    if given.stop is not None:
        raise ConfigError(
            "run_config: stop: how far trials go is rounds, scheduler and patience of a search; leave it out"
        )
    checkpoints = given.checkpoint_config
    if checkpoints is not None and (checkpoints.checkpoint_frequency or checkpoints.checkpoint_at_end):
        raise ConfigError(
            "run_config: checkpoint_config: a trial commits its rounds to its run folder (run.commit_every) and makes no other "
            "checkpoints; leave it out, or use raydfl.trainable in a Tuner of your own"
        )


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """Keep Ray Tune from files for other tools, tables, warnings about both, and its own handler of Ctrl-C."""
    own = {
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_worker_niceness": "0",  # of a local Ray's: else trials starve beside whatever else the machine does
        "TUNE_MAX_PENDING_TRIALS_PG": "1",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    }
    before = {name: os.environ[name] for name in own if name in os.environ}
    levels = {logger: logger.level for logger in map(logging.getLogger, ("ray.tune", "ray.train"))}
    os.environ.update(own)
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        for name in own:
            del os.environ[name]
        os.environ.update(before)


# -- behind Ray Tune's interfaces ------------------------------------------------------------------------------------


class _Asked:
    """A study as Ray Tune's parts ask it, in any thread. When it fails, it is asked no more and the experiment ends.

    Ray Tune would take its failure (a full disk, say) for the loss of a trial, and do that trial again.
    """

    def __init__(self, study: Study, fail: Callable[[Exception], None]) -> None:
        self._study = study
        self._fail = fail
        self._failed = False

    def next(self) -> TrialOrder | None:
        return self._ask(self._study.next, None)

    def begun(self, number: int) -> None:
        self._ask(lambda: self._study.begun(number), None)

    def scored(self, number: int, round_index: int, score: float) -> Decision:
        return self._ask(lambda: self._study.scored(number, round_index, score), "CONTINUE")

    def ended(self, number: int, status: Literal["finished", "stopped", "failed"], result: Mapping[str, Any]) -> None:
        self._ask(lambda: self._study.ended(number, status, result), None)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        if self._failed:
            return otherwise
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - the executor raises it when the trials have stopped
            self._failed = True
            self._fail(error)
            return otherwise


def _order_of(trial: Any) -> TrialOrder:
    order: TrialOrder = trial.config["order"]
    return order


def _folder_name(trial: Any) -> str:
    return _order_of(trial).folder.name


class _NotSaved:
    """A part of an experiment that Ray Tune shall not write down, because the study can be executed again without it."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return object, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class _Scheduler(_NotSaved, FIFOScheduler):
    """Trials begin in their order; after each evaluation the study decides."""

    def __init__(self, study: _Asked) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._study = study

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return self._study.scored(_order_of(trial).number, result[ROUND], result[SCORE])

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        status = result[STATUS]
        if status != "interrupted":
            self._study.ended(_order_of(trial).number, "stopped" if status == "running" else status, result)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        if not trial.should_recover():  # else Ray Tune starts it again
            self._study.ended(_order_of(trial).number, "failed", {REASON: _LOST})


class _Searcher(_NotSaved, Searcher):
    """The study's trials, one after another."""

    def __init__(self, study: _Asked, stop_file: Path) -> None:
        super().__init__(metric=SCORE, mode="max")  # which is best the study knows
        self._study = study
        self._stop_file = stop_file

    def suggest(self, trial_id: str) -> Any:
        order = None if self._stop_file.exists() else self._study.next()
        return Searcher.FINISHED if order is None else {"order": order}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None: ...

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None: ...


class _Watch(_NotSaved, tune.Callback):
    """The user's view of the trials: rounds done, who was lost, and an end when none can begin for too long."""

    def __init__(self, study: _Asked, seconds: float, progress: Progress, over: Callable[[bool], bool]) -> None:
        self._study = study
        self._seconds = seconds
        self._progress = progress
        self._over = over
        self._before = placement_groups()
        self._since = self._looked = time.monotonic()
        self._told = False
        self._begun: set[int] = set()
        self._bars: dict[str, tuple[contextlib.ExitStack, Advance, int]] = {}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Look at the trials; called in Ray Tune's loop, many times a second.

        Raises:
            _EndedError: the experiment is to end now.
            ResourcesError: no trial could begin for too long.
        """
        running = [_order_of(trial) for trial in trials if trial.status == "RUNNING"]
        if self._over(bool(running)):
            raise _EndedError
        now = time.monotonic()
        if self._progress.live and now - self._looked > _LOOK:
            self._looked = now
            self._show({order.name: order for order in running})
        pending = next((trial for trial in trials if trial.status == "PENDING"), None)
        if running or pending is None:
            self._since = now
        elif now - self._since >= min(_QUIET, self._seconds):
            self._wait(_order_of(pending).bundles, now)

    def _wait(self, bundles: Sequence[Bundle], now: float) -> None:
        if granted(bundles, self._before):  # a process is starting, which a busy machine takes its time for
            self._since = now
            return
        text = waiting_text(bundles)
        if not self._told:
            self._told = True
            self._progress.message(f"waiting for resources: {text}")
        if now - self._since > self._seconds:
            raise ResourcesError(
                f"no trial could begin within {self._seconds:g} s (ray.ready_timeout): {text}; wait until others have ended, "
                f"lower ray.actors, ray.cpus, ray.gpus or cpus, or raise ray.ready_timeout if nodes are still starting; the "
                f"same command goes on"
            )

    def _show(self, running: Mapping[str, TrialOrder]) -> None:
        """Show a bar for each on a terminal; elsewhere nothing: a line for each round of many trials would help nobody."""
        for name in [name for name in self._bars if name not in running]:
            self._bars.pop(name)[0].close()
        for name, order in running.items():
            if name not in self._bars:
                stack = contextlib.ExitStack()
                advance = stack.enter_context(self._progress.steps(name, order.config["train"]["rounds"]))
                self._bars[name] = (stack, advance, 0)
            stack, advance, shown = self._bars[name]
            done = rounds_done(order.folder)
            if done != shown:
                advance(done - shown)
                self._bars[name] = (stack, advance, done)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        number = _order_of(trial).number
        if number not in self._begun:
            self._begun.add(number)
            self._study.begun(number)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._progress.message(
            f"lost: {_order_of(trial).name}; its process was killed, for lack of memory perhaps; it goes on"
        )

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._show({})
