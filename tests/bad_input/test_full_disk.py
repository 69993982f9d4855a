"""A full disk gives exit code 2 and the sizes. With free space, the same command ends with the reference's bits."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Raydfl, write_config
from ray.exceptions import OutOfDiskError, RayTaskError

from raydfl.cluster.client import ClientActor
from raydfl.cluster.faults import unwrap_error
from raydfl.cluster.resources import ActorKind
from raydfl.core.errors import ResourcesError
from raydfl.engine.config import Config
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
Undisturbed = Callable[..., dict[str, bytes]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make or resize a small disk: ``small_disk(bytes)``. Only root may create disks."""
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
    """Fill a disk except for the given number of bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        while (free := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize) > leave:
            file.write(bytes(min(free - leave, 1 << 20)))
    return filler


def test_missing_space_for_the_features_is_reported_beforehand(
    raydfl: Raydfl, tiny: Tiny, check_reference: Undisturbed, tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(200_000)
    file = write_config(tiny(f"data.cache={disk}"), tmp_path)
    # 162 clips x 26 frames x 16 bands x 4 bytes, in chunks and again in the complete file.
    output = raydfl("run", file)
    output.refuses(
        rf"the disk of {disk} is full: it has [\d,]+ bytes free and the features .*need about 359,424",
        "make room, or choose another",
    )
    small_disk(4_000_000)
    assert raydfl("run", file).code == 0
    assert_same_bits(check_reference(3, "fedavg"), read_tensors(tmp_path / "runs/tiny"))


def test_a_disk_may_fill_up_during_feature_extraction(
    raydfl: Raydfl,
    tiny: Tiny,
    check_reference: Undisturbed,
    tmp_path: Path,
    small_disk: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = small_disk(300_000)
    file = write_config(tiny(f"data.cache={disk}"), tmp_path)
    with monkeypatch.context() as patch:  # the free space seems sufficient
        patch.setattr("raydfl.data.features.cache.free_bytes", lambda _: 10**9)
        output = raydfl("data", "prepare", file)
    output.refuses(rf"the disk of {disk} is full: it has [\d,]+ bytes free and the features .*need about 359,424")
    small_disk(4_000_000)
    assert raydfl("run", file).code == 0
    assert_same_bits(check_reference(3, "fedavg"), read_tensors(tmp_path / "runs/tiny"))


@pytest.mark.parametrize("leave", [0, 20_480])
def test_a_disk_may_fill_up_during_a_run(
    raydfl: Raydfl, tiny: Tiny, check_reference: Undisturbed, small_disk: Callable[[int], Path], leave: int
) -> None:
    """More free space moves the first failing write: configuration, private state, rows, commit ..."""
    disk = small_disk(8_000_000)
    run_dir = run(tiny("train.rounds=2", f"run.dir={disk}", method="fedmlac")).run_dir
    filler = fill(disk, leave)
    output = raydfl("resume", run_dir, "train.rounds=5")
    output.refuses("the disk of .* is full: it has [0-9,]+ bytes free and .* need about [0-9,]+", "then resume the run")
    filler.unlink()
    assert not list(disk.rglob("*.part")) + list(disk.rglob("*.tmp"))
    assert raydfl("resume", run_dir, "train.rounds=5").code == 0
    assert_same_bits(check_reference(5), read_tensors(run_dir))


class FullAt:
    """Fake fsync that fails from the ``number``-th call."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._fsync = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.left -= 1
        if self.left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)


def run_with_full_disk(
    number: int, raydfl: Raydfl, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, bytes]
) -> bool:
    """Run with a full disk at one write, then with free space. Return whether the write happened."""
    name = f"full{number}"
    config = tiny("train.rounds=2", f"run.name={name}", f"data.cache={tmp_path / name}", method="fedmlac")
    file = write_config(config, tmp_path)
    full = FullAt(number)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        output = raydfl("run", file)
    if full.left > 0:
        assert output.code == 0
        return False
    output.refuses("the disk of .* is full: it has [0-9,]+ bytes free and .* need about [0-9,]+; make room")
    assert raydfl("run", file).code == 0
    assert_same_bits(expected, read_tensors(Path(config.run.dir) / name))
    return True


@pytest.mark.parametrize("number", [1, 8, 13, 19])
def test_a_full_disk_at_some_writes(
    raydfl: Raydfl,
    tiny: Tiny,
    check_reference: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    assert run_with_full_disk(number, raydfl, tiny, tmp_path, monkeypatch, check_reference(2))


class FullNode:
    def carry_out(self, *_: object) -> None:
        raise ResourcesError("the disk of /cache is full")


def test_the_message_of_a_client_actor_names_its_node(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydfl.cluster.client.hide_gpus", lambda: None)
    actor = ClientActor(tiny(), ActorKind(1, 0), lambda device, durable: FullNode())
    with pytest.raises(ResourcesError, match=rf"^node {platform.node()}: the disk of /cache is full$"):
        actor.carry_out([], [])


def test_a_full_object_store_and_disk_have_a_message() -> None:
    """Ray 2.60 raised this error for ray.put and for results, with local_fs_capacity_threshold=0.01."""
    error = unwrap_error(RayTaskError("rounds", "a traceback", OutOfDiskError()))
    assert isinstance(error, ResourcesError)
    assert "Make room in the folder for Ray's temporary files" in str(error)


@pytest.mark.slow
def test_a_full_disk_at_any_write(
    raydfl: Raydfl, tiny: Tiny, check_reference: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 1
    while run_with_full_disk(number, raydfl, tiny, tmp_path, monkeypatch, check_reference(2)):
        number += 1
    assert number > 15
