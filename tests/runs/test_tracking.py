"""Tracking with MLflow. Oracle: the tracked values, read through MLflow's client. No failure of MLflow may end a run."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from raydfl.core.errors import InputError
from raydfl.engine.settings import TrackSettings, hide_passwords
from raydfl.engine.storage.record import MetricRow, rows_path, write_rows
from raydfl.runs.tracking import MlflowTracker, Tracker, make_tracker, metric_name
from raydfl.runs.tracking import _mlflow as track


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with tables. They are shared, because MLflow takes seconds to create them."""
    folder = tmp_path_factory.mktemp("mlflow")
    MlflowTracker(TrackSettings(), folder, folder)._connect()
    return folder / "mlflow.db"


class Place:
    """A folder with a database and a run."""

    def __init__(self, folder: Path) -> None:
        self.runs_dir = folder
        self.run_dir = folder / "run"
        self.warnings: list[str] = []

    def tracker(self, **settings: Any) -> MlflowTracker:
        return MlflowTracker(TrackSettings(**settings), self.runs_dir, self.run_dir, self.warnings.append)

    def commit(self, rows: list[MetricRow]) -> list[MetricRow]:
        write_rows(rows_path(self.run_dir, max(row.round for row in rows)), rows)
        return rows

    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=f"sqlite:///{self.runs_dir}/mlflow.db")

    def read_curve(self, run_id: str, name: str) -> list[tuple[int, float]]:
        """Return the points of MLflow's chart, where repeated rounds coincide."""
        return sorted(set(self.read_history(run_id, name)))

    def read_history(self, run_id: str, name: str) -> list[tuple[int, float]]:
        return sorted((item.step, item.value) for item in self.client().get_metric_history(run_id, name))


@pytest.fixture
def place(tmp_path: Path, empty_database: Path) -> Place:
    folder = tmp_path / "all runs"  # a space: it must survive in addresses of files
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return Place(folder)


def make_rows(round_index: int) -> list[MetricRow]:
    """Return rows of a round: two pooled metrics, one metric of a client, and a matrix."""
    return [
        MetricRow(round_index, "train", "", "train", "loss", 1.0 / (round_index + 1), 40.0),
        MetricRow(round_index, "evaluate", "", "test", "plugin/accuracy", round_index / 10, 40.0),
        MetricRow(round_index, "evaluate", "anna", "test", "plugin/accuracy", 0.5, 4.0),
        MetricRow(round_index, "evaluate", "", "test", "plugin/confusion", math.nan, 4.0, np.eye(2)),
    ]


def make_expected_points(rounds: range) -> list[tuple[int, float]]:
    return [(r, r / 10) for r in rounds]


def test_tracked_run_is_read_back(place: Place) -> None:
    tracker = place.tracker(experiment="my experiment")
    params = {"train.rounds": 3, "method.name": "fedmlac", "track.uri": "https://anna:secret@host", "long": "x" * 7000}
    run_id = tracker.start("first", params, {"kind": "test"})
    for round_index in range(3):
        tracker.log_rows(place.commit(make_rows(round_index)))
    report = place.run_dir / "report.html"
    report.write_text("<p>report</p>")
    model = place.run_dir / "model"
    model.mkdir()
    (model / "weights.safetensors").write_bytes(b"1")
    tracker.log_artifact(report)
    tracker.log_artifact(model)
    tracker.finish("FINISHED")

    client = place.client()
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params["train.rounds"] == "3"
    assert run.data.params["track.uri"] == "https://***@host"
    assert len(run.data.params["long"]) == 6000
    assert run.data.tags["kind"] == "test"
    assert run.data.tags["raydfl.mirrored_round"] == "2"
    assert sorted(run.data.metrics) == ["test/plugin/accuracy", "train/loss"]  # no client metrics, no matrix
    assert place.read_history(run_id, "test/plugin/accuracy") == make_expected_points(range(3))
    assert client.get_experiment(run.info.experiment_id).name == "my experiment"
    assert [item.path for item in client.list_artifacts(run_id)] == ["model", "report.html"]
    stored = list(place.runs_dir.glob("mlflow-artifacts/**/weights.safetensors"))
    assert len(stored) == 1
    assert not place.warnings


def test_round_with_many_metrics(place: Place) -> None:
    """The round has more metrics than MLflow accepts in one call."""
    tracker = place.tracker()
    run_id = tracker.start("r", {f"p{i}": i for i in range(230)}, {})
    tracker.log_rows([MetricRow(1, "train", "", "test", f"m{i}", float(i), 1.0) for i in range(2300)])
    run = place.client().get_run(run_id)
    assert len(run.data.params) == 230
    assert run.data.metrics == {f"test/m{i}": float(i) for i in range(2300)}


