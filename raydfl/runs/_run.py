"""Start and resume runs, for the command line, jobs and searches."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from raydfl.cluster import (
    RemoteServer,
    Server,
    add_use,
    check_without_actors,
    connect_ray,
    end_idle_server,
    is_job,
    ray_session,
    resolve_auto,
)
from raydfl.core import ops
from raydfl.core.errors import ConfigError, RaydflError
from raydfl.core.files import display_path
from raydfl.core.nested import flatten
from raydfl.core.remote import is_uri, split_uri
from raydfl.engine import Config, RoundReport, apply_overrides, describe_run, find_best, make_config, measure_examples
from raydfl.engine.storage import (
    check_begun,
    check_same,
    local_run,
    local_runs,
    mirror_of,
    read_about,
    read_config,
    record,
    remember_code,
    write_config,
)
from raydfl.runs.folder import (
    ensure_features,
    export,
    locate_run_dir,
    lock_run_dir,
    prepare_run,
    record_resume,
    write_about,
)
from raydfl.runs.progress import Progress, default_progress
from raydfl.runs.reference import configure_references
from raydfl.runs.report import judge, measure_run, write_page
from raydfl.runs.report.diagnosis import find_problems
from raydfl.runs.result import Result
from raydfl.runs.stopping import StopSignals
from raydfl.runs.tracking import Status, Tracker, make_tracker

OnRound = Callable[[RoundReport], bool]
"""Callback with the report of each round, in order. ``True`` stops the run."""
Rounds = Generator[RoundReport, bool, Result]
"""Generator of the report of each round, in order. Sending ``True`` stops the run."""


def run(
    config: Config, progress: Progress | None = None, on_round: OnRound | None = None, durable: bool = False
) -> Result:
    """Start the configured run, or resume it if its folder exists.

    Args:
        config: The configuration. ``run.name`` names the folder.
        progress: Shows the progress. Defaults to bars in a notebook and to nothing elsewhere.
        on_round: Callback with each round's report. After an evaluation, the next round starts only when the callback returns.
        durable: Commit an evaluated round before ``on_round`` is called, and write nothing during the call.

    Raises:
        InputError: The configuration, the data, the folder or the cluster cannot be used.
    """
    rounds = iterate_rounds(config, progress or default_progress(), on_round is not None, durable)
    return _complete(rounds, on_round)


def iterate_rounds(
    config: Config,
    progress: Progress,
    waits: bool = True,
    durable: bool = False,
    signals: bool = True,
    lend: bool = False,
) -> Rounds:
    """Start or resume the configured run, and yield each round's report.

    Args:
        config: The configuration.
        progress: Shows the progress.
        waits: Start the next round after an evaluation only when the generator is resumed.
        durable: Commit an evaluated round before yielding its report, and write nothing until the generator is resumed.
        signals: Whether Ctrl-C and SIGTERM stop the run after the current round.
        lend: Use the actors of the last run in this process, and keep the actors for the next.

    Raises:
        InputError: The configuration, the data, the folder or the cluster cannot be used.
    """
    quiet = progress.mode != "lines"
    at_sites = bool(config.data.sites) and config.ray.actors != 0
    _check_actors(config, progress)
    run_dir = locate_run_dir(config, progress)
    with (
        lock_run_dir(run_dir, progress),
        connect_ray(config.ray.address, quiet) if at_sites else contextlib.nullcontext(),
    ):
        prepare_run(run_dir, config, progress)
        return (yield from execute(run_dir, config, progress, waits, durable, signals, lend))


def _complete(rounds: Rounds, on_round: OnRound | None = None) -> Result:
    """Run all rounds, call ``on_round`` after each, and return the result."""
    try:
        report = next(rounds)
        while True:
            try:
                stop = on_round is not None and on_round(report)
            except BaseException as error:
                rounds.throw(error)
                raise
            report = rounds.send(stop)
    except StopIteration as end:
        result: Result = end.value
        return result


def resume(
    run_dir: str | Path, overrides: Sequence[str] = (), progress: Progress | None = None, trust: bool = False
) -> Result:
    """Resume a run after its last commit.

    Args:
        run_dir: The run's folder. A URI is downloaded first.
        overrides: Settings that do not affect the results of completed rounds (``train.rounds``, ``ray.*``, ``run.commit_every``,
            ``run.stop.patience``, ``track.*``).
        progress: Shows the progress. Defaults to bars in a notebook and to nothing elsewhere.
        trust: Approve the code named in the run's configuration.

    Raises:
        RunDirectoryError: The run does not exist, is damaged, in use or not trusted, or the overrides would change its results.
    """
    progress = progress or default_progress()
    home = split_uri(str(run_dir))[0] if is_uri(run_dir) else ""
    if home:
        overrides = [f"run.dir={home}", *overrides]
    run_dir = local_run(run_dir, overrides, private=False)
    check_begun(run_dir)
    with lock_run_dir(run_dir, progress):
        config = stored = read_config(run_dir, trust)
        if overrides:
            config = make_config(apply_overrides(stored.model_dump(mode="json"), overrides), f"{run_dir}/config.yaml")
            _check_place(run_dir, home or stored.run.dir, stored.run.name, config)
        check_same(run_dir, config, trust)
        _check_actors(config, progress)
        about = read_about(run_dir)
        if "config" not in about and stored.digest() != about["digest"]:
            progress.message(
                f"warning: {run_dir} was started by an earlier version of raydfl, {about['raydfl']}, so changes of its config.yaml "
                f"cannot be detected"
            )
        if overrides:
            write_config(run_dir, config)
        remember_code(run_dir, config.model_dump(mode="json"))
        mirror = mirror_of(config.run.dir, run_dir)
        if mirror is not None:
            mirror.fetch(config.ray.actors == 0)
        ensure_features(run_dir, config, progress)
        return _complete(execute(run_dir, config, progress))


def _check_place(run_dir: Path, parent: str, name: str | None, config: Config) -> None:
    """Reject another place for a resumed run. It stays where it is.

    Raises:
        ConfigError: ``run.dir`` or ``run.name`` of the configuration differs.
    """
    for key, before, now in (("dir", parent, config.run.dir), ("name", name, config.run.name)):
        if now != before:
            raise ConfigError(
                f"run.{key}={now}: a resumed run stays in its folder, {run_dir}. To continue a copy, copy the folder and resume "
                f"the copy. To begin a new run, use `raydfl run` with another run.name."
            )


def _check_actors(config: Config, progress: Progress) -> None:
    """Check the settings of client actors before any computation."""
    check_without_actors(config.ray)
    if config.ray.actors == 0 and is_job():
        progress.message(
            "ray.actors=0: clients train in this process, on the head. Set ray.actors=2 to use the cluster."
        )
    if config.ray.cpu_fallback and config.ray.gpus != 0:
        progress.message("ray.cpu_fallback: clients train on the CPU if PyTorch finds no GPU")


_IN_MLFLOW: dict[str, Status] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's status for each status of a result."""


