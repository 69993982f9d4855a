"""raydfl.trainable in a user's own Tuner: settings, resources, checkpoints, and equal bits after the driver is killed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import differ

import raydfl
from raydfl.core.errors import ConfigError
from raydfl.engine.config import Config
from raydfl.experiments.federation import branch, make_trial_config, read_scores
from raydfl.experiments.study import count_rounds
from raydfl.testing import assert_same_bits, read_tensors, train_federation

LR = "train.optimiser.lr"


def _to_values(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def test_settings_of_the_tuner_override_the_configuration(tiny: Callable[..., Config]) -> None:
    base = _to_values(tiny(method="fedprox"))
    chosen = {"method.mu": np.float64(0.5), LR: 0.2, "train.local_epochs": np.int64(3)}
    config = make_trial_config(base, chosen)
    assert config.method == {"name": "fedprox", "mu": 0.5}
    assert (config.train.optimiser.lr, config.train.local_epochs) == (0.2, 3)
    assert config.digest() == tiny("method.mu=0.5", f"{LR}=0.2", "train.local_epochs=3", method="fedprox").digest()
    assert make_trial_config(base, {}).digest() == tiny(method="fedprox").digest()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train.optimiser.rate": 0.1}, "Did you mean|Choose one of"),
        ({"train": {"rounds": 3}}, "param_space: train would replace the whole group"),
        ({"method.mu": 0.5}, "mu"),
    ],
)
def test_invalid_settings_are_rejected(tiny: Callable[..., Config], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trial_config(_to_values(tiny()), settings)
    with pytest.raises(ConfigError, match=message):
        raydfl.trainable(tiny()).default_resource_request(settings)


def test_a_configuration_may_be_a_file_values_or_a_config(tiny: Callable[..., Config], tmp_path: Path) -> None:
    values = _to_values(tiny())
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    for configuration in (tmp_path / "config.yaml", str(tmp_path / "config.yaml"), values, tiny()):
        assert raydfl.trainable(configuration).order({}, "x").config.digest() == tiny().digest()
    with pytest.raises(ConfigError, match="is a URI"):
        raydfl.trainable(tiny("run.dir=s3://bucket/runs"))


def test_a_trial_requests_resources_for_its_process_and_its_actors(tiny: Callable[..., Config]) -> None:
    federation = raydfl.trainable(tiny("ray.actors=2", "ray.cpus=0.5"), cpus=2)
    assert federation.default_resource_request({}).bundles == [{"CPU": 2.0}, {"CPU": 0.5}, {"CPU": 0.5}]
    assert federation.default_resource_request({"ray.actors": 0}).bundles == [{"CPU": 2.0}]
    with pytest.raises(ConfigError, match="per_client"):
        federation.default_resource_request({"ray.actors": "per_client"})


@pytest.mark.slow
def test_a_checkpoint_continues_to_the_same_bits_or_with_another_rate(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """Restore the trial's own checkpoint, and a copy with another learning rate. Changed data are rejected."""
    federation = raydfl.trainable(tiny("train.rounds=4", "run.commit_every=3"))
    first = federation({LR: 0.2})
    results = [first.train(), first.train()]
    checkpoint = tmp_path / "checkpoint"
    first.save(str(checkpoint))
    first.train()
    first.stop()
    assert [result["round"] for result in results] == [1, 2]
    assert all({"loss", "test model/accuracy", "validation model/loss"} <= result.keys() for result in results)
    assert count_rounds(checkpoint) == 2

    again = federation({LR: 0.2})
    again.restore(str(checkpoint))
    rest = [again.train(), again.train()]
    again.stop()
    assert [(result["round"], result["done"]) for result in rest] == [(3, False), (4, True)]
    reference = tiny("train.rounds=4", f"{LR}=0.2", "run.name=undisturbed")
    assert_same_bits(read_tensors(Path(rest[-1]["run"])), train_federation(reference))
    assert raydfl.load_model(checkpoint).round == 2

    copy = federation({LR: 0.05})
    copy.restore(str(checkpoint))
    last = [copy.train(), copy.train()][-1]
    copy.stop()
    folder = Path(last["run"])
    assert differ(read_tensors(folder), read_tensors(Path(reference.run.dir) / "undisturbed"))
    assert json.loads((folder / "run.json").read_text())["branches"] == [
        {"run": results[0]["run"].rpartition("/")[2], "digest": reference.digest(), "round": 2}
    ]

    rejected = federation({"data.split.validation": 0.5})
    with pytest.raises(ConfigError, match=r"data\.split\.validation does not allow"):
        rejected.restore(str(checkpoint))
    rejected.stop()


def test_files_of_an_earlier_attempt_are_ignored_without_a_checkpoint(tiny: Callable[..., Config]) -> None:
    federation = raydfl.trainable(tiny("train.rounds=2"))
    trial = federation({LR: 0.2})
    trial.train()
    trial.stop()
    trial = federation({LR: 0.1})
    run_folder = Path(trial.train()["run"])
    trial.stop()
    assert count_rounds(run_folder) == 1
    assert "branches" not in json.loads((run_folder / "run.json").read_text())


def test_errors_of_a_trial_are_raised(tiny: Callable[..., Config]) -> None:
    trial = raydfl.trainable(tiny())({"train.cohort": 1000})
    with pytest.raises(raydfl.RaydflError):
        trial.train()
    trial.stop()


# -- with Ray Tune ---------------------------------------------------------------------------------------------------


TRIALS = {"asha": 3, "pbt": 2}
"""Number of trials in own_tuner.py, by scheduler."""


