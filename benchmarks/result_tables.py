"""Helpers of the programs behind the docs' tables: options, shared training runs, and printing."""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter

from raydfl.cluster.server import Server
from raydfl.engine.config import Config
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

T = TypeVar("T")


def options(doc: str | None, tables: Mapping[str, Any], rounds: int, of: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options common to all these programs.

    Args:
        doc: the program's docstring; its first line is shown.
        tables: by name.
        rounds: default number of rounds of a run.
        of: the object of the rounds.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--tables", nargs="+", choices=tables, default=[*tables])
    parser.add_argument("--rounds", type=int, default=rounds, help=of)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--kept", type=Path, help="folder of finished runs, to continue later; default: do not keep them"
    )
    return parser


@contextmanager
def folders(kept: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for runs, removed afterwards, and a folder for kept results. A single thread computes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="raydfl-tables-") as folder:
        runs, results = Path(folder) / "runs", (kept or Path(folder) / "kept").absolute()
        runs.mkdir()
        results.mkdir(parents=True, exist_ok=True)
        yield runs, results


def print_tables(tables: Mapping[str, Callable[[Any], None]], names: Sequence[str], budget: str, bench: Any) -> None:
    """Print tables by name, each with the budget of its runs before it and its processor time after it."""
    for name in names:
        began = time.process_time()
        print(f"\n## {tables[name].__doc__}\n\n{budget}\n", flush=True)
        tables[name](bench)
        print(f"\nProcessor time of this table: {math.ceil((time.process_time() - began) / 60)} min.", flush=True)


def print_head(names: Sequence[str]) -> None:
    """Print a table's head over an unnamed first column."""
    print("| | " + " | ".join(names) + " |\n|---|" + "---|" * len(names), flush=True)


def print_row(name: str, cells: Sequence[str]) -> None:
    """Print a table's row."""
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def mean(values: Sequence[float], digits: int = 3) -> str:
    """Return mean and standard deviation over the seeds."""
    said = f"{statistics.fmean(values):.{digits}f}"
    return said + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def percent(values: Sequence[float]) -> str:
    """Return mean and standard deviation over the seeds in per cent."""
    return mean([100 * value for value in values], digits=1)


def run_name() -> str:
    """Return a unique run name."""
    return f"run{time.monotonic_ns()}"


def settings(config: Config) -> str:
    """Return the settings that identify a run. A setting added later leaves the identity unchanged at its default."""
    return config.model_dump_json(exclude={"run": {"name", "dir"}}, exclude_defaults=True)


def find_result_file(kept: Path, said: str) -> Path:
    """Return the path of a run's kept result, derived from the run's identity."""
    return kept / f"{hashlib.sha256(said.encode()).hexdigest()[:24]}.json"


def once(file: Path, kind: type[T], make: Callable[[], T]) -> T:
    """Return the content of a file, or create and store it."""
    if not file.is_file():
        result = make()
        file.write_bytes(TypeAdapter(kind).dump_json(result))
        return result
    return TypeAdapter(kind).validate_json(file.read_bytes())


@contextmanager
def open_server(config: Config) -> Iterator[Server]:
    """Open a new federation's server; its run's folder is removed afterwards."""
    folder = create(config, Progress("quiet"))
    server = Server(folder, config)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def train_federation(config: Config) -> Iterator[tuple[Path, float]]:
    """Train a federation to its last round; yield its folder, removed afterwards, and the rounds' processor time, s."""
    with open_server(config) as server:
        began = time.process_time()
        while server.round_index < config.train.rounds:
            server.round()
        server.finish()
        server.close()
        yield Path(config.run.dir, str(config.run.name)), time.process_time() - began
