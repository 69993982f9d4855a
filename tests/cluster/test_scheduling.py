"""Who gets which work: laws of the plan, and what it costs against the best that could be done."""

from __future__ import annotations

import random

import pytest

from raydfl.cluster.scheduling import WORTH, Lane, schedule


def carry_out(costs: list[float], workers: int, pace: float, latency: float = 0.005) -> tuple[float, int, list[int]]:
    """A simulation: time until all is done, calls made, pieces in the order of being handed out."""
    waiting = sorted(range(len(costs)), key=lambda piece: -costs[piece])
    free = [0.0] * workers  # when each worker has done all its calls
    loads = [0] * workers
    events: list[tuple[float, int]] = []
    now, calls, given = 0.0, 0, []
    while waiting or events:
        places = [Lane(worker, loads[worker], free[worker], pace) for worker in range(workers)]
        sizes = [costs[piece] for piece in waiting]
        made = schedule(sizes, [False] * len(waiting), places, now)
        gone = set()
        for worker, positions in made:
            pieces = [waiting[position] for position in positions]
            free[worker] = max(free[worker], now + latency) + sum(costs[piece] for piece in pieces)
            events.append((free[worker] + latency, worker))
            loads[worker] += 1
            calls += 1
            given += pieces
            gone.update(positions)
        waiting = [piece for position, piece in enumerate(waiting) if position not in gone]
        assert events, "nobody works and something waits"
        events.sort()
        now, worker = events.pop(0)
        loads[worker] -= 1
    return max(free), calls, given


@pytest.mark.parametrize("pace", [0.0, 1.0])
@pytest.mark.parametrize("workers", [1, 2, 4, 7])
@pytest.mark.parametrize("number", [1, 2, 3, 12, 100])
def test_everything_is_done_once_and_in_good_time(number: int, workers: int, pace: float) -> None:
    rng = random.Random(number)
    for scale in (0.001, 0.02, 0.5):
        costs = [scale * rng.uniform(0.5, 1.5) for _ in range(number)]
        end, _, given = carry_out(costs, workers, pace)
        assert sorted(given) == list(range(number))
        if pace:  # Graham's bound for lists, and the latency of the calls that an actor waits for
            assert end <= sum(costs) / workers + 2 * max(costs) + 0.02


def test_a_call_is_worth_its_cost() -> None:
    """Short work goes out in one call each; long work in few calls, with little left at the end."""
    end, calls, _ = carry_out([0.01] * 12, 2, 1.0)
    assert calls == 2
    assert end == pytest.approx(0.065)
    costs = [0.02 + 0.0001 * i for i in range(200)]
    end, calls, _ = carry_out(costs, 2, 1.0)
    assert calls <= sum(costs) / WORTH
    assert end < sum(costs) / 2 + 0.05


def test_an_actor_is_given_its_next_call_while_it_works() -> None:
    places = [Lane("a", 1, 1.0, 1.0), Lane("b", 1, 2.0, 1.0)]
    calls = schedule([1.0] * 20, [False] * 20, places, now=0.5)
    assert [key for key, _ in calls] == ["a", "b"]
    assert schedule([1.0] * 20, [False] * 20, places, now=0.5) == []  # both have two


def test_what_may_have_ended_an_actor_goes_alone() -> None:
    places = [Lane("a", 0, 0.0, 0.001), Lane("b", 0, 0.0, 0.001)]
    calls = schedule([3.0, 2.0, 1.0], [False, True, False], places, now=0.0)
    alone = next(key for key, pieces in calls if pieces == [1])
    assert all(key != alone for key, pieces in calls if pieces != [1])  # nothing waits behind it
    assert schedule([2.0], [True], [Lane("a", 1, 5.0, 1.0)], now=0.0) == []  # nor does it wait behind others


def test_calls_do_not_grow_with_the_work() -> None:
    places = [Lane("a", 0, 0.0, 1.0), Lane("b", 0, 0.0, 1.0)]
    calls = schedule([0.3] * 5000, [False] * 5000, places, now=0.0)
    assert {len(pieces) for _, pieces in calls} == {3}


def test_who_is_idle_gets_the_last_piece() -> None:
    places = [Lane("busy", 2, 0.0, 1.0), Lane("idle", 0, 0.0, 1.0)]  # the busy one takes longer than was foreseen
    assert schedule([0.05], [False], places, now=1.0) == [("idle", [0])]


@pytest.mark.parametrize("pieces", [1, 3, 20, 300])
@pytest.mark.parametrize("paces", [[1.0, 10.0], [1.0, 1.0, 50.0], [0.1, 1.0, 1.0, 1.0, 1.0]])
def test_fast_and_slow_share_the_work_by_their_pace(paces: list[float], pieces: int) -> None:
    """Done in at most twice the time of the best that could be."""
    rng = random.Random(pieces)
    waiting = sorted((rng.uniform(0.5, 1.5) for _ in range(pieces)), reverse=True)
    costs = list(waiting)
    free, loads = [0.0] * len(paces), [0] * len(paces)
    events: list[tuple[float, int]] = []
    now, ends = 0.0, 0.0
    while waiting or events:
        places = [Lane(number, loads[number], free[number], pace) for number, pace in enumerate(paces)]
        made = schedule(waiting, [False] * len(waiting), places, now)
        for worker, positions in made:
            free[worker] = max(free[worker], now) + paces[worker] * sum(waiting[position] for position in positions)
            ends = max(ends, free[worker])
            events.append((free[worker], worker))
            loads[worker] += 1
        gone = {position for _, positions in made for position in positions}
        waiting = [cost for position, cost in enumerate(waiting) if position not in gone]
        assert events, "nobody works and something waits"
        events.sort()
        now, worker = events.pop(0)
        loads[worker] -= 1
    least = max(sum(costs) / sum(1 / pace for pace in paces), min(paces) * max(costs))
    assert ends <= 2 * least  # Gonzalez, Ibarra and Sahni (1977), for the longest first on machines of several speeds
