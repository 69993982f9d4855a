"""Blocks: clients of a cohort whose updates are added before they reach the server (``train.block``).

A block has consecutive positions of the cohort. The worker trains its clients, checks their updates, and adds the updates in
float64. The server adds the blocks in order of position. So the order of additions depends on positions alone, not on the pool.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from raydfl.core.tensors import Layout
from raydfl.core.types import Update
from raydfl.engine.orders import Block, Reply
from raydfl.engine.passes import BlockUpdates
from raydfl.engine.validation import UpdateChecker, reject_misfit
from raydfl.rules import Rule


def make_blocks(places: Sequence[str], size: int, layouts: Mapping[str, Layout]) -> list[Block | None]:
    """Divide a cohort into blocks of consecutive clients. A block does not cross the border of a site.

    Args:
        places: Site of each client, in client order.
        size: Largest number of clients in a block; 1: no blocks.
        layouts: Layouts of the server's tensors by key.

    Returns:
        The block of each client.
    """
    if size == 1:
        return [None] * len(places)
    blocks: list[Block | None] = []
    for _, members in itertools.groupby(places):
        left = len(list(members))
        while left:
            clients = min(size, left)
            blocks += [Block(len(blocks), clients, layouts)] * clients
            left -= clients
    return blocks


def sum_block(
    block: Block,
    replies: Iterable[Reply],
    rule: Rule,
    additions: tuple[str, ...],
    on_error: str,
    round_number: int,
    kept: BlockUpdates | None = None,
) -> list[Reply]:
    """Check the updates of a block, and add them.

    Args:
        block: The block.
        replies: Replies to all its orders, in any order. They are read one by one, so that few updates are in memory.
        rule: Aggregation rule.
        additions: ``Method.additions``.
        on_error: ``run.on_error``.
        round_number: Number of the round, for messages.
        kept: Keeps the updates of accepted clients; ``None``: they are dropped.

    Returns:
        The replies by position, without updates. The last one has the sums.
    """
    done: list[Reply] = []

    def accept() -> Iterator[Update]:
        for reply in _check(block, replies, additions, on_error, round_number):
            yield from reply.updates if kept is None else kept.take(reply.updates)
            done.append(dataclasses.replace(reply, update=None, further=()))

    updates = accept()
    sums = rule.sum_updates(updates, block.layouts)
    for _ in updates:
        pass  # a rule may skip updates, but the round must record every client's reply
    return [*done[:-1], dataclasses.replace(done[-1], sums=tuple(sums))]


def _check(
    block: Block, replies: Iterable[Reply], additions: tuple[str, ...], on_error: str, round_number: int
) -> Iterator[Reply]:
    """Yield the replies by position, without misfitting updates. The first three updates decide the kinds of metrics."""
    ordered, first = _sort(block, replies), collections.deque[Reply]()
    for early in ordered:
        first.append(early)
        if sum(len(reply.updates) for reply in first) >= 3:
            break
    updates = [(update, update.metrics) for reply in first for update in reply.updates]
    checker = UpdateChecker(block.layouts, additions, updates[:3])
    updates.clear()
    while reply := first.popleft() if first else next(ordered, None):
        misfit = checker.find_misfit(reply)
        if not misfit:
            yield reply
            continue
        rejected = reject_misfit(round_number, reply.client_id, misfit, on_error)
        yield dataclasses.replace(reply, update=None, further=(), rejected=rejected)


def _sort(block: Block, replies: Iterable[Reply]) -> Iterator[Reply]:
    """Yield the replies by position, as soon as possible."""
    early: dict[int, Reply] = {}
    position = block.first
    for reply in replies:
        early[reply.position] = reply
        while position in early:
            yield early.pop(position)
            position += 1
