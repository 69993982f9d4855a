"""The queue of clients in virtual time, against a simulation second by second and against closed forms."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Sequence, Set

import numpy as np
import pytest

from raydfl.core.types import Task
from raydfl.engine.fleet import LOST, STALE, UNUSED, Capacity, Fleet, Start, Starter, Step, advance


def draw_starts(paces: Sequence[float], seed: int, version: int, lost: float = 0.0) -> Starter:
    """Return a starter that draws available clients uniformly."""
    rng = np.random.default_rng([seed, version])

    def start(free: int, unavailable: Set[int]) -> list[Start]:
        available = [client for client in range(len(paces)) if client not in unavailable]
        clients = rng.permutation(available)[:free].tolist()
        return [Start(c, Task(str(c)), paces[c], lost > 0 and bool(rng.random() < lost)) for c in clients]

    return start


def run_queue(paces: Sequence[float], capacity: Capacity, steps: int, seed: int = 1, lost: float = 0.0) -> list[Step]:
    """Advance a new queue by some steps."""
    done: list[Step] = []
    for version in range(steps):
        fleet = done[-1].fleet if done else Fleet()
        done.append(advance(fleet, version, capacity, draw_starts(paces, seed, version, lost)))
    return done


def simulate_by_seconds(
    paces: Sequence[int], capacity: Capacity, steps: int, seed: int, lost: float
) -> list[tuple[float, list[tuple[int, int]], list[tuple[int, str]]]]:
    """Simulate the queue second by second: time of each step, arrivals (client, version), and dropped clients."""
    flying: list[tuple[int, int, int, bool]] = []  # (last second, client, version, lost), in order of their start
    second, results = 0, []
    for version in range(steps):
        start = draw_starts(paces, seed, version, lost)
        used: list[tuple[int, int]] = []
        dropped: list[tuple[int, str]] = []
        may_start = True
        while True:
            if may_start and len(flying) < capacity.places:
                away = frozenset([client for _, client, _, _ in flying] + [client for client, _ in used])
                new = start(capacity.places - len(flying), away)
                flying += [(second + int(s.seconds), s.client, version, s.lost) for s in new]
            if not flying:
                break
            while not any(last == second for last, *_ in flying):
                second += 1
            for entry in list(flying):
                if entry[0] == second and len(used) < capacity.buffer:
                    flying.remove(entry)
                    _, client, since, gone = entry
                    if gone:
                        dropped.append((client, LOST))
                    elif version - since > capacity.most:
                        dropped.append((client, STALE))
                    else:
                        used.append((client, since))
            if len(used) == capacity.buffer:
                break
            may_start = capacity.concurrency > capacity.buffer or not (flying or used)
        if capacity.concurrency == capacity.buffer:
            dropped += [(client, UNUSED) for _, client, _, _ in sorted(flying, key=lambda entry: entry[0])]
            flying = []
        results.append((float(second), used, dropped))
    return results


@pytest.mark.parametrize("seed", range(100))
def test_the_queue_equals_a_simulation_second_by_second(seed: int) -> None:
    rng = np.random.default_rng(seed)
    paces = rng.integers(1, 12, size=int(rng.integers(6, 30))).tolist()
    buffer = int(rng.integers(1, 5))
    concurrency = int(rng.integers(buffer, len(paces) + 1)) if rng.random() < 0.7 else buffer
    over = float(rng.choice([1.0, 1.3])) if concurrency == buffer else 1.0
    capacity = Capacity(buffer, concurrency, float(rng.choice([1.0, 3.0, math.inf])), over)
    lost = float(rng.choice([0.0, 0.3]))
    steps = run_queue(paces, capacity, 12, seed, lost)
    found = [
        (
            step.fleet.seconds,
            [(flight.start.client, flight.version) for flight in step.arrivals],
            [(flight.start.client, reason) for flight, reason in step.dropped],
        )
        for step in steps
    ]
    assert found == simulate_by_seconds(paces, capacity, 12, seed, lost)


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

    def start(free: int, unavailable: Set[int]) -> list[Start]:
        lost = next(attempts) < 2
        return [Start(client, Task(str(client)), 1.0, lost) for client in range(free)]

    step = advance(Fleet(), 0, Capacity(2, 2), start)
    assert [len(step.arrivals), len(step.dropped), step.fleet.seconds] == [2, 4, 3.0]


def test_land_keeps_the_time_and_the_number_of_starts() -> None:
    fleet = run_queue([1.0, 2.0, 3.0], Capacity(1, 3), 2)[-1].fleet
    assert fleet.flights
    assert fleet.land() == Fleet(fleet.seconds, fleet.started)
