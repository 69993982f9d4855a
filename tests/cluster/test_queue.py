"""A run on a busy cluster waits for all of its resources, and reserves them at once."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from raydfl.cluster import queue
from raydfl.cluster.client import start_client_actor
from raydfl.cluster.resources import ActorKind
from raydfl.core.errors import ResourcesError
from raydfl.engine.config import Config
from raydfl.runs._run import run
from raydfl.runs.progress import Progress

Tiny = Callable[..., Config]
KINDS = [ActorKind(1, 0.5), ActorKind(1, 0.0)]


class Busy:
    """A simulated cluster of one node, whose other actors end at given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: dict[str, float], *ends: tuple[float, dict[str, float]]):
        self.now, self.total, self.ends = 0.0, total, ends
        self.groups: list[list[dict[str, float]]] = []
        self.removed = 0
        self.interrupted = False
        monkeypatch.setattr(queue, "time", self)
        monkeypatch.setattr(queue, "placement_group", self.placement_group)
        monkeypatch.setattr(queue, "remove_placement_group", self.remove)
        monkeypatch.setattr(queue, "get_current_placement_group", lambda: None)
        self.leaves = math.inf
        """The time when the node leaves."""
        monkeypatch.setattr(queue, "list_alive_nodes", lambda: {"node": total} if self.now < self.leaves else {})
        monkeypatch.setattr("raydfl.cluster.resources.ray.cluster_resources", lambda: total)
        monkeypatch.setattr("raydfl.cluster.resources.ray.available_resources", self.free)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def free(self) -> dict[str, float]:
        used = [amounts for end, amounts in self.ends if end > self.now]
        left = {name: amount - sum(amounts.get(name, 0.0) for amounts in used) for name, amount in self.total.items()}
        return {name: amount for name, amount in left.items() if amount}  # Ray lists no resource without a rest.

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Busy:
        self.groups.append(bundles)
        return self

    def wait(self, seconds: float) -> bool:
        if self.interrupted:
            raise KeyboardInterrupt
        needed = {name: sum(bundle.get(name, 0.0) for bundle in self.groups[-1]) for name in self.total}
        until = self.now + seconds
        while any(self.free().get(name, 0.0) < amount for name, amount in needed.items()):
            if self.now >= until:
                return False
            self.now += 0.5
        return True

    def remove(self, group: Busy) -> None:
        assert group is self
        self.removed += 1


def test_a_run_waits_until_other_actors_end(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, {"CPU": 4.0, "GPU": 1.0}, (1000.0, {"CPU": 3.0}), (2000.0, {"CPU": 1.0, "GPU": 0.75}))
    messages_seen: list[str] = []
    config = tiny("ray.actors=1", "ray.gpus=0.5", "ray.cpu_actors=1", "ray.ready_timeout=1")
    group: Any = queue.queue_actors(config, KINDS, messages_seen.append)
    assert group is busy
    assert 2000.0 <= busy.now < 2001.0
    assert busy.groups == [[{"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0}]]
    assert messages_seen == [
        "Waiting for 2 CPU and 0.5 GPU: 4 of 4 CPU and 0.75 of 1 GPU are used by other actors. Set ray.queue=false to stop instead."
    ]


def test_free_resources_need_no_queue(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("ray.actors=2")
    kinds = [ActorKind(1, 0.0)] * 2
    for ends in ([(1000.0, {"CPU": 2.0})], [(3.0, {"CPU": 4.0})]):  # The actors of an earlier run end within seconds.
        busy = Busy(monkeypatch, {"CPU": 4.0}, *ends)
        assert queue.queue_actors(config, kinds, pytest.fail) is None
        assert not busy.groups


def test_some_runs_do_not_queue(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, {"CPU": 4.0}, (1000.0, {"CPU": 4.0}))
    kinds = [ActorKind(1, 0.0)] * 2
    for settings in (
        ["ray.queue=false"],
        ["ray.options={label_selector: {zone: a}}"],
        ["ray.actors=per_client"],
    ):
        assert queue.queue_actors(tiny("ray.actors=2", *settings), kinds, pytest.fail) is None
    many = [ActorKind(1, 0.0)] * 5  # The cluster must grow first.
    assert queue.queue_actors(tiny("ray.actors=5", "ray.autoscale=true"), many, pytest.fail) is None
    assert queue.queue_actors(tiny("ray.actors=2", "ray.cpus=0"), [ActorKind(0, 0.0)] * 2, pytest.fail) is None
    monkeypatch.setattr(queue, "get_current_placement_group", object)  # A trial has its resources.
    assert queue.queue_actors(tiny("ray.actors=2"), kinds, pytest.fail) is None
    assert busy.now == 0.0


def test_an_interrupted_wait_frees_the_reservation(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, {"CPU": 4.0}, (1000.0, {"CPU": 4.0}))
    busy.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        queue.queue_actors(tiny("ray.actors=1"), [ActorKind(1, 0.0)], lambda text: None)
    assert busy.removed == 1


def test_a_wait_ends_if_nodes_leave_for_good(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, {"CPU": 4.0}, (1000.0, {"CPU": 4.0}))
    busy.leaves = 100.0
    config = tiny("ray.actors=1", "ray.ready_timeout=30")
    with pytest.raises(ResourcesError, match=r"For 30 s the other nodes have had room for 0\. Add nodes"):
        queue.queue_actors(config, [ActorKind(1, 0.0)], lambda text: None)
    assert 130 <= busy.now < 145
    assert busy.removed == 1


def test_each_actor_has_its_own_bundle(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A replacement uses the bundle of the lost actor. Actors beyond the reserved number use any node."""
    asked: list[Any] = []

    class Group:
        bundle_count = 2

    def define(settings: object, place: str, kind: ActorKind, strategy: Any, excluded: object) -> Any:
        asked.append(strategy and strategy.placement_group_bundle_index)
        return type("Actor", (), {"remote": staticmethod(lambda *_: None)})

    monkeypatch.setattr("raydfl.cluster.client.define_actor", define)
    monkeypatch.setattr("raydfl.cluster.client.ray.get_runtime_context", lambda: type("C", (), {"get_node_id": str}))
    group: Any = Group()
    population: Any = None
    for key in (0, 1, 2, 1, "client"):
        start_client_actor(tmp_path, tiny("ray.actors=3"), population, group, None, "", ActorKind(1, 0), key)
    start_client_actor(tmp_path, tiny("ray.actors=3"), population, None, None, "", ActorKind(1, 0), 0)
    assert asked == [0, 1, None, 1, None, None]


@pytest.mark.slow
def test_a_second_run_starts_when_the_cluster_is_free(ray_session: None, tiny: Tiny) -> None:
    plain = run(tiny("ray.actors=0", "train.rounds=1", "run.name=plain"))
    holder = ray.util.placement_group([{"CPU": 4}])
    ray.get(holder.ready(), timeout=60)
    timer = threading.Timer(15.0, ray.util.remove_placement_group, [holder])
    timer.start()
    output = io.StringIO()
    try:
        settings = ("ray.actors=2", "ray.ready_timeout=60", "train.rounds=1", "run.name=second")
        second = run(tiny(*settings), Progress("lines", output))
    finally:
        timer.join()
    assert output.getvalue().count("Waiting for 2 CPU: 4 of 4 CPU are used by other actors.") == 1
    model = "model.safetensors"
    assert (second.run_dir / model).read_bytes() == (plain.run_dir / model).read_bytes()
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    assert not groups
