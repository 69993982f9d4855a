"""Starting, resuming and replaying runs: what the command line, jobs and searches call."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import pyarrow.compute as pc
import ray
import safetensors.torch
from ray.exceptions import GetTimeoutError, RayTaskError

import raydfl
from raydfl import record
from raydfl.clients import Clients
from raydfl.config import Config, apply_overrides, make_config, parse_yaml, to_yaml
from raydfl.data.population import Population, build_population
from raydfl.errors import InputError, ResourcesError, RunDirectoryError
from raydfl.federation import Federation, RoundReport
from raydfl.files import write_durably
from raydfl.pool import LOST, SerialPool, check_resources, task_cause
from raydfl.progress import FinishSummary, Progress, RoundSummary
from raydfl.report import write_report
from raydfl.server import Server, ServerActor
from raydfl.store import PrivateStore, RunStore
from raydfl.tensors import FlatTensors
from raydfl.track import Tracker, make_tracker
from raydfl.types import Client, ModelSpec, State, Update
from raydfl.worker import Worker, build_models


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    run_dir: Path
    round: int
    """Rounds completed and committed."""
    finished: bool
    """Whether all configured rounds are done; else it was stopped and can be resumed."""
    scores: dict[str, float] = field(default_factory=dict)
    """The last evaluation, ``"test plugin/accuracy" -> 0.81``."""


def run(config: Config, progress: Progress | None = None) -> Outcome:
    """Start the configured run, or go on with it when its named folder already holds it.

    Raises:
        InputError: something about the configuration, the data, the folder or the cluster is not as it should be.
    """
    progress = progress or Progress("quiet")
    run_dir = create(config, progress)
    return execute(run_dir, config, progress)


def resume(run_dir: str | Path, overrides: Sequence[str] = (), progress: Progress | None = None) -> Outcome:
    """Go on with a run after its last commit.

    Args:
        overrides: settings that do not decide the numbers (``train.rounds``, ``ray.*``, ``run.commit_every``, ``track.*``).

    Raises:
        RunDirectoryError: there is no such run, or it is damaged, in use, or the overrides would make it another run.
    """
    run_dir = Path(run_dir)
    progress = progress or Progress("quiet")
    stored = stored_config(run_dir)
    config = make_config(apply_overrides(stored.model_dump(mode="json"), overrides), f"{run_dir}/config.yaml")
    _check_same(run_dir, stored, config)
    if overrides:
        _write_config(run_dir, config)
    return execute(run_dir, config, progress)


def stored_config(run_dir: Path) -> Config:
    """The configuration that a run directory holds.

    Raises:
        RunDirectoryError: it is no run directory, or the run never got as far as its first round.
    """
    if not run_dir.is_dir():
        raise RunDirectoryError(f"there is no run directory {run_dir}")
    path = run_dir / "config.yaml"
    if not path.exists() or not (run_dir / "run.json").exists():
        raise RunDirectoryError(
            f"{run_dir} is not a run directory, or the run was interrupted before it began (config.yaml or run.json is missing): "
            f"start it with raydfl run"
        )
    try:
        return make_config(parse_yaml(path.read_text(encoding="utf-8"), str(path)), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunDirectoryError(f"{path} cannot be read: {reason}; restore it from a copy") from error
    except InputError as error:
        raise RunDirectoryError(
            f"{path} is damaged, or what it names is gone: {error}; restore it from a copy, or start the run again in a new folder"
        ) from error


_ABOUT = ("id", "digest", "classes", "models", "clients")


def stored_about(run_dir: Path) -> dict[str, Any]:
    """What ``run.json`` says about a run.

    Raises:
        RunDirectoryError: the file is missing or damaged.
    """
    path = run_dir / "run.json"
    try:
        about = json.loads(path.read_bytes())
        missing = [key for key in _ABOUT if key not in about]
        if not isinstance(about, dict) or missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirectoryError(
            f"{path} is missing or damaged ({reason}); restore it from a copy, or start the run again in a new folder"
        ) from error
    return about


def create(config: Config, progress: Progress) -> Path:
    """The run's folder with configuration and population; an existing folder of the same configuration is left as it is.

    Raises:
        RunDirectoryError: the folder belongs to another configuration, or cannot be written.
    """
    name = (
        config.run.name
        or f"{_short(config.method['name'])}-{_short(config.data.name)}-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}"
    )
    run_dir = Path(config.run.dir) / name
    if (run_dir / "run.json").exists() and not _forget_unbegun(run_dir, config):
        stored_about(run_dir)
        _check_same(run_dir, stored_config(run_dir), config)
        _write_config(run_dir, config)
        return run_dir
    if RunStore(run_dir).commits():
        raise RunDirectoryError(
            f"{run_dir} holds rounds of a run, but its run.json is missing; restore it from a copy, give the new run another "
            f"run.name, or remove the folder"
        )
    population = build_population(config.data, config.run.seed, progress)
    config.train.cohort_size(len(population))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot make the run directory {run_dir}: {error.strerror}") from error
    for message in population.messages:
        progress.message(message)
    population.save(run_dir / "population")
    _write_config(run_dir, config)
    about = {
        "id": name,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "raydfl": raydfl.__version__,
        "digest": config.digest(),
        "method": config.method["name"],
        "data": config.data.name,
        "classes": list(population.classes),
        "models": _describe_models(config, Clients(population, config)),
        "clients": len(population),
        "skipped": [{"clip": clip, "reason": reason} for clip, reason in population.skipped],
    }
    write_durably(run_dir / "run.json", json.dumps(about, indent=2).encode())
    return run_dir


def _forget_unbegun(run_dir: Path, config: Config) -> bool:
    """Whether the folder held another configuration's run without a single completed round, which is then removed.

    A start that failed (too few CPUs, an option that the method refuses) must not stand in the way of the corrected one.
    """
    store = RunStore(run_dir)
    if any(store.rounds()) or stored_config(run_dir).digest() == config.digest():
        return False
    store.lock(wait=1.0)
    try:
        for name in ("run.json", "LATEST"):  # first what makes it a run
            (run_dir / name).unlink(missing_ok=True)
        for name in ("commits", "rows", "private", "population"):
            shutil.rmtree(run_dir / name, ignore_errors=True)
    finally:
        store.unlock()
    return True


def _describe_models(config: Config, clients: Clients) -> dict[str, list[dict[str, Any]]]:
    """For every model of the method, its architectures with options, number of parameters, and whether all of it is shared."""
    method = config.build_method()
    described: dict[str, dict[ModelSpec, dict[str, Any]]] = {}
    for client in clients.variants():
        for name, model in build_models(method, client, config.run.seed).items():
            spec = next(spec for spec in client.models if spec.name == name)
            described.setdefault(name, {})[spec] = {
                "architecture": spec.architecture,
                **dict(spec.options),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "shared": all(method.shared(f"{name}/{key}") for key in model.state_dict()),
            }
    return {name: list(kinds.values()) for name, kinds in described.items()}


def _short(name: str) -> str:
    return name.rpartition(":")[2].lower()


def _write_config(run_dir: Path, config: Config) -> None:
    write_durably(run_dir / "config.yaml", to_yaml(config.model_dump(mode="json"), flow=False).encode())


def _check_same(run_dir: Path, stored: Config, config: Config) -> None:
    if stored.digest() == config.digest():
        return
    before, after = _flat(stored.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    changed = [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    free = ("evaluate.", "ray.", "run.", "track.", "train.rounds", "data.cache")
    decisive = [line for line in changed if not line.startswith(free) or line.startswith(("run.seed", "ray.threads"))]
    raise RunDirectoryError(
        f"{run_dir} belongs to another configuration ({'; '.join(decisive[:5])}); "
        f"give the new run another run.name, or remove the folder"
    )


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


class _Remote(Protocol):
    """What the driver's loop needs of a server."""

    def open(self) -> tuple[int, list[str]]: ...
    def round(self, round_index: int) -> RoundReport | None: ...
    def commit(self) -> RoundReport: ...
    def close(self) -> None: ...


