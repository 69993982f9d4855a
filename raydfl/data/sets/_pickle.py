"""An interpreter of the pickles that CIFAR-10 and sets in its layout use; Python's own unpickler can run code and crash.

It knows the opcodes of these files and makes containers, numbers, texts and arrays. It calls nothing that a file names, and takes a
data type from a list.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular

_GLOBALS = (
    *("numpy ndarray", "numpy dtype", "_codecs encode"),
    *("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"),
)
_DTYPES = {name: np.dtype(name) for name in ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")}
_DTYPE_STATES = [(3, order, None, None, None, -1, -1, 0) for order in ("|", b"|", "<", b"<")]
"""The states of these data types; any other state would change the type."""
_LITERALS = (
    *("NONE", "BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
)
"""Opcodes that push their argument."""


class _ForeignError(Exception):
    """The pickle holds more than arrays, containers, numbers and texts."""


class _Global(NamedTuple):
    """A name to import. It is never imported."""

    name: str


class _Array:
    """An array that the pickle makes in two steps; ``None`` between them."""

    value: np.ndarray | None = None


def read_arrays(path: Path) -> Any:
    """Read a pickle of arrays, containers, numbers and texts; texts of Python 2 become bytes.

    Raises:
        OSError: there is no such file.
        DataError: the pickle is truncated or damaged, or holds anything else.
    """
    content = read_regular(path)
    try:
        return _Interpreter(content).run()
    except _ForeignError as error:
        raise DataError(
            f"{path}: it holds more than arrays, numbers and texts: {error}. Such a pickle could run code. Fetch the file again "
            f"from the set's own page"
        ) from None
    except Exception as error:  # damaged bytes can fail anywhere
        raise DataError(
            f"{path}: this is no pickle, or it is truncated or damaged ({error}); fetch it again"
        ) from error


class _Interpreter:
    """A stack machine; ``pickletools`` documents the opcodes."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._encoded = 0

    def run(self) -> Any:
        """Return the object that the pickle describes."""
        for opcode, argument, _ in pickletools.genops(self._content):
            if opcode.name == "STOP":
                return _contained(self._stack.pop(), dict)
            self._do(opcode.name, argument)
        raise ValueError("it has no end")

    def _do(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case _ if opcode in _LITERALS:
                stack.append(argument)
            case "SHORT_BINSTRING" | "BINSTRING":
                stack.append(argument.encode("latin-1"))
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode == "NEWTRUE")
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if opcode == "MEMOIZE" else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL" | "STACK_GLOBAL":
                name = argument if opcode == "GLOBAL" else " ".join(self._take(len(stack) - 2))
                if name not in _GLOBALS:
                    raise _ForeignError(f"it names {name.replace(' ', '.'):.80}")
                stack.append(_Global(name))
            case "REDUCE":
                function, arguments = self._take(len(stack) - 2)
                stack.append(self._call(_checked(function, _Global).name, _checked(arguments, tuple)))
            case "BUILD":
                self._set_state(*self._take(len(stack) - 1))
            case _:
                self._fill(opcode)

    def _fill(self, opcode: str) -> None:
        """Make a container, or put items into one."""
        stack = self._stack
        match opcode:
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._take(self._marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._take(len(stack) - int(opcode[-1]))))
            case "APPEND" | "APPENDS":
                items = self._take(len(stack) - 1 if opcode == "APPEND" else self._marks.pop())
                _checked(stack[-1], list).extend(_contained(item) for item in items)
            case "SETITEM" | "SETITEMS":
                pairs = self._take(len(stack) - 2 if opcode == "SETITEM" else self._marks.pop())
                keys = [_contained(key) for key in pairs[::2]]
                values = [_contained(value, list, np.ndarray) for value in pairs[1::2]]
                _checked(stack[-1], dict).update(zip(keys, values, strict=True))
            case _:
                raise _ForeignError(f"it has the opcode {opcode}")

    def _take(self, start: int) -> list[Any]:
        """Remove the top of the stack, from this position on."""
        if not 0 <= start <= len(self._stack):
            raise ValueError("an operand is missing")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return the result of a call of this function."""
        if name.endswith("_reconstruct"):
            return _Array()
        if name == "numpy dtype":
            kind = arguments[0]
            kind = kind.decode("latin-1") if isinstance(kind, bytes) else kind
            if not isinstance(kind, str) or kind not in _DTYPES:
                raise _ForeignError("it has an array of another data type than numbers")
            return _DTYPES[kind]
        if name == "_codecs encode":  # bytes, in a pickle that Python 3 wrote for Python 2
            text, encoding = arguments
            self._encoded += len(_checked(text, str))
            # One text that is encoded many times would fill the memory.
            if encoding != "latin1" or self._encoded > len(self._content):
                raise _ForeignError("it has bytes in an unknown encoding")
            return text.encode("latin-1")
        raise _ForeignError(f"it calls {name.replace(' ', '.')}")

    def _set_state(self, state: Any) -> None:
        target = self._stack[-1]
        if isinstance(target, _Array):
            _, shape, dtype, by_columns, content = _checked(state, tuple)
            values = np.frombuffer(_checked(content, bytes), _checked(dtype, np.dtype))
            target.value = values.reshape(_checked(shape, tuple), order="F" if by_columns else "C")
        elif not isinstance(target, np.dtype) or state not in _DTYPE_STATES:
            raise _ForeignError("it changes the state of an object")


def _checked(value: Any, kind: type) -> Any:
    """Return an operand of this type."""
    if type(value) is not kind and not (kind is np.dtype and isinstance(value, kind)):
        raise ValueError(f"an operand is no {kind.__name__}")
    return value


def _contained(value: Any, *kinds: type) -> Any:
    """Return a valid item of a container: a number, a text, or a value of these types."""
    if isinstance(value, _Array):
        value = value.value
        if value is None:
            raise ValueError("an array has no content")
    if not isinstance(value, (int, float, str, bytes, type(None), *kinds)):
        raise _ForeignError(f"it has a {type(value).__name__} within a container")
    return value
