"""One trial: a whole federation as a trainable of Ray Tune, in a run folder whose commits are its checkpoints.

The run goes on in a thread that waits after each evaluation until it is told whether to go on. What the folder has recorded
already is reported again without training, so a trial that is started again anywhere goes on where its last commit was, to the
same bits. A class and not a function is trained: Ray Tune gives up the thread of a function at once, and a run that is stopped
shall commit its last round and leave its folder to the next process.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shutil
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc
from ray import tune

from raydfl.cluster import Bundle
from raydfl.core.errors import ConfigError, InputError, RaydflError
from raydfl.core.files import write_durably
from raydfl.engine import Config, RoundReport, make_config
from raydfl.engine.storage import RunStore, decisive_changes, read_rows, round_of, stored_about, write_config
from raydfl.experiments.plan import CHANGEABLE, fits_state, rounds_done
from raydfl.runs import Progress, driving, run

ROUND, SCORE, STATUS, REASON = "round", "score", "status", "reason"
"""Keys of what a trial reports to Ray Tune."""

TrialStatus = Literal["running", "finished", "interrupted", "failed"]
LOCKS = (".lock", ".driver.lock")
"""Files of a run folder that belong to the process at work in it."""
_LEFT_BEHIND = (*LOCKS, "report.html")
"""Files of a run folder that a copy does without, beside the exported models."""


@dataclass(frozen=True)
class TrialOrder:
    """A trial as it is given to another process."""

    number: int
    name: str
    """For people."""
    config: Mapping[str, Any]
    bundles: tuple[Bundle, ...] = ()
    """The placement group that it asks for."""
    judged: bool = True
    """True: it waits after each evaluation until it is told to go on; False: there is one result, at its end."""
    keys: tuple[tuple[str, str], ...] = ()
    """(split, metric) that the score may stand under in the record, the one that counts first; empty: there is no one score."""
    stop: str | None = None
    """A file at whose appearance the trial stops after its round."""
    log: str | None = None
    """The file in which a failure is told in full."""
    reported: int = 0
    """The last round whose score is known already."""
    parent: str | None = None
    """The run folder that it begins as a copy of."""
    durable: bool = False
    """True: a round is committed before its scores are told."""

    @property
    def folder(self) -> Path:
        """The run's folder, there or to be made."""
        return Path(self.config["run"]["dir"], self.config["run"]["name"])


@dataclass(frozen=True)
class Said:
    """A message of the run's thread."""

    status: TrialStatus
    round: int = 0
    score: float = math.nan
    reason: str = ""
    scores: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """All pooled scores of the round, by (split, metric)."""
    loss: float = math.nan
    """Loss of the round's training; NaN of a round that is told again."""
    error: BaseException | None = None
    """The exception that was raised."""
    ended: str = ""
    """Why ``run.stop`` has ended the training before its last round."""
    best: int = 0
    """The best round by ``run.best``; 0: there is none."""


