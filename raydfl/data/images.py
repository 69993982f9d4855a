"""Reading of image files, and of the middle frames of videos."""

from __future__ import annotations

import numpy as np

from raydfl.core.isolation import reading
from raydfl.data.packed import load_source
from raydfl.data.video import is_video, read_frame

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
"""Suffixes of image files in folders, in lower case."""


def read_image(path: str, start: float = 0.0, stop: float | None = None) -> np.ndarray:
    """Read an image file in a format of Pillow (PNG, JPEG ...), or the middle frame of a video.

    Args:
        path: a file, or an address in a larger file (:mod:`raydfl.data.packed`).
        start: start of the video's section, in seconds. Image files ignore it.
        stop: end of the video's section, in seconds; ``None``: the end of the video.

    Returns:
        uint8 [rows, columns] of a grey image, else [rows, columns, 3].

    Raises:
        DataError: the file cannot be read.
        NoDecoderError: the file is a video, and PyAV is not installed.
    """
    if is_video(path):
        return read_frame(path, start, stop)
    from PIL import Image

    with reading(path, "the image cannot be read"), Image.open(load_source(path)) as image:
        grey = image.mode in ("1", "L", "I", "I;16", "F", "LA")
        return np.asarray(image.convert("L" if grey else "RGB"))
