"""ClientActor: a Ray actor with its share of CPUs and of a GPU that carries out clients' tasks."""

from __future__ import annotations

import functools
import gc
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raydfl.cluster.gpu import compute_memory_fraction, explain_missing_gpu, hide_gpus
from raydfl.cluster.idle import IdleActors
from raydfl.cluster.nodes import SuitableNodes
from raydfl.cluster.resources import ActorKind
from raydfl.cluster.sites import SHARE, open_worker, place_folder, site_resource
from raydfl.core.errors import ConfigError, RaydflError, ResourcesError, first_line
from raydfl.core.tensors import FlatTensors
from raydfl.data import Population
from raydfl.engine import Config, Order, RaySettings, Reply, Worker


def choose_device(gpus: float, cpu_fallback: bool = False) -> str:
    """Choose the device of this process: ``"cuda"`` with capped memory, or ``"cpu"`` without a share of a GPU.

    Args:
        gpus: Share of a GPU.
        cpu_fallback: Return ``"cpu"`` if PyTorch finds no GPU.

    Raises:
        ResourcesError: PyTorch finds no GPU, or the share is smaller than a process's CUDA context.
    """
    if gpus <= 0:
        hide_gpus()  # Ray hides GPUs only from actors that reserve a GPU.
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if not cpu_fallback:
            raise ResourcesError(
                f"ray.gpus={gpus:g}, but PyTorch finds no GPU: {explain_missing_gpu()}, or set ray.cpu_fallback=true to train on "
                f"the CPU."
            )
        return "cpu"
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(compute_memory_fraction(gpus, total))
    return "cuda"


