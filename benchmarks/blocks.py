"""Measure the server's cost of a client with recorded replies: processor time, and bytes of updates held.

    python benchmarks/blocks.py                                  # 1 to 10,000 actors, 10 clients each, at most 10,000
    python benchmarks/blocks.py --clients 10000 --blocks 16 --seconds 0.01 10
    python benchmarks/blocks.py --ray 2                          # actors of Ray, which send the recorded replies

A worker trains one client, and every actor sends its reply again under other ids. The server is real: plan, schedule, pickled
orders and replies, aggregation, metrics table and commits. Without ``--ray`` the actors are simulated with a virtual clock, and
Ray's own work is not measured. With ``--ray`` it is, for this process alone. Processor time includes all threads of the process,
without the simulated actors.

Columns: processor microseconds for a client in the fastest round, largest sum of the bytes of received updates at a time, and
the number of replies (both 0 with ``--ray``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import heapq
import itertools
import math
import pickle
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from population import write_table

from raydfl import make_config
from raydfl.cluster import actors, pool
from raydfl.cluster.pool import RayPool
from raydfl.cluster.resources import ActorKind
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Update
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.orders import Order, Reply, split_pieces
from raydfl.engine.pool import SerialPool
from raydfl.engine.settings import RaySettings
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.rules import WeightedMean
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress


class Recording:
    """Replies to any orders, made from the reply of one client.

    Args:
        reply: The recorded reply.
        seconds: Mean duration of a client's training.
    """

    def __init__(self, reply: Reply, seconds: float) -> None:
        self._reply = reply
        self._seconds = seconds
        self._sums: dict[int, Update] = {}

    def _sum(self, clients: int) -> Update:
        if clients not in self._sums:
            updates = itertools.repeat(self._reply.updates[0], clients)
            self._sums[clients] = WeightedMean().sum_updates(updates, {})[0]
        return self._sums[clients]

    def duration(self, position: int) -> float:
        """Return the duration of a client's training, from 0.5 to 1.5 of the mean."""
        return self._seconds * (0.5 + position * 7919 % 1009 / 1009)

    def answer(self, orders: Sequence[Order]) -> list[Reply]:
        """Return the replies to the orders of a call."""
        replies: list[Reply] = []
        for piece in split_pieces(orders):
            first, whole = piece[0], piece[0].block is not None and piece[0].block.clients == len(piece)
            for order in piece:
                reply = dataclasses.replace(
                    self._reply,
                    position=order.position,
                    client_id=order.task.client_id,
                    seconds=self.duration(order.position),
                    update=None
                    if whole
                    else dataclasses.replace(self._reply.updates[0], client_id=order.task.client_id),
                )
                replies.append(reply)
            if whole:
                assert first.block is not None  # noqa: S101
                replies[-1] = dataclasses.replace(replies[-1], sums=(self._sum(first.block.clients),))
        return replies


class Held:
    """Counter of the bytes of received vectors in memory."""

    def __init__(self) -> None:
        self.now = self.most = self.replies = 0

    def add(self, replies: Sequence[Reply]) -> None:
        """Count the vectors of replies until they are freed."""
        for reply in replies:
            for update in (*reply.updates, *reply.sums):
                vector = FlatTensors.from_tensors(update.tensors).vector
                self.now += vector.nbytes
                self.replies += 1
                weakref.finalize(vector, self._free, vector.nbytes)
        self.most = max(self.most, self.now)

    def _free(self, size: int) -> None:
        self.now -= size


@dataclasses.dataclass(eq=False)
class Reference:
    """Pickled result of a call, available from a virtual time."""

    at: float
    data: bytes
    buffers: list[bytes]


class Remote:
    """Method of a simulated actor."""

    def __init__(self, call: Callable[..., Reference]) -> None:
        self.remote = call


