"""The commands ``raydfl data ...``, which list, describe, import, prepare and plot data sets."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from raydfl.cli._arguments import File, Json, Overrides, Quiet, TakesSettings, explain_write_errors, show_progress
from raydfl.core.errors import ConfigError, DataError, InputError

data_app = typer.Typer(help="List, describe, import, prepare and plot data sets.", no_args_is_help=True)


@data_app.command("list")
def data_list() -> None:
    """List the supported data sets."""
    from raydfl.data import dataset_names, find_dataset

    table = Table("name", "what", "licence", box=None, pad_edge=False)
    for name in dataset_names():
        cls = find_dataset(name)
        table.add_row(name, cls.card.title, cls.card.licence)
    Console(highlight=False).print(table)
    print("\nFor details: raydfl data info NAME")  # noqa: T201


@data_app.command("info", cls=TakesSettings)
def data_info(
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="name of a data set, or a configuration file", show_default=False)
    ],
    overrides: Overrides = None,
    step: Annotated[
        str | None,
        typer.Option(
            "--step", help="print the tables of clips and clients after this step (list, split, partition, ...)"
        ),
    ] = None,
) -> None:
    """Describe a data set, or the clips and clients of a configuration.

    NAME prints the layout, licence and options of a data set. FILE prints the clips, classes, groups and clients of a
    configuration. It also suggests a split, a partition and settings for a first run. The last lines are the next command.
    """
    of_file = Path(what).suffix in (".yaml", ".yml") or Path(what).is_file()
    if of_file:
        from raydfl.data import start_reader

        start_reader()
    from raydfl.cli.describe import (
        describe_data,
        describe_dataset,
        describe_step,
    )  # imports PyTorch, which takes seconds

    if of_file:
        from raydfl.cli.proposal import format_command, propose
        from raydfl.data import qualify_error  # imports PyArrow, which is slow
        from raydfl.engine import load_config

        config, given = load_config(Path(what), overrides or []), [what, *(overrides or [])]
        problem = None
        try:
            for part, data in config.data.each.items():
                if part:
                    print(f"\npart {part}")  # noqa: T201
                lines = describe_data(data, config.run.seed, config.labels_needed)
                if step is not None:
                    lines = describe_step(data, config.run.seed, step, config.components.attack)
                for line in lines:
                    print(line)  # noqa: T201
        except DataError as error:
            problem = qualify_error(error, part)
        if config.data.sites or config.data.parts or step is not None:
            if problem is not None:
                raise problem
            command = "data info" if step is not None else "run"
            print(f"next: {format_command(command, given)}")  # noqa: T201
            return
        for line in propose(config, given, problem):
            print(line)  # noqa: T201
    elif overrides:
        raise ConfigError(
            f"{overrides[0]!r}: {what!r} is not a configuration file. Settings need a configuration file before them."
        )
    else:
        print("\n".join(describe_dataset(what)))  # noqa: T201


@data_app.command("import", cls=TakesSettings)
def data_import(
    kind: Annotated[str, typer.Argument(metavar="FORMAT", help="audiofolder, huggingface, lhotse or webdataset")],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="folder or file with the recordings, or a URI")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="options of the format, e.g. label_column=class", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="manifest to write (CSV or Parquet)")] = Path("manifest.parquet"),
    client: Annotated[
        str | None,
        typer.Option("--client", help="column with the owner of each clip; none: clips have no owners"),
    ] = None,
) -> None:
    """Import recordings of another format into a manifest.

    The manifest lists the recordings and does not copy them. Read it with the data set "manifest". raydfl data info FORMAT
    prints the options. Owners come from a column named group, speaker, client_id or speaker_id. --client selects another column.
    """
    from raydfl.data import import_recordings
    from raydfl.engine import apply_overrides

    for message in import_recordings(kind, source, out, client, apply_overrides({}, options or [])):
        print(message)  # noqa: T201
    print(out)  # noqa: T201


@data_app.command("prepare", cls=TakesSettings)
def data_prepare(file: File, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Compute the features of a configuration.

    Features go into the cache shared by all runs. They are computed in parallel on this machine, or on the Ray cluster set by
    ray.address or RAY_ADDRESS. After an interruption, the same command continues.
    """
    from raydfl.data import start_reader

    start_reader()
    from raydfl.cluster import check_persistent  # imports Ray, which is slow
    from raydfl.core.files import default_cache
    from raydfl.data import build_population
    from raydfl.engine import load_config

    config = load_config(file, overrides or [])
    check_persistent({"data.cache": config.data.cache or default_cache()})
    with show_progress(quiet, as_json) as progress, contextlib.ExitStack() as stack:
        run_chunks = None
        if config.ray.address or os.environ.get("RAY_ADDRESS"):
            from raydfl.cluster import compute_on_cluster, connect_ray

            stack.enter_context(connect_ray(config.ray.address, quiet=True))
            run_chunks = compute_on_cluster
        population = build_population(
            config.data,
            config.run.seed,
            progress,
            run_chunks,
            config.components.attack,
            labels_needed=config.labels_needed,
        )
        for message in population.messages:
            progress.message(message)
        tested = sum(len(part.test) for part in population.parts.values())
        progress.message(
            f"Features are ready: {len(population)} clients, {tested} test examples, "
            f"{len(population.classes)} classes, {len(population.skipped)} clips left out"
        )


