"""Reading a pickle that holds arrays and plain values, without executing code that it names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from raydfl.core.errors import DataError

_ARRAYS = {
    **dict.fromkeys((("numpy", "ndarray"), ("numpy", "dtype"))),
    **dict.fromkeys((module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
    ("_codecs", "encode"): None,  # bytes, in a pickle that Python 3 wrote for Python 2
}


class _ForeignError(Exception):
    """Something else than an array is named."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise _ForeignError(f"{module}.{name}")
        return super().find_class(module, name)


def read_arrays(path: Path) -> Any:
    """Return what a pickle holds: arrays, containers, numbers, texts; texts of Python 2 as bytes.

    Raises:
        OSError: there is no such file.
        DataError: it is truncated, no pickle, or names a class or function of something else, which is not loaded.
    """
    with path.open("rb") as file:
        try:
            return _Unpickler(file, encoding="bytes").load()
        except _ForeignError as error:
            raise DataError(
                f"{path}: it holds more than arrays: reading it would load {error} and could run code; fetch it again from the "
                f"set's own page"
            ) from None
        except Exception as error:  # whatever the bytes of a damaged pickle ask for
            raise DataError(
                f"{path}: this is no pickle, or it is truncated or damaged ({error}); fetch it again"
            ) from error
