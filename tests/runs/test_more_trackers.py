"""Trackers other than MLflow's. Oracle: their files, parsed independently."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from raydfl.core.errors import ConfigError
from raydfl.engine.config import Config
from raydfl.engine.settings import TrackSettings
from raydfl.engine.storage import read_rows, to_rows
from raydfl.runs import resume, run
from raydfl.runs.progress import Progress
from raydfl.runs.tracking import FilesTracker, make_tracker, metric_name
from raydfl.runs.tracking._mlflow import MlflowTracker

Tiny = Callable[..., Config]
Points = dict[str, list[tuple[int, float]]]


class Failing(FilesTracker):
    """Tracker that fails in the second round."""

    def open(self, run_name: str, params: object, tags: object) -> None:
        pass

    def write(self, number: int, metrics: object) -> None:
        if number == 2:
            raise OSError("the disk is full")


def read_tensorboard(folder: Path) -> Points:
    """Return the points by name from an event file's records: length, its checksum, event, its checksum."""
    (file,) = folder.glob("events.out.tfevents.*")
    data, at, read_points = file.read_bytes(), 0, {}
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in event.summary.value:
            if value.HasField("simple_value"):
                read_points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return read_points


def read_wandb(folder: Path) -> Points:
    """Return the points by name from an offline run's file: a LevelDB log with a 7-byte header and blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("offline-run-*/*.wandb")
    data, at, whole, read_points = file.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too short for a piece
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last piece
            record, whole = Record.FromString(whole), b""
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for name, value in values.items():
                if not name.startswith("_"):
                    read_points.setdefault(name, []).append((record.history.step.num, value))
    return read_points


@pytest.mark.parametrize("name", ["tensorboard", pytest.param("wandb", marks=pytest.mark.slow)])
def test_files_have_each_row_once_after_a_resume(name: str, tiny: Tiny) -> None:
    pytest.importorskip({"tensorboard": "tensorboardX", "wandb": "wandb"}[name])
    read = {"tensorboard": read_tensorboard, "wandb": read_wandb}[name]
    settings = ["run.name=watched", "ray.actors=0", "evaluate.every=1", f"track={{mlflow: false, also: [{name}]}}"]
    outcome = run(tiny(*settings, "train.rounds=2"), Progress("quiet"))
    resume(outcome.run_dir, ["train.rounds=3"], Progress("quiet"))
    wanted: Points = {}
    for row in to_rows(read_rows(outcome.run_dir)):
        if not row.client and row.array is None:
            wanted.setdefault(metric_name(row), []).append((row.round, row.value))
    read_points = read(outcome.run_dir / name)
    assert {len(points) for key, points in wanted.items() if key == "test/model/accuracy"} == {3}
    for key, points in wanted.items():
        assert read_points[key] == [
            (step, pytest.approx(value, rel=1e-6, nan_ok=True)) for step, value in sorted(points)
        ]


def test_failed_tracker_warns_once_and_the_run_continues(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    also = f"track={{mlflow: false, also: ['{__file__}:Failing', tensorboard]}}"
    outcome = run(tiny("run.name=failing", "ray.actors=0", "train.rounds=4", also), Progress("lines"))
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count(
        "Failing failed (OSError: the disk is full). The run continues without it"
    ) == 1
    assert outcome.finished
    assert max(step for step, _ in read_tensorboard(outcome.run_dir / "tensorboard")["work/clients"]) == 4


def test_unknown_tracker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord'. Did you mean 'tensorboard'"):
        make_tracker(TrackSettings(mlflow=False, also=["tensorbord"]), tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"tracker '.*:MlflowTracker' is not a subclass of raydfl.FilesTracker"):
        make_tracker(TrackSettings(also=[f"{MlflowTracker.__module__}:MlflowTracker"]), tmp_path, tmp_path)
