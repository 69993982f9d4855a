"""The work in BlazeFL's simulation: its trainer on two threads or two processes, and its FedAvg server's aggregation.

    PYTHONPATH=benchmarks .venv-blazefl/bin/python -m peers.blazefl WORK --pool threads

Its own FedAvg also uses a DataLoader, example by example, and in processes keeps random states in files; this is
omitted, as for the other peers. Threads need a free-threaded Python: with the usual one they wait for each other.

It follows the protocol of peers/turns.py.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; later threads inherit it

import threading
from queue import LifoQueue

import torch
import torch.nn.functional as F
from blazefl.contrib.fedavg import FedAvgBaseServerHandler
from blazefl.core import (
    IPCMode,
    ProcessPoolClientTrainer,
    SHMHandle,
    ThreadPoolClientTrainer,
    deserialize_model,
    serialize_model,
)
from torch import Tensor, nn

from peers.turns import serve
from peers.work import Work

PARALLEL = 2


@dataclass
class Down:
    """The payload of the server."""

    model: Tensor
    round_index: int


@dataclass
class Up:
    """The payload of a client; a process sends its model through shared memory."""

    client: int
    model: Tensor | SHMHandle
    examples: int


@functools.cache
def open_work(path: str) -> tuple[Work, LifoQueue[nn.Module]]:
    """Return the work, and a network for each thread or forked process."""
    work, networks = Work.load(path), LifoQueue[nn.Module]()
    for _ in range(PARALLEL):
        networks.put(work.build())
    return work, networks


def train(path: str, client: int, down: Down) -> Up:
    """Train one client's epoch."""
    work, networks = open_work(path)
    network = networks.get()
    try:
        deserialize_model(network, down.model)
        x, y = work.data(client)
        optimiser = torch.optim.SGD(network.parameters(), lr=work.lr)
        for batch in work.order(down.round_index, client).split(work.batch_size):
            optimiser.zero_grad()
            F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimiser.step()
        return Up(client, serialize_model(network), len(y))
    finally:
        networks.put(network)  # also after a failure: the next client must not wait for it


class Threads(ThreadPoolClientTrainer[Up, Down]):
    """BlazeFL's pool of threads."""

    def __init__(self, path: str) -> None:
        self.path, self.cache = path, []
        self.num_parallels, self.device, self.device_count = PARALLEL, "cpu", 0
        self.stop_event = threading.Event()

    def worker(self, cid: int, device: str, payload: Down, stop_event: threading.Event) -> Up:
        """Train a client."""
        return train(self.path, cid, payload)


class Processes(ProcessPoolClientTrainer[Up, Down, str]):
    """BlazeFL's pool of processes, restarted in each round."""

    def __init__(self, path: str) -> None:
        self.path, self.cache = path, []
        self.num_parallels, self.device, self.device_count = PARALLEL, "cpu", 0
        self.ipc_mode = IPCMode.SHARED_MEMORY
        self.stop_event = torch.multiprocessing.Manager().Event()
        self._model = serialize_model(open_work(path)[0].build())

    def get_client_config(self, cid: int) -> Any:
        """Return the client's data for its process."""
        return self.path, cid

    def prepare_uplink_package_buffer(self) -> Up:
        """Allocate memory for a client's payload."""
        return Up(-1, self._model.clone(), 0)

    @staticmethod
    def worker(
        config: Any, payload: Any, device: str, stop_event: threading.Event, *, shm_buffer: Up | None = None
    ) -> Any:
        """Train a client."""
        up = train(*config, payload)
        assert shm_buffer is not None  # noqa: S101
        shm_buffer.model.copy_(up.model)
        return Up(up.client, SHMHandle(), up.examples)


POOLS: dict[str, Callable[[str], Threads | Processes]] = {"threads": Threads, "processes": Processes}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work")
    parser.add_argument("--pool", choices=sorted(POOLS), required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work, _ = open_work(arguments.work)
    network, trainer = work.build(), POOLS[arguments.pool](arguments.work)
    done = 0

    def run(rounds: int) -> None:
        nonlocal done
        for _ in range(rounds):
            trainer.local_process(Down(serialize_model(network), done), work.cohorts[done])
            sent, trainer.cache = trainer.cache, []
            model = FedAvgBaseServerHandler.aggregate([up.model for up in sent], [up.examples for up in sent])
            deserialize_model(network, model)
            done += 1

    serve(run, network.state_dict)


if __name__ == "__main__":
    main()
