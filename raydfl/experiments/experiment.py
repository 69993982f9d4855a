"""A study's experiment of Ray Tune: schedulers, searchers, and the Tuner, which is restored after an interruption."""

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
from raydfl.experiments.settings import AshaScheduler, MedianScheduler
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Study, Trial
from raydfl.experiments.watch import LIVE, SHORT, Watch, point_of
from raydfl.runs import Progress, StopSignals

RunConfig = tune.RunConfig | train.RunConfig
"""Ray's own settings of an experiment, for users who start a study from Python."""


def _order(study: Study, stop: Path, mlflow: str | None, config: Mapping[str, Any], trial_id: str) -> TrialOrder:
    """Return the order of a trial, in any process."""
    trial = study.trial(point_of(config), trial_id)
    track, search = trial.config.track.model_copy(update={"parent": mlflow}), bool(study.settings.domains)
    return TrialOrder(
        trial.config.model_copy(update={"track": track}),
        judged=search,
        keys=tuple(map(" ".join, trial.keys)) if search else (),
        sign=trial.metric.sign,
        stop=stop,
        log=study.folder / "logs" / f"{trial.run_dir.name}.log",
    )


def _run_name(study: Study, trial: Any) -> str:
    return study.trial(point_of(trial.config), trial.trial_id).run_dir.name


def _trial_id(trial: Any) -> str:
    return str(trial.trial_id)


def _make_scheduler(study: Study) -> TrialScheduler | None:
    """Return Ray Tune's scheduler; ``None``: no trial is stopped early."""
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
    return PopulationBasedTraining(
        time_attr=ROUND,
        perturbation_interval=population.interval,
        hyperparam_mutations={
            key: list(domain.values) if domain.listed else domain.to_tune() for key, domain in domains.items()
        },
        quantile_fraction=population.share,
        resample_probability=population.resample,
        perturbation_factors=(population.factor, 1 / population.factor),
        custom_explore_fn=functools.partial(_clip, domains),  # Ray multiplies beyond the ends
        require_attrs=False,
        synch=True,  # the worst copy the best of the same round
    )


def _clip(domains: Mapping[str, Domain], config: dict[str, Any]) -> dict[str, Any]:
    return {key: domains[key].clip(value) if key in domains else value for key, value in config.items()}


def _fits(trial: Trial, domains: Mapping[str, Domain]) -> bool:
    """Return whether a trial's values are in the domains, which may have been edited since it began."""
    return all(domain.contains(trial.values[key]) for key, domain in domains.items())


