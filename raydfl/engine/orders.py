"""Orders to workers and their replies: values that travel between processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.types import Metrics, ModelSpec, Task, Update
from raydfl.data import Shard
from raydfl.engine.clients import Clients
from raydfl.engine.storage.private import PrivateRef

SERVER = ""
"""The client id under which the server's own test data are evaluated."""

TRIGGERED = "triggered"
"""The split of test clips that carry a backdoor's trigger."""
SERVER_VALIDATION = "server_validation"
"""The split that the server holds out beside its test, to choose a round or a setting."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement to make: the models, and the examples to measure them on."""

    split: str
    """``"test"`` (the server's held-out data), ``"triggered"`` (copies of them with a backdoor's trigger, of which only its success
    is measured), ``"server_validation"`` (the server's other hold-out), ``"validation"`` (the client's own hold-out) or
    ``"client_test"`` (the client's own test data)."""
    models: tuple[str, ...]
    shard: Shard | None = None
    """The part of the server's data that is measured; ``None``: all of the split."""
    sample: int | None = None
    """At most that many clips of the split, drawn by the run seed, the same for every client."""


@dataclass(frozen=True, slots=True)
class Order:
    """A task with what a worker needs to carry it out."""

    position: int
    """Place in the round: replies are consumed in this order, whatever the order of arrival."""
    task: Task
    round_index: int
    cost: float
    """Expected work, in examples."""
    private: PrivateRef | None = None
    measure: tuple[Measurement, ...] | None = None
    """``None``: train; else evaluate."""
    server_models: tuple[ModelSpec, ...] = ()
    """For the server's own evaluation: the shared models."""
    group: int = -1
    """Orders of one group are carried out together, in one worker; -1: this one by itself."""
    attacking: bool = False
    """True where the client attacks in this round."""
    part: str = ""
    """The client's part of ``data.parts``; empty: there are none."""
    place: str = ""
    """The site of the data that it is about; empty: wherever the run is."""
    stage: str = ""
    """The method's phase whose training settings hold."""

    @property
    def subject(self) -> str:
        """The client that it is about, in words."""
        return f"client {self.task.client_id!r}" if self.task.client_id else "the evaluation on the server's data"

    @property
    def round_number(self) -> int:
        """The round as it is printed: what is measured is the state after a round."""
        return self.round_index + (self.measure is None)


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer to an order: all that leaves a client."""

    position: int
    client_id: str
    update: Update | None = None
    """``None`` for an evaluation, and for an update that was rejected."""
    further: tuple[Update, ...] = ()
    """The client's updates to further keys."""
    largest: float = 0.0
    """The largest magnitude in the update."""
    rejected: str = ""
    """Why the client was left out, beginning with what kind of failure it was: ``"not finite: ..."``, ``"error: ..."``,
    ``"late: ..."`` or ``"lost: ..."``; empty when it was not."""
    cut: int | None = None
    """Optimiser steps that it did, if ``train.deadline`` ended its training early."""
    private: PrivateRef | None = None
    """Where the client's new private state was written; the state itself stays there."""
    measured: Mapping[str, Metrics] = field(default_factory=dict)
    """Metrics by split."""
    seconds: float = 0.0
    """Seconds of its group, divided by the group's clients."""
    waited: float = 0.0
    """Seconds from the arrival of the order at the worker to the begin of the work on it."""
    span: Span | None = None
    """Filled in by the pool: when this was done, on the server's clock."""
    retried: int = 0
    """Filled in by the pool: times that the order was given to another actor."""
    bytes_down: int = 0
    bytes_up: int = 0
    together: int = 1
    """Clients, this one included, whose training was one batched computation."""
    looped_because: str = ""
    """Why it was not, where it was tried."""

    @property
    def updates(self) -> tuple[Update, ...]:
        """All of the client's updates; none for an evaluation, and where they were rejected."""
        return () if self.update is None else (self.update, *self.further)


def check_tasks(tasks: Sequence[Task], keys: Collection[str]) -> None:
    """Check that what a method planned can be carried out.

    Args:
        tasks: of one round.
        keys: of the server's state.

    Raises:
        ConfigError: a client has two tasks, or is to receive what the server does not have.
    """
    seen: set[str] = set()
    for task in tasks:
        if task.client_id in seen:
            raise ConfigError(
                f"the method planned two tasks for client {task.client_id!r} in one round; one is possible"
            )
        seen.add(task.client_id)
        for key in task.has:
            if key not in task.receive:
                raise ConfigError(
                    f"the method planned that client {task.client_id!r} has {key!r} already, but not that it receives it; name in "
                    f"Task(has=...) only keys of receive"
                )
        for key in task.receive:
            if key not in keys:
                raise ConfigError(
                    f"the method planned to send {key!r} to client {task.client_id!r}, but the server's state has only "
                    f"{', '.join(keys)}"
                )


