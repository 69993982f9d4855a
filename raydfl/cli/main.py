"""The command line. Exit codes: 0 done, 2 bad configuration or input, also where only the end shows it, 1 anything else."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from raydfl.cli._arguments import File, Json, Overrides, Quiet, TakesSettings, progress_of, writing
from raydfl.cli.data import data_app
from raydfl.cluster import check_no_token, in_a_job
from raydfl.core.errors import ClientError, InputError, RaydflError, printable
from raydfl.core.files import displayed_path
from raydfl.core.version import __version__

if TYPE_CHECKING:
    from raydfl.runs import Result

app = typer.Typer(
    help="Federated learning for audio on Ray clusters. Start with: raydfl init, then raydfl run jobs/quickstart.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")


def _run_dir(text: str) -> Path:
    """Return a run's folder as it was given; one behind a URI is fetched first."""
    if "://" not in text:
        return Path(text)
    from raydfl.engine.storage import local_run

    return local_run(text)


RunDir = Annotated[
    Path, typer.Argument(metavar="DIR", help="a run directory, or its URI", show_default=False, parser=_run_dir)
]
Trust = Annotated[bool, typer.Option("--trust", help="approve and run the code that the run's configuration names")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"raydfl {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Handle the options before a command."""
    if in_a_job():
        from raydfl.cluster import current_token  # takes gRPC

        check_no_token(current_token()[0])


def _end(result: Result, quiet: bool) -> None:
    """End with the code of a run: 1 if it was stopped; that of bad input if it is worthless, as it would be once more."""
    if result.worthless and quiet:
        raise InputError(result.worthless)
    if result.worthless:
        raise typer.Exit(InputError.exit_code)
    if not result.finished:
        raise typer.Exit(1)


@app.command("init")
def init_command(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="where to; default: here", show_default=False)
    ] = Path(),
) -> None:
    """Write example jobs, searches and a cluster file into FOLDER.

    They are what the documentation's commands use. No file that is there is changed.
    """
    from raydfl.cli.example_jobs import write_examples

    written = write_examples(folder)
    print(f"files written into {folder.resolve()}: {len(written)}{'' if written else ' (all were there)'}")  # noqa: T201
    before = "" if displayed_path(folder) == "." else f"cd {shlex.quote(str(folder))} && "
    print(f"start with: {before}raydfl run jobs/quickstart.yaml")  # noqa: T201
    print("in seconds, without Ray: raydfl run jobs/tiny.yaml")  # noqa: T201


@app.command("run", cls=TakesSettings)
def run_command(file: File, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Train as FILE says.

    With a run.name whose folder exists already, go on with that run. Ctrl-C stops after the round.
    """
    from raydfl.engine import load_config
    from raydfl.runs import run

    config = load_config(file, overrides or [])
    with progress_of(quiet, as_json) as progress:
        result = run(config, progress)
    _end(result, quiet)


@app.command("resume", cls=TakesSettings)
def resume_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="a run directory, or its URI", show_default=False)],
    overrides: Overrides = None,
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with the run in DIR after its last commit.

    Settings that do not decide the numbers may be changed: train.rounds, run.stop.patience, ray.*, run.commit_every, track.* ...
    """
    from raydfl.runs import resume

    with progress_of(quiet, as_json) as progress:
        result = resume(directory, overrides or [], progress, trust)
    _end(result, quiet)


@app.command("replay")
def replay_command(
    directory: RunDir,
    round_number: Annotated[int, typer.Option("--round", min=1, help="the round, counted from 1")],
    client: Annotated[str, typer.Option("--client", help="the client's id")],
    save: Annotated[Path | None, typer.Option("--save", help="write the update to this safetensors file")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="open the debugger where the method's code fails")] = False,
    trust: Trust = False,
) -> None:
    """Do one client's work of one round again.

    It is done in this process, from what the run has kept; the run is not changed.
    """
    from raydfl.runs import replay

    try:
        replayed = replay(directory, round_number, client, trust)
    except ClientError as error:
        cause = error.__cause__
        if cause is not None:
            traceback.print_exception(cause)
            if debug:
                import pdb  # noqa: T100  (asked for)

                pdb.post_mortem(cause.__traceback__)
        raise
    console = Console(highlight=False)
    who = replayed.client
    models = ", ".join(f"{spec.name}={spec.architecture}" for spec in who.models)
    console.print(f"client {who.id!r}: {who.num_examples} examples, {models}", markup=False)
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

        with writing(save):
            save.write_bytes(to_safetensors(replayed.update.tensors))
        console.print(f"update written to {save}", markup=False)


