"""The queue of clients in virtual time, against a simulation second by second and against closed forms."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Sequence, Set

import numpy as np
import pytest

from raydfl.core.types import Task
from raydfl.engine.fleet import (
    LATE,
    LOST,
    STALE,
    UNUSED,
    Capacity,
    Fleet,
    Flight,
    InFlight,
    Start,
    Starter,
    Step,
    advance,
)
from raydfl.engine.hours import Hours, parse_spans

Spans = Sequence[tuple[int, int]]
"""Hours of a client: spans of seconds, repeated every :data:`PERIOD` seconds."""
PERIOD = 20


def is_open(spans: Spans, second: float) -> bool:
    return any(begin <= second % PERIOD < end for begin, end in spans)


def draw_starts(
    paces: Sequence[float], seed: int, version: int, lost: float = 0.0, spans: Sequence[Spans] | None = None
) -> Starter:
    """Return a starter that draws available clients uniformly."""
    rng = np.random.default_rng([seed, version])

    def outlasts(client: int, now: float) -> bool:
        return spans is not None and not all(is_open(spans[client], now + s) for s in range(int(paces[client])))

    def start(now: float, free: int, unavailable: Set[int]) -> list[Start]:
        available = [c for c in range(len(paces)) if c not in unavailable and (not spans or is_open(spans[c], now))]
        clients = rng.permutation(available)[:free].tolist() if available else []
        gone = [lost > 0 and bool(rng.random() < lost) for _ in clients]
        return [
            Start(c, Task(str(c)), paces[c], LOST if bad or outlasts(c, now) else "")
            for c, bad in zip(clients, gone, strict=True)
        ]

    return start


def run_queue(
    paces: Sequence[float],
    capacity: Capacity,
    steps: int,
    seed: int = 1,
    lost: float = 0.0,
    spans: Sequence[Spans] | None = None,
) -> list[Step]:
    """Advance a new queue by some steps."""
    texts = [" ".join(f"{begin}-{end}" for begin, end in own) for own in spans or ()]
    hours = Hours([parse_spans(text, PERIOD) for text in texts], np.arange(len(texts)), PERIOD)
    done: list[Step] = []
    for version in range(steps):
        fleet = done[-1].fleet if done else Fleet()
        start = draw_starts(paces, seed, version, lost, spans)
        opening = {} if spans is None else {"opening": lambda now, away: hours.find_opening(now, away, None)}
        done.append(advance(fleet, version, capacity, start, **opening))
    return done


def receive(
    arriving: list[tuple[int, int, int, bool]],
    flying: list[tuple[int, int, int, bool]],
    used: list[tuple[int, int]],
    dropped: list[tuple[int, str]],
    capacity: Capacity,
    version: int,
) -> None:
    """Move clients that arrive in a second to the used or the dropped ones, as far as the buffer has room."""
    for entry in arriving:
        if len(used) < capacity.buffer:
            flying.remove(entry)
            _, client, since, gone = entry
            if gone:
                dropped.append((client, LOST))
            elif version - since > capacity.most:
                dropped.append((client, STALE))
            else:
                used.append((client, since))


def simulate_by_seconds(
    paces: Sequence[int],
    capacity: Capacity,
    steps: int,
    seed: int,
    lost: float,
    spans: Sequence[Spans] | None = None,
) -> list[tuple[float, list[tuple[int, int]], list[tuple[int, str]]]]:
    """Simulate the queue second by second: time of each step, arrivals (client, version), and dropped clients."""
    flying: list[tuple[int, int, int, bool]] = []  # (last second, client, version, lost), in order of their start
    second, results = 0, []
    for version in range(steps):
        start = draw_starts(paces, seed, version, lost, spans)
        used: list[tuple[int, int]] = []
        dropped: list[tuple[int, str]] = []
        last_second = second + capacity.longest
        places, may_start = capacity.places - len(flying), True
        while True:
            if may_start and places > 0:
                away = frozenset([client for _, client, _, _ in flying] + [client for client, _ in used])
                new = start(second, places, away)
                flying += [(second + int(s.seconds), s.client, version, s.lost) for s in new]
                places -= len(new)
            waiting = spans is not None and places > 0
            away = {client for _, client, _, _ in flying} | {client for client, _ in used}
            if not flying and not (waiting and len(away) < len(paces)):
                break
            opened = False
            while not any(last == second for last, *_ in flying) and second < last_second:
                second += 1
                opened = waiting and any(
                    is_open(own, second) and not is_open(own, second - 1)
                    for client, own in enumerate(spans or ())
                    if client not in away
                )
                if opened:
                    break
            arriving = [entry for entry in flying if entry[0] == second]
            if not (arriving or opened):
                break
            receive(arriving, flying, used, dropped, capacity, version)
            if len(used) == capacity.buffer:
                break
            if capacity.concurrency > capacity.buffer:
                places, may_start = capacity.places - len(flying), True
            elif arriving and not (flying or used):
                places, may_start = capacity.places, True
            else:
                may_start = opened
        if capacity.concurrency == capacity.buffer:
            dropped += [(client, UNUSED) for _, client, _, _ in sorted(flying, key=lambda entry: entry[0])]
            flying = []
        results.append((float(second), used, dropped))
    return results


def draw_spans(rng: np.random.Generator) -> Spans:
    """Draw one to three spans within the period, some of them adjacent, also across its end."""
    edges = np.sort(rng.choice(PERIOD + 1, size=2 * int(rng.integers(1, 4)), replace=False)).tolist()
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if rng.random() < 0.3:
        spans = [
            (begin, edges[2 * place + 2] if place + 1 < len(spans) else end) for place, (begin, end) in enumerate(spans)
        ]
    return spans


@pytest.mark.parametrize("with_hours", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_the_queue_equals_a_simulation_second_by_second(seed: int, with_hours: bool) -> None:
    rng = np.random.default_rng(seed)
    paces = rng.integers(1, 12, size=int(rng.integers(6, 30))).tolist()
    buffer = int(rng.integers(1, 5))
    concurrency = int(rng.integers(buffer, len(paces) + 1)) if rng.random() < 0.7 else buffer
    over = float(rng.choice([1.0, 1.3])) if concurrency == buffer else 1.0
    longest = 10.0 * PERIOD if with_hours else math.inf
    capacity = Capacity(buffer, concurrency, float(rng.choice([1.0, 3.0, math.inf])), over, longest)
    lost = float(rng.choice([0.0, 0.3]))
    spans = [draw_spans(rng) for _ in paces] if with_hours else None
    steps = run_queue(paces, capacity, 12, seed, lost, spans)
    found = [
        (
            step.fleet.seconds,
            [(flight.start.client, flight.version) for flight in step.arrivals],
            [(flight.start.client, reason) for flight, reason in step.dropped],
        )
        for step in steps
    ]
    assert found == simulate_by_seconds(paces, capacity, 12, seed, lost, spans)


@pytest.mark.parametrize("seed", range(20))
def test_hours_equal_a_search_second_by_second(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans = [draw_spans(rng) for _ in range(5)]
    texts = [" ".join(f"{begin}-{end}" for begin, end in own) for own in spans]
    hours = Hours([parse_spans(text, PERIOD) for text in texts], np.arange(5), PERIOD)
    eligible = rng.random(5) < 0.7
    for now in range(3 * PERIOD):
        ends = hours.find_ends(now)
        for own, end in zip(spans, ends, strict=True):
            open_for = next((s for s in range(2 * PERIOD) if not is_open(own, now + s)), math.inf)
            assert end == (now + open_for if open_for else -math.inf)
        later = [
            second
            for second in range(now + 1, now + 2 * PERIOD)
            for client, own in enumerate(spans)
            if eligible[client] and client and is_open(own, second) and not is_open(own, second - 1)
        ]
        assert hours.find_opening(now, {0} if eligible[0] else set(), eligible) == min(later, default=math.inf)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("0-20", [(0, 20)]),
        ("5-8 8-12.5", [(5, 12.5)]),
        ("15-20 0-4 6-7", [(6, 7), (15, 24)]),
        ("0-12 12-20", [(0, 20)]),
    ],
)
def test_adjacent_spans_are_joined(text: str, spans: list[tuple[float, float]]) -> None:
    assert parse_spans(text, 20) == spans


def test_equal_paces_give_rounds_of_equal_length_without_staleness() -> None:
    for number, step in enumerate(run_queue([2.5] * 8, Capacity(4, 4), 5)):
        assert step.fleet.seconds == 2.5 * (number + 1)
        assert [flight.version for flight in step.arrivals] == [number] * 4
        assert step.fleet.flights == () == step.dropped


def test_a_synchronous_round_lasts_as_long_as_its_slowest_client() -> None:
    ends = [step.fleet.seconds for step in run_queue([1.0, 2.0, 7.0], Capacity(3, 3), 3)]
    assert ends == [7.0, 14.0, 21.0]


def test_over_selection_drops_the_slowest_clients() -> None:
    (step,) = run_queue([1.0, 2.0, 3.0, 50.0], Capacity(3, 3, over=1.3), 1)
    assert step.fleet.seconds == 3.0
    assert [(flight.start.client, reason) for flight, reason in step.dropped] == [(3, UNUSED)]


def test_places_are_rounded_up_exactly() -> None:
    assert [Capacity(10, 10, over=over).places for over in (1.0, 1.1, 1.3, 1.31)] == [10, 11, 13, 14]
    assert Capacity(10, 40).places == 40


def test_a_buffer_of_one_steps_at_every_arrival() -> None:
    """With two clients of equal pace, each result misses exactly the step of the other client."""
    steps = run_queue([4.0, 4.0], Capacity(1, 2), 7)
    staleness = [version - flight.version for version, step in enumerate(steps) for flight in step.arrivals]
    assert staleness == [0, 1, 1, 1, 1, 1, 1]
    assert [step.fleet.seconds for step in steps] == [4.0, 4.0, 8.0, 8.0, 12.0, 12.0, 16.0]


def test_a_client_is_never_in_flight_twice_and_arrives_once_in_a_step() -> None:
    paces = np.random.default_rng(3).lognormal(0, 1.5, 20).tolist()
    for step in run_queue(paces, Capacity(5, 18), 60):
        flying = [flight.start.client for flight in step.fleet.flights]
        arrived = [flight.start.client for flight in step.arrivals]
        assert len(flying) == len(set(flying))
        assert len(arrived) == len(set(arrived)) == 5


def test_the_queue_resumes_after_any_step() -> None:
    paces = np.random.default_rng(5).lognormal(0, 1, 30).tolist()
    capacity = Capacity(3, 20, 8.0)
    whole = run_queue(paces, capacity, 30, lost=0.1)
    for resumed in range(29):
        fleet = pickle.loads(pickle.dumps(whole[resumed].fleet))
        next_step = advance(fleet, resumed + 1, capacity, draw_starts(paces, 1, resumed + 1, 0.1))
        assert next_step == whole[resumed + 1]


def test_neutral_options_change_nothing() -> None:
    paces = np.random.default_rng(7).lognormal(0, 1, 12).tolist()
    assert run_queue(paces, Capacity(4, 9), 20) == run_queue(paces, Capacity(4, 9, 1e9, 1.0), 20, lost=0.0)


def test_the_most_stale_arrival_keeps_the_limit_and_older_ones_are_dropped() -> None:
    paces = [1.0] * 9 + [40.0]
    free, limited = (run_queue(paces, Capacity(2, 10, most), 60) for most in (math.inf, 3.0))

    def list_staleness(steps: list[Step]) -> list[int]:
        return [version - flight.version for version, step in enumerate(steps) for flight in step.arrivals]

    assert max(list_staleness(free)) > 3 >= max(list_staleness(limited))
    dropped = [reason for step in limited for _, reason in step.dropped]
    assert dropped
    assert set(dropped) == {STALE}


def test_a_step_is_repeated_until_a_result_survives() -> None:
    attempts = itertools.count()

    def start(now: float, free: int, unavailable: Set[int]) -> list[Start]:
        lost = next(attempts) < 2
        return [Start(client, Task(str(client)), 1.0, LOST if lost else "") for client in range(free)]

    step = advance(Fleet(), 0, Capacity(2, 2), start)
    assert [len(step.arrivals), len(step.dropped), step.fleet.seconds] == [2, 4, 3.0]


def test_land_keeps_the_time_and_the_number_of_starts() -> None:
    fleet = run_queue([1.0, 2.0, 3.0], Capacity(1, 3), 2)[-1].fleet
    assert fleet.flights
    assert fleet.land() == Fleet(fleet.seconds, fleet.started)


def test_clients_in_flight_are_read_as_written_and_from_commits_without_a_deadline() -> None:
    """Earlier versions stored whether a client was lost, and no number of batches."""
    starts = [Start(3, Task("c"), 2.0, LATE, 5), Start(4, Task("d"), 1.0)]
    flights = tuple(Flight(7.0 + number, number, 1, start) for number, start in enumerate(starts))
    in_flight = InFlight(Fleet(6.0, 2, flights))
    stored = json.loads(json.dumps(in_flight.dump()))
    assert InFlight.load(stored, {}) == in_flight
    earlier = {
        **stored,
        "flights": [
            [*flight[:5], lost, flight[6]] for flight, lost in zip(stored["flights"], (True, False), strict=True)
        ],
    }
    loaded = [flight.start for flight in InFlight.load(earlier, {}).fleet.flights]
    assert [(start.lost, start.most_batches) for start in loaded] == [(LOST, None), ("", None)]
