"""Actors of a finished trial, kept for the next trial of the same process. A new process takes many seconds to import PyTorch."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from raydfl.engine import RaySettings

_WAIT = 60.0
"""Seconds until an idle actor must have dropped its run."""


class IdleActors:
    """Client actors without a run, in the process of their server."""

    def __init__(self) -> None:
        self._settings: RaySettings | None = None
        self._actors: dict[Any, tuple[Any, Any]] = {}
        """Actor, and reference to the end of its last run, by key of its slot."""

    def prepare(self, settings: RaySettings) -> None:
        """Keep the actors for a run with these settings. End them if they were started with different settings."""
        if settings != self._settings:
            self.end()
        self._settings = settings

    def keep(self, key: Any, actor: Any) -> None:
        """Keep an actor for a slot of the next run."""
        self._actors[key] = actor, actor.close.remote()

    def take(self, key: Any) -> Any | None:
        """Return and release the actor of a slot, or ``None`` without such an actor."""
        actor, closed = self._actors.pop(key, (None, None))
        if actor is None:
            return None
        try:
            ray.get(closed, timeout=_WAIT)
        except (RayError, TimeoutError):
            ray.kill(actor)
            return None
        return actor

    def end(self) -> None:
        """End all kept actors."""
        while self._actors:
            ray.kill(self._actors.popitem()[1][0])


_servers: list[Any] = []


def keep_server(actor: Any) -> None:
    """Keep a server actor without a run for the next trial of this process."""
    end_idle_server()
    _servers.append(actor)


def take_server() -> Any | None:
    """Return and release the server actor, or ``None`` without a live server actor."""
    if not _servers:
        return None
    actor = _servers.pop()
    with contextlib.suppress(RayError, TimeoutError):
        ray.get(actor.is_idle.remote(), timeout=_WAIT)
        return actor
    ray.kill(actor)
    return None


def end_idle_server() -> None:
    """End the kept server actor with its client actors."""
    while _servers:
        ray.kill(_servers.pop())
