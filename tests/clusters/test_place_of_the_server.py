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


@pytest.mark.parametrize("group", [None, object()], ids=["alone", "in a placement group"])
def test_where_it_is_asked_for(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, group: object) -> None:
    """On the driver's node, or elsewhere if that is gone; in a trial's placement group wherever that is."""
    ray = Ray()
    monkeypatch.setattr(runs, "ray", ray)
    monkeypatch.setattr(runs, "get_current_placement_group", lambda: group)
    monkeypatch.setattr(runs, "NodeWatch", lambda *_: None)
    config = tiny("ray.actors=2")
    runs._Actor(Path("nowhere"), config, 4, Progress("quiet"))
    assert ray.asked["num_cpus"] == ray.asked["num_gpus"] == 0
    if group is not None:
        assert "scheduling_strategy" not in ray.asked
        return
    assert ray.asked["scheduling_strategy"].node_id == "ab" * 28
    assert ray.asked["scheduling_strategy"].soft
