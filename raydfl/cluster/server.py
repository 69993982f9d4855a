"""The server: it holds the federation's state, aggregates and commits. It runs in this process or as an actor.

:class:`Server` and :class:`RemoteServer` have a common interface for the driver: open, rounds, finish, close. The actor restarts
from the last commit after a loss.
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
from ray.util.placement_group import PlacementGroup, get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydfl.cluster.certificates import warn_without_tls
from raydfl.cluster.client import define_actor, start_client_actor
from raydfl.cluster.faults import LOST, StragglerPolicy, explain_end, unwrap_error
from raydfl.cluster.gpu import hide_gpus
from raydfl.cluster.idle import IdleActors, keep_server, take_server
from raydfl.cluster.job import check_visible
from raydfl.cluster.metrics import RayMetrics
from raydfl.cluster.nodes import NodeWatch, SuitableNodes
from raydfl.cluster.pool import RayPool
from raydfl.cluster.queue import queue_actors
from raydfl.cluster.resources import run_actor_kinds
from raydfl.cluster.run_files import RunFiles, share_files
from raydfl.cluster.site_record import HeadKeeper
from raydfl.cluster.sites import open_serial_pool
from raydfl.cluster.use import NodeUse
from raydfl.core.errors import ResourcesError
from raydfl.core.memory import keep_freed_memory
from raydfl.data import Population
from raydfl.engine import Config, Federation, Pool, RoundReport
from raydfl.engine.storage import RunStore, mirror_of, private_uri

_CALL_S = 0.6
"""Time limit in seconds for the rounds of a call to the server actor. A request to stop waits for the end of the call."""


class Server:
    """A federation opened on a run directory, in a ServerActor with client actors or in this process without actors."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        group: PlacementGroup | None = None,
        files: RunFiles | None = None,
        idle: IdleActors | None = None,
    ) -> None:
        """Lock the directory, start the pool and open the newest commit.

        Args:
            run_dir: Folder of the run.
            config: Configuration of the run.
            group: Placement group with reserved bundles for client actors.
            files: Location of the run's files for client actors; ``None``: they see the run's folder.
            idle: Client actors of the last run in this process, or ``None``.

        Raises:
            RunDirectoryError: The directory is in use, or has no intact commit.
            ResourcesError: The client actors cannot be started.
        """
        self._failed: Exception | None = None
        self._keeps_actors = False
        check_visible(run_dir)
        at_sites = bool(config.data.sites)
        uploads = "" if at_sites or config.ray.actors == 0 else private_uri(config.run.dir, run_dir)
        store = RunStore(run_dir, config.run.keep, not at_sites, uploads)
        with contextlib.ExitStack() as opened:
            store.lock()
            opened.callback(store.unlock)
            population = Population.load(run_dir / "population", verify=True)
            nodes = None if files is None else SuitableNodes(files, run_dir)
            start = functools.partial(start_client_actor, run_dir, config, population, group, nodes, idle=idle)
            pool: Pool = (
                open_serial_pool(run_dir, config, population)
                if config.ray.actors == 0
                else RayPool(start, config.ray, StragglerPolicy.from_config(config), population.places, nodes)
            )
            self._pool, self._idle = pool, idle
            opened.callback(self._close_pool)
            self._federation = Federation(config, population, store, HeadKeeper(pool, run_dir) if at_sites else pool)
            opened.callback(self._federation.close)
            mirror = mirror_of(config.run.dir, run_dir)
            if mirror is not None:
                self._federation.copy_to(mirror)
            self._opened = opened.pop_all()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[Federation]:
        """Provide the federation until a first failure, because a failed round may leave an inconsistent state.

        Raises:
            Exception: The first error inside the context, on every later use too.
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
        """Number of completed rounds."""
        with self._guard() as federation:
            return federation.state.round_index

    def open(self) -> tuple[int, list[str], str]:
        """Return the number of completed rounds, messages to the user, and the reason of ``run.stop`` or ""."""
        federation, done = self._federation, self.round_index
        resuming = f"; resuming from round {done}" * bool(done)
        return (
            done,
            [*federation.notes, *(f"warning: {text}{resuming}" for text in federation.warnings)],
            federation.stopped,
        )

    def cpu_fallback(self) -> str:
        """Return the number of actors on the CPU despite a share of a GPU, with a reason; "" without such actors."""
        reasons = self._pool.fallbacks() if isinstance(self._pool, RayPool) else []
        return f"client actors on the CPU: {len(reasons)}; {reasons[0]}" if reasons else ""

    def use(self) -> dict[str, NodeUse]:
        """Return the use of nodes by client actors since the start, by type of node."""
        return self._pool.use() if isinstance(self._pool, RayPool) else {}

    def round(self) -> RoundReport:
        """Compute a round. The caller may repeat a failed round, unless it uses :meth:`rounds`."""
        return self._federation.round()

    def rounds(self, round_index: int, until: int, seconds: float = 0.0) -> list[RoundReport] | None:
        """Compute at least one round, and more rounds while they fit into a time limit.

        Args:
            round_index: Completed rounds according to the caller.
            until: Stop after this number of completed rounds.
            seconds: Time limit for all rounds together.

        Returns:
            Reports of the rounds. ``None`` if ``round_index`` is wrong, because this server was restarted from a commit.

        Raises:
            Exception: The first round failed. If a later round fails, earlier reports are returned and the next call raises.
        """
        if self.round_index != round_index:
            return None
        started = time.perf_counter()
        reports: list[RoundReport] = []
        while True:
            try:
                with self._guard() as federation:
                    reports.append(federation.round(ahead=True))
            except Exception:
                if not reports:
                    raise
                return reports
            elapsed = time.perf_counter() - started
            if reports[-1].round >= until or reports[-1].stopped or elapsed * (1 + 1 / len(reports)) > seconds:
                return reports

    def finish(self, round_index: int | None = None) -> RoundReport | None:
        """Commit all uncommitted rounds and wait until the commit is on the disk.

        Args:
            round_index: Completed rounds according to the caller; ``None``: any number.

        Returns:
            A report with the rows. ``None`` if ``round_index`` is wrong, because this server was restarted from a commit.
        """
        report = RoundReport(self.round_index)
        if round_index not in (None, report.round):
            return None
        with self._guard() as federation:
            federation.finish(report)
        return report

    def close(self, keep_actors: bool = False) -> None:
        """Wait for a running commit, close the pool and unlock the directory.

        Args:
            keep_actors: Keep the client actors among the idle actors.
        """
        self._keeps_actors = keep_actors
        self._opened.close()

    def _close_pool(self) -> None:
        if isinstance(self._pool, RayPool):
            self._pool.close(self._idle if self._keeps_actors else None)
        else:
            self._pool.close()


class ServerActor:
    """A Server in an actor, for one run after another. Ray restarts a lost actor without a run, and the driver opens it again."""

    # Ray reports an error of a constructor as a lost actor, without its type. So open() does all work that may fail.
    def __init__(self) -> None:
        self._server: Server | None = None
        self._idle = IdleActors()

    def open(
        self, run_dir: str, config: Config, group: PlacementGroup | None = None, files: RunFiles | None = None
    ) -> tuple[int, list[str], str]:
        """Open the run if necessary, and return the server's state. See :class:`Server`."""
        if self._server is None:
            import torch

            hide_gpus()
            keep_freed_memory()
            torch.set_num_threads(config.ray.threads)
            sys.setswitchinterval(5e-4)  # The committing thread must not delay clients.
            # Without the path of a user's method, because everyone on the network can read the node's metrics.
            self._metrics = RayMetrics(Path(run_dir).name, config.method["name"].rpartition("/")[2])
            self._idle.prepare(config.ray)
            self._server = Server(Path(run_dir), config, group, files, self._idle)
        return self._server.open()

    def is_idle(self) -> bool:
        """Return whether the actor has no run."""
        return self._server is None

    def cpu_fallback(self) -> str:
        """Return the number of actors on the CPU despite a share of a GPU, with a reason."""
        return "" if self._server is None else self._server.cpu_fallback()

    def use(self) -> dict[str, NodeUse]:
        """Return the use of nodes by client actors since the start, by type of node."""
        return {} if self._server is None else self._server.use()

    def rounds(self, round_index: int, until: int, seconds: float) -> list[RoundReport] | None:
        """Compute rounds, and add them to Ray's metrics. ``None``: this actor was restarted, or see :meth:`Server.rounds`."""
        if self._server is None:
            return None
        reports = self._server.rounds(round_index, until, seconds)
        self._metrics.observe(reports or [])
        return reports

    def finish(self, round_index: int) -> RoundReport | None:
        """Commit all uncommitted rounds, and update Ray's metrics. ``None``: this actor was restarted."""
        if self._server is None:
            return None
        self._metrics.flush()
        return self._server.finish(round_index)

    def close(self, keep_actors: bool = False) -> None:
        """End the client actors, or keep them for the next run, and unlock the run directory."""
        if self._server is not None:
            self._server.close(keep_actors)
            self._server = None


