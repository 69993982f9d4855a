"""The server: holds the federation's state, aggregates, commits. In this process, or as an actor that restarts from its commits.

Whoever drives a run asks either for the same: open, rounds, finish, close (:class:`Server`, :class:`RemoteServer`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydfl.cluster.client import start_client_actor
from raydfl.cluster.faults import LOST, StragglerPolicy, task_cause, why_ended
from raydfl.cluster.gpu import hide_gpus
from raydfl.cluster.job import check_visible
from raydfl.cluster.metrics import RayMetrics
from raydfl.cluster.nodes import NodeWatch
from raydfl.cluster.pool import RayPool
from raydfl.cluster.resources import wanted_kinds
from raydfl.cluster.sites import open_serial_pool
from raydfl.core.errors import ResourcesError
from raydfl.core.memory import keep_freed_memory
from raydfl.data import Population
from raydfl.engine import Config, Federation, Pool, RoundReport
from raydfl.engine.storage import RunStore, mirror_of

_AT_ONCE = 0.6
"""Seconds of rounds that are asked for in one call: so much later may a run stop that is asked to."""


class Server:
    """A federation opened on a run directory: in a ServerActor with client actors, or in this process with none."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """Lock the directory, start the pool and open the newest commit.

        Raises:
            RunDirectoryError: the directory is in use, or no commit of it is whole.
            ResourcesError: the client actors cannot be started.
        """
        check_visible(run_dir)
        store = RunStore(run_dir, config.run.keep, private_here=not config.data.sites)
        with contextlib.ExitStack() as opened:
            store.lock()
            opened.callback(store.unlock)
            population = Population.load(run_dir / "population", verify=True)
            start = functools.partial(start_client_actor, run_dir, config, population)
            pool: Pool = (
                open_serial_pool(run_dir, config, population)
                if config.ray.actors == 0
                else RayPool(start, config.ray, StragglerPolicy.of(config), population.places)
            )
            opened.callback(pool.close)
            self._pool = pool
            self._federation = Federation(config, population, store, pool)
            opened.callback(self._federation.close)
            mirror = mirror_of(config.run.dir, run_dir)
            if mirror is not None:
                self._federation.copy_to(mirror)
            self._opened = opened.pop_all()
            self._failed: Exception | None = None

    @contextlib.contextmanager
    def _sound(self) -> Iterator[Federation]:
        """Give the federation, as long as nothing has failed: after that it may be in the midst of a round, which must not count.

        Raises:
            Exception: what has failed inside, now or before.
        """
        if self._failed is not None:
            raise self._failed
        try:
            yield self._federation
        except Exception as error:
            self._failed = error
            raise

    @property
    def round_index(self) -> int:
        """Return the rounds completed."""
        with self._sound() as federation:
            return federation.state.round_index

    def open(self) -> tuple[int, list[str], str]:
        """Return rounds completed, what was found damaged and passed over, and why ``run.stop`` has ended the training, if so."""
        return self.round_index, self._federation.warnings, self._federation.stopped

    def cpu_fallback(self) -> str:
        """Return the number of actors on the CPU despite a share of a GPU, with a reason; empty: none."""
        reasons = self._pool.fallbacks() if isinstance(self._pool, RayPool) else []
        return f"client actors on the CPU: {len(reasons)}; {reasons[0]}" if reasons else ""

    def round(self) -> RoundReport:
        """Do Federation.round. One that fails may be asked for again, where :meth:`rounds` is not what the server is asked for."""
        return self._federation.round()

    def rounds(self, round_index: int, until: int, seconds: float = 0.0) -> list[RoundReport] | None:
        """Do at least one round, and more as long as they fit into some time.

        Args:
            round_index: rounds that the caller knows to be completed.
            until: rounds completed at which to stop in any case.
            seconds: for all of them together.

        Returns:
            What they did; ``None``, if this server stands elsewhere, because it was restarted from a commit.

        Raises:
            Exception: as Federation.round, of the first round; where a later one fails, those before it are returned, and whatever
                is asked for next raises.
        """
        if self.round_index != round_index:
            return None
        started = time.perf_counter()
        reports: list[RoundReport] = []
        while True:
            try:
                with self._sound() as federation:
                    reports.append(federation.round(ahead=True))
            except Exception:
                if not reports:
                    raise
                return reports
            taken = time.perf_counter() - started
            if reports[-1].round >= until or reports[-1].stopped or taken * (1 + 1 / len(reports)) > seconds:
                return reports

    def finish(self, round_index: int | None = None) -> RoundReport | None:
        """Commit what is not committed yet and wait until it is on the disk.

        Args:
            round_index: rounds that the caller knows to be completed; ``None``: whatever they are.

        Returns:
            A report with the rows; ``None``, if this server stands elsewhere, because it was restarted from a commit.
        """
        report = RoundReport(self.round_index)
        if round_index not in (None, report.round):
            return None
        with self._sound() as federation:
            federation.finish(report)
        return report

    def close(self) -> None:
        """Let a commit under way end, end the pool and unlock the directory."""
        self._opened.close()


class ServerActor:
    """A Server in a process of its own. Ray restarts it when that is lost; it then goes on from the last commit."""

    def __init__(self, run_dir: str, config: Config) -> None:
        # What is raised here reaches the driver without its type, as the loss of an actor: all that may fail is left to _open.
        self._run_dir, self._config = Path(run_dir), config
        self._server: Server | None = None

    def _open(self) -> Server:
        if self._server is None:
            import torch

            hide_gpus()
            keep_freed_memory()
            torch.set_num_threads(self._config.ray.threads)
            sys.setswitchinterval(5e-4)  # the thread that commits shall not keep clients waiting
            # A method of the user's own is called by its class alone: tags are seen by whoever reaches the node's metrics.
            self._metrics = RayMetrics(self._run_dir.name, self._config.method["name"].rpartition("/")[2])
            self._server = Server(self._run_dir, self._config)
        return self._server

    def open(self) -> tuple[int, list[str], str]:
        """Do Server.open."""
        return self._open().open()

    def cpu_fallback(self) -> str:
        """Do Server.cpu_fallback."""
        return self._open().cpu_fallback()

    def rounds(self, round_index: int, until: int, seconds: float) -> list[RoundReport] | None:
        """Do Server.rounds, and tell Ray's metrics of them."""
        reports = self._open().rounds(round_index, until, seconds)
        self._metrics.observe(reports or [])
        return reports

    def finish(self, round_index: int) -> RoundReport | None:
        """Do Server.finish."""
        server = self._open()
        self._metrics.flush()
        return server.finish(round_index)

    def close(self) -> None:
        """End the client actors and unlock the run directory."""
        if self._server is not None:
            self._server.close()
            self._server = None


