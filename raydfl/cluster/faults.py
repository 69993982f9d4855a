"""Failures of actors: their causes, and the policy for lost and late clients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from ray.exceptions import ObjectLostError, OutOfDiskError, OutOfMemoryError, RayActorError, RayTaskError

from raydfl.core.errors import RaydflError, ResourcesError
from raydfl.engine import Config, Order, Reply


@dataclass(frozen=True, slots=True)
class StragglerPolicy:
    """The policy for clients with a lost or late actor."""

    drop_lost: bool = False
    """Drop a client from the round after too many losses of its actor. False: stop the run."""
    deadline: float | None = None
    """Time limit for a client's training in seconds. ``None``: no limit."""
    grace: float = 0.0
    """Seconds between the deadline and the end of a silent actor."""

    @classmethod
    def from_config(cls, config: Config) -> StragglerPolicy:
        """Create the configured policy."""
        return cls(config.run.on_error == "drop", config.train.real_deadline, config.ray.grace)

    def limit(self, clients: int) -> float:
        """Return the time limit in seconds of a call that trains ``clients`` clients, possibly in sequence."""
        return math.inf if self.deadline is None else clients * self.deadline + self.grace

    def max_losses(self, retries: int) -> int:
        """Return the number of lost actors after which a client's order is still sent again.

        If clients are dropped, it is at least 1: an actor may be lost with the orders of several clients. Each of them is tried
        again alone, so that only the cause of the loss is dropped.
        """
        return max(1, retries) if self.drop_lost else retries


LOST = (RayActorError, OutOfMemoryError, ObjectLostError)
"""Exceptions of a lost actor, process, node or reply. OutOfMemoryError does not derive from RayActorError."""


def unwrap_error(error: RayTaskError) -> BaseException:
    """Return the cause of an actor's error if raydfl raised it, and otherwise Ray's error. A full disk has a message of raydfl."""
    cause = error.cause
    if isinstance(cause, OutOfDiskError):
        return ResourcesError(
            "Ray's object store on a node is full, and so is the disk for its overflow (above 95 %). Make room in the folder for "
            "Ray's temporary files (/tmp/ray, or --temp-dir of ray start), or lower ray.actors or train.cohort, then resume the "
            "run."
        )
    return cause if isinstance(cause, RaydflError) else error


def explain_end(error: BaseException) -> str:
    """Return the reason for an actor's end in one line."""
    lines = str(error).strip().splitlines() or [""]
    # The last line has the error of a constructor, the first line any other reason.
    return lines[-1 if getattr(error, "actor_init_failed", False) else 0]


def leave_out(group: list[Order], wait: Callable[[list[Order]], None], reason: str, retried: int = 0) -> list[Reply]:
    """Reject the client of a lost or late order; queue the clients of a larger group separately first.

    Args:
        group: Orders of clients that were trained together, or of a block.
        wait: Queues a group.
        reason: Reason of the rejection.
        retried: Lost calls of the order before the last.

    Returns:
        The rejecting reply; empty for a larger group, because any of its clients may be the cause.
    """
    if len(group) > 1:
        for order in group:
            wait([dataclasses.replace(order, group=-1, block=None)])
        return []
    order = group[0]
    return [Reply(order.position, order.task.client_id, rejected=reason, private=order.private, retried=retried)]
