"""Studies on Ray Tune: no run is trained twice, a failed or lost trial stops no other trial, and interruptions keep the bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import joblib
import pytest
from commands import Raydfl
from helpers import known
from ray import train, tune
from ray.tune.schedulers import PopulationBasedTraining
from studies import StudyFile, write_run_folder

import raydfl as package
from raydfl.core.errors import InputError, RaydflError, ResourcesError, RunDirectoryError
from raydfl.core.lock import FileLock
from raydfl.engine.config import Config
from raydfl.experiments.experiment import Experiment, _make_scheduler, _make_search
from raydfl.experiments.load import load_study
from raydfl.experiments.run import _local_cpus, run_study
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Study, count_rounds
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, train_federation

ONE = {"axes": {"c": {"a": {}, "b": {"train.optimiser.lr": 0.05}}}, "repeat": {"run.seed": [1]}}
EVERY = {"train.rounds": 300, "evaluate.every": 300, "evaluate.clients": "none"}


def test_a_local_ray_has_at_least_the_cpus_of_the_machine(grid: StudyFile) -> None:
    cpus = int(joblib.cpu_count())
    assert _local_cpus(load_study(grid()), None) == cpus
    assert _local_cpus(load_study(grid()), cpus + 3) == cpus + 3
    assert _local_cpus(load_study(grid(cpus=cpus + 0.5)), None) == cpus + 1
    assert _local_cpus(load_study(grid(actors=cpus)), None) == cpus + 1
    assert _local_cpus(load_study(grid(actors=cpus + 1)), None) == cpus  # too many for this machine, rejected later


def test_former_functions_warn(grid: StudyFile) -> None:
    with pytest.warns(FutureWarning, match=r"raydfl\.load_sweep is now raydfl\.load_study"):
        study = package.load_sweep(grid())
    for run in study.trials:
        write_run_folder(run, {"test model/accuracy": [0.5] * 3})
    with pytest.warns(FutureWarning, match=r"raydfl\.run_sweep is now raydfl\.run_study"):
        assert package.run_sweep(study, 2).complete  # Ray does not start if nothing is left to train


def test_two_processes_cannot_train_the_same_study(grid: StudyFile) -> None:
    study = load_study(grid(settings={"track.mlflow": False}))
    lock = FileLock(study.output(".lock"))
    lock.acquire(wait=0)
    with pytest.raises(RunDirectoryError, match="is in use by process"):
        run_study(study)
    lock.release()


def test_only_unfinished_trials_are_waiting(search_file: StudyFile) -> None:
    study = load_study(search_file())
    state = StudyState.read(study)
    write_run_folder(study.trials[0], {})
    for trial, status in zip(study.trials[1:], ("stopped", "failed"), strict=False):
        state.note(trial, status)  # type: ignore[arg-type]
    assert [trial.draw for trial in StudyState.read(study).waiting] == ["trial-002", "trial-003"]
    more = load_study(search_file(), ["samples=6"])
    assert [trial.draw for trial in StudyState.read(more).waiting] == [f"trial-00{n}" for n in (2, 3, 4, 5)]


def test_unusable_recordings_are_named_before_training(grid: StudyFile, ray_session: None) -> None:
    axes = {
        "data": {"there": {}, "gone": {"data": {"name": "fsdd", "root": "/nowhere"}}, "small": {"train.cohort": 50}}
    }
    study = load_study(grid(axes=axes, settings={"track.mlflow": False}))
    with pytest.raises(InputError) as error:
        run_study(study)
    assert "4 of 6 runs have unusable data. No run was started." in str(error.value)
    assert "gone, run.seed=1 and 1 more: " in str(error.value)
    assert "small, run.seed=1 and 1 more: train.cohort: 50 clients a round, but the population has 6" in str(
        error.value
    )
    assert not any(run.run_dir.exists() for run in study.trials)


def test_a_trial_larger_than_the_cluster_is_rejected(grid: StudyFile, ray_session: None) -> None:
    with pytest.raises(ResourcesError, match=r"a trial needs 5 CPU \(its own process and 4 client actors\)"):
        run_study(load_study(grid(actors=4, settings={"track.mlflow": False})))


def test_points_outside_the_domains_are_skipped_with_a_message(
    search_file: StudyFile, capsys: pytest.CaptureFixture[str]
) -> None:
    former = load_study(search_file(searcher="optuna", domains={"method.mu": {"uniform": [0, 1]}}))
    StudyState(former).note(former.trial({"method.mu": 0.1}), "stopped")
    with Progress("lines") as progress:
        assert not run_study(load_study(search_file(searcher="optuna")), progress, table_only=True).contestants
    assert "skipped: 1 trial of an earlier version of the file" in capsys.readouterr().out


def test_optuna_learns_from_failures_but_ignores_points_outside_the_domains(search_file: StudyFile) -> None:
    pytest.importorskip("optuna")
    study = load_study(search_file(searcher="optuna"))
    state = StudyState(study)
    for mu, loss in ((0.1, 0.5), (0.2, float("nan")), (5.0, 0.1)):
        trial = study.trial({"method.mu": mu, "train.optimiser.lr": 0.1})
        write_run_folder(trial, {"validation model/loss": [loss] * 4})
        state.note(trial, "finished")
    for mu in (0.3, 6.0):
        state.note(study.trial({"method.mu": mu, "train.optimiser.lr": 0.1}), "running")
    searcher, _ = _make_search(study, state)
    trials = searcher._ot_study.trials
    assert [(trial.params["method.mu"], trial.value) for trial in trials if trial.params] == [(0.1, 0.5), (0.2, 1e9)]
    running = [trial.system_attrs["fixed_params"]["method.mu"] for trial in trials if not trial.params]
    assert running == [0.3]


def test_optuna_does_not_draw_trained_points_again(search_file: StudyFile) -> None:
    pytest.importorskip("optuna")
    study = load_study(search_file(searcher="optuna"))
    state = StudyState(study)
    point = _make_search(study, state)[0].suggest("first")
    trial = study.trial(point)
    write_run_folder(trial, {"validation model/loss": [0.5] * 4})
    state.note(trial, "finished")
    assert _make_search(study, state)[0].suggest("second") != point


def test_an_experiment_with_different_settings_is_not_restored(search_file: StudyFile) -> None:
    changes: list[dict[str, Any]] = [{"metric": {"score": "accuracy"}}, {"metric": {"score": "loss", "mode": "max"}}]
    changes += [{"parallel": 2}, {"retries": 1}, {"actors": 2}, {"cpus": 2}, {}]
    names = set()
    for change in changes:
        study = load_study(search_file(**change))
        experiment = Experiment(study, StudyState(study), Progress("quiet"), None, study.settings.parallel)
        names.add(experiment._locate()[1])
    assert len(names) == len(changes)


def test_a_new_population_reports_the_replaced_members(
    search_file: StudyFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study(search_file(scheduler={"name": "pbt", "interval": 2}))
    state = StudyState(study)
    for number, status in enumerate(("finished", "failed")):
        state.note(study.trial(study.draw(number), f"m{number}"), status)  # type: ignore[arg-type]
    monkeypatch.setattr(tune, "Tuner", lambda *_, **__: None)
    with Progress("lines") as progress:
        Experiment(study, state, progress, None, None)._make_tuner("", "", None)  # type: ignore[arg-type]
    assert (
        "A new population starts. The results omit the 2 members of the last population (1 finished)."
        in capsys.readouterr().out
    )


class _Controller:
    """The part of Ray Tune's controller that its scheduler uses. Members train in turn until the scheduler pauses them."""

    search_alg = None

    def __init__(self, scheduler: PopulationBasedTraining, first: Sequence[int]) -> None:
        self.scheduler = scheduler
        self.trials = [tune.experiment.trial.Trial("member", stub=True, config={"method.mu": 0.1}) for _ in first]
        self.rounds = dict(zip(self.trials, first, strict=True))
        for trial in self.trials:
            scheduler.on_trial_add(self, trial)  # type: ignore[arg-type]

    def get_trials(self) -> list[Any]:
        return self.trials

    def get_live_trials(self) -> list[Any]:
        return [trial for trial in self.trials if not trial.is_finished()]

    def _schedule_trial_save(self, trial: Any, result: dict[str, Any]) -> None:
        """Save nothing, so no member copies another."""

    def train(self, every: int, last: Sequence[int]) -> None:
        """Train the members. Member k reports every ``every`` rounds, and ends after ``last[k]`` rounds."""
        while self.get_live_trials():
            trial = self.scheduler.choose_trial_to_run(self)  # type: ignore[arg-type]
            assert trial is not None, f"no member may train, after rounds {list(self.rounds.values())}"
            number, status = self.trials.index(trial), "RUNNING"
            while status == "RUNNING":
                trial.set_status(status)
                self.rounds[trial] += every
                if self.rounds[trial] >= last[number]:
                    status = "TERMINATED"
                else:
                    result = {"round": self.rounds[trial], "score": float(number)}
                    decision = self.scheduler.on_trial_result(self, trial, result)  # type: ignore[arg-type]
                    status = "RUNNING" if decision == "CONTINUE" else "PAUSED"
            trial.set_status(status)