@data_app.command("plot", cls=TakesSettings)
def data_plot(
    file: File,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="image to write (.png, .svg or .pdf)")] = Path("partition.png"),
) -> None:
    """Plot the number of clips of each client and class."""
    from raydfl.data import start_reader

    start_reader()
    from raydfl.data import build_population
    from raydfl.engine import load_config
    from raydfl.runs.report import plot_partition

    config = load_config(file, overrides or [])
    _check_image(out)
    with show_progress(quiet=False, as_json=False) as progress:
        population = build_population(config.data, config.run.seed, progress, labels_needed=config.labels_needed)
    with explain_write_errors(out):
        plot_partition(population, out)
    print(out)  # noqa: T201


@data_app.command("fleet", cls=TakesSettings)
def data_fleet(
    file: File,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="image to write (.png, .svg or .pdf)")] = None,
    as_json: Json = False,
) -> None:
    """Print the arrivals of asynchronous training (train.fleet) in virtual time, without training.

    The forecast has the rounds of the configuration, or ends at run.stop.seconds. The busy places are the mean number of clients
    in training. The last line shows how many updates come from slow clients.
    """
    from raydfl.data import start_reader

    start_reader()
    from raydfl.data import build_population  # PyTorch takes seconds, and the reader starts meanwhile
    from raydfl.engine import forecast_steps, load_config

    config = load_config(file, overrides or [])
    if out is not None:
        _check_image(out)
    if config.data.sites:
        raise InputError("data.sites: the clients are known only at the sites. Remove it, or start the run.")
    with show_progress(quiet=True, as_json=False) as progress:
        population = build_population(config.data, config.run.seed, progress, labels_needed=config.labels_needed)
    forecast = forecast_steps(config, population)
    if out is not None:
        from raydfl.runs.report import plot_fleet  # Matplotlib takes a second

        with explain_write_errors(out):
            plot_fleet(forecast, out)
    if as_json:
        print(json.dumps(forecast.to_dict()))  # noqa: T201
        return
    _print_forecast(forecast.to_dict())
    if out is not None:
        print(out)  # noqa: T201


def _print_forecast(values: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(values["dropped"].items())) or "none"
    console.print(
        f"{values['rounds']:,} rounds end after {values['seconds']:,.6g} virtual seconds, {values['seconds_per_round']:,.4g} each\n"
        f"{values['arrivals']:,} updates, {values['arrivals_per_hour']:,.4g} an hour; dropped: {dropped}\n"
        f"busy places: {values['busy']:.4g}",
        markup=False,
        soft_wrap=True,
    )
    table = Table("", *(name for name in values["round_trip"]), box=None, pad_edge=False)
    for label, name in (("round trip (s)", "round_trip"), ("staleness (rounds)", "staleness")):
        table.add_row(label, *(f"{value:,.4g}" for value in values[name].values()))
    console.print(table)
    console.print(
        f"{values['clients_without_update']:,} of {values['clients']:,} clients send no update. The slowest quarter of the rest "
        f"sends {100 * values['share_of_slowest']:.0f} % of the updates.",
        markup=False,
        soft_wrap=True,
    )


def _check_image(out: Path) -> None:
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--out {out}: the name must end in .png, .svg or .pdf.")