def check_take_part(tasks: Sequence[Task], clients: Clients, round_number: int, method: str) -> None:
    """Refuse a plan for nobody, or of a method that draws in its own way, and so clients that ``train.clients`` leaves out.

    Args:
        tasks: of the round.
        clients: all of them.
        round_number: for the message, as the name of the method.

    Raises:
        ConfigError: nobody takes part, or a client that is left out.
    """
    if not tasks:
        raise ConfigError(
            f"train.clients: none of the clients that it leaves can take part in round {round_number} of method {method!r}; take "
            f"back one of its conditions"
        )
    for task in tasks:
        if clients.by_id(task.client_id).chance == 0:
            raise ConfigError(
                f"train.clients: method {method!r} plans client {task.client_id!r}, which does not take part; its plan() must draw "
                f"with raydfl.sample_clients, or leave train.clients out"
            )


_SERVERS_OPTIONS = ("models", "split", "parts")
_SERVERS_SPLITS = ("test", TRIGGERED, SERVER_VALIDATION)


def check_server_tasks(
    tasks: Sequence[Task], keys: Collection[str], models: Collection[str], parts: Collection[str]
) -> None:
    """Check what a method planned for the server to measure.

    Args:
        tasks: those with the server's id.
        keys: of the server's state.
        models: of which the server has every tensor.
        parts: of the federation; one without a name where there are none.

    Raises:
        ConfigError: an entry, model or option that is not there, or two tasks that would be one in the record.
    """
    seen: set[tuple[str, str | None, str]] = set()
    where = "plan_evaluation(), the server's task:"
    for task in tasks:
        if not task.receive:
            raise ConfigError(
                f"{where} it receives no entry of the server's state; name one of {', '.join(map(repr, keys))}"
            )
        for key in task.receive:
            if key not in keys:
                raise ConfigError(f"{where} the server's state has no {key!r}; {nearest(key, keys)}")
        for name in task.options:
            if name not in _SERVERS_OPTIONS:
                raise ConfigError(f"{where} it has the option {name!r}; {nearest(name, _SERVERS_OPTIONS)}")
        split, named = task.options.get("split"), task.options.get("models", models)
        if split is not None and split not in _SERVERS_SPLITS:
            raise ConfigError(f"{where} there is no split {split!r}; {nearest(str(split), _SERVERS_SPLITS)}")
        _check_weights_of_parts(task.options.get("parts", {}), parts, where)
        if isinstance(named, str) or not named:
            raise ConfigError(f"{where} models is {named!r}; give a list of names, of {', '.join(map(repr, models))}")
        for name in named:
            if name not in models:
                raise ConfigError(f"{where} the server has no whole model {name!r}; {nearest(name, models)}")
            for each in _SERVERS_SPLITS if split is None else (split,):
                if (task.receive[0], each, name) in seen:
                    raise ConfigError(
                        f"{where} {name!r} of {task.receive[0]!r} is measured twice on the split {each!r}"
                    )
                seen.add((task.receive[0], each, name))


def _check_weights_of_parts(weights: object, parts: Collection[str], where: str) -> None:
    """Refuse what is no mapping of parts to numbers above 0."""
    for part, weight in weights.items() if isinstance(weights, Mapping) else [(weights, 0)]:
        if part not in parts or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ConfigError(
                f"{where} parts is {weights!r:.80}; give by names of parts a number above 0, how much the score counts there; the "
                f"parts are {', '.join(map(repr, parts))}"
            )


def keys_of(orders: Sequence[Order]) -> set[str]:
    """Return the keys of the server's state that orders need."""
    return {key for order in orders for key in order.task.receive}


def grouped(orders: Sequence[Order], kinds: Sequence[Hashable], width: int) -> list[Order]:
    """Return the orders with their groups: at most ``width`` of a kind, phase and receipt, those of similar cost together.

    It is a rule that does not know the pool, because how clients are grouped shows in the last digits of what they compute.
    """
    if width == 1:
        return list(orders)
    alike: dict[Hashable, list[Order]] = {}
    for order, kind in sorted(zip(orders, kinds, strict=True), key=lambda pair: (-pair[0].cost, pair[0].position)):
        alike.setdefault((kind, order.place, order.part, order.task.phase, order.task.receive), []).append(order)
    group_of: dict[int, int] = {}
    number = 0
    for members in alike.values():
        for part in np.array_split(np.array([order.position for order in members]), -(-len(members) // width)):
            group_of.update(dict.fromkeys(part.tolist(), number))
            number += 1
    return [dataclasses.replace(order, group=group_of[order.position]) for order in orders]


def in_groups(orders: Sequence[Order]) -> list[list[Order]]:
    """Return the orders by group, groups and orders in them in the order given."""
    groups: dict[tuple[str, int], list[Order]] = {}
    for order in orders:
        key = ("alone", order.position) if order.group < 0 else ("group", order.group)
        groups.setdefault(key, []).append(order)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class Span:
    """The time in which a client was worked on: seconds of the server's time.perf_counter."""

    actor: int
    """A number for each place of the pool; an actor that takes a lost one's place has its number."""
    sent: float
    """When the call with the client's order went out."""
    begin: float
    """When work on the client began, as far as the server can tell: it takes the way there and the way back as equally long."""
    end: float
    answered: float
    """When the server had the call's answer; it looks for answers while it has nothing to aggregate."""


def in_order(replies: Iterable[Reply], count: int) -> list[Reply]:
    """Return all replies by rising position; there must be ``count``."""
    found = sorted(replies, key=lambda reply: reply.position)
    if len(found) != count:
        raise AssertionError(f"the pool returned {len(found)} of {count} replies")
    return found
