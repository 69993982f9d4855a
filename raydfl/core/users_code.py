"""The origin of code: a user's own, or raydfl and the libraries below it."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Collection, Iterator

from raydfl.core.errors import ClientError, RaydflError

_LIBRARIES = frozenset({*sys.stdlib_module_names, "numpy", "raydfl", "torch", "torchvision"})

FAILURES: tuple[type[BaseException], ...] = (Exception, SystemExit, GeneratorExit)
"""Exceptions with which a user's code fails. A KeyboardInterrupt is the user's wish to stop the run."""


def is_users(module: str | None) -> bool:
    """Return whether a module of that name is a user's.

    >>> is_users("torch.nn.functional"), is_users("raydfl_user_0f1e2d"), is_users("__main__")
    (False, True, True)
    """
    return (module or "builtins").partition(".")[0] not in _LIBRARIES


def place_of(error: BaseException, otherwise: str = "") -> str:
    """Return ``file.py:12``: where an exception was raised, or the user's line that called the library that raised it.

    Args:
        otherwise: what to return if no line of a user's was running; empty: the line of the library.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if is_users(frame.f_globals.get("__name__"))]
    if otherwise and not own:
        return otherwise
    frame, line = (own or frames)[-1]
    return f"{frame.f_code.co_filename}:{line}"


def describe(error: BaseException) -> str:
    """Return ``ValueError: text (at file.py:12)``: an exception with the place that raised it."""
    return f"{type(error).__name__}: {error} (at {place_of(error)})"


@contextlib.contextmanager
def naming_failures(
    code: object, call: str, when: str = "", elsewhere: Collection[BaseException] = (), kind: str = "method"
) -> Iterator[None]:
    """Raise a ClientError that names class, file and line, in place of an exception that a user's code raises inside.

    Args:
        code: the user's object.
        call: name of the override point.
        when: the round, for the message; empty: the first round has not begun.
        elsewhere: errors that only pass through the user's code; they are raised as they are.
        kind: of the object, for the message.

    Raises:
        ClientError: the user's code failed.
    """
    try:
        yield
    except RaydflError:
        raise
    except FAILURES as error:
        if any(error is other for other in elsewhere):
            raise
        raise ClientError(
            f"{when or 'before the first round'}: {call}() of {kind} {type(code).__qualname__} failed: {describe(error)}"
            f"{'; the last commit counts' * bool(when)}"
        ) from error
