"""Damage to the newest commit, its index or LATEST is detected and reported, and the previous commit is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import raydfl.engine.storage.private
from raydfl.core.errors import RunDirectoryError
from raydfl.core.types import State
from raydfl.engine.storage.private import PrivateIndex, PrivateStore
from raydfl.engine.storage.store import RunStore


def make_state(round_index: int) -> State:
    return State(round_index, {"global": {"a": torch.full((3,), float(round_index))}})


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Make run folders after two rounds. Only the second commit refers to an index."""
    monkeypatch.setattr(raydfl.engine.storage.private, "_RECENT", 2)
    intact, copy = tmp_path / "whole", tmp_path / "copy"
    store, private = RunStore(intact), PrivateStore(intact / "private")
    index = PrivateIndex()
    for round_index, clients in ((1, range(2)), (2, range(4))):
        refs = {c: private.append(round_index, {"model:a": torch.full((2,), float(c))}) for c in clients}
        index = index.replace(refs)
        store.commit(make_state(round_index), index, {ref.segment for ref in refs.values()})
    assert not RunStore(intact).load(store.commits()[0]).private.base_name
    assert len(RunStore(intact).load(store.commits()[1]).private.base or ()) == 4

    def fresh() -> Path:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(intact, copy)
        return copy

    return fresh


def assert_falls_back(folder: Path, about: str) -> None:
    """Check that opening the run warns of the second commit and loads the intact first commit."""
    commit, warnings = RunStore(folder).open_latest()
    assert commit is not None
    assert commit.state.round_index == 1
    assert torch.equal(commit.state.tensors["global"]["a"], torch.ones(3))
    assert len(warnings) == 1
    assert "000002-" in warnings[0]
    assert about in warnings[0]
    private = PrivateStore(folder / "private")
    assert [float(private.read(commit.private[client])["model:a"][0]) for client in range(2)] == [0.0, 1.0]


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def find_newest_commit(folder: Path) -> Path:
    return folder / "commits" / RunStore(folder).commits()[-1]


def find_index(folder: Path) -> Path:
    (path,) = (folder / "private").glob("*.index")
    return path


@pytest.mark.parametrize("what", [find_newest_commit, find_index])
def test_any_changed_byte_is_detected(make_run: Callable[[], Path], what: Callable[[Path], Path]) -> None:
    path = what(make_run())
    size = path.stat().st_size
    assert size > 100
    for position in range(0, size, 7):
        folder = make_run()
        flip_byte(path, position)
        assert_falls_back(folder, path.name)


@pytest.mark.parametrize("what", [find_newest_commit, find_index])
def test_any_truncation_is_detected(make_run: Callable[[], Path], what: Callable[[Path], Path]) -> None:
    size = what(make_run()).stat().st_size
    for left in (0, 1, 8, size // 2, size - 1):
        folder = make_run()
        path = what(folder)
        path.write_bytes(path.read_bytes()[:left])
        assert_falls_back(folder, path.name)


@pytest.mark.parametrize("what", [find_newest_commit, find_index])
def test_a_missing_file_is_detected(make_run: Callable[[], Path], what: Callable[[Path], Path]) -> None:
    folder = make_run()
    path = what(folder)
    path.unlink()
    assert_falls_back(folder, path.name)


def test_latest_may_name_a_missing_commit(make_run: Callable[[], Path]) -> None:
    folder = make_run()
    (folder / "LATEST").write_text("000003-00000000.safetensors")
    commit, warnings = RunStore(folder).open_latest()
    assert commit is not None
    assert commit.state.round_index == 2
    assert "000003-00000000.safetensors cannot be read: No such file" in warnings[0]


def test_latest_cut_short_is_an_error(make_run: Callable[[], Path]) -> None:
    folder = make_run()
    text = (folder / "LATEST").read_text()
    for left in (0, 5, len(text) - 1):
        (folder / "LATEST").write_text(text[:left])
        with pytest.raises(
            RunDirectoryError, match=r"LATEST does not name a commit .*Write the newest name in commits/"
        ):
            RunStore(folder).open_latest()


def test_any_changed_byte_of_private_state_is_detected_on_reading(make_run: Callable[[], Path]) -> None:
    folder = make_run()
    commit, warnings = RunStore(folder).open_latest()
    assert commit is not None
    assert not warnings
    ref = commit.private[3]
    path = folder / "private" / ref.segment
    content = path.read_bytes()
    for position in range(ref.offset, ref.offset + ref.length):
        path.write_bytes(content)
        flip_byte(path, position)
        with pytest.raises(
            RunDirectoryError, match=rf"{ref.segment} is damaged at byte {ref.offset}: a client's private"
        ):
            PrivateStore(folder / "private").read(ref)
    path.write_bytes(content[:-1])
    with pytest.raises(RunDirectoryError, match="is damaged at byte"):
        PrivateStore(folder / "private").read(ref)
