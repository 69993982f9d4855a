"""Clients' code side by side: the order of things, errors, random numbers, and threads that are gone afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch

from raydfl.training.together import lockstep as together


class Add:
    """Adds up the numbers of all clients that ask together."""

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
def no_thread_is_left() -> Any:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def asking(*calls: Add) -> Callable[[], list[Any]]:
    return lambda: [together.answer(call) for call in calls]


def test_outside_a_group_a_call_is_computed_alone() -> None:
    assert together.answer(Add(3)) == (3, 1)


def test_calls_with_equal_keys_are_computed_together_and_others_alone() -> None:
    found = together.run_in_lockstep(
        [
            asking(Add(1)),
            asking(Add(2, key=None)),
            asking(Add(3)),
            asking(Add(4, key="other")),
            asking(Add(5, key=None)),
        ]
    )
    assert found == [[(4, 2)], [(2, 1)], [(4, 2)], [(4, 1)], [(5, 1)]]


def test_clients_run_one_at_a_time_in_their_order() -> None:
    seen: list[str] = []

    def client(name: str, calls: int) -> Callable[[], str]:
        def run() -> str:
            for number in range(calls):
                seen.append(f"{name}{number}")
                together.answer(Add(1))
            seen.append(f"{name} done")
            return name

        return run

    assert together.run_in_lockstep([client("a", 2), client("b", 0), client("c", 1)]) == ["a", "b", "c"]
    assert seen == ["a0", "b done", "c0", "a1", "c done", "a done"]


def test_what_cannot_be_computed_together_is_computed_alone() -> None:
    apart = together.NotBatchableError("no")
    calls = [Add(1), Add(2)]
    calls[0].compute_batched = lambda others: (_ for _ in ()).throw(apart)  # type: ignore[method-assign]
    assert together.run_in_lockstep([asking(call) for call in calls]) == [[(1, 1)], [(2, 1)]]


def test_one_clients_exception_is_its_outcome_and_the_others_finish() -> None:
    mistake = ZeroDivisionError("a mistake")

    def fails() -> list[Any]:
        together.answer(Add(1))
        raise mistake

    found = together.run_in_lockstep([asking(Add(1), Add(10)), fails, asking(Add(1), Add(20))])
    assert found[1] is mistake
    assert found[0] == [(3, 3), (30, 2)]
    assert found[2] == [(3, 3), (30, 2)]


def test_an_exception_of_a_computation_is_raised_where_the_client_made_the_call() -> None:
    def careful() -> str:
        try:
            together.answer(Add(1, key=None, failure=ValueError("the loss")))
        except ValueError as error:
            return f"caught {error}"
        return "nothing"

    found = together.run_in_lockstep([careful, asking(Add(1, key=None, failure=ValueError("its loss")))])
    assert found[0] == "caught the loss"
    assert isinstance(found[1], ValueError)


@pytest.mark.parametrize("where", ["several", "alone"])
def test_an_interrupt_in_a_computation_ends_everything(where: str) -> None:
    cleaned: list[int] = []

    def client(number: int) -> Callable[[], None]:
        def run() -> None:
            try:
                together.answer(Add(1, key="add" if where == "several" else None, failure=KeyboardInterrupt()))
            finally:
                cleaned.append(number)

        return run

    with pytest.raises(KeyboardInterrupt):
        together.run_in_lockstep([client(0), client(1), client(2)])
    assert cleaned == [0, 1, 2]


def test_an_exit_in_a_clients_code_ends_everything() -> None:
    def exits() -> None:
        raise SystemExit(3)

    begun: list[str] = []
    with pytest.raises(SystemExit):
        together.run_in_lockstep([asking(Add(1)), exits, lambda: begun.append("never")])
    assert begun == []


def test_a_client_that_asks_again_while_it_is_ended_is_ended() -> None:
    def stubborn() -> None:
        try:
            together.answer(Add(1, key=None, failure=KeyboardInterrupt()))
        finally:
            together.answer(Add(2))

    with pytest.raises(KeyboardInterrupt):
        together.run_in_lockstep([stubborn, stubborn])


def test_a_client_draws_the_same_random_numbers_in_company_as_alone() -> None:
    def client(seed: int) -> Callable[[], list[float]]:
        def run() -> list[float]:
            torch.manual_seed(seed)
            drawn = [float(torch.rand(()))]
            together.answer(Add(1))
            return [*drawn, float(torch.rand(()))]

        return run

    company = together.run_in_lockstep([client(1), client(2), client(3)])
    assert company == [client(1)(), client(2)(), client(3)()]


def test_groups_within_a_client_and_settings_of_threads() -> None:
    def inner() -> list[Any]:
        assert torch.get_num_threads() == threads
        return together.run_in_lockstep([asking(Add(1)), asking(Add(2))])

    threads = torch.get_num_threads()
    assert together.run_in_lockstep([inner, inner]) == [[[(3, 2)], [(3, 2)]]] * 2


def test_nobody() -> None:
    assert together.run_in_lockstep([]) == []
