"""EarlyWork: orders of clients in flight that actors carry out before the server step of their arrival (``train.fleet``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from raydfl.engine import EarlyOrders, Order, Reply


class EarlyWork:
    """Waiting and running early orders, and their replies until the step of the arrival. Orders are named by their start."""

    def __init__(self) -> None:
        self.awaited: dict[int, Order] = {}
        """Orders of the current step that are still carried out early."""
        self.running: set[int] = set()
        """Starts of the orders in calls to actors."""
        self._waiting: list[Order] = []
        """Orders without a call so far, the last first."""
        self._replies: dict[int, Reply] = {}
        self._failed: set[int] = set()
        """Starts whose early work failed. It is repeated in their own step."""
        self._wanted: frozenset[int] = frozenset()
        """Starts whose replies are kept."""

    def has_begun(self, order: Order) -> bool:
        """Return whether an order is carried out early, or has a reply."""
        return order.start in self.running or order.start in self._replies

    def start(self, orders: Sequence[Order], early: EarlyOrders | None) -> tuple[list[Order], list[Reply]]:
        """Start a step, or an evaluation.

        Args:
            orders: Orders of the step.
            early: Orders that may start early; ``None``: no further order starts.

        Returns:
            Orders without early work, and replies to finished orders.
        """
        self.awaited, self._waiting, rest, ready = {}, [], list[Order](), list[Reply]()
        for order in orders:
            if order.start in self._replies:
                ready.append(dataclasses.replace(self._replies.pop(order.start), position=order.position))
            elif order.start in self.running:
                self.awaited[order.start] = order
            else:
                rest.append(order)
        if early is not None:
            self._wanted = early.starts
            self._replies = {start: reply for start, reply in self._replies.items() if start in early.starts}
            self._failed &= early.starts
            self._waiting = [
                order
                for order in reversed(early.orders)
                if not self.has_begun(order) and order.start not in self._failed
            ]
        return rest, ready

    def take(self) -> Order | None:
        """Take the next order for a call; ``None``: none is left."""
        if not self._waiting:
            return None
        order = self._waiting.pop()
        self.running.add(order.start)
        return order

    def keep(self, order: Order, reply: Reply) -> list[Reply]:
        """Keep the reply to an early order until its step. Return it if the current step awaits it."""
        self.running.discard(order.start)
        awaited = self.awaited.pop(order.start, None)
        if awaited is not None:
            return [dataclasses.replace(reply, position=awaited.position)]
        if order.start in self._wanted:
            self._replies[order.start] = reply
        return []

    def forget(self, order: Order) -> list[Order]:
        """Forget the failed work on an early order. Return the order of the current step that awaits it, if any."""
        self.running.discard(order.start)
        self._failed.add(order.start)
        awaited = self.awaited.pop(order.start, None)
        return [] if awaited is None else [awaited]
