"""CIFAR-10 (A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009), the version for Python: small photographs.

Five pickles of 10,000 images each for training and one for the test; the five, or the one, may be missing. They are read without
executing code that they name.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.data.dataset import Card
from raydfl.data.sets._arrays import ArraySet, check_arrays, read_once

_PLANES, _SIDE = 3, 32


class CIFAR10(ArraySet):
    """Photographs of animals and vehicles; nobody owns them."""

    card: ClassVar[Card] = Card(
        title="CIFAR-10",
        layout="data_batch_1 ... data_batch_5 and test_batch, or a folder cifar-10-batches-py that holds them",
        licence="none given; published for research",
        url="https://www.cs.toronto.edu/~kriz/cifar.html",
        classes=10,
    )
    parts: ClassVar = {**{f"data_batch_{number}": "train" for number in range(1, 6)}, "test_batch": "test"}
    below: ClassVar = ("cifar-10-batches-py",)
    published: ClassVar = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )

    def read_arrays(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`ArraySet`."""
        return read_once(_read, file)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [images, 32, 32, 3] and labels int64 [images]."""
    file = io.BytesIO(read_regular(path))
    try:
        content = _Interpreter(file, encoding="bytes").load()
        found = {name.decode() if isinstance(name, bytes) else name: value for name, value in content.items()}
    except _ForeignError as error:
        raise DataError(
            f"{path}: it holds more than arrays, numbers and texts: {error}. Such a pickle could run code. Fetch the file again "
            f"from the set's own page"
        ) from None
    except Exception as error:  # damaged bytes can fail anywhere
        raise DataError(
            f"{path}: this is no pickle, or it is truncated or damaged ({type(error).__name__}: {error!s:.200}); fetch it again"
        ) from error
    for name in ("data", "labels"):
        if name not in found:
            raise DataError(f"{path}: the batch has no {name!r}; fetch it again")
    data, labels = (value.values if isinstance(value, _Array) else value for value in (found["data"], found["labels"]))
    images, numbers = check_arrays(path, data, labels, (_PLANES * _SIDE * _SIDE,))
    return images.reshape(-1, _PLANES, _SIDE, _SIDE).transpose(0, 2, 3, 1), numbers


class _ForeignError(Exception):
    """The pickle holds more than arrays, containers, numbers and texts."""


class _DataType:
    """Stand-in for a data type of NumPy, whose own state could make it follow addresses in the file."""

    def __init__(self, kind: Any, *_: Any) -> None:
        name = kind.decode("latin-1") if isinstance(kind, bytes) else kind
        if name not in ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"):
            raise _ForeignError("it has an array of another data type than numbers")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        if state not in [(3, order, None, None, None, -1, -1, 0) for order in ("|", b"|", "<", b"<")]:
            raise _ForeignError("it changes the state of an object")


class _Array:
    """Stand-in for an array of NumPy."""

    values: np.ndarray | None = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        self.values = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if by_columns else "C")


_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
)
"""The opcodes in the files of CIFAR-10 and of sets in its layout."""


class _Dispatch(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise _ForeignError(f"it has the opcode {code:#04x}")


class _Interpreter(pickle._Unpickler):
    """Interpreter of few opcodes that calls nothing but this file's own stand-ins.

    It extends Python's unpickler that is written in Python. The one in C reserves as much memory as a damaged file asks for.
    """

    def load_build(self) -> None:
        """Set the state of a stand-in."""
        if not isinstance(cast(Any, self).stack[-2], _Array | _DataType):
            raise _ForeignError("it changes the state of an object")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](cast(Any, self))

    dispatch = _Dispatch(
        {code: pickle._Unpickler.dispatch[code] for name in _OPCODES for code in getattr(pickle, name)}
        | {pickle.BUILD[0]: load_build}
    )

    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._left = file.getbuffer().nbytes
        """Characters that may still be encoded: a text that is encoded again and again takes hours."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a function or class that the pickle names."""
        match f"{module}.{name}":
            case "numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct" | "numpy.ndarray":
                return _Array
            case "numpy.dtype":
                return _DataType
            case "_codecs.encode":
                return self._encode
        raise _ForeignError(f"it names {module}.{name}"[:90])

    def _encode(self, text: str, encoding: str) -> bytes:
        """Return bytes that Python 3 wrote for Python 2."""
        self._left -= len(text)
        if encoding != "latin1" or self._left < 0:
            raise _ForeignError("it has bytes in an unknown encoding")
        return text.encode("latin-1")