def _start_tuner(scheduler: str, folder: Path) -> subprocess.Popen[bytes]:
    variables = {"TUNE_GLOBAL_CHECKPOINT_S": "0", "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0"}
    program = str(Path(__file__).with_name("own_tuner.py"))
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, program, scheduler, str(folder)], env=os.environ | variables, stdout=log, stderr=log
        )


def _read_saved_rounds(place: Path) -> list[int]:
    """Return the last saved round of each trial. Tune repeats later rounds."""
    with contextlib.suppress(ValueError, EOFError, pickle.UnpicklingError):  # Tune may still be writing a file
        for file in place.glob("basic-variant-state-*.json"):
            pickle.loads(file.read_bytes())
        for file in place.glob("experiment_state-*.json"):
            trials = json.loads(file.read_text())["trial_data"]
            return [json.loads(runtime)["last_result"].get("round", 0) for _, runtime in trials]
    return []


def _kill_and_restore(scheduler: str, folder: Path, config: Config, rounds: int) -> list[dict[str, Any]]:
    """Run a Tuner, kill its driver after all trials are saved and any has trained, and return the restored results.

    Args:
        scheduler: Scheduler in own_tuner.py.
        folder: Folder of the Tuner.
        config: The common configuration of the trials.
        rounds: Rounds of the trial with the most rounds, at least.
    """
    (folder / "config.json").write_text(json.dumps(_to_values(config)))
    driver = _start_tuner(scheduler, folder)
    place = folder / "tune" / scheduler
    try:
        while True:
            assert driver.poll() is None, (folder / "log").read_text()[-3000:]
            # Tune cannot restore a half-written state, so the driver is killed between two states.
            driver.send_signal(signal.SIGSTOP)
            saved = _read_saved_rounds(place)
            if len(saved) == TRIALS[scheduler] and max(saved) >= rounds:
                break
            driver.send_signal(signal.SIGCONT)
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.wait()
    assert not (folder / "results.json").exists()
    assert _start_tuner(scheduler, folder).wait(timeout=600) == 0, (folder / "log").read_text()[-3000:]
    results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    assert [result["error"] for result in results] == [""] * len(results)
    return results


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trials_of_asha_have_the_bits_of_runs_alone(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny("train.rounds=4", "ray.actors=1", "ray.cpus=0.5")
    results = _kill_and_restore("asha", tmp_path, config, rounds=3)
    assert len(results) == 3
    assert max(result["metrics"]["round"] for result in results) == 4
    assert any(result["metrics"]["iterations_since_restore"] < result["metrics"]["round"] for result in results)
    for result in results:
        lr, rounds = result["settings"][LR], result["metrics"]["round"]
        alone = tiny(f"train.rounds={rounds}", f"{LR}={lr}", f"run.name=alone-{lr}")
        assert_same_bits(read_tensors(Path(result["checkpoint"])), train_federation(alone))
        assert raydfl.load_model(result["checkpoint"]).round == rounds
        scores = read_scores(Path(alone.run.dir) / f"alone-{lr}", rounds - 1)[rounds]
        assert result["metrics"]["test model/loss"] == scores["test model/loss"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trials_of_pbt_have_the_bits_of_their_successive_settings(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """Ray Tune's PBT draws without a seed, so each trial is repeated with its own successive settings."""
    config = tiny("train.rounds=6")
    # After three rounds, Ray 2.60 would restore members that wait for each other forever (see _PopulationBasedTraining).
    results = _kill_and_restore("pbt", tmp_path, config, rounds=2)
    lines = [line for file in (tmp_path / "tune" / "pbt").glob("*/result.json") for line in file.open()]
    settings_list = [json.loads(line)["config"] for line in lines] + [result["settings"] for result in results]
    settings_by_digest = {
        make_trial_config(_to_values(config), settings).digest(): settings for settings in settings_list
    }
    branches = 0
    for number, result in enumerate(results):
        assert result["metrics"]["round"] == 6
        about = json.loads((Path(result["checkpoint"]) / "run.json").read_text())
        before, folder = None, tmp_path
        for number_of_part, part in enumerate([*about.get("branches", []), {"digest": about["digest"], "round": 6}]):
            overrides = (
                f"run.name=alone-{number}-{number_of_part}",
                f"train.rounds={part['round']}",
                f"{LR}={settings_by_digest[part['digest']][LR]}",
            )
            config_of_part = tiny(*overrides)
            folder = Path(config_of_part.run.dir) / str(config_of_part.run.name)
            if before is not None:
                branch(before, folder, config_of_part)
                branches += 1
            train_federation(config_of_part)
            before = folder
        assert_same_bits(read_tensors(Path(result["checkpoint"])), read_tensors(folder))
    assert branches


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rays_mlflow_integration_logs_each_trial(
    tiny: Callable[..., Config], tmp_path: Path, ray_session: None
) -> None:
    from mlflow import MlflowClient
    from ray import tune
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tuner = tune.Tuner(
        raydfl.trainable(tiny("train.rounds=2")),
        param_space={LR: tune.grid_search([0.1, 0.2])},
        run_config=tune.RunConfig(
            name="mine",
            storage_path=str(tmp_path / "tune"),
            callbacks=[MLflowLoggerCallback(tracking_uri=uri, experiment_name="mine")],
            verbose=0,
        ),
    )
    results = {result.config[LR]: result for result in tuner.fit()}
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    runs = {float(run.data.params[LR]): run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == set(results) == {0.1, 0.2}
    for lr, run in runs.items():
        assert run.info.status == "FINISHED"
        scores = read_scores(Path(results[lr].metrics["run"]), 0)
        history = client.get_metric_history(run.info.run_id, "test model/accuracy")
        assert [item.value for item in history] == [scores[round_]["test model/accuracy"] for round_ in (1, 2)]
        assert raydfl.load_model(results[lr].checkpoint.path).round == 2
