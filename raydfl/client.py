"""ClientActor: a Ray actor, pinned to its share of CPUs and of a GPU, in which clients' tasks are carried out."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from raydfl.config import Config
from raydfl.private import PrivateRef, PrivateStore
from raydfl.tensors import FlatTensors
from raydfl.worker import Order, Result, Worker


def choose_device(gpus: float) -> str:
    """``"cuda"`` when a share of a GPU is configured and PyTorch has one, with its memory capped to that share; else ``"cpu"``."""
    import torch

    if gpus <= 0 or not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_per_process_memory_fraction(min(1.0, gpus))
    return "cuda"


class ClientActor:
    """A long-lived process that serves many clients; it owns none of them.

    It has two threads, of which one computes at a time: while one trains a client, the other hands over the last result or fetches
    what the next client needs.
    """

    def __init__(self, run_dir: str, config: dict[str, Any]) -> None:
        settings = Config.model_validate(config)
        folder = Path(run_dir)
        self._one_at_a_time = threading.Lock()
        # The thread that waits for the lock shall get the interpreter when it gets the lock.
        sys.setswitchinterval(5e-4)
        self._worker = Worker(folder, settings, PrivateStore(folder / "private"), choose_device(settings.ray.gpus))

    def ready(self) -> bool:
        """Answers once the actor has started."""
        return True

    def process_id(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def carry_out(self, orders: list[Order], keys: list[str], *tensors: FlatTensors) -> list[Result]:
        """Worker.carry_out. Updates are returned, never references to them: they outlive this actor.

        Args:
            orders: any clients'.
            keys: of the entries of the server's state that follow.
            tensors: those entries, read from the object store without a copy.
        """
        broadcast = dict(zip(keys, tensors, strict=True))
        if self._one_at_a_time.locked():
            self._worker.read_ahead(orders)
        with self._one_at_a_time:
            return self._worker.carry_out(orders, broadcast)

    def width(self, orders: list[Order], keys: list[str], *tensors: FlatTensors) -> int:
        """Worker.width; arguments as for :meth:`carry_out`."""
        with self._one_at_a_time:
            return self._worker.width(orders, dict(zip(keys, tensors, strict=True)))

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """PrivateStore.compact."""
        with self._one_at_a_time:
            return self._worker.private.compact(round_index, refs)


def start_client_actor(run_dir: Path, config: Config) -> Any:
    """A new client actor with the configured resources. Never restarted by Ray: the pool decides what is done again."""
    actor = ray.remote(ClientActor).options(
        num_cpus=config.ray.cpus, num_gpus=config.ray.gpus, max_concurrency=2, max_restarts=0, max_task_retries=0
    )
    return actor.remote(str(run_dir), config.model_dump(mode="json"))