class _Local:
    """The server in this process: ``ray.actors: 0``."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._server = Server(run_dir, config)

    def open(self) -> tuple[int, list[str]]:
        return self._server.round_index, self._server.warnings

    def round(self, round_index: int) -> RoundReport | None:
        return self._server.round()

    def commit(self) -> RoundReport:
        return self._server.commit()

    def close(self) -> None:
        self._server.close()


class _Actor:
    """The server as an actor, followed over its restarts."""

    _RESTARTS = 10

    def __init__(self, run_dir: Path, config: Config, progress: Progress) -> None:
        self._progress = progress
        actor = ray.remote(ServerActor).options(num_cpus=0, num_gpus=0, max_restarts=self._RESTARTS, max_task_retries=0)
        self._actor: Any = actor.remote(str(run_dir), config.model_dump(mode="json"))
        self._lost = 0

    def _get(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayTaskError as error:
            raise task_cause(error) from error

    def open(self) -> tuple[int, list[str]]:
        """Where the server stands; also after a restart, which may take a moment."""
        while True:
            try:
                stand: tuple[int, list[str]] = self._get(self._actor.open.remote())
                return stand
            except LOST as error:
                self._note_loss(error)

    def round(self, round_index: int) -> RoundReport | None:
        """One more round; ``None`` when the server was lost and stands elsewhere now."""
        try:
            report: RoundReport = self._get(self._actor.round.remote(round_index))
            return report
        except LOST as error:
            self._note_loss(error)
            return None
        except LookupError:
            return None

    def _note_loss(self, error: Exception) -> None:
        self._lost += 1
        first = (str(error).strip().splitlines() or [""])[0]
        if self._lost > 5 * self._RESTARTS or "ActorDied" in type(error).__name__:
            raise ResourcesError(
                f"the server actor was lost and could not be restarted: {type(error).__name__}: {first}; "
                f"check memory, then resume the run"
            ) from error
        if self._lost == 1:
            self._progress.message("the server was lost; it is restarted from the last commit")
        time.sleep(0.5)

    def commit(self) -> RoundReport:
        report: RoundReport = self._get(self._actor.commit.remote())
        return report

    def close(self) -> None:
        with contextlib.suppress(*LOST, GetTimeoutError, RayTaskError):
            ray.get(self._actor.close.remote(), timeout=20)
        ray.kill(self._actor)


def _check_answers(address: str) -> None:
    """Ray itself would try for a quarter of an hour.

    Raises:
        OSError: nobody listens at ``host:port``.
    """
    found = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if found is not None:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=10).close()


@contextlib.contextmanager
def ray_session(config: Config, clients: int, quiet: bool = False) -> Iterator[None]:
    """Ray for one run: the cluster that this process is in, the one configured, or a local one that ends with the block.

    Raises:
        ResourcesError: the cluster cannot be reached, or can never hold the configured actors.
    """
    if config.ray.actors == 0:
        yield
        return
    started = False
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = config.ray.address or os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = {"log_to_driver": not quiet, "logging_level": "ERROR", "namespace": "raydfl"}
        try:
            if address:
                _check_answers(address)
                ray.init(address, **options)
            else:
                ray.init("local", include_dashboard=False, **options)
        except Exception as error:  # Ray raises many kinds here
            where = f"the Ray cluster at {address}" if address else "a local Ray"
            first = (str(error).strip().splitlines() or [""])[0]
            reason = error.strerror or first if isinstance(error, OSError) else f"{type(error).__name__}: {first}"
            raise ResourcesError(
                f"cannot reach {where}: {reason}; check the address (ray.address, or RAY_ADDRESS), and that RAY_AUTH_TOKEN or "
                f"RAY_AUTH_TOKEN_PATH holds the cluster's token, or set ray.actors=0 to run without Ray"
            ) from error
        started = True
    try:
        check_resources(config, clients)
        yield
    finally:
        if started:
            ray.shutdown()


class _StopFlag:
    """Set by Ctrl-C or SIGTERM: the run stops after the round. A second Ctrl-C ends it at once."""

    def __init__(self, progress: Progress) -> None:
        self.asked = False
        self._progress = progress
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _StopFlag:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: whoever called us handles signals
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._progress.message("stopping after this round (press Ctrl-C again to stop at once)")


def execute(run_dir: Path, config: Config, progress: Progress) -> Outcome:
    """Do the rounds that are missing, then export the model and write the report.

    Raises:
        InputError: the directory or the cluster is not as it should be.
        ClientError: a method's code failed on a client.
    """
    started = time.monotonic()
    about = stored_about(run_dir)
    quiet = progress.mode in ("json", "quiet", "bar")
    with ray_session(config, about["clients"], quiet):
        server: _Remote = _Local(run_dir, config) if config.ray.actors == 0 else _Actor(run_dir, config, progress)
        try:
            round_index, warnings = server.open()
            for warning in warnings:
                progress.message(f"warning: {warning}; going on from round {round_index}")
            if round_index >= config.train.rounds:
                progress.message(
                    f"all {config.train.rounds} rounds are done; for more: "
                    f"raydfl resume {_shown(run_dir)} train.rounds={2 * config.train.rounds}"
                )
            tracker = make_tracker(config.track, Path(config.run.dir), run_dir, progress.message)
            run_id = tracker.start(
                about["id"],
                _flat(config.model_dump(mode="json")),
                {"raydfl.digest": about["digest"]},
                about.get("mlflow_run_id"),
            )
            if run_id != about.get("mlflow_run_id"):
                about["mlflow_run_id"] = run_id
                write_durably(run_dir / "run.json", json.dumps(about, indent=2).encode())
            try:
                outcome = _rounds(run_dir, config, server, round_index, tracker, progress)
            except BaseException as error:
                tracker.finish("FAILED")
                if isinstance(error, KeyboardInterrupt):
                    progress.message(f"to go on after the last commit: raydfl resume {_shown(run_dir)}")
                raise
        finally:
            server.close()
    if outcome.finished:
        record.compact(run_dir)
        for path in export(run_dir, config):
            tracker.log_artifact(path)
    report = write_report([run_dir], run_dir / "report.html")
    for path in (run_dir / "config.yaml", report):
        tracker.log_artifact(path)
    tracker.finish("FINISHED" if outcome.finished else "KILLED")
    folder = _shown(run_dir)
    progress.finish(
        FinishSummary(
            status="finished" if outcome.finished else "stopped",
            round=outcome.round,
            total=config.train.rounds,
            seconds=time.monotonic() - started,
            run_dir=run_dir,
            scores=outcome.scores,
            next_step=f"open {folder}/report.html" if outcome.finished else f"raydfl resume {folder}",
        )
    )
    return outcome


def _shown(run_dir: Path) -> str:
    """A run's folder as it is typed in a shell."""
    relative = os.path.relpath(run_dir)
    return shlex.quote(str(run_dir.resolve()) if relative.startswith("..") else relative)


