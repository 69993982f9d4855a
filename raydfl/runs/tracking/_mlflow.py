"""The mirror of a run in MLflow: parameters, the server's and pooled metrics by round, artifacts.

The truth of a run is its directory; MLflow gets a copy. When its store fails in the middle of a run, the run goes on,
and the copy is completed from the Parquet rows as soon as the store answers again, at the end, or when the run is
resumed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from raydfl.core.errors import InputError, first_line
from raydfl.core.lock import locked
from raydfl.engine import TrackSettings, hide_passwords
from raydfl.engine.storage import MetricRow, read_rows, to_rows
from raydfl.runs.tracking._tracker import KEY_LENGTH, SERVER, WORK, Status, Tracker, metric_name

if TYPE_CHECKING:
    from mlflow import MlflowClient


MIRRORED = "raydfl.mirrored_round"
"""The MLflow tag that holds the last round whose metrics are in MLflow."""

_METRICS_PER_CALL = 1000  # MLflow's limits for one log_batch
_PARAMS_PER_CALL = 100
_PARAM_LENGTH = 6000
_PROBE_SECONDS = 5.0
_RETRY_SECONDS = 60.0  # a store that failed is left alone for so long: each try may block the run until its timeout


class MlflowTracker(Tracker):
    """Mirrors one run in MLflow. Use it in one process only: the driver.

    ``start`` raises when the store cannot be used: nothing is lost yet. After that no method raises because of MLflow:
    the first failure is told by ``warn``, and what is missing follows later from the run's Parquet rows.

    Args:
        settings: where to.
        runs_dir: the folder of all runs, for the default store.
        run_dir: this run's folder, to catch up from its rows.
        warn: told in one sentence when the store fails, and when it answers again.
    """

    def __init__(
        self, settings: TrackSettings, runs_dir: Path, run_dir: Path, warn: Callable[[str], None] | None = None
    ) -> None:
        self._settings = settings
        self._runs_dir = runs_dir.resolve()
        self._run_dir = run_dir
        self._warn = warn or logging.getLogger(__name__).warning
        self._uri = settings.uri or f"sqlite:///{self._runs_dir}/mlflow.db"
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._work = WORK
        self._mirrored = -1  # the last round that is in MLflow as a whole; -1: none
        self._behind = False  # whether MLflow may lack, or hold a part of, rounds after that one
        self._artifacts: list[Path] = []  # those that could not be stored yet
        self._failed_at = -math.inf
        self._warned = False

    @property
    def uri(self) -> str:
        """The address at which the run is mirrored, without a password: for messages and ``mlflow ui --backend-store-uri``."""
        return hide_passwords(self._uri)

    def start(
        self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None = None
    ) -> str:
        """Create the run, or go on with an earlier one, whose missing rounds are then mirrored from the rows on the disk.

        Args:
            run_name: shown in MLflow.
            params: flat, ``"train.rounds" -> 200``. Those that an earlier start stored are kept as they are.
            tags: any.
            run_id: of the run to go on with. When the store no longer has it, a new run is made and mirrored from round
                0.

        Returns:
            The run's id, to be kept for a later start.

        Raises:
            InputError: MLflow is not installed, or its store cannot be reached or used.
        """
        try:
            self._connect()
            self._open_run(run_name, tags, run_id)
            self._log_params(params)
        except Exception as error:
            raise self._unusable(error) from error
        if self._behind:
            self.log_rows(())
        return self._run_id

    def log_rows(self, rows: Iterable[MetricRow]) -> None:
        """Mirror the server's and pooled numbers of newly committed rounds; step = round.

        All rows of a round in one call: rows of rounds that are mirrored already are left out, as are those of clients
        and arrays.
        """
        self._behind = not self._tried(lambda: self._log([*self._backlog(), *rows] if self._behind else list(rows)))
        if self._warned and not self._behind:
            self._warned = False
            self._warn(f"MLflow at {self.uri} answers again; the mirror is complete up to round {self._mirrored}")

    def log_artifact(self, path: Path) -> None:
        """Keep a copy of a file, or of a folder's contents under the folder's name.

        Raises:
            FileNotFoundError: there is no such file or folder.
        """
        if not path.exists():
            raise FileNotFoundError(path)
        self._artifacts.append(path)
        self._tried(self._send_artifacts)

    def finish(self, status: Status) -> None:
        """Complete the mirror and close the run in MLflow. The run may be started again later."""
        self._failed_at = -math.inf  # the last chance: do not wait
        if self._behind:
            self.log_rows(())
        self._tried(self._send_artifacts)
        self._tried(lambda: self._connected().set_terminated(self._run_id, status))
        lacking = [f"rounds after {self._mirrored}"] if self._behind else []
        lacking += [str(path) for path in self._artifacts]
        if lacking:
            self._warn(
                f"the MLflow run {self._run_id} at {self.uri} lacks {', '.join(lacking)}; they are in {self._run_dir}"
            )

    # -- the store ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._uri.startswith(("http://", "https://")):
            _probe(self._uri)
        # MLflow reports its use over the network unless told not to; what is trained here is nobody else's business.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # A round must not wait for minutes (the default is 7 retries of 120 s) for a store that is down.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # the output may be JSON for a machine
        from mlflow import MlflowClient

        for name in ("alembic", "mlflow.store.db.utils"):  # they narrate the creation of every table
            logging.getLogger(name).setLevel(logging.WARNING)
        lock: AbstractContextManager[None] = contextlib.nullcontext()
        if self._settings.uri is None:  # two runs that start at once must not both make the tables of the default store
            self._runs_dir.mkdir(parents=True, exist_ok=True)
            lock = locked(self._runs_dir / ".mlflow.lock")
        with lock:
            client = MlflowClient(tracking_uri=self._uri)
            client.search_experiments(max_results=1)  # makes the tables of a new database
        self._client = client

    def _experiment(self, client: MlflowClient) -> str:
        name = self._settings.experiment
        found = client.get_experiment_by_name(name)
        if found is None:
            # A server knows where artifacts go. For a database MLflow would take the working directory, which a job
            # loses.
            server = self._uri.startswith(("http://", "https://", "databricks"))
            place = None if server else (self._runs_dir / "mlflow-artifacts").as_uri()
            try:
                return client.create_experiment(name, artifact_location=place)
            except Exception:
                found = client.get_experiment_by_name(name)  # another run was faster
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise InputError(
                f"the MLflow experiment {name!r} is deleted in {self.uri}; restore it, or set track.experiment to another name"
            )
        return str(found.experiment_id)

    def _open_run(self, run_name: str, tags: Mapping[str, str], run_id: str | None) -> None:
        client = self._connected()
        earlier = self._find_run(run_id) if run_id else None
        if earlier is not None:
            self._run_id = earlier.info.run_id
            self._mirrored = int(earlier.data.tags.get(MIRRORED, -1))
            if any(name.startswith(f"{SERVER}/") for name in earlier.data.metrics):
                self._work = SERVER  # an earlier version began it: its curves go on under their names
            self._behind = True
            client.update_run(self._run_id, status="RUNNING")
            for key, value in tags.items():
                client.set_tag(self._run_id, key, value)
            return
        if run_id:
            self._warn(
                f"MLflow at {self.uri} no longer has the run {run_id}; a new one is made and filled from the record"
            )
            self._behind = True
        below = {"mlflow.parentRunId": self._settings.parent} if self._settings.parent else {}
        run = client.create_run(self._experiment(client), run_name=run_name, tags={**tags, **below})
        self._run_id = run.info.run_id

    def _find_run(self, run_id: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            run = self._connected().get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        client = self._connected()
        stored = client.get_run(self._run_id).data.params
        fresh = []
        for key, value in params.items():
            name = re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)[:KEY_LENGTH]
            if name not in stored:
                fresh.append(Param(name, hide_passwords(str(value))[:_PARAM_LENGTH]))
        for start in range(0, len(fresh), _PARAMS_PER_CALL):
            client.log_batch(self._run_id, params=fresh[start : start + _PARAMS_PER_CALL])

    def _log(self, rows: Sequence[MetricRow]) -> None:
        """Send rows of rounds that are not mirrored, one that stands there twice once; then remember the last round."""
        from mlflow.entities import Metric

        client = self._connected()
        now = int(time.time() * 1000)
        fresh = [row for row in rows if row.round > self._mirrored]
        pooled = [(metric_name(row, self._work), row) for row in fresh if not row.client and row.array is None]
        numbers = {(name, row.round): Metric(name, row.value, now, row.round) for name, row in pooled}
        metrics = list(numbers.values())
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_PER_CALL])
        if fresh:
            # After the metrics: after a crash before this line their rounds are sent again, the same numbers at the same steps.
            last = max(row.round for row in fresh)
            client.set_tag(self._run_id, MIRRORED, str(last))
            self._mirrored = last

    def _backlog(self) -> list[MetricRow]:
        """Return the server's and pooled rows on the disk of rounds that are not mirrored."""
        where = (pc.field("client") == "") & (pc.field("round") > self._mirrored)
        return to_rows(read_rows(self._run_dir, where=where))

    def _send_artifacts(self) -> None:
        while self._artifacts:
            path = self._artifacts[0]
            if path.is_dir():
                self._connected().log_artifacts(self._run_id, str(path), artifact_path=path.name)
            else:
                self._connected().log_artifact(self._run_id, str(path))
            self._artifacts.pop(0)

    # -- failures ----------------------------------------------------------------------------------------------------

    def _connected(self) -> MlflowClient:
        if self._client is None:
            raise RuntimeError("call start() first")
        return self._client

    def _tried(self, do: Callable[[], object]) -> bool:
        """Do something with the store, unless that has failed a moment ago; return whether it is done."""
        if time.monotonic() - self._failed_at < _RETRY_SECONDS:
            return False
        try:
            do()
        except Exception as error:  # noqa: BLE001  (whatever it is, a run must not end because of its mirror)
            self._failed(error)
            return False
        return True

    def _failed(self, error: Exception) -> None:
        self._behind = True
        self._failed_at = time.monotonic()
        if not self._warned:
            self._warned = True
            self._warn(
                f"MLflow at {self.uri} failed ({_said(error)}); the run goes on, "
                f"and what is missing there follows from {self._run_dir / 'rows'} when MLflow answers again or the run is resumed"
            )

    def _unusable(self, error: Exception) -> InputError:
        if isinstance(error, InputError):
            return error
        if isinstance(error, ModuleNotFoundError):
            return InputError(
                f"track.mlflow is true, but the package {error.name!r} is missing; install mlflow, or set track.mlflow=false"
            )
        return InputError(
            f"MLflow at {self.uri} cannot be used: {_said(error)}; start the server or correct track.uri, "
            f"or set track.mlflow=false to train without it"
        )


def _said(error: Exception) -> str:
    return hide_passwords(first_line(error))[:200]


def _probe(uri: str) -> None:
    """Check quickly that a server is there at all, since MLflow's own client tries for minutes.

    Raises:
        OSError: nothing answers.
    """
    host = re.sub(r"(?<=://)[^/@\s]+@", "", uri).rstrip("/")
    try:
        with urllib.request.urlopen(f"{host}/health", timeout=_PROBE_SECONDS):  # noqa: S310  (http or https, checked by the caller)
            pass
    except urllib.error.HTTPError:
        pass  # something answers; whether it is MLflow, its client will say
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise OSError(f"no server answers there ({reason})") from error
