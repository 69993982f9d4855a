"""Measure the cost of asynchronous training in virtual time (train.fleet): the queue, a server step, a commit, busy actors.

The work of a step is that of rounds.py: the Free Spoken Digit Dataset, 60 clients, 12 a round, batch 16, CRNN-Lite, FedAvg. Steps
of all contestants alternate in this process, so that a busy machine affects all of them. Compared are the process's own CPU
times. Busy actors are measured with one client a step, in runs of their own with Ray.

    python benchmarks/fleet_cost.py --root PATH/TO/fsdd
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from rounds import configuration, fsdd

from raydfl import load_result, make_config, run
from raydfl.cluster.server import Server
from raydfl.core.types import Task
from raydfl.engine import apply_values
from raydfl.engine.config import Config
from raydfl.engine.fleet import Capacity, Fleet, Start, advance
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

SPREAD = {"start": 5, "example": 0.25, "spread": 1.0}
WARM_UP = 5
"""Uncounted steps of each contestant."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the Free Spoken Digit Dataset")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each contestant")
    parser.add_argument("--actors", type=int, nargs="*", default=[1, 2], help="numbers of client actors to keep busy")
    parser.add_argument("--in-flight", type=int, default=48, help="clients in flight of the asynchronous contestant")
    parser.add_argument("--events", type=int, default=20_000, help="arrivals of the queue alone")
    given = parser.parse_args()
    for buffer in (1, 10, 100):
        print(f"queue alone, buffer {buffer}: {time_queue(buffer, given.events):,.0f} arrivals a second")
    with tempfile.TemporaryDirectory(prefix="raydfl-fleet-") as name:
        folder = Path(name)
        base = configuration(fsdd(given.root), folder, "crnn_lite", 0).model_dump(mode="json")
        compare_steps(base, folder, given.rounds, given.in_flight)
        for actors in given.actors:
            keep_busy(base, folder, actors, given.rounds)


def time_queue(buffer: int, events: int) -> float:
    """Return the arrivals a second of the queue, with ten buffers of a million clients in flight."""
    rng = np.random.default_rng(0)
    paces = rng.lognormal(0, 1, 1_000_000)

    def start(now: float, free: int, unavailable: Set[int]) -> list[Start]:
        chosen: set[int] = set()
        while len(chosen) < free:
            chosen |= {int(client) for client in rng.integers(len(paces), size=free - len(chosen))} - unavailable
        return [Start(client, Task(str(client)), float(paces[client])) for client in sorted(chosen)]

    fleet, capacity, began = Fleet(), Capacity(buffer, max(100, 10 * buffer)), time.process_time()
    for version in range(events // buffer):
        fleet = advance(fleet, version, capacity, start).fleet
    return events / (time.process_time() - began)


def change(base: Mapping[str, Any], settings: Mapping[str, Any], folder: Path, name: str) -> Config:
    """Return the base configuration with other settings."""
    plain = {"train.rounds": 10_000, "run.dir": str(folder), "run.name": name, "evaluate.every": 10_000}
    return make_config(apply_values(dict(base), {**plain, **settings}))


def compare_steps(base: Mapping[str, Any], folder: Path, rounds: int, in_flight: int) -> None:
    """Print the processor time of a step and its ratio to a round without train.fleet, and the bytes of a commit."""
    fleet = {"buffer": 12, "seconds": SPREAD}
    contestants: Mapping[str, Mapping[str, Any]] = {
        "without train.fleet": {},
        "synchronous": {"train.fleet": fleet},
        f"{in_flight} clients in flight": {"train.fleet": {**fleet, "concurrency": in_flight}},
    }
    servers, times = {}, {name: list[float]() for name in contestants}
    for name, settings in contestants.items():
        config = change(base, settings, folder, name.replace(" ", "-"))
        servers[name] = Server(create(config, Progress("quiet")), config)
    for number in range(WARM_UP + rounds):
        for name, server in servers.items():
            began = time.process_time()
            server.round()
            if number >= WARM_UP:
                times[name].append(time.process_time() - began)
    first = times["without train.fleet"]
    for name, seconds in times.items():
        servers[name].close()
        run_dir = folder / name.replace(" ", "-")
        versions = [file.stat().st_size for file in run_dir.rglob("*.version")]
        newest = max((run_dir / "commits").iterdir()).stat().st_size
        ratios = sorted(one / other for one, other in zip(seconds, first, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"{name}: {1000 * statistics.median(seconds):.0f} ms a step", end=", ")
        print(f"ratio {statistics.median(ratios):.3f} (middle half {low:.3f} to {high:.3f})", end="; ")
        print(f"a commit {newest:,} bytes, {len(versions)} earlier states of {sum(versions):,} bytes in all")


def keep_busy(base: Mapping[str, Any], folder: Path, actors: int, rounds: int) -> None:
    """Print the fraction of time that client actors train, with a step for each arrival and twenty epochs for each client."""
    steps = WARM_UP + 4 * rounds
    fleet = {"buffer": 1, "concurrency": 12, "seconds": SPREAD}
    settings = {
        "train.fleet": fleet,
        "train.rounds": steps,
        "train.local_epochs": 20,
        "ray.actors": actors,
        "ray.cpus": 1,
    }
    run(change(base, settings, folder, f"actors-{actors}"))
    history = load_result(folder / f"actors-{actors}").history[WARM_UP:]
    wall, trained = history["server seconds/round"].sum(), history["server seconds/fit"].sum()
    print(f"buffer 1, {actors} actors: {1000 * wall / len(history):.0f} ms a step", end=", ")
    print(f"the actors train {trained / (actors * wall):.0%} of the time")


if __name__ == "__main__":
    main()