def _rounds(
    run_dir: Path, config: Config, server: _Remote, round_index: int, tracker: Tracker, progress: Progress
) -> Outcome:
    total = config.train.rounds
    progress.start(total, round_index, run_dir.name)
    scores: dict[str, float] = {}
    shown = round_index
    with _StopFlag(progress) as stop:
        while round_index < total and not stop.asked:
            report = server.round(round_index)
            if report is None:  # the server was lost: rounds it had committed are read back, others are done again
                round_index, _ = server.open()
                rows = record.to_rows(record.read_rows(run_dir, round_index, where=pc.field("client") == ""))
                tracker.log_rows(rows)
                continue
            round_index = report.round
            scores.update(report.scores)
            if report.committed:
                tracker.log_rows(report.rows)
            if round_index > shown:
                shown = round_index
                progress.round(_summary(report, total))
        if stop.asked and round_index % config.run.commit_every and round_index < total:
            tracker.log_rows(server.commit().rows)
    return Outcome(run_dir, round_index, round_index >= total, scores)


def _summary(report: RoundReport, total: int) -> RoundSummary:
    return RoundSummary(
        round=report.round,
        total=total,
        loss=report.loss,
        scores={name: value for name, value in report.scores.items() if name.endswith("/accuracy")},
        clients=report.clients - len(report.rejected),
        seconds=report.seconds.get("train_and_aggregate", float("nan")),
        failed=len(report.rejected),
        bytes_down=report.bytes_down,
        bytes_up=report.bytes_up,
    )


