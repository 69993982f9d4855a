"""CIFAR-10 (A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009), the version for Python: small photographs.

Colour images of 32 x 32: 50,000 for training and 10,000 for the test, the official split. Either part may be missing; the set
then has no split. The files are pickles. They are read without executing code in them, and pickles with anything but arrays and
plain values are rejected. The reader is tested on small files in this layout, not on the whole set.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.core.isolation import reading
from raydfl.data.dataset import Card
from raydfl.data.sets._arrays import ArraySet, check_arrays, read_cached

_PLANES, _SIDE = 3, 32


class CIFAR10(ArraySet):
    """Photographs of animals and vehicles, without owners.

    Images have no owner (group is null). Extra column: ``number`` (int64).
    """

    card: ClassVar[Card] = Card(
        title="CIFAR-10",
        layout="data_batch_1 ... data_batch_5 and test_batch, directly or in a folder cifar-10-batches-py",
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
        """Read the images and labels of a pickle file."""
        return read_cached(_read, file)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images, uint8 [images, 32, 32, 3], and labels, int64 [images]."""
    file = io.BytesIO(read_regular(path))
    try:
        with reading(path, "truncated, damaged, or not a pickle", "Download the file again"):
            content = _Interpreter(file, encoding="bytes").load()
            batch = {name.decode() if isinstance(name, bytes) else name: value for name, value in content.items()}
    except _ForeignError as error:
        raise DataError(
            f"{path}: the pickle contains more than arrays, numbers and texts: {error}. It could run code. Download the file again "
            f"from the set's own page"
        ) from None
    for name in ("data", "labels"):
        if name not in batch:
            raise DataError(f"{path}: the batch has no {name!r}. Download the file again")
    data, labels = (value.values if isinstance(value, _Array) else value for value in (batch["data"], batch["labels"]))
    images, numbers = check_arrays(path, data, labels, (_PLANES * _SIDE * _SIDE,))
    return images.reshape(-1, _PLANES, _SIDE, _SIDE).transpose(0, 2, 3, 1), numbers  # stored by colour plane


class _ForeignError(DataError):
    """The pickle contains more than arrays, containers, numbers and texts."""


class _DataType:
    """Stand-in for a NumPy data type. The state of a real one could make NumPy follow addresses in the file."""

    def __init__(self, kind: Any, *_: Any) -> None:
        name = kind.decode("latin-1") if isinstance(kind, bytes) else kind
        if name not in ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"):
            raise _ForeignError("it has an array of an unsupported data type")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        if state not in [(3, order, None, None, None, -1, -1, 0) for order in ("|", b"|", "<", b"<")]:
            raise _ForeignError("it changes the state of an object")


class _Array:
    """Stand-in for a NumPy array."""

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
"""Opcodes in files of CIFAR-10 and of sets in its layout."""


class _Dispatch(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise _ForeignError(f"it has the opcode {code:#04x}")


class _Interpreter(pickle._Unpickler):
    """Unpickler with few opcodes. It calls only the stand-ins in this module.

    It extends the unpickler written in Python, because the C version allocates any amount of memory that a damaged file requests.
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
        """Remaining characters to encode. A malicious file could encode a text repeatedly for hours."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a function or class."""
        match f"{module}.{name}":
            case "numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct" | "numpy.ndarray":
                return _Array
            case "numpy.dtype":
                return _DataType
            case "_codecs.encode":
                return self._encode
        raise _ForeignError(f"it names {module}.{name}"[:90])

    def _encode(self, text: str, encoding: str) -> bytes:
        """Recover bytes that Python 3 wrote as text for Python 2."""
        self._left -= len(text)
        if encoding != "latin1" or self._left < 0:
            raise _ForeignError("it has bytes in an unknown encoding")
        return text.encode("latin-1")