def execute(
    run_dir: Path,
    config: Config,
    progress: Progress,
    waits: bool = False,
    durable: bool = False,
    signals: bool = True,
    lend: bool = False,
) -> Rounds:
    """Run the remaining rounds like :func:`iterate_rounds`, then export the models and write the report.

    Raises:
        InputError: The folder or the cluster cannot be used.
        ClientError: A method's code failed on a client.
    """
    started = time.monotonic()
    about = read_about(run_dir)
    mirror = mirror_of(config.run.dir, run_dir)
    folder = shlex.quote(display_path(run_dir))
    name = folder if mirror is None else shlex.quote(mirror.uri)
    quiet = progress.mode != "lines"
    if config.ray.gpus == 0 and not ops.is_compiled():
        progress.message(
            "raydfl's operators are not compiled here, so training on the CPU takes about twice as long. Install a C++ compiler, "
            "then reinstall raydfl with make or with pip's --no-build-isolation."
        )
    if config.ray.needs_measurement:
        end_idle_server()  # A measurement needs free resources.
        with connect_ray(config.ray.address, quiet):
            measured = resolve_auto(run_dir, config, progress.message)
            return (yield from execute(run_dir, measured, progress, waits, durable, signals))
    clients = about["clients"]
    with ray_session(config, clients, quiet):
        server = (
            Server(run_dir, config)
            if config.ray.actors == 0
            else RemoteServer(run_dir, config, clients, progress.message, lend)
        )
        try:
            round_index, messages, ended = server.open()
            for message in messages:
                progress.message(message)
            recorded = record.read_rows(run_dir, round_index, where=pc.field("client") == "", columns=["round"])
            lost = record.list_missing_rounds(recorded["round"].to_pylist(), round_index)
            if lost:
                progress.message(
                    f"warning: the files in {run_dir / 'rows'} of rounds {lost} are missing. Restore them from a copy, or continue "
                    f"without their measurements."
                )
            if ended or round_index >= config.train.rounds:
                progress.message(_explain_completion(config, name, round_index, ended))
            tracker = make_tracker(
                config.track, local_runs(config.run.dir, config.data.cache), run_dir, progress.message
            )
            if 0 < round_index < config.train.rounds and not ended:
                record_resume(run_dir, config, about, round_index, progress)
            run_id = tracker.start(
                about["id"],
                flatten(config.model_dump(mode="json")),
                {
                    "raydfl.digest": about["digest"],
                    **({"raydfl.privacy": warning} if (warning := about.get("privacy", {}).get("warning")) else {}),
                },
                about.get("mlflow_run_id"),
            )
            if run_id != about.get("mlflow_run_id"):
                facts = {**about, "mlflow_run_id": run_id}
                write_about(run_dir, config, {name: value for name, value in facts.items() if value is not None})
            try:
                stop = StopSignals(progress, "stopping after this round", enabled=signals)
                result = yield from _run_rounds(
                    run_dir, config, server, round_index, ended, tracker, progress, stop, waits, durable
                )
            except BaseException as error:
                tracker.finish("FAILED")
                if isinstance(error, KeyboardInterrupt):
                    progress.message(f"to resume after the last commit: raydfl resume {name}")
                raise
        finally:
            server.close()
    if result.finished:
        record.compact(run_dir)
        for path in export(run_dir, config):
            tracker.log_artifact(path)
        _run_references(run_dir, config, clients, progress)
    _record_epsilon(run_dir, config, result.round, progress)
    done = measure_run(run_dir.resolve(), config)
    best = find_best(run_dir, config)
    result = dataclasses.replace(
        result,
        problems=tuple(find_problems(done)),
        best=None if best is None else best.leader,
        controls=tuple(done.controls),
    )
    report = write_page([done], run_dir / "report.html")
    for path in (run_dir / "config.yaml", report):
        tracker.log_artifact(path)
    tracker.finish(_IN_MLFLOW[result.status])
    if mirror is not None:
        mirror.sync()
        progress.message(f"the run and its report are at {mirror.uri}")
    verdict = judge(done, name)
    here = " ray.address=auto" if is_job() and config.ray.actors else ""  # A job's address is not stored.
    next_step = verdict.next if result.finished else f"raydfl resume {name}{here}"
    progress.finish(result, time.monotonic() - started, next_step, verdict)
    return result


