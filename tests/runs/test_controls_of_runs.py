"""Controls of runs: the report, the summary, the stored file and its failures."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl

import raydfl
from raydfl.controls import Control
from raydfl.engine.config import Config
from raydfl.runs._run import run
from raydfl.runs.progress import Progress
from raydfl.runs.report import write_report

Tiny = Callable[..., Config]
NAMES = ["chance", "majority", "raw features: linear model", "raw features: nearest neighbour"]


def read_page(folder: Path) -> str:
    return (folder / "report.html").read_text()


def test_a_run_reports_its_controls(tiny: Tiny) -> None:
    output = io.StringIO()
    result = run(tiny("train.rounds=1"), Progress("lines", output))
    stored = json.loads((result.run_dir / "controls.json").read_text())
    assert [(control["split"], control["name"]) for control in stored["controls"]] == [
        (split, name) for split in ("test", "validation") for name in NAMES
    ]
    assert list(result.controls) == [Control(**values) for values in stored["controls"]]
    assert raydfl.load_result(result.run_dir).controls == result.controls
    assert list(raydfl.read_run(str(result.run_dir)).controls) == list(result.controls)
    linear, nearest = (control.value for control in result.controls[2:4])
    best, name = max((linear, "linear model"), (nearest, "nearest neighbour"), key=lambda pair: pair[0])
    assert f"raw features {best:.3f} ({name})\n" in output.getvalue()
    page = read_page(result.run_dir)
    assert all(f"<td>{name}</td>" in page for name in NAMES)
    count, error = result.controls[0].count, result.controls[0].standard_error
    assert error is not None
    assert f"{100 * result.controls[0].value:.1f} % ± {100 * error:.1f} % ({count} clips)" in page


def test_the_finish_event_has_the_controls(tiny: Tiny) -> None:
    output = io.StringIO()
    result = run(tiny("train.rounds=1"), Progress("json", output))
    event = json.loads(output.getvalue().splitlines()[-1])
    assert [Control(**values) for values in event["controls"]] == list(result.controls)


def test_controls_are_measured_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tiny("train.rounds=1"))
    monkeypatch.delattr("raydfl.runs.report.controls.measure_controls")
    assert raydfl.resume(result.run_dir, ["train.rounds=2"]).controls == result.controls


def test_the_clients_own_tests_are_the_test_clips(tiny: Tiny) -> None:
    result = run(
        tiny("train.rounds=1", "data.split={test: null, client_test: {fraction: 0.3}}", "evaluate.clients=all")
    )
    assert {control.split for control in result.controls} == {"client_test"}
    measured = raydfl.read_rows(str(result.run_dir)).to_pylist()
    tested = [row for row in measured if row["split"] == "client_test" and row["metric"] == "model/accuracy"]
    assert result.controls[0].count == sum(row["count"] for row in tested if row["client"])


def test_parts_have_controls_of_their_own(tiny: Tiny) -> None:
    values = tiny().data.model_dump(mode="json", exclude_unset=True)
    part = {key: values[key] for key in ("name", "features", "partition")}
    config = tiny(
        "train.rounds=1", f"data={json.dumps({'parts': {'one': part, 'two': part}, 'cache': values['cache']})}"
    )
    result = run(config)
    assert [control.metric for control in result.controls] == ["one/accuracy"] * 4 + ["two/accuracy"] * 4
    assert "<td>two: raw features: linear model</td>" in read_page(result.run_dir)


def test_a_failure_of_the_controls_fails_no_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("too many clips")

    monkeypatch.setattr("raydfl.runs.report.controls.measure_controls", fail)
    result = run(tiny("train.rounds=1"))
    assert result.status == "finished"
    assert result.controls == ()
    assert not (result.run_dir / "controls.json").exists()
    assert "The controls were not measured: too many clips" in read_page(result.run_dir)


def test_reports_of_earlier_runs_measure_the_controls(tiny: Tiny, raydfl: Raydfl) -> None:
    result = run(tiny("train.rounds=1"))
    (result.run_dir / "controls.json").unlink()
    raydfl("report", result.run_dir)
    assert all(f"<td>{name}</td>" in read_page(result.run_dir) for name in NAMES)
    assert (result.run_dir / "controls.json").exists()


def test_reports_without_data_explain_the_missing_controls(tiny: Tiny, tmp_path: Path, raydfl: Raydfl) -> None:
    result = run(tiny("train.rounds=1", f"data.cache={tmp_path / 'own-cache'}"))
    (result.run_dir / "controls.json").unlink()
    shutil.rmtree(tmp_path / "own-cache")
    raydfl("report", result.run_dir)
    page = read_page(result.run_dir)
    assert "The controls were not measured: " in page
    assert "raw features" not in page


def test_damaged_controls_are_reported(tiny: Tiny) -> None:
    result = run(tiny("train.rounds=1"))
    (result.run_dir / "controls.json").write_text('{"controls": [{"name": "chance"}]}')
    write_report([result.run_dir], result.run_dir / "report.html")
    page = read_page(result.run_dir)
    assert "controls.json is damaged" in page
    assert "Remove it to measure the controls again." in page


def test_a_comparison_has_the_controls_of_each_data_set(tiny: Tiny, tmp_path: Path) -> None:
    results = [run(tiny("train.rounds=1", f"run.name=seed-{seed}", f"run.seed={seed}")) for seed in (1, 2)]
    page = write_report([result.run_dir for result in results], tmp_path / "both.html").read_text()
    assert page.count("chance (") == page.count("raw features: linear model (") == 2  # test and held-out clips


def test_an_objective_without_controls_is_named(tiny: Tiny) -> None:
    result = run(tiny("train.rounds=1", "objective={name: contrast, frames: 8}"))
    assert result.controls == ()
    assert "No raw-feature control for the objective contrast." in read_page(result.run_dir)
