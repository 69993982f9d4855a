"""Base class of messages between processes, with a fast pickle."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any


class Message:
    """Base class of frozen dataclasses with slots and at least two fields.

    Python's own pickle of such a class takes several times as long. A server handles thousands of messages in a round.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        cls: Any = type(self)
        return cls, _make_getter(cls)(self)


@functools.cache
def _make_getter(cls: Any) -> Callable[[Message], tuple[Any, ...]]:
    """Return a function that reads the values of all fields, in order."""
    return operator.attrgetter(*(field.name for field in dataclasses.fields(cls)))
