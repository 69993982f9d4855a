"""A run in a thread that reports each evaluation and waits, and run folders that begin as copies of others.

The thread waits after each evaluation until it is told to continue. Evaluations that the folder has already are reported again
without training. So a trial that is started again anywhere continues after its last commit, to the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import queue
import shutil
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc

from raydfl.core.errors import ConfigError, InputError, RaydflError
from raydfl.core.files import write_durably
from raydfl.engine import Config, RoundReport
from raydfl.engine.storage import RunStore, decisive_changes, read_rows, round_of, stored_about, write_config
from raydfl.experiments.study import rounds_done
from raydfl.methods import Method
from raydfl.runs import Progress, driving, run
from raydfl.runs.report import Key

Status = Literal["running", "finished", "interrupted", "failed"]
LOCKS = (".lock", ".driver.lock")
"""Files of a run folder that belong to the process at work in it."""
_LEFT_OUT = (*LOCKS, "report.html")
"""Files of a run folder that a copy does not need, beside the exported models."""


@dataclass(frozen=True)
class TrialOrder:
    """The work of a trial's process."""

    config: Config
    judged: bool = True
    """Whether the trial waits after each evaluation; else it reports its last evaluation alone."""
    keys: tuple[Key, ...] = ()
    """Names of the score in the record, by preference; empty: no single score is asked for."""
    sign: float = 1.0
    """Factor that makes larger scores better ones."""
    stop: Path | None = None
    """A file at whose appearance the trial stops after its round."""
    log: Path | None = None
    """A file for the traceback of a failure."""
    reported: int = 0
    """The last round that was reported before."""
    durable: bool = False
    """Whether a round is committed before its evaluation is reported."""

    @property
    def folder(self) -> Path:
        """The run's folder, which may not exist yet."""
        return Path(self.config.run.dir, str(self.config.run.name))


@dataclass(frozen=True)
class TrialReport:
    """A message of the run's thread."""

    status: Status
    round: int = 0
    score: float = math.nan
    reason: str = ""
    """Why the trial failed, or why its result is worthless."""
    scores: Mapping[Key, float] = field(default_factory=dict)
    """All pooled scores of the round, by (split, metric)."""
    loss: float = math.nan
    """Loss of the round's training; NaN of a round that is reported again."""
    error: BaseException | None = None
    ended: str = ""
    """Why ``run.stop`` has ended the training before its last round."""
    best: int = 0
    """The best round by ``run.best``; 0: there is none."""


