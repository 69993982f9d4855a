"""A federation as a trainable of Ray Tune, for studies and for a user's ``ray.tune.Tuner``.

The trainable is a class, because Ray Tune abandons the thread of a function immediately. A stopped run must commit its last round
and release its folder. A restarted trial reports committed evaluations again without training, then resumes after its last commit
with the same bits on any node.
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
from raydfl.core.noise_key import KEY_FILE
from raydfl.core.remote import is_uri
from raydfl.engine import Config, RoundReport, check_same_software, describe_software, load_config, make_config
from raydfl.engine.storage import RunStore, decisive_changes, read_about, read_rows, write_config
from raydfl.experiments.load import CHANGEABLE, fits_state
from raydfl.experiments.settings import overlay, plain_value
from raydfl.experiments.study import count_rounds
from raydfl.runs import Progress, Result, iterate_rounds, lock_run_dir

ROUND, SCORE, STATUS, FAILED, WORTHLESS = "round", "score", "status", "failed", "worthless"
"""Keys of a result in addition to the scores."""
VIRTUAL = "server virtual_seconds"
"""Name of the virtual time of ``train.fleet`` among the scores of a trial."""
_IDLE = 0.2
"""Seconds between two reports of an interrupted trial."""
WORST = 1e9
"""Replacement of a non-finite score. Schedulers need finite scores to rank and average."""
_OWN = (".lock", ".driver.lock", KEY_FILE)
"""Files that belong to a single run folder: the locks of its process, and the key of its noise."""


@dataclass(frozen=True)
class TrialOrder:
    """The order to train a trial in its process."""

    config: Config
    judged: bool = True
    """Report each evaluation. False: report only the last evaluation."""
    keys: tuple[tuple[str, ...], ...] = ()
    """Lists of names in the metrics table, the preferred list first. The score is the mean of a list. Empty: no single score."""
    sign: float = 1.0
    """Factor with which larger scores are better."""
    stop: Path | None = None
    """Signal file: if it exists, the trial stops after its current round."""
    log: Path | None = None
    """Log for the traceback of a failure; ``None``: raise failures."""

    @property
    def folder(self) -> Path:
        """Path of the run's folder."""
        return Path(self.config.run.dir, str(self.config.run.name))

    def find_score(self, scores: Mapping[str, float]) -> float:
        """Return the score among all measured scores. Non-finite scores become the worst score.

        Raises:
            InputError: The score was not measured.
        """
        names = next((names for names in self.keys if scores.keys() >= set(names)), ())
        if not names:
            known = sorted(name for name in scores if "/" in name or name.endswith(" loss"))
            raise InputError(
                f"metric: {', '.join(self.keys[-1])} is not measured. Measured are {', '.join(known)}. Correct metric, or "
                f"evaluate.*."
            )
        score = sum(scores[name] for name in names) / len(names)
        return score if math.isfinite(score) else -self.sign * WORST


def trainable(config: Config | Mapping[str, Any] | str | Path, cpus: float = 1.0) -> type[tune.Trainable]:
    """Create a trainable class for ``ray.tune.Tuner`` that trains a federation per trial, with actors in its placement group.

    The Tuner's ``param_space`` maps paths of settings to domains, ``{"train.optimiser.lr": tune.loguniform(1e-4, 1e-1)}``. After
    each evaluated round, a trial saves a checkpoint and reports a result: ``round``, the training's ``loss``, every pooled score
    (``"test model/accuracy"``) and ``run``, its run folder in ``run.dir``. A checkpoint is a copy of the run folder.

    Args:
        config: The common configuration of all trials: a configuration, plain data, or the path of a YAML file.
        cpus: CPUs of a trial's own process. Each client actor also reserves ``ray.cpus`` and ``ray.gpus``.

    Returns:
        A subclass of ``ray.tune.Trainable``.

    Raises:
        ConfigError: The configuration is not valid, or not supported for trials.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = make_config(config)
    if is_uri(config.run.dir):
        raise ConfigError(
            f"run.dir: {config.run.dir} is a URI, but trials work in a folder. Set an absolute path, and pass the URI to the Tuner "
            f"as storage_path for the checkpoints."
        )
    base = config.model_dump(mode="json")
    make_trial_config(base, {})
    return make_trainable(functools.partial(_make_order, base), cpus, copies=True)


def make_trainable(
    order: Callable[[Mapping[str, Any], str], TrialOrder], cpus: float, copies: bool
) -> type[tune.Trainable]:
    """Create a trainable that trains a federation for each trial, by the order ``order(config, trial_id)``.

    Args:
        order: Makes the order of a trial from its settings and Ray Tune's id.
        cpus: CPUs of a trial's own process.
        copies: Whether checkpoints are copies of the run folder. Otherwise the folder itself is the trial's state.
    """
    # Ray sends the class with its attributes to each process, so every call needs a new class.
    attributes = {"order": staticmethod(order), "cpus": cpus, "copies": copies, "software": describe_software()}
    return type("Federation", (_Federation,), attributes)


def make_trial_config(base: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Make a trial's configuration from a base and its settings.

    Args:
        base: The common configuration as plain data.
        settings: The trial's settings by path.

    Raises:
        ConfigError: The settings are not valid.
    """
    plain = {key: plain_value(value) for key, value in settings.items()}
    config = make_config(overlay(dict(base), plain, "param_space"), "param_space")
    if config.data.sites:
        raise ConfigError(
            "data.sites: trials copy run folders, but with data.sites private models and data stay at the sites. Compare settings "
            "with raydfl study, or remove data.sites."
        )
    return config


