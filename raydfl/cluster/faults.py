"""Failures of actors: their meaning, and how long to wait for a late answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from raydfl.core.errors import RaydflError
from raydfl.engine import Config, Order, Reply


@dataclass(frozen=True, slots=True)
class StragglerPolicy:
    """The treatment of clients whose actor is lost or does not answer."""

    drop_lost: bool = False
    """True: a client whose actor is lost again and again is left out of the round; False: the run stops."""
    deadline: float | None = None
    """Seconds that a client may train; ``None``: an actor is waited for as long as it lives."""
    grace: float = 0.0
    """Seconds beyond the deadline after which an actor that has not answered is ended."""

    @classmethod
    def of(cls, config: Config) -> StragglerPolicy:
        """Return the configured policy."""
        return cls(config.run.on_error == "drop", config.train.deadline, config.ray.grace)

    def limit(self, clients: int) -> float:
        """Return the seconds until the answer of an actor is due that trains so many clients, perhaps one after another."""
        return math.inf if self.deadline is None else clients * self.deadline + self.grace

    def tries(self, retries: int) -> int:
        """Return the number of losses of its actor that a client's work survives.

        Where clients are dropped it is at least one: when an actor is lost whose calls held the work of several clients, each is
        tried again by itself, so that nobody is left out for what another one did.
        """
        return max(1, retries) if self.drop_lost else retries


LOST = (RayActorError, OutOfMemoryError, ObjectLostError)
"""Exceptions of a lost actor, process, node or reply. OutOfMemoryError is no RayActorError."""


def task_cause(error: RayTaskError) -> BaseException:
    """Return the exception that an actor raised, without Ray's wrapping when it is one of ours."""
    cause = error.cause
    return cause if isinstance(cause, RaydflError) else error


def why_ended(error: BaseException) -> str:
    """Return why an actor ended, in one line. Of one that raised when it was made: what it raised, which comes last."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1 if getattr(error, "actor_init_failed", False) else 0]


def leave_out(group: list[Order], wait: Callable[[list[Order]], None], reason: str, retried: int = 0) -> list[Reply]:
    """Leave a client out; of several that were trained together let each wait by itself first: it may be another's doing."""
    if len(group) > 1:
        for order in group:
            wait([dataclasses.replace(order, group=-1)])
        return []
    order = group[0]
    return [Reply(order.position, order.task.client_id, rejected=reason, private=order.private, retried=retried)]
