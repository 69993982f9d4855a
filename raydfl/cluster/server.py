"""ServerActor: a Ray actor that holds the federation's state, aggregates, and restarts from the last commit."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from raydfl.cluster.client import start_client_actor
from raydfl.cluster.faults import StragglerPolicy
from raydfl.cluster.gpu import hide_gpus
from raydfl.cluster.job import check_visible
from raydfl.cluster.metrics import RayMetrics
from raydfl.cluster.pool import RayPool
from raydfl.cluster.sites import workers_here
from raydfl.core.errors import RaydflError
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.pool import Pool, SerialPool
from raydfl.engine.storage.folder import stored_about
from raydfl.engine.storage.mirror import mirror_of
from raydfl.engine.storage.store import RunStore
from raydfl.engine.telemetry import RoundReport


class ServerRewoundError(RaydflError):
    """A server was asked for what follows a round at which it does not stand."""


class Server:
    """A federation opened on a run directory: in a ServerActor with client actors, or in this process with none."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """Locks the directory, starts the pool and opens the newest commit.

        Raises:
            RunDirectoryError: the directory is in use, or no commit of it is whole.
            ResourcesError: the client actors cannot be started.
        """
        check_visible(run_dir)
        store = RunStore(run_dir, config.run.keep)
        with contextlib.ExitStack() as opened:
            store.lock()
            opened.callback(store.unlock)
            population = Population.load(run_dir / "population", verify=True)
            site_key = stored_about(run_dir).get("site_key", "")
            pool: Pool
            if config.ray.actors == 0:
                pool = SerialPool(workers_here(run_dir, config, population, site_key))
            else:
                start = functools.partial(start_client_actor, run_dir, config, site_key)
                pool = RayPool(start, config.ray, StragglerPolicy.of(config), [site.name for site in population.sites])
            opened.callback(pool.close)
            self._federation = Federation(config, population, store, pool)
            opened.callback(self._federation.close)
            mirror = mirror_of(config.run.dir, run_dir)
            if mirror is not None:
                self._federation.copy_to(mirror)
            self._opened = opened.pop_all()
            self._failed: Exception | None = None

    @contextlib.contextmanager
    def _sound(self) -> Iterator[Federation]:
        """The federation, as long as nothing has failed: after that it may be in the midst of a round, which must not count.

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
        """Rounds completed."""
        with self._sound() as federation:
            return federation.state.round_index

    @property
    def warnings(self) -> list[str]:
        """What was found damaged and passed over when the directory was opened."""
        return self._federation.warnings

    def round(self) -> RoundReport:
        """Federation.round. One that fails may be asked for again, where it is not :meth:`rounds` that the server is asked for."""
        return self._federation.round()

    def rounds(self, until: int, seconds: float) -> list[RoundReport]:
        """At least one round, and more as long as they fit into some time.

        Args:
            until: rounds completed at which to stop in any case.
            seconds: for all of them together.

        Raises:
            Exception: as Federation.round, of the first round; where a later one fails, those before it are returned, and whatever
                is asked for next raises.
        """
        started = time.perf_counter()
        reports: list[RoundReport] = []
        while True:
            try:
                with self._sound() as federation:
                    reports.append(federation.round())
            except Exception:
                if not reports:
                    raise
                return reports
            taken = time.perf_counter() - started
            if reports[-1].round >= until or taken * (1 + 1 / len(reports)) > seconds:
                return reports

    def finish(self) -> RoundReport:
        """Commit what is not committed yet and wait until it is on the disk; the report holds the rows."""
        report = RoundReport(self.round_index)
        with self._sound() as federation:
            federation.finish(report)
        return report

    def close(self) -> None:
        """Let a commit under way end, end the pool and unlock the directory."""
        self._opened.close()


class ServerActor:
    """The server as an actor. Ray restarts it when its process is lost; it then goes on from the last commit."""

    def __init__(self, run_dir: str, config: Config) -> None:
        # What is raised here reaches the driver without its type, as the loss of an actor: all that may fail is left to _open.
        self._run_dir, self._config = Path(run_dir), config
        self._server: Server | None = None

    def _open(self) -> Server:
        if self._server is None:
            import torch

            hide_gpus()
            torch.set_num_threads(self._config.ray.threads)
            sys.setswitchinterval(5e-4)  # the thread that commits shall not keep clients waiting
            # A method of the user's own is called by its class alone: tags are seen by whoever reaches the node's metrics.
            self._metrics = RayMetrics(self._run_dir.name, self._config.method["name"].rpartition("/")[2])
            self._server = Server(self._run_dir, self._config)
        return self._server

    def open(self) -> tuple[int, list[str]]:
        """Rounds completed, and warnings about damaged commits."""
        server = self._open()
        return server.round_index, server.warnings

    def _at(self, round_index: int) -> Server:
        server = self._open()
        if server.round_index != round_index:
            raise ServerRewoundError(f"the server has completed {server.round_index} rounds, not {round_index}")
        return server

    def rounds(self, round_index: int, until: int, seconds: float) -> list[RoundReport]:
        """Server.rounds after ``round_index`` completed ones.

        Raises:
            ElsewhereError: this server stands elsewhere, because it was restarted from a commit.
        """
        reports = self._at(round_index).rounds(until, seconds)
        self._metrics.observe(reports)
        return reports

    def finish(self, round_index: int) -> RoundReport:
        """Server.finish, if this server has completed so many rounds.

        Raises:
            ElsewhereError: it stands elsewhere, because it was restarted from a commit.
        """
        server = self._at(round_index)
        self._metrics.flush()
        return server.finish()

    def close(self) -> None:
        """End the client actors and unlock the run directory."""
        if self._server is not None:
            self._server.close()
            self._server = None