def final_state(run_dir: Path) -> State:
    """The server's state after the last committed round.

    Raises:
        RunDirectoryError: there is none, or it is damaged.
    """
    store = RunStore(run_dir)
    name = store.latest()
    if name is None:
        raise RunDirectoryError(f"{run_dir} has no committed round yet")
    return store.load(name).state


def export(run_dir: Path, config: Config) -> list[Path]:
    """The shared models as safetensors: ``model.safetensors``, or ``model-<key>.safetensors`` for each of several keys.

    Tensor names are ``model/layer.weight``; the metadata says architecture, classes, features and round.
    """
    state = final_state(run_dir)
    about = stored_about(run_dir)
    names = tuple(type(config.build_method()).models)
    paths = []
    for key, tensors in state.tensors.items():
        models = {n: t.contiguous() for n, t in tensors.items() if n.partition("/")[0] in names}
        if not models:
            continue
        path = run_dir / ("model.safetensors" if key == "global" else f"model-{_file_name(key)}.safetensors")
        metadata = {
            "raydfl": about["raydfl"],
            "key": key,
            "round": str(state.round_index),
            "method": json.dumps(config.method),
            "models": json.dumps(about["models"]),
            "classes": json.dumps(about["classes"]),
            "features": config.data.features.model_dump_json(),
        }
        write_durably(path, safetensors.torch.save(models, metadata))
        paths.append(path)
    return paths


