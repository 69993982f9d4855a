"""Clients in lockstep: order of execution, errors, random numbers, and ended threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch

from raydfl.training.together import lockstep as together


class Add:
    """Request for the sum of the numbers of all clients with the same key."""

    def __init__(self, number: int, key: Hashable | None = "add", failure: BaseException | None = None) -> None:
        self.number = number
        self._key = key
        self.failure = failure

    def key(self) -> Hashable | None:
        return self._key

    def compute(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return (self.number, 1)

    def note_unequal_keys(self, others: Sequence[Add]) -> None: ...

    def compute_batched(self, others: Sequence[Add]) -> list[Any]:
        calls = [self, *others]
        for call in calls:
            if call.failure is not None:
                raise call.failure
        return [(sum(call.number for call in calls), len(calls))] * len(calls)


@pytest.fixture(autouse=True)
def check_ended_threads() -> Any:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def make_client_of(*calls: Add) -> Callable[[], list[Any]]:
    return lambda: [together.answer(call) for call in calls]


def test_a_call_outside_a_group_is_not_batched() -> None:
    assert together.answer(Add(3)) == (3, 1)


def test_only_calls_with_equal_keys_are_batched() -> None:
    results = together.run_in_lockstep(
        [
            make_client_of(Add(1)),
            make_client_of(Add(2, key=None)),
            make_client_of(Add(3)),
            make_client_of(Add(4, key="other")),
            make_client_of(Add(5, key=None)),
        ]
    )
    assert results == [[(4, 2)], [(2, 1)], [(4, 2)], [(4, 1)], [(5, 1)]]


def test_clients_run_one_at_a_time_in_order() -> None:
    events: list[str] = []

    def make_client(name: str, calls: int) -> Callable[[], str]:
        def run() -> str:
            for number in range(calls):
                events.append(f"{name}{number}")
                together.answer(Add(1))
            events.append(f"{name} done")
            return name

        return run

    assert together.run_in_lockstep([make_client("a", 2), make_client("b", 0), make_client("c", 1)]) == ["a", "b", "c"]
    assert events == ["a0", "b done", "c0", "a1", "c done", "a done"]


def test_unbatchable_calls_are_computed_unbatched() -> None:
    error = together.NotBatchableError("no")
    calls = [Add(1), Add(2)]
    calls[0].compute_batched = lambda others: (_ for _ in ()).throw(error)  # type: ignore[method-assign]
    assert together.run_in_lockstep([make_client_of(call) for call in calls]) == [[(1, 1)], [(2, 1)]]


def test_a_clients_exception_is_its_outcome_and_the_others_finish() -> None:
    mistake = ZeroDivisionError("a mistake")

    def fail() -> list[Any]:
        together.answer(Add(1))
        raise mistake

    outcomes = together.run_in_lockstep([make_client_of(Add(1), Add(10)), fail, make_client_of(Add(1), Add(20))])
    assert outcomes[1] is mistake
    assert outcomes[0] == [(3, 3), (30, 2)]
    assert outcomes[2] == [(3, 3), (30, 2)]


def test_an_exception_of_a_computation_is_raised_at_the_clients_call() -> None:
    def catch_error() -> str:
        try:
            together.answer(Add(1, key=None, failure=ValueError("the loss")))
        except ValueError as error:
            return f"caught {error}"
        return "nothing"

    outcomes = together.run_in_lockstep([catch_error, make_client_of(Add(1, key=None, failure=ValueError("its loss")))])
    assert outcomes[0] == "caught the loss"
    assert isinstance(outcomes[1], ValueError)


@pytest.mark.parametrize("where", ["several", "alone"])
def test_an_interrupt_in_a_computation_ends_all_clients(where: str) -> None:
    ended: list[int] = []

    def make_client(number: int) -> Callable[[], None]:
        def run() -> None:
            try:
                together.answer(Add(1, key="add" if where == "several" else None, failure=KeyboardInterrupt()))
            finally:
                ended.append(number)

        return run

    with pytest.raises(KeyboardInterrupt):
        together.run_in_lockstep([make_client(0), make_client(1), make_client(2)])
    assert ended == [0, 1, 2]


def test_an_exit_in_a_clients_code_ends_all_clients() -> None:
    def exit_client() -> None:
        raise SystemExit(3)

    started: list[str] = []
    with pytest.raises(SystemExit):
        together.run_in_lockstep([make_client_of(Add(1)), exit_client, lambda: started.append("never")])
    assert started == []


def test_a_call_during_the_end_of_a_client_ends_it() -> None:
    def ask_again() -> None:
        try:
            together.answer(Add(1, key=None, failure=KeyboardInterrupt()))
        finally:
            together.answer(Add(2))

    with pytest.raises(KeyboardInterrupt):
        together.run_in_lockstep([ask_again, ask_again])


def test_a_client_draws_the_same_random_numbers_in_a_group_and_alone() -> None:
    def make_client(seed: int) -> Callable[[], list[float]]:
        def run() -> list[float]:
            torch.manual_seed(seed)
            values = [float(torch.rand(()))]
            together.answer(Add(1))
            return [*values, float(torch.rand(()))]

        return run

    group = together.run_in_lockstep([make_client(1), make_client(2), make_client(3)])
    assert group == [make_client(1)(), make_client(2)(), make_client(3)()]


def test_nested_groups_keep_the_number_of_threads() -> None:
    def run_group() -> list[Any]:
        assert torch.get_num_threads() == threads
        return together.run_in_lockstep([make_client_of(Add(1)), make_client_of(Add(2))])

    threads = torch.get_num_threads()
    assert together.run_in_lockstep([run_group, run_group]) == [[[(3, 2)], [(3, 2)]]] * 2


def test_an_empty_group_gives_no_outcomes() -> None:
    assert together.run_in_lockstep([]) == []
