"""Studies on Ray Tune: nothing is trained twice, a failing or lost trial stops no other, and an interruption changes no bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import pytest
from commands import Raydfl
from helpers import known
from ray import train, tune
from studies import StudyFile, leave

import raydfl as package
from raydfl.core.errors import InputError, RaydflError, ResourcesError, RunDirectoryError
from raydfl.core.lock import FileLock
from raydfl.engine.config import Config
from raydfl.experiments.experiment import Experiment, _make_search
from raydfl.experiments.load import load_study
from raydfl.experiments.run import _local_cpus, run_study
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Study, count_rounds
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, train_federation

ONE = {"axes": {"c": {"a": {}, "b": {"train.optimiser.lr": 0.05}}}, "repeat": {"run.seed": [1]}}
EVERY = {"train.rounds": 300, "evaluate.every": 300, "evaluate.clients": "none"}


def test_a_local_ray_has_the_cpus_of_the_machine_or_more(grid: StudyFile) -> None:
    here = int(joblib.cpu_count())
    assert _local_cpus(load_study(grid()), None) == here
    assert _local_cpus(load_study(grid()), here + 3) == here + 3
    assert _local_cpus(load_study(grid(cpus=here + 0.5)), None) == here + 1
    assert _local_cpus(load_study(grid(actors=here)), None) == here + 1
    assert _local_cpus(load_study(grid(actors=here + 1)), None) == here  # too many for this machine: refused later


def test_former_functions_warn(grid: StudyFile) -> None:
    with pytest.warns(FutureWarning, match=r"raydfl\.load_sweep is now raydfl\.load_study"):
        study = package.load_sweep(grid())
    for run in study.trials:
        leave(run, {"test model/accuracy": [0.5] * 3})
    with pytest.warns(FutureWarning, match=r"raydfl\.run_sweep is now raydfl\.run_study"):
        assert package.run_sweep(study, 2).complete  # nothing is left to train: no Ray is started


def test_two_processes_cannot_train_one_study(grid: StudyFile) -> None:
    study = load_study(grid(settings={"track.mlflow": False}))
    lock = FileLock(study.output(".lock"))
    lock.acquire(wait=0)
    with pytest.raises(RunDirectoryError, match="is in use by process"):
        run_study(study)
    lock.release()


def test_only_trials_that_are_not_over_are_left(search_file: StudyFile) -> None:
    study = load_study(search_file())
    state = StudyState.read(study)
    leave(study.trials[0], {})
    for trial, status in zip(study.trials[1:], ("stopped", "failed"), strict=False):
        state.note(trial, status)  # type: ignore[arg-type]
    assert [trial.draw for trial in StudyState.read(study).waiting] == ["trial-002", "trial-003"]
    more = load_study(search_file(), ["samples=6"])
    assert [trial.draw for trial in StudyState.read(more).waiting] == [f"trial-00{n}" for n in (2, 3, 4, 5)]


def test_recordings_that_cannot_be_used_are_named_before_anything_starts(grid: StudyFile, ray_session: None) -> None:
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


def test_a_trial_that_the_cluster_cannot_hold_is_refused(grid: StudyFile, ray_session: None) -> None:
    with pytest.raises(ResourcesError, match=r"a trial needs 5 CPU \(its own process and 4 client actors\)"):
        run_study(load_study(grid(actors=4, settings={"track.mlflow": False})))


def test_points_without_a_domain_of_the_file_are_skipped_with_a_message(
    search_file: StudyFile, capsys: pytest.CaptureFixture[str]
) -> None:
    former = load_study(search_file(searcher="optuna", domains={"method.mu": {"uniform": [0, 1]}}))
    StudyState(former).note(former.trial({"method.mu": 0.1}), "stopped")
    with Progress("lines") as progress:
        assert not run_study(load_study(search_file(searcher="optuna")), progress, table_only=True).contestants
    assert "skipped: 1 trial of an earlier version of the file" in capsys.readouterr().out


def test_optuna_learns_from_failures_and_not_from_points_outside_the_domains(search_file: StudyFile) -> None:
    pytest.importorskip("optuna")
    study = load_study(search_file(searcher="optuna"))
    state = StudyState(study)
    for mu, loss in ((0.1, 0.5), (0.2, float("nan")), (5.0, 0.1)):
        trial = study.trial({"method.mu": mu, "train.optimiser.lr": 0.1})
        leave(trial, {"validation model/loss": [loss] * 4})
        state.note(trial, "finished")
    for mu in (0.3, 6.0):
        state.note(study.trial({"method.mu": mu, "train.optimiser.lr": 0.1}), "running")
    searcher, _ = _make_search(study, state)
    trials = searcher._ot_study.trials
    assert [(each.params["method.mu"], each.value) for each in trials if each.params] == [(0.1, 0.5), (0.2, 1e9)]
    begun = [each.system_attrs["fixed_params"]["method.mu"] for each in trials if not each.params]
    assert begun == [0.3]


def test_optuna_does_not_draw_again_what_was_trained(search_file: StudyFile) -> None:
    pytest.importorskip("optuna")
    study = load_study(search_file(searcher="optuna"))
    state = StudyState(study)
    drawn = _make_search(study, state)[0].suggest("first")
    trial = study.trial(drawn)
    leave(trial, {"validation model/loss": [0.5] * 4})
    state.note(trial, "finished")
    assert _make_search(study, state)[0].suggest("second") != drawn


def test_an_experiment_with_other_settings_is_not_restored(search_file: StudyFile) -> None:
    changes: list[dict[str, Any]] = [{"metric": {"score": "accuracy"}}, {"metric": {"score": "loss", "mode": "max"}}]
    changes += [{"parallel": 2}, {"retries": 1}, {"actors": 2}, {"cpus": 2}, {}]
    names = set()
    for change in changes:
        study = load_study(search_file(**change))
        experiment = Experiment(study, StudyState(study), Progress("quiet"), None, study.settings.parallel)
        names.add(experiment._locate()[1])
    assert len(names) == len(changes)


def test_a_new_population_names_the_members_that_it_replaces(
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


# -- with Ray Tune ---------------------------------------------------------------------------------------------------


def _command(file: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raydfl", "study", str(file), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _until(process: subprocess.Popen[str], happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not happens():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_trains_four_runs_side_by_side_and_survives_ctrl_c(
    grid: StudyFile, tmp_path: Path, raydfl: Raydfl
) -> None:
    axes = {"c": {"a": {}, "b": {"train.optimiser.lr": 0.05}}}
    file = grid(axes=axes, settings={"train.rounds": 60, "evaluate.every": 10})
    process = _command(file, "--parallel", "2")
    _until(process, lambda: list((tmp_path / "runs").glob("*/commits")))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert "Run the same command to continue them" in out
    assert list((tmp_path / "runs" / "tune").glob("grid-*/experiment_state-*.json"))
    before = {run.name for run in load_study(file).trials if run.finished}
    assert len(before) < 4
    said = raydfl("sweep", file, "--parallel", "2")
    assert said.code == 0, said.out + said.err
    assert all(run.finished for run in load_study(file).trials)
    assert not (tmp_path / "runs" / "tune").exists()
    assert raydfl("sweep", file).out.startswith("4 of 4 runs are finished already")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_a_search_whose_driver_was_killed_is_restored_to_the_same_bits(
    search_file: StudyFile, tmp_path: Path, tiny: Callable[..., Config], searcher: str
) -> None:
    asha = {"name": "asha", "grace": 10, "factor": 2}
    settings = {"train.rounds": 40, "evaluate.every": 5, "track.mlflow": False}
    file = search_file(scheduler=asha, searcher=searcher, settings=settings, rounds=None, samples=4, parallel=2)
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "0"
    try:
        process = _command(file)
        folder = tmp_path / "search"
        _until(process, lambda: any(count_rounds(each.parent) > 11 for each in folder.glob("trial-*/LATEST")))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert list((folder / "tune").glob("few-*/experiment_state-*.json"))
        restored = _command(file)
        out, _ = restored.communicate(timeout=600)
    finally:
        del os.environ["TUNE_GLOBAL_CHECKPOINT_S"]
    assert restored.returncode == 0, out
    assert "cannot restore" not in out
    state = StudyState.read(load_study(file))
    assert len(state.known) == 4
    assert all(state.is_over(trial) for trial in state.known)
    assert any(state.get(trial).status == "finished" for trial in state.known)
    for number, trial in enumerate(state.known):
        rounds = count_rounds(trial.run_dir)
        own = [f"{key}={value}" for key, value in trial.values.items()]
        alone = tiny("evaluate.every=5", f"train.rounds={rounds}", f"run.name=alone-{number}", *own, method="fedprox")
        assert_same_bits(read_tensors(trial.run_dir), train_federation(alone))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_have_the_bits_of_runs_alone_with_actors_or_without(
    grid: StudyFile, ray_session: None, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """A failing cell among them stops no other, and its traceback is in the log."""
    extra = Path(__file__).parents[1] / "extra_methods.py"
    broken = {"method": {"name": f"{extra}:Failing", "client": "s0"}, "train.cohort": 1.0}
    axes = {"c": {"a": {}, "broken": broken, "b": {"train.optimiser.lr": 0.05}}}
    done = []
    for actors, folder in ((0, "alone"), (1, "actors")):
        place = tmp_path / folder
        study = load_study(grid(axes=axes, repeat={"run.seed": [1]}, dir=str(place), actors=actors))
        results = run_study(study)
        assert [name.partition(",")[0] for name in results.failed] == ["broken"]
        assert "raydfl replay" in next(iter(results.failed.values()))
        assert "Traceback" in next((place / "logs").glob("broken-*.log")).read_text()
        done.append([run for run in study.trials if run.finished])
    assert [len(runs) for runs in done] == [2, 2]
    for alone, with_actors in zip(*done, strict=True):
        assert alone.identity == with_actors.identity
        assert_same_bits(read_tensors(alone.run_dir), read_tensors(with_actors.run_dir))
    assert_same_bits(read_tensors(done[0][0].run_dir), known(tiny()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_process_is_killed_continues_to_the_same_bits(
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
    said = capsys.readouterr().out
    assert said.count("started: ") == said.count("lost: a, run.seed=1; ") == 1
    alone = tiny(*(f"{key}={value}" for key, value in EVERY.items()), "run.name=alone")
    assert_same_bits(read_tensors(study.trials[0].run_dir), train_federation(alone))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resources_that_others_hold_are_waited_for_and_then_named(search_file: StudyFile, ray_session: None) -> None:
    import ray

    held = ray.util.placement_group([{"CPU": 4}])
    settings = {"track.mlflow": False}
    try:
        ray.get(held.ready(), timeout=60)
        study = load_study(search_file(samples=1, settings=settings), ["ray.ready_timeout=3"])
        with pytest.raises(
            ResourcesError,
            match=r"no trial could start within 3 s .* 0 CPU and 1 GPU of the cluster's 4 CPU and 1 GPU are free",
        ):
            run_study(study)
    finally:
        ray.util.remove_placement_group(held)
    assert run_study(study).complete  # the same command continues


class Seen(tune.Callback):
    """A user's callback: the trials that it saw complete, in a file, for Ray Tune copies callbacks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{trial}\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_storage_callbacks_and_failures_are_those_of_rays_run_config(
    grid: StudyFile, search_file: StudyFile, ray_session: None, tmp_path: Path
) -> None:
    study = load_study(grid(**ONE))
    own = tune.RunConfig(name="mine", storage_path=str(tmp_path / "tune"), callbacks=[Seen(tmp_path / "seen")])
    assert run_study(study, run_config=own).complete
    assert sorted((tmp_path / "seen").read_text().split()) == sorted(run.run_dir.name for run in study.trials)
    assert list((tmp_path / "tune" / "mine").glob("experiment_state-*.json"))
    assert not (study.folder / "tune").exists()
    trained = train.RunConfig(
        name="search", storage_path=str(tmp_path / "tune"), failure_config=train.FailureConfig(max_failures=1)
    )
    assert run_study(load_study(search_file(samples=1, rounds=2)), run_config=trained).complete
    assert list((tmp_path / "tune" / "search").glob("experiment_state-*.json"))
    more = run_study(load_study(search_file(samples=2, rounds=2)), run_config=trained)
    assert more.complete
    assert len(more.contestants) == 2


