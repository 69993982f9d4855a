"""Reading image files."""

from __future__ import annotations

import numpy as np

from raydfl.core.errors import DataError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
"""Endings (in lower case) of the files that are taken for pictures where a folder is given."""


def read_image(path: str) -> np.ndarray:
    """Read an image file that Pillow knows (PNG, JPEG ...): uint8 [rows, columns] of a grey one, else [rows, columns, 3].

    Raises:
        DataError: it cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            grey = picture.mode in ("1", "L", "I", "I;16", "F", "LA")
            return np.asarray(picture.convert("L" if grey else "RGB"))
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: this is no image that can be read") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: the image cannot be read: {error}") from error
