"""Check that no process's memory grows over thousands of short rounds.

    python benchmarks/soak.py [--rounds 5000] [--every 50] [--allowed 8] [--out soak] [key=value ...]

Runs the tiny federation with two client actors like a user. At regular intervals it reads the unique set size of each of
its processes, which is the memory that its end would free, and the bytes in Ray's object store. Writes OUT.csv, OUT.svg and
OUT.png and prints a table. It fails if the median of the last quarter of a process's readings is more than ``--allowed`` MB
above the first quarter's. The first fifth of the first quarter, and the first 100 rounds, are left out as warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from processes import Mark

ROOT = Path(__file__).parents[1]
TITLES = {
    "ray::ClientActor": "client actor",
    "ray::ServerActor": "server actor",
    "raydfl run": "driver",
    "/raylet --": "raylet",
    "/gcs_server --": "Ray's head",
}
STORE = "object store"
"""Name of the readings of Ray's object store."""
SETTLED = 100
"""Warm-up rounds: the files of the metrics table are first merged after them."""
Readings = dict[str, list[tuple[int, float]]]
"""By process: rounds completed, MB."""


def list_processes(mark: Mark) -> dict[str, psutil.Process]:
    """Return the run's processes in ``TITLES``, with a name each."""
    names = {}
    for word, title in TITLES.items():
        several = mark.processes(word)
        for number, process in enumerate(several, 1):
            names[title if len(several) == 1 else f"{title} {number}"] = process
    return names


def soak(folder: Path, rounds: int, every: int, overrides: Sequence[str] = ()) -> Readings:
    """Do the rounds and read the memory at the given interval.

    Args:
        folder: for the run.
        rounds: number of rounds.
        every: rounds between two readings.
        overrides: settings, ``key=value``.

    Raises:
        subprocess.CalledProcessError: The run failed.
    """
    mark = Mark()
    settings = [
        f"train.rounds={rounds}",
        "train.cohort=2",
        "train.local_epochs=1",
        "models.model=crnn_tiny",
        "evaluate.every=100",
        "evaluate.client_test_clips=0",
        "ray.actors=2",
        "run.name=soak",
        f"run.dir={folder}",
        *overrides,
    ]
    command = [sys.executable, "-m", "raydfl", "run", str(ROOT / "jobs" / "tiny.yaml"), *settings, "--json"]
    readings: Readings = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **mark.environment}
    ) as process:
        watched: dict[str, psutil.Process] = {}
        read_store: Callable[[], int] | None = None
        for done in _rounds(process):
            if done % every:
                continue
            watched = watched or list_processes(mark)
            for name, each in watched.items():
                with contextlib.suppress(psutil.NoSuchProcess):  # a short run may end before its rounds are read
                    readings.setdefault(name, []).append((done, each.memory_full_info().uss / 1e6))
            read_store = read_store or _connect(watched["raylet"])
            # A short run may have ended. Ray then raises one of two errors, or ends this process after a minute.
            with contextlib.suppress(RuntimeError, AssertionError, psutil.NoSuchProcess):
                if watched["raylet"].status() != psutil.STATUS_ZOMBIE:
                    readings.setdefault(STORE, []).append((done, read_store() / 1e6))
            print(f"round {done}", end="\r", flush=True, file=sys.stderr)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return readings


def _connect(raylet: psutil.Process) -> Callable[[], int]:
    """Connect to the head of a raylet, and return a function that reads the bytes in the object store."""
    address = next(text.partition("=")[2] for text in raylet.cmdline() if text.startswith("--gcs-address="))
    os.environ.update({name: value for name, value in raylet.environ().items() if name.startswith("RAY_AUTH")})
    from ray._private.internal_api import (  # Ray reads the variables when it is imported.
        get_memory_info_reply,
        get_state_from_address,
    )

    state = get_state_from_address(address)
    return lambda: int(get_memory_info_reply(state).store_stats.object_store_bytes_used)


def _rounds(process: subprocess.Popen[str]) -> Iterator[int]:
    if process.stdout is None:
        return
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "round":
            yield event["round"]


def growth(values: Sequence[tuple[int, float]]) -> float:
    """Return the MB between the medians of the first and the last quarter of the readings, without the warm-up."""
    megabytes = [value for _, value in values]
    quarter = max(1, len(megabytes) // 4)
    fifth = quarter // 5
    start = max(fifth, sum(done <= SETTLED for done, _ in values))
    warm = megabytes[start : start + quarter - fifth] or megabytes[:1]
    return statistics.median(megabytes[-quarter:]) - statistics.median(warm)


def write(readings: Mapping[str, Sequence[tuple[int, float]]], out: Path) -> None:
    """Write a CSV (process, round, MB) and a plot of it, SVG and PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["process", "round", "unique_mb"])
        table.writerows((name, done, f"{value:.2f}") for name, each in readings.items() for done, value in each)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, each in sorted(readings.items(), key=lambda item: -item[1][-1][1]):
        axes.plot([done for done, _ in each], [value for _, value in each], linewidth=1.5, label=name)
    axes.set(xlabel="rounds completed", ylabel="unique memory (MB)", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(out.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(out.with_suffix(".png"), dpi=120)
    plt.close(figure)


def main() -> None:
    """Run, write, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--every", type=int, default=50, help="rounds between two readings")
    parser.add_argument("--allowed", type=float, default=8.0, help="MB that a process may grow")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="files to write, without their endings")
    parser.add_argument("overrides", nargs="*", help="settings of the run, key=value")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rs") as folder:
        readings = soak(Path(folder), given.rounds, given.every, given.overrides)
    write(readings, given.out)
    print(f"{'process':16}{'first, MB':>12}{'last, MB':>12}{'growth, MB':>12}")
    for name, each in readings.items():
        print(f"{name:16}{each[0][1]:12.1f}{each[-1][1]:12.1f}{growth(each):12.1f}")
    grown = [name for name, each in readings.items() if growth(each) > given.allowed]
    sys.exit(f"grown by more than {given.allowed:g} MB: {', '.join(grown)}" if grown else 0)


if __name__ == "__main__":
    main()
