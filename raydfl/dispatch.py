"""Who gets which work next: a plan for one moment, made of costs and expectations alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORTH = 0.2
"""Seconds of work that one call to an actor should carry: a call costs some milliseconds of two processes' time."""
_AHEAD = 2
"""Calls that an actor may have at a time: the one that it works on, and one that it then goes on with at once."""
_LONGEST = 1.0
"""Seconds of work of one call at most: with more, results wait, take memory, and are lost together."""
_MOST = 8
"""Pieces in a call while nothing is known about how long they take."""


@dataclass(slots=True)
class Place:
    """Somebody who works: the calls that it has, and when it will have done them."""

    key: Any
    load: int
    """Calls."""
    free_at: float
    """Seconds, on the same clock as ``now``."""


def hand_out(
    costs: Sequence[float], alone: Sequence[bool], places: Sequence[Place], now: float, pace: float
) -> list[tuple[Any, list[int]]]:
    """The calls to make now; what is in none of them waits until a call returns.

    As long as there is much to do, whoever is free first gets a part of what is left, a smaller one each time. When what is left
    is worth one call for each, all of it is dealt, the longest first, each piece to whoever is free first.

    Args:
        costs: of the pieces of work that wait, the largest first.
        alone: pieces that have to go in a call of their own.
        places: everybody; updated for the calls returned.
        now: the time.
        pace: expected seconds for a unit of cost; 0: unknown.

    Returns:
        Keys of places with the positions of the pieces that they get.
    """
    calls: list[tuple[Any, list[int]]] = []

    def give(place: Place, pieces: list[int]) -> None:
        calls.append((place.key, pieces))
        place.load += 1
        place.free_at = max(place.free_at, now) + pace * sum(costs[piece] for piece in pieces)

    waiting = [piece for piece in range(len(costs)) if not alone[piece]]
    single = [piece for piece in range(len(costs)) if alone[piece]]
    while single or waiting:
        # What goes alone also waits for nothing and has nothing waiting behind it, which would be lost with it.
        open_places = [place for place in places if place.load < (1 if single else _AHEAD)]
        if not open_places:
            break
        first = min(open_places, key=lambda place: (max(place.free_at, now), place.load))
        if single:
            give(first, [single.pop(0)])
            first.load = _AHEAD
            continue
        left = pace * sum(costs[piece] for piece in waiting)
        if 0 < left <= WORTH * len(places):
            shares = _deal([costs[piece] * pace for piece in waiting], [(max(p.free_at, now), p.load) for p in places])
            for place, share in zip(places, shares, strict=True):
                if share and place.load < _AHEAD:
                    give(place, [waiting[position] for position in share])
            break  # the shares of those who have enough to do wait
        part = max(min(left / (2 * len(places)), _LONGEST), WORTH)
        most = min(_MOST, math.ceil(len(waiting) / (2 * len(places)))) if pace == 0 else len(waiting)
        taken = [waiting.pop(0)]
        while waiting and len(taken) < most and pace * sum(costs[piece] for piece in (*taken, waiting[0])) <= part:
            taken.append(waiting.pop(0))
        give(first, taken)
    return calls


def _deal(seconds: Sequence[float], free_at: Sequence[tuple[float, int]]) -> list[list[int]]:
    """Each piece, the longest first, to whoever is then free first; of several, to who has the fewest calls."""
    ends, shares = list(free_at), [[] for _ in free_at]  # type: list[tuple[float, int]], list[list[int]]
    for piece, long in enumerate(seconds):
        place = ends.index(min(ends))
        shares[place].append(piece)
        ends[place] = (ends[place][0] + long, ends[place][1])
    return shares
