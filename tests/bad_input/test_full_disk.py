"""A full disk: exit code 2 and the sizes; with room again, the same command ends with the bits of an undisturbed run."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Raydfl, written

from raydfl.engine.config import Config
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
Undisturbed = Callable[..., dict[str, bytes]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(bytes)``: a disk of that size; called again, the same one with another size. Only root may make disks."""
    folder = tmp_path / "disk"

    def make(size: int) -> Path:
        options = f"size={size}" if not folder.exists() else f"remount,size={size}"
        folder.mkdir(exist_ok=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip("this needs the right to mount a disk")
        return folder

    try:
        yield make
    finally:
        subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


def fill(folder: Path, leave: int) -> Path:
    """Fills a disk up to some bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        while (free := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize) > leave:
            file.write(bytes(min(free - leave, 1 << 20)))
    return filler


def test_no_room_for_the_features_is_known_beforehand(
    raydfl: Raydfl, tiny: Tiny, undisturbed: Undisturbed, tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(200_000)
    file = written(tiny(f"data.cache={disk}"), tmp_path)
    # 162 clips x 26 frames x 16 bands x 4 bytes, in chunks and again in the whole.
    said = raydfl("run", file)
    said.refuses(
        rf"the disk of {disk} is full: it has [\d,]+ bytes free and the features .*need about 359,424",
        "make room, or choose another",
    )
    small_disk(4_000_000)
    assert raydfl("run", file).code == 0
    assert_same_bits(undisturbed(3, "fedavg"), read_tensors(tmp_path / "runs/tiny"))


def test_a_disk_that_fills_up_while_features_are_made(
    raydfl: Raydfl,
    tiny: Tiny,
    undisturbed: Undisturbed,
    tmp_path: Path,
    small_disk: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = small_disk(300_000)
    file = written(tiny(f"data.cache={disk}"), tmp_path)
    with monkeypatch.context() as patch:  # there seemed to be room
        patch.setattr("raydfl.data.features.cache.free_bytes", lambda _: 10**9)
        said = raydfl("data", "prepare", file)
    said.refuses(rf"the disk of {disk} is full: it has [\d,]+ bytes free and the features .*need about 359,424")
    small_disk(4_000_000)
    assert raydfl("run", file).code == 0
    assert_same_bits(undisturbed(3, "fedavg"), read_tensors(tmp_path / "runs/tiny"))


@pytest.mark.parametrize("leave", [0, 20_480])
def test_a_disk_that_fills_up_during_a_run(
    raydfl: Raydfl, tiny: Tiny, undisturbed: Undisturbed, small_disk: Callable[[int], Path], leave: int
) -> None:
    """With more and more room left, other writes are the first to fail: configuration, private state, rows, commit ..."""
    disk = small_disk(8_000_000)
    run_dir = run(tiny("train.rounds=2", f"run.dir={disk}", method="fedmlac")).run_dir
    filler = fill(disk, leave)
    said = raydfl("resume", run_dir, "train.rounds=5")
    said.refuses("the disk of .* is full: it has [0-9,]+ bytes free and .* need about [0-9,]+", "then resume the run")
    filler.unlink()
    assert not list(disk.rglob("*.part")) + list(disk.rglob("*.tmp"))
    assert raydfl("resume", run_dir, "train.rounds=5").code == 0
    assert_same_bits(undisturbed(5), read_tensors(run_dir))


class FullAt:
    """From the ``number``-th write that must reach the disk on, there is no room; the writes before succeed."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._fsync = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.left -= 1
        if self.left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)


def full_disk_at(
    number: int, raydfl: Raydfl, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, bytes]
) -> bool:
    """Runs with the disk full at one write, then again with room; whether there was such a write."""
    name = f"full{number}"
    config = tiny("train.rounds=2", f"run.name={name}", f"data.cache={tmp_path / name}", method="fedmlac")
    file = written(config, tmp_path)
    full = FullAt(number)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        said = raydfl("run", file)
    if full.left > 0:
        assert said.code == 0
        return False
    said.refuses("the disk of .* is full: it has [0-9,]+ bytes free and .* need about [0-9,]+; make room")
    assert raydfl("run", file).code == 0
    assert_same_bits(expected, read_tensors(Path(config.run.dir) / name))
    return True


@pytest.mark.parametrize("number", [1, 8, 13, 19])
def test_a_full_disk_at_some_writes(
    raydfl: Raydfl, tiny: Tiny, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert full_disk_at(number, raydfl, tiny, tmp_path, monkeypatch, undisturbed(2))


@pytest.mark.slow
def test_a_full_disk_at_any_write(
    raydfl: Raydfl, tiny: Tiny, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 1
    while full_disk_at(number, raydfl, tiny, tmp_path, monkeypatch, undisturbed(2)):
        number += 1
    assert number > 15
