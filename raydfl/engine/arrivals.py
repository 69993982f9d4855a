"""The way home of a round's updates: from the pool, as clients are done, to the aggregation, in client order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from raydfl.core.metrics import pool as pool_metrics
from raydfl.core.types import Metrics, Ratio, Tensors, Update
from raydfl.engine.orders import Order, Reply
from raydfl.engine.storage import record
from raydfl.engine.storage.private import PrivateRef
from raydfl.engine.telemetry import TIMELINE, ReplyTimer, RoundReport, RoundRows
from raydfl.engine.validation import UpdateChecker, left_out, shown_reason

BY_KIND = ("clients", "bytes_down", "bytes_up")
"""Names of the numbers that are recorded of each kind of client, as ``views/KIND/clients`` and so on."""


class Arrivals:
    """The replies of a round's training: their updates, and what else came with them.

    Args:
        orders: of the round.
        replies: of the pool, in order of completion.
        report: is told of each reply.
        on_error: ``"stop"`` or ``"drop"``: what becomes of a client whose update does not fit.
        kind_of: says by its id which kind a client is of, where bytes are told by kind; ``None``: they are not.
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
        """New places of clients' private state, by client id."""
        self.largest: dict[str, float] = {}
        """The largest magnitude that each client sent."""
        self.seconds = 0.0
        """For which the server was kept waiting."""
        self._orders = orders
        self._replies = replies
        self._early: dict[int, Reply] = {}
        """Replies that have come and not been passed on, by position."""
        self._timer = ReplyTimer()
        self._report = report
        self._on_error = on_error
        self._kind_of = kind_of
        self._by_kind: dict[str, list[int]] = {}
        """Clients of each kind that took part, and the bytes down and up."""
        self._trained: dict[str, Metrics] = {}
        self._fit_seconds = 0.0
        self._vectorised = 0

    def updates(self, tensors: Mapping[str, Tensors], additions: tuple[str, ...]) -> Iterator[Update]:
        """Pass on the updates that count, one after another in client order, whatever the order of arrival.

        Args:
            tensors: the server's, by key.
            additions: Method.additions.
        """
        # The first three updates decide what all have to agree in, so they are there before one of them is passed on.
        first: list[tuple[Update, Metrics]] = []
        for order in self._orders:
            reply = self._reply_to(order)
            first += [(update, update.metrics) for update in reply.updates]
            if len(first) >= 3:
                break
        checker = UpdateChecker(tensors, additions, first[:3])
        first.clear()
        for order in self._orders:
            reply = self._reply_to(order)
            del self._early[order.position]
            if self._counts(reply, checker):
                yield from reply.updates

    def _reply_to(self, order: Order) -> Reply:
        """Wait for the reply to an order; others that come meanwhile are kept."""
        while order.position not in self._early:
            asked = time.perf_counter()
            try:
                reply = next(self._replies, None)
            finally:
                self.seconds += time.perf_counter() - asked
            if reply is None:
                raise AssertionError(f"the pool returned no reply to order {order.position}")
            self._timer.note(reply)
            self._early[reply.position] = reply
        return self._early[order.position]

    def _counts(self, reply: Reply, checker: UpdateChecker) -> bool:
        """Take note of a reply; return whether its update counts."""
        report, client = self._report, reply.client_id
        report.clients += 1
        report.bytes_down += reply.bytes_down
        report.bytes_up += reply.bytes_up
        if self._kind_of is not None:
            found = self._by_kind.setdefault(self._kind_of(client), [0, 0, 0])
            for place, more in enumerate((1, reply.bytes_down, reply.bytes_up)):
                found[place] += more
        report.looped_because = report.looped_because or reply.looped_because
        self._fit_seconds += reply.seconds
        self._vectorised += reply.together > 1
        reason = reply.rejected
        if reply.update is not None:
            misfit = next(filter(None, (checker.misfit(update, update.metrics) for update in reply.updates)), "")
            reason = left_out(report.round, client, misfit, self._on_error) if misfit else ""
        if reply.update is None or reason:
            report.rejected[client] = shown_reason(reason)
            return False
        if reply.private is not None and reply.private != self._orders[reply.position].private:
            self.moved[client] = reply.private
        self.largest[client] = reply.largest
        if reply.cut is not None:
            report.cut[client] = reply.cut
        self._trained[client] = reply.measured["train"]
        return True

    def record(self, rows: RoundRows, together: bool, deadline: bool) -> None:
        """Record what the clients' training gave; every reply must have come.

        Args:
            rows: of the round.
            together: whether clients may be trained together.
            deadline: whether their training has one.
        """
        report = self._report
        loss = pool_metrics(self._trained.values()).get("loss")
        if isinstance(loss, Ratio):
            report.loss = loss.value
        rows += record.rows_from_clients(report.round, "train", "train", self._trained)
        fit = Ratio(self._fit_seconds, max(1, report.clients))
        report.work["fit"] = fit
        rows.add(
            {
                "bytes_down": Ratio(report.bytes_down, 1),
                "bytes_up": Ratio(report.bytes_up, 1),
                "clients": Ratio(report.clients, 1),
                "failed": Ratio(len(report.rejected), 1),
                "seconds/fit": fit,
            }
        )
        for kind, numbers in sorted(self._by_kind.items()):
            names = (f"views/{kind}/{what}" for what in BY_KIND)
            rows.add({name: Ratio(number, 1) for name, number in zip(names, numbers, strict=True)})
        if together:
            rows.add({"vectorised": Ratio(self._vectorised, max(1, report.clients))})
        rows.add_notes("train", "failed", report.rejected)
        if deadline:
            rows.add({"late": Ratio(len(report.cut), 1)})
            steps = {client: f"{done} steps until train.deadline" for client, done in report.cut.items()}
            rows.add_notes("train", "late", steps)

    def record_work(self, rows: RoundRows, actors: int, began: float, index_of: Callable[[str], int]) -> None:
        """Record how the actors spent the round's training, and who did what when.

        Args:
            rows: of the round.
            actors: how many there are.
            began: when the round began.
            index_of: a client's position in the population, by its id.
        """
        report, timer = self._report, self._timer
        work = timer.work(actors)
        report.work.update(work)
        report.retried = sum(timer.retried.values())
        rows.add({**{f"seconds/{what}": ratio for what, ratio in work.items()}, "retried": Ratio(report.retried, 1)})
        rows.add({TIMELINE: timer.timeline(began, {client: index_of(client) for client, _ in timer.spans})})
        for client, times in timer.retried.items():
            rows.add({"retried": Ratio(times, 1)}, client)
