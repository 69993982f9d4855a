from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile


@pytest.fixture(scope="session")
def recordings() -> Path:
    """The folder of sample recordings: $RAYDFL_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("RAYDFL_DATA") or Path(__file__).parents[3].parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no sample recordings: set RAYDFL_DATA")
    return folder


_GIVE_UP_RIGHTS = """
import ctypes, os, sys
for right in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root may open everything
    ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP: gone with the next exec
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def without_rights() -> Callable[..., str]:
    """Runs Python in a process to which the rights of files and folders apply (tests may run as root); gives what it prints."""

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", _GIVE_UP_RIGHTS, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return done.stdout + done.stderr

    return run


@pytest.fixture
def write_audio(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tone below tmp_path, in the format of the suffix."""

    def write(name: str, seconds: float = 0.05, rate: int = 16000, channels: int = 1) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        time = np.arange(round(seconds * rate)) / rate
        tone = 0.25 * np.sin(2 * np.pi * 440 * time)
        soundfile.write(path, np.stack([tone] * channels, axis=1), rate)
        return path

    return write
