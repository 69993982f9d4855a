"""Lockstep execution of several clients' code, so that equal calls of ``fit`` and ``predict`` are computed in one batch.

A client's code is arbitrary Python with calls of :func:`raydfl.fit` or ``predict``. :func:`run_in_lockstep` runs each client in
its own thread, one thread at a time, in the order of the clients. A client runs until it finishes or makes a :class:`Call`,
then it waits. After the last client, calls with equal keys are computed in one batch, and the clients resume in order with
their answers. The sequence of operations is therefore a function of the clients' code only.

Each client has its own state of PyTorch's global generators, exchanged at every switch between clients. Its random numbers are
the same as unbatched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from raydfl.core.users_code import FAILURES
from raydfl.training.randomness import get_generator_states, set_generator_states

T = TypeVar("T")


class Call(Protocol):
    """A client's request for a batchable computation."""

    def key(self) -> Hashable | None:
        """Return the batching key. Calls with equal keys are computed in one batch. ``None``: never batch this call."""

    def compute(self) -> Any:
        """Compute the answer of this client, unbatched."""

    def compute_batched(self, others: Sequence[Any]) -> list[Any]:
        """Compute the answers of this call and of further calls with an equal key, in this order.

        Raises:
            NotBatchableError: batching is impossible. No client has changed; compute each call unbatched.
        """

    def note_unequal_keys(self, others: Sequence[Any]) -> None:
        """Record the reason if the keys of all waiting calls differ and no call is batched."""


class NotBatchableError(Exception):
    """Calls with equal keys cannot be computed in one batch."""


class _Abandoned(BaseException):
    """End the thread of a client whose result is not needed."""


_current = threading.local()


def answer(call: Call) -> Any:
    """Compute a call: in lockstep together with equal calls of different clients, else at once."""
    member: _Member | None = getattr(_current, "member", None)
    return call.compute() if member is None else member.park(call)


def run_in_lockstep(functions: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Run the code of several clients in lockstep. All threads have ended when this returns or raises.

    Args:
        functions: code of each client. Only one function runs at a time, so functions may share objects that are not
            thread-safe. They switch only in calls of ``fit`` and ``predict``.

    Returns:
        Result of each function, or the exception that it raised.

    Raises:
        BaseException: an exception beyond ``Exception``, such as ``KeyboardInterrupt``, ends all clients.
    """
    group = _Group(functions)
    try:
        group.run()
    finally:
        group.abandon()
    return [cast("T | Exception", member.outcome) for member in group.members]


def _make_gate() -> threading.Lock:
    """Create a closed gate for the hand-over between two threads: ``release`` opens it, ``acquire`` waits and closes it.

    A plain lock is many times as fast as a Semaphore.
    """
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Group:
    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
        self.threads = torch.get_num_threads()
        self.members = [_Member(function, self) for function in functions]
        self.turn_over = _make_gate()
        self.abandoned = False

    def run(self) -> None:
        waiting = self.members
        while waiting:
            for member in waiting:
                member.resume()
            waiting = [member for member in waiting if not member.done]
            groups = _group_calls(waiting)
            if len(groups) == len(waiting) > 1:
                first, *rest = (cast(Call, member.call) for member in waiting)
                first.note_unequal_keys(rest)
            for members in groups:
                _answer_calls(members)

    def abandon(self) -> None:
        self.abandoned = True
        for member in self.members:
            member.end()


class _Member:
    """A client of the group, with its code and thread."""

    def __init__(self, function: Callable[[], Any], group: _Group) -> None:
        self.function = function
        self.group = group
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.turn = _make_gate()
        self.call: Call | None = None
        self.answer: Any = None
        self.failure: BaseException | None = None
        self.outcome: Any = None
        self.fatal: BaseException | None = None
        self.done = False
        self.randomness: list[Tensor] | None = None
        """State of PyTorch's generators for this client. ``None``: the client has not started."""

    def _run(self) -> None:
        _current.member = self
        torch.set_num_threads(self.group.threads)  # PyTorch keeps this setting for each thread
        try:
            self.outcome = self.function()
        except Exception as error:  # noqa: BLE001 - whatever a client's code raises is its outcome
            self.outcome = error
        except BaseException as error:  # noqa: BLE001 - raised again in the group's thread
            self.fatal = error
        self.done = True
        if not self.group.abandoned:
            self.group.turn_over.release()

    def park(self, call: Call) -> Any:
        """Hand over to the group and wait for the answer (in the client's thread)."""
        if self.group.abandoned:
            raise _Abandoned
        self.call = call
        self.group.turn_over.release()
        self.turn.acquire()
        if self.group.abandoned:
            raise _Abandoned
        result, failure = self.answer, self.failure
        self.answer = self.failure = None
        if failure is not None:
            raise failure
        return result

    def resume(self) -> None:
        """Run this client until it makes a call or finishes (in the group's thread)."""
        with self.use_own_generators():
            if self.thread.ident is None:
                self.thread.start()
            else:
                self.turn.release()
            self.group.turn_over.acquire()
        if self.fatal is not None:
            raise self.fatal

    def end(self) -> None:
        """End the client's thread and wait for its end (in the group's thread)."""
        if self.thread.ident is not None:
            # If the client was about to resume or is done, its turn is already released.
            with contextlib.suppress(RuntimeError):
                self.turn.release()
            self.thread.join()

    @contextlib.contextmanager
    def use_own_generators(self) -> Iterator[None]:
        """Set PyTorch's generators to this client's state inside a ``with`` block, and save it unless the block raises."""
        if self.randomness is not None:
            set_generator_states(self.randomness)
        yield
        self.randomness = get_generator_states()


def _group_calls(members: Sequence[_Member]) -> list[list[_Member]]:
    """Group the waiting members by the keys of their calls, in the members' order."""
    groups: dict[Hashable, list[_Member]] = {}
    for member in members:
        key = cast(Call, member.call).key()
        groups.setdefault(("alone", id(member)) if key is None else ("alike", key), []).append(member)
    return list(groups.values())


def _answer_calls(members: Sequence[_Member]) -> None:
    """Answer the members' calls, in one batch if possible."""
    first = members[0]
    calls = [cast(Call, member.call) for member in members]
    if len(members) > 1:
        # A batched computation draws from a single generator: the first client's.
        with contextlib.suppress(NotBatchableError), first.use_own_generators():
            answers = calls[0].compute_batched(calls[1:])
            for member, result in zip(members, answers, strict=True):
                member.answer = result
            return
    for member, call in zip(members, calls, strict=True):
        with member.use_own_generators():
            try:
                member.answer = call.compute()
            except FAILURES as error:  # raised again in the client's thread, at its call
                member.failure = error