class ClientActor:
    """A long-lived process that serves many clients without owning any of them.

    It has two threads, and one of them computes at a time. While a thread trains a client, the other sends the last reply or
    fetches the inputs of the next client.
    """

    def __init__(self, config: Config, kind: ActorKind, opening: Callable[..., Worker], server_node: str = "") -> None:
        """Open a run like :meth:`open`."""
        self._one_at_a_time = threading.Lock()
        # A short interval lets the waiting thread run as soon as it gets the lock.
        sys.setswitchinterval(5e-4)
        self._is_open = threading.Event()
        self.open(config, kind, opening, server_node)

    def open(self, config: Config, kind: ActorKind, opening: Callable[..., Worker], server_node: str = "") -> None:
        """Open a run and keep an error for :meth:`ready`.

        Args:
            config: Configuration of the run.
            kind: Resources of this actor.
            opening: Opens a worker at the actor's place, given its device.
            server_node: Id of the server's node; empty: this node. Actors of other nodes sync their own files.
        """
        self._failed: RaydflError | None = None  # Ray would pass an error of a constructor on without its type.
        self._fallback = ""
        try:
            device = choose_device(kind.gpus, config.ray.cpu_fallback)
            if kind.gpus and device == "cpu":
                self._fallback = explain_missing_gpu()
            far = bool(server_node) and ray.get_runtime_context().get_node_id() != server_node
            self._worker = opening(device, durable=far)
        except RaydflError as error:
            self._failed = error
        self._is_open.set()

    def ready(self) -> tuple[str, str]:
        """Return the id of the actor's node, and the reason for training on the CPU despite a share of a GPU, or "".

        Raises:
            RaydflError: The run's folder, its data at this site, or an object of the configuration cannot be opened.
            ResourcesError: PyTorch finds no GPU.
        """
        self._is_open.wait()  # The other thread may still be opening a later run.
        if self._failed is not None:
            raise self._failed
        return ray.get_runtime_context().get_node_id(), self._fallback

    def locate(self) -> str:
        """Return the id of the actor's node."""
        return ray.get_runtime_context().get_node_id()

    def close(self) -> None:
        """Drop the run with its models and data. :meth:`open` opens the next one."""
        with self._one_at_a_time:
            self._is_open.clear()
            self._failed = None
            vars(self).pop("_worker", None)
            gc.collect()
            if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # Memory of the last run must not count as need of the next.

    def process_id(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()

    def carry_out(self, orders: list[Order], keys: list[str], *tensors: FlatTensors) -> list[Reply]:
        """Carry out clients' orders, and return the replies by value. They outlive this actor.

        Args:
            orders: Orders of any clients.
            keys: Keys of ``tensors`` in the server's state.
            tensors: Entries of the server's state, read from the object store without a copy.

        Raises:
            ResourcesError: The disk of this node is full.
        """
        arrived = time.perf_counter()
        broadcast = dict(zip(keys, tensors, strict=True))
        if self._one_at_a_time.locked():
            self._worker.read_ahead(orders)
        with self._one_at_a_time:
            try:
                return self._worker.carry_out(orders, broadcast, arrived)
            except ResourcesError as error:
                raise ResourcesError(f"node {platform.node()}: {error}") from error

    def do(self, job: Callable[[Worker], Any]) -> Any:
        """Run a job on the worker between two calls."""
        with self._one_at_a_time:
            return self._worker.do(job)


_NODE = "ray.io/node-id"
"""Label of every node with its id."""


def define_actor(
    settings: RaySettings, place: str, kind: ActorKind, strategy: Any = None, excluded: Collection[str] = ()
) -> Any:
    """Define a client actor of a kind at a place, with Ray's options. The pool restarts lost actors, not Ray.

    Args:
        settings: Ray's options.
        place: Place of the actor.
        kind: Resources of the actor.
        strategy: Ray's scheduling strategy for an actor without a place. ``None``: a trial's placement group, or any node.
        excluded: Ids of unsuitable nodes.

    Raises:
        ConfigError: Ray rejects the options.
    """
    # Ray 2.60 does not ignore the space in "in(a, b)": the second value would match no node.
    labels = {name: re.sub(r"\s+", "", value) for name, value in (settings.options.label_selector or {}).items()}
    if excluded:
        labels.setdefault(_NODE, f"!in({','.join(sorted(excluded))})")
    try:
        return ray.remote(ClientActor).options(
            num_cpus=kind.cpus,
            num_gpus=kind.gpus,
            memory=kind.memory or None,
            resources=dict(kind.custom) | ({site_resource(place): SHARE} if place else {}),
            label_selector=labels or None,
            scheduling_strategy="DEFAULT" if place else strategy,  # A trial's placement group reserves no site.
            max_concurrency=2,
            max_restarts=0,
            max_task_retries=0,
        )
    except ValueError as error:
        raise ConfigError(f"ray.options: {first_line(error)}") from error


def start_client_actor(
    run_dir: Path,
    config: Config,
    population: Population,
    group: PlacementGroup | None,
    nodes: SuitableNodes | None,
    place: str,
    kind: ActorKind,
    key: object,
    idle: IdleActors | None = None,
) -> Any:
    """Start a client actor at a place, from the process that commits, or open the run on an idle actor.

    Args:
        run_dir: Folder of the run.
        config: Configuration of the run.
        population: Population of the federation.
        group: Placement group with a bundle for each of the first actors, after a wait for a busy cluster.
        nodes: Suitable nodes, and the location of the run's files; ``None``: all nodes see the run's folder.
        place: Place of the actor.
        kind: Resources of the actor.
        key: Key of the actor's slot: the number of its bundle in the group.
        idle: Actors of the last run in this process, or ``None``.
    """
    folder = place_folder(config, run_dir, place)
    files, excluded = (None, ()) if nodes is None else (nodes.files, nodes.excluded)
    opening = functools.partial(open_worker, config, run_dir, place, folder, population if place else None, files=files)
    strategy = None
    if not excluded and group is not None and isinstance(key, int) and key < group.bundle_count:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=key)
    here = ray.get_runtime_context().get_node_id()
    kept = None if idle is None or place else idle.take(key)
    if kept is not None:
        kept.open.remote(config, kind, opening, here)
        return kept
    return define_actor(config.ray, place, kind, strategy, excluded).remote(config, kind, opening, here)
