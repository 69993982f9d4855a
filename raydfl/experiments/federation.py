"""A federation as a trainable of Ray Tune: for studies, and for anybody's own ``ray.tune.Tuner``.

A class and not a function is trained: Ray Tune abandons the thread of a function at once, and a run that is stopped must commit its
last round and leave its folder to the next process. Evaluations that the folder has already are reported again without training.
So a trial that is started again anywhere continues after its last commit, to the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.compute as pc
from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from raydfl.cluster import make_bundles
from raydfl.core.errors import ConfigError, InputError, RaydflError
from raydfl.core.files import write_durably
from raydfl.core.remote import is_uri
from raydfl.engine import Config, RoundReport, load_config, make_config
from raydfl.engine.storage import RunStore, decisive_changes, read_about, read_rows, write_config
from raydfl.experiments.load import CHANGEABLE, fits_state
from raydfl.experiments.settings import overlay, plain_value
from raydfl.experiments.study import rounds_done
from raydfl.runs import Progress, Result, iterate_rounds, lock_run_dir

ROUND, SCORE, STATUS, FAILED, WORTHLESS = "round", "score", "status", "failed", "worthless"
"""Keys of a result beside the scores."""
_IDLE = 0.2
"""Seconds between two reports of a trial that was interrupted."""
WORST = 1e9
"""Stands for a score that is no number: finite, because schedulers rank and average."""
_LOCKS = (".lock", ".driver.lock")
"""Files of a run folder that belong to the process at work in it."""


@dataclass(frozen=True)
class TrialOrder:
    """The work of a trial's process."""

    config: Config
    judged: bool = True
    """Whether each evaluation is reported; else the last one alone."""
    keys: tuple[str, ...] = ()
    """Names of the score in the record, by preference; empty: no single score is asked for."""
    sign: float = 1.0
    """Factor that makes larger scores better ones."""
    stop: Path | None = None
    """A file at whose appearance the trial stops after its round."""
    log: Path | None = None
    """A file for the traceback of a failure; ``None``: failures are raised."""

    @property
    def folder(self) -> Path:
        """The run's folder, which may not exist yet."""
        return Path(self.config.run.dir, str(self.config.run.name))

    def find_score(self, scores: Mapping[str, float]) -> float:
        """Return the score.

        Raises:
            InputError: it was not measured.
        """
        found = next((scores[key] for key in self.keys if key in scores), None)
        if found is None:
            known = sorted(name for name in scores if "/" in name or name.endswith(" loss"))
            raise InputError(
                f"metric: {self.keys[-1]} is not measured; what is: {', '.join(known)}; correct metric, or evaluate.*"
            )
        return found if math.isfinite(found) else -self.sign * WORST


def trainable(config: Config | Mapping[str, Any] | str | Path, cpus: float = 1.0) -> type[tune.Trainable]:
    """Return a class for ``ray.tune.Tuner``: each trial is a whole federation, with its own actors in its placement group.

    The Tuner's ``param_space`` holds settings by their path, ``{"train.optimiser.lr": tune.loguniform(1e-4, 1e-1)}``. A result is
    reported, and a checkpoint saved, after each evaluated round: ``round``, the training's ``loss``, every pooled score
    (``"test model/accuracy"``) and ``run``, the trial's run folder in ``run.dir``. A checkpoint is a copy of that folder.

    Args:
        config: what the trials have in common: a configuration, plain data, or the path of a YAML file.
        cpus: of a trial's own process; its client actors have ``ray.cpus`` and ``ray.gpus`` each.

    Raises:
        ConfigError: the configuration is not valid, or not one that trials can have.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = make_config(config)
    if is_uri(config.run.dir):
        raise ConfigError(
            f"run.dir: {config.run.dir} is a URI, but trials work in a folder; give an absolute path, and the URI as storage_path "
            f"of the Tuner, which copies each checkpoint there"
        )
    base = config.model_dump(mode="json")
    config_of(base, {})
    return make_trainable(functools.partial(_order, base), cpus, copies=True)


def make_trainable(
    order: Callable[[Mapping[str, Any], str], TrialOrder], cpus: float, copies: bool
) -> type[tune.Trainable]:
    """Return a trainable whose trials do ``order(config, trial_id)``.

    Args:
        cpus: of a trial's own process.
        copies: whether checkpoints are copies of the run folder; else the folder itself is the trial's state.
    """
    # A class of its own for each call: a process that starts it, also on another node, receives the order with it.
    own = {"order": staticmethod(order), "cpus": cpus, "copies": copies}
    return type("Federation", (_Federation,), own)


def config_of(base: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Return a trial's configuration.

    Args:
        base: a configuration as plain data.
        settings: by path, the trial's own settings.

    Raises:
        ConfigError: they make no valid configuration.
    """
    plain = {key: plain_value(value) for key, value in settings.items()}
    config = make_config(overlay(dict(base), plain, "param_space"), "param_space")
    if config.data.sites:
        raise ConfigError(
            "data.sites: trials share their resources and copy one another's folders, which data at sites do not allow; compare "
            "settings with raydfl study, or leave data.sites out"
        )
    return config


