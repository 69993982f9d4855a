"""The descriptions of clusters that come with raydfl are whole, and every rule about them refuses a copy that breaks it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from cluster_rules import check, fit, read_cluster

from raydfl.cluster.resources import actor_kinds
from raydfl.core.errors import ConfigError
from raydfl.engine.config import Config, load_config

ROOT = Path(__file__).parents[2]
LAUNCHER = ["cluster.yaml", "jobs/clusters/gcp.yaml"]
KUBERAY = "jobs/clusters/kuberay.yaml"
JOBS = [path for path in sorted((ROOT / "jobs").glob("*.yaml")) if "\naxes:" not in path.read_text()]
Tiny = Callable[..., Config]


@pytest.mark.parametrize("name", [*LAUNCHER, KUBERAY])
def test_what_comes_with_raydfl_is_whole_and_the_jobs_fit(name: str) -> None:
    assert len(JOBS) >= 4
    lines = check(ROOT / name, JOBS)
    assert len(lines) == 1 + len(JOBS) + 1
    for job, line in zip(JOBS, lines[1:], strict=False):
        config = load_config(job)
        if config.data.sites:
            assert "bound to the nodes of its sites" in line
            continue
        kinds = len(actor_kinds(config.ray, 1))
        assert f"room for {kinds} of {kinds}" in line or "no client actors" in line
    assert "REPLACE" in lines[-1]  # nobody's account stands in it


def test_versions_are_those_that_are_installed() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] == ray.__version__
    for name in LAUNCHER:
        assert "--constraint constraints.txt" in (ROOT / name).read_text()
    assert f"rayproject/ray:{ray.__version__}-py311" in (ROOT / "jobs/clusters/Dockerfile").read_text()
    assert (ROOT / KUBERAY).read_text().count(f"ray{ray.__version__}") == 2


def broken(name: str, tmp_path: Path, change: Callable[[Any], Any]) -> Path:
    values = yaml.safe_load((ROOT / name).read_text())
    change(values)
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def without(path: str) -> Callable[[Any], Any]:
    def change(values: Any) -> None:
        *groups, last = path.split(".")
        for key in groups:
            values = values[int(key)] if isinstance(values, list) else values[key]
        del values[last]

    return change


def with_(path: str, value: Any) -> Callable[[Any], Any]:
    def change(values: Any) -> None:
        *groups, last = path.split(".")
        for key in groups:
            values = values[int(key)] if isinstance(values, list) else values[key]
        values[int(last) if isinstance(values, list) else last] = value

    return change


def replaced(path: str, old: str, new: str) -> Callable[[Any], Any]:
    def change(values: Any) -> None:
        assert any(old in text for text in values[path])
        values[path] = [text.replace(old, new) for text in values[path]]

    return change


LAUNCHER_RULES = [
    (
        replaced("head_start_ray_commands", "RAY_AUTH_MODE=token ", ""),
        "head_start_ray_commands starts Ray without a token",
    ),
    (
        replaced("worker_start_ray_commands", "RAY_AUTH_MODE=token ", ""),
        "worker_start_ray_commands starts Ray without a t",
    ),
    (with_("head_start_ray_commands", ["ray stop"]), "head_start_ray_commands has no `ray start`"),
    (
        replaced("head_start_ray_commands", "127.0.0.1", "0.0.0.0"),
        "on the head itself only, not on 0.0.0.0; write --dash",
    ),
    (
        replaced("head_start_ray_commands", "--dashboard-host=127.0.0.1", ""),
        "only, not on Ray's default; write --dashboard-h",
    ),
    (without("head_start_ray_commands"), "only, not on 0.0.0.0"),  # Ray's own defaults
    (without("worker_start_ray_commands"), "worker_start_ray_commands starts Ray without a token"),
    (with_("file_mounts", {}), "file_mounts brings no token to the nodes"),
    (with_("available_node_types.head.resources", {"CPU": 4}), r"the head \(head\) would get clients"),
    (with_("available_node_types.head.resources", {}), r"the head \(head\) would get clients"),
    (without("idle_timeout_minutes"), "idle_timeout_minutes is missing"),
    (with_("available_node_types.gpu.resources", {}), "node type gpu says no resources"),
    (with_("available_node_types.gpu.min_workers", 1), "node type gpu keeps 1 nodes"),
    # What Ray itself refuses.
    (with_("max_wokers", 4), r"Ray refuses the cluster file: ValidationError: .*max_wokers"),
    (with_("head_node_type", "haed"), "Ray refuses the cluster file: ValueError: `head_node_type` must be one of"),
    (with_("provider.type", "azzure"), "Ray refuses the cluster file: "),
]


@pytest.mark.parametrize("name", LAUNCHER)
@pytest.mark.parametrize("rule", range(len(LAUNCHER_RULES)))
def test_every_rule_refuses_a_broken_copy(name: str, rule: int, tmp_path: Path) -> None:
    change, message = LAUNCHER_RULES[rule]
    with pytest.raises(ConfigError, match=message):
        check(broken(name, tmp_path, change), [])


HEAD, WORKER = "spec.rayClusterSpec.headGroupSpec", "spec.rayClusterSpec.workerGroupSpecs.0"
KUBERAY_RULES = [
    (without("spec.rayClusterSpec.authOptions"), r"no token: .*authOptions: \{mode: token\}"),
    (with_("spec.rayClusterSpec.authOptions.mode", "disabled"), "no token"),
    (with_("spec.rayClusterSpec.rayVersion", "2.9.0"), f"rayVersion is '2.9.0', installed is '{ray.__version__}'"),
    (with_(f"{HEAD}.serviceType", "LoadBalancer"), "serviceType is 'LoadBalancer'"),
    (without(f"{HEAD}.serviceType"), "serviceType is None"),
    (with_("spec.rayClusterSpec.enableInTreeAutoscaling", False), "the cluster does not grow"),
    (without("spec.rayClusterSpec.autoscalerOptions"), "idleTimeoutSeconds is missing"),
    (with_(f"{HEAD}.rayStartParams", {}), "the head would get clients"),
    (with_("spec.rayClusterSpec.workerGroupSpecs", []), "there are no workerGroupSpecs"),
    (with_(f"{WORKER}.minReplicas", 1), "gpu: pods cost also when nothing runs"),
    (with_(f"{WORKER}.replicas", 2), "gpu: pods cost also when nothing runs"),
    (without(f"{WORKER}.template.spec.securityContext"), "gpu: runs as root"),
    (with_(f"{HEAD}.template.spec.securityContext.runAsNonRoot", False), "head: runs as root"),
    (
        with_(f"{WORKER}.template.spec.containers.0.resources.requests.cpu", "1"),
        "gpu: resources.requests and limits must",
    ),
    (
        with_(f"{WORKER}.template.spec.containers.0.image", "raydfl:latest"),
        "gpu: the image 'raydfl:latest' does not name Ray",
    ),
    (with_(f"{WORKER}.template.spec.volumes.1", {"name": "shm", "emptyDir": {}}), "gpu: /dev/shm must be an emptyDir"),
    (
        with_(f"{WORKER}.template.spec.volumes.0", {"name": "shared", "emptyDir": {}}),
        "gpu: no volume that all pods share",
    ),
]


@pytest.mark.parametrize("rule", range(len(KUBERAY_RULES)))
def test_every_rule_refuses_a_broken_kuberay_manifest(rule: int, tmp_path: Path) -> None:
    change, message = KUBERAY_RULES[rule]
    with pytest.raises(ConfigError, match=message):
        check(broken(KUBERAY, tmp_path, change), [])


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    def change(values: Any) -> None:
        without("idle_timeout_minutes")(values)
        with_("file_mounts", {})(values)

    with pytest.raises(
        ConfigError, match=r"(?s)2 found:.*file_mounts brings no token.*idle_timeout_minutes is missing"
    ):
        check(broken("cluster.yaml", tmp_path, change), [])


@pytest.mark.parametrize("name", ["cluster.yaml", KUBERAY])
def test_actors_that_fit_no_node_and_too_many_for_all_are_refused(name: str, tiny: Tiny) -> None:
    cluster = read_cluster(ROOT / name)
    said, wrong = fit(cluster, tiny("ray.actors=16", "ray.gpus=0.25", "ray.cpus=1"))
    assert (said, wrong) == ("16 with 1 CPU and 0.25 GPU each: room for 16 of 16 in the largest cluster", [])
    _, wrong = fit(cluster, tiny("ray.actors=17", "ray.gpus=0.25"))
    assert wrong == [
        "17 client actors have to be there, but the largest cluster has room for 16; raise max_workers (maxReplicas), or lower "
        "ray.actors or ray.min_actors"
    ]
    assert fit(cluster, tiny("ray.actors=17", "ray.gpus=0.25", "ray.min_actors=4"))[1] == []
    _, wrong = fit(cluster, tiny("ray.actors=2", "ray.cpus=8"))
    assert wrong == [
        "a client actor with 8 CPU fits no node type (gpu has 4 CPU and 1 GPU); lower ray.cpus or ray.gpus, or add a type"
    ]
    _, wrong = fit(cluster, tiny("ray.actors=2", "ray.gpus=2"))
    assert "2 GPU fits no node type" in wrong[0]
    assert fit(cluster, tiny("ray.actors=0")) == ("no client actors (ray.actors=0)", [])


def test_several_node_types_and_a_limit_of_all_together(tmp_path: Path, tiny: Tiny) -> None:
    def change(values: Any) -> None:
        kinds = values["available_node_types"]
        kinds["cpu"] = copy.deepcopy(kinds["gpu"]) | {"resources": {"CPU": 8}, "max_workers": 2}
        values["max_workers"] = 3

    cluster = read_cluster(broken("cluster.yaml", tmp_path, change))
    # Three nodes: at best two with 8 CPUs and one with 4.
    assert fit(cluster, tiny("ray.actors=20"))[1] == []
    assert "room for 20" in fit(cluster, tiny("ray.actors=21"))[1][0]