@pytest.mark.parametrize(
    ("first", "every", "last"),
    [
        ((0, 0), 1, (12, 12)),
        ((5, 5), 1, (12, 12)),  # restored after round 5: both report round 6, which is the second exchange
        ((0, 0), 2, (24, 24)),  # exchanges after rounds 4, 8 and 12
        ((0, 0), 1, (12, 5)),  # the second member fails while the first waits for it
    ],
)
def test_members_of_a_population_never_wait_forever(
    search_file: StudyFile, first: Sequence[int], every: int, last: Sequence[int]
) -> None:
    study = load_study(search_file(scheduler={"name": "pbt", "interval": 3, "share": 0.5}, rounds=24))
    scheduler = _make_scheduler(study)
    assert isinstance(scheduler, PopulationBasedTraining)
    scheduler.set_search_properties("score", "max")
    controller = _Controller(scheduler, first)
    controller.train(every, last)
    assert tuple(controller.rounds.values()) == tuple(last)


@pytest.mark.parametrize("started", [False, True])
def test_only_an_error_before_the_first_trial_starts_a_new_experiment(
    grid: StudyFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    study = load_study(grid())
    with Progress("lines") as progress:
        watch = SimpleNamespace(error=None, has_started=started)
        experiment = Experiment(study, StudyState(study), progress, None, None)
        tuner = Mock()
        tuner.can_restore.return_value = True
        tuner.restore.return_value.fit.side_effect = KeyError("trial_data")
        monkeypatch.setattr(tune, "Tuner", tuner)
        with pytest.raises(KeyError) if started else contextlib.nullcontext():
            experiment._continue("tune/few", watch)  # type: ignore[arg-type]
    warned = "warning: Ray Tune cannot restore tune/few (KeyError: 'trial_data')." in capsys.readouterr().out
    assert warned != started


# -- with Ray Tune ---------------------------------------------------------------------------------------------------


def _start_command(file: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raydfl", "study", str(file), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _wait_until(process: subprocess.Popen[str], happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not happens():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_trains_runs_in_parallel_and_continues_after_ctrl_c(
    grid: StudyFile, tmp_path: Path, raydfl: Raydfl
) -> None:
    axes = {"c": {"a": {}, "b": {"train.optimiser.lr": 0.05}}}
    file = grid(axes=axes, settings={"train.rounds": 60, "evaluate.every": 10})
    process = _start_command(file, "--parallel", "2")
    _wait_until(process, lambda: list((tmp_path / "runs").glob("*/commits")))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert "Run the same command to continue them" in out
    assert list((tmp_path / "runs" / "tune").glob("grid-*/experiment_state-*.json"))
    before = {run.name for run in load_study(file).trials if run.finished}
    assert len(before) < 4
    result = raydfl("sweep", file, "--parallel", "2")
    assert result.code == 0, result.out + result.err
    assert all(run.finished for run in load_study(file).trials)
    assert not (tmp_path / "runs" / "tune").exists()
    assert raydfl("sweep", file).out.startswith("4 of 4 runs are finished already")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("searcher", "cut"),
    [("random", ""), ("optuna", ""), ("random", "experiment_state-*")],
)
def test_a_search_with_a_killed_driver_is_restored_to_the_same_bits(
    search_file: StudyFile, tmp_path: Path, tiny: Callable[..., Config], searcher: str, cut: str
) -> None:
    """If the driver was killed while it wrote Ray Tune's state (``cut``), trials resume from their run folders."""
    asha = {"name": "asha", "grace": 10, "factor": 2}
    settings = {"train.rounds": 40, "evaluate.every": 5, "track.mlflow": False}
    file = search_file(scheduler=asha, searcher=searcher, settings=settings, rounds=None, samples=4, parallel=2)
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "0"
    try:
        process = _start_command(file)
        folder = tmp_path / "search"
        _wait_until(process, lambda: any(count_rounds(path.parent) > 11 for path in folder.glob("trial-*/LATEST")))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert list((folder / "tune").glob("few-*/experiment_state-*.json"))
        damaged = list((folder / "tune").glob(f"few-*/{cut}")) if cut else []
        for state_file in damaged:
            state_file.write_bytes(state_file.read_bytes()[: state_file.stat().st_size // 2])
        process = _start_command(file)
        out, _ = process.communicate(timeout=600)
    finally:
        del os.environ["TUNE_GLOBAL_CHECKPOINT_S"]
    assert process.returncode == 0, out
    assert bool(damaged) == bool(cut)
    assert ("warning: Ray Tune cannot restore" in out) == bool(cut)
    state = StudyState.read(load_study(file))
    assert len(state.known) == 4
    assert all(state.is_over(trial) for trial in state.known)
    assert any(state.get(trial).status == "finished" for trial in state.known)
    for number, trial in enumerate(state.known):
        rounds = count_rounds(trial.run_dir)
        overrides = [f"{key}={value}" for key, value in trial.values.items()]
        alone = tiny(
            "evaluate.every=5", f"train.rounds={rounds}", f"run.name=alone-{number}", *overrides, method="fedprox"
        )
        assert_same_bits(read_tensors(trial.run_dir), train_federation(alone))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_of_a_study_have_the_bits_of_single_runs_with_and_without_actors(
    grid: StudyFile, ray_session: None, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """A failing cell stops no other cell, and its traceback is in the log."""
    extra = Path(__file__).parents[1] / "extra_methods.py"
    broken = {"method": {"name": f"{extra}:Failing", "client": "s0"}, "train.cohort": 1.0}
    axes = {"c": {"a": {}, "broken": broken, "b": {"train.optimiser.lr": 0.05}}}
    finished = []
    for actors, folder in ((0, "alone"), (1, "actors")):
        runs_folder = tmp_path / folder
        study = load_study(grid(axes=axes, repeat={"run.seed": [1]}, dir=str(runs_folder), actors=actors))
        results = run_study(study)
        assert [name.partition(",")[0] for name in results.failed] == ["broken"]
        assert "raydfl replay" in next(iter(results.failed.values()))
        assert "Traceback" in next((runs_folder / "logs").glob("broken-*.log")).read_text()
        finished.append([run for run in study.trials if run.finished])
    assert [len(runs) for runs in finished] == [2, 2]
    for alone, with_actors in zip(*finished, strict=True):
        assert alone.identity == with_actors.identity
        assert_same_bits(read_tensors(alone.run_dir), read_tensors(with_actors.run_dir))
    assert_same_bits(read_tensors(finished[0][0].run_dir), known(tiny()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_a_killed_process_continues_to_the_same_bits(
    grid: StudyFile, ray_session: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: Callable[..., Config]
) -> None:
    study = load_study(grid(axes={"c": {"a": {}}}, repeat={"run.seed": [1]}, settings=EVERY))

    def kill(run_dir: Path) -> None:
        while count_rounds(run_dir) < 2:
            time.sleep(0.005)
        os.kill(int((run_dir / ".driver.lock").read_text().split()[0]), signal.SIGKILL)

    threading.Thread(target=kill, args=(study.trials[0].run_dir,), daemon=True).start()
    with Progress("lines") as progress:
        assert run_study(study, progress).complete
    output = capsys.readouterr().out
    assert output.count("started: ") == output.count("lost: a, run.seed=1. ") == 1
    alone = tiny(*(f"{key}={value}" for key, value in EVERY.items()), "run.name=alone")
    assert_same_bits(read_tensors(study.trials[0].run_dir), train_federation(alone))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_occupied_resources_are_awaited_and_then_reported(search_file: StudyFile, ray_session: None) -> None:
    import ray

    resources = ray.util.placement_group([{"CPU": 4}])
    settings = {"track.mlflow": False}
    try:
        ray.get(resources.ready(), timeout=60)
        study = load_study(search_file(samples=1, settings=settings), ["ray.ready_timeout=3", "ray.queue=false"])
        with pytest.raises(
            ResourcesError,
            match=r"no trial could start within 3 s .* 0 CPU and 1 GPU of the cluster's 4 CPU and 1 GPU are free",
        ):
            run_study(study)
    finally:
        ray.util.remove_placement_group(resources)
    assert run_study(study).complete  # the same command continues the study


class RecordingCallback(tune.Callback):
    """A user's callback that appends each completed trial to a file, because Ray Tune copies callbacks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{trial}\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_storage_and_callbacks_of_rays_run_config_are_used(
    grid: StudyFile, search_file: StudyFile, ray_session: None, tmp_path: Path
) -> None:
    study = load_study(grid(**ONE))
    run_config = tune.RunConfig(
        name="mine", storage_path=str(tmp_path / "tune"), callbacks=[RecordingCallback(tmp_path / "seen")]
    )
    assert run_study(study, run_config=run_config).complete
    assert sorted((tmp_path / "seen").read_text().split()) == sorted(run.run_dir.name for run in study.trials)
    assert list((tmp_path / "tune" / "mine").glob("experiment_state-*.json"))
    assert not (study.folder / "tune").exists()
    search_config = train.RunConfig(
        name="search", storage_path=str(tmp_path / "tune"), failure_config=train.FailureConfig(max_failures=1)
    )
    assert run_study(load_study(search_file(samples=1, rounds=2)), run_config=search_config).complete
    assert list((tmp_path / "tune" / "search").glob("experiment_state-*.json"))
    more = run_study(load_study(search_file(samples=2, rounds=2)), run_config=search_config)
    assert more.complete
    assert len(more.contestants) == 2


def test_failure_limits_of_rays_run_config_are_used(
    grid: StudyFile, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure_limits: list[tuple[int, bool | str]] = []

    class Tuner:
        def __init__(self, *_: Any, run_config: tune.RunConfig, **__: Any) -> None:
            failure_config = run_config.failure_config
            assert failure_config is not None
            failure_limits.append((failure_config.max_failures, failure_config.fail_fast))
            raise ValueError("nothing is trained here")

        @staticmethod
        def can_restore(path: str) -> bool:
            return False

    monkeypatch.setattr(tune, "Tuner", Tuner)
    never, fast = tune.FailureConfig(max_failures=0), tune.FailureConfig(fail_fast=True)
    for settings, run_config in [
        ({}, None),
        ({"retries": 2}, None),
        ({}, tune.RunConfig(failure_config=never)),
        ({"retries": 2}, tune.RunConfig()),
        ({"retries": 2}, tune.RunConfig(failure_config=fast)),
        ({"retries": 2}, train.RunConfig(failure_config=train.FailureConfig(max_failures=5))),
    ]:
        with pytest.raises(RaydflError, match="nothing is trained here"):
            run_study(load_study(grid(**ONE, **settings)), run_config=run_config)
    assert failure_limits == [(3, False), (2, False), (0, False), (2, False), (0, True), (5, False)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_population_continues_from_copies_of_its_best_members(
    search_file: StudyFile, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Tune's scheduler draws without a seed, so any copied member has the history of its parents.

    The driver is killed in the middle.
    """
    pbt = {"name": "pbt", "interval": 2, "share": 0.5, "resample": 0.0}
    settings = {"track.mlflow": False}
    file = search_file(scheduler=pbt, samples=3, rounds=6, parallel=None, repeat={"run.seed": [5]}, settings=settings)
    study = load_study(file)
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")
    process = _start_command(file)
    _wait_until(process, lambda: any(count_rounds(path.parent) >= 3 for path in study.folder.glob("trial-*/LATEST")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    results = run_study(study)
    assert results.complete
    assert [contestant.rounds for contestant in results.contestants] == [6] * 3
    members = [json.loads((trial.run_dir / "run.json").read_text()) for trial in StudyState.read(study).known]
    assert any(member.get("branches") for member in members)
    for trial in StudyState.read(study).known:
        assert all(0.05 <= trial.values[key] <= 1.0 or key == "method.mu" for key in trial.values)
        assert json.loads((trial.run_dir / "run.json").read_text())["digest"] == trial.config.digest()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_study_and_its_runs_are_nested_in_mlflow(search_file: StudyFile, ray_session: None) -> None:
    from mlflow import MlflowClient

    study: Study = load_study(search_file(samples=2, rounds=2), ["track.mlflow=true"])
    assert run_study(study).complete
    assert run_study(load_study(search_file(samples=3, rounds=2), ["track.mlflow=true"])).complete
    client = MlflowClient(f"sqlite:///{study.folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("raydfl").experiment_id])
    parent = StudyState.read(study).mlflow
    children = {run.info.run_name for run in runs if run.data.tags.get("mlflow.parentRunId") == parent}
    names = {trial.run_dir.name for trial in load_study(search_file(samples=3, rounds=2), ["track.mlflow=true"]).trials}
    assert (len(runs), children) == (4, names)
    assert {item.path for item in client.list_artifacts(parent)} >= {"few.html", "few.csv", "few.tex", "few-best.yaml"}


def test_trials_with_data_at_sites_have_the_bits_of_single_runs(
    search_file: StudyFile, tmp_path: Path, ray_session: None
) -> None:
    sites = f"data.sites={{north: {{speakers: 3, folder: {tmp_path}/n}}, south: {{first: 9, folder: {tmp_path}/s}}}}"
    study = load_study(search_file(samples=2), [sites, "train.rounds=2"])
    assert run_study(study, progress=Progress("quiet")).complete
    for trial in study.trials:
        alone = trial.config.run.model_copy(update={"name": f"alone-{trial.run_dir.name}", "dir": str(tmp_path)})
        config = trial.config.model_copy(update={"run": alone})
        assert_same_bits(train_federation(config), read_tensors(trial.run_dir))