class _ServerLostError(Exception):
    """The server was lost during a call. Ray restarts it."""


class RemoteServer:
    """The server as an actor, across restarts, with the interface of :class:`Server`.

    Args:
        run_dir: Folder of the run.
        config: Configuration of the run.
        clients: Number of clients.
        tell: Shows a message.
        lend: Use the idle actors of the last run in this process, and keep the actors of this run for the next.
    """

    _RESTARTS = 10

    def __init__(
        self, run_dir: Path, config: Config, clients: int, tell: Callable[[str], None], lend: bool = False
    ) -> None:
        self._tell = tell
        kinds = run_actor_kinds(config, clients)
        define_actor(config.ray, "", kinds[0])  # Rejects wrong options before the server starts.
        files = share_files(run_dir, config, tell)
        if config.data.sites and (warning := warn_without_tls(config)):
            tell(warning)
        needed = min(config.ray.min_actors or len(kinds), len(kinds))
        self._group = queue_actors(config, kinds[:needed], tell)
        self._watch = NodeWatch(kinds, needed, tell)
        if config.ray.autoscale:
            self._watch.announce_wait(config.ray.ready_timeout)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_restarts": self._RESTARTS, "max_task_retries": 0}
        # On the driver's node, because a node of Ray's choice may leave. Not soft: Ray ignores soft affinity of actors without
        # resources, and without the driver's node the run cannot continue anyway.
        # A strategy would move the server and its actors out of a trial's placement group, which already contains the server.
        if get_current_placement_group() is None:
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        self._run = str(run_dir), config, self._group, files
        # A group is of this run alone, so the actors in it cannot stay.
        self._lend, self._failed = lend and self._group is None, False
        self._actor: Any = (take_server() if self._lend else None) or ray.remote(ServerActor).options(
            **options
        ).remote()
        self._timeout = config.ray.ready_timeout
        self._lost_since: float | None = None
        """Time of the first failed call since the last answer (time.monotonic)."""
        self._has_told = False

    def _get(self, reference: Any) -> Any:
        """Return the result of a call to the server, or raise its error.

        Raises:
            _ServerLostError: The server was lost during the call.
        """
        while not ray.wait([reference], timeout=1.0)[0]:
            self._watch.report_changes()
        self._watch.report_changes()
        try:
            answer = ray.get(reference)
            self._lost_since = None
            return answer
        except RayTaskError as error:  # Before LOST: an error about a lost actor inside the server has both types.
            self._failed = True
            raise unwrap_error(error) from error
        except LOST as error:
            self._note_loss(error)
            raise _ServerLostError from error
        except RayError as error:  # For example a failed runtime environment or a lost node.
            raise ResourcesError(
                f"the server actor cannot be reached: {type(error).__name__}: {explain_end(error)}. Check its node, then resume "
                f"the run."
            ) from error

    def open(self) -> tuple[int, list[str], str]:
        """Open the server and return its state, waiting for a restart after a loss."""
        while True:
            with contextlib.suppress(_ServerLostError):
                state: tuple[int, list[str], str] = self._get(self._actor.open.remote(*self._run))
                return state

    def cpu_fallback(self) -> str:
        """Return the number of actors on the CPU despite a share of a GPU, with a reason."""
        while True:
            with contextlib.suppress(_ServerLostError):
                reason: str = self._get(self._actor.cpu_fallback.remote())
                return reason

    def use(self) -> dict[str, NodeUse]:
        """Return the use of nodes by client actors since the server's start, by type of node. Empty after a loss."""
        use: dict[str, NodeUse] | None = self._answer(self._actor.use.remote())
        return use or {}

    def rounds(self, round_index: int, until: int) -> list[RoundReport] | None:
        """Compute a round, or several short rounds. ``None`` if a lost server was restarted from an earlier round."""
        reports: list[RoundReport] | None = self._answer(self._actor.rounds.remote(round_index, until, _CALL_S))
        return reports

    def finish(self, round_index: int) -> RoundReport | None:
        """Commit everything up to this round. ``None`` if a lost server was restarted from an earlier round."""
        report: RoundReport | None = self._answer(self._actor.finish.remote(round_index))
        return report

    def _answer(self, reference: Any) -> Any:
        """Return the result of a call, or ``None`` if the server was lost."""
        try:
            return self._get(reference)
        except _ServerLostError:
            return None

    def _note_loss(self, error: Exception) -> None:
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if getattr(error, "actor_init_failed", False):
            raise ResourcesError(
                f"the server actor cannot start: {explain_end(error)}. Check that every node has the same raydfl and the modules "
                f"of the run."
            ) from error
        if (
            now > self._lost_since + self._timeout or "ActorDied" in type(error).__name__
        ):  # A busy node restarts it late.
            raise ResourcesError(
                f"the server actor was lost and could not be restarted: {type(error).__name__}: {explain_end(error)}. Check the "
                f"node's memory, then resume the run."
            ) from error
        if not self._has_told:
            self._has_told = True
            self._tell("The server was lost. It restarts from the last commit.")
        time.sleep(0.5)

    def close(self) -> None:
        """End the server and its client actors, or keep them for the next run of this process."""
        keep = self._lend and not self._failed
        with contextlib.suppress(*LOST, GetTimeoutError, RayTaskError):
            ray.get(self._actor.close.remote(keep), timeout=20)
            if keep:
                keep_server(self._actor)
                return
        ray.kill(self._actor)
        if self._group is not None:
            remove_placement_group(self._group)