def test_failures_are_handled_as_rays_run_config_says(
    grid: StudyFile, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool | str]] = []

    class Tuner:
        def __init__(self, *_: Any, run_config: tune.RunConfig, **__: Any) -> None:
            found = run_config.failure_config
            assert found is not None
            asked.append((found.max_failures, found.fail_fast))
            raise ValueError("nothing is trained here")

        @staticmethod
        def can_restore(path: str) -> bool:
            return False

    monkeypatch.setattr(tune, "Tuner", Tuner)
    never, fast = tune.FailureConfig(max_failures=0), tune.FailureConfig(fail_fast=True)
    for settings, given in [
        ({}, None),
        ({"retries": 2}, None),
        ({}, tune.RunConfig(failure_config=never)),
        ({"retries": 2}, tune.RunConfig()),
        ({"retries": 2}, tune.RunConfig(failure_config=fast)),
        ({"retries": 2}, train.RunConfig(failure_config=train.FailureConfig(max_failures=5))),
    ]:
        with pytest.raises(RaydflError, match="nothing is trained here"):
            run_study(load_study(grid(**ONE, **settings)), run_config=given)
    assert asked == [(3, False), (2, False), (0, False), (2, False), (0, True), (5, False)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_population_continues_from_copies_of_its_best(search_file: StudyFile, ray_session: None) -> None:
    """Ray Tune's own scheduler draws without a seed: any member that copied has the history of its parents."""
    pbt = {"name": "pbt", "interval": 2, "share": 0.5, "resample": 0.0}
    file = search_file(scheduler=pbt, samples=3, rounds=6, parallel=None, repeat={"run.seed": [5]})
    study = load_study(file)
    results = run_study(study)
    assert results.complete
    assert [each.rounds for each in results.contestants] == [6] * 3
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
    found = client.search_runs([client.get_experiment_by_name("raydfl").experiment_id])
    parent = StudyState.read(study).mlflow
    below = {run.info.run_name for run in found if run.data.tags.get("mlflow.parentRunId") == parent}
    names = {trial.run_dir.name for trial in load_study(search_file(samples=3, rounds=2), ["track.mlflow=true"]).trials}
    assert (len(found), below) == (4, names)
    assert {item.path for item in client.list_artifacts(parent)} >= {"few.html", "few.csv", "few.tex", "few-best.yaml"}


def test_trials_with_data_at_sites_end_as_they_do_alone(
    search_file: StudyFile, tmp_path: Path, ray_session: None
) -> None:
    sites = f"data.sites={{north: {{speakers: 3, folder: {tmp_path}/n}}, south: {{first: 9, folder: {tmp_path}/s}}}}"
    study = load_study(search_file(samples=2), [sites, "train.rounds=2"])
    assert run_study(study, progress=Progress("quiet")).complete
    for trial in study.trials:
        alone = trial.config.run.model_copy(update={"name": f"alone-{trial.run_dir.name}", "dir": str(tmp_path)})
        config = trial.config.model_copy(update={"run": alone})
        assert_same_bits(train_federation(config), read_tensors(trial.run_dir))
