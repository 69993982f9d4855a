"""Orders to workers and their replies, which travel between processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.message import Message
from raydfl.core.noise_key import NoiseKey
from raydfl.core.tensors import Layout
from raydfl.core.types import Metrics, ModelSpec, Task, Update
from raydfl.data import Shard
from raydfl.engine.clients import Clients
from raydfl.engine.storage.private import PrivateRef

SERVER = ""
"""Client id of evaluations on the server's data."""

MEAN = "mean of "
"""Prefix of keys in a broadcast: means of a round's updates (:mod:`raydfl.engine.passes`)."""

TRIGGERED = "triggered"
"""Split of test clips with a backdoor's trigger."""
SERVER_VALIDATION = "server_validation"
"""The server's validation split, for the choice of a round or a setting."""


def name_version(key: str, version: int) -> str:
    """Return the key, in a broadcast, of an entry of an earlier state.

    Args:
        key: Key of the server's state.
        version: Number of completed rounds of the earlier state.
    """
    return f"{key} after round {version}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Evaluation of models on a data split."""

    split: str
    """``"test"`` and ``"server_validation"`` (the server's test and validation data), ``"triggered"`` (test clips with a backdoor's
    trigger, to measure its success), ``"validation"`` and ``"client_test"`` (the client's own validation and test clips)."""
    models: tuple[str, ...]
    shard: Shard | None = None
    """Shard of the server's data; ``None``: the whole split."""
    sample: int | None = None
    """Largest number of clips. The run seed determines a random sample, equal for all clients. ``None``: all clips."""


@dataclass(frozen=True, slots=True)
class Block(Message):
    """Clients with consecutive positions, whose updates are added before they reach the server."""

    first: int
    """Position of the first client."""
    clients: int
    layouts: Mapping[str, Layout]
    """Layouts of the server's tensors by key, to check updates. In a pass: of all sent tensors."""
    accepted: int = 0
    """In a pass over its updates (:mod:`raydfl.engine.passes`): number of accepted clients; 0: train."""
    means: tuple[str, ...] = ()
    """Keys of the means for the first pass."""
    kept: Mapping[str, np.ndarray] | None = None
    """Chosen tensors for the second pass, by key: bool [accepted clients, tensors]."""


@dataclass(frozen=True, slots=True)
class Order(Message):
    """Task of a client with the data that a worker needs to execute it."""

    position: int
    """Position in the round. The server consumes replies in this order, regardless of their arrival."""
    task: Task
    round_index: int
    cost: float
    """Expected work, in examples."""
    private: PrivateRef | None = None
    measure: tuple[Measurement, ...] | None = None
    """``None``: train. Otherwise evaluate."""
    server_models: tuple[ModelSpec, ...] = ()
    """Shared models, for an evaluation on the server's data."""
    group: int = -1
    """Number of the order's group for batched execution in a worker; -1: unbatched."""
    block: Block | None = None
    """``None``: the client's update reaches the server by itself."""
    attacking: bool = False
    """Whether the client attacks in this round."""
    part: str = ""
    """The client's part of ``data.parts``. A single data set has no name."""
    place: str = ""
    """Site of the data; empty: the run's own machines."""
    stage: str = ""
    """Phase of the method, which selects the training settings."""
    key: NoiseKey | None = None
    """Source of the client's batches and noise (``train.optimiser.private``); ``None``: training without noise."""
    staleness: int = 0
    """Server steps between the start of the client and this step (``train.fleet``)."""
    most_batches: int | None = None
    """Batches in each call of ``fit`` until ``train.deadline`` in virtual time (``train.fleet``). ``None``: all batches."""
    start: int = -1
    """Number of the client's start in the run (``train.fleet``); -1: synchronous training, or an evaluation."""
    early: bool = False
    """Whether the order is carried out before the server step of its arrival (``train.fleet``)."""

    @property
    def version(self) -> int:
        """Number of completed rounds at the start of the client, which determines its seeds and its tensors."""
        return self.round_index - self.staleness

    def find_entry(self, key: str) -> str:
        """Return the key of an entry of the server's state in the broadcast."""
        return name_version(key, self.version) if self.staleness else key

    @property
    def subject(self) -> str:
        """The client in words, for messages."""
        return f"client {self.task.client_id!r}" if self.task.client_id else "the evaluation on the server's data"

    @property
    def repeats(self) -> bool:
        """True for a pass over the updates of a trained block."""
        return self.block is not None and self.block.accepted > 0

    @property
    def round_number(self) -> int:
        """Number of the round in messages. An evaluation belongs to the completed round."""
        return self.round_index + (self.measure is None)


