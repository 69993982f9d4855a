"""What a worker is asked to do, and what it answers: values that travel between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raydfl.core.types import Metrics, ModelSpec, Task, Update
from raydfl.engine.storage.private import PrivateRef

SERVER = ""
"""The client id under which the server's own test data are evaluated."""

TRIGGERED = "triggered"
"""The split of test clips that carry a backdoor's trigger."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Which examples to measure which models on."""

    split: str
    """``"test"`` (the server's held-out data), ``"triggered"`` (copies of them with a backdoor's trigger, of which only its success
    is measured) or ``"validation"`` (the client's own hold-out)."""
    models: tuple[str, ...]
    start: int = 0
    stop: int | None = None
    sample: int | None = None
    """At most that many clips of the split, drawn by the run seed, the same for every client."""


@dataclass(frozen=True, slots=True)
class Order:
    """A task with what a worker needs to carry it out."""

    position: int
    """Place in the round: results are consumed in this order, whatever the order of arrival."""
    task: Task
    round_index: int
    cost: float
    """Expected work, in examples; the pool hands out the longest first."""
    private: PrivateRef | None = None
    measure: tuple[Measurement, ...] | None = None
    """``None``: train; else evaluate."""
    server_models: tuple[ModelSpec, ...] = ()
    """For the server's own evaluation: the shared models."""
    group: int = -1
    """Orders of one group are carried out together, in one worker; -1: this one by itself."""
    attacking: bool = False
    """Whether the client attacks in this round."""
    site: str = ""
    """Where the data lie that it is about; empty: wherever the run is."""


@dataclass(frozen=True, slots=True)
class Result:
    """What comes back from a worker: all that leaves a client."""

    position: int
    client_id: str
    update: Update | None = None
    """``None`` for an evaluation, and for an update that was rejected."""
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
    """Of its group, divided by the group's clients."""
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
    apart: str = ""
    """Why it was not, where it was tried."""


def in_groups(orders: Sequence[Order]) -> list[list[Order]]:
    """The orders by group, groups and orders in them in the order given."""
    groups: dict[tuple[str, int], list[Order]] = {}
    for order in orders:
        key = ("alone", order.position) if order.group < 0 else ("group", order.group)
        groups.setdefault(key, []).append(order)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class Span:
    """When a client was worked on: seconds of the server's time.perf_counter."""

    actor: int
    """A number for each place of the pool; an actor that takes a lost one's place has its number."""
    sent: float
    """When the call with the client's order went out."""
    begin: float
    """When work on the client began, as far as the server can tell: it takes the way there and the way back as equally long."""
    end: float
    answered: float
    """When the server had the call's answer; it looks for answers while it has nothing to aggregate."""
