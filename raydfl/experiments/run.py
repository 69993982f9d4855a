"""Execution of a study. Each trial is a federation in its own placement group.

The results of a trial are in its run folder. Ray Tune's experiment in the study's folder ``tune`` exists only until all trials are
over. An interrupted study restores it, including the state of Ray's scheduler and searcher.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ParamSpec, TypeVar

import joblib

from raydfl.cluster import (
    Bundle,
    check_persistent,
    check_trial_fits,
    compute_on_cluster,
    connect_ray,
    count_parallel,
    make_bundles,
)
from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import default_cache
from raydfl.core.lock import FileLock
from raydfl.core.nested import flatten
from raydfl.experiments.experiment import Experiment, RunConfig
from raydfl.experiments.load import load_study, prepare
from raydfl.experiments.page import write_page
from raydfl.experiments.records import check_results
from raydfl.experiments.results import StudyResults, collect
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Study, Trial
from raydfl.experiments.tables import write_tables
from raydfl.runs import Progress, Tracker, default_progress, make_tracker

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


def run_study(
    study: Study, progress: Progress | None = None, run_config: RunConfig | None = None, table_only: bool = False
) -> StudyResults:
    """Train all unfinished trials of a study, and write its tables and report.

    Ctrl-C stops running trials after their current round. The same call continues an interrupted study.

    Args:
        study: The study.
        progress: Shows the progress; ``None``: the default of the terminal.
        run_config: Settings of Ray Tune: ``storage_path`` and ``name`` (its files are kept), ``failure_config``, ``callbacks`` and
            ``stop``.
        table_only: Train nothing, and write the tables and the report of the current results.

    Returns:
        The results of all trials.

    Raises:
        InputError: Recordings cannot be used, a package is missing, or the cluster cannot hold a trial. No trial was started.
        ConfigError: The folder of results has a result of a different configuration.
        RunDirectoryError: A process is working on the study.
        ResourcesError: No trial could start within ``ray.ready_timeout`` seconds.
    """
    progress = progress or default_progress()
    check_persistent({"run.dir": study.folder, "data.cache": study.first.config.data.cache or default_cache()})
    if (study.folder / "run.json").exists():
        raise RunDirectoryError(f"{study.folder} is the folder of a run. Choose a different folder with dir=....")
    check_results(study)
    if table_only:
        return _write(study, StudyState.read(study), progress)
    lock = FileLock(study.output(".lock"))
    lock.acquire(wait=1.0)
    try:
        state = StudyState.read(study)
        tracker = _start_tracker(study, state, progress)
        try:
            _train(study, state, progress, run_config)
        finally:
            results = _write(study, state, progress, tracker)
    finally:
        lock.release()
        study.output(".lock").unlink(missing_ok=True)
    return results


def _write(study: Study, state: StudyState, progress: Progress, tracker: Tracker | None = None) -> StudyResults:
    results = collect(study, state)
    paths = [*write_tables(results), write_page(results)]
    if tracker is not None:
        for path in paths:
            tracker.log_artifact(path)
        tracker.finish("FINISHED" if results.complete else "KILLED")
    if count := len(state.skipped):
        names = f"{count} trial{'s' * (count > 1)}"
        progress.message(f"skipped: {names} of an earlier version of the file, without values for all domains")
    return results


def _start_tracker(study: Study, state: StudyState, progress: Progress) -> Tracker | None:
    """Start the study's run in MLflow, the parent of its trials."""
    settings = study.first.config.track
    if not settings.mlflow:
        return None
    settings = settings.model_copy(update={"also": []})  # Further trackers need rounds, but a study has none.
    tracker = make_tracker(settings, study.folder, study.folder, progress.message)
    params = flatten(study.settings.model_dump(mode="json", exclude_unset=True))
    state.mlflow = tracker.start(study.settings.title, params, {"raydfl.study": str(study.file)}, state.mlflow)
    state.write()
    return tracker


def _train(study: Study, state: StudyState, progress: Progress, run_config: RunConfig | None) -> None:
    settings, config = study.settings, study.first.config
    waiting, left = state.waiting, state.left
    if left < study.total:
        progress.message(f"{study.total - left} of {study.total} runs are finished already.")
    if left <= 0:
        return
    parallel = settings.parallel
    if parallel is None and any(
        trial.config.data.sites and trial.config.ray.actors for trial in (*waiting, study.first)
    ):
        parallel = 1  # Actors at sites are outside placement groups, so parallel runs could deadlock.
    with _quiet_tune(), connect_ray(config.ray.address, quiet=True, local_cpus=_local_cpus(study, parallel)):
        on_cluster = compute_on_cluster if config.ray.address or os.environ.get("RAY_ADDRESS") else None
        needed = [study.make_corner_trial(values) for values in study.corners()] if settings.sequential else waiting
        prepare(needed, progress, on_cluster)
        groups = {str(bundles): bundles for bundles in (_make_bundles(study, trial) for trial in needed)}.values()
        for bundles in groups:
            check_trial_fits(bundles, config.ray.autoscale)
        slots = min(parallel or left, *(count_parallel(bundles, left) for bundles in groups))
        progress.message(f"{left} runs to do, {slots} at a time, in {study.folder}.")
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = "1" if settings.sequential else str(slots)
        Experiment(study, state, progress, run_config, parallel).fit()


def _make_bundles(study: Study, trial: Trial) -> list[Bundle]:
    return make_bundles(trial.config, study.settings.cpus, clients=0)


def _local_cpus(study: Study, parallel: int | None) -> int:
    """Return the CPUs of a local Ray: the CPUs of the machine, or more if the parallel runs reserve more."""
    machine, cpus = int(joblib.cpu_count()), study.settings.cpus
    actors = sum(bundle.get("CPU", 0.0) for bundle in _make_bundles(study, study.first)) - cpus
    reserved = (parallel or 1) * (cpus + actors) if actors <= machine else 0.0
    return max(machine, math.ceil(reserved))


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """Disable Ray Tune's logger files, tables, warnings, and handler of Ctrl-C."""
    variables = {
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_worker_niceness": "0",  # With Ray's default, trials of a local Ray starve on a busy machine.
        "TUNE_MAX_PENDING_TRIALS_PG": "1",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    }
    before = {name: os.environ.get(name) for name in variables}
    levels = {logger: logger.level for logger in map(logging.getLogger, ("ray.tune", "ray.train"))}
    os.environ.update(variables)
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


# -- former names, which warn until the next release -----------------------------------------------------------------


def _rename(former: str, function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Returned:
        name = f"{former.partition('_')[0]}_study"
        warnings.warn(f"raydfl.{former} is now raydfl.{name}. Use the new name.", FutureWarning, stacklevel=2)
        return function(*args, **kwargs)

    return call


def _run_sweep(
    sweep: Study, parallel: int | None = None, progress: Progress | None = None, run_config: RunConfig | None = None
) -> StudyResults:
    changes = {} if parallel is None else {"parallel": parallel}
    return run_study(replace(sweep, settings=sweep.settings.model_copy(update=changes)), progress, run_config)


load_sweep = _rename("load_sweep", load_study)
load_search = _rename("load_search", load_study)
run_sweep = _rename("run_sweep", _run_sweep)
run_search = _rename("run_search", run_study)
