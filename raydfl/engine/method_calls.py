"""Calls of a method's code at the server: what it raises becomes one message, as at a client."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from raydfl.core.errors import ClientError, RaydflError
from raydfl.core.users_code import FAILURES, describe
from raydfl.methods import Method


@contextlib.contextmanager
def naming_failures(method: Method, call: str, when: str, elsewhere: Collection[BaseException] = ()) -> Iterator[None]:
    """Raise a ClientError that names method, file and line, in place of what the method's code raises inside.

    Args:
        method: the method.
        call: name of the override point that is called.
        when: the round, for the message.
        elsewhere: errors that only pass through the method's code; they are raised as they are.

    Raises:
        ClientError: the method's code failed.
    """
    try:
        yield
    except RaydflError:
        raise
    except FAILURES as error:
        if any(error is other for other in elsewhere):
            raise
        name = type(method).__qualname__
        raise ClientError(
            f"{when}: {call}() of method {name} failed: {describe(error)}; the last commit counts"
        ) from error
