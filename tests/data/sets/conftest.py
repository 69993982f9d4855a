from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile


@pytest.fixture(scope="session")
def recordings() -> Path:
    """Return the folder of sample recordings: $RAYDFL_DATA, or shared/data next to the repository."""
    folder = Path(os.environ.get("RAYDFL_DATA") or Path(__file__).parents[3].parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no sample recordings: set RAYDFL_DATA")
    return folder


@pytest.fixture
def write_audio(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of tones below ``tmp_path``, in the format of the file's suffix."""

    def write(name: str, seconds: float = 0.05, rate: int = 16000, channels: int = 1) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        time = np.arange(round(seconds * rate)) / rate
        tone = 0.25 * np.sin(2 * np.pi * 440 * time)
        soundfile.write(path, np.stack([tone] * channels, axis=1), rate)
        return path

    return write