def test_nan_is_tracked(place: Place) -> None:
    tracker = place.tracker()
    run_id = tracker.start("r", {}, {})
    tracker.log_rows([MetricRow(1, "train", "", "train", "loss", math.nan, 1.0)])
    assert math.isnan(place.client().get_metric_history(run_id, "train/loss")[0].value)


def test_rounds_are_tracked_once(place: Place) -> None:
    tracker = place.tracker()
    run_id = tracker.start("r", {"a": 1}, {})
    tracker.log_rows(place.commit(make_rows(1)))
    tracker.log_rows(make_rows(1) + place.commit(make_rows(2)))
    second_tracker = place.tracker()
    assert second_tracker.start("r", {"a": 2, "b": 3}, {"resumed": "yes"}, run_id) == run_id
    assert place.client().get_run(run_id).info.status == "RUNNING"
    second_tracker.log_rows(make_rows(2))
    second_tracker.log_rows(place.commit(make_rows(3)))
    assert place.read_history(run_id, "test/plugin/accuracy") == make_expected_points(range(1, 4))
    data = place.client().get_run(run_id).data
    assert data.params == {"a": "1", "b": "3"}
    assert data.tags["resumed"] == "yes"


@pytest.mark.parametrize("dies_at", ["log_batch", "set_tag"])
def test_crash_around_a_commit(place: Place, monkeypatch: pytest.MonkeyPatch, dies_at: str) -> None:
    """The crash is before the metrics, or between the metrics and the tag. The resumed run copies the missing rows."""
    from mlflow import MlflowClient

    tracker = place.tracker()
    run_id = tracker.start("r", {}, {})
    tracker.log_rows(place.commit(make_rows(1)))

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, dies_at, die)
        with pytest.raises(KeyboardInterrupt):
            tracker.log_rows(place.commit(make_rows(2)))
    place.commit(make_rows(3))  # committed, and the process died before it was mirrored
    second_tracker = place.tracker()
    second_tracker.start("r", {}, {}, run_id)
    second_tracker.log_rows(place.commit(make_rows(4)))
    second_tracker.finish("FINISHED")
    assert place.read_curve(run_id, "test/plugin/accuracy") == make_expected_points(range(1, 5))
    assert place.client().get_run(run_id).data.tags["raydfl.mirrored_round"] == "4"
    assert not place.warnings


