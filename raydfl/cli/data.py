"""The commands ``raydfl data ...``: they list data sets, describe one, and show its clients."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from raydfl.cli._arguments import File, Json, Overrides, Quiet, TakesSettings, progress_of, writing
from raydfl.core.errors import ConfigError, DataError, InputError

data_app = typer.Typer(help="Data sets: which there are, what is in them, who gets what.", no_args_is_help=True)


@data_app.command("list")
def data_list() -> None:
    """List the data sets that raydfl can read."""
    from raydfl.data import dataset_names, find_dataset

    table = Table("name", "what", "licence", box=None, pad_edge=False)
    for name in dataset_names():
        cls = find_dataset(name)
        table.add_row(name, cls.card.title, cls.card.licence)
    Console(highlight=False).print(table)
    print("\nMore about one: raydfl data info NAME")  # noqa: T201


@data_app.command("info", cls=TakesSettings)
def data_info(
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="a data set's name, or a configuration", show_default=False)
    ],
    overrides: Overrides = None,
    step: Annotated[
        str | None,
        typer.Option(
            "--step", help="print the tables of clips and clients after this step: list, split, partition ..."
        ),
    ] = None,
) -> None:
    """Describe a data set's layout and options, or who gets what.

    With NAME: layout, licence and options of that data set. With FILE: clips, classes, groups and clients of that configuration,
    and a split, a partition and settings to begin with.
    """
    from raydfl.cli.describe import describe_data, describe_dataset, describe_step  # it imports PyTorch

    if Path(what).suffix in (".yaml", ".yml") or Path(what).is_file():
        from raydfl.cli.proposal import propose
        from raydfl.data import with_part
        from raydfl.engine import load_config

        config = load_config(Path(what), overrides or [])
        unfit = None
        try:
            for part, data in config.data.each.items():
                if part:
                    print(f"\npart {part}")  # noqa: T201
                lines = describe_data(data, config.run.seed, config.labels_needed)
                if step is not None:
                    lines = describe_step(data, config.run.seed, step, config.parts.attack)
                for line in lines:
                    print(line)  # noqa: T201
        except DataError as error:
            unfit = with_part(error, part)
        if config.data.sites or config.data.parts or step is not None:
            if unfit is not None:
                raise unfit
            return
        for line in propose(config, [what, *(overrides or [])], unfit):
            print(line)  # noqa: T201
    elif overrides:
        raise ConfigError(f"{overrides[0]!r}: settings go with a configuration file, and {what!r} is none")
    else:
        print("\n".join(describe_dataset(what)))  # noqa: T201


@data_app.command("import", cls=TakesSettings)
def data_import(
    kind: Annotated[str, typer.Argument(metavar="FORMAT", help="audiofolder, huggingface, lhotse or webdataset")],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="the folder or file with the recordings, or a URI")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="options of the format, e.g. label_column=class", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="the list to write, CSV or Parquet")] = Path("manifest.parquet"),
    client: Annotated[
        str | None,
        typer.Option("--client", help="column that names the owner of a clip; none: no owners"),
    ] = None,
) -> None:
    """Write a list of recordings in another format, for the data set manifest.

    The recordings stay where they are. raydfl data info FORMAT prints the options. A column named group, speaker, client_id or
    speaker_id names the owners, unless --client names another column.
    """
    from raydfl.data import import_recordings
    from raydfl.engine import apply_overrides

    for message in import_recordings(kind, source, out, client, apply_overrides({}, options or [])):
        print(message)  # noqa: T201
    print(out)  # noqa: T201


@data_app.command("prepare", cls=TakesSettings)
def data_prepare(file: File, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Compute the features that FILE needs.

    In parallel, into the cache that all runs share: by this machine, or by the Ray cluster that ray.address or RAY_ADDRESS names.
    It may be interrupted: the next call goes on.
    """
    from raydfl.cluster import check_kept
    from raydfl.core.files import default_cache
    from raydfl.data import build_population
    from raydfl.engine import load_config

    config = load_config(file, overrides or [])
    check_kept({"data.cache": config.data.cache or default_cache()})
    with progress_of(quiet, as_json) as progress, contextlib.ExitStack() as stack:
        run_chunks = None
        if config.ray.address or os.environ.get("RAY_ADDRESS"):
            from raydfl.cluster import connected, on_the_cluster

            stack.enter_context(connected(config.ray.address, quiet=True))
            run_chunks = on_the_cluster
        population = build_population(
            config.data, config.run.seed, progress, run_chunks, config.parts.attack, labels_needed=config.labels_needed
        )
        for message in population.messages:
            progress.message(message)
        tested = sum(len(part.test) for part in population.parts.values())
        progress.message(
            f"features are ready: {len(population)} clients, {tested} test examples, "
            f"{len(population.classes)} classes, {len(population.skipped)} clips left out"
        )


@data_app.command("plot", cls=TakesSettings)
def data_plot(
    file: File,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="the PNG, SVG or PDF to write")] = Path("partition.png"),
) -> None:
    """Draw which client has how much of which class."""
    from raydfl.data import build_population
    from raydfl.engine import load_config
    from raydfl.runs.report import plot_partition

    config = load_config(file, overrides or [])
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--out {out}: the name must end in .png, .svg or .pdf")
    with progress_of(quiet=False, as_json=False) as progress:
        population = build_population(config.data, config.run.seed, progress, labels_needed=config.labels_needed)
    with writing(out):
        plot_partition(population, out)
    print(out)  # noqa: T201
