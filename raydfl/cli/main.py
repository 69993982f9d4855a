"""The command ``raydfl``.

Exit codes: 0 for success, 2 for a bad configuration, bad input or a worthless run, 1 for any other failure.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from raydfl.cli._arguments import (
    File,
    Json,
    Overrides,
    Quiet,
    RunDir,
    TakesSettings,
    Trust,
    explain_write_errors,
    find_run_dir,
    show_progress,
)
from raydfl.cli.clusters import cluster_app
from raydfl.cli.data import data_app
from raydfl.cli.models import export_command, listen_command, predict_command
from raydfl.cli.privacy import audit_command, privacy_command
from raydfl.cli.sites import site_app
from raydfl.cluster import check_no_token, is_job
from raydfl.core.errors import ClientError, InputError, RaydflError, printable
from raydfl.core.files import display_path
from raydfl.core.version import __version__

if TYPE_CHECKING:
    from raydfl.runs import Result

app = typer.Typer(
    help="Federated learning for audio on Ray. To start: raydfl init, then raydfl run jobs/tiny.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(site_app, name="site")
app.add_typer(cluster_app, name="cluster")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"raydfl {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Handle the options that precede a command."""
    if is_job():
        from raydfl.cluster import current_token  # imports gRPC, which is slow

        check_no_token(current_token()[0])


def _exit_with(result: Result, quiet: bool) -> None:
    """Exit with the code of a run: 0 if it is finished, 1 if it was stopped, 2 if it is worthless."""
    # A worthless run counts as bad input, because the same command would fail again.
    if result.worthless and quiet:
        raise InputError(result.worthless)
    if result.worthless:
        raise typer.Exit(InputError.exit_code)
    if not result.finished:
        raise typer.Exit(1)


@app.command("init")
def init_command(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="destination; default: the working directory", show_default=False)
    ] = Path(),
) -> None:
    """Write example jobs, studies and a cluster file into FOLDER.

    The documentation uses these files. Existing files are never changed.
    """
    from raydfl.cli.example_jobs import write_examples

    written = write_examples(folder)
    print(f"files written into {folder.resolve()}: {len(written)}{'' if written else ' (all exist)'}")  # noqa: T201
    before = "" if display_path(folder) == "." else f"cd {shlex.quote(str(folder))} && "
    print(f"start with: {before}raydfl run jobs/tiny.yaml  # seconds, without Ray")  # noqa: T201
    print("then, on a Ray cluster on this machine: raydfl run jobs/quickstart.yaml")  # noqa: T201


@app.command("run", cls=TakesSettings)
def run_command(file: File, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Train the run configured in FILE.

    If the folder of run.name exists, resume that run. Ctrl-C stops after the current round.
    """
    from raydfl.data import start_reader

    start_reader()
    from raydfl.engine import load_config
    from raydfl.runs import run

    config = load_config(file, overrides or [])
    with show_progress(quiet, as_json) as progress:
        result = run(config, progress)
    _exit_with(result, quiet)


@app.command("resume", cls=TakesSettings)
def resume_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="a run directory, or its URI", show_default=False)],
    overrides: Overrides = None,
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Resume the run in DIR from its last commit.

    Settings that do not affect the results of a round may change: train.rounds, run.stop.patience, run.commit_every, ray.*,
    track.* and more.
    """
    from raydfl.data import start_reader

    start_reader()
    from raydfl.runs import resume

    with show_progress(quiet, as_json) as progress:
        result = resume(directory, overrides or [], progress, trust)
    _exit_with(result, quiet)


@app.command("replay")
def replay_command(
    directory: RunDir,
    round_number: Annotated[int, typer.Option("--round", min=1, help="number of the round, from 1")],
    client: Annotated[str, typer.Option("--client", help="id of the client")],
    save: Annotated[Path | None, typer.Option("--save", help="safetensors file for the client update")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="open the debugger if the method's code fails")] = False,
    trust: Trust = False,
) -> None:
    """Repeat the local training of one client in one round.

    The training runs in this process, from the files of the run. The run does not change.
    """
    from raydfl.runs import replay

    try:
        replayed = replay(directory, round_number, client, trust)
    except ClientError as error:
        cause = error.__cause__
        if cause is not None:
            traceback.print_exception(cause)
            if debug:
                import pdb  # noqa: T100  (the user asked for it)

                pdb.post_mortem(cause.__traceback__)
        raise
    console = Console(highlight=False)
    client_info = replayed.client
    models = ", ".join(f"{spec.name}={spec.architecture}" for spec in client_info.models)
    console.print(f"client {client_info.id!r}: {client_info.num_examples} examples, {models}", markup=False)
    console.print(f"round {replayed.round}, phase {replayed.phase!r}", markup=False)
    for name, value in replayed.metrics.items():
        console.print(f"{name}: {value:.6g}", markup=False)
    if replayed.rejected:
        console.print(f"the update was rejected: {printable(replayed.rejected)}", markup=False)
    if replayed.update is None:
        return
    table = Table("tensor", "shape", "norm", "change")
    for name, tensor in replayed.update.tensors.items():
        before = next((group[name] for group in replayed.received.values() if name in group), None)
        change = "" if before is None else f"{float((tensor - before).norm()):.6g}"
        table.add_row(name, str(tuple(tensor.shape)), f"{float(tensor.norm()):.6g}", change)
    console.print(table)
    if save is not None:
        from raydfl.core.tensor_file import to_safetensors

        with explain_write_errors(save):
            save.write_bytes(to_safetensors(replayed.update.tensors))
        console.print(f"update written to {save}", markup=False)