def _make_search(study: Study, state: StudyState) -> tuple[Any, dict[str, Any]]:
    """Return Ray Tune's searcher (``None``: its own) and ``param_space``."""
    settings = study.settings
    space = {key: domain.to_tune() for key, domain in settings.domains.items()}
    if settings.population is not None:
        # A point has no other keys than the space: the one repeat is left out.
        points = [{key: trial.point[key] for key in ("trial", *space)} for trial in study.trials]
        searcher = BasicVariantGenerator(points_to_evaluate=points, max_concurrent=settings.parallel or 0)
        return searcher, {"trial": tune.randint(0, study.samples), **space}
    if settings.searcher == "optuna":
        try:
            import optuna
            from ray.tune.search.optuna import OptunaSearch
        except ImportError as error:
            raise InputError(
                "searcher: optuna needs the package optuna; install it with pip install 'raydfl[optuna]', or take searcher: random"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        begun = [dict(trial.values) for trial in state.waiting if _fits(trial, settings.domains)]
        seed, mode = settings.seed + len(state.trials), study.first.metric.best  # the same seed would draw them again
        found = OptunaSearch(space, metric=SCORE, mode=mode, seed=seed, points_to_evaluate=begun or None)
        for trial, score in collect(study, state).scored:
            if state.is_over(trial) and _fits(trial, settings.domains):
                worst = -trial.metric.sign * WORST
                found.add_evaluated_point(
                    dict(trial.values), score / trial.metric.scale if math.isfinite(score) else worst
                )
        return found, {}
    return None, {"point": tune.grid_search([trial.point for trial in state.waiting])}


@dataclass(frozen=True)
class Experiment:
    """The study's experiment of Ray Tune."""

    study: Study
    state: StudyState
    progress: Progress
    given: RunConfig | None
    """The user's own settings of it."""
    parallel: int | None

    @property
    def _logs(self) -> Path:
        return self.study.folder / "logs"

    @property
    def _stop(self) -> Path:
        """A file at whose appearance trials stop after their round."""
        return self._logs / f".stop-{os.getpid()}"

    def fit(self) -> None:
        """Train the trials that are left, those of an interrupted experiment first.

        Raises:
            ConfigError: a callback is not of Ray Tune.
            RaydflError: Ray Tune failed, or the state cannot be written.
        """
        if any(not isinstance(each, tune.Callback) for each in (self.given and self.given.callbacks) or []):
            raise ConfigError("run_config: its callbacks must be of Ray Tune; give them in a ray.tune.RunConfig")
        storage, name, owned = self._place()
        self._logs.mkdir(parents=True, exist_ok=True)
        self._stop.unlink(missing_ok=True)
        signals = StopSignals(self.progress, "runs stop after their round", "them", self._stop.touch)
        watch = Watch(self.state, self.progress, signals, self._stop)
        LIVE.append(watch)
        try:
            with signals:
                tuner = self._restore(f"{storage}/{name}")
                if tuner is not None:
                    tuner.fit()
                if not signals.asked and self.state.left:
                    self._make(storage, name, watch).fit()
        except Exception as error:
            raise watch.error or self._describe(error) from error
        finally:
            LIVE.remove(watch)
            self._stop.unlink(missing_ok=True)
        if owned and not signals.asked:
            shutil.rmtree(Path(storage, name), ignore_errors=True)
            with contextlib.suppress(OSError):  # another study's experiment is in it
                Path(storage).rmdir()

    def _place(self) -> tuple[str, str, bool]:
        """Return the storage path and the name of the experiment, and whether its folder is removed at the end."""
        given, study, stem = self.given, self.study, self.study.file.stem
        if given is not None and given.storage_path not in (None, DEFAULT_STORAGE_PATH):
            return str(given.storage_path), given.name or stem, False
        keys = {"searcher", "scheduler", "samples", "seed", "retries", "actors", "cpus", "domains"}
        trials = (study.first, *study.trials)
        described: list[Any] = [study.settings.model_dump(mode="json", include=keys), __version__, self.parallel]
        described += [trial.identity for trial in trials]
        described += [study.first.keys, study.first.metric.best, study.first.config.ray.actors]
        name = f"{stem}-{hashlib.sha256(json.dumps(described).encode()).hexdigest()[:8]}"
        for other in (self.study.folder / "tune").glob(f"{stem}-????????"):
            if other.name != name:  # an interrupted experiment of other trials; their run folders stay
                shutil.rmtree(other, ignore_errors=True)
        return str(self.study.folder / "tune"), name, True

    def _trainable(self) -> type[tune.Trainable]:
        study = replace(self.study, trials=())  # each process gets it
        order = functools.partial(_order, study, self._stop, self.state.mlflow)
        return make_trainable(order, study.settings.cpus, copies=study.settings.population is not None)

    def _restore(self, path: str) -> tune.Tuner | None:
        """Return the Tuner of an interrupted experiment; ``None``: there is none that Ray Tune can restore."""
        if not tune.Tuner.can_restore(path):
            return None
        try:
            return tune.Tuner.restore(path, trainable=self._trainable(), resume_errored=True)
        except Exception as error:  # noqa: BLE001  (whatever it is, the run folders are there)
            self.progress.message(
                f"warning: Ray Tune cannot restore {path} ({first_line(error)}); the trials continue from their run folders"
            )
            return None

    def _make(self, storage: str, name: str, watch: Watch) -> tune.Tuner:
        study, population = self.study, self.study.settings.population
        if population is not None and self.state.trials:
            states = [state.status for state in self.state.trials.values()]
            self.progress.message(
                f"a new population begins; {len(states)} members of the last one ({states.count('finished')} finished) leave "
                f"the study's results, and their run folders stay"
            )
            self.state.trials.clear()
        searcher, space = _make_search(study, self.state)
        searched = bool(study.settings.domains)
        return tune.Tuner(
            self._trainable(),
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
            run_config=self._run_config(storage, name, watch),
        )

    def _run_config(self, storage: str, name: str, watch: Watch) -> tune.RunConfig:
        given = self.given or tune.RunConfig()
        return tune.RunConfig(
            name=name,
            storage_path=storage,
            storage_filesystem=given.storage_filesystem,
            verbose=0,
            stop=given.stop if isinstance(given, tune.RunConfig) else None,
            failure_config=self._failure_config(),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the run folders have their commits
            callbacks=[watch, *(given.callbacks or [])],
        )

    def _failure_config(self) -> tune.FailureConfig:
        """Return the failure handling of the given run configuration, or the study's retries.

        Ray gives each run configuration the default ``FailureConfig(max_failures=0)``; a study that sets ``retries`` overrides it.
        """
        given = None if self.given is None else self.given.failure_config
        settings = self.study.settings
        fast = given.fail_fast if isinstance(given, tune.FailureConfig) else False
        if given is None or ("retries" in settings.model_fields_set and not given.max_failures and not fast):
            return tune.FailureConfig(max_failures=settings.retries)
        return tune.FailureConfig(max_failures=given.max_failures, fail_fast=fast)

    def _describe(self, error: Exception) -> Exception:
        """Return the message about a failure of Ray Tune, with its traceback in a log."""
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