def _record_epsilon(run_dir: Path, config: Config, rounds: int, progress: Progress) -> None:
    """Add the epsilon of a private run's last round to ``run.json``, and show it."""
    about = read_about(run_dir)
    if about.get("privacy") is None:
        return
    spent: dict[str, Any] = {"rounds": rounds}
    if about["privacy"].get("unit") == "clip":
        epsilon, median, text = measure_examples(run_dir, about["privacy"], rounds)
        spent["median"] = median if math.isfinite(median) else None
    else:
        epsilon, text = describe_run(about["privacy"], rounds)
    name = "epsilon_as_if" if about["privacy"].get("simulated") else "epsilon"
    spent[name] = epsilon if math.isfinite(epsilon) else None
    write_about(run_dir, config, {**about, "privacy": {**about["privacy"], **spent}})
    progress.message(f"privacy: {text}")


def _run_references(run_dir: Path, config: Config, clients: int, progress: Progress) -> None:
    """Run or resume the reference runs. A failure is only a warning, because the run itself is complete."""
    try:
        for name, reference in configure_references(config, run_dir, clients):
            progress.message(f"reference run, {name}: {reference.train.rounds} rounds")
            _complete(iterate_rounds(reference, Progress("quiet"), waits=False))
    except RaydflError as error:
        progress.message(f"warning: {error}")


