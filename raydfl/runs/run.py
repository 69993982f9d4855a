"""Starting, resuming and replaying runs: what the command line, jobs and searches call."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow.compute as pc
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydfl.cluster.faults import LOST, task_cause
from raydfl.cluster.gpu import with_share
from raydfl.cluster.nodes import NodeWatch
from raydfl.cluster.pool import why_ended
from raydfl.cluster.resources import wanted_kinds
from raydfl.cluster.server import Server, ServerActor, ServerRewoundError
from raydfl.cluster.session import connected, ray_session
from raydfl.core import ops
from raydfl.core.errors import ResourcesError
from raydfl.core.files import write_durably
from raydfl.core.metrics import SHOWN, base_name
from raydfl.core.remote import is_uri, parted
from raydfl.core.types import Problem
from raydfl.engine.config import Config, apply_overrides, make_config
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import check_begun, check_same, flat, stored_about, stored_config, write_config
from raydfl.engine.storage.mirror import local_run, local_runs, mirror_of
from raydfl.engine.storage.trust import remember_code
from raydfl.engine.telemetry import RoundReport
from raydfl.runs.folder import driving, ensure_features, export, folder_of, prepare_run
from raydfl.runs.progress import FinishSummary, Progress, RoundSummary
from raydfl.runs.report import write_report
from raydfl.runs.report.data import read_run
from raydfl.runs.report.diagnosis import problems_of
from raydfl.runs.stopping import StopSignals
from raydfl.runs.tracking import Tracker, make_tracker


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
    problems: tuple[Problem, ...] = ()
    """What went wrong although rounds are done, the worst first: raydfl.runs.report.diagnosis."""

    @property
    def worthless(self) -> str:
        """Why the run shows nothing; empty when it does."""
        return "; ".join(problem.text for problem in self.problems if problem.worthless)


OnRound = Callable[[RoundReport], bool]
"""Called after each round, in order; ``True`` asks the run to stop there."""


def run(
    config: Config, progress: Progress | None = None, on_round: OnRound | None = None, durable: bool = False
) -> Outcome:
    """Start the configured run, or go on with it when its named folder already holds it.

    Args:
        on_round: see :func:`execute`.
        durable: see :func:`execute`.

    Raises:
        InputError: something about the configuration, the data, the folder or the cluster is not as it should be.
    """
    progress = progress or Progress("quiet")
    quiet = progress.mode in ("json", "quiet", "bar")
    at_sites = bool(config.data.sites) and config.ray.actors != 0
    run_dir = folder_of(config, progress)
    with driving(run_dir, progress), connected(config.ray.address, quiet) if at_sites else contextlib.nullcontext():
        prepare_run(run_dir, config, progress)
        return execute(run_dir, config, progress, on_round, durable)


def resume(
    run_dir: str | Path, overrides: Sequence[str] = (), progress: Progress | None = None, trust: bool = False
) -> Outcome:
    """Go on with a run after its last commit.

    Args:
        run_dir: its folder, or its URI: then it is fetched first.
        overrides: settings that do not decide the numbers (``train.rounds``, ``ray.*``, ``run.commit_every``, ``track.*``).
        trust: whether code may be run that came with the folder or has changed since the run began.

    Raises:
        RunDirectoryError: there is no such run, or it is damaged, in use, not trusted, or the overrides would make it another run.
    """
    progress = progress or Progress("quiet")
    if is_uri(run_dir):
        overrides = [f"run.dir={parted(str(run_dir))[0]}", *overrides]
    run_dir = local_run(run_dir, overrides)
    check_begun(run_dir)
    with driving(run_dir, progress):
        stored = stored_config(run_dir, trust)
        config = make_config(apply_overrides(stored.model_dump(mode="json"), overrides), f"{run_dir}/config.yaml")
        check_same(run_dir, config, trust)
        about = stored_about(run_dir)
        if "config" not in about and stored.digest() != about["digest"]:
            progress.message(
                f"warning: {run_dir} was begun by an earlier version of raydfl, {about['raydfl']}: whether its config.yaml is "
                f"still what it began with cannot be told"
            )
        if overrides:
            write_config(run_dir, config)
        remember_code(run_dir, config.model_dump(mode="json"))
        mirror = mirror_of(config.run.dir, run_dir)
        if mirror is not None:
            mirror.fetch()
        ensure_features(run_dir, config, progress)
        return execute(run_dir, config, progress)


_REASONS = 5
"""Failed clients of a round whose reasons are shown; the record has all."""
_AT_ONCE = 0.6
"""Seconds of rounds that are asked for in one call: so much later may a run stop that is asked to."""


class _Remote(Protocol):
    """What the driver's loop needs of a server."""

    def open(self) -> tuple[int, list[str]]: ...
    def rounds(self, round_index: int, until: int) -> list[RoundReport] | None: ...
    def finish(self, round_index: int) -> RoundReport | None: ...
    def close(self) -> None: ...


