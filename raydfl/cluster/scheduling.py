"""The next calls to client actors, planned from costs and expected times alone.

A *piece* is the work of one order, or of one group of orders. A *call* carries one or more pieces to an actor. Pieces have
positions in client order, in which the server uses their results.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WORTH = 0.2
"""Seconds of work that one call to an actor should carry: a call costs some milliseconds of two processes' time."""
_WINDOW = 6
"""Calls for each actor that the window holds. With 4, calls of short pieces are too small: simulated rounds took 3 % longer."""
_LONG = 0.5
"""A piece is long if one actor needs this share of the time that all actors need for the rest. With 1, simulated rounds took up to
10 % longer. With 0.25, the server held twice as many results."""
_AHEAD = 2
"""Calls that an actor has at most: one in progress and one next."""
_LONGEST = 1.0
"""Seconds of work of one call at most: with more, results wait, take memory, and are lost together."""
_MOST = 8
"""Pieces in a call while nothing is known about how long they take."""


@dataclass(slots=True)
class Lane:
    """An actor: its calls, the time at which it will have answered them, and its pace."""

    key: Any
    load: int
    """Calls."""
    free_at: float
    """Seconds, on the same clock as ``now``."""
    pace: float
    """Expected seconds for a unit of cost; 0: unknown."""


class Backlog:
    """Pieces that wait, and a window over the pieces of a round.

    The window begins at the first piece without a result. Pieces behind it wait: the server could not use their results yet.

    Args:
        pieces: position and cost of each, by rising position.
    """

    def __init__(self, pieces: Iterable[tuple[int, float]] = ()) -> None:
        self._costs = dict(pieces)
        self._positions = list(self._costs)
        self._sums = list(itertools.accumulate(self._costs.values(), initial=0.0))
        self._done: set[int] = set()
        self._begin = 0
        # Heaps, which may hold pieces that are taken already.
        self._first = list(self._positions)
        self._longest = [(-cost, position) for position, cost in self._costs.items()]
        heapq.heapify(self._longest)
        self.left = self._sums[-1]
        """The cost of all pieces that wait."""

    def __len__(self) -> int:
        return len(self._costs)

    def add(self, position: int, cost: float) -> None:
        """Let a further piece wait."""
        self._costs[position] = cost
        self.left += cost
        heapq.heappush(self._first, position)
        heapq.heappush(self._longest, (-cost, position))

    def take(self, position: int) -> float:
        """Remove a piece; return its cost."""
        cost = self._costs.pop(position)
        self.left = self.left - cost if self._costs else 0.0
        return cost

    def first(self) -> int:
        """Return the position of the first piece."""
        while self._first[0] not in self._costs:
            heapq.heappop(self._first)
        return self._first[0]

    def longest(self) -> int:
        """Return the position of the longest piece, of equal ones the first."""
        while self._longest[0][1] not in self._costs:
            heapq.heappop(self._longest)
        return self._longest[0][1]

    def sort_by_cost(self) -> list[tuple[int, float]]:
        """Return position and cost of all pieces, the longest first."""
        return sorted(self._costs.items(), key=operator.itemgetter(1), reverse=True)

    def cost(self, position: int) -> float:
        """Return the cost of a piece."""
        return self._costs[position]

    def note_result(self, position: int) -> None:
        """Note that the result of a piece is there; the window may move on."""
        self._done.add(position)
        while self._begin < len(self._positions) and self._positions[self._begin] in self._done:
            self._begin += 1

    def end(self, calls: int, cost: float) -> float:
        """Return the position at which the window ends.

        Args:
            calls: that the window holds, each of one piece at least.
            cost: of the pieces in a call.
        """
        end = max(self._begin + calls, bisect_left(self._sums, self._sums[self._begin] + calls * cost))
        return self._positions[end] if end < len(self._positions) else math.inf


