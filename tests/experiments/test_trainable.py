"""raydfl.trainable in a user's own Tuner: settings, resources, checkpoints, and the same bits after the driver was killed."""

from __future__ import annotations

import contextlib
import json
import os
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


def _plain(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def test_what_the_tuner_chose_lies_over_the_configuration(tiny: Callable[..., Config]) -> None:
    base = _plain(tiny(method="fedprox"))
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
def test_settings_that_make_no_configuration_are_refused(
    tiny: Callable[..., Config], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trial_config(_plain(tiny()), settings)
    with pytest.raises(ConfigError, match=message):
        raydfl.trainable(tiny()).default_resource_request(settings)


def test_a_configuration_may_be_a_file_plain_data_or_checked(tiny: Callable[..., Config], tmp_path: Path) -> None:
    values = _plain(tiny())
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    for given in (tmp_path / "config.yaml", str(tmp_path / "config.yaml"), values, tiny()):
        assert raydfl.trainable(given).order({}, "x").config.digest() == tiny().digest()
    with pytest.raises(ConfigError, match="is a URI"):
        raydfl.trainable(tiny("run.dir=s3://bucket/runs"))


def test_a_trial_asks_for_its_own_process_and_its_actors(tiny: Callable[..., Config]) -> None:
    federation = raydfl.trainable(tiny("ray.actors=2", "ray.cpus=0.5"), cpus=2)
    assert federation.default_resource_request({}).bundles == [{"CPU": 2.0}, {"CPU": 0.5}, {"CPU": 0.5}]
    assert federation.default_resource_request({"ray.actors": 0}).bundles == [{"CPU": 2.0}]
    with pytest.raises(ConfigError, match="per_client"):
        federation.default_resource_request({"ray.actors": "per_client"})


def test_a_checkpoint_goes_on_to_the_same_bits_or_with_other_rates(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """As the trial's own state, whatever its folder held; and of another one with other rates, but no other data."""
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
    undisturbed = tiny("train.rounds=4", f"{LR}=0.2", "run.name=undisturbed")
    assert_same_bits(read_tensors(Path(rest[-1]["run"])), train_federation(undisturbed))
    assert raydfl.load_model(checkpoint).round == 2

    other = federation({LR: 0.05})
    other.restore(str(checkpoint))
    last = [other.train(), other.train()][-1]
    other.stop()
    folder = Path(last["run"])
    assert differ(read_tensors(folder), read_tensors(Path(undisturbed.run.dir) / "undisturbed"))
    assert json.loads((folder / "run.json").read_text())["branches"] == [
        {"run": results[0]["run"].rpartition("/")[2], "digest": undisturbed.digest(), "round": 2}
    ]

    refused = federation({"data.split.validation": 0.5})
    with pytest.raises(ConfigError, match=r"data\.split\.validation does not allow"):
        refused.restore(str(checkpoint))
    refused.stop()


def test_what_an_earlier_attempt_left_does_not_count_without_a_checkpoint(tiny: Callable[..., Config]) -> None:
    federation = raydfl.trainable(tiny("train.rounds=2"))
    trial = federation({LR: 0.2})
    trial.train()
    trial.stop()
    trial = federation({LR: 0.1})
    run_folder = Path(trial.train()["run"])
    trial.stop()
    assert count_rounds(run_folder) == 1
    assert "branches" not in json.loads((run_folder / "run.json").read_text())


def test_what_fails_is_raised(tiny: Callable[..., Config]) -> None:
    trial = raydfl.trainable(tiny())({"train.cohort": 1000})
    with pytest.raises(raydfl.RaydflError):
        trial.train()
    trial.stop()


# -- with Ray Tune ---------------------------------------------------------------------------------------------------


TRIALS = {"asha": 3, "pbt": 2}
"""Of own_tuner.py, by scheduler."""


def _begin(scheduler: str, folder: Path) -> subprocess.Popen[bytes]:
    own = {"TUNE_GLOBAL_CHECKPOINT_S": "0", "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0"}
    program = str(Path(__file__).with_name("own_tuner.py"))
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, program, scheduler, str(folder)], env=os.environ | own, stdout=log, stderr=log
        )


def _rounds_that_tune_knows(place: Path) -> list[int]:
    """The rounds of each trial in what Tune saved last: what came later is done again."""
    for file in place.glob("experiment_state-*.json"):
        with contextlib.suppress(json.JSONDecodeError):  # being written
            trials = json.loads(file.read_text())["trial_data"]
            return [json.loads(runtime)["last_result"].get("round", 0) for _, runtime in trials]
    return []


def _killed_and_restored(scheduler: str, folder: Path, config: Config) -> list[dict[str, Any]]:
    """The results of a Tuner whose driver was killed once it had saved all trials, and that one had done three rounds."""
    (folder / "config.json").write_text(json.dumps(_plain(config)))
    driver = _begin(scheduler, folder)
    place = folder / "tune" / scheduler
    try:
        while len(rounds := _rounds_that_tune_knows(place)) < TRIALS[scheduler] or max(rounds) < 3:
            assert driver.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.wait()
    assert not (folder / "results.json").exists()
    assert _begin(scheduler, folder).wait(timeout=600) == 0, (folder / "log").read_text()[-3000:]
    results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    assert [result["error"] for result in results] == [""] * len(results)
    return results


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trials_of_asha_have_the_bits_of_runs_alone(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny("train.rounds=4", "ray.actors=1", "ray.cpus=0.5")
    results = _killed_and_restored("asha", tmp_path, config)
    assert len(results) == 3
    assert max(result["metrics"]["round"] for result in results) == 4
    assert any(result["metrics"]["iterations_since_restore"] < result["metrics"]["round"] for result in results)
    for result in results:
        lr, rounds = result["settings"][LR], result["metrics"]["round"]
        alone = tiny(f"train.rounds={rounds}", f"{LR}={lr}", f"run.name=alone-{lr}")
        assert_same_bits(read_tensors(Path(result["checkpoint"])), train_federation(alone))
        assert raydfl.load_model(result["checkpoint"]).round == rounds
        measured = read_scores(Path(alone.run.dir) / f"alone-{lr}", rounds - 1)[rounds]
        assert result["metrics"]["test model/loss"] == measured["test model/loss"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trials_of_pbt_have_the_bits_of_their_settings_one_after_another(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """Ray Tune's own PBT draws without a seed: each trial is done again from the settings that it had."""
    config = tiny("train.rounds=6")
    results = _killed_and_restored("pbt", tmp_path, config)
    lines = [line for file in (tmp_path / "tune" / "pbt").glob("*/result.json") for line in file.open()]
    tried = [json.loads(line)["config"] for line in lines] + [result["settings"] for result in results]
    had = {make_trial_config(_plain(config), settings).digest(): settings for settings in tried}
    branched = 0
    for number, result in enumerate(results):
        assert result["metrics"]["round"] == 6
        about = json.loads((Path(result["checkpoint"]) / "run.json").read_text())
        before, folder = None, tmp_path
        for place, part in enumerate([*about.get("branches", []), {"digest": about["digest"], "round": 6}]):
            own = (
                f"run.name=alone-{number}-{place}",
                f"train.rounds={part['round']}",
                f"{LR}={had[part['digest']][LR]}",
            )
            here = tiny(*own)
            folder = Path(here.run.dir) / str(here.run.name)
            if before is not None:
                branch(before, folder, here)
                branched += 1
            train_federation(here)
            before = folder
        assert_same_bits(read_tensors(Path(result["checkpoint"])), read_tensors(folder))
    assert branched


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
    logged = {float(run.data.params[LR]): run for run in client.search_runs([experiment.experiment_id])}
    assert set(logged) == set(results) == {0.1, 0.2}
    for lr, run in logged.items():
        assert run.info.status == "FINISHED"
        scores = read_scores(Path(results[lr].metrics["run"]), 0)
        history = client.get_metric_history(run.info.run_id, "test model/accuracy")
        assert [item.value for item in history] == [scores[round_]["test model/accuracy"] for round_ in (1, 2)]
        assert raydfl.load_model(results[lr].checkpoint.path).round == 2
