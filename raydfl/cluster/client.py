"""ClientActor: a Ray actor, pinned to its share of CPUs and of a GPU, in which clients' tasks are carried out."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from raydfl.cluster.gpu import cap, hide_gpus, why_no_gpu
from raydfl.cluster.resources import ActorKind
from raydfl.cluster.sites import SHARE, folder_at, open_worker, resource
from raydfl.core.errors import RaydflError, ResourcesError
from raydfl.core.tensors import FlatTensors
from raydfl.data import Population
from raydfl.engine import Config, Order, Reply, Worker


def choose_device(gpus: float, cpu_fallback: bool = False) -> str:
    """Return ``"cuda"`` and cap the process's memory of the GPU, or ``"cpu"`` without a share of a GPU.

    Without a share the process is made blind to GPUs: Ray hides only those of actors that have others.

    Args:
        gpus: share of a GPU.
        cpu_fallback: return ``"cpu"`` too if PyTorch finds no GPU.

    Raises:
        ResourcesError: PyTorch finds no GPU, or the share is smaller than what a process needs before it computes anything.
    """
    if gpus <= 0:
        hide_gpus()
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if not cpu_fallback:
            raise ResourcesError(
                f"ray.gpus={gpus:g}, but PyTorch finds no GPU: {why_no_gpu()}, or set ray.cpu_fallback=true to train on the CPU"
            )
        return "cpu"
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(cap(gpus, total))
    return "cuda"


class ClientActor:
    """A long-lived process that serves many clients; it owns none of them.

    It has two threads, of which one computes at a time: while one trains a client, the other hands over the last reply or fetches
    what the next client needs.
    """

    def __init__(self, config: Config, kind: ActorKind, opening: Callable[..., Worker], server_node: str = "") -> None:
        """Open the run.

        Args:
            config: of the run.
            kind: of this actor.
            opening: opens a worker at the actor's place, on a device.
            server_node: id of the server's node, whose sync covers files written on the same node only; empty: this node.
        """
        self._one_at_a_time = threading.Lock()
        # The thread that waits for the lock shall get the interpreter when it gets the lock.
        sys.setswitchinterval(5e-4)
        self._failed: RaydflError | None = None  # what a constructor raises would reach the driver without its type
        self._fallback = ""
        try:
            device = choose_device(kind.gpus, config.ray.cpu_fallback)
            if kind.gpus and device == "cpu":
                self._fallback = why_no_gpu()
            far = bool(server_node) and ray.get_runtime_context().get_node_id() != server_node
            self._opened = opening(device, durable=far)
        except RaydflError as error:
            self._failed = error

    @property
    def _worker(self) -> Worker:
        if self._failed is not None:  # an actor of a client gets work before it has said that it is ready
            raise self._failed
        return self._opened

    def ready(self) -> tuple[str, str]:
        """Return the id of the actor's node, and the reason for training on the CPU despite a share of a GPU (empty: none).

        Raises:
            RaydflError: the run's folder, its data at this site, or what the configuration names cannot be opened.
            ResourcesError: PyTorch finds no GPU.
        """
        if self._failed is not None:
            raise self._failed
        return ray.get_runtime_context().get_node_id(), self._fallback

    def process_id(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()

    def carry_out(self, orders: list[Order], keys: list[str], *tensors: FlatTensors) -> list[Reply]:
        """Do Worker.carry_out. Updates are returned, never references to them: they outlive this actor.

        Args:
            orders: any clients'.
            keys: of the entries of the server's state that follow.
            tensors: those entries, read from the object store without a copy.
        """
        arrived = time.perf_counter()
        broadcast = dict(zip(keys, tensors, strict=True))
        if self._one_at_a_time.locked():
            self._worker.read_ahead(orders)
        with self._one_at_a_time:
            return self._worker.carry_out(orders, broadcast, arrived)

    def do(self, job: Callable[[Worker], Any]) -> Any:
        """Do a job, while no client is trained."""
        with self._one_at_a_time:
            return job(self._worker)


def start_client_actor(run_dir: Path, config: Config, population: Population, place: str, kind: ActorKind) -> Any:
    """Start a client actor of some kind, at a site or anywhere. Ray never restarts it: the pool decides what is done again.

    Call it in the process that commits.
    """
    actor = ray.remote(ClientActor).options(
        num_cpus=kind.cpus,
        num_gpus=kind.gpus,
        resources={resource(place): SHARE} if place else None,
        scheduling_strategy="DEFAULT" if place else None,  # out of a trial's placement group, which holds no site
        max_concurrency=2,
        max_restarts=0,
        max_task_retries=0,
    )
    folder = folder_at(config, run_dir, place)
    opening = functools.partial(open_worker, config, run_dir, place, folder, population if place else None)
    return actor.remote(config, kind, opening, ray.get_runtime_context().get_node_id())