class _Kind:
    """Lanes of one pace."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.lanes: list[tuple[float, int, int, Lane]] = []
        """Those that may get a call, as a heap: seconds until the lane is free, its load, its number."""
        self.full = math.inf
        """Seconds until the first of the others is free."""

    def put(self, lane: Lane, most: float, number: int, now: float) -> None:
        """Place a lane.

        Args:
            lane: of this pace.
            most: calls that it may have.
            number: decides between equal lanes.
            now: the time.
        """
        busy = max(lane.free_at - now, 0.0)
        if lane.load < most:
            heapq.heappush(self.lanes, (busy, lane.load, number, lane))
        else:
            self.full = min(self.full, busy)

    def soonest(self) -> float:
        """Return the seconds until the first lane is free."""
        return min(self.full, self.lanes[0][0]) if self.lanes else self.full


def _kinds(lanes: Sequence[Lane], most: float, now: float) -> list[_Kind]:
    """Return the lanes by pace, the fastest first."""
    kinds: dict[float, _Kind] = {}
    for number, lane in enumerate(lanes):
        kinds.setdefault(lane.pace, _Kind(lane.pace)).put(lane, most, number, now)
    return sorted(kinds.values(), key=lambda kind: kind.pace)


def schedule(backlog: Backlog, alone: Backlog, lanes: Sequence[Lane], now: float) -> list[tuple[Any, list[int]]]:
    """Return the calls to make now; pieces in none of them wait until a call returns.

    While much work is left, the actor that is free first gets a part of it, a smaller part each time: pieces in client order, up to
    the end of the window. An actor without work gets pieces behind the window too. A long piece goes out first, wherever it is.
    When one call for each actor is left, all pieces are dealt, the longest first, each to the actor that finishes it first.
    An actor gets nothing if the others finish everything before it finishes one piece.

    Args:
        backlog: pieces that may share a call; those of the calls are taken from it.
        alone: pieces of which each goes in a call of its own, likewise.
        lanes: all actors; updated for the calls returned.
        now: the time.

    Returns:
        Keys of lanes with the positions of the pieces that they get.
    """
    calls: list[tuple[Any, list[int]]] = []
    known = bool(lanes) and all(lane.pace > 0 for lane in lanes)
    speed = sum(1 / lane.pace for lane in lanes) if known else len(lanes)

    def give(lane: Lane, pieces: list[int], cost: float) -> None:
        calls.append((lane.key, pieces))
        lane.load += 1
        lane.free_at = max(lane.free_at, now) + lane.pace * cost

    def next_for(lane: Lane, pieces: Backlog) -> int:
        longest = pieces.longest()
        long = pieces.cost(longest) * (lane.pace if known else 1) >= _LONG * pieces.left / speed
        return longest if long else pieces.first()

    # Only idle actors get a piece that goes alone, and no call waits behind it: that call would be lost with it.
    for kind in _kinds(lanes, 1, now) if alone else ():
        while alone and kind.lanes:
            lane = heapq.heappop(kind.lanes)[-1]
            position = next_for(lane, alone)
            give(lane, [position], alone.take(position))
            lane.load = _AHEAD
    if alone or not backlog:
        return calls

    kinds = _kinds(lanes, _AHEAD, now)
    end = backlog.end(_WINDOW * len(lanes), WORTH * speed / len(lanes) if known else 0.0)
    # The cost of all calls, those under way and those to come: a plan does not change it.
    work = backlog.left + sum(max(lane.free_at - now, 0.0) / lane.pace for lane in lanes) if known else 0.0
    while backlog and any(kind.lanes for kind in kinds):
        seconds = backlog.left / speed if known else 0.0
        if 0 < seconds <= WORTH:
            for lane, pieces in _deal(backlog, lanes, now):
                if lane.load < _AHEAD:  # the shares of busy actors wait
                    give(lane, pieces, sum(map(backlog.take, pieces)))
            break
        willing = _helpful(kinds, backlog.cost(backlog.first()), work, speed) if len(kinds) > 1 else kinds
        if not willing:
            break
        kind = min(willing, key=lambda kind: kind.lanes[0][:3])
        _, _, number, lane = heapq.heappop(kind.lanes)
        position = next_for(lane, backlog)
        if lane.load and position >= end:
            break
        part = max(min(seconds / 2, _LONGEST), WORTH)
        most = len(backlog) if known else min(_MOST, math.ceil(len(backlog) / (2 * len(lanes))))
        pieces, cost = [position], backlog.take(position)
        while backlog and len(pieces) < most:
            position = backlog.first()
            if position >= end or lane.pace * (cost + backlog.cost(position)) > part:
                break
            pieces.append(position)
            cost += backlog.take(position)
        give(lane, pieces, cost)
        kind.put(lane, _AHEAD, number, now)
    return calls


def _helpful(kinds: Sequence[_Kind], cost: float, work: float, speed: float) -> list[_Kind]:
    """Return the kinds whose first lane does one piece before the other lanes have done all else."""
    first = min(kind.soonest() + kind.pace * cost for kind in kinds)
    found = []
    for kind in kinds:
        if not kind.lanes:
            continue
        busy = kind.lanes[0][0]
        done = busy + kind.pace * cost
        if done <= max(first, (work - busy / kind.pace) / (speed - 1 / kind.pace)):
            found.append(kind)
    return found


def _deal(backlog: Backlog, lanes: Sequence[Lane], now: float) -> list[tuple[Lane, list[int]]]:
    """Deal each piece, the longest first, to the lane that will have done it first; of several, to that with the fewest calls."""
    kinds = _kinds(lanes, math.inf, now)
    shares: list[list[int]] = [[] for _ in lanes]
    for position, cost in backlog.sort_by_cost():
        kind = kinds[0]
        if len(kinds) > 1:
            kind = min(kinds, key=lambda kind: (kind.lanes[0][0] + kind.pace * cost, kind.lanes[0][1]))
        busy, load, number, lane = kind.lanes[0]
        heapq.heapreplace(kind.lanes, (busy + kind.pace * cost, load, number, lane))
        shares[number].append(position)
    return [(lane, pieces) for lane, pieces in zip(lanes, shares, strict=True) if pieces]