class RunThread:
    """A run that waits after each evaluation."""

    def __init__(self, order: TrialOrder) -> None:
        self._order = order
        self._reports: queue.SimpleQueue[TrialReport] = queue.SimpleQueue()
        self._more = threading.Semaphore(0)
        self._stopping = False
        self._last = order.reported
        self._trained: RoundReport | None = None
        self._thread: threading.Thread | None = None

    def next(self) -> TrialReport:
        """Return the next report. The first call starts the thread; a thread that was interrupted reports that again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._order.folder.name, daemon=True)
            self._thread.start()
        elif self._interrupted() and not self._thread.is_alive() and self._reports.empty():
            return TrialReport("interrupted", self._last)
        else:
            self._more.release()
        return self._reports.get()

    def stop(self) -> None:
        """Stop the run after its round, and wait for that."""
        self._stopping = True
        self._more.release()
        if self._thread is not None:
            self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._reports.put(self._run())
        except BaseException as error:  # noqa: BLE001  (the other trials continue, whatever it is)
            if self._order.log is not None:
                with contextlib.suppress(OSError):  # a full disk must be reported too
                    self._order.log.parent.mkdir(parents=True, exist_ok=True)
                    with self._order.log.open("a", encoding="utf-8") as file:
                        file.write(f"{traceback.format_exc()}\n")
            kind = "" if isinstance(error, RaydflError) else f"{type(error).__name__}: "
            self._reports.put(TrialReport("failed", self._last, reason=f"{kind}{error}", error=error))

    def _run(self) -> TrialReport:
        config, folder = self._order.config, self._order.folder
        if self._interrupted():
            return TrialReport("interrupted", self._last)
        for round_index, scores in read_scores(folder, self._last).items() if self._order.judged else ():
            if round_index < config.train.rounds and not self._report(round_index, scores):
                return TrialReport("interrupted", self._last)
        outcome = run(config, Progress("quiet"), self._on_round, self._order.durable)
        if not outcome.finished:
            return TrialReport("interrupted", self._last)
        done = outcome.round
        scores = read_scores(folder, done - 1).get(done, {})
        return TrialReport(
            "finished",
            done,
            self._find(scores),
            outcome.worthless,
            scores,
            self._loss(done),
            ended=outcome.ended,
            best=0 if outcome.best is None else outcome.best.round,
        )

    def _on_round(self, report: RoundReport) -> bool:
        """Return, after each round, whether the run stops."""
        self._trained = report
        config = self._order.config
        evaluated = report.round % config.evaluate.every == 0
        more = report.round < config.train.rounds and not report.stopped
        if self._order.judged and evaluated and more and self._last < report.round:
            return not self._report(report.round, {_key(name): value for name, value in report.scores.items()})
        return self._interrupted()

    def _report(self, round_index: int, scores: Mapping[Key, float]) -> bool:
        """Report an evaluation and wait; return whether the run continues."""
        score, loss = self._find(scores), self._loss(round_index)
        self._reports.put(TrialReport("running", round_index, score, scores=scores, loss=loss))
        self._last = round_index
        self._more.acquire()
        return not self._interrupted()

    def _interrupted(self) -> bool:
        return self._stopping or (self._order.stop is not None and self._order.stop.exists())

    def _loss(self, round_index: int) -> float:
        return self._trained.loss if self._trained is not None and self._trained.round == round_index else math.nan

    def _find(self, scores: Mapping[Key, float]) -> float:
        """Return the score that is asked for, where one is.

        Raises:
            InputError: it was not measured.
        """
        if not self._order.keys:
            return math.nan
        for key in self._order.keys:
            if key in scores:
                return scores[key]
        known = sorted({f"{split} {metric}" for split, metric in scores if "/" in metric or metric == "loss"})
        raise InputError(
            f"metric: {' '.join(self._order.keys[-1])} is not measured; what is: {', '.join(known)}; correct metric, or evaluate.*"
        )


def _key(name: str) -> Key:
    split, _, metric = name.partition(" ")
    return split, metric


def read_scores(folder: Path, after: int) -> dict[int, dict[Key, float]]:
    """Return the pooled scores that a run folder has committed of evaluated rounds after ``after``, by round."""
    if not (folder / "run.json").exists():
        return {}
    latest = RunStore(folder).latest()
    if latest is None:
        return {}
    where = (pc.field("client") == "") & (pc.field("round") > after)
    found: dict[int, dict[Key, float]] = {}
    columns = ("round", "phase", "split", "metric", "value", "shape")
    for row in read_rows(folder, round_of(latest), where=where, columns=columns).to_pylist():
        if row["phase"] == "evaluate" and row["shape"] is None:  # else it is an array
            found.setdefault(row["round"], {})[row["split"], row["metric"]] = row["value"]
    return dict(sorted(found.items()))


# -- copies of run folders ---------------------------------------------------------------------------------------------

_COUNTS = ("train.local_epochs", "train.batch_size")
CHANGEABLE = (
    f"it can change train.optimiser.*, {', '.join(_COUNTS)} and those fields of a method that are numbers with a decimal "
    f"point"
)
"""The settings for which :func:`fits_state` holds, in words."""


def fits_state(key: str, method: Method) -> bool:
    """Return whether a setting may change in the middle of a training: the state fits each of its values."""
    group, _, name = key.partition(".")
    fields = {item.name: item.type for item in dataclasses.fields(method)}
    rate = group == "method" and "float" in str(fields.get(name, ""))
    return rate or key in _COUNTS or (key.startswith("train.optimiser.") and key != "train.optimiser.name")


def branch(parent: Path, folder: Path, config: Config) -> None:
    """Begin a run as a copy of another run's newest commit, with a configuration of its own. A begun copy is not changed.

    ``branches`` in its ``run.json`` lists the runs before it, each with its digest and the rounds that it had done then.

    Args:
        parent: a run folder that no process is writing to.
        folder: the new run's folder.
        config: must fit the state: it may differ in rates, not in models or data.
    """
    if (folder / "run.json").exists():
        return
    about = stored_about(parent)
    before = {"run": about["id"], "digest": about["digest"], "round": rounds_done(parent)}
    _copy(parent, folder, config, [*about.get("branches", []), before])


def take_over(checkpoint: Path, folder: Path, config: Config) -> None:
    """Replace a run folder by a checkpoint. The run of a checkpoint with another configuration is branched.

    Args:
        checkpoint: a copy of a run folder.
        folder: the run's folder.
        config: the run's configuration.

    Raises:
        ConfigError: the configuration does not fit the state.
        RunDirectoryError: another process is at work in the folder.
    """
    about = stored_about(checkpoint)
    changes = (
        [] if about["digest"] == config.digest() else decisive_changes(about["config"], config.model_dump(mode="json"))
    )
    method = config.parts.method
    for change in changes:
        key = change.partition(": ")[0]
        if not fits_state(key, method):
            raise ConfigError(
                f"{change}: a trial continues from another trial's checkpoint, which {key} does not allow; {CHANGEABLE}"
            )
    clear(folder)
    if changes:
        branch(checkpoint, folder, config)
    else:
        _copy(checkpoint, folder, config, about.get("branches"))


def clear(folder: Path) -> None:
    """Remove a run's folder, once no process is at work in it.

    Raises:
        RunDirectoryError: another process keeps it.
    """
    if not folder.exists():
        return
    store = RunStore(folder)
    with driving(folder, Progress("quiet")):
        store.lock()
        try:
            shutil.rmtree(folder)
        finally:
            store.unlock()


def _copy(source: Path, folder: Path, config: Config, branches: list[dict[str, Any]] | None) -> None:
    temporary = folder.with_name(f".{folder.name}.part")
    for remains in (temporary, folder):
        shutil.rmtree(remains, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(*_LEFT_OUT, "model*.safetensors", "export"))
    about = stored_about(source)
    about |= {"id": folder.name, "digest": config.digest(), "config": config.model_dump(mode="json")}
    if branches:
        about["branches"] = branches
    about.pop("mlflow_run_id", None)
    write_config(temporary, config)
    write_durably(temporary / "run.json", json.dumps(about, indent=2).encode())
    temporary.rename(folder)
