"""Every error that raydfl raises on purpose, and the exit code that each one ends a command with.

A message names what was wrong, the value, the place and the next action. The command line prints it without a traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class RaydflError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the command line ends with."""

    exit_code = 1


class InputError(RaydflError):
    """Something that the user gave cannot be used: exit code 2."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration has an unknown key, a wrong type, a value out of range, or values that contradict each other."""


class DataError(InputError):
    """Recordings, manifests or partitions that cannot be used as given."""


class RunDirectoryError(InputError):
    """A run directory is missing, corrupt, half-written, in use, or belongs to another configuration."""


class ResourcesError(InputError):
    """The cluster does not have what the configuration asks for, or the disk is full."""


class ClientError(RaydflError):
    """A method's code failed on one client or at the server; the run stopped at its last commit."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a ``did you mean`` clause for an unknown word, with all known ones when none is close.

    >>> nearest("ronds", ["rounds", "cohort"])
    "did you mean 'rounds'?"
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else "there is none"


def first_line(error: BaseException) -> str:
    r"""Return the first line of what an error says; its kind if it says nothing.

    >>> first_line(OSError("no route to host\nmore")), first_line(TimeoutError())
    ('no route to host', 'TimeoutError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    r"""Return ``text`` with what would steer a terminal, turn letters round or cannot be encoded written out; lines and tabs stay.

    Clients' errors, names of files and labels may hold anything. What is shown goes through here (raydfl.runs.progress,
    raydfl.cli.main), and what is recorded of clients' errors.

    >>> print(printable("\x1b[2Jgone"))
    \x1b[2Jgone
    """
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
