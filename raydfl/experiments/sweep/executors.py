"""Where the runs of a sweep run: processes of this machine, or tasks of a Ray cluster; and what is done there.

A run is given away as a plain value (:class:`Order`) and answered with one (:class:`Ended`): the truth lies in its folder.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from raydfl.core.errors import RaydflError
from raydfl.core.processes import Worker, available_cpus
from raydfl.data.features import RunChunks
from raydfl.engine import Config, make_config
from raydfl.runs import Progress, run

_POLL = 0.5
"""Seconds between two looks at whether a run shall stop."""


@dataclass(frozen=True)
class Order:
    """One run as it is given to another process."""

    name: str
    config: Mapping[str, Any]
    stop: str
    """When this file appears, the run stops after its round."""
    log: str
    """Where a failure is told in full."""
    own_process: bool = True
    """Whether what is printed goes to the log, and the run stops when the process that gave the order ends."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: Literal["finished", "stopped", "failed"]
    reason: str = ""
    """Why it failed, or why a finished one is worthless; empty when it is not."""


# -- one run, wherever it runs ---------------------------------------------------------------------------------------


def do_run(order: Order) -> Ended:
    """Do or go on with one run, in the main thread of the process that this is called in; nothing is raised."""
    log = Path(order.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    if Path(order.stop).exists():
        return Ended("stopped")
    before = signal.signal(signal.SIGTERM, _interrupt)  # the run's own handler takes its place once rounds begin
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(order, os.getppid(), ended), daemon=True)
    try:
        with _output_to(log) if order.own_process else contextlib.nullcontext():
            watcher.start()
            try:
                outcome = run(make_config(order.config, order.name), Progress("quiet"))
            finally:
                ended.set()
        return Ended("finished", outcome.worthless) if outcome.finished else Ended("stopped")
    except KeyboardInterrupt:
        return Ended("stopped")
    except Exception as error:  # noqa: BLE001  (a failing run must not stop the others; it is told at the end)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{order.name}\n\n{traceback.format_exc()}")
        kind = "" if isinstance(error, RaydflError) else f"{type(error).__name__}: "
        return Ended("failed", f"{kind}{error}")
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _watch(order: Order, parent: int, ended: threading.Event) -> None:
    """Asks the run to stop when the sweep wants it, or has gone."""
    while not ended.wait(_POLL):
        if Path(order.stop).exists() or (order.own_process and os.getppid() != parent):
            os.kill(os.getpid(), signal.SIGTERM)
            return


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """What libraries print goes to the log, and the terminal stays readable."""
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        if not log.stat().st_size:
            log.unlink()


# -- where runs run --------------------------------------------------------------------------------------------------


class Executor(Protocol):
    """Does runs somewhere else."""

    own_process: bool
    """Whether a run has a process of its own, on this machine."""
    run_chunks: RunChunks | None
    """Who computes features; ``None``: this machine."""

    def slots(self, config: Config, cpus: float) -> int:
        """How many such runs there is room for at a time."""

    def start(self, order: Order) -> None:
        """Begin."""

    def wait(self, seconds: float) -> Iterable[tuple[str, Ended | None]]:
        """Runs that ended since, by the order's name, after so many seconds at most; ``None``: its process was lost."""

    def kill(self) -> None:
        """End all runs at once."""

    def close(self) -> None:
        """Give back what was taken."""


class LocalProcesses:
    """Processes of this machine, each of which does one run after another."""

    own_process = True
    run_chunks: RunChunks | None = None

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._busy: dict[str, Worker] = {}
        self._ended: queue.SimpleQueue[tuple[str, Ended | None]] = queue.SimpleQueue()

    def slots(self, config: Config, cpus: float) -> int:
        """One for each CPU, if a run takes one."""
        each = cpus if config.ray.actors == 0 else cpus + config.ray.cpus * float(config.ray.actors)
        return max(1, int(available_cpus() / each))

    def start(self, order: Order) -> None:
        """In an idle process, or in a new one."""
        worker = self._idle.pop() if self._idle else Worker()
        self._busy[order.name] = worker
        threading.Thread(target=self._call, args=(worker, order), daemon=True).start()

    def _call(self, worker: Worker, order: Order) -> None:
        try:
            ended: Ended | None = worker.call(do_run, order)
        except Exception:  # noqa: BLE001  (do_run raises nothing: the process or its pipes have gone)
            ended = None
        self._ended.put((order.name, ended))

    def wait(self, seconds: float) -> Iterable[tuple[str, Ended | None]]:
        """At most one at a time."""
        try:
            name, ended = self._ended.get(timeout=seconds)
        except queue.Empty:
            return []
        worker = self._busy.pop(name)
        if ended is None:
            worker.close()
        else:
            self._idle.append(worker)
        return [(name, ended)]

    def kill(self) -> None:
        """Kill the processes; their runs go on from the last commit another time."""
        for worker in self._busy.values():
            worker.kill()

    def close(self) -> None:
        """End the processes."""
        self.kill()
        for worker in (*self._idle, *self._busy.values()):
            worker.close()
        self._idle.clear()
        self._busy.clear()


class RayTasks:
    """Tasks of a Ray cluster. All nodes must see the sweep's folder, the recordings and the feature cache under the same paths."""

    own_process = False

    def __init__(self, cpus: float, retries: int) -> None:
        import ray

        from raydfl.cluster import on_the_cluster

        self._ray = ray
        # A node that is lost takes its tasks along: Ray gives them to another one, where the run goes on after its last commit.
        self._task = ray.remote(num_cpus=cpus, max_retries=retries)(do_run)
        self._running: dict[Any, str] = {}
        self.run_chunks: RunChunks | None = on_the_cluster

    def slots(self, config: Config, cpus: float) -> int:
        """What the cluster's CPUs and GPUs allow."""
        there: dict[str, float] = self._ray.cluster_resources()  # type: ignore[no-untyped-call]
        actors = 0.0 if config.ray.actors == 0 else float(config.ray.actors)
        room = there.get("CPU", 1.0) / (cpus + actors * config.ray.cpus)
        if actors and config.ray.gpu_share:
            room = min(room, there.get("GPU", 0.0) / (actors * config.ray.gpu_share))
        return max(1, int(room))

    def start(self, order: Order) -> None:
        """As a task."""
        self._running[self._task.remote(order)] = order.name

    def wait(self, seconds: float) -> Iterable[tuple[str, Ended | None]]:
        """Whatever has ended."""
        ready, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=seconds)
        ended: list[tuple[str, Ended | None]] = []
        for reference in ready:
            name = self._running.pop(reference)
            try:
                ended.append((name, self._ray.get(reference)))
            except self._ray.exceptions.RayError:  # Ray has tried it again as often as it may
                ended.append((name, None))
        return ended

    def kill(self) -> None:
        """Cancel the tasks."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave nothing behind in the cluster."""
        self.kill()
        self._running.clear()
