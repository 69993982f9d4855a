"""A plan for one moment, made of costs and expectations alone: who gets which work next."""

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
class Lane:
    """Somebody who works: the calls that it has, when it will have done them, and how fast it is."""

    key: Any
    load: int
    """Calls."""
    free_at: float
    """Seconds, on the same clock as ``now``."""
    pace: float
    """Expected seconds for a unit of cost; 0: unknown."""


def schedule(
    costs: Sequence[float], alone: Sequence[bool], places: Sequence[Lane], now: float
) -> list[tuple[Any, list[int]]]:
    """Return the calls to make now; what is in none of them waits until a call returns.

    As long as there is much to do, whoever is free first gets a part of what is left, a smaller one each time. When what is left
    is worth one call for each, all of it is dealt, the longest first, each piece to whoever will have done it first. Who is so
    slow that the others would be done with everything before it is done with one piece gets none.

    Args:
        costs: of the pieces of work that wait, the largest first.
        alone: pieces that have to go in a call of their own.
        places: everybody; updated for the calls returned.
        now: the time.

    Returns:
        Keys of places with the positions of the pieces that they get.
    """
    calls: list[tuple[Any, list[int]]] = []

    def give(place: Lane, pieces: list[int]) -> None:
        calls.append((place.key, pieces))
        place.load += 1
        place.free_at = max(place.free_at, now) + place.pace * sum(costs[piece] for piece in pieces)

    waiting = [piece for piece in range(len(costs)) if not alone[piece]]
    single = [piece for piece in range(len(costs)) if alone[piece]]
    known = bool(places) and all(place.pace > 0 for place in places)
    mixed = known and len({place.pace for place in places}) > 1
    while single or waiting:
        # What goes alone also waits for nothing and has nothing waiting behind it, which would be lost with it.
        open_places = [place for place in places if place.load < (1 if single else _AHEAD)]
        if not open_places:
            break
        if single:
            cost = costs[single[0]]
            first = min(open_places, key=lambda place: (max(place.free_at, now) + place.pace * cost, place.load))
            give(first, [single.pop(0)])
            first.load = _AHEAD
            continue
        left = sum(costs[piece] for piece in waiting)
        seconds = left / sum(1 / place.pace for place in places) if known else 0.0
        if 0 < seconds <= WORTH:
            shares = _deal([costs[piece] for piece in waiting], places, now)
            for place, share in zip(places, shares, strict=True):
                if share and place.load < _AHEAD:
                    give(place, [waiting[position] for position in share])
            break  # the shares of those who have enough to do wait
        willing = _helpful(open_places, places, costs[waiting[0]], left, now) if mixed else open_places
        if not willing:
            break
        first = min(willing, key=lambda place: (max(place.free_at, now), place.load))
        part = max(min(seconds / 2, _LONGEST), WORTH)
        most = len(waiting) if known else min(_MOST, math.ceil(len(waiting) / (2 * len(places))))
        taken = [waiting.pop(0)]
        while (
            waiting and len(taken) < most and first.pace * sum(costs[piece] for piece in (*taken, waiting[0])) <= part
        ):
            taken.append(waiting.pop(0))
        give(first, taken)
    return calls


def _helpful(those: Sequence[Lane], places: Sequence[Lane], cost: float, left: float, now: float) -> list[Lane]:
    """Return those of them by whom one piece would be done before all that is left was done by the others."""
    busy = [max(place.free_at - now, 0.0) for place in places]
    speed = sum(1 / place.pace for place in places)
    work = left + sum(seconds / place.pace for seconds, place in zip(busy, places, strict=True))
    first, second = sorted(seconds + place.pace * cost for seconds, place in zip(busy, places, strict=True))[:2]
    found = []
    for place in those:
        seconds = max(place.free_at - now, 0.0)
        done = seconds + place.pace * cost
        shared = (work - seconds / place.pace) / (speed - 1 / place.pace)
        if done <= max(shared, second if done == first else first):
            found.append(place)
    return found


def _deal(costs: Sequence[float], places: Sequence[Lane], now: float) -> list[list[int]]:
    """Deal each piece, the longest first, to whoever will have done it first; of several, to who has the fewest calls."""
    free_at = [max(place.free_at, now) for place in places]
    shares: list[list[int]] = [[] for _ in places]
    for piece, cost in enumerate(costs):
        ends = [(free + place.pace * cost, place.load) for free, place in zip(free_at, places, strict=True)]
        chosen = ends.index(min(ends))
        shares[chosen].append(piece)
        free_at[chosen] = ends[chosen][0]
    return shares
