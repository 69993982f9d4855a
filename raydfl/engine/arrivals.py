"""Receipt of a round's updates, which sorts the pool's replies into client order for the aggregation."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from raydfl.core.tensors import Layout
from raydfl.core.types import Metrics, Ratio, Tensors, Update
from raydfl.engine.blocks import sum_block
from raydfl.engine.orders import Block, Order, Reply
from raydfl.engine.passes import BlockUpdates, ReceivedBlock
from raydfl.engine.storage import record
from raydfl.engine.storage.private import PrivateRef
from raydfl.engine.telemetry import TIMELINE, ReplyTimer, RoundReport, RoundRows
from raydfl.engine.validation import UpdateChecker, make_printable, reject_misfit
from raydfl.rules import Rule, TwoPassRule

BY_KIND = ("clients", "bytes_down", "bytes_up")
"""Metrics of each kind of client, recorded as ``views/KIND/clients`` and so on."""


class Arrivals:
    """Replies of a round's training, with the statistics of their clients.

    Args:
        orders: Orders of the round.
        replies: Replies of the pool, in order of completion.
        report: Report of the round, updated with each reply.
        on_error: ``"stop"`` or ``"drop"``: response to an update that does not fit.
        kind_of: Function from a client's id to its kind, for statistics by kind; ``None``: no such statistics.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        replies: Iterator[Reply],
        report: RoundReport,
        on_error: str,
        kind_of: Callable[[str], str] | None = None,
    ) -> None:
        self.moved: dict[str, PrivateRef] = {}
        """New locations of clients' private state, by client id."""
        self.largest: dict[str, float] = {}
        """Largest magnitude in each client's update."""
        self.seconds = 0.0
        """Seconds that the server waited for replies."""
        self.blocks: list[ReceivedBlock] = []
        """Blocks with accepted clients, for a rule with passes over their updates."""
        self._orders = orders
        self._replies = replies
        self._early: dict[int, Reply] = {}
        """Replies ahead of their turn, by position."""
        self._timer = ReplyTimer()
        self._report = report
        self._on_error = on_error
        self._kind_of = kind_of
        self._by_kind: dict[str, list[int]] = {}
        """Number of clients of each kind, and their bytes down and up."""
        self._trained: dict[str, Metrics] = {}
        self._multiply_adds = 0.0
        self._seconds = {"fit": 0.0, "processor": 0.0}
        self._vectorised = 0

    def updates(
        self, tensors: Mapping[str, Tensors], additions: tuple[str, ...], rule: Rule | None = None
    ) -> Iterator[Update]:
        """Yield the accepted updates, or the sums of blocks, in client order, regardless of their order of arrival.

        Args:
            tensors: Tensors of the server by key.
            additions: ``Method.additions``.
            rule: Aggregation rule; ``None``: there are no blocks.
        """
        layouts = {key: Layout.from_tensors(group) for key, group in tensors.items()}
        if rule is not None and self._orders and self._orders[0].block is not None:
            yield from self._receive_blocks(UpdateChecker(layouts, additions), additions, rule, tensors)
            return
        # Kinds of metrics are decided by the majority of the first three updates, so the checker needs them in advance.
        first: list[tuple[Update, Metrics]] = []
        for order in self._orders:
            reply = self._wait_for(order)
            first += [(update, update.metrics) for update in reply.updates]
            if len(first) >= 3:
                break
        checker = UpdateChecker(layouts, additions, first[:3])
        first.clear()
        for order in self._orders:
            reply = self._wait_for(order)
            del self._early[order.position]
            if self._accept(reply, checker.find_misfit(reply)):
                yield from reply.updates

    def _receive_blocks(
        self, checker: UpdateChecker, additions: tuple[str, ...], rule: Rule, tensors: Mapping[str, Tensors]
    ) -> Iterator[Update]:
        """Yield the sums of blocks in client order."""
        for _, members in itertools.groupby(self._orders, lambda order: cast(Block, order.block).first):
            orders, kept = list(members), None
            block = cast(Block, orders[0].block)
            replies = [self._wait_for(order) for order in orders]
            for reply in replies:
                del self._early[reply.position]
            if any(reply.updates for reply in replies):  # The pool has divided the block.
                kept = BlockUpdates(tensors) if isinstance(rule, TwoPassRule) else None
                replies = sum_block(block, replies, rule, additions, self._on_error, self._report.round, kept)
            misfit = checker.find_misfit_of_block(replies)
            accepted = sum(self._accept(reply, "" if reply.rejected else misfit) for reply in replies)
            if accepted:
                self.blocks.append(ReceivedBlock(orders, accepted, kept))
                yield from replies[-1].sums

    def _wait_for(self, order: Order) -> Reply:
        """Wait for the reply to an order, and store earlier arrivals."""
        while order.position not in self._early:
            start = time.perf_counter()
            try:
                reply = next(self._replies, None)
            finally:
                self.seconds += time.perf_counter() - start
            if reply is None:
                raise AssertionError(f"the pool returned no reply to order {order.position}")
            self._timer.note(reply)
            self._early[reply.position] = reply
        return self._early[order.position]

    def _accept(self, reply: Reply, misfit: str) -> bool:
        """Record a reply, and return whether its update is accepted.

        Args:
            reply: The reply.
            misfit: Reason why the update cannot be used; empty: it can.
        """
        report, client = self._report, reply.client_id
        report.clients += 1
        report.bytes_down += reply.bytes_down
        report.bytes_up += reply.bytes_up
        if self._kind_of is not None:
            totals = self._by_kind.setdefault(self._kind_of(client), [0, 0, 0])
            for place, value in enumerate((1, reply.bytes_down, reply.bytes_up)):
                totals[place] += value
        report.looped_because = report.looped_because or reply.looped_because
        self._multiply_adds += reply.multiply_adds
        self._seconds["fit"] += reply.seconds
        self._seconds["processor"] += reply.processor
        self._vectorised += reply.together > 1
        reason = reject_misfit(report.round, client, misfit, self._on_error) if misfit else reply.rejected
        if reason:
            report.rejected[client] = make_printable(reason)
            return False
        if reply.private is not None and reply.private != self._orders[reply.position].private:
            self.moved[client] = reply.private
        self.largest[client] = reply.largest
        if reply.cut is not None:
            report.cut[client] = reply.cut
        self._trained[client] = reply.measured["train"]
        return True

    def record(self, rows: RoundRows, together: bool, deadline: bool) -> None:
        """Record the metrics of the clients' training, after all replies.

        Args:
            rows: Rows of the round, extended in place.
            together: Whether clients may be trained in batches.
            deadline: Whether the training has a deadline.
        """
        report = self._report
        trained = record.rows_from_clients(report.round, "train", "train", self._trained)
        report.loss = next(
            (row.value for row in reversed(trained) if row.metric == "loss" and not row.client), math.nan
        )
        rows += trained
        work = {name: Ratio(seconds, max(1, report.clients)) for name, seconds in self._seconds.items()}
        report.work.update(work)
        rows.add(
            {
                "bytes_down": Ratio(report.bytes_down, 1),
                "bytes_up": Ratio(report.bytes_up, 1),
                "clients": Ratio(report.clients, 1),
                "failed": Ratio(len(report.rejected), 1),
                **{f"seconds/{name}": ratio for name, ratio in work.items()},
            }
        )
        if math.isfinite(self._multiply_adds):
            rows.add({"multiply_adds": Ratio(self._multiply_adds, 1)})
        for kind, totals in sorted(self._by_kind.items()):
            names = (f"views/{kind}/{metric}" for metric in BY_KIND)
            rows.add({name: Ratio(total, 1) for name, total in zip(names, totals, strict=True)})
        if together:
            rows.add({"vectorised": Ratio(self._vectorised, max(1, report.clients))})
        rows.add_notes("train", "failed", report.rejected)
        if deadline:
            rows.add({"late": Ratio(len(report.cut), 1)})
            steps = {client: f"{done} steps until train.deadline" for client, done in report.cut.items()}
            rows.add_notes("train", "late", steps)

    def record_work(self, rows: RoundRows, actors: int | None, start: float, index_of: Callable[[str], int]) -> None:
        """Record the actors' use of time in the round's training, with a timeline of clients.

        Args:
            rows: Rows of the round, extended in place.
            actors: Number of actors; ``None``: they also carry out orders of later rounds, so the times of one round are unknown.
            start: Start of the round, in seconds of ``time.perf_counter``.
            index_of: Function from a client's id to its index in the population.
        """
        report, timer = self._report, self._timer
        work = {} if actors is None else timer.work(actors)
        report.work.update(work)
        report.retried = sum(timer.retried.values())
        rows.add({**{f"seconds/{use}": ratio for use, ratio in work.items()}, "retried": Ratio(report.retried, 1)})
        rows.add({TIMELINE: timer.timeline(start, {client: index_of(client) for client, _ in timer.spans})})
        for client, times in timer.retried.items():
            rows.add({"retried": Ratio(times, 1)}, client)
