"""The command line. Exit codes: 0 done, 2 bad configuration or input, 1 anything else (also a run that was stopped)."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from raydfl.errors import RaydflError

if TYPE_CHECKING:
    from raydfl.progress import Progress

app = typer.Typer(
    help="Federated learning for audio on Ray clusters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Data sets: what there is, what is in them, features, who has what.", no_args_is_help=True)
app.add_typer(data_app, name="data")

File = Annotated[Path, typer.Argument(metavar="FILE", help="the configuration, a YAML file", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="settings to change, e.g. train.rounds=50", show_default=False),
]
RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="a run directory", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print errors only")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object a line, for machines")]


def _progress(quiet: bool, as_json: bool) -> Progress:
    from raydfl.progress import Progress

    if not as_json:
        return Progress("quiet" if quiet else "auto")
    # Standard output is for our events alone: what libraries and Ray's processes print goes to standard error.
    events = os.fdopen(os.dup(1), "w")
    sys.stdout.flush()
    os.dup2(2, 1)
    return Progress("json", events)


@app.command("run")
def run_command(file: File, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Train as FILE says; with a run.name that exists already, go on with that run."""
    from raydfl.config import load_config
    from raydfl.runs import run

    config = load_config(file, overrides or [])
    with _progress(quiet, as_json) as progress:
        outcome = run(config, progress)
    if not outcome.finished:
        raise typer.Exit(1)


@app.command("resume")
def resume_command(directory: RunDir, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Go on with the run in DIR after its last commit. Settings that do not decide the numbers may be changed."""
    from raydfl.runs import resume

    with _progress(quiet, as_json) as progress:
        outcome = resume(directory, overrides or [], progress)
    if not outcome.finished:
        raise typer.Exit(1)


@app.command("replay")
def replay_command(
    directory: RunDir,
    round_number: Annotated[int, typer.Option("--round", min=1, help="the round, counted from 1")],
    client: Annotated[str, typer.Option("--client", help="the client's id")],
    save: Annotated[Path | None, typer.Option("--save", help="write the update to this safetensors file")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="open the debugger where the method's code fails")] = False,
) -> None:
    """Do one client's work of one round again, in this process. The run is not changed."""
    from raydfl.runs import replay

    try:
        replayed = replay(directory, round_number, client)
    except RaydflError as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, RaydflError):
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
    if replayed.update is None:
        console.print(f"the update was rejected: {replayed.rejected}", markup=False)
        return
    table = Table("tensor", "shape", "norm", "change")
    for name, tensor in replayed.update.tensors.items():
        before = next((group[name] for group in replayed.received.values() if name in group), None)
        change = "" if before is None else f"{float((tensor - before).norm()):.6g}"
        table.add_row(name, str(tuple(tensor.shape)), f"{float(tensor.norm()):.6g}", change)
    console.print(table)
    if save is not None:
        import safetensors.torch

        tensors = {name: tensor.contiguous() for name, tensor in replayed.update.tensors.items()}
        safetensors.torch.save_file(tensors, save)
        console.print(f"update written to {save}", markup=False)


@app.command("report")
def report_command(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="run directories", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="the page to write; default: report.html in the one DIR, or here")
    ] = None,
) -> None:
    """Write one HTML page about a run, or one that compares several."""
    from raydfl.report import write_report

    if out is None:
        out = directories[0] / "report.html" if len(directories) == 1 else Path("report.html")
    print(write_report(directories, out))  # noqa: T201


@app.command("methods")
def methods_command(as_json: Json = False) -> None:
    """All methods with their hyperparameters, ranges and defaults."""
    from raydfl import registry
    from raydfl.config import describe_options
    from raydfl.method import Method

    classes = {
        name: registry.find("raydfl.methods", name, Method, "method") for name in registry.names("raydfl.methods")
    }
    if as_json:
        options = {name: [list(row) for row in describe_options(cls)] for name, cls in classes.items()}
        print(json.dumps(options, default=str))  # noqa: T201
        return
    console = Console(highlight=False)
    for name, cls in classes.items():
        console.print(f"{name}: {(cls.__doc__ or '').strip().splitlines()[0]}", markup=False, style="bold")
        models = ", ".join(f"{model} (default {architecture})" for model, architecture in cls.models.items())
        console.print(f"  models: {models}", markup=False)
        for option, default, meaning in describe_options(cls):
            console.print(f"  {option} = {json.dumps(default)}: {meaning}", markup=False)


@app.command("config")
def config_command(file: File, overrides: Overrides = None) -> None:
    """The resolved configuration of FILE, with the meaning, unit and range of every field."""
    from raydfl.config import load_config
    from raydfl.explain import explain_config

    print(explain_config(load_config(file, overrides or [])))  # noqa: T201


@data_app.command("list")
def data_list() -> None:
    """The data sets that raydfl can read."""
    from raydfl.data.dataset import dataset_names, find_dataset

    table = Table("name", "what", "licence")
    for name in dataset_names():
        cls = find_dataset(name)
        table.add_row(name, cls.card.title, cls.card.licence)
    Console(highlight=False).print(table)


@data_app.command("info")
def data_info(
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="a data set's name, or a configuration", show_default=False)
    ],
    overrides: Overrides = None,
) -> None:
    """A data set's options and layout; with a configuration, what is in its data: clips, classes, groups, clients."""
    from raydfl.data.describe import describe_data, describe_dataset

    if what.endswith((".yaml", ".yml")):
        from raydfl.config import load_config

        config = load_config(Path(what), overrides or [])
        lines = describe_data(config.data, config.run.seed)
    else:
        lines = describe_dataset(what)
    console = Console(highlight=False)
    for line in lines:
        console.print(line, markup=False)


@data_app.command("prepare")
def data_prepare(file: File, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Compute the features that FILE needs, in parallel, into the cache that all runs share."""
    from raydfl.config import load_config
    from raydfl.data.population import build_population

    config = load_config(file, overrides or [])
    with _progress(quiet, as_json) as progress:
        population = build_population(config.data, config.run.seed, progress)
        for message in population.messages:
            progress.message(message)
        progress.message(
            f"{len(population)} clients, {len(population.test)} test examples, {len(population.classes)} classes"
        )


@data_app.command("plot")
def data_plot(
    file: File,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="the PNG, SVG or PDF to write")] = Path("partition.png"),
) -> None:
    """Draw which client has how much of which class."""
    from raydfl.config import load_config
    from raydfl.data.plot import plot_partition
    from raydfl.data.population import build_population

    config = load_config(file, overrides or [])
    with _progress(quiet=False, as_json=False) as progress:
        population = build_population(config.data, config.run.seed, progress)
    plot_partition(population, out)
    print(out)  # noqa: T201


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: turns errors that were raised on purpose into one message and the right exit code."""
    try:
        app(arguments)
    except RaydflError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
