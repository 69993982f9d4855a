"""Several clients' code side by side, so that what they have in common can be computed for all of them at once.

A client's code is ordinary Python: it does what it likes and calls :func:`raydfl.fit` or ``predict`` where it likes.
:func:`run_in_lockstep` runs each client's code in a thread of its own, but only one at a time and in the clients' order. A client
runs until it is done or until it makes a :class:`Call`, at which it is parked. When all are parked or done, the calls with
equal keys are computed together, everybody gets its answer, and the clients go on, again in order. So the order in which
things happen is a function of the clients' code alone.

Each client has PyTorch's global random numbers for itself: their state is exchanged whenever another client goes on, so a
client draws the same numbers in company as alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from raydfl.core.users_code import RAISED
from raydfl.training.randomness import generator_states, set_generator_states

T = TypeVar("T")


class Call(Protocol):
    """Something that a client wants computed and that may be computed for several clients at once."""

    def key(self) -> Hashable | None:
        """Return the key: calls with equal ones may be computed together; ``None``: this one only alone."""

    def alone(self) -> Any:
        """Compute it for this client only."""

    def several(self, others: Sequence[Any]) -> list[Any]:
        """Compute it for this client and others whose calls have an equal key; one answer each, this client's first.

        Raises:
            NotBatchableError: it cannot be done; nothing has been changed, and each is to be computed alone.
        """

    def apart(self, others: Sequence[Any]) -> None:
        """Take note that no two of this and the other clients' calls have an equal key: all are computed alone."""


class NotBatchableError(Exception):
    """Calls that looked alike cannot be computed together."""


class _Abandoned(BaseException):
    """Ends a client's thread whose result nobody waits for any more."""


_current = threading.local()


def answer(call: Call) -> Any:
    """Return what the call computes: at once, or together with other clients' calls when a group is being carried out."""
    member: _Member | None = getattr(_current, "member", None)
    return call.alone() if member is None else member.park(call)


def run_in_lockstep(functions: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Run the functions side by side; no thread is left when this returns or raises.

    Args:
        functions: one for each client. They run one at a time, so they may share what is not thread-safe, but what one has
            under way when it calls ``fit`` or ``predict`` must not be in another's way.

    Returns:
        What each function returned, or the exception that it raised.

    Raises:
        BaseException: what is no ``Exception`` (``KeyboardInterrupt``) ends all of them.
    """
    group = _Group(functions)
    try:
        group.run()
    finally:
        group.abandon()
    return [cast("T | Exception", member.outcome) for member in group.members]


def _closed() -> threading.Lock:
    """Return a gate that one thread opens for another, which closes it behind itself; a Semaphore takes many times as long."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Group:
    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
        self.threads = torch.get_num_threads()
        self.members = [_Member(function, self) for function in functions]
        self.turn_over = _closed()
        self.abandoned = False

    def run(self) -> None:
        waiting = self.members
        while waiting:
            for member in waiting:
                member.resume()
            waiting = [member for member in waiting if not member.done]
            groups = _alike(waiting)
            if len(groups) == len(waiting) > 1:
                first, *others = (cast(Call, member.call) for member in waiting)
                first.apart(others)
            for members in groups:
                _compute(members)

    def abandon(self) -> None:
        self.abandoned = True
        for member in self.members:
            member.end()


class _Member:
    """One client's code and the thread that it runs in."""

    def __init__(self, function: Callable[[], Any], group: _Group) -> None:
        self.function = function
        self.group = group
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.turn = _closed()
        self.call: Call | None = None
        self.answer: Any = None
        self.failure: BaseException | None = None
        self.outcome: Any = None
        self.fatal: BaseException | None = None
        self.done = False
        self.randomness: list[Tensor] | None = None
        """State of PyTorch's generators at this client; ``None``: as it happens to be, the client has not begun."""

    def _run(self) -> None:
        _current.member = self
        torch.set_num_threads(self.group.threads)  # holds for one thread of a process only
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
        """In the client's thread: hand over, and wait for the answer."""
        if self.group.abandoned:
            raise _Abandoned
        self.call = call
        self.group.turn_over.release()
        self.turn.acquire()
        if self.group.abandoned:
            raise _Abandoned
        found, failure = self.answer, self.failure
        self.answer = self.failure = None
        if failure is not None:
            raise failure
        return found

    def resume(self) -> None:
        """In the group's thread: let this client go on until it parks or is done."""
        with self.own_randomness():
            if self.thread.ident is None:
                self.thread.start()
            else:
                self.turn.release()
            self.group.turn_over.acquire()
        if self.fatal is not None:
            raise self.fatal

    def end(self) -> None:
        """In the group's thread: make sure that the thread is gone."""
        if self.thread.ident is not None:
            with contextlib.suppress(RuntimeError):  # open already: it was about to go on, or has nothing to wait for
                self.turn.release()
            self.thread.join()

    @contextlib.contextmanager
    def own_randomness(self) -> Iterator[None]:
        """PyTorch's generators as this client left them; how they are left now is remembered unless something fails."""
        if self.randomness is not None:
            set_generator_states(self.randomness)
        yield
        self.randomness = generator_states()


def _alike(members: Sequence[_Member]) -> list[list[_Member]]:
    """Return the parked members in groups whose calls can be computed together, in the members' order."""
    groups: dict[Hashable, list[_Member]] = {}
    for member in members:
        key = cast(Call, member.call).key()
        groups.setdefault(("alone", id(member)) if key is None else ("alike", key), []).append(member)
    return list(groups.values())


def _compute(members: Sequence[_Member]) -> None:
    """Answer the members' calls, together if that can be done."""
    first = members[0]
    calls = [cast(Call, member.call) for member in members]
    if len(members) > 1:
        # One computation draws from one generator: the first client's.
        with contextlib.suppress(NotBatchableError), first.own_randomness():
            answers = calls[0].several(calls[1:])
            for member, found in zip(members, answers, strict=True):
                member.answer = found
            return
    for member, call in zip(members, calls, strict=True):
        with member.own_randomness():
            try:
                member.answer = call.alone()
            except RAISED as error:  # the client's own, raised where it made the call
                member.failure = error