def _explain_completion(config: Config, name: str, round_index: int, ended: str) -> str:
    """Explain why a run has no rounds left, and how to add rounds.

    Args:
        config: The run's configuration.
        name: The run's folder or URI, quoted for a shell.
        round_index: Number of completed rounds.
        ended: Why ``run.stop`` ended the training. Empty if it did not.
    """
    if not ended or config.run.stop is None:
        return f"all {round_index} rounds are done. To add rounds: raydfl resume {name} train.rounds={2 * round_index}"
    more = f"run.stop.patience={2 * config.run.stop.patience}"
    for limit, value in (("epsilon", config.run.stop.epsilon), ("seconds", config.run.stop.seconds)):
        if value is not None and f"run.stop.{limit}" in ended:
            more = f"run.stop.{limit}={2 * value:g}"
    return f"stopped in round {round_index}: {ended}. To continue: raydfl resume {name} {more}, or run.stop=null"


def _run_rounds(
    run_dir: Path,
    config: Config,
    server: Server | RemoteServer,
    round_index: int,
    ended: str,
    tracker: Tracker,
    progress: Progress,
    stop: StopSignals,
    waits: bool,
    durable: bool,
) -> Rounds:
    total = max(round_index, config.train.rounds)  # An override may have lowered train.rounds.
    progress.start(total, round_index, run_dir.name, config.components.method.objective.headline)
    scores: dict[str, float] = {}
    shown = round_index

    def log_rows(rows: Sequence[record.MetricRow]) -> None:
        """Log durable rows and remember their scores."""
        tracker.log_rows(rows)
        scores.update(record.scores(rows))

    with stop:
        looped, fallback = False, ""
        while True:
            # Actors may start in any round, so the loop asks before each call of the server.
            current = server.cpu_fallback() if config.ray.cpu_fallback else ""
            if current != fallback:
                fallback = current
                progress.message(f"warning: {fallback}" if fallback else "client actors on the CPU: 0")
                write_about(run_dir, config, {**read_about(run_dir), "cpu_fallback": fallback or None})
            last = round_index >= total or bool(ended) or stop.asked
            if last:
                finished = server.finish(round_index)
                reports = None if finished is None else [finished]
            else:
                # A call may compute several short rounds. It ends at an evaluation if the caller may stop the run there.
                every = config.evaluate.interval if waits else total
                reports = server.rounds(round_index, min(total, (round_index // every + 1) * every))
                if durable and reports and reports[-1].scores:
                    finished = server.finish(reports[-1].round)
                    reports = None if finished is None else [*reports[:-1], _append_rows(reports[-1], finished)]
            if reports is None:
                # The server was lost. It continues after its last commit, so rows are read from the folder.
                round_index, _, ended = server.open()
                log_rows(record.to_rows(record.read_rows(run_dir, round_index, where=pc.field("client") == "")))
                continue
            for report in reports:
                if report.rows:
                    log_rows(report.rows)
                if report.looped_because and not looped:
                    looped = True
                    progress.message(f"clients are trained one after another, not together: {report.looped_because}")
            if last:
                break
            for report in reports:
                round_index, ended = report.round, report.stopped
                if round_index > shown:
                    shown = round_index
                    progress.round(report)
                    if (yield report):
                        stop.asked = True
    _record_use(run_dir, config, server)
    return Result(run_dir, round_index, round_index >= total or bool(ended), scores, ended=ended)


def _record_use(run_dir: Path, config: Config, server: Server | RemoteServer) -> None:
    """Add the use of the cluster's nodes to ``run.json``."""
    if use := server.use():
        about = read_about(run_dir)
        total = about.get("nodes", {})
        add_use(total, use)
        write_about(run_dir, config, {**about, "nodes": total})


def _append_rows(report: RoundReport, finished: RoundReport) -> RoundReport:
    """Add the rows of a later report to a round's report."""
    return dataclasses.replace(report, rows=[*report.rows, *finished.rows])