class FederationTrial(tune.Trainable):
    """Ray Tune's view of a trial; ``config`` holds ``order``, a :class:`TrialOrder`.

    Each step ends with the next evaluated round. Failures and interruptions are reported like results: Ray Tune's own handling of
    errors is left to processes and nodes that are lost.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory | None:
        """Return the placement group that the order asks for."""
        return tune.PlacementGroupFactory(list(config["order"].bundles), strategy="PACK") if "order" in config else None

    def setup(self, config: dict[str, Any]) -> None:
        """Take the order; nothing is loaded before the first step."""
        self._run = RunThread(config["order"])

    def step(self) -> dict[str, Any]:
        """Go on to the next evaluated round that is not known yet."""
        said = self._run.next()
        return {
            ROUND: said.round,
            SCORE: said.score,
            STATUS: said.status,
            REASON: said.reason,
            "done": said.status != "running",
        }

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take over another trial in the same process: what it has loaded need not be loaded again."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """End a trial that was stopped: its run ends as one that is stopped by hand, with its last round committed."""
        self._run.stop()


class RunThread:
    """A run that is told after each evaluation whether to go on."""

    def __init__(self, order: TrialOrder) -> None:
        self._order = order
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._more = threading.Semaphore(0)
        self._stopping = False
        self._last = order.reported
        self._trained: RoundReport | None = None
        self._thread: threading.Thread | None = None

    def next(self) -> Said:
        """Return what it says next; the thread begins with the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._order.name, daemon=True)
            self._thread.start()
        else:
            self._more.release()
        return self._said.get()

    def stop(self) -> None:
        """Have the run stop where it is, and wait for it."""
        self._stopping = True
        self._more.release()
        if self._thread is not None:
            self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._said.put(self._do())
        except BaseException as error:  # noqa: BLE001  (whatever it is, the other trials go on; it is told at the end)
            if self._order.log is not None:
                log = Path(self._order.log)
                with contextlib.suppress(OSError):  # the disk is full, perhaps: that must be told all the same
                    log.parent.mkdir(parents=True, exist_ok=True)
                    with log.open("a", encoding="utf-8") as file:
                        file.write(f"{self._order.name}\n\n{traceback.format_exc()}\n")
            kind = "" if isinstance(error, RaydflError) else f"{type(error).__name__}: "
            self._said.put(Said("failed", self._last, reason=f"{kind}{error}", error=error))

    def _do(self) -> Said:
        if self._interrupted():
            return Said("interrupted", self._last)
        config, folder = make_config(self._order.config, self._order.name), self._order.folder
        if self._order.parent is not None:
            branch(Path(self._order.parent), folder, config)
        self._total, self._every = config.train.rounds, config.evaluate.every
        for round_index, scores in recorded(folder, self._last).items() if self._order.judged else ():
            if round_index < self._total and not self._report(round_index, scores):
                return Said("interrupted", self._last)
        outcome = run(config, Progress("quiet"), self._on_round, self._order.durable)
        if not outcome.finished:
            return Said("interrupted", self._last)
        done = outcome.round
        last = recorded(folder, done - 1).get(done, {})
        said = Said("finished", done, self._find(last), outcome.worthless, last, self._loss(done))
        return replace(said, ended=outcome.ended, best=0 if outcome.best is None else outcome.best.round)

    def _on_round(self, report: RoundReport) -> bool:
        """Return, after each round, whether the run shall stop."""
        self._trained = report
        evaluated = report.round % self._every == 0
        more = report.round < self._total and not report.stopped
        if self._order.judged and evaluated and more and self._last < report.round:
            return not self._report(report.round, {_key(name): value for name, value in report.scores.items()})
        return self._interrupted()

    def _report(self, round_index: int, scores: Mapping[tuple[str, str], float]) -> bool:
        """Tell a score and wait; return whether the run shall go on."""
        self._said.put(Said("running", round_index, self._find(scores), scores=scores, loss=self._loss(round_index)))
        self._last = round_index
        self._more.acquire()
        return not self._interrupted()

    def _interrupted(self) -> bool:
        return self._stopping or (self._order.stop is not None and Path(self._order.stop).exists())

    def _loss(self, round_index: int) -> float:
        return self._trained.loss if self._trained is not None and self._trained.round == round_index else math.nan

    def _find(self, scores: Mapping[tuple[str, str], float]) -> float:
        """Return the score that counts, where one does.

        Raises:
            InputError: it is not among what was measured.
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


def _key(name: str) -> tuple[str, str]:
    split, _, metric = name.partition(" ")
    return split, metric


def recorded(folder: Path, after: int) -> dict[int, dict[tuple[str, str], float]]:
    """Return the pooled numbers that a run folder has committed of evaluated rounds after ``after``: by round, (split, metric)."""
    if not (folder / "run.json").exists():
        return {}
    latest = RunStore(folder).latest()
    if latest is None:
        return {}
    where = (pc.field("client") == "") & (pc.field("round") > after)
    found: dict[int, dict[tuple[str, str], float]] = {}
    columns = ("round", "phase", "split", "metric", "value", "shape")
    for row in read_rows(folder, round_of(latest), where=where, columns=columns).to_pylist():
        if row["phase"] == "evaluate" and row["shape"] is None:  # else it is an array
            found.setdefault(row["round"], {})[row["split"], row["metric"]] = row["value"]
    return dict(sorted(found.items()))


def branch(parent: Path, folder: Path, config: Config) -> None:
    """Begin a run as a copy of another one's newest commit, with a configuration of its own; a begun copy is left as it is.

    ``run.json`` says under ``branches`` which runs it was before, each with its digest and the rounds that it had done then:
    they decide the copy's numbers together with its own configuration.

    Args:
        parent: a run folder that no process is writing to.
        folder: the new run's.
        config: must fit the state: it may differ in rates, not in models or data.
    """
    if (folder / "run.json").exists():
        return
    about = stored_about(parent)
    before = {"run": about["id"], "digest": about["digest"], "round": rounds_done(parent)}
    _copy(parent, folder, config, [*about.get("branches", []), before])


def take_over(checkpoint: Path, folder: Path, config: Config) -> None:
    """Make a run folder hold what a checkpoint holds, whatever it held before.

    A checkpoint of another configuration's run is gone on with as :func:`branch` does it.

    Args:
        checkpoint: a copy of a run folder.
        folder: the run's own.
        config: the run's.

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
                f"{change}: a trial goes on from another one's checkpoint, which {key} does not allow; {CHANGEABLE}"
            )
    clear(folder)
    if changes:
        branch(checkpoint, folder, config)
    else:
        _copy(checkpoint, folder, config, about.get("branches"))


def clear(folder: Path) -> None:
    """Remove a run's folder, as soon as whoever was at work in it is not any more.

    Raises:
        RunDirectoryError: another process does not leave it.
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
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(*_LEFT_BEHIND, "model*.safetensors", "export"))
    about = stored_about(source)
    about |= {"id": folder.name, "digest": config.digest(), "config": config.model_dump(mode="json")}
    if branches:
        about["branches"] = branches
    about.pop("mlflow_run_id", None)
    write_config(temporary, config)
    write_durably(temporary / "run.json", json.dumps(about, indent=2).encode())
    temporary.rename(folder)
