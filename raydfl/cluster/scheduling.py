"""The schedule of calls to client actors, computed from costs and expected times alone.

A *piece* is the work of an order, or of a group of orders. A *call* carries one or more pieces to an actor. The server uses
results in the order of the pieces' positions, which is client order.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WORTH = 0.2
"""Minimum work of a call in seconds. A call costs some milliseconds in two processes."""
WINDOW = 6
"""Size of the window in calls per actor. With 4, calls of short pieces are too small: simulated rounds took 3 % longer."""
_LONG = 0.5
"""A piece is long if its time on an actor exceeds this fraction of the remaining time on all actors. With 1, simulated rounds took
up to 10 % longer. With 0.25, the server held twice as many results."""
AHEAD = 2
"""Maximum calls of an actor: a running call and its successor."""
_LONGEST = 1.0
"""Maximum work of a call in seconds. In longer calls, results wait, take memory, and are lost together."""
_MOST = 8
"""Maximum pieces of a call while the pace is unknown."""


@dataclass(slots=True)
class Lane:
    """An actor's calls, expected end of work, and pace."""

    key: Any
    load: int
    """Number of unanswered calls."""
    free_at: float
    """Expected end of all calls in seconds, on the clock of ``now``."""
    pace: float
    """Expected seconds for a unit of cost; 0: unknown."""


class Backlog:
    """Waiting pieces, and a window over the pieces of a round.

    The window starts at the first piece without a result. Pieces behind the window wait, because the server cannot use their
    results yet.

    Args:
        pieces: Position and cost of each piece, by increasing position.
    """

    def __init__(self, pieces: Iterable[tuple[int, float]] = ()) -> None:
        self._costs = dict(pieces)
        self._positions = list(self._costs)
        self._sums = list(itertools.accumulate(self._costs.values(), initial=0.0))
        self._done: set[int] = set()
        self._begin = 0
        # Heaps, which may still contain removed pieces.
        self._first = list(self._positions)
        self._longest = [(-cost, position) for position, cost in self._costs.items()]
        heapq.heapify(self._longest)
        self.left = self._sums[-1]
        """Total cost of the waiting pieces."""

    def __len__(self) -> int:
        return len(self._costs)

    def add(self, position: int, cost: float) -> None:
        """Add a waiting piece."""
        self._costs[position] = cost
        self.left += cost
        heapq.heappush(self._first, position)
        heapq.heappush(self._longest, (-cost, position))

    def take(self, position: int) -> float:
        """Remove a piece, and return its cost."""
        cost = self._costs.pop(position)
        self.left = self.left - cost if self._costs else 0.0
        return cost

    def first(self) -> int:
        """Return the position of the first piece."""
        while self._first[0] not in self._costs:
            heapq.heappop(self._first)
        return self._first[0]

    def longest(self) -> int:
        """Return the position of the longest piece. Among equal pieces, the lowest position wins."""
        while self._longest[0][1] not in self._costs:
            heapq.heappop(self._longest)
        return self._longest[0][1]

    def sort_by_cost(self) -> list[tuple[int, float]]:
        """Return position and cost of all pieces by decreasing cost."""
        return sorted(self._costs.items(), key=operator.itemgetter(1), reverse=True)

    def cost(self, position: int) -> float:
        """Return the cost of a piece."""
        return self._costs[position]

    def note_result(self, position: int) -> None:
        """Record the result of a piece, and move the window."""
        self._done.add(position)
        while self._begin < len(self._positions) and self._positions[self._begin] in self._done:
            self._begin += 1

    def end(self, calls: int, cost: float) -> float:
        """Return the position after the window.

        Args:
            calls: Size of the window in calls, each with at least one piece.
            cost: Total cost of the pieces in a call.
        """
        end = max(self._begin + calls, bisect_left(self._sums, self._sums[self._begin] + calls * cost))
        return self._positions[end] if end < len(self._positions) else math.inf


class _Kind:
    """Lanes with the same pace."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.lanes: list[tuple[float, int, int, Lane]] = []
        """Heap of lanes that accept a call: seconds until the lane is free, its load, its number."""
        self.full = math.inf
        """Seconds until the first fully loaded lane is free."""

    def put(self, lane: Lane, most: float, number: int, now: float) -> None:
        """Add a lane.

        Args:
            lane: A lane with this pace.
            most: Maximum number of its calls.
            number: Decides between equal lanes.
            now: The current time.
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
    """Group lanes by pace, the fastest first."""
    kinds: dict[float, _Kind] = {}
    for number, lane in enumerate(lanes):
        kinds.setdefault(lane.pace, _Kind(lane.pace)).put(lane, most, number, now)
    return sorted(kinds.values(), key=lambda kind: kind.pace)