class _ServerLostError(Exception):
    """The server ended before it answered; Ray starts it again."""


class RemoteServer:
    """The server as an actor, followed over its restarts: what the driver's loop asks, as it asks :class:`Server`."""

    _RESTARTS = 10

    def __init__(self, run_dir: Path, config: Config, clients: int, tell: Callable[[str], None]) -> None:
        self._tell = tell
        kinds = wanted_kinds(config, clients)
        self._watch = NodeWatch(kinds, config.ray.min_actors or len(kinds), tell)
        if config.ray.autoscale:
            self._watch.waits(config.ray.ready_timeout)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_restarts": self._RESTARTS, "max_task_retries": 0}
        # Beside the driver, not on whatever node Ray picks, which may be one that leaves. Not a soft wish: those Ray overlooks for
        # an actor that reserves nothing. And without the driver's node there is no run that a server elsewhere could go on with.
        # A trial's placement group keeps the server by itself, and a strategy would take it, and all it starts, out of the group.
        if get_current_placement_group() is None:
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        actor = ray.remote(ServerActor).options(**options)
        self._actor: Any = actor.remote(str(run_dir), config)
        self._lost = 0

    def _get(self, reference: Any) -> Any:
        """Return the result of a call of the server, or raise its error.

        Raises:
            _ServerLostError: it was lost before it answered.
        """
        while not ray.wait([reference], timeout=1.0)[0]:
            self._watch.look()
        self._watch.look()
        try:
            return ray.get(reference)
        except RayTaskError as error:  # first: where its cause is a loss of something else, it is of both kinds
            raise task_cause(error) from error
        except LOST as error:
            self._note_loss(error)
            raise _ServerLostError from error
        except RayError as error:  # its environment cannot be made, its node has gone ...
            raise ResourcesError(
                f"the server actor cannot be reached: {type(error).__name__}: {why_ended(error)}; resume the run when it can"
            ) from error

    def open(self) -> tuple[int, list[str], str]:
        """Do Server.open; also after a restart, which may take a moment."""
        while True:
            with contextlib.suppress(_ServerLostError):
                stand: tuple[int, list[str], str] = self._get(self._actor.open.remote())
                return stand

    def cpu_fallback(self) -> str:
        """Do Server.cpu_fallback."""
        while True:
            with contextlib.suppress(_ServerLostError):
                reason: str = self._get(self._actor.cpu_fallback.remote())
                return reason

    def rounds(self, round_index: int, until: int) -> list[RoundReport] | None:
        """Do one more round, or several short ones; ``None`` when the server was lost and stands elsewhere now."""
        reports: list[RoundReport] | None = self._answer(self._actor.rounds.remote(round_index, until, _AT_ONCE))
        return reports

    def finish(self, round_index: int) -> RoundReport | None:
        """Commit everything up to this round; ``None`` when the server was lost and stands elsewhere now."""
        report: RoundReport | None = self._answer(self._actor.finish.remote(round_index))
        return report

    def _answer(self, reference: Any) -> Any:
        """Return what the server did; ``None``: see :meth:`rounds`."""
        try:
            return self._get(reference)
        except _ServerLostError:
            return None

    def _note_loss(self, error: Exception) -> None:
        self._lost += 1
        if getattr(error, "actor_init_failed", False):
            raise ResourcesError(
                f"the server actor cannot start: {why_ended(error)}; every node needs the same raydfl, and what the run's "
                f"files import"
            ) from error
        if self._lost > 5 * self._RESTARTS or "ActorDied" in type(error).__name__:
            raise ResourcesError(
                f"the server actor was lost and could not be restarted: {type(error).__name__}: {why_ended(error)}; "
                f"check memory, then resume the run"
            ) from error
        if self._lost == 1:
            self._tell("the server was lost; it is restarted from the last commit")
        time.sleep(0.5)

    def close(self) -> None:
        """End the server, its client actors with it."""
        with contextlib.suppress(*LOST, GetTimeoutError, RayTaskError):
            ray.get(self._actor.close.remote(), timeout=20)
        ray.kill(self._actor)