class _Local:
    """The server in this process: ``ray.actors: 0``."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._server = Server(run_dir, config)

    def open(self) -> tuple[int, list[str]]:
        return self._server.round_index, self._server.warnings

    def rounds(self, round_index: int, until: int) -> list[RoundReport] | None:
        return self._server.rounds(until, seconds=0.0)

    def finish(self, round_index: int) -> RoundReport | None:
        return self._server.finish()

    def close(self) -> None:
        self._server.close()


class _ServerLostError(Exception):
    """The server ended before it answered; Ray starts it again."""


class _Actor:
    """The server as an actor, followed over its restarts."""

    _RESTARTS = 10

    def __init__(self, run_dir: Path, config: Config, clients: int, progress: Progress) -> None:
        self._progress = progress
        kinds = wanted_kinds(config, clients)
        self._watch = NodeWatch(kinds, config.ray.min_actors or len(kinds), progress.message)
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
        self._actor: Any = actor.remote(str(run_dir), config.model_dump(mode="json"))
        self._lost = 0

    def _get(self, reference: Any) -> Any:
        """What the server returned, or raised.

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

    def open(self) -> tuple[int, list[str]]:
        """Where the server stands; also after a restart, which may take a moment."""
        while True:
            with contextlib.suppress(_ServerLostError):
                stand: tuple[int, list[str]] = self._get(self._actor.open.remote())
                return stand

    def rounds(self, round_index: int, until: int) -> list[RoundReport] | None:
        """One more round, or several short ones up to ``until``; ``None`` when the server was lost and stands elsewhere now."""
        reports: list[RoundReport] | None = self._answer(self._actor.rounds.remote(round_index, until, _AT_ONCE))
        return reports

    def finish(self, round_index: int) -> RoundReport | None:
        """Everything up to this round on the disk; ``None`` when the server was lost and stands elsewhere now."""
        report: RoundReport | None = self._answer(self._actor.finish.remote(round_index))
        return report

    def _answer(self, reference: Any) -> Any:
        """What the server returned; ``None``: see :meth:`rounds`."""
        try:
            return self._get(reference)
        except (_ServerLostError, ServerRewoundError):
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
            self._progress.message("the server was lost; it is restarted from the last commit")
        time.sleep(0.5)

    def close(self) -> None:
        with contextlib.suppress(*LOST, GetTimeoutError, RayTaskError):
            ray.get(self._actor.close.remote(), timeout=20)
        ray.kill(self._actor)


def execute(
    run_dir: Path, config: Config, progress: Progress, on_round: OnRound | None = None, durable: bool = False
) -> Outcome:
    """Do the rounds that are missing, then export the model and write the report.

    Args:
        on_round: told of each round; may ask the run to stop. After an evaluation no further round begins before it has answered.
        durable: whether a round that was evaluated is committed, and nobody writes to the folder, while ``on_round`` is told of it.

    Raises:
        InputError: the directory or the cluster is not as it should be.
        ClientError: a method's code failed on a client.
    """
    started = time.monotonic()
    about = stored_about(run_dir)
    mirror = mirror_of(config.run.dir, run_dir)
    name = _shown(run_dir) if mirror is None else shlex.quote(mirror.uri)
    quiet = progress.mode in ("json", "quiet", "bar")
    if config.ray.gpus == 0 and not ops.compiled():
        progress.message(
            "raydfl's operators are not compiled here: training on the CPU takes about twice as long; to compile them, install a "
            "C++ compiler and then raydfl again, by make or with pip's --no-build-isolation"
        )
    if config.ray.gpus == "auto" and config.ray.actors != 0:
        with connected(config.ray.address, quiet):
            return execute(run_dir, with_share(run_dir, config, progress.message), progress, on_round, durable)
    clients = about["clients"]
    with ray_session(config, clients, quiet):
        server: _Remote = (
            _Local(run_dir, config) if config.ray.actors == 0 else _Actor(run_dir, config, clients, progress)
        )
        try:
            round_index, warnings = server.open()
            for warning in warnings:
                progress.message(f"warning: {warning}; going on from round {round_index}")
            recorded = record.read_rows(run_dir, round_index, where=pc.field("client") == "", columns=["round"])
            lost = record.unrecorded(recorded["round"].to_pylist(), round_index)
            if lost:
                progress.message(
                    f"warning: the files in {run_dir / 'rows'} of rounds {lost} are missing; restore them from a copy, or go on "
                    f"without what was measured in them"
                )
            if round_index >= config.train.rounds:
                progress.message(
                    f"all {round_index} rounds are done; for more: raydfl resume {name} train.rounds={2 * round_index}"
                )
            tracker = make_tracker(
                config.track, local_runs(config.run.dir, config.data.cache), run_dir, progress.message
            )
            run_id = tracker.start(
                about["id"],
                flat(config.model_dump(mode="json")),
                {"raydfl.digest": about["digest"]},
                about.get("mlflow_run_id"),
            )
            if run_id != about.get("mlflow_run_id"):
                about["mlflow_run_id"] = run_id
                write_durably(run_dir / "run.json", json.dumps(about, indent=2).encode())
                if mirror is not None:
                    mirror.put("run.json")
            try:
                outcome = _rounds(run_dir, config, server, round_index, tracker, progress, on_round, durable)
            except BaseException as error:
                tracker.finish("FAILED")
                if isinstance(error, KeyboardInterrupt):
                    progress.message(f"to go on after the last commit: raydfl resume {name}")
                raise
        finally:
            server.close()
    if outcome.finished:
        record.compact(run_dir)
        for path in export(run_dir, config):
            tracker.log_artifact(path)
    outcome = dataclasses.replace(outcome, problems=tuple(problems_of(read_run(run_dir))))
    report = write_report([run_dir], run_dir / "report.html")
    for path in (run_dir / "config.yaml", report):
        tracker.log_artifact(path)
    tracker.finish("KILLED" if not outcome.finished else "FAILED" if outcome.worthless else "FINISHED")
    if mirror is not None:
        mirror.sync()
    progress.finish(
        FinishSummary(
            status="stopped" if not outcome.finished else "failed" if outcome.worthless else "finished",
            round=outcome.round,
            total=max(outcome.round, config.train.rounds),
            seconds=time.monotonic() - started,
            run_dir=run_dir,
            scores=outcome.scores,
            next_step=f"open {_shown(run_dir)}/report.html" if outcome.finished else f"raydfl resume {name}",
            problems=outcome.problems,
        )
    )
    return outcome