@dataclass(frozen=True, slots=True)
class Reply(Message):
    """Answer of a worker to an order. Only this data leaves a client."""

    position: int
    client_id: str
    update: Update | None = None
    """``None`` for an evaluation, for a rejected update, and for an update in a block's sums."""
    further: tuple[Update, ...] = ()
    """The client's updates of further keys."""
    sums: tuple[Update, ...] = ()
    """Sums of the updates of the order's block by key, in the reply to its last order."""
    largest: float = 0.0
    """Largest magnitude in the update."""
    rejected: str = ""
    """Reason of a rejection, prefixed with the kind of failure: ``"not finite: ..."``, ``"error: ..."``, ``"late: ..."`` or
    ``"lost: ..."``; empty: accepted."""
    cut: int | None = None
    """Completed optimiser steps, if ``train.deadline`` ended the training early."""
    private: PrivateRef | None = None
    """Location of the client's new private state. The state itself stays with the worker."""
    measured: Mapping[str, Metrics] = field(default_factory=dict)
    """Metrics by split."""
    seconds: float = 0.0
    """Duration of the group's work, divided by the number of its clients."""
    processor: float = 0.0
    """Processor seconds of the group's work, divided by the number of its clients."""
    waited: float = 0.0
    """Seconds in the worker's queue."""
    span: Span | None = None
    """Time of the work on the server's clock, set by the pool."""
    retried: int = 0
    """Number of moves of the order to another actor, set by the pool."""
    bytes_down: int = 0
    bytes_up: int = 0
    multiply_adds: float = 0.0
    """Multiply-adds of the training (:mod:`raydfl.training.multiply_adds`). NaN: unknown."""
    together: int = 1
    """Number of clients in the batched computation; 1: unbatched."""
    looped_because: str = ""
    """Reason of a fallback from batched to unbatched training."""
    site_head: str = ""
    """Head of the record of outgoing data at the client's site; empty: the site has no record, or a later reply has the head."""

    @property
    def updates(self) -> tuple[Update, ...]:
        """All updates of the client; empty for an evaluation, and for rejected and summed updates."""
        return () if self.update is None else (self.update, *self.further)


def check_tasks(tasks: Sequence[Task], keys: Collection[str]) -> None:
    """Reject invalid tasks of a method's plan.

    Args:
        tasks: Tasks of one round.
        keys: Keys of the server's state.

    Raises:
        ConfigError: A client has two tasks, or a task refers to an unknown key.
    """
    seen: set[str] = set()
    for task in tasks:
        if task.client_id in seen:
            raise ConfigError(
                f"the method planned two tasks for client {task.client_id!r} in one round. Plan one task per client"
            )
        seen.add(task.client_id)
        for key in task.has:
            if key not in task.receive:
                raise ConfigError(
                    f"the method planned a task for client {task.client_id!r} with {key!r} in has but not in receive. Use only "
                    f"keys of receive in Task(has=...)"
                )
        for key in task.receive:
            if key not in keys:
                raise ConfigError(
                    f"the method planned to send {key!r} to client {task.client_id!r}, but the server's state has only "
                    f"{', '.join(keys)}. Correct Task(receive=...)"
                )


def check_take_part(tasks: Sequence[Task], clients: Clients, round_number: int, method: str) -> None:
    """Reject an empty plan, and a plan with clients that ``train.clients`` excludes.

    Args:
        tasks: Tasks of the round.
        clients: All clients.
        round_number: Number of the round, for the message.
        method: Name of the method, for the message.

    Raises:
        ConfigError: The plan is empty or contains an excluded client.
    """
    if not tasks:
        raise ConfigError(
            f"train.clients: none of the selected clients can take part in round {round_number} of method {method!r}. Remove one "
            f"of the conditions"
        )
    for task in tasks:
        if clients.by_id(task.client_id).chance == 0:
            raise ConfigError(
                f"train.clients: method {method!r} plans client {task.client_id!r}, which the setting excludes. Draw with "
                f"raydfl.sample_clients in plan(), or remove train.clients"
            )


_SERVERS_OPTIONS = ("models", "split", "parts")
_SERVERS_SPLITS = ("test", TRIGGERED, SERVER_VALIDATION)


