"""ClientActor: a Ray actor, pinned to its share of CPUs and of a GPU, in which clients' tasks are carried out."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from raydfl.cluster.gpu import cap, hide_gpus
from raydfl.cluster.job import check_visible
from raydfl.cluster.resources import ActorKind
from raydfl.cluster.sites import SHARE, SentToSite, resource
from raydfl.core.errors import RaydflError
from raydfl.core.tensors import FlatTensors
from raydfl.engine import Config, Order, Reply, Worker
from raydfl.engine.storage import PrivateRef, PrivateStore


def choose_device(gpus: float) -> str:
    """Return ``"cuda"`` when a share of a GPU is configured and PyTorch has one, whose memory is capped then; else ``"cpu"``.

    Without a share the process is made blind to GPUs: Ray hides only those of actors that have others.

    Raises:
        ResourcesError: the share is smaller than what a process needs before it computes anything.
    """
    if gpus <= 0:
        hide_gpus()
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(cap(gpus, total))
    return "cuda"


class ClientActor:
    """A long-lived process that serves many clients; it owns none of them.

    It has two threads, of which one computes at a time: while one trains a client, the other hands over the last reply or fetches
    what the next client needs.
    """

    def __init__(
        self, run_dir: str, config: Config, kind: ActorKind, sent: SentToSite | None = None, server_node: str = ""
    ) -> None:
        """Open the run.

        Args:
            run_dir: the run's folder, the same path on every node; at a site there is none.
            config: of the run.
            kind: of this actor.
            sent: at a site, the rest of the run.
            server_node: id of the server's node, whose sync covers files written on the same node only; empty: this node.
        """
        folder = Path(run_dir)
        self._one_at_a_time = threading.Lock()
        # The thread that waits for the lock shall get the interpreter when it gets the lock.
        sys.setswitchinterval(5e-4)
        self._failed: RaydflError | None = None  # what a constructor raises would reach the driver without its type
        try:
            device = choose_device(kind.gpus)
            if sent is None:
                check_visible(folder)
                far = bool(server_node) and ray.get_runtime_context().get_node_id() != server_node
                self._worker = Worker(folder, config, PrivateStore(folder / "private", durable=far), device)
            else:
                self._worker = sent.worker(config, folder, device)
        except RaydflError as error:
            self._failed = error

    def ready(self) -> str:
        """Return the id of the actor's node, once it has started.

        Raises:
            RaydflError: the run's folder, its data at this site, or what the configuration names cannot be opened.
        """
        if self._failed is not None:
            raise self._failed
        return ray.get_runtime_context().get_node_id()

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

    def width(self, orders: list[Order], keys: list[str], *tensors: FlatTensors) -> int:
        """Do Worker.width; arguments as for :meth:`carry_out`."""
        with self._one_at_a_time:
            return self._worker.width(orders, dict(zip(keys, tensors, strict=True)))

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Do PrivateStore.compact."""
        with self._one_at_a_time:
            return self._worker.private.compact(round_index, refs)

    def remove(self, segments: list[str]) -> None:
        """Do PrivateStore.remove."""
        with self._one_at_a_time:
            self._worker.private.remove(segments)

    def retain(self, segments: frozenset[str]) -> None:
        """Do PrivateStore.retain."""
        with self._one_at_a_time:
            self._worker.private.retain(segments)


def start_client_actor(run_dir: Path, config: Config, site_key: str, site: str, kind: ActorKind) -> Any:
    """Start a client actor of some kind, at a site or anywhere. Ray never restarts it: the pool decides what is done again.

    Call it in the process that commits.
    """
    actor = ray.remote(ClientActor).options(
        num_cpus=kind.cpus,
        num_gpus=kind.gpus,
        resources={resource(site): SHARE} if site else None,
        scheduling_strategy="DEFAULT" if site else None,  # out of a trial's placement group, which holds no site
        max_concurrency=2,
        max_restarts=0,
        max_task_retries=0,
    )
    sent = SentToSite.of(run_dir, site, site_key) if site else None
    return actor.remote(str(run_dir), config, kind, sent, ray.get_runtime_context().get_node_id())
