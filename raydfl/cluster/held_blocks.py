"""HeldBlocks: the blocks of a round with updates in an actor, for passes over the updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from raydfl.cluster.scheduling import AHEAD, WINDOW, Backlog
from raydfl.engine import Order


class HeldBlocks:
    """The slots of the actors with the updates of trained blocks, and the waiting blocks of a pass.

    A slot is that of :class:`~raydfl.cluster.actors.ActorPool`. Blocks are named by the position of their first order.
    """

    def __init__(self) -> None:
        self.holders: dict[int, tuple[Any, Any]] = {}
        """Key and slot of the actor with the updates of a block."""
        self._waiting: dict[Any, tuple[Any, list[int]]] = {}
        """Slot and waiting blocks of a pass in decreasing order, by the slot's key."""
        self._window = Backlog()

    def __contains__(self, block: int) -> bool:
        """Return whether an actor has the updates of a block."""
        return block in self.holders

    def start(self, blocks: Collection[int], is_pass: bool) -> None:
        """Replace the waiting blocks.

        Args:
            blocks: Blocks of all orders, in increasing order.
            is_pass: Whether the orders visit updates of the last training. Otherwise the updates are dropped.
        """
        if not is_pass:
            self.holders = {}
        self._waiting = {}
        for block in sorted(self.holders.keys() & set(blocks), reverse=True):
            key, slot = self.holders[block]
            self._waiting.setdefault(key, (slot, []))[1].append(block)
        self._window = Backlog((block, 0.0) for block in blocks if block in self.holders)

    def keep(self, order: Order, key: Any, slot: Any) -> None:
        """Record the actor with the updates of an order's block."""
        if order.block is not None and order.block.first == order.position:
            self.holders[order.position] = key, slot

    def note_result(self, position: int) -> None:
        """Record the result of an order, and move the window."""
        self._window.note_result(position)

    def take(self, slots: Mapping[Any, Any], lose: Callable[[int], None]) -> Iterator[tuple[Any, Any, list[int]]]:
        """Take the waiting blocks for calls to make now.

        Args:
            slots: Present slots by key.
            lose: Receives the blocks of a lost actor. Any actor can train them again.

        Yields:
            Key and slot of an actor, and the blocks of a call to it. The caller adds the call to ``slot.load``.
        """
        end = self._window.end(WINDOW * len(slots), 0.0)
        for key, (slot, blocks) in list(self._waiting.items()):
            if slots.get(key) is not slot:
                while blocks:
                    lose(blocks.pop(0))
            while blocks and blocks[-1] < end and slot.load < AHEAD:
                call = []
                while blocks and blocks[-1] < end:
                    call.append(blocks.pop())
                yield key, slot, call
            if not blocks:
                del self._waiting[key]
