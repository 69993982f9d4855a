"""Trials of a study use the actors of earlier trials, with the bits of new actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from studies import StudyFile

from raydfl import read_rows
from raydfl.cluster.idle import IdleActors
from raydfl.engine import RaySettings
from raydfl.experiments.load import load_study
from raydfl.experiments.run import run_study
from raydfl.testing import assert_same_bits, read_tensors, train_federation

METHOD = f"{Path(__file__).parent / 'process_method.py'}:InProcess"


class Actor:
    """A fake actor that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *_: self.calls.append(name))})


def test_actors_are_kept_for_equal_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Actor] = []
    monkeypatch.setattr("raydfl.cluster.idle.ray.get", lambda *_, **__: None)
    monkeypatch.setattr("raydfl.cluster.idle.ray.kill", ended.append)
    idle, actors = IdleActors(), [Actor(), Actor()]
    idle.prepare(RaySettings(actors=2))
    for key, actor in enumerate(actors):
        idle.keep(key, actor)
    idle.prepare(RaySettings(actors=2))
    assert idle.take(1) is actors[1]
    assert idle.take(1) is None
    assert actors[1].calls == ["close"]
    idle.prepare(RaySettings(actors=2, cpus=0.5))
    assert ended == [actors[0]]
    assert idle.take(0) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lent_actors_train_with_the_bits_of_new_actors(grid: StudyFile, ray_session: None, tmp_path: Path) -> None:
    """A failed trial ends its actors. Later trials start new actors, and lend them too."""
    trials = {
        "first": {},
        "faster": {"train.optimiser.lr": 0.3},
        "broken": {"method": {"name": METHOD, "broken": True}},
        "after": {"models.model": {"name": "crnn_tiny", "hidden": 4}},
        "last": {"train.batch_size": 2},
    }
    axes = {"c": {name: {"method": METHOD, **changes} for name, changes in trials.items()}}
    study = load_study(grid(axes=axes, repeat={"run.seed": [1]}, actors=2, parallel=1))
    results = run_study(study)
    assert [name.partition(",")[0] for name in results.failed] == ["broken"]
    processes = {}
    for trial in study.trials:
        if not trial.finished:
            continue
        rows = read_rows(trial.run_dir, where=pc.field("metric") == "process").to_pylist()
        processes[trial.run_dir.name.partition("-")[0]] = {row["value"] for row in rows if row["client"]}
        alone = trial.config.run.model_copy(update={"dir": str(tmp_path / "alone"), "name": trial.run_dir.name})
        ray = trial.config.ray.model_copy(update={"actors": 0})
        expected = train_federation(trial.config.model_copy(update={"run": alone, "ray": ray}))
        assert_same_bits(read_tensors(trial.run_dir), expected)
    assert processes["first"] == processes["faster"]
    assert processes["after"] == processes["last"]
    assert processes["first"].isdisjoint(processes["last"])
    assert len(processes["first"]) == 2
