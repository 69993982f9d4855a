"""Capacity of nodes, rejected settings, and messages about joining and leaving nodes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raydfl.cluster.client import define_actor
from raydfl.cluster.nodes import NodeWatch
from raydfl.cluster.resources import (
    ActorKind,
    Bundle,
    actor_kinds,
    check_resources,
    check_trial_fits,
    count_fitting,
    make_bundles,
    match_labels,
)
from raydfl.core.errors import ConfigError, ResourcesError
from raydfl.engine.config import Config
from raydfl.engine.settings import _REPLACED, ActorOptions, RaySettings

Tiny = Callable[..., Config]
GIB = 1 << 30


def count_by_brute_force(nodes: list[dict[str, float]], kinds: list[ActorKind]) -> int:
    """Count placements by brute force: each actor on each node and device, or nowhere."""
    devices = [(n, d) for n, node in enumerate(nodes) for d in range(int(node.get("GPU", 0)))]
    best = 0
    choices = [[None, *[(n, None) for n in range(len(nodes))]] if not kind.gpus else [None, *devices] for kind in kinds]
    for places in itertools.product(*choices):
        cpus = [node.get("CPU", 0.0) for node in nodes]
        shares = dict.fromkeys(devices, 1.0)
        for kind, place in zip(kinds, places, strict=True):
            if place is not None:
                cpus[place[0]] -= kind.cpus
                if kind.gpus:
                    shares[place] -= kind.gpus
        if min(cpus, default=0.0) >= -1e-9 and min(shares.values(), default=0.0) >= -1e-9:
            best = max(best, sum(place is not None for place in places))
    return best


@pytest.mark.parametrize("cpus", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("share", [0.4, 0.5, 1.0])
def test_room_agrees_with_brute_force(cpus: float, share: float) -> None:
    kinds = [ActorKind(cpus, share)] * 3 + [ActorKind(cpus, 0.0)] * 2
    some = [{"CPU": 1.0}, {"CPU": 3.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 2.0}, {}]
    for nodes in ([], some[:1], some[:2], some[1:3], some[::2], [some[2], some[2]], some):
        assert count_fitting(nodes, kinds) == count_by_brute_force(nodes, kinds), nodes


def test_memory_limits_the_room() -> None:
    """Without CPUs and GPUs, each node holds the whole multiples of the reserved memory."""
    nodes = [
        {"CPU": 8.0, "memory": 3.5 * GIB},
        {"CPU": 8.0, "memory": 1.0 * GIB},
        {"CPU": 1.0, "memory": 9.0 * GIB},
        {},
    ]
    for gib, room in ((1.0, 3 + 1 + 1), (2.0, 1 + 0 + 1), (4.0, 0 + 0 + 1)):
        assert count_fitting(nodes, [ActorKind(1, 0.0, int(gib * GIB))] * 9) == room
        assert count_fitting(nodes, [ActorKind(0, 0.0, int(gib * GIB))] * 99) == sum(
            int(node.get("memory", 0.0) // (gib * GIB)) for node in nodes
        )


def test_room_without_reservations_or_requirements() -> None:
    assert count_fitting([{"CPU": 0.0}], [ActorKind(0.0, 0.0)] * 5) == 5
    assert count_fitting([], [ActorKind(0.0, 0.0)] * 5) == 0
    assert count_fitting([{"CPU": 4.0}], []) == 0
    assert count_fitting([{"GPU": 4.0, "CPU": 8.0}], [ActorKind(1, 2.0)] * 3) == 2  # whole GPUs


def test_actor_kinds_follow_the_settings() -> None:
    settings = RaySettings(actors=2, cpus=2, gpus=0.5, cpu_actors=1)
    assert actor_kinds(settings, 0) == [ActorKind(2, 0.5), ActorKind(2, 0.5), ActorKind(2, 0.0)]
    assert actor_kinds(RaySettings(actors="per_client"), 3) == [ActorKind(1, 0.0)] * 3
    assert actor_kinds(RaySettings(actors=1, cpu_actors=1, gpus=1, memory="2 GiB"), 0) == [
        ActorKind(1, 1.0, 2 * GIB),
        ActorKind(1, 0.0, 2 * GIB),
    ]


def test_memory_is_a_number_of_bytes_or_a_text(tiny: Tiny) -> None:
    for text, size in (("1.5 GiB", 3 * GIB // 2), ("512MiB", GIB // 2), ("1 TiB", 1024 * GIB), (f"{GIB}", GIB)):
        assert tiny(f"ray.memory={text}", "ray.actors=1").ray.memory_bytes == size
    assert tiny("ray.memory=auto", "ray.actors=1").ray.memory_bytes == tiny().ray.memory_bytes == 0
    for wrong, reason in (
        ("2", "2 is less than 1 MiB"),
        ("2 GB", "'2 GB' is not an amount"),
        ("-1", "ray.memory"),
        ("true", "ray.memory"),
    ):
        with pytest.raises(ConfigError, match=reason):
            tiny(f"ray.memory={wrong}", "ray.actors=1")


def test_actors_request_the_configured_options(tiny: Tiny) -> None:
    options = "ray.options={resources: {disk: 2.0}, accelerator_type: A100}"
    settings = tiny("ray.actors=1", "ray.cpu_actors=1", "ray.gpus=0.5", options).ray
    with_gpu, without = actor_kinds(settings, 0)
    assert with_gpu.bundle == {"CPU": 1.0, "GPU": 0.5, "disk": 2.0, "accelerator_type:A100": 0.001}
    assert without.bundle == {"CPU": 1.0, "disk": 2.0}
    assert str(without) == "1 CPU and 2 disk"
    node = {"CPU": 9.0, "GPU": 2.0, "disk": 7.0}
    assert count_fitting([node], [with_gpu, without, without]) == 2  # The node has another model of GPU.
    assert count_fitting([{**node, "accelerator_type:A100": 1.0}], [with_gpu, *[without] * 3]) == 3
    assert tiny(options, "ray.actors=1", "ray.gpus=1").digest() == tiny().digest()


def test_label_selectors_have_no_spaces(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray 2.60 compares the values of "in(a, b)" with the space, so that no node has the second value."""
    asked: dict[str, Any] = {}
    fake = SimpleNamespace(options=lambda **options: asked.update(options))
    monkeypatch.setattr("raydfl.cluster.client.ray.remote", lambda _: fake)
    settings = tiny("ray.actors=1", 'ray.options={label_selector: {zone: "in(a, b)"}}').ray
    define_actor(settings, "", ActorKind(1, 0), excluded=["n2", "n1"])
    assert asked["label_selector"] == {"zone": "in(a,b)", "ray.io/node-id": "!in(n1,n2)"}
    define_actor(tiny("ray.actors=1").ray, "", ActorKind(1, 0))
    assert asked["label_selector"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("num_cpus: 2", "raydfl sets Ray's option num_cpus itself. Set ray.cpus"),
        ("memory: 2000000000", "raydfl sets Ray's option memory itself. Set ray.memory"),
        ("max_restarts: 1", "raydfl sets Ray's option max_restarts itself. Set ray.retries"),
        ("scheduling_strategy: SPREAD", "raydfl sets Ray's option scheduling_strategy itself. Remove it"),
        ("lifetime: detached", "raydfl sets Ray's option lifetime itself. Remove it"),
        ("runtime_env: {}", "raydfl sets Ray's option runtime_env itself. Install packages on all nodes"),
        ("label_selectr: {}", "Did you mean .*label_selector"),
        ("num_cpu: 2", "num_cpu"),
        ("resources: {GPU: 1.0}", "GPU is not a custom resource. Set ray.gpus"),
        ("resources: {disk: -1.0}", "ray.options.resources"),
        ("accelerator_type: A100", "chooses the model of GPUs, but ray.gpus=0"),
    ],
)
def test_unsuitable_options_are_rejected(tiny: Tiny, options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(f"ray.options={{{options}}}", "ray.actors=1")


def test_every_option_of_ray_is_a_setting_or_rejected() -> None:
    """Ray validates its options by name, so an unknown option would be accepted only by mistake."""
    with pytest.raises(ValueError, match="valid") as raised:
        ray.remote(NodeWatch).options(no_option=1)
    ours = {*ActorOptions.model_fields, *_REPLACED}
    for name in re.findall(r"'(\w+)'", str(raised.value).partition("[")[2]):
        of_tasks = ("num_returns", "max_calls", "max_retries", "retry_exceptions", "_num_objects_per_yield")
        if name in of_tasks or "generator" in name:
            continue
        assert name in ours, name


def test_ray_validates_the_labels(tiny: Tiny) -> None:
    define_actor(tiny("ray.options={label_selector: {zone: 'in(a, b)'}}", "ray.actors=1").ray, "", ActorKind(1, 0))
    with pytest.raises(ConfigError, match=r"ray.options: .*label"):
        define_actor(tiny("ray.options={label_selector: {zone: 'a b!'}}", "ray.actors=1").ray, "", ActorKind(1, 0))


@pytest.mark.parametrize(
    ("selector", "zones"),
    [("a", "a"), ("!a", "bc-"), ("in(a, b)", "ab"), ("!in(a,b)", "c-"), (" in (c) ", "c"), ("d", "")],
)
def test_labels_select_nodes(selector: str, zones: str) -> None:
    """A node without the label (-) satisfies negated conditions only."""
    for zone in "abc-":
        labels = {} if zone == "-" else {"zone": zone}
        assert match_labels(labels, {"zone": selector}) == (zone in zones)


def test_labels_of_no_node_are_rejected(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": zone, "Alive": True, "Resources": {"CPU": 2.0}, "Labels": {"zone": zone}} for zone in "ab"]
    monkeypatch.setattr("raydfl.cluster.resources.ray.nodes", lambda: nodes)
    check_resources(tiny("ray.options={label_selector: {zone: a}}", "ray.actors=2"), 6, grows=False)
    with pytest.raises(
        ResourcesError, match=r"3 client actors with 1 CPU each need 3 CPU, but the cluster has 2. Lower"
    ):
        check_resources(tiny("ray.options={label_selector: {zone: a}}", "ray.actors=3"), 6, grows=False)
    with pytest.raises(ResourcesError, match="no node of the cluster has the labels of ray.options.label_selector"):
        check_resources(tiny("ray.options={label_selector: {zone: c}}", "ray.actors=1"), 6, grows=False)


def test_trials_reserve_the_memory_of_their_actors(tiny: Tiny) -> None:
    config = tiny("ray.actors=2", "ray.memory=2 GiB")
    assert make_bundles(config, 0.5, 0) == [{"CPU": 0.5}, *[{"CPU": 1.0, "memory": 2.0 * GIB}] * 2]
    with pytest.raises(ConfigError, match=r"ray.memory: auto is measured by a single run, .* Set a size such as 2 GiB"):
        make_bundles(tiny("ray.actors=2", "ray.memory=auto"), 1.0, 0)
    with pytest.raises(ConfigError, match=r"ray.options.label_selector is not supported in trials"):
        make_bundles(tiny("ray.actors=2", "ray.options={label_selector: {zone: a}}"), 1.0, 0)


def check(monkeypatch: pytest.MonkeyPatch, config: Config, nodes: list[dict[str, float]], grows: bool = False) -> None:
    monkeypatch.setattr("raydfl.cluster.resources.list_alive_nodes", lambda selector: dict(enumerate(nodes)))
    check_resources(config, 6, grows)


def test_impossible_requirements_are_rejected_with_numbers(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ResourcesError, match=r"8 client actors with 1 CPU each need 8 CPU, but the cluster has 4\. Lower ray.act"
    ):
        check(monkeypatch, tiny("ray.actors=8"), [{"CPU": 4.0}])
    with pytest.raises(ResourcesError, match=r"3 client actors with 0.5 GPU each need 1.5 GPU, but the cluster has 1"):
        check(monkeypatch, tiny("ray.actors=3", "ray.gpus=0.5", "ray.cpu_actors=1"), [{"CPU": 4.0, "GPU": 1.0}])
    with pytest.raises(
        ResourcesError, match=r"needs 2 client actors, but the nodes have room for 0.*2 with 2 CPU each"
    ):
        check(monkeypatch, tiny("ray.actors=2", "ray.cpus=2"), [{"CPU": 1.0}] * 4)
    check(monkeypatch, tiny("ray.actors=2", "ray.cpus=2"), [{"CPU": 2.0}] * 2)
    large: list[dict[str, float]] = [{"CPU": 8.0, "memory": 5.0 * GIB}, {"CPU": 8.0, "memory": 1.0 * GIB}]
    with pytest.raises(
        ResourcesError,
        match=r"4 client actors with 2.00 GiB memory each need 8.00 GiB memory, but the cluster has 6.00 GiB. Lower ray.actors "
        r"or ray.memory, or",
    ):
        check(monkeypatch, tiny("ray.actors=4", "ray.memory=2 GiB"), large)
    with pytest.raises(
        ResourcesError,
        match=r"needs 3 client actors, but the nodes have room for 2. Requested: 3 with 1 CPU and 2.00 GiB memory each. "
        r"Available: 2 nodes with 16 CPU, 0 GPU and 6.00 GiB memory. .* Lower ray.cpus, ray.gpus, ray.memory, ray.act",
    ):
        check(monkeypatch, tiny("ray.actors=3", "ray.memory=2 GiB"), large)
    check(monkeypatch, tiny("ray.actors=3", "ray.memory=1.5 GiB"), large)


def test_only_min_actors_must_fit_unless_the_cluster_grows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, tiny("ray.actors=8", "ray.min_actors=4"), [{"CPU": 4.0}])
    with pytest.raises(ResourcesError, match=r"needs 5 client actors, but the nodes have room for 4.*ray.min_actors"):
        check(monkeypatch, tiny("ray.actors=8", "ray.min_actors=5"), [{"CPU": 4.0}])
    check(monkeypatch, tiny("ray.actors=8", "ray.autoscale=true"), [], grows=True)


def test_an_impossible_trial_is_rejected_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_trial(bundles: list[Bundle], *nodes: Bundle) -> None:
        total = {kind: sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
        monkeypatch.setattr("raydfl.cluster.resources.list_alive_nodes", lambda: dict(enumerate(nodes)))
        monkeypatch.setattr("raydfl.cluster.resources.ray.cluster_resources", lambda: total)
        monkeypatch.setattr("raydfl.cluster.resources.ray.available_resources", lambda: {"CPU": 1.0})
        check_trial_fits(bundles, autoscale=False)

    check_trial([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 1.0}, {"CPU": 1.5})
    with pytest.raises(
        ResourcesError, match=r"needs 2 CPU \(its own process and 1 client actors\), but the cluster has 1.9 CPU on 1 n"
    ):
        check_trial([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 1.9})
    with pytest.raises(ResourcesError, match="has 4 CPU on 1 node, 1 CPU of it free. Lower ray.actors"):
        check_trial([{"CPU": 1.0, "GPU": 1.0}], {"CPU": 4.0})
    shares: list[Bundle] = [{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 0.6}] * 3]
    check_trial(shares, {"CPU": 4.0, "GPU": 3.0})
    with pytest.raises(ResourcesError, match="needs 4 CPU and 1.8 GPU"):  # two GPUs have room for two shares of 0.6
        check_trial(shares, {"CPU": 4.0, "GPU": 2.0})
    check_trial_fits(shares, autoscale=True)


def test_contradictory_settings_are_rejected(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="min_actors=4 exceeds the 3 client actors of the run"):
        tiny("ray.actors=2", "ray.cpu_actors=1", "ray.min_actors=4")
    with pytest.raises(ConfigError, match="need a number of actors"):
        tiny("ray.actors=per_client", "ray.min_actors=2")
    with pytest.raises(ConfigError, match="need a number of actors"):
        tiny("ray.actors=per_client", "ray.cpu_actors=2")
    with pytest.raises(
        ConfigError, match=r"ray.actors=0 trains in this process, without Ray. Set ray.cpu_actors to 0 too"
    ):
        tiny("ray.actors=0", "ray.cpu_actors=2")
    with pytest.raises(ConfigError, match="min_actors"):
        tiny("ray.actors=2", "ray.min_actors=0")


def test_the_digest_does_not_depend_on_resources(tiny: Tiny) -> None:
    plain = tiny("ray.actors=4").digest()
    assert tiny("ray.actors=4", "ray.min_actors=2", "ray.autoscale=true", "ray.cpu_actors=3").digest() == plain
    assert tiny("ray.actors=4", "ray.memory=2 GiB").digest() == plain


def test_joining_and_leaving_nodes_are_reported() -> None:
    nodes: dict[str, dict[str, float]] = {"head": {"memory": 1.0}}
    messages_seen: list[str] = []
    kinds = [ActorKind(1, 0.5)] * 2 + [ActorKind(1, 0)] * 2
    watch = NodeWatch(kinds, 3, messages_seen.append, lambda: dict(nodes), every=0.0)
    watch.announce_wait(600.0)
    watch.report_changes()  # no message without a change
    nodes |= {"a": {"CPU": 4.0, "GPU": 1.0}, "b": {"CPU": 1.0}}
    watch.report_changes()
    del nodes["a"]
    nodes["c"] = {"CPU": 1.0}
    watch.report_changes()
    watch.report_changes()
    assert messages_seen == [
        "Waiting for the autoscaler: room for 0 of 3 client actors. The run needs 2 with 1 CPU and 0.5 GPU each, 2 with 1 CPU "
        "each, the cluster has 1 node with 0 CPU and 0 GPU. The wait ends after 600 s.",
        "Nodes: 2 joined. The cluster has 3 nodes with 5 CPU and 1 GPU, room for 4 of 4 client actors.",
        "Nodes: 1 joined, 1 left. The cluster has 3 nodes with 2 CPU and 0 GPU, room for 2 of 4 client actors.",
    ]


def test_sufficient_room_is_not_reported_and_checks_are_rare() -> None:
    messages_seen: list[str] = []
    looks = 0

    def look() -> dict[str, dict[str, float]]:
        nonlocal looks
        looks += 1
        return {f"n{number}": {"CPU": 4.0} for number in range(looks)}

    watch = NodeWatch([ActorKind(1, 0)] * 2, 2, messages_seen.append, look, every=1000.0)
    watch.announce_wait(600.0)
    watch.report_changes()
    assert (messages_seen, looks) == ([], 1)
