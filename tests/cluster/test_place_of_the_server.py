"""The server runs on the driver's node, as docs/clusters.md promises. Ray places actors without reservations at random."""

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
    """A fake Ray that records the options of an actor on the driver's node."""

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
def test_the_server_requests_the_drivers_node(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, group: object, tmp_path: Path
) -> None:
    """Request the driver's node, or inside a trial the trial's placement group."""
    ray = Ray()
    monkeypatch.setattr(servers, "ray", ray)
    monkeypatch.setattr(servers, "get_current_placement_group", lambda: group)
    monkeypatch.setattr(servers, "NodeWatch", lambda *_: None)
    monkeypatch.setattr(servers, "queue_actors", lambda *_: None)
    monkeypatch.setattr(servers, "share_files", lambda *_: None)
    config = tiny("ray.actors=2")
    servers.RemoteServer(tmp_path, config, 4, print)
    assert ray.asked["num_cpus"] == ray.asked["num_gpus"] == 0
    if group is not None:
        assert "scheduling_strategy" not in ray.asked
        return
    assert ray.asked["scheduling_strategy"].node_id == "ab" * 28
    soft = ray.asked["scheduling_strategy"].soft
    assert not soft  # else Ray places an actor that reserves nothing at random


@pytest.fixture
def fleet() -> Iterator[Marked]:
    """Start a head and four nodes with room for a server only."""
    fleet = Marked.python(str(HERE / "fleet.py"))
    yield fleet
    fleet.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_server_runs_on_the_drivers_node(tiny: Callable[..., Config], fleet: Marked, tmp_path: Path) -> None:
    """Random placement would choose the head in 20 % of all runs."""
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
