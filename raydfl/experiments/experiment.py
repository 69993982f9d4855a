"""The Ray Tune experiment of a study: scheduler, searcher, and a Tuner that is restored after an interruption."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import train, tune
from ray.train.constants import DEFAULT_STORAGE_PATH
from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, PopulationBasedTraining, TrialScheduler
from ray.tune.search import BasicVariantGenerator

from raydfl.core.errors import ConfigError, InputError, RaydflError, first_line
from raydfl.core.version import __version__
from raydfl.experiments.domains import Domain
from raydfl.experiments.federation import ROUND, SCORE, WORST, TrialOrder, make_trainable
from raydfl.experiments.results import collect
from raydfl.experiments.schedulers import AshaScheduler, MedianScheduler
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Study, Trial, list_keys
from raydfl.experiments.watch import LIVE, SHORT, Watch, get_point
from raydfl.runs import Progress, StopSignals

RunConfig = tune.RunConfig | train.RunConfig
"""Ray's settings of an experiment, for users of the Python interface."""


def _make_order(study: Study, stop: Path, mlflow: str | None, config: Mapping[str, Any], trial_id: str) -> TrialOrder:
    """Make the order of a trial. Any process can call it."""
    trial = study.trial(get_point(config), trial_id)
    track, search = trial.config.track.model_copy(update={"parent": mlflow}), bool(study.settings.domains)
    return TrialOrder(
        trial.config.model_copy(update={"track": track}),
        judged=search,
        keys=tuple(tuple(map(" ".join, names)) for names in trial.keys) if search else (),
        sign=trial.metric.sign,
        stop=stop,
        log=study.folder / "logs" / f"{trial.run_dir.name}.log",
    )


def _run_name(study: Study, trial: Any) -> str:
    return study.trial(get_point(trial.config), trial.trial_id).run_dir.name


def _trial_id(trial: Any) -> str:
    return str(trial.trial_id)


def _make_scheduler(study: Study) -> TrialScheduler | None:
    """Make Ray Tune's scheduler. ``None``: no trial is stopped early."""
    settings = study.settings.scheduler
    if isinstance(settings, AshaScheduler):
        grace = min(settings.grace, study.rounds)
        return AsyncHyperBandScheduler(
            time_attr=ROUND, max_t=study.rounds, grace_period=grace, reduction_factor=settings.factor
        )
    if isinstance(settings, MedianScheduler):
        return MedianStoppingRule(time_attr=ROUND, grace_period=settings.grace, min_samples_required=settings.trials)
    if study.settings.population is None:
        return None
    population, domains = study.settings.population, study.settings.domains
    return _PopulationBasedTraining(
        time_attr=ROUND,
        perturbation_interval=population.interval,
        hyperparam_mutations={
            key: list(domain.values) if domain.listed else domain.to_tune() for key, domain in domains.items()
        },
        quantile_fraction=population.share,
        resample_probability=population.resample,
        perturbation_factors=(population.factor, 1 / population.factor),
        custom_explore_fn=functools.partial(_clip, domains),  # Ray's factors may leave the range.
        require_attrs=False,
        synch=True,  # The worst members copy the best members of the same round.
    )


class _PopulationBasedTraining(PopulationBasedTraining):
    """Ray Tune's population based training, without its endless wait.

    In Ray 2.60, all members can wait for an exchange that is over (after a restoration, and if the members' evaluations skip
    rounds of an exchange), or for a member that has ended.
    """

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Return the next member to train. If all members wait, the next exchange is an interval later."""
        trials = [trial for trial in tune_controller.get_trials() if not trial.is_finished()]
        if trials and all(trial.status == "PAUSED" for trial in trials):
            last = min(self._trial_state[trial].last_train_time for trial in trials)
            if last >= self._next_perturbation_sync:
                self._next_perturbation_sync = last + self._perturbation_interval
        return super().choose_trial_to_run(tune_controller)


def _clip(domains: Mapping[str, Domain], config: dict[str, Any]) -> dict[str, Any]:
    return {key: domains[key].clip(value) if key in domains else value for key, value in config.items()}


def _fits(trial: Trial, domains: Mapping[str, Domain]) -> bool:
    """Return whether the domains contain a trial's values. The user may have edited the file since its start."""
    return all(domain.contains(trial.values[key]) for key, domain in domains.items())


