"""The server is beside the driver: docs/clusters.md promises it, and of an actor that reserves nothing Ray picks the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from gated import MODELS
from marked import Marked, until

from raydfl.cluster import server as servers
from raydfl.engine.config import Config

HERE = Path(__file__).parent


class Ray:
    """A driver's node, and what an actor is asked for with."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "ab" * 28)

    def remote(self, kind: type) -> Ray:
        assert kind is servers.ServerActor
        return self

    def options(self, **asked: Any) -> Any:
        self.asked = asked
        return SimpleNamespace(remote=lambda *_: None)


@pytest.mark.parametrize("group", [None, object()], ids=["alone", "in a placement group"])
def test_where_it_is_asked_for(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, group: object) -> None:
    """On the driver's node and nowhere else; in a trial's placement group wherever that is."""
    ray = Ray()
    monkeypatch.setattr(servers, "ray", ray)
    monkeypatch.setattr(servers, "get_current_placement_group", lambda: group)
    monkeypatch.setattr(servers, "NodeWatch", lambda *_: None)
    config = tiny("ray.actors=2")
    servers.RemoteServer(Path("nowhere"), config, 4, print)
    assert ray.asked["num_cpus"] == ray.asked["num_gpus"] == 0
    if group is not None:
        assert "scheduling_strategy" not in ray.asked
        return
    assert ray.asked["scheduling_strategy"].node_id == "ab" * 28
    soft = ray.asked["scheduling_strategy"].soft
    assert not soft  # else Ray places an actor that reserves nothing at random


@pytest.fixture
def fleet() -> Iterator[Marked]:
    """A head and four nodes on which nothing but a server can be."""
    fleet = Marked.python(str(HERE / "fleet.py"))
    yield fleet
    fleet.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_where_it_is_among_many_nodes(tiny: Callable[..., Config], fleet: Marked, tmp_path: Path) -> None:
    """By chance alone it would be on the head in one of five times."""
    address = fleet.ask()
    for resources in ("1 0", "0 0", "0 0", "0 0"):
        fleet.ask(f"add {resources}")
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "hold-1").touch()
    settings = (
        MODELS,
        "train.rounds=1",
        "run.name=placed",
        "ray.actors=1",
        f"ray.address='{address}'",
        f"method.gate={gate}",
    )
    config = tiny(*settings, method=f"{HERE}/gated.py:Gated")
    file = tmp_path / "placed.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run = Marked.python("-m", "raydfl", "run", str(file), "--json")
    try:
        until(lambda: list(gate.glob("at-1-*")), "a client", [run])
        [server] = fleet.mark.processes("ray::ServerActor")
        [client] = fleet.mark.processes("ray::ClientActor")
        assert "--head" in server.parent().cmdline()
        assert "--head" not in client.parent().cmdline()
        (gate / "hold-1").unlink()
        _, problems = run.process.communicate(timeout=300)
        assert run.process.returncode == 0, problems
    finally:
        run.end()
