"""Lossless videos for tests, to compare decoded with written frames."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest


def write_film(
    path: Path, frames: np.ndarray, samples: np.ndarray | None = None, rate: int = 8000, fps: int = 10
) -> Path:
    """Write a video (.mkv).

    Args:
        frames: uint8 [frames, rows, columns] of grey, sides even.
        samples: int16 [samples, channels] (1 or 2); ``None``: it is silent.
    """
    import av

    with av.open(str(path), "w") as film:
        pictures = film.add_stream("ffv1", rate=fps)
        pictures.height, pictures.width = frames.shape[1:]
        pictures.pix_fmt = "gray"
        sound = None if samples is None else film.add_stream("pcm_s16le", rate=rate)
        if sound is not None and samples is not None:
            layout = sound.layout = "stereo" if samples.shape[1] == 2 else "mono"
            packed = np.ascontiguousarray(samples.astype(np.int16).reshape(1, -1))
            wave = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
            wave.sample_rate, wave.pts, wave.time_base = rate, 0, Fraction(1, rate)
            film.mux(sound.encode(wave))
            film.mux(sound.encode())
        for frame in frames:
            film.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="gray")))
        film.mux(pictures.encode())
    return path


def block_module(name: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make the import of a module fail, in this process and in a new helper for files."""
    folder = folder / "blocked"
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text("raise ImportError('it is not installed')")
    patch.setitem(sys.modules, name, None)
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", str(folder))
