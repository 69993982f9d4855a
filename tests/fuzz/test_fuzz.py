"""Damaged files: a few cases of each format. ``make fuzz`` runs an hour's worth."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fuzz
import pytest


def spend_memory() -> None:
    bytearray(b"1") * 1_000_000_000
    sys.exit(0)


@pytest.mark.parametrize(
    ("call", "end"),
    [
        (lambda: sys.exit(0), "0"),
        (lambda: sys.exit(2), "2"),
        (lambda: sys.exit(1), "exit code 1"),
        (lambda: int("x"), "ValueError"),
        (lambda: None, "no exit"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"),
        (spend_memory, "memory"),
        (lambda: time.sleep(60), "time"),
    ],
)
def test_each_kind_of_failure_is_found(call: Callable[[], None], end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if end == "time":
        monkeypatch.setattr(fuzz, "SECONDS", 0.5)
    if end == "memory":  # far below: the kernel may reclaim other pages of a large process in the meantime
        monkeypatch.setattr(fuzz, "MEGABYTES", 100)
    assert fuzz.run_child(call) == end


def test_damage_depends_on_the_seed() -> None:
    content = bytes(range(256)) * 4
    damaged = [fuzz.damage(content, random.Random(seed)) for seed in range(200)]
    assert damaged == [fuzz.damage(content, random.Random(seed)) for seed in range(200)]
    assert sum(result != content for result in damaged) > 190
    assert {len(result) < len(content) for result in damaged} == {True, False}


SOME = ["recordings, wav", "list of clips, Parquet", "MNIST", "features, npz", "run, predict"]


@pytest.mark.parametrize(
    ("formats", "cases"),
    [(SOME, 2), pytest.param([*fuzz.FORMATS], 40, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_damaged_files_end_with_a_message(formats: list[str], cases: int) -> None:
    """In a process of its own, because a fork of this process would lose its threads."""
    only = [f"--only={name}" for name in formats]
    program = [sys.executable, fuzz.__file__, "--cases", str(cases), "--seed", "1000", *only]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False, cwd=Path.home())
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(formats) + 1


def test_the_figures_of_the_documentation_cover_all_formats() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    match = re.search(
        r"(\d+) formats with (\d+) damaged inputs each by `python tests/fuzz/fuzz.py --cases (\d+)`", page
    )
    assert match is not None
    assert int(match[1]) == len(fuzz.FORMATS)
    assert match[2] == match[3]
