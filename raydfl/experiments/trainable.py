"""A federation as a trainable for anybody's own ``ray.tune.Tuner``."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from raydfl.cluster import bundles_of
from raydfl.core.errors import ConfigError
from raydfl.core.remote import is_uri
from raydfl.engine import Config, load_config, make_config
from raydfl.experiments.plan import laid_over, rounds_done
from raydfl.experiments.trial import (
    LOCKS,
    FederationTrial,
    RunThread,
    Said,
    TrialOrder,
    clear,
    take_over,
)


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
    # A class of its own for each call, so that whoever starts it, also on another node, has the configuration with it.
    return type("Federation", (_Federation,), {"base": base, "cpus": cpus})


def config_of(base: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Return a trial's configuration.

    Args:
        base: a configuration as plain data.
        settings: by path, what the Tuner has chosen for the trial.

    Raises:
        ConfigError: they do not make a valid one.
    """
    plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in settings.items()}  # of numpy
    config = make_config(laid_over(dict(base), plain, "param_space"), "param_space")
    if config.data.sites:
        raise ConfigError(
            "data.sites: trials share their resources and copy one another's folders, which data at sites do not allow; compare "
            "settings with raydfl sweep, or leave data.sites out"
        )
    return config


class _Federation(FederationTrial):
    """A trial of a user's own Tuner; ``config`` holds the settings that were chosen for it."""

    base: ClassVar[dict[str, Any]]
    cpus: ClassVar[float]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return what a trial takes: a bundle for its own process, then one for each client actor."""
        checked = config_of(cls.base, config)
        if checked.ray.actors == "per_client":
            raise ConfigError(
                "ray.actors: per_client: how many actors a trial needs must be known before it starts; give their number"
            )
        return tune.PlacementGroupFactory(bundles_of(checked, cls.cpus, clients=0), strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        """Make the configuration; nothing is loaded before the first step."""
        checked = config_of(self.base, config)
        own = {"name": self.trial_id, "dir": str(Path(checked.run.dir))}
        self._config = checked.model_copy(
            update={
                "run": checked.run.model_copy(update=own),
                "track": checked.track.model_copy(update={"mlflow": False, "also": []}),  # that is the Tuner's
            }
        )
        self._folder = Path(checked.run.dir) / self.trial_id
        self._order = TrialOrder(
            number=0, name=self.trial_id, config=self._config.model_dump(mode="json"), durable=True
        )
        self._run = RunThread(self._order)
        self._begun = False

    def step(self) -> dict[str, Any]:
        """Go on to the next evaluated round.

        Raises:
            InputError: or whatever else the run has failed with.
        """
        if not self._begun:  # and there is no checkpoint: what an earlier attempt has left does not count
            clear(self._folder)
            self._begun = True
        said = self._run.next()
        if said.error is not None:
            raise said.error
        return self._result(said)

    def _result(self, said: Said) -> dict[str, Any]:
        scores = {f"{split} {metric}": value for (split, metric), value in said.scores.items()}
        result = {**scores, "round": said.round, "loss": said.loss, "run": str(self._folder)}
        if said.reason:
            result["worthless"] = said.reason
        if said.ended:
            result |= {"stopped_round": said.round, "stopped": said.ended}
        if said.best:
            result["best_round"] = said.best
        return {**result, SHOULD_CHECKPOINT: True, DONE: said.status != "running"}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the run's folder, to which nobody writes between two steps."""
        with contextlib.suppress(FileNotFoundError):  # before the first step there is none
            shutil.copytree(self._folder, checkpoint_dir, ignore=shutil.ignore_patterns(*LOCKS), dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
        """Go on where a checkpoint was saved, by this trial or, in population based training, by another."""
        self._run.stop()
        folder = Path(str(checkpoint))
        if not (folder / "run.json").exists():  # of a trial that had not begun
            return
        take_over(folder, self._folder, self._config)
        self._run = RunThread(dataclasses.replace(self._order, reported=rounds_done(self._folder)))
        self._begun = True
