"""Digits on tiny files: MNIST's format, and spoken digits with images of digits."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import soundfile

IMAGES = np.arange(5 * 28 * 28).reshape(5, 28, 28).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """Encode an array of bytes in the format of MNIST."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def spoken_and_written(folder: Path, takes: int) -> None:
    """Write takes of the spoken digits 3 and 7, and :data:`IMAGES`, three of a 3 and two of a 7."""
    (folder / "recordings").mkdir()
    for digit in (3, 7):
        for take in range(takes):
            wave = 0.1 * np.random.default_rng([digit, take]).standard_normal(800)
            soundfile.write(folder / f"recordings/{digit}_anna_{take}.wav", wave, 8000)
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(IMAGES))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([7, 3, 3, 7, 3], np.uint8)))
