"""Tracker for MLflow: parameters, the server's and pooled metrics of each round, and artifacts.

The run's folder remains authoritative, and MLflow has a copy. If MLflow's store fails during a run, the run continues. The copy
is completed from the metrics table when the store answers again, at the end of the run, or when the run is resumed.
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
from raydfl.core.lock import hold_lock
from raydfl.engine import TrackSettings, hide_passwords
from raydfl.engine.storage import MetricRow, read_rows, to_rows
from raydfl.runs.tracking._tracker import KEY_LENGTH, SERVER, WORK, Status, Tracker, metric_name

if TYPE_CHECKING:
    from mlflow import MlflowClient


MIRRORED = "raydfl.mirrored_round"
"""MLflow tag with the last round copied to MLflow."""

_KIND = ("mlflow.experimentKind", "custom_model_development")
"""Tag of an experiment. Without it MLflow may open the view of traces of language models."""
_METRICS_PER_CALL = 1000  # MLflow's limits for a call of log_batch
_PARAMS_PER_CALL = 100
_PARAM_LENGTH = 6000
_PROBE_SECONDS = 5.0
_RETRY_SECONDS = 60.0  # pause after a failure, because each attempt may block the run until a timeout


class MlflowTracker(Tracker):
    """Tracker with a copy of a run in MLflow. Use it only in the driver's process.

    ``start`` raises an error if the store cannot be used. Later failures raise no error: the first failure is a warning, and the
    missing rounds are copied later from the metrics table.

    Args:
        settings: The section ``track`` of the configuration.
        runs_dir: The folder of all runs, for the default store.
        run_dir: This run's folder.
        warn: Receives a message when the store fails, and when it answers again. Defaults to a logger's warning.
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
        self._mirrored = -1  # the last round that MLflow has completely
        self._behind = False  # whether MLflow may lack rounds after _mirrored
        self._artifacts: list[Path] = []  # artifacts to be stored
        self._failed_at = -math.inf
        self._warned = False

    @property
    def uri(self) -> str:
        """The store's URI without a password, for messages and ``mlflow ui --backend-store-uri``."""
        return hide_passwords(self._uri)

    def start(
        self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None = None
    ) -> str:
        """Create a run in MLflow, or continue an earlier run and copy its missing rounds.

        Args:
            run_name: Displayed name in MLflow.
            params: Flat mapping, such as ``"train.rounds" -> 200``. Parameters of an earlier start keep their values.
            tags: Any further facts about the run.
            run_id: Id of an earlier run. If the store has lost it, a new run is created and filled from round 0.

        Returns:
            The run's id in MLflow, for a later start.

        Raises:
            InputError: MLflow is not installed, or its store cannot be used.
        """
        try:
            self._connect()
            self._open_run(run_name, tags, run_id)
            self._log_params(params)
        except Exception as error:
            raise self._to_input_error(error) from error
        if self._behind:
            self.log_rows(())
        return self._run_id

    def log_rows(self, rows: Iterable[MetricRow]) -> None:
        """Copy the server's and pooled metrics of newly committed rounds. The step is the round.

        Each call must receive whole rounds. Clients' rows, arrays and rounds copied before are skipped.
        """
        self._behind = not self._try(lambda: self._log([*self._read_backlog(), *rows] if self._behind else list(rows)))
        if self._warned and not self._behind:
            self._warned = False
            self._warn(f"MLflow at {self.uri} answers again and has all rounds up to round {self._mirrored}.")

    def log_artifact(self, path: Path) -> None:
        """Store a copy of a file, or of a folder's contents under the folder's name.

        Raises:
            FileNotFoundError: ``path`` does not exist.
        """
        if not path.exists():
            raise FileNotFoundError(path)
        self._artifacts.append(path)
        self._try(self._send_artifacts)

    def finish(self, status: Status) -> None:
        """Copy missing rounds and artifacts, and close the run in MLflow. A resumed run opens it again."""
        self._failed_at = -math.inf  # This is the last attempt, so do not wait for _RETRY_SECONDS.
        if self._behind:
            self.log_rows(())
        self._try(self._send_artifacts)
        self._try(lambda: self._require_client().set_terminated(self._run_id, status))
        lacking = [f"rounds after {self._mirrored}"] if self._behind else []
        lacking += [str(path) for path in self._artifacts]
        if lacking:
            self._warn(
                f"The MLflow run {self._run_id} at {self.uri} lacks {', '.join(lacking)}. They are in {self._run_dir}."
            )

    # -- the store ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._uri.startswith(("http://", "https://")):
            _probe(self._uri)
        # MLflow sends usage data over the network by default.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # A round must not wait minutes for an unavailable store. The default is 7 retries of 120 s.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # The output may be JSON.
        from mlflow import MlflowClient

        for name in ("alembic", "mlflow.store.db.utils"):  # They log the creation of every table.
            logging.getLogger(name).setLevel(logging.WARNING)
        lock: AbstractContextManager[None] = contextlib.nullcontext()
        if self._settings.uri is None:  # Only one of several starting runs may create the default store's tables.
            self._runs_dir.mkdir(parents=True, exist_ok=True)
            lock = hold_lock(self._runs_dir / ".mlflow.lock")
        with lock:
            client = MlflowClient(tracking_uri=self._uri)
            client.search_experiments(max_results=1)  # creates the tables of a new database
        self._client = client

    def _find_experiment(self, client: MlflowClient) -> str:
        """Return the id of the configured experiment, creating it if necessary."""
        name = self._settings.experiment
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            # A server chooses the location of artifacts. With a database, MLflow would use the working directory, but a job
            # loses it.
            server = self._uri.startswith(("http://", "https://", "databricks"))
            location = None if server else (self._runs_dir / "mlflow-artifacts").as_uri()
            try:
                return client.create_experiment(name, artifact_location=location, tags=dict([_KIND]))
            except Exception:
                experiment = client.get_experiment_by_name(name)  # A concurrent run may have created it.
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            raise InputError(
                f"the MLflow experiment {name!r} is deleted in {self.uri}. Restore it, or set track.experiment to another name."
            )
        if _KIND[0] not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, *_KIND)
        return str(experiment.experiment_id)

    def _open_run(self, run_name: str, tags: Mapping[str, str], run_id: str | None) -> None:
        client = self._require_client()
        earlier = self._find_run(run_id) if run_id else None
        if earlier is not None:
            self._run_id = earlier.info.run_id
            self._mirrored = int(earlier.data.tags.get(MIRRORED, -1))
            if any(name.startswith(f"{SERVER}/") for name in earlier.data.metrics):
                self._work = SERVER  # Curves of a run started by an earlier version keep their names.
            self._behind = True
            client.update_run(self._run_id, status="RUNNING")
            for key, value in tags.items():
                client.set_tag(self._run_id, key, value)
            return
        if run_id:
            self._warn(
                f"MLflow at {self.uri} no longer has the run {run_id}. A new run is created from {self._run_dir / 'rows'}."
            )
            self._behind = True
        parent = {"mlflow.parentRunId": self._settings.parent} if self._settings.parent else {}
        run = client.create_run(self._find_experiment(client), run_name=run_name, tags={**tags, **parent})
        self._run_id = run.info.run_id

    def _find_run(self, run_id: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            run = self._require_client().get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        client = self._require_client()
        stored = client.get_run(self._run_id).data.params
        new = []
        for key, value in params.items():
            name = re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)[:KEY_LENGTH]
            if name not in stored:
                new.append(Param(name, hide_passwords(str(value))[:_PARAM_LENGTH]))
        for start in range(0, len(new), _PARAMS_PER_CALL):
            client.log_batch(self._run_id, params=new[start : start + _PARAMS_PER_CALL])

    def _log(self, rows: Sequence[MetricRow]) -> None:
        """Upload the rows of new rounds without duplicates, then store the last round as a tag."""
        from mlflow.entities import Metric

        client = self._require_client()
        now = int(time.time() * 1000)
        new = [row for row in rows if row.round > self._mirrored]
        pooled = [(metric_name(row, self._work), row) for row in new if not row.client and row.array is None]
        unique = {(name, row.round): Metric(name, row.value, now, row.round) for name, row in pooled}
        metrics = list(unique.values())
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_PER_CALL])
        if new:
            # The tag follows the metrics. After a crash in between, the same values are uploaded again at the same steps.
            last = max(row.round for row in new)
            client.set_tag(self._run_id, MIRRORED, str(last))
            self._mirrored = last

    def _read_backlog(self) -> list[MetricRow]:
        """Read the server's and pooled rows of rounds missing in MLflow from the disk."""
        where = (pc.field("client") == "") & (pc.field("round") > self._mirrored)
        return to_rows(read_rows(self._run_dir, where=where))

    def _send_artifacts(self) -> None:
        while self._artifacts:
            path = self._artifacts[0]
            if path.is_dir():
                self._require_client().log_artifacts(self._run_id, str(path), artifact_path=path.name)
            else:
                self._require_client().log_artifact(self._run_id, str(path))
            self._artifacts.pop(0)

    # -- failures ----------------------------------------------------------------------------------------------------

    def _require_client(self) -> MlflowClient:
        if self._client is None:
            raise RuntimeError("call start() first")
        return self._client

    def _try(self, call: Callable[[], object]) -> bool:
        """Call a function of the store, unless the store failed within ``_RETRY_SECONDS``. Return whether the call succeeded."""
        if time.monotonic() - self._failed_at < _RETRY_SECONDS:
            return False
        try:
            call()
        except Exception as error:  # noqa: BLE001  (no failure of the store may end the run)
            self._handle_failure(error)
            return False
        return True

    def _handle_failure(self, error: Exception) -> None:
        self._behind = True
        self._failed_at = time.monotonic()
        if not self._warned:
            self._warned = True
            self._warn(
                f"MLflow at {self.uri} failed ({_describe_error(error)}). The run continues. Missing rounds are copied from "
                f"{self._run_dir / 'rows'} when MLflow answers again or the run is resumed."
            )

    def _to_input_error(self, error: Exception) -> InputError:
        if isinstance(error, InputError):
            return error
        if isinstance(error, ModuleNotFoundError):
            return InputError(
                f"track.mlflow is true, but the package {error.name!r} is missing. Install mlflow, or set track.mlflow=false."
            )
        return InputError(
            f"MLflow at {self.uri} cannot be used: {_describe_error(error)}. Start the server or correct track.uri, "
            f"or set track.mlflow=false to train without it."
        )


def _describe_error(error: Exception) -> str:
    return hide_passwords(first_line(error))[:200]


def _probe(uri: str) -> None:
    """Check within seconds that a server answers, because MLflow's client retries for minutes.

    Raises:
        OSError: No server answers.
    """
    host = re.sub(r"(?<=://)[^/@\s]+@", "", uri).rstrip("/")
    try:
        with urllib.request.urlopen(f"{host}/health", timeout=_PROBE_SECONDS):  # noqa: S310  (http or https, checked by the caller)
            pass
    except urllib.error.HTTPError:
        pass  # A server answers. MLflow's client checks that it is MLflow.
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise OSError(f"no server answers ({reason})") from error