def schedule(backlog: Backlog, alone: Backlog, lanes: Sequence[Lane], now: float) -> list[tuple[Any, list[int]]]:
    """Schedule the calls to make now. The remaining pieces wait until a call returns.

    While much work is left, the first free actor gets a decreasing fraction of it: pieces in client order, up to the end of the
    window. An idle actor gets pieces behind the window too. A long piece is scheduled first at any position. When at most one
    call per actor is left, pieces are dealt by decreasing cost to the actor with the earliest end. An actor gets nothing if the
    rest of the actors finish all work before it finishes a piece.

    Args:
        backlog: Pieces that may share a call. Scheduled pieces are removed.
        alone: Pieces that need a call of their own. Scheduled pieces are removed.
        lanes: All actors, updated for the returned calls.
        now: The current time.

    Returns:
        Pairs of a lane's key and the positions of the pieces in its call.
    """
    calls: list[tuple[Any, list[int]]] = []
    paces = Counter(lane.pace for lane in lanes)
    known = bool(lanes) and all(pace > 0 for pace in paces)
    speed = sum(number / pace for pace, number in paces.items()) if known else len(lanes)

    def add_call(lane: Lane, pieces: list[int], cost: float) -> None:
        calls.append((lane.key, pieces))
        lane.load += 1
        lane.free_at = max(lane.free_at, now) + lane.pace * cost

    def next_position(lane: Lane, pieces: Backlog) -> int:
        longest = pieces.longest()
        long = pieces.cost(longest) * (lane.pace if known else 1) >= _LONG * pieces.left / speed
        return longest if long else pieces.first()

    # A piece of `alone` needs an idle actor, and no call waits behind it, because both calls could be lost together.
    for kind in _kinds(lanes, 1, now) if alone else ():
        while alone and kind.lanes:
            lane = heapq.heappop(kind.lanes)[-1]
            position = next_position(lane, alone)
            add_call(lane, [position], alone.take(position))
            lane.load = AHEAD
    if alone or not backlog:
        return calls

    kinds = _kinds(lanes, AHEAD, now)
    end = backlog.end(WINDOW * len(lanes), WORTH * speed / len(lanes) if known else 0.0)
    # Total cost of running and future calls, which scheduling does not change.
    several = known and len(kinds) > 1
    work = backlog.left + sum(max(lane.free_at - now, 0.0) / lane.pace for lane in lanes) if several else 0.0
    while backlog and any(kind.lanes for kind in kinds):
        seconds = backlog.left / speed if known else 0.0
        if 0 < seconds <= WORTH:
            for lane, pieces in _deal(backlog, lanes, now):
                if lane.load < AHEAD:  # The shares of fully loaded actors wait.
                    add_call(lane, pieces, sum(map(backlog.take, pieces)))
            break
        helpful = _select_helpful(kinds, backlog.cost(backlog.first()), work, speed) if len(kinds) > 1 else kinds
        if not helpful:
            break
        kind = min(helpful, key=lambda kind: kind.lanes[0][:3])
        _, _, number, lane = heapq.heappop(kind.lanes)
        position = next_position(lane, backlog)
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
        add_call(lane, pieces, cost)
        kind.put(lane, AHEAD, number, now)
    return calls


def _select_helpful(kinds: Sequence[_Kind], cost: float, work: float, speed: float) -> list[_Kind]:
    """Select kinds with a lane fast enough to finish a piece before the remaining lanes finish the rest."""
    first = min(kind.soonest() + kind.pace * cost for kind in kinds)
    helpful = []
    for kind in kinds:
        if not kind.lanes:
            continue
        busy = kind.lanes[0][0]
        done = busy + kind.pace * cost
        if done <= max(first, (work - busy / kind.pace) / (speed - 1 / kind.pace)):
            helpful.append(kind)
    return helpful


def _deal(backlog: Backlog, lanes: Sequence[Lane], now: float) -> list[tuple[Lane, list[int]]]:
    """Deal pieces by decreasing cost, each to the lane with the earliest end, or among equal lanes with the fewest calls."""
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