def check_server_tasks(
    tasks: Sequence[Task], keys: Collection[str], models: Collection[str], parts: Collection[str]
) -> None:
    """Reject invalid evaluation tasks for the server in a method's plan.

    Args:
        tasks: Tasks with the server's id.
        keys: Keys of the server's state.
        models: Models whose tensors are all on the server.
        parts: Parts of the federation; a single empty name without parts.

    Raises:
        ConfigError: An entry, model or option is unknown, or two tasks have the same metrics.
    """
    seen: set[tuple[str, str | None, str]] = set()
    where = "plan_evaluation(), the server's task:"
    for task in tasks:
        if not task.receive:
            raise ConfigError(
                f"{where} it receives no entry of the server's state. Choose one of {', '.join(map(repr, keys))}"
            )
        for key in task.receive:
            if key not in keys:
                raise ConfigError(f"{where} the server's state has no {key!r}. {nearest(key, keys)}")
        for name in task.options:
            if name not in _SERVERS_OPTIONS:
                raise ConfigError(f"{where} it has the option {name!r}. {nearest(name, _SERVERS_OPTIONS)}")
        split, named = task.options.get("split"), task.options.get("models", models)
        if split is not None and split not in _SERVERS_SPLITS:
            raise ConfigError(f"{where} there is no split {split!r}. {nearest(str(split), _SERVERS_SPLITS)}")
        _check_weights_of_parts(task.options.get("parts", {}), parts, where)
        if isinstance(named, str) or not named:
            raise ConfigError(f"{where} models is {named!r}. Set it to a list of {', '.join(map(repr, models))}")
        for name in named:
            if name not in models:
                raise ConfigError(f"{where} the server has no whole model {name!r}. {nearest(name, models)}")
            for task_split in _SERVERS_SPLITS if split is None else (split,):
                if (task.receive[0], task_split, name) in seen:
                    raise ConfigError(
                        f"{where} {name!r} of {task.receive[0]!r} is measured twice on the split {task_split!r}. Remove one task"
                    )
                seen.add((task.receive[0], task_split, name))


def _check_weights_of_parts(weights: object, parts: Collection[str], where: str) -> None:
    """Reject weights that do not map parts to positive numbers."""
    for part, weight in weights.items() if isinstance(weights, Mapping) else [(weights, 0)]:
        if part not in parts or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ConfigError(
                f"{where} parts is {weights!r:.80}. Map parts to positive weights of their scores; the parts are "
                f"{', '.join(map(repr, parts))}"
            )


def keys_of(orders: Sequence[Order]) -> set[str]:
    """Return the keys of the server's state, and of means, in some orders."""
    means = {MEAN + key for order in orders if order.block is not None for key in order.block.means}
    return means.union(order.find_entry(key) for order in orders for key in order.task.receive)


def assign_groups(orders: Sequence[Order], kinds: Sequence[Hashable], width: int) -> list[Order]:
    """Assign orders to groups for batched training.

    A group has at most ``width`` orders of the same kind, block, part, phase, received keys and version, of similar cost. The
    assignment does not depend on the pool, because it affects the last bits of results.

    Args:
        orders: Orders of a round.
        kinds: Architectures of each order's client.
        width: Largest number of orders in a group; 1: no groups.
    """
    if width == 1:
        return list(orders)
    alike: dict[Hashable, list[Order]] = {}
    for order, kind in sorted(zip(orders, kinds, strict=True), key=lambda pair: (-pair[0].cost, pair[0].position)):
        block = None if order.block is None else order.block.first
        alike.setdefault(
            (kind, block, order.place, order.part, order.task.phase, order.task.receive, order.version), []
        ).append(order)
    group_of: dict[int, int] = {}
    number = 0
    for members in alike.values():
        # Splits of nearly equal size: a small remainder would train almost unbatched.
        for part in np.array_split(np.array([order.position for order in members]), -(-len(members) // width)):
            group_of.update(dict.fromkeys(part.tolist(), number))
            number += 1
    return [dataclasses.replace(order, group=group_of[order.position]) for order in orders]


def split_groups(orders: Sequence[Order]) -> list[list[Order]]:
    """Split orders into their groups, preserving the order."""
    groups: dict[tuple[str, int], list[Order]] = {}
    for order in orders:
        key = ("alone", order.position) if order.group < 0 else ("group", order.group)
        groups.setdefault(key, []).append(order)
    return list(groups.values())


def split_pieces(orders: Sequence[Order]) -> list[list[Order]]:
    """Split orders into the pieces of a worker's work: complete blocks, and the groups of all other orders."""
    members: dict[int, list[Order]] = {}
    for order in orders:
        if order.block is not None:
            members.setdefault(order.block.first, []).append(order)
    complete = {first for first, block in members.items() if len(block) == block[0].block.clients}  # type: ignore[union-attr]
    if not complete:
        return split_groups(orders)
    pieces = [members[first] for first in complete]
    rest = [order for order in orders if order.block is None or order.block.first not in complete]
    return sorted([*pieces, *split_groups(rest)], key=lambda piece: piece[0].position)


@dataclass(frozen=True, slots=True)
class Span(Message):
    """Time of a client's work, in seconds of the server's ``time.perf_counter``."""

    actor: int
    """Number of the actor. A replacement inherits the number of its lost actor."""
    sent: float
    """Time of the call with the client's order."""
    begin: float
    """Begin of the client's work, estimated from equal transfer times in both directions."""
    end: float
    answered: float
    """Time of the server's receipt. The server looks for answers only when it has nothing to aggregate."""


def sort_replies(replies: Iterable[Reply], count: int) -> list[Reply]:
    """Sort all ``count`` replies by position."""
    ordered = sorted(replies, key=lambda reply: reply.position)
    if len(ordered) != count:
        raise AssertionError(f"the pool returned {len(ordered)} of {count} replies")
    return ordered
