"""The number of clients to train in one computation, measured once for a kind of work and a device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Hashable
from pathlib import Path

from raydfl.core.errors import ClientError
from raydfl.core.files import write_atomically

logger = logging.getLogger(__name__)

_WORTH = 0.95
"""A doubled width has to take at most this share of the time for a client, else it is not worth its memory."""


def best_width(seconds: Callable[[int], float], most: int) -> int:
    """Return the width beyond which doubling it gains nothing.

    Args:
        seconds: measures a client's time at a width. A failure of it (no memory) ends the search.
        most: clients that there are.
    """
    best, fastest = 1, seconds(1)
    width = 2
    while width <= most:
        try:
            took = seconds(width)
        except (RuntimeError, ClientError) as error:
            logger.info("%d clients at once do not fit: %s", width, error)
            break
        if took > _WORTH * fastest:
            break
        best, fastest = width, took
        width *= 2
    return best


def remembered(path: Path, kind: Hashable, measure: Callable[[], int]) -> int:
    """Return what ``measure`` gave the first time for work of this kind; later calls read it from ``path``.

    Args:
        kind: what it depends on; equal kinds have equal ``repr``.
    """
    key = hashlib.blake2b(repr(kind).encode(), digest_size=12).hexdigest()
    known: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):  # not there yet, or of an older version: measured again
        known = json.loads(path.read_text())
    if isinstance(known.get(key), int):
        return known[key]
    width = measure()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a measurement, not the run
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps({**known, key: width}, indent=1)))
    return width