def _make_order(base: Mapping[str, Any], settings: Mapping[str, Any], trial_id: str) -> TrialOrder:
    """Make the order of a trial in a user's Tuner. The Tuner tracks it, so raydfl's tracking is off."""
    config = make_trial_config(base, settings)
    run = config.run.model_copy(update={"name": trial_id, "dir": str(Path(config.run.dir))})
    track = config.track.model_copy(update={"mlflow": False, "also": []})
    return TrialOrder(config.model_copy(update={"run": run, "track": track}))


class _Federation(tune.Trainable):
    """A trainable federation. A step ends with the next evaluated round."""

    order: ClassVar[Callable[[Mapping[str, Any], str], TrialOrder]]
    cpus: ClassVar[float]
    copies: ClassVar[bool]
    software: ClassVar[Mapping[str, str]]
    """Software of the process that started the trials."""

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the trial's placement group, with a bundle for its own process and a bundle per client actor."""
        checked = cls.order(config, "trial").config
        if checked.ray.actors == "per_client" and not checked.data.sites:
            raise ConfigError(
                "ray.actors: per_client is not supported in trials, because their resources must be known in advance. Set a number "
                "of actors."
            )
        return tune.PlacementGroupFactory(make_bundles(checked, cls.cpus, clients=0), strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        """Make the configuration. The first step loads the run."""
        self._order = type(self).order(config, self.trial_id)
        self._last: dict[str, Any] = {ROUND: 0, SCORE: -self._order.sign * WORST}
        self._trained: RoundReport | None = None
        self._stopping = self._begun = False
        self._results = self._evaluate(0)

    def step(self) -> dict[str, Any]:
        """Train until the next evaluated round, and return its result.

        Raises:
            Exception: The run failed and its order has no log. With a log, the result reports the failure.
        """
        order = self._order
        if self.copies and not self._begun:  # Without a checkpoint, the trial restarts from round 0.
            clear(order.folder)
        self._begun = True
        try:
            return next(self._results)
        except Exception as error:
            if order.log is None:
                raise
            with contextlib.suppress(OSError):  # A full disk must not hide the failure.
                order.log.parent.mkdir(parents=True, exist_ok=True)
                with order.log.open("a", encoding="utf-8") as file:
                    file.write(f"{traceback.format_exc()}\n")
            kind = "" if isinstance(error, RaydflError) else f"{type(error).__name__}: "
            failure = {STATUS: FAILED, FAILED: f"{kind}{error}", SHOULD_CHECKPOINT: False, DONE: True}
            return {**self._last, **failure, SCORE: -order.sign * WORST}

    def _is_stopped(self) -> bool:
        return self._stopping or (self._order.stop is not None and self._order.stop.exists())

    def _evaluate(self, after: int) -> Generator[dict[str, Any], None, None]:
        """Yield the results of evaluated rounds after ``after``, then endless interrupted results of a stopped run."""
        order, outcome = self._order, None
        for round_index, scores in read_scores(order.folder, after).items() if order.judged else ():
            if round_index < order.config.train.rounds and not self._is_stopped():
                after = round_index
                yield self._make_result(round_index, scores)
        if not self._is_stopped():
            outcome = yield from self._train(after)
        if outcome is not None and outcome.finished:
            scores = read_scores(order.folder, outcome.round - 1).get(outcome.round, {})
            if not scores and not read_scores(order.folder, 0):
                self._reject_unmeasured(outcome.round)
            yield self._make_result(outcome.round, scores, outcome)
            return
        while True:  # Ray Tune may call step() again before it ends the trial.
            yield {**self._last, STATUS: "interrupted", SHOULD_CHECKPOINT: False, DONE: False}
            time.sleep(_IDLE)

    def _train(self, after: int) -> Generator[dict[str, Any], None, Result]:
        check_same_software(self.software)
        config = self._order.config
        rounds = iterate_rounds(config, Progress("quiet"), durable=self.copies, signals=False, lend=True)
        try:
            self._trained = next(rounds)
            while True:
                report = self._trained
                more = report.round < config.train.rounds and not report.stopped
                evaluated = report.round % config.evaluate.interval == 0 and report.round > after
                # Without clients, all evaluations of a phase measure the same scores. A later phase may measure others.
                same = config.evaluate.clients == "none" and len(config.phases.names) == 1
                if evaluated and same and not report.scores:
                    self._reject_unmeasured(report.round)
                if self._order.judged and evaluated and more:
                    virtual = {} if report.virtual_seconds is None else {VIRTUAL: report.virtual_seconds}
                    yield self._make_result(report.round, report.scores | virtual)
                self._trained = rounds.send(self._is_stopped())
        except StopIteration as end:
            outcome: Result = end.value
            return outcome

    def _reject_unmeasured(self, round_index: int) -> None:
        """Raise an error if the run belongs to a study. A user's Tuner can use the training loss as its score."""
        if self._order.log is not None:
            raise InputError(
                f"no score was measured until round {round_index}. Set evaluate.server=true, or evaluate.clients=all. To measure "
                f"private models on the server's test clips, set evaluate.client_test_clips as well."
            )

    def _make_result(
        self, round_index: int, scores: Mapping[str, float], outcome: Result | None = None
    ) -> dict[str, Any]:
        # A repeated report of a committed round has no training loss.
        trained = self._trained is not None and self._trained.round == round_index
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
        """Replace the trial, reusing this process, its loaded libraries and its actors."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the run after its current round, and commit it."""
        self._stopping = True
        next(self._results, None)
        self._results.close()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the run's folder. No process writes to it between two steps."""
        if self.copies:
            with contextlib.suppress(FileNotFoundError):  # The first step creates the folder.
                ignored = shutil.ignore_patterns(*_OWN)
                shutil.copytree(self._order.folder, checkpoint_dir, ignore=ignored, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
        """Resume from a checkpoint of this trial or, in population based training, of a different trial."""
        folder = Path(str(checkpoint))
        if (
            not self.copies or not (folder / "run.json").exists()
        ):  # The folder is the state, or the run had not started.
            return
        self.cleanup()
        take_over(folder, self._order.folder, self._order.config)
        self._stopping, self._begun = False, True
        self._results = self._evaluate(count_rounds(self._order.folder))


def read_scores(folder: Path, after: int) -> dict[int, dict[str, float]]:
    """Read the pooled scores of committed evaluations after round ``after``, and their virtual time, by round and name."""
    done = count_rounds(folder)
    measured = (pc.field("phase") == "evaluate") | (pc.field("metric") == VIRTUAL.partition(" ")[2])
    where = (pc.field("client") == "") & (pc.field("round") > after) & measured
    columns = ("round", "split", "metric", "value", "shape")
    scores: dict[int, dict[str, float]] = {}
    for row in read_rows(folder, done, where=where, columns=columns).to_pylist() if done else ():
        if row["shape"] is None:  # Skip arrays.
            scores.setdefault(row["round"], {})[f"{row['split']} {row['metric']}"] = row["value"]
    return {number: found for number, found in sorted(scores.items()) if found.keys() != {VIRTUAL}}


# -- copies of run folders -------------------------------------------------------------------------------------------


def branch(parent: Path, folder: Path, config: Config) -> None:
    """Start a run from the newest commit of a parent run with a new configuration. Keep an existing run unchanged.

    ``branches`` in its ``run.json`` lists all ancestors, each with its digest and its number of completed rounds.

    Args:
        parent: Run folder of the parent. No process may write to it.
        folder: Run folder of the new run.
        config: Configuration of the new run. It may change rates, but not models or data.
    """
    if (folder / "run.json").exists():
        return
    about, temporary = read_about(parent), folder.with_name(f".{folder.name}.part")
    if _list_changes(about, config):
        before = {"run": about["id"], "digest": about["digest"], "round": count_rounds(parent)}
        about["branches"] = [*about.get("branches", []), before]
    for incomplete in (temporary, folder):
        shutil.rmtree(incomplete, ignore_errors=True)
    omitted = (*_OWN, "report.html", "model*.safetensors", "export")
    shutil.copytree(parent, temporary, ignore=shutil.ignore_patterns(*omitted))
    about |= {"id": folder.name, "digest": config.digest(), "config": config.model_dump(mode="json")}
    about.pop("mlflow_run_id", None)
    write_config(temporary, config)
    write_durably(temporary / "run.json", json.dumps(about, indent=2).encode())
    temporary.rename(folder)


def _list_changes(about: Mapping[str, Any], config: Config) -> list[str]:
    """List the settings of a run that a new configuration changes, if they affect results."""
    same = about["digest"] == config.digest()
    return [] if same else decisive_changes(about["config"], config.model_dump(mode="json"))


def take_over(checkpoint: Path, folder: Path, config: Config) -> None:
    """Replace a run folder by a checkpoint. A changed configuration makes the run a branch.

    Raises:
        ConfigError: The configuration does not fit the state.
        RunDirectoryError: A process is working in the folder.
    """
    for change in _list_changes(read_about(checkpoint), config):
        key = change.partition(": ")[0]
        if not fits_state(key, config.components.method):
            raise ConfigError(
                f"{change}: a trial continues from another trial's checkpoint, which {key} does not allow. {CHANGEABLE}"
            )
    clear(folder)
    branch(checkpoint, folder, config)


def clear(folder: Path) -> None:
    """Remove a run's folder after locking it.

    Raises:
        RunDirectoryError: A process is working in the folder.
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
