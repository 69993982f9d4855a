"""Exceptions of raydfl, and their exit codes.

A message gives the place, the problem and the remedy. The command line prints it without a traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class RaydflError(Exception):
    """Base class of raydfl's exceptions. ``exit_code`` is the command's exit status."""

    exit_code = 1


class InputError(RaydflError):
    """Invalid input from the user. Exit code 2."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration has an unknown key, a wrong type, a value out of range, or contradictory values."""


class DataError(InputError):
    """Recordings, a manifest or a partition are invalid."""


class ClipError(DataError):
    """An error of a single clip, known by its number in the list of recordings. ``str()`` is without the clip's name.

    Args:
        clip: number of the clip in the list.
        message: the message, with ``{clip}`` for the name.
    """

    def __init__(self, clip: int, message: str) -> None:
        super().__init__(clip, message)  # all arguments, so that pickle restores the error
        self.clip, self._message = clip, message

    def __str__(self) -> str:
        return self.describe(f"number {self.clip}")

    def describe(self, name: str) -> str:
        """Return the message with the name of the clip."""
        return self._message.replace("{clip}", name)


class RunDirectoryError(InputError):
    """A run folder is missing, corrupt, incomplete, in use, or belongs to a different configuration."""


class ResourcesError(InputError):
    """The cluster lacks resources that the configuration requests, or the disk is full."""


class PolicyError(InputError):
    """The policy of a site rejects a run."""


class ClientError(RaydflError):
    """A user's code failed on a client or at the server. The run stopped at its last commit."""


@contextlib.contextmanager
def translate_failures(make_error: Callable[[str], RaydflError]) -> Iterator[None]:
    """Translate every exception of a reader of untrusted bytes. Errors of raydfl pass through.

    Args:
        make_error: Makes the error from the reason (:func:`explain_failure`).
    """
    try:
        yield
    except RaydflError:
        raise
    except Exception as error:
        raise make_error(explain_failure(error)) from error


def explain_failure(error: Exception) -> str:
    """Return the reason of a reader's failure in a message, without a full stop.

    >>> explain_failure(KeyError("id")), explain_failure(FileNotFoundError(2, "No such file or directory"))
    ("KeyError: 'id'", 'No such file or directory')
    """
    if isinstance(error, MemoryError):
        return "it needs more memory than is available. If the file is small, it is damaged: copy it again"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, LookupError | TypeError | AttributeError):  # Their messages alone are often a bare name.
        return f"{type(error).__name__}: {error!s:.500}"
    return f"{error!s:.500}".removesuffix(".") or type(error).__name__


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the closest known word, or list all known words if none is close.

    >>> nearest("ronds", ["rounds", "cohort"])
    "Did you mean 'rounds'?"
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Choose one of {', '.join(names)}." if names else "There is none."


def first_line(error: BaseException | str) -> str:
    r"""Return the first line of an error's message, or its type if the message is empty.

    >>> first_line(OSError("no route to host\nmore")), first_line(TimeoutError())
    ('no route to host', 'TimeoutError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    r"""Escape control characters, bidirectional marks and lone surrogates. Newlines and tabs stay.

    Clients' errors, file names and labels may contain any character. raydfl escapes them before showing them (raydfl.runs.progress,
    raydfl.cli.main) and before it records clients' errors.

    >>> print(printable("\x1b[2Jgone"))
    \x1b[2Jgone
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
