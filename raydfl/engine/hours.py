"""Training hours of clients (``train.fleet.hours``), in virtual time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from raydfl.core.errors import ConfigError
from raydfl.engine.assembly import format_value
from raydfl.engine.clients import Clients
from raydfl.training import HoursSettings

Span = tuple[float, float]
"""First and last second. The last may be in the next period."""
_SPAN = re.compile(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")


class Hours:
    """Hours of all clients, repeated after a period.

    Args:
        spans: Distinct lists of spans, see :func:`parse_spans`.
        places: Position of each client's list, int [clients].
        period: Period in seconds.
    """

    def __init__(self, spans: Sequence[Sequence[Span]], places: np.ndarray, period: float) -> None:
        self._count = len(spans)
        self._places = places
        self._period = period
        self._list_of = np.repeat(np.arange(len(spans)), [len(several) for several in spans])
        begins_and_ends = np.array([span for several in spans for span in several]).reshape(-1, 2)
        self._begins, self._lengths = begins_and_ends[:, 0], begins_and_ends[:, 1] - begins_and_ends[:, 0]

    @classmethod
    def read(cls, settings: HoursSettings, clients: Clients) -> Hours:
        """Read the hours of all clients from a column of their profiles.

        Raises:
            ConfigError: A client has no hours, or its hours are invalid. The message names the client.
        """
        values, places = clients.read_column(settings.column)
        problems: dict[int, str] = {-1: f"has no {settings.column}"}
        spans: list[Sequence[Span]] = []
        for number, value in enumerate(values):
            try:
                spans.append(parse_spans(value, settings.period))
            except ValueError as error:
                spans.append([])
                problems[number] = f"has {settings.column} = {format_value(value)}: {error}"
        bad = np.flatnonzero(np.isin(places, list(problems)))
        if len(bad):
            raise ConfigError(
                f"train.fleet.hours: client {clients[int(bad[0])].id!r} {problems[int(places[bad[0]])]}. Give each client spans of "
                f"seconds within the period of {settings.period:g} s, such as '0-3600 7200-10800'"
            )
        return cls(spans, places, settings.period)

    def find_ends(self, now: float) -> np.ndarray:
        """Return the end of each client's current span, float64 [clients]: ``-inf`` outside its hours, ``inf`` without an end."""
        starts, lengths = self._find_starts(now), self._lengths
        current = (starts <= now) & (now < starts + lengths)
        ends = np.where(current, np.where(lengths >= self._period, math.inf, starts + lengths), -math.inf).max(0)
        latest = np.full(self._count, -math.inf)
        np.maximum.at(latest, self._list_of, ends)
        found: np.ndarray = latest[self._places]
        return found

    def find_opening(self, now: float, unavailable: Set[int], eligible: np.ndarray | None) -> float:
        """Return the next start of an available client's hours after ``now``; ``inf`` without an available client.

        Args:
            now: Virtual time in seconds.
            unavailable: Indices of unavailable clients.
            eligible: Whether each client may take part, bool [clients]. ``None``: all clients.
        """
        counts = np.bincount(self._places if eligible is None else self._places[eligible], minlength=self._count)
        counts -= np.bincount(self._places[sorted(unavailable)], minlength=self._count)
        begins = (counts[self._list_of] > 0) & (self._lengths < self._period)
        starts = self._find_starts(now)[:, begins]
        return float(starts[starts > now].min(initial=math.inf))

    def _find_starts(self, now: float) -> np.ndarray:
        """Return the starts of all spans around a time, float64 [4, spans]. Repeated calls give equal numbers for a start."""
        cycles = math.floor(now / self._period) + np.arange(-1, 3)
        starts: np.ndarray = cycles[:, None] * self._period + self._begins
        return starts


def parse_spans(value: Any, period: float) -> list[Span]:
    """Parse the hours of a client: ``0-3600 7200-10800``. Adjacent spans are joined, across the end of the period too.

    Raises:
        ValueError: The value is no such text, or its spans overlap, end before they begin, or leave the period.
    """
    parts = [_SPAN.fullmatch(part) for part in str(value).split()]
    spans = sorted((float(part[1]), float(part[2])) for part in parts if part)
    if not spans or not all(parts):
        raise ValueError("it is not a list of spans BEGIN-END")
    joined: list[Span] = []
    for begin, end in spans:
        if not begin < end <= period:
            raise ValueError(f"the span {begin:g}-{end:g} is empty or leaves the period")
        if joined and begin < joined[-1][1]:
            raise ValueError(f"the spans overlap at {begin:g}")
        if joined and begin == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    if len(joined) > 1 and joined[0][0] == 0 and joined[-1][1] == period:
        return [*joined[1:-1], (joined[-1][0], period + joined[0][1])]
    return joined