class SimulatedActors:
    """Actors in this process with a virtual clock, and the calls of Ray that the pool needs."""

    def __init__(self, recording: Recording) -> None:
        self.held: Held | None = None
        self.now = 0.0
        """Virtual time in seconds."""
        self.calls: list[bytes] = []
        """Pickled orders of all calls."""
        self._recording = recording
        self._ends: list[tuple[float, int, Reference]] = []
        self._finished: dict[Reference, None] = {}
        self._number = itertools.count().__next__

    def monotonic(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    perf_counter = monotonic

    def _finish(self, at: float, value: object) -> Reference:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        reference = Reference(at, data, [bytes(buffer) for buffer in buffers])
        heapq.heappush(self._ends, (at, self._number(), reference))
        return reference

    def _answer(self, call: bytes, at: float) -> Reference:
        return self._finish(at, self._recording.answer(pickle.loads(call)))  # noqa: S301

    def measure_work(self) -> float:
        """Repeat the actors' work of all calls, and return its processor seconds."""
        ends, self._ends = self._ends, []  # Nobody fetches these results, so they must not count as finished.
        before = time.process_time()
        for call in self.calls:
            self._answer(call, 0.0)
        used = time.process_time() - before
        self._ends = ends
        return used

    def start_actor(self, place: str, kind: ActorKind, key: object) -> Any:
        """Start a simulated actor."""
        idle_at = 0.0
        ready = self._finish(0.0, ("node", ""))

        def carry_out(orders: list[Order], keys: list[str], *tensors: Any) -> Reference:
            nonlocal idle_at
            self.calls.append(pickle.dumps(orders, protocol=5))
            idle_at = max(idle_at, self.now) + sum(self._recording.duration(order.position) for order in orders)
            return self._answer(self.calls[-1], idle_at)

        actor = Remote(carry_out)
        actor.ready, actor.carry_out = Remote(lambda: ready), actor  # type: ignore[attr-defined]
        return actor

    def wait(self, references: Sequence[Reference], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """Advance the clock to the wanted number of results, or by the time limit, and return all finished results."""
        until = self.now + timeout
        while self._ends and self._ends[0][0] <= (until if len(self._finished) < num_returns else self.now):
            at, _, reference = heapq.heappop(self._ends)
            self.now = max(self.now, at)
            self._finished[reference] = None
        if len(self._finished) < num_returns:
            self.now = until
        return [*self._finished], []

    def get(self, reference: Reference) -> Any:
        """Unpickle a result."""
        del self._finished[reference]
        value = pickle.loads(reference.data, buffers=reference.buffers)  # noqa: S301
        if self.held is not None and isinstance(value, list):
            self.held.add(value)
        return value

    def get_runtime_context(self) -> Any:
        """Return the server's context, with the id of its node."""
        return types.SimpleNamespace(get_node_id=lambda: "server")

    def put(self, value: FlatTensors) -> FlatTensors:
        """Copy a value, as into the object store."""
        return FlatTensors(value.layout, value.vector.copy())

    def kill(self, actor: Any) -> None:
        """End an actor."""


class RecordedActor:
    """Actor of Ray that sends recorded replies."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def ready(self) -> tuple[str, str]:
        """Return the node."""
        return "node", ""

    def carry_out(self, orders: list[Order], keys: list[str], *tensors: FlatTensors) -> list[Reply]:
        """Return the replies to orders."""
        return self._recording.answer(orders)


def configure(clients: int, folder: Path, block: int | str) -> Config:
    """Return the configuration of a federation where all clients train in every round, with updates of 115 kB."""
    return make_config(
        {
            "method": {"name": "fedavg"},
            "models": {"model": {"name": "mlp", "hidden": 383}},
            "data": {
                "name": f"{Path(__file__).resolve().parent / 'scaling.py'}:Noise",
                "clips": 1000,
                "cache": str(folder / "cache"),
                "split": {"test": None},
                "partition": {"by": "table", "file": str(folder / f"clients-{clients}.arrow")},
                "features": {"sample_rate": 8000, "bands": 64, "window_ms": 25, "hop_ms": 10, "seconds": 0.25},
            },
            "train": {"rounds": 10**6, "cohort": 1.0, "batch_size": 16, "block": block},
            "evaluate": {"every": 10**6, "server": False, "clients": "none"},
            "ray": {"actors": 0},
            "run": {"dir": str(folder), "name": f"{clients}-{block}-{time.monotonic_ns()}"},
            "track": {"mlflow": False},
        }
    )


def record_reply(run_dir: Path, config: Config) -> Reply:
    """Train one client, and return its reply."""
    worker = Worker(run_dir, config, PrivateStore(run_dir / "private"))
    federation = Federation(config, worker.population, RunStore(run_dir), SerialPool(worker))
    order = dataclasses.replace(federation.plan()[0], block=None)
    (reply,) = worker.carry_out([order], federation.broadcast(set(order.task.receive)))
    return reply


def measure(config: Config, number: int, seconds: float, rounds: int, with_ray: bool) -> tuple[float, Held, int]:
    """Run rounds, and return the processor seconds of the fastest round, the bytes held, and the bytes of an update."""
    run_dir = create(config, Progress("quiet"))
    reply, held = record_reply(run_dir, config), Held()
    recording = Recording(reply, seconds)
    simulated = SimulatedActors(recording)
    settings = RaySettings(actors=number, cpus=0)
    with contextlib.ExitStack() as stack:
        if with_ray:
            actor = ray.remote(RecordedActor).options(num_cpus=0, max_concurrency=2)
            opened = RayPool(lambda place, kind, key: actor.remote(recording), settings)
        else:
            for name in ("wait", "get", "put", "kill", "get_runtime_context"):
                stack.enter_context(replace_attribute(ray, name, getattr(simulated, name)))
            for module in (actors, pool):
                stack.enter_context(replace_attribute(module, "time", simulated))
            opened = RayPool(simulated.start_actor, settings)
        stack.callback(opened.close)
        federation = Federation(config, Population.load(run_dir / "population"), RunStore(run_dir), opened)
        stack.callback(federation.close)
        simulated.held = held
        federation.round()
        simulated.held = None
        federation.round(ahead=True)
        used = math.inf
        for _ in range(rounds):
            simulated.calls.clear()
            before = time.process_time()
            federation.round(ahead=True)
            used = min(used, time.process_time() - before - simulated.measure_work())
    return used, held, FlatTensors.from_tensors(reply.updates[0].tensors).vector.nbytes


@contextlib.contextmanager
def replace_attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute within a ``with`` block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def main() -> None:
    """Measure and print a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, help="clients in a round; default: 10 for each actor, at most 10,000")
    parser.add_argument(
        "--actors", type=int, nargs="+", default=[1, 2, 8, 32, 100, 1000, 10_000], help="simulated actors"
    )
    parser.add_argument("--blocks", nargs="+", default=["1", "auto"], help="train.block")
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0], help="mean seconds of a client's training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ray", type=int, default=0, help="number of actors of Ray, instead of simulated ones")
    arguments = parser.parse_args()
    numbers: Sequence[int] = [arguments.ray] if arguments.ray else arguments.actors
    if arguments.ray:
        ray.init("local", num_cpus=arguments.ray, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(
            f"{'actors':>7}{'clients':>9}{'block':>7}{'s a client':>12}{'us a client':>13}{'held, MB':>10}{'updates':>9}"
            f"{'replies':>9}"
        )
        for seconds, number, block in itertools.product(arguments.seconds, numbers, arguments.blocks):
            clients = arguments.clients or min(10 * number, 10_000)
            write_table(folder / f"clients-{clients}.arrow", clients)
            config = configure(clients, folder, int(block) if block.isdigit() else block)
            used, held, size = measure(config, number, seconds, arguments.rounds, bool(arguments.ray))
            print(
                f"{number:7}{clients:9}{block:>7}{seconds:12g}{1e6 * used / clients:13.1f}{held.most / 1e6:10.2f}"
                f"{held.most / size:9.1f}{held.replies:9}",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
