"""Pipes, devices and folders in place of files: opening a pipe would block forever."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from commands import Raydfl

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.data.features.kinds import make_features
from raydfl.data.images import read_image
from raydfl.data.sets import list_contents
from raydfl.data.sets._files import read_rows
from raydfl.data.sets.emodb import EmoDB
from raydfl.engine.config import Config
from raydfl.runs._run import run

SECONDS = 20

READERS: dict[str, Callable[[Path], object]] = {
    "clips.tar": list_contents,
    "clips.parquet": list_contents,
    "clips.arrow": list_contents,
    "picture.png": lambda path: read_image(str(path)),
    "features.npz": lambda path: make_features({"kind": "file", "path": str(path)}),
    "features.safetensors": lambda path: make_features({"kind": "file", "path": str(path)}),
    "clip.npy": lambda path: make_features({"kind": "file", "path": str(path.parent)}),
    "rows.csv": lambda path: read_rows(path.parent, path.name, (), EmoDB.card),
}


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Stop tests that block on a pipe."""

    def stop(number: int, frame: types.FrameType | None) -> NoReturn:
        raise AssertionError(f"it did not end in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_reported_and_not_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}.* it is a pipe, a socket or a device, not a file"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_a_pipe_in_a_run_folder_is_reported_and_not_opened(
    raydfl: Raydfl, tiny: Callable[..., Config], name: str
) -> None:
    folder = run(tiny("train.rounds=1")).run_dir
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for command in ("resume", "export", "report"):
        raydfl(command, folder).refuses(f"{name}.*it is a pipe, a socket or a device, not a file")


def test_folders_and_devices_are_not_regular_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file") == b"content"
    for path, reason in ((tmp_path, "Is a directory"), (Path("/dev/zero"), "it is a pipe, a socket or a device")):
        with pytest.raises(OSError, match=reason):
            read_regular(path)