@app.command("report")
def report_command(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="run directories or their URIs", show_default=False, parser=find_run_dir),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="page to write; default: report.html in DIR, or here for several runs")
    ] = None,
) -> None:
    """Write an HTML report of one run, or a comparison of several runs."""
    from raydfl.data import start_reader

    start_reader()
    from raydfl.runs.report import measure_run, write_page

    if out is None:
        out = directories[0] / "report.html" if len(directories) == 1 else Path("report.html")
    runs = [measure_run(folder) for folder in dict.fromkeys(directory.resolve() for directory in directories)]
    print(write_page(runs, out))  # noqa: T201
    for run in runs:
        for text in run.missing:
            print(f"warning: {run.folder}: {printable(text)}", file=sys.stderr)  # noqa: T201


@app.command("explain")
def explain_command(directory: RunDir, as_json: Json = False) -> None:
    """Print the verdict on the run in DIR: its score, its limits and the next command.

    The command reads the files of the run and trains nothing.
    """
    from raydfl.data import start_reader

    start_reader()
    from raydfl.runs.report import find_problems, judge, measure_run

    run = measure_run(directory.resolve())
    verdict, problems = judge(run), find_problems(run)
    if as_json:
        print(json.dumps({**verdict.to_dict(), "problems": [dataclasses.asdict(problem) for problem in problems]}))  # noqa: T201
        return
    lines = [*(f"{'worthless' if p.worthless else 'warning'}: {p.text}" for p in problems), *verdict.lines]
    for line in [*lines, f"next: {verdict.next}"]:
        print(printable(line))  # noqa: T201


app.command("predict")(predict_command)
app.command("listen")(listen_command)
app.command("export")(export_command)
app.command("privacy", cls=TakesSettings)(privacy_command)
app.command("audit")(audit_command)


@app.command("study", cls=TakesSettings)
@app.command("sweep", cls=TakesSettings)
@app.command("search", cls=TakesSettings)
def study_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="study file (YAML)", show_default=False)],
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="AXIS=LABEL,LABEL: run only these cells of the axis")
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option("--parallel", min=1, help="number of concurrent runs; default: limited by CPUs and GPUs"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="check all configurations and data sets without training")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="write the tables and the page from the current results without training")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train the runs of a study in parallel, and summarise their results in tables and one page.

    A study compares settings in a grid (axes), searches for good settings (domains), or both. "sweep" and "search" are aliases
    of this command. KEY=VALUE also overrides settings of the study itself (samples=20). Finished runs are never repeated. Ctrl-C
    stops the runs after their current round. The same command continues them.
    """
    from raydfl.cli.experiments import describe_study, do_study  # PyTorch and Ray Tune take seconds
    from raydfl.experiments import check_data_sets, check_results, load_study

    study = load_study(file, [*(overrides or []), *([f"parallel={parallel}"] if parallel else [])], only or [])
    if check:
        check_results(study)
        print(describe_study(study))  # noqa: T201
        check_data_sets(study.distinct or [study.make_corner_trial(values) for values in study.corners()])
        return
    with show_progress(quiet, as_json) as progress:
        code = do_study(study, progress, table_only=table)
    if code:
        raise typer.Exit(code)


@app.command("methods")
def methods_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="methods, rules, attacks, objectives, transforms or architectures; default: all",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List methods, aggregation rules, attacks, objectives and architectures, with their options."""
    from raydfl.cli.explain import explain_methods, methods_as_data

    if as_json:
        print(json.dumps(methods_as_data(names or [])))  # noqa: T201
    else:
        print(explain_methods(min(120, shutil.get_terminal_size((110, 1)).columns), names or []))  # noqa: T201


@app.command("config", cls=TakesSettings)
def config_command(file: File, overrides: Overrides = None) -> None:
    """Print the resolved configuration with an explanation of every setting.

    The output contains FILE and all defaults, with comments on meaning, unit and range.
    """
    from raydfl.cli.explain import explain_config
    from raydfl.engine import load_config

    print(explain_config(load_config(file, overrides or [])))  # noqa: T201


_INTERRUPTED = 130
"""Exit code of Typer after Ctrl-C."""


def _check_working_directory() -> None:
    """Reject a deleted working directory. PyTorch would end the process there without a message."""
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(
            f"The working directory cannot be used: {error.strerror}. Change to an existing folder, then run the command again."
        ) from error


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line. Errors of raydfl become one message and an exit code."""
    try:
        _check_working_directory()
        app(arguments, prog_name="raydfl")
    except RaydflError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code != _INTERRUPTED:
            raise
        print("stopped", file=sys.stderr)  # noqa: T201
        sys.exit(1)
