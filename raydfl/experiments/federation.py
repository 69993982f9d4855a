"""A federation as a trainable of Ray Tune: for studies, and for anybody's own ``ray.tune.Tuner``.

A class and not a function is trained: Ray Tune abandons the thread of a function at once, and a run that is stopped must commit its
last round and leave its folder to the next process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from raydfl.cluster import bundles_of
from raydfl.core.errors import ConfigError
from raydfl.core.remote import is_uri
from raydfl.engine import Config, load_config, make_config
from raydfl.experiments.files import overlay
from raydfl.experiments.study import rounds_done
from raydfl.experiments.trial import LOCKS, RunThread, TrialOrder, TrialReport, clear, take_over

ROUND, SCORE, STATUS, FAILED, WORTHLESS = "round", "score", "status", "failed", "worthless"
"""Keys of a result beside the scores."""
_IDLE = 0.2
"""Seconds between two reports of a trial that was interrupted."""
WORST = 1e9
"""Stands for a score that is no number: finite, because schedulers rank and average."""


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
    plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in settings.items()}  # of numpy
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
    own = {"name": trial_id, "dir": str(Path(config.run.dir))}
    update = {
        "run": config.run.model_copy(update=own),
        "track": config.track.model_copy(update={"mlflow": False, "also": []}),
    }
    return TrialOrder(config.model_copy(update=update), durable=True)


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
        return tune.PlacementGroupFactory(bundles_of(checked, cls.cpus, clients=0), strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        """Make the configuration; nothing is loaded before the first step."""
        self._order = type(self).order(config, self.trial_id)
        self._run = RunThread(self._order)
        self._last: dict[str, Any] = {}
        self._begun = False

    def step(self) -> dict[str, Any]:
        """Continue to the next evaluated round.

        Raises:
            InputError: or any other failure of the run, unless it has a log.
        """
        if self.copies and not self._begun:  # there is no checkpoint: the folder of an earlier attempt does not count
            clear(self._order.folder)
        self._begun = True
        report = self._run.next()
        if report.status == "interrupted":  # Ray Tune, which is about to end the trial, may ask again
            time.sleep(_IDLE)
            return {
                ROUND: report.round,
                SCORE: -self._order.sign * WORST,
                **self._last,
                STATUS: report.status,
                SHOULD_CHECKPOINT: False,
                DONE: False,
            }
        if report.error is not None and self._order.log is None:
            raise report.error
        self._last = self._result(report)
        return dict(self._last)

    def _result(self, report: TrialReport) -> dict[str, Any]:
        result: dict[str, Any] = {f"{split} {metric}": value for (split, metric), value in report.scores.items()}
        result |= {ROUND: report.round, "loss": report.loss, "run": str(self._order.folder), STATUS: report.status}
        if self._order.keys:
            result[SCORE] = report.score if math.isfinite(report.score) else -self._order.sign * WORST
        if report.reason:
            result[FAILED if report.status == "failed" else WORTHLESS] = report.reason
        if report.ended:
            result |= {"stopped_round": report.round, "stopped": report.ended}
        if report.best:
            result["best_round"] = report.best
        return {
            **result,
            SHOULD_CHECKPOINT: self.copies and report.error is None,
            DONE: report.status in ("finished", "failed"),
        }

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take over another trial in the same process, whose libraries are loaded already."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the run after its round, with that round committed."""
        self._run.stop()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the run's folder, in which nobody writes between two steps."""
        if self.copies:
            with contextlib.suppress(FileNotFoundError):  # before the first step there is none
                ignored = shutil.ignore_patterns(*LOCKS)
                shutil.copytree(self._order.folder, checkpoint_dir, ignore=ignored, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
        """Continue from a checkpoint of this trial or, in population based training, of another."""
        folder = Path(str(checkpoint))
        if not self.copies or not (folder / "run.json").exists():  # the folder is the state, or the trial had not begun
            return
        self._run.stop()
        take_over(folder, self._order.folder, self._order.config)
        self._run = RunThread(dataclasses.replace(self._order, reported=rounds_done(self._order.folder)))
        self._begun = True