class Outage:
    """Lets MLflow fail before or after its work until the failure is switched off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from mlflow import MlflowClient

        self.state = "fine"
        self.tries = 0
        for name in ("log_batch", "set_tag", "set_terminated", "log_artifact", "get_run"):
            monkeypatch.setattr(MlflowClient, name, self._wrap(getattr(MlflowClient, name)))

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.state == "down":
                self.tries += 1
                raise ConnectionError("cannot connect to https://anna:secret@host\nlong traceback")
            result = real(*args, **kwargs)
            if self.state == "answers get lost":
                raise TimeoutError("timed out")
            return result

        return call


@pytest.mark.parametrize("failure", ["down", "answers get lost"])
def test_rounds_missed_in_a_failure_are_tracked_later(
    place: Place, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    outage = Outage(monkeypatch)
    monkeypatch.setattr(track, "_RETRY_SECONDS", 0.0)
    tracker = place.tracker()
    run_id = tracker.start("r", {}, {})
    tracker.log_rows(place.commit(make_rows(1)))
    outage.state = failure
    for round_index in (2, 3):
        tracker.log_rows(place.commit(make_rows(round_index)))
    assert len(place.warnings) == 1
    assert "The run continues" in place.warnings[0]
    assert "secret" not in place.warnings[0]
    assert "traceback" not in place.warnings[0]
    outage.state = "fine"
    tracker.log_rows(place.commit(make_rows(4)))
    assert place.warnings[1].endswith("answers again and has all rounds up to round 4.")
    tracker.log_rows(place.commit(make_rows(5)))
    tracker.finish("FINISHED")
    assert place.read_curve(run_id, "test/plugin/accuracy") == make_expected_points(range(1, 6))
    assert len(place.warnings) == 2


def test_failed_store_is_retried_after_a_pause_and_at_the_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch)
    tracker = place.tracker()
    run_id = tracker.start("r", {}, {})
    outage.state = "down"
    place.run_dir.mkdir()
    note = place.run_dir / "note.txt"
    note.write_text("n")
    for round_index in range(1, 5):
        tracker.log_rows(place.commit(make_rows(round_index)))
    tracker.log_artifact(note)
    assert outage.tries == 1
    outage.state = "fine"
    tracker.finish("FINISHED")
    assert place.read_history(run_id, "test/plugin/accuracy") == make_expected_points(range(1, 5))
    assert place.client().get_run(run_id).info.status == "FINISHED"
    assert [item.path for item in place.client().list_artifacts(run_id)] == ["note.txt"]


def test_rounds_missing_at_the_end_are_tracked_after_a_resume(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch)
    tracker = place.tracker()
    run_id = tracker.start("r", {}, {})
    tracker.log_rows(place.commit(make_rows(1)))
    outage.state = "down"
    tracker.log_rows(place.commit(make_rows(2)))
    tracker.finish("FAILED")
    assert f"The MLflow run {run_id} at sqlite:///" in place.warnings[-1]
    assert "lacks rounds after 1. They are in " in place.warnings[-1]
    outage.state = "fine"
    place.tracker().start("r", {}, {}, run_id)
    assert place.read_history(run_id, "test/plugin/accuracy") == make_expected_points(range(1, 3))


def test_lost_run_is_restored_from_the_metrics_table(place: Place) -> None:
    tracker = place.tracker()
    first = tracker.start("r", {}, {})
    tracker.log_rows(place.commit(make_rows(1)))
    place.client().delete_run(first)
    second_tracker = place.tracker()
    second = second_tracker.start("r", {}, {}, first)
    assert second != first
    assert f"no longer has the run {first}" in place.warnings[0]
    assert place.read_history(second, "test/plugin/accuracy") == make_expected_points(range(1, 2))
    assert place.tracker().start("r", {}, {}, "0" * 32) != second


def test_experiments_open_the_view_of_runs(place: Place) -> None:
    """A kind set by the user stays."""
    client = place.client()
    client.create_experiment("old")
    client.create_experiment("traces", tags={"mlflow.experimentKind": "genai_development"})
    kinds = {"new": "custom_model_development", "old": "custom_model_development", "traces": "genai_development"}
    for name, kind in kinds.items():
        place.tracker(experiment=name).start("r", {}, {})
        assert client.get_experiment_by_name(name).tags["mlflow.experimentKind"] == kind


def test_deleted_experiment_is_an_error(place: Place) -> None:
    place.tracker(experiment="gone").start("r", {}, {})
    place.client().delete_experiment(place.client().get_experiment_by_name("gone").experiment_id)
    with pytest.raises(
        InputError, match="experiment 'gone' is deleted in .*[.] Restore it, or set track.experiment to another name"
    ):
        place.tracker(experiment="gone").start("r", {}, {})


def test_damaged_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is a text, not a database\n" * 100)
    tracker = MlflowTracker(TrackSettings(), tmp_path, tmp_path)
    with pytest.raises(InputError, match=r"mlflow.db cannot be used: .*or set track.mlflow=false"):
        tracker.start("r", {}, {})


@pytest.mark.slow
def test_two_runs_start_at_once_on_a_new_store(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from raydfl.engine import TrackSettings; from raydfl.runs.tracking import MlflowTracker\n"
        "runs = Path(sys.argv[1]); t = MlflowTracker(TrackSettings(), runs, runs / 'r')\n"
        "t.start(sys.argv[2], {}, {}); t.finish('FINISHED')"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in ("a", "b")]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("raydfl").experiment_id
    assert sorted(run.info.run_name for run in client.search_runs([experiment])) == ["a", "b"]


def test_unreachable_server_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tracker = MlflowTracker(TrackSettings(uri=f"http://anna:secret@127.0.0.1:{port}"), tmp_path, tmp_path)
    with pytest.raises(InputError) as caught:
        tracker.start("r", {}, {})
    message = str(caught.value)
    assert message.startswith(f"MLflow at http://***@127.0.0.1:{port} cannot be used: no server answers")
    assert "set track.mlflow=false" in message
    assert "secret" not in message


@pytest.fixture
def other_server() -> Iterator[str]:
    """A web server without MLflow."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_server_without_mlflow_is_an_error(tmp_path: Path, other_server: str) -> None:
    with pytest.raises(InputError, match=f"MLflow at {other_server} cannot be used: "):
        MlflowTracker(TrackSettings(uri=other_server), tmp_path, tmp_path).start("r", {}, {})


