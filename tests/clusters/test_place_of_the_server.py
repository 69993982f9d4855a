"""The server is beside the driver: docs/clusters.md promises it, and of an actor that reserves nothing Ray picks the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydfl import runs
from raydfl.config import Config
from raydfl.progress import Progress


class Ray:
    """A driver's node, and what an actor is asked for with."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "ab" * 28)

    def remote(self, kind: type) -> Ray:
        assert kind is runs.ServerActor
        return self

    def options(self, **asked: Any) -> Any:
        self.asked = asked
        return SimpleNamespace(remote=lambda *_: None)


def test_it_is_asked_for_on_the_drivers_node_and_elsewhere_if_that_is_gone(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    monkeypatch.setattr(runs, "ray", ray)
    monkeypatch.setattr(runs, "NodeWatch", lambda *_: None)
    config = tiny("ray.actors=2")
    runs._Actor(Path("nowhere"), config, 4, Progress("quiet"))
    assert ray.asked["num_cpus"] == ray.asked["num_gpus"] == 0
    assert ray.asked["scheduling_strategy"].node_id == "ab" * 28
    assert ray.asked["scheduling_strategy"].soft
