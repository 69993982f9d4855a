"""Reading image files, and the middle of films."""

from __future__ import annotations

import numpy as np

from raydfl.core.errors import DataError
from raydfl.data.films import is_film, read_frame
from raydfl.data.packed import readable

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
"""Endings (in lower case) of the files that are taken for pictures where a folder is given."""


def read_image(path: str, start: float = 0.0, stop: float | None = None) -> np.ndarray:
    """Read an image file that Pillow knows (PNG, JPEG ...), or the frame in the middle of a film.

    Args:
        path: the file, or an address in a larger file (raydfl.data.packed).
        start: where the part of the film begins that is meant, in seconds; of no account in an image.
        stop: where that ends; ``None``: with the film.

    Returns:
        uint8 [rows, columns] of a grey image, else [rows, columns, 3].

    Raises:
        DataError: it cannot be read.
        NoDecoderError: it is a film, and PyAV is not installed.
    """
    if is_film(path):
        return read_frame(path, start, stop)
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(readable(path)) as picture:
            grey = picture.mode in ("1", "L", "I", "I;16", "F", "LA")
            return np.asarray(picture.convert("L" if grey else "RGB"))
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: this is no image that can be read") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: the image cannot be read: {error}") from error
