"""Rules of cluster files: they are complete and safe, and the client actors of jobs fit their nodes.

The checks work offline and read two kinds of file. Files of Ray's cluster launcher (``ray up``; AWS, Google Cloud, a list of
hosts) pass Ray's checks first. For a RayJob or RayCluster of KubeRay, only the fields relevant to raydfl are checked.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import yaml

from raydfl.cluster.resources import ActorKind, actor_kinds, count_fitting, format_kinds
from raydfl.core.errors import ConfigError
from raydfl.core.remote import is_uri
from raydfl.engine.config import Config, load_config


@dataclass(frozen=True, slots=True)
class NodeType:
    """A node type of a cluster."""

    name: str
    resources: Mapping[str, float]
    """``CPU`` and ``GPU`` of one node."""
    most: int
    """Nodes of it at the same time."""


@dataclass(slots=True)
class ClusterFile:
    """Content of a cluster file and its problems."""

    workers: list[NodeType] = field(default_factory=list)
    most: int = 0
    """Worker nodes at the same time, of all types together."""
    problems: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    """Values that are still to be filled in."""


def read_cluster(path: Path) -> ClusterFile:
    """Read and check a cluster file."""
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    cluster = _read_kuberay(values) if values.get("kind") in ("RayJob", "RayCluster") else _read_launcher(values)
    cluster.open = sorted({found[0] for line in text.splitlines() for found in _OPEN.finditer(line.split("#")[0])})
    return cluster


_OPEN = re.compile(r"[^\s\"']*REPLACE[^\s\"']*")


def fit(cluster: ClusterFile, config: Config) -> tuple[str, list[str]]:
    """Check whether a job's client actors fit, and return their requirements, placement and problems.

    Args:
        cluster: the cluster's description.
        config: configuration of the job. With ``ray.actors: per_client`` only a single actor is checked. Clients at sites are not
            checked.
    """
    settings = config.ray
    if settings.actors == 0:
        return "no client actors (ray.actors=0)", []
    if config.data.sites:
        return f"bound to the nodes of its sites ({', '.join(config.data.sites)}), which are not looked at", []
    kinds = actor_kinds(settings, 1)
    requirements = format_kinds(kinds)
    problems = [
        f"a client actor with {kind} fits no node type ({_list_types(cluster.workers)}); lower ray.cpus or ray.gpus, or add a type"
        for kind in dict.fromkeys(kinds)
        if not any(count_fitting([worker.resources], [kind]) for worker in cluster.workers)
    ]
    needed = min(settings.min_actors or len(kinds), len(kinds))
    fitting = _find_largest_room(cluster, kinds)
    if not problems and fitting < needed:
        problems.append(
            f"{needed} client actors have to be there, but the largest cluster has room for {fitting}; raise max_workers "
            f"(maxReplicas), or lower ray.actors or ray.min_actors"
        )
    return f"{requirements}: room for {fitting} of {len(kinds)} in the largest cluster", problems


def _find_largest_room(cluster: ClusterFile, kinds: Sequence[ActorKind]) -> int:
    """Return the nodes of the largest possible cluster, GPU nodes first if actors need GPUs."""
    by_use = sorted(cluster.workers, key=lambda worker: -count_fitting([worker.resources], kinds))
    nodes = [worker.resources for worker in by_use for _ in range(worker.most)]
    return count_fitting(nodes[: cluster.most], kinds)


def _list_types(workers: Sequence[NodeType]) -> str:
    return ", ".join(
        f"{worker.name} has {worker.resources.get('CPU', 0):g} CPU and {worker.resources.get('GPU', 0):g} GPU"
        for worker in workers
    )


def check(path: Path, jobs: Sequence[Path]) -> list[str]:
    """Check a cluster file and the fit of its jobs.

    Returns:
        Lines about accepted settings and settings to fill in.

    Raises:
        ConfigError: the file or a job is wrong. The message lists all problems.
    """
    cluster = read_cluster(path)
    problems = list(cluster.problems)
    lines = [f"{path}: up to {cluster.most} nodes; {_list_types(cluster.workers)}"]
    for job in jobs:
        description, wrong = fit(cluster, load_config(job))
        lines.append(f"{job}: {description}")
        problems += [f"{job}: {problem}" for problem in wrong]
    if problems:
        raise ConfigError("\n  ".join([f"{path}: {len(problems)} found:", *problems]))
    if cluster.open:
        lines.append(f"to be filled in before it is used: {', '.join(cluster.open)}")
    return lines


# -- Ray's cluster launcher --------------------------------------------------------------------------------------------


def _merge_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge Ray's defaults into the description and validate it. Only this module uses these private functions of Ray."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        merged: dict[str, Any] = prepare_config(copy.deepcopy(dict(values)))
        validate_config(merged)
    except Exception as error:  # Ray and jsonschema raise many types of errors
        first = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"Ray refuses the cluster file: {type(error).__name__}: {first}") from error
    return merged


def _read_launcher(values: Mapping[str, Any]) -> ClusterFile:
    merged = _merge_defaults(values)
    types: dict[str, Any] = merged["available_node_types"]
    head = str(merged["head_node_type"])
    cluster = ClusterFile(
        [
            NodeType(
                name, _count_resources(kind.get("resources") or {}), int(kind.get("max_workers", merged["max_workers"]))
            )
            for name, kind in types.items()
            if name != head
        ],
        int(merged["max_workers"]),
    )
    cluster.problems += _find_launcher_problems(merged, values, types, head)
    return cluster


def _find_launcher_problems(
    merged: Mapping[str, Any], given: Mapping[str, Any], types: Mapping[str, Any], head: str
) -> Iterator[str]:
    for what in ("head", "worker"):
        starts = [text for text in merged[f"{what}_start_ray_commands"] if re.search(r"\bray start\b", text)]
        if not starts:
            yield f"{what}_start_ray_commands has no `ray start`; copy it from cluster.yaml"
        for text in starts:
            if "RAY_AUTH_MODE=token" not in text:
                yield (
                    f"{what}_start_ray_commands starts Ray without a token: anyone who reaches a port could run code; "
                    f"write RAY_AUTH_MODE=token ray start ..."
                )
            host = re.search(r"--dashboard-host[= ](\S+)", text)
            if what == "head" and (host is None or host[1] not in ("127.0.0.1", "localhost")):
                found = "Ray's default" if host is None else host[1]
                yield (
                    f"head_start_ray_commands: the dashboard must answer on the head itself only, not on {found}; "
                    f"write --dashboard-host=127.0.0.1 and reach it by `ray dashboard`"
                )
    if not any(str(place).endswith("/.ray/auth_token") for place in merged.get("file_mounts") or {}):
        yield 'file_mounts brings no token to the nodes; write "/home/USER/.ray/auth_token": "~/.ray/auth_token"'
    if any(_count_resources(types[head].get("resources") or {"CPU": 1.0}).values()):
        yield f'the head ({head}) would get clients, who belong on nodes that come and go; write resources: {{"CPU": 0, "GPU": 0}}'
    if "idle_timeout_minutes" not in given:
        yield "idle_timeout_minutes is missing: say after how many minutes a node without clients goes"
    for name, kind in types.items():
        if name != head and not kind.get("resources"):
            yield f"node type {name} says no resources, so nothing can be checked against it; write resources: {{...}}"
        if name != head and kind.get("min_workers", 0) != 0:
            yield f"node type {name} keeps {kind['min_workers']} nodes, which cost also when nothing runs; write min_workers: 0"


def _count_resources(resources: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in resources.items() if name in ("CPU", "GPU")}


# -- KubeRay -----------------------------------------------------------------------------------------------------------


_SHARED_MEMORY = "/dev/shm"


def _read_kuberay(values: Mapping[str, Any]) -> ClusterFile:
    spec = _get(values, "spec.rayClusterSpec" if values["kind"] == "RayJob" else "spec") or {}
    head, workers = _get(spec, "headGroupSpec") or {}, _get(spec, "workerGroupSpecs") or []
    cluster = ClusterFile(
        [
            NodeType(str(group.get("groupName")), _pod_resources(group), int(group.get("maxReplicas") or 0))
            for group in workers
        ]
    )
    cluster.most = sum(worker.most for worker in cluster.workers)
    cluster.problems += _find_kuberay_problems(spec, head, workers)
    if values["kind"] == "RayJob" and not _get(values, "spec.backoffLimit"):
        cluster.problems.append("a job whose head is lost does not start again; write backoffLimit: 3")
    run_dir = re.search(
        r"run\.dir=(\S+)", str(_get(values, "spec.entrypoint"))
    )  # a permanent cluster has no entry point
    stored_in_pods = run_dir is not None and not is_uri(run_dir[1])
    for name, group in [("head", head), *((str(group.get("groupName")), group) for group in workers)]:
        cluster.problems += [f"{name}: {problem}" for problem in _find_pod_problems(group, stored_in_pods)]
    return cluster


def _find_kuberay_problems(
    spec: Mapping[str, Any], head: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    if _get(spec, "authOptions.mode") != "token":
        yield "no token: anyone who reaches a port could run code; write authOptions: {mode: token}"
    if str(spec.get("rayVersion")) != ray.__version__:
        yield f"rayVersion is {spec.get('rayVersion')!r}, installed is {ray.__version__!r}; they must be the same, as the image's"
    if _get(head, "serviceType") != "ClusterIP":
        yield f"headGroupSpec.serviceType is {_get(head, 'serviceType')!r}: the dashboard could face the network; write ClusterIP"
    if spec.get("enableInTreeAutoscaling") is not True:
        yield "the cluster does not grow; write enableInTreeAutoscaling: true"
    if not _get(spec, "autoscalerOptions.idleTimeoutSeconds"):
        yield "autoscalerOptions.idleTimeoutSeconds is missing: say after how many seconds a pod without clients goes"
    if any(_get(head, f"rayStartParams.{key}") != "0" for key in ("num-cpus", "num-gpus")):
        yield 'the head would get clients; write rayStartParams: {num-cpus: "0", num-gpus: "0"}'
    if not workers:
        yield "there are no workerGroupSpecs, so no client actor has a place"
    for group in workers:
        if group.get("minReplicas") != 0 or group.get("replicas") != 0:
            yield f"{group.get('groupName')}: pods cost also when nothing runs; write replicas: 0 and minReplicas: 0"


def _find_pod_problems(group: Mapping[str, Any], stored_in_pods: bool) -> Iterator[str]:
    pod = _get(group, "template.spec") or {}
    if _get(pod, "securityContext.runAsNonRoot") is not True:
        yield "runs as root; write securityContext: {runAsNonRoot: true}"
    volumes = {volume.get("name"): volume for volume in pod.get("volumes") or []}
    for container in pod.get("containers") or []:
        requests, limits = _get(container, "resources.requests"), _get(container, "resources.limits")
        if not requests or requests != limits:
            yield "resources.requests and limits must be the same, for Ray counts on all of what it is told"
        if ray.__version__ not in str(container.get("image")):
            yield f"the image {container.get('image')!r} does not name Ray {ray.__version__} in its tag"
        mounts = container.get("volumeMounts") or []
        mounted = {mount.get("mountPath"): volumes.get(mount.get("name"), {}) for mount in mounts}
        if _get(mounted.get(_SHARED_MEMORY, {}), "emptyDir.medium") != "Memory":
            yield f"{_SHARED_MEMORY} must be an emptyDir with medium: Memory, for Ray's objects lie there"
        else:
            memory = _parse_bytes(_get(limits, "memory"))
            shared = _parse_bytes(_get(mounted[_SHARED_MEMORY], "emptyDir.sizeLimit") or memory)
            given = _get(group, "rayStartParams.object-store-memory")
            place, size = find_object_store(memory, shared, None if given is None else int(given))
            if place != _SHARED_MEMORY:
                yield (
                    f"Ray's object store has {size} bytes, {_SHARED_MEMORY} {shared}: objects would be on disk; lower "
                    f"object-store-memory in rayStartParams, or raise the sizeLimit"
                )
        if stored_in_pods and not any("persistentVolumeClaim" in volume for volume in mounted.values()):
            yield "no volume that all pods share, for runs and the cache; set run.dir to a URI, or mount a persistentVolumeClaim"


def find_object_store(memory: int, shared: int, given: int | None) -> tuple[str, int]:
    """Return the folder and the bytes of a node's object store, from private functions of Ray.

    Args:
        memory: free memory of the node in bytes.
        shared: bytes of /dev/shm.
        given: object-store-memory in bytes. ``None``: Ray chooses.
    """
    from ray._private import services, utils

    with (
        mock.patch("ray._private.utils.get_shared_memory_bytes", return_value=shared),
        mock.patch("ray._common.utils.get_system_memory", return_value=memory),
    ):
        size = utils.resolve_object_store_memory(memory, given)
        place, _, size = services.determine_plasma_store_config(size, tempfile.gettempdir())
    return str(place), int(size)


def _parse_bytes(text: Any) -> int:
    """Return the bytes of a Kubernetes quantity such as 8Gi."""
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(str(text)[:-2]) * units[str(text)[-2:]] if str(text)[-2:] in units else int(text)


def _pod_resources(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that Ray counts for a pod: limits of its first container."""
    containers = _get(group, "template.spec.containers") or [{}]
    limits = _get(containers[0], "resources.limits") or {}
    return {"CPU": _parse_cpus(limits.get("cpu", 0)), "GPU": float(limits.get("nvidia.com/gpu", 0))}


def _parse_cpus(text: Any) -> float:
    """Return a Kubernetes CPU quantity, rounded up to whole CPUs as in Ray."""
    number = float(str(text)[:-1]) / 1000 if str(text).endswith("m") else float(text)
    return float(-(-number // 1))


def _get(values: Any, path: str) -> Any:
    """Return the value at the path ``a.b.c``, or ``None``."""
    for key in path.split("."):
        if not isinstance(values, Mapping):
            return None
        values = values.get(key)
    return values