def _shown(run_dir: Path) -> str:
    """A run's folder as it is typed in a shell."""
    relative = os.path.relpath(run_dir)
    return shlex.quote(str(run_dir.resolve()) if relative.startswith("..") else relative)


def _rounds(
    run_dir: Path,
    config: Config,
    server: _Remote,
    round_index: int,
    tracker: Tracker,
    progress: Progress,
    on_round: OnRound | None,
    durable: bool,
) -> Outcome:
    total = max(round_index, config.train.rounds)  # it may have done more than are now asked for
    progress.start(total, round_index, run_dir.name)
    scores: dict[str, float] = {}
    shown = round_index

    def recorded(rows: Sequence[record.MetricRow]) -> None:
        """What has become durable, by whatever way it is learned."""
        tracker.log_rows(rows)
        scores.update(record.scores(rows))

    with StopSignals(progress, "stopping after this round") as stop:
        told = False
        while True:
            last = round_index >= total or stop.asked
            if last:
                finished = server.finish(round_index)
                reports = None if finished is None else [finished]
            else:
                every = config.evaluate.every if on_round is not None else total
                reports = server.rounds(round_index, min(total, (round_index // every + 1) * every))
                if durable and reports and reports[-1].scores:
                    finished = server.finish(reports[-1].round)
                    reports = None if finished is None else [*reports[:-1], _joined(reports[-1], finished)]
            if reports is None:  # the server was lost: rounds it had committed are read back, others are done again
                round_index, _ = server.open()
                recorded(record.to_rows(record.read_rows(run_dir, round_index, where=pc.field("client") == "")))
                continue
            for report in reports:
                if report.rows:
                    recorded(report.rows)
                if report.apart and not told:
                    told = True
                    progress.message(f"clients are trained one after another, not together: {report.apart}")
            if last:
                break
            for report in reports:
                round_index = report.round
                if round_index > shown:
                    shown = round_index
                    progress.round(_summary(report, total))
                    if on_round is not None and on_round(report):
                        stop.asked = True
    return Outcome(run_dir, round_index, round_index >= total, scores)


def _joined(report: RoundReport, finished: RoundReport) -> RoundReport:
    """Return a round's report with what has become durable since."""
    return dataclasses.replace(report, rows=[*report.rows, *finished.rows])


def _summary(report: RoundReport, total: int) -> RoundSummary:
    return RoundSummary(
        round=report.round,
        total=total,
        loss=report.loss,
        scores={name: value for name, value in report.scores.items() if base_name(name) in SHOWN},
        clients=report.clients - len(report.rejected),
        seconds=report.seconds.get("train_and_aggregate", float("nan")),
        failed=len(report.rejected),
        reasons=dict(itertools.islice(report.rejected.items(), _REASONS)),
        late=len(report.cut),
        bytes_down=report.bytes_down,
        bytes_up=report.bytes_up,
        retried=report.retried,
        times={**report.seconds, **{what: ratio.value for what, ratio in report.work.items()}},
    )