def _file_name(key: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in key)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One client's work in one round, done again."""

    client: Client
    round: int
    phase: str
    update: Update | None
    rejected: str
    received: dict[str, FlatTensors]
    metrics: dict[str, float]


def replay(run_dir: str | Path, round_number: int, client_id: str) -> Replayed:
    """Do one client's work of one round again, in this process, from what the run has kept; the run is not changed.

    Args:
        round_number: counted from 1, as printed.

    Raises:
        RunDirectoryError: no commit before that round is kept, or the run has not come that far.
        InputError: the client took no part in that round.
        ClientError: the method's code fails again; its cause is the original exception.
    """
    run_dir = Path(run_dir)
    config = stored_config(run_dir)
    store = RunStore(run_dir)
    latest = store.latest()
    done = 0 if latest is None else int(latest.split("-")[0])
    if round_number > done + config.run.commit_every:
        raise RunDirectoryError(
            f"round {round_number} of {run_dir} cannot be replayed: the last commit is of round {done}"
        )
    before = [name for name in store.commits() if int(name.split("-")[0]) < round_number]
    if not before:
        kept = store.rounds()
        span = f"rounds {kept[0] + 1} and later can be replayed" if kept else "none is kept"
        raise RunDirectoryError(
            f"round {round_number} of {run_dir} cannot be replayed: the commit before it is no longer kept ({span}); "
            f"set run.keep to keep more"
        )
    with tempfile.TemporaryDirectory(prefix="raydfl-replay-") as name:
        scratch = Path(name)
        (scratch / "commits").mkdir()
        shutil.copy(run_dir / "commits" / before[-1], scratch / "commits")
        (scratch / "LATEST").write_text(before[-1])
        private = PrivateStore(scratch / "private", also_read=[run_dir / "private"])
        worker = Worker(run_dir, config, private)
        quiet = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"every": 10**9})})
        population = Population.load(run_dir / "population")
        federation = Federation(quiet, population, RunStore(scratch), SerialPool(worker))
        while federation.state.round_index < round_number - 1:
            federation.round()
        orders = federation.plan()
        matching = [order for order in orders if order.task.client_id == client_id]
        if not matching:
            took_part = ", ".join(repr(order.task.client_id) for order in orders[:12])
            raise InputError(
                f"client {client_id!r} took no part in round {round_number}; the cohort was "
                f"{took_part}{' ...' if len(orders) > 12 else ''}"
            )
        received = federation.broadcast(set(matching[0].task.receive))
        result = worker.carry_out(matching[0], received)
        private.close()
        measured = result.measured.get("train", {})
        return Replayed(
            client=federation.clients.by_id(client_id),
            round=round_number,
            phase=matching[0].task.phase,
            update=None if result.update is None else dataclasses.replace(result.update),
            rejected=result.rejected,
            received=received,
            metrics={name: ratio.value for name, ratio in measured.items() if hasattr(ratio, "value")},
        )
