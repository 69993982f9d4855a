"""Failures in users' code: their place, and an error that names it."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Collection, Iterator

from raydfl.core.errors import ClientError, RaydflError

_LIBRARIES = frozenset({*sys.stdlib_module_names, "numpy", "raydfl", "torch", "torchvision"})

FAILURES: tuple[type[BaseException], ...] = (Exception, SystemExit, GeneratorExit)
"""Exceptions that count as a failure of a user's code. A KeyboardInterrupt stops the run instead."""


def is_users(module: str | None) -> bool:
    """Return whether a module name belongs to a user's code, not to raydfl or a library below it.

    >>> is_users("torch.nn.functional"), is_users("raydfl_user_0f1e2d"), is_users("__main__")
    (False, True, True)
    """
    return (module or "builtins").partition(".")[0] not in _LIBRARIES


def place_of(error: BaseException, otherwise: str = "") -> str:
    """Return the place of an exception, ``file.py:12``: the innermost line of a user's code in its traceback.

    Args:
        otherwise: returned if the traceback has no user's code. Empty: the innermost line of a library.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    users_frames = [(frame, line) for frame, line in frames if is_users(frame.f_globals.get("__name__"))]
    if otherwise and not users_frames:
        return otherwise
    frame, line = (users_frames or frames)[-1]
    return f"{frame.f_code.co_filename}:{line}"


def describe(error: BaseException) -> str:
    """Format an exception with its place: ``ValueError: text (at file.py:12)``."""
    return f"{type(error).__name__}: {error} (at {place_of(error)})"


@contextlib.contextmanager
def naming_failures(
    code: object, call: str, when: str = "", elsewhere: Collection[BaseException] = (), kind: str = "method"
) -> Iterator[None]:
    """Replace a user's exception by a ClientError that names class, file and line.

    Args:
        code: the user's object.
        call: name of its method.
        when: the round, for the message. Empty: before the first round.
        elsewhere: errors from outside the user's code. They are raised unchanged.
        kind: kind of the object, for the message, such as ``"method"``.

    Raises:
        ClientError: the user's code failed.
    """
    try:
        yield
    except RaydflError:
        raise
    except FAILURES as error:
        if any(error is outside for outside in elsewhere):
            raise
        raise ClientError(
            f"{when or 'before the first round'}: {call}() of {kind} {type(code).__qualname__} failed: {describe(error)}"
            f"{'; the last commit counts' * bool(when)}"
        ) from error