def test_missing_mlflow_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InputError, match="Install mlflow, or set track.mlflow=false"):
        MlflowTracker(TrackSettings(), tmp_path, tmp_path).start("r", {}, {})


def test_misuse_is_an_error(tmp_path: Path) -> None:
    tracker = MlflowTracker(TrackSettings(), tmp_path, tmp_path)
    with pytest.raises(FileNotFoundError):
        tracker.log_artifact(tmp_path / "nothing")


def test_the_null_tracker_does_nothing(tmp_path: Path) -> None:
    tracker = make_tracker(TrackSettings(mlflow=False), tmp_path, tmp_path)
    assert type(tracker) is Tracker
    assert tracker.start("r", {}, {}) == ""
    assert tracker.start("r", {}, {}, "known") == "known"
    tracker.log_rows(make_rows(1))
    tracker.log_artifact(tmp_path)
    tracker.finish("FINISHED")
    assert list(tmp_path.iterdir()) == []
    assert isinstance(make_tracker(TrackSettings(), tmp_path, tmp_path), MlflowTracker)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file:///tmp/mlruns", "no longer stores runs in plain folders"),
        ("mlruns", "no longer stores runs in plain folders"),
        ("sqlite:///mlflow.db", "relative database path is lost"),
    ],
)
def test_stores_that_lose_runs_are_rejected(uri: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrackSettings(uri=uri)


def test_persistent_stores_are_accepted() -> None:
    for uri in (None, "http://host:5000", "https://host", "sqlite:////srv/mlflow.db", "postgresql://host/db"):
        assert TrackSettings(uri=uri).uri == uri


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (MetricRow(1, "train", "", "train", "loss", 0, 1), "train/loss"),
        (MetricRow(1, "evaluate", "", "test", "plugin/accuracy", 0, 1), "test/plugin/accuracy"),
        (MetricRow(1, "distil", "", "train", "loss", 0, 1), "distil/train/loss"),
        (MetricRow(1, "train", "", "", "bytes_up", 0, 1), "bytes_up"),
        (MetricRow(1, "train", "", "server", "seconds/fit", 0, 1), "work/seconds/fit"),
    ],
)
def test_names_in_mlflow(row: MetricRow, name: str) -> None:
    assert metric_name(row) == name


def test_accuracy_comes_first_in_mlflow_charts() -> None:
    """MLflow sorts charts by the prefix before the last slash, then by name."""
    measured = [
        ("server", "seconds/round"),
        ("server", "bytes_up"),
        ("validation", "model/accuracy"),
        ("train", "loss"),
    ]
    measured += [("test", "model/loss"), ("test", "model/accuracy"), ("triggered", "model/attack_success")]
    names = [metric_name(MetricRow(1, "evaluate", "", split, metric, 0, 1)) for split, metric in measured]
    charts = sorted(names, key=lambda name: (name.rpartition("/")[0], name))
    assert charts[0] == "test/model/accuracy"
    assert charts[-2:] == ["work/bytes_up", "work/seconds/round"]


def test_curves_of_earlier_versions_continue(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(round_index: int) -> list[MetricRow]:
        return [MetricRow(round_index, "train", "", "server", "seconds/round", round_index / 10, 1.0)]

    tracker = place.tracker()
    monkeypatch.setattr(tracker, "_work", "server")
    run_id = tracker.start("run", {}, {})
    tracker.log_rows(place.commit(seconds(0)))
    tracker.finish("KILLED")
    tracker = place.tracker()
    assert tracker.start("run", {}, {}, run_id) == run_id
    tracker.log_rows(place.commit(seconds(1)))
    assert sorted(place.client().get_run(run_id).data.metrics) == ["server/seconds/round"]
    assert place.read_history(run_id, "server/seconds/round") == make_expected_points(range(2))


def test_invalid_mlflow_names_become_valid_and_stay_unique() -> None:
    from mlflow.utils.validation import _validate_metric_name

    metrics = ["größe", "grÖße", "a//b", "../up", "x" * 400, "x" * 401, "a(b)", "a[b]", "'; drop", "tab\there", "/root"]
    metric_names = [metric_name(MetricRow(1, "train", "", "test", metric, 0, 1)) for metric in metrics]
    for name in metric_names:
        _validate_metric_name(name)
    assert len(set(metric_names)) == len(metrics)


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    assert hide_passwords("x https://a:b@h/p and sqlite:////f") == "x https://***@h/p and sqlite:////f"
    assert MlflowTracker(TrackSettings(uri="https://a:b@h"), tmp_path, tmp_path).uri == "https://***@h"