def _order(base: Mapping[str, Any], settings: Mapping[str, Any], trial_id: str) -> TrialOrder:
    """Return the order of a trial of a user's own Tuner, which also tracks it."""
    config = config_of(base, settings)
    run = config.run.model_copy(update={"name": trial_id, "dir": str(Path(config.run.dir))})
    track = config.track.model_copy(update={"mlflow": False, "also": []})
    return TrialOrder(config.model_copy(update={"run": run, "track": track}))


class _Federation(tune.Trainable):
    """A federation. Each step ends with the next evaluated round."""

    order: ClassVar[Callable[[Mapping[str, Any], str], TrialOrder]]
    cpus: ClassVar[float]
    copies: ClassVar[bool]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the trial's placement group: a bundle for its own process, then one for each client actor."""
        checked = cls.order(config, "trial").config
        if checked.ray.actors == "per_client" and not checked.data.sites:
            raise ConfigError(
                "ray.actors: per_client: how many actors a trial needs must be known before it starts; give their number"
            )
        return tune.PlacementGroupFactory(make_bundles(checked, cls.cpus, clients=0), strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        """Make the configuration; nothing is loaded before the first step."""
        self._order = type(self).order(config, self.trial_id)
        self._last: dict[str, Any] = {ROUND: 0, SCORE: -self._order.sign * WORST}
        self._trained: RoundReport | None = None
        self._stopping = self._begun = False
        self._results = self._evaluate(0)

    def step(self) -> dict[str, Any]:
        """Continue to the next evaluated round.

        Raises:
            InputError: or any other failure of the run, unless it has a log.
        """
        order = self._order
        if self.copies and not self._begun:  # there is no checkpoint: the folder of an earlier attempt does not count
            clear(order.folder)
        self._begun = True
        try:
            return next(self._results)
        except Exception as error:
            if order.log is None:
                raise
            with contextlib.suppress(OSError):  # a full disk must be reported too
                order.log.parent.mkdir(parents=True, exist_ok=True)
                with order.log.open("a", encoding="utf-8") as file:
                    file.write(f"{traceback.format_exc()}\n")
            kind = "" if isinstance(error, RaydflError) else f"{type(error).__name__}: "
            failed = {STATUS: FAILED, FAILED: f"{kind}{error}", SHOULD_CHECKPOINT: False, DONE: True}
            return {**self._last, **failed, SCORE: -order.sign * WORST}

    def _is_stopped(self) -> bool:
        return self._stopping or (self._order.stop is not None and self._order.stop.exists())

    def _evaluate(self, after: int) -> Generator[dict[str, Any], None, None]:
        """Yield the results of the evaluated rounds after ``after``, and then, of an interrupted run, that it is interrupted."""
        order, outcome = self._order, None
        for round_index, scores in read_scores(order.folder, after).items() if order.judged else ():
            if round_index < order.config.train.rounds and not self._is_stopped():
                after = round_index
                yield self._result(round_index, scores)
        if not self._is_stopped():
            outcome = yield from self._train(after)
        if outcome is not None and outcome.finished:
            yield self._result(outcome.round, read_scores(order.folder, outcome.round - 1)[outcome.round], outcome)
            return
        while True:  # Ray Tune, which is about to end the trial, may ask again
            yield {**self._last, STATUS: "interrupted", SHOULD_CHECKPOINT: False, DONE: False}
            time.sleep(_IDLE)

    def _train(self, after: int) -> Generator[dict[str, Any], None, Result]:
        config = self._order.config
        rounds = iterate_rounds(config, Progress("quiet"), durable=self.copies, signals=False)
        try:
            self._trained = next(rounds)
            while True:
                report = self._trained
                more = report.round < config.train.rounds and not report.stopped
                evaluated = report.round % config.evaluate.every == 0 and report.round > after
                if self._order.judged and evaluated and more:
                    yield self._result(report.round, report.scores)
                self._trained = rounds.send(self._is_stopped())
        except StopIteration as end:
            outcome: Result = end.value
            return outcome

    def _result(self, round_index: int, scores: Mapping[str, float], outcome: Result | None = None) -> dict[str, Any]:
        trained = self._trained is not None and self._trained.round == round_index  # else it is reported again
        result: dict[str, Any] = {**scores, ROUND: round_index, "run": str(self._order.folder)}
        result["loss"] = self._trained.loss if trained else math.nan  # type: ignore[union-attr]
        if self._order.keys:
            result[SCORE] = self._order.find_score(scores)
        if outcome is not None:
            result |= {WORTHLESS: outcome.worthless} if outcome.worthless else {}
            result |= {"stopped_round": round_index, "stopped": outcome.ended} if outcome.ended else {}
            result |= {} if outcome.best is None else {"best_round": outcome.best.round}
        result[STATUS] = "running" if outcome is None else "finished"
        self._last = result
        return {**result, SHOULD_CHECKPOINT: self.copies, DONE: outcome is not None}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take over another trial in the same process, whose libraries are loaded already."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the run after its round, with that round committed."""
        self._stopping = True
        next(self._results, None)
        self._results.close()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the run's folder, in which nobody writes between two steps."""
        if self.copies:
            with contextlib.suppress(FileNotFoundError):  # before the first step there is none
                ignored = shutil.ignore_patterns(*_LOCKS)
                shutil.copytree(self._order.folder, checkpoint_dir, ignore=ignored, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
        """Continue from a checkpoint of this trial or, in population based training, of another."""
        folder = Path(str(checkpoint))
        if not self.copies or not (folder / "run.json").exists():  # the folder is the state, or the trial had not begun
            return
        self.cleanup()
        take_over(folder, self._order.folder, self._order.config)
        self._stopping, self._begun = False, True
        self._results = self._evaluate(rounds_done(self._order.folder))


def read_scores(folder: Path, after: int) -> dict[int, dict[str, float]]:
    """Return the pooled scores of evaluated rounds after ``after`` that a run folder has committed, by round and name."""
    done = rounds_done(folder)
    where = (pc.field("client") == "") & (pc.field("round") > after) & (pc.field("phase") == "evaluate")
    columns = ("round", "split", "metric", "value", "shape")
    found: dict[int, dict[str, float]] = {}
    for row in read_rows(folder, done, where=where, columns=columns).to_pylist() if done else ():
        if row["shape"] is None:  # else it is an array
            found.setdefault(row["round"], {})[f"{row['split']} {row['metric']}"] = row["value"]
    return dict(sorted(found.items()))


# -- copies of run folders -------------------------------------------------------------------------------------------


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
    about, temporary = read_about(parent), folder.with_name(f".{folder.name}.part")
    if _changes(about, config):
        before = {"run": about["id"], "digest": about["digest"], "round": rounds_done(parent)}
        about["branches"] = [*about.get("branches", []), before]
    for remains in (temporary, folder):
        shutil.rmtree(remains, ignore_errors=True)
    left_out = (*_LOCKS, "report.html", "model*.safetensors", "export")
    shutil.copytree(parent, temporary, ignore=shutil.ignore_patterns(*left_out))
    about |= {"id": folder.name, "digest": config.digest(), "config": config.model_dump(mode="json")}
    about.pop("mlflow_run_id", None)
    write_config(temporary, config)
    write_durably(temporary / "run.json", json.dumps(about, indent=2).encode())
    temporary.rename(folder)


def _changes(about: Mapping[str, Any], config: Config) -> list[str]:
    """Return the changes from the configuration of a run to another one that decide its results."""
    same = about["digest"] == config.digest()
    return [] if same else decisive_changes(about["config"], config.model_dump(mode="json"))


def take_over(checkpoint: Path, folder: Path, config: Config) -> None:
    """Replace a run folder by a checkpoint. The run of a checkpoint with another configuration is branched.

    Raises:
        ConfigError: the configuration does not fit the state.
        RunDirectoryError: another process is at work in the folder.
    """
    for change in _changes(read_about(checkpoint), config):
        key = change.partition(": ")[0]
        if not fits_state(key, config.parts.method):
            raise ConfigError(
                f"{change}: a trial continues from another trial's checkpoint, which {key} does not allow; {CHANGEABLE}"
            )
    clear(folder)
    branch(checkpoint, folder, config)


def clear(folder: Path) -> None:
    """Remove a run's folder, once no process is at work in it.

    Raises:
        RunDirectoryError: another process keeps it.
    """
    if not folder.exists():
        return
    store = RunStore(folder)
    with lock_run_dir(folder, Progress("quiet")):
        store.lock()
        try:
            shutil.rmtree(folder)
        finally:
            store.unlock()