def _make_search(study: Study, state: StudyState) -> tuple[Any, dict[str, Any]]:
    """Make Ray Tune's searcher (``None``: the default) and its ``param_space``."""
    settings = study.settings
    space = {key: domain.to_tune() for key, domain in settings.domains.items()}
    if settings.population is not None:
        # Points must have the keys of the space, so the single repeat is omitted.
        points = [{key: trial.point[key] for key in ("trial", *space)} for trial in study.trials]
        searcher = BasicVariantGenerator(points_to_evaluate=points, max_concurrent=settings.parallel or 0)
        return searcher, {"trial": tune.randint(0, study.samples), **space}
    if settings.searcher == "optuna":
        try:
            import optuna
            from ray.tune.search.optuna import OptunaSearch
        except ImportError as error:
            raise InputError(
                "searcher: optuna needs the package optuna. Install it with pip install 'raydfl[optuna]', or set searcher: random."
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        interrupted = [dict(trial.values) for trial in state.waiting if _fits(trial, settings.domains)]
        # The same seed would repeat the draws of the existing trials.
        seed, mode = settings.seed + len(state.trials), study.first.metric.best
        optuna_search = OptunaSearch(space, metric=SCORE, mode=mode, seed=seed, points_to_evaluate=interrupted or None)
        for trial, score in collect(study, state).scored:
            if state.is_over(trial) and _fits(trial, settings.domains):
                worst = -trial.metric.sign * WORST
                optuna_search.add_evaluated_point(
                    dict(trial.values), score / trial.metric.scale if math.isfinite(score) else worst
                )
        return optuna_search, {}
    return None, {"point": tune.grid_search([trial.point for trial in state.waiting])}


@dataclass(frozen=True)
class Experiment:
    """The Ray Tune experiment of a study."""

    study: Study
    state: StudyState
    progress: Progress
    given: RunConfig | None
    """The user's settings of the experiment."""
    parallel: int | None

    @property
    def _logs(self) -> Path:
        return self.study.folder / "logs"

    @property
    def _stop(self) -> Path:
        """Signal file: if it exists, trials stop after their current round."""
        return self._logs / f".stop-{os.getpid()}"

    def fit(self) -> None:
        """Train all unfinished trials, starting with the trials of an interrupted experiment.

        Raises:
            ConfigError: A callback is not a ``ray.tune.Callback``.
            RaydflError: Ray Tune failed, or the state cannot be written.
        """
        callbacks = (self.given and self.given.callbacks) or []
        if any(not isinstance(callback, tune.Callback) for callback in callbacks):
            raise ConfigError("run_config: callbacks must derive from ray.tune.Callback. Pass a ray.tune.RunConfig.")
        storage, name, owned = self._locate()
        self._logs.mkdir(parents=True, exist_ok=True)
        self._stop.unlink(missing_ok=True)
        signals = StopSignals(self.progress, "runs stop after their round", "them", self._stop.touch)
        watch = Watch(self.state, self.progress, signals, self._stop)
        LIVE.append(watch)
        try:
            with signals:
                self._continue(f"{storage}/{name}", watch)
                if not signals.asked and self.state.left:
                    self._make_tuner(storage, name, watch).fit()
        except Exception as error:
            raise watch.error or self._to_raydfl_error(error) from error
        finally:
            LIVE.remove(watch)
            self._stop.unlink(missing_ok=True)
        if owned and not signals.asked:
            shutil.rmtree(Path(storage, name), ignore_errors=True)
            with contextlib.suppress(OSError):  # The folder may contain another study's experiment.
                Path(storage).rmdir()

    def _locate(self) -> tuple[str, str, bool]:
        """Return the storage path, the name of the experiment, and whether to remove its folder at the end."""
        given, study, stem = self.given, self.study, self.study.file.stem
        if given is not None and given.storage_path not in (None, DEFAULT_STORAGE_PATH):
            return str(given.storage_path), given.name or stem, False
        keys = {"searcher", "scheduler", "samples", "seed", "retries", "actors", "cpus", "domains"}
        trials = (study.first, *study.trials)
        digested: list[Any] = [study.settings.model_dump(mode="json", include=keys), __version__, self.parallel]
        digested += [trial.identity for trial in trials]
        digested += [
            list_keys(study.first.config, study.first.metric),
            study.first.metric.best,
            study.first.config.ray.actors,
        ]
        name = f"{stem}-{hashlib.sha256(json.dumps(digested).encode()).hexdigest()[:8]}"
        for folder in (self.study.folder / "tune").glob(f"{stem}-????????"):
            if folder.name != name:  # An interrupted experiment before an edit of the file. Run folders are kept.
                shutil.rmtree(folder, ignore_errors=True)
        return str(self.study.folder / "tune"), name, True

    def _make_trainable(self) -> type[tune.Trainable]:
        study = replace(self.study, trials=())  # Smaller, because each process receives a copy.
        order = functools.partial(_make_order, study, self._stop, self.state.mlflow)
        return make_trainable(order, study.settings.cpus, copies=study.settings.population is not None)

    def _continue(self, path: str, watch: Watch) -> None:
        """Continue an interrupted experiment, if Ray Tune can restore it. A kill may leave a damaged state."""
        if not tune.Tuner.can_restore(path):
            return
        try:
            tune.Tuner.restore(path, trainable=self._make_trainable(), resume_errored=True).fit()
        except Exception as error:
            # Ray Tune reads the state in fit, so an error before the first trial is an error of the state.
            if watch.error is not None or watch.has_started:
                raise
            self.progress.message(
                f"warning: Ray Tune cannot restore {path} ({type(error).__name__}: {first_line(error)}). Trials resume from their "
                f"run folders."
            )

    def _make_tuner(self, storage: str, name: str, watch: Watch) -> tune.Tuner:
        study, population = self.study, self.study.settings.population
        if population is not None and self.state.trials:
            states = [state.status for state in self.state.trials.values()]
            self.progress.message(
                f"A new population starts. The results omit the {len(states)} members of the last population "
                f"({states.count('finished')} finished). Their run folders are kept."
            )
            self.state.trials.clear()
        searcher, space = _make_search(study, self.state)
        searched = bool(study.settings.domains)
        return tune.Tuner(
            self._make_trainable(),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=SCORE if searched else None,
                mode=study.first.metric.best if searched else None,
                num_samples=self.state.left if study.settings.sequential else 1,
                search_alg=searcher,
                scheduler=_make_scheduler(study),
                max_concurrent_trials=None if population is not None else self.parallel,
                reuse_actors=True,
                trial_name_creator=functools.partial(_run_name, replace(study, trials=())),
                trial_dirname_creator=_trial_id,
            ),
            run_config=self._make_run_config(storage, name, watch),
        )

    def _make_run_config(self, storage: str, name: str, watch: Watch) -> tune.RunConfig:
        user_config = self.given or tune.RunConfig()
        return tune.RunConfig(
            name=name,
            storage_path=storage,
            storage_filesystem=user_config.storage_filesystem,
            verbose=0,
            stop=user_config.stop if isinstance(user_config, tune.RunConfig) else None,
            failure_config=self._make_failure_config(),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # Run folders contain their commits.
            callbacks=[watch, *(user_config.callbacks or [])],
        )

    def _make_failure_config(self) -> tune.FailureConfig:
        """Make the failure handling from the user's run configuration or from the study's ``retries``.

        Each run configuration of Ray has the default ``FailureConfig(max_failures=0)``. ``retries`` of the file overrides it.
        """
        given = None if self.given is None else self.given.failure_config
        settings = self.study.settings
        fast = given.fail_fast if isinstance(given, tune.FailureConfig) else False
        if given is None or ("retries" in settings.model_fields_set and not given.max_failures and not fast):
            return tune.FailureConfig(max_failures=settings.retries)
        return tune.FailureConfig(max_failures=given.max_failures, fail_fast=fast)

    def _to_raydfl_error(self, error: Exception) -> Exception:
        """Convert a failure of Ray Tune to a RaydflError, and write its traceback to a log."""
        if isinstance(error, RaydflError):
            return error
        log = self._logs / "ray-tune.log"
        with contextlib.suppress(OSError):
            log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        last = (str(error).strip().splitlines() or [""])[-1]  # of a TuneError, which holds a whole traceback
        return RaydflError(
            f"Ray Tune failed: {type(error).__name__}: {last[:SHORT]} (in full in {log}). The commits of all runs are kept, and "
            f"the same command continues."
        )