@app.command("report")
def report_command(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="run directories, or their URIs", show_default=False, parser=_run_dir),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="the page to write; default: report.html in the one DIR, or here")
    ] = None,
) -> None:
    """Write one HTML page about a run, or one that compares several."""
    from raydfl.runs.report import read_run, write_page

    if out is None:
        out = directories[0] / "report.html" if len(directories) == 1 else Path("report.html")
    runs = [read_run(folder) for folder in dict.fromkeys(directory.resolve() for directory in directories)]
    print(write_page(runs, out))  # noqa: T201
    for run in runs:
        for text in run.missing:
            print(f"warning: {run.folder}: {printable(text)}", file=sys.stderr)  # noqa: T201


ModelName = Annotated[
    str | None, typer.Option("--model", help="which model; default: the shared one, or what --client keeps for itself")
]
ClientId = Annotated[str | None, typer.Option("--client", help="the model of this client, with its private part")]


BestRound = Annotated[
    bool, typer.Option("--best", help="the models of the best round, which run.best keeps; default: of the last round")
]


@app.command("predict")
def predict_command(
    directory: RunDir,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="recordings or images, folders of them, or *.tar, *.parquet or *.arrow files with them inside",
            show_default=False,
        ),
    ] = None,
    model: ModelName = None,
    client: ClientId = None,
    top: Annotated[int, typer.Option("--top", min=1, help="how many classes to show for each recording")] = 1,
    as_csv: Annotated[bool, typer.Option("--csv", help="print comma-separated values")] = False,
    as_json: Json = False,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", help="the score from which on a recording is anomalous; default: the run's own"),
    ] = None,
    dcase: Annotated[
        Path | None,
        typer.Option(
            "--dcase",
            help="folder for the files of a submission to DCASE's task 2, in place of what is printed",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        bool,
        typer.Option(
            "--test", help="score the run's own test clips, in place of FILEs, for DIR/scores.csv and the report"
        ),
    ] = False,
    best: BestRound = False,
    view: Annotated[
        list[str] | None,
        typer.Option(
            "--view",
            metavar="NAME=PATH",
            help="with a model of several views (--model fusion): the folder with the files of a further view, named as the "
            "recordings are",
            show_default=False,
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Classify recordings with a model of the run in DIR, or say of them what else the run's objective answers.

    They go through the run's own front end: wav, flac, ogg, opus, mp3, aiff and others, any rate and number of channels; or images,
    where the model reads these; or films, with the extra video. Those that cannot be read are named at the end, with exit code 2;
    all others are classified.
    """
    import dataclasses

    from raydfl.cli.predictions import Form, show
    from raydfl.runs.inference import (
        RunFusion,
        Threshold,
        predict_fused,
        open_model,
        predictions,
        score_tests,
        write_submission,
    )
    from raydfl.runs.report import write_report

    if test != (not files):
        raise InputError("give either recordings (FILE...) or --test, for the run's own test clips")
    files = files or []
    if as_csv and as_json:
        raise InputError("--csv and --json: choose one")
    given = None if threshold is None else Threshold(threshold, "given")
    if test:
        if client is not None or dcase is not None:
            raise InputError("--test scores each client's clips by its own model; leave out --client and --dcase")
        scored = score_tests(directory, model, given, trust, best)
        print(scored)  # noqa: T201
        print(write_report([scored.parent], scored.parent))  # noqa: T201
        return
    if dcase is not None:
        written = write_submission(
            directory, files, dcase, model=model, client=client, threshold=given, trust=trust, best=best
        )
        for path in written:
            print(path)  # noqa: T201
        return
    form: Form = "csv" if as_csv else "json" if as_json else "table"
    loaded = open_model(directory, model, client, trust, best, bool(view))
    if isinstance(loaded, RunFusion):
        if given is not None:
            raise InputError(f"--model {model}: it gives no scores; leave out --threshold")
        found = predict_fused(loaded, files, _files_of_views(view or []))
        show(found, min(top, len(loaded.student.classes)), form, loaded.description, several=True)
        return
    if given is not None:
        if loaded.objective.answers != "score":
            raise InputError(f"--threshold: model {loaded.name!r} gives no scores; leave it out")
        loaded = dataclasses.replace(loaded, threshold=given)
    heading = loaded.description
    if loaded.threshold is not None:
        heading += f"\nanomalous from {loaded.threshold.value:.4g} on ({loaded.threshold.origin})"
    show(
        predictions(loaded, files),
        min(top, len(loaded.classes)),
        form,
        heading,
        None,
        loaded.objective.answers,
    )


def _files_of_views(given: list[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not (name and equals and path):
            raise InputError(f"--view {each}: write NAME=PATH, such as --view image=pictures")
        found[name] = Path(path)
    return found


@app.command("export")
def export_command(
    directory: RunDir,
    model: ModelName = None,
    client: ClientId = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="the .onnx file; default: DIR/export/MODEL.onnx", show_default=False)
    ] = None,
    best: BestRound = False,
    trust: Trust = False,
    given: Annotated[
        Literal["features", "wave"],
        typer.Option("--input", help="what the graph takes: features, or samples, with the front end inside"),
    ] = "features",
    quantize: Annotated[
        Literal["int8"] | None,
        typer.Option(
            "--quantize", help="int8: weights and activations of 8 bits, measured on the test", show_default=False
        ),
    ] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="samples come piece by piece, and a state is carried (CRNNs)")
    ] = False,
) -> None:
    """Write a model of the run in DIR as ONNX, with a JSON file beside it that says how to feed it.

    The file is compared with PyTorch, or with raydfl predict where it takes samples, before it is written.
    """
    from raydfl.runs.inference import export_model

    exported = export_model(
        directory,
        out,
        model=model,
        client=client,
        trust=trust,
        best=best,
        input=given,
        quantize=quantize,
        streaming=streaming,
    )
    print(exported.path)  # noqa: T201
    print(exported.description_path)  # noqa: T201
    print(f"round {exported.description['round']}{', ' * bool(exported.chosen)}{exported.chosen}")  # noqa: T201
    against = "PyTorch" if given == "features" and not streaming else "raydfl predict"
    print(f"largest difference to {against}: {exported.difference:.1e} ({exported.output})")  # noqa: T201
    if exported.quantised:
        print(exported.quantised)  # noqa: T201


@app.command("study", cls=TakesSettings)
@app.command("sweep", cls=TakesSettings)
@app.command("search", cls=TakesSettings)
def study_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the study, a YAML file", show_default=False)],
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="AXIS=LABEL,LABEL: leave out the other cells of this axis")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option("--parallel", min=1, help="runs at a time; default: what the CPUs and GPUs allow")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="check all configurations, and that the data sets exist")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="write the tables and the page of the results so far")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train all runs of a study side by side, and put their results into tables and one page.

    A study compares settings in a grid (axes), searches good settings (domains), or both; sweep and search are other names of the
    command. KEY=VALUE also changes the study's own settings (samples=20). Finished runs are never repeated. Ctrl-C lets runs stop
    after their round; the same command continues them.
    """
    from raydfl.cli.experiments import describe_study, do_study  # PyTorch and Ray Tune take seconds
    from raydfl.experiments import check_data_sets, corners, load_study

    study = load_study(file, [*(overrides or []), *([f"parallel={parallel}"] if parallel else [])], only or [])
    if check:
        print(describe_study(study))  # noqa: T201
        check_data_sets(study.distinct or [study.at_corner(values) for values in corners(study.settings)])
        return
    with progress_of(quiet, as_json) as progress:
        code = do_study(study, progress, table_only=table)
    if code:
        raise typer.Exit(code)


@app.command("methods")
def methods_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="these methods, rules, attacks, objectives or architectures; default: all",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List all methods, aggregation rules, attacks, objectives and architectures, with options, ranges and defaults."""
    from raydfl.cli.explain import explain_methods, methods_as_data

    if as_json:
        print(json.dumps(methods_as_data(names or [])))  # noqa: T201
    else:
        print(explain_methods(min(120, shutil.get_terminal_size((110, 1)).columns), names or []))  # noqa: T201


@app.command("config", cls=TakesSettings)
def config_command(file: File, overrides: Overrides = None) -> None:
    """Print the resolved configuration, every field explained.

    It is FILE with all defaults; comments say meaning, unit and range of each field.
    """
    from raydfl.cli.explain import explain_config
    from raydfl.engine import load_config

    print(explain_config(load_config(file, overrides or [])))  # noqa: T201


_INTERRUPTED = 130
"""The exit code that Typer gives to Ctrl-C."""


def _check_working_directory() -> None:
    """Refuse a deleted working directory, in which PyTorch's libraries end the process without a reason."""
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(
            f"The working directory cannot be used: {error.strerror}. Change to an existing folder, then run the command again."
        ) from error


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: turns errors that were raised on purpose into one message and the right exit code."""
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
