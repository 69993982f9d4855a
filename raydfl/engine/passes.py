"""Passes over the updates of blocks, for a rule that compares updates with their mean (:class:`raydfl.rules.TwoPassRule`).

The workers train their blocks, return sums, and keep the updates. The server computes the mean of all updates. In the first pass
each worker measures its updates against the mean. The server chooses among all tensors. In the second pass each worker adds its
chosen tensors. A worker that does not have the updates of a block trains the block again, which gives the same updates.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from raydfl.core.errors import ClientError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.engine.orders import MEAN, Block, Order, Reply
from raydfl.rules import TwoPassRule, fill_cuts

_DISTANCES = "distances"
"""Entry of :attr:`Reply.measured` in the first pass: measured numbers by key, float64 [clients, tensors]."""


class BlockUpdates:
    """The accepted updates of a block between the passes.

    Args:
        current: The server's tensors by key.
    """

    def __init__(self, current: Mapping[str, Tensors]) -> None:
        self._current = current
        self.clients: list[tuple[Update, ...]] = []
        """The updates of each accepted client, by position, without cuts."""

    def take(self, updates: Iterable[Update]) -> tuple[Update, ...]:
        """Add the updates of the next client, and return them without cuts."""
        whole = tuple(fill_cuts(update, self._current.get(update.key, {})) for update in updates)
        if whole:
            self.clients.append(whole)
        return whole

    def repeat(self, order: Order, rule: TwoPassRule, means: Mapping[str, FlatTensors]) -> Reply:
        """Carry out a pass.

        Args:
            order: First order of the block.
            rule: Aggregation rule.
            means: Means of all updates by key, for the first pass.

        Returns:
            The reply for the whole block.

        Raises:
            ClientError: A repeated training gave other clients.
        """
        block = cast(Block, order.block)
        if len(self.clients) != block.accepted:
            raise ClientError(
                f"round {order.round_number}: the clients from {order.task.client_id!r} on were trained again after a loss, and "
                f"{len(self.clients)} of them were accepted instead of {block.accepted}. Draw all random numbers in local() from "
                f"step.rng, then resume the run"
            )
        reply = Reply(order.position, order.task.client_id)
        if block.kept is None:
            return dataclasses.replace(reply, measured={_DISTANCES: self._measure(block, rule, means)})
        return dataclasses.replace(reply, sums=tuple(rule.add_selected(self._select(block, block.kept), block.layouts)))

    def _measure(self, block: Block, rule: TwoPassRule, means: Mapping[str, FlatTensors]) -> dict[str, np.ndarray]:
        views = {
            key: {name: flat.vector[flat.layout.columns(name)] for name in flat.layout.names}
            for key, flat in means.items()
        }
        measured = {key: np.full((len(self.clients), len(flat.layout.names)), np.nan) for key, flat in means.items()}
        for row, updates in enumerate(self.clients):
            for update in updates:
                positions = block.layouts[update.key].positions
                for name, value in rule.measure_update(update, views[update.key]).items():
                    measured[update.key][row, positions[name]] = value
        return measured

    def _select(self, block: Block, kept: Mapping[str, np.ndarray]) -> Iterator[Update]:
        for row, updates in enumerate(self.clients):
            for update in updates:
                positions, chosen = block.layouts[update.key].positions, kept[update.key][row]
                names = [name for name in update.tensors if chosen[positions[name]]]
                if len(names) == len(update.tensors):
                    yield update
                elif names:
                    weight = update.weight
                    if isinstance(weight, Mapping):
                        weight = {name: weight[name] for name in names}
                    tensors = {name: update.tensors[name] for name in names}
                    yield dataclasses.replace(update, tensors=tensors, weight=weight)


class HeldBlocks:
    """Blocks of the current round in a worker, between the passes."""

    def __init__(self) -> None:
        self._round_index = -1
        self._blocks: dict[int, BlockUpdates] = {}

    def keep(self, order: Order, updates: BlockUpdates) -> None:
        """Keep the updates of the block of an order, and drop those of earlier rounds."""
        if order.round_index != self._round_index:
            self._round_index, self._blocks = order.round_index, {}
        self._blocks[cast(Block, order.block).first] = updates

    def find(self, order: Order) -> BlockUpdates | None:
        """Find the updates of the block of an order. Its last pass drops them."""
        block = cast(Block, order.block)
        if order.round_index != self._round_index:
            return None
        return self._blocks.get(block.first) if block.kept is None else self._blocks.pop(block.first, None)


@dataclass(frozen=True, slots=True)
class ReceivedBlock:
    """A block with accepted clients, after the training."""

    orders: Sequence[Order]
    accepted: int
    """Number of accepted clients."""
    updates: BlockUpdates | None = None
    """Updates of a divided block, which the server keeps; ``None``: a worker has them."""


def select_updates(
    rule: TwoPassRule,
    sums: Iterable[Update],
    blocks: Sequence[ReceivedBlock],
    send: Callable[[Sequence[Order], Mapping[str, FlatTensors]], Iterator[Reply]],
) -> Iterator[Update]:
    """Yield the sums of chosen tensors of blocks, in client order.

    Args:
        rule: Aggregation rule.
        sums: Sums of the blocks in the training, in client order.
        blocks: Blocks of the sums. They are read after the sums.
        send: Sends orders with additional broadcast tensors, and returns the replies in any order.
    """
    totals = {total.key: total for total in rule.sum_updates(sums, {})}
    if not totals:
        return
    layouts = {key: cast(FlatTensors, total.tensors).layout for key, total in totals.items()}
    means = {key: _divide(total) for key, total in totals.items()}
    parts = [
        cast("dict[str, np.ndarray]", reply.measured[_DISTANCES])
        for reply in _repeat(rule, blocks, [None] * len(blocks), layouts, means, send)
    ]
    measured = {key: np.concatenate([part[key] for part in parts]) for key in totals}
    selection, kept = rule.select(measured, layouts), []
    ends = itertools.accumulate((block.accepted for block in blocks), initial=0)
    for start, stop in itertools.pairwise(ends):
        kept.append({key: rows[start:stop] for key, rows in selection.kept.items()})
    metrics, senders = selection.metrics, {key: total.senders or {} for key, total in totals.items()}
    for reply in _repeat(rule, blocks, kept, layouts, means, send):
        for update in reply.sums:
            # A method may count the senders: all of them, as without blocks.
            yield dataclasses.replace(update, metrics=metrics, senders=senders.pop(update.key, {}))
            metrics = {}


def _divide(total: Update) -> FlatTensors:
    """Divide sums by their numbers of senders."""
    flat, senders = cast(FlatTensors, total.tensors), total.senders or {}
    vector = flat.vector.copy()
    for name in flat.layout.names:
        vector[flat.layout.columns(name)] /= senders[name]
    return FlatTensors(flat.layout, vector)


def _repeat(
    rule: TwoPassRule,
    blocks: Sequence[ReceivedBlock],
    kept: Sequence[Mapping[str, np.ndarray] | None],
    layouts: Mapping[str, Layout],
    means: Mapping[str, FlatTensors],
    send: Callable[[Sequence[Order], Mapping[str, FlatTensors]], Iterator[Reply]],
) -> Iterator[Reply]:
    """Yield the reply of each block to a pass, in client order."""
    passes: list[list[Order]] = []
    for received, chosen in zip(blocks, kept, strict=True):
        block = dataclasses.replace(
            cast(Block, received.orders[0].block),
            layouts=layouts,
            accepted=received.accepted,
            means=() if chosen is not None else tuple(means),
            kept=chosen,
        )
        passes.append([dataclasses.replace(order, block=block) for order in received.orders])
    orders = [order for block, orders in zip(blocks, passes, strict=True) if block.updates is None for order in orders]
    replies = send(orders, {MEAN + key: mean for key, mean in means.items()}) if orders else iter(())
    early: dict[int, Reply] = {}
    for received, members in zip(blocks, passes, strict=True):
        first = members[0]
        if received.updates is not None:
            yield received.updates.repeat(first, rule, means)
            continue
        while first.position not in early:
            reply = next(replies)
            early[reply.position] = reply
        yield early.pop(first.position)
