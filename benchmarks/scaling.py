"""Measure the cost of a round by its clients, the population, and the size of the model.

    python benchmarks/scaling.py cohort
    python benchmarks/scaling.py population
    python benchmarks/scaling.py model

No recordings are needed: the clients share a few clips of noise, so that 100,000 of them fit on any disk. For
``population`` every client has already taken part once, as after a long run, so a method with private state has a
record of each. The variants alternate every few rounds; ratios compare neighbouring turns. README.md beside this file
has the details.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pydantic.dataclasses
import torch
from torch import nn

from raydfl import make_config
from raydfl.cluster.server import Server
from raydfl.core.seeds import generator
from raydfl.core.types import State
from raydfl.data.build import build_population
from raydfl.data.client_ids import ClientIds
from raydfl.data.dataset import Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.part import Part
from raydfl.data.population import Population
from raydfl.data.tables import Tables, clips_table
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.networks import build_models
from raydfl.engine.storage.private import PrivateIndex, PrivateRef, PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.runs.folder import write_new_run

METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedper": {"name": "fedper"},
    "scaffold": {"name": "scaffold"},
}
"""Without private state; with a little (the last layer); with as much as the model."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(Dataset):
    """Clips of one second of noise."""

    clips: int = 60
    classes: int = 10

    def manifest(self) -> pa.Table:
        """List clips of each class in turn, with a single owner."""
        rows = [
            {
                "clip": f"{index}",
                "path": None,
                "label": f"class{index % self.classes}",
                "group": "all",
                "split": "train",
            }
            for index in range(self.clips)
        ]
        return make_manifest(rows, "Noise")

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        """Return noise, mono at 8 kHz."""
        return generator(0, 0, row["clip"], "noise").standard_normal((8000, 1)).astype(np.float32) * 0.1, 8000

    def identity(self, row: Mapping[str, Any]) -> str | None:
        """Return the clip's number, which determines its content."""
        return f"noise/{row['clip']}"


@dataclass(frozen=True)
class Variant:
    """One point of a curve."""

    label: str
    clients: int
    cohort: int
    examples: int
    model: Mapping[str, Any]
    aged: bool = False
    """Every client has taken part."""


CRNN = {"name": "crnn_lite", "kernel": 5}
CURVES: Mapping[str, Sequence[Variant]] = {
    "cohort": [Variant(f"{cohort:,} a round", 2000, cohort, 16, CRNN) for cohort in (10, 100, 1000)],
    "population": [
        Variant(f"{clients:,} clients", clients, 12, 45, CRNN, aged=True) for clients in (100, 1000, 10_000, 100_000)
    ],
    "model": [
        Variant(f"{75 * hidden:,} parameters", 100, 12, 16, {"name": "mlp", "hidden": hidden})
        for hidden in (64, 640, 6400, 64_000)
    ],
}


def configuration(variant: Variant, method: str, folder: Path, actors: int) -> Config:
    """Return the configuration of a variant."""
    return make_config(
        {
            "method": dict(METHODS[method]),
            "models": {"model": dict(variant.model)},
            "data": {
                "name": f"{Path(__file__).resolve()}:Noise",
                "cache": str(folder / "cache"),
                "split": {"test": None},
                "features": {"sample_rate": 8000, "bands": 64, "window_ms": 25, "hop_ms": 10, "seconds": 1.0},
            },
            "train": {"rounds": 10**6, "cohort": variant.cohort, "batch_size": 16, "optimiser": {"lr": 0.01}},
            "evaluate": {"every": 10**6, "server": False, "clients": "none"},
            "ray": {"actors": actors, "cpus": 1},
            "run": {"dir": str(folder), "name": variant.label.replace(" ", "-")},
            "track": {"mlflow": False},
        }
    )


def enlarge(population: Population, clients: int, examples: int) -> Population:
    """Return a population with the given number of clients, each with some of the same clips."""
    [store] = population.stores
    clip = np.arange(clients * examples) % len(store)
    none = np.zeros(len(clip), np.int8)
    columns = {
        "role": none,
        "pool": none,
        "client": np.repeat(np.arange(clients, dtype=np.int32), examples),
        "store": none,
        "clip": clip.astype(np.int32),
        "label": (clip % len(population.classes)).astype(np.int32),
        "start": store.offsets[clip],
        "frames": (store.offsets[clip + 1] - store.offsets[clip]).astype(np.int32),
    }
    ids = ClientIds.from_strings(f"client_{index:06d}" for index in range(clients))
    tables = Tables(clips_table(columns), pa.record_batch(ids.columns()))
    return Population({"": Part(tables, population.classes, dict(population.views))})


def age(run_dir: Path, config: Config, population: Population) -> None:
    """Create a run in which every client has taken part once: a record of private state each, and a commit.

    The amount of its index outside the base equals the average over many rounds.
    """
    method, clients = config.components.method, Clients(population, config)
    models: dict[str, nn.Module] = build_models(method, clients[0].models, config.run.seed)
    state = method.init(clients, [models], generator(config.run.seed, 0, "", "init"))
    kept = {
        f"model:{name}/{key}": value
        for name, model in models.items()
        for key, value in model.state_dict().items()
        if not method.shared(f"{name}/{key}")
    }
    cohort = config.train.cohort_size(len(population))
    rounds = -(-len(population) // cohort)
    refs: dict[int, PrivateRef] = {}
    if kept:
        private = PrivateStore(run_dir / "private")
        for index in range(len(population)):
            refs[index] = private.append(1 + index // cohort, kept)
        private.close()
    older = len(refs) - len(refs) // 32
    index = PrivateIndex()
    for part in (slice(older), slice(older, None)):
        index = index.replace(dict(list(refs.items())[part]))
    RunStore(run_dir).commit(State(rounds, state.tensors, state.extra), index)


def measure(
    variants: Sequence[Variant], method: str, folder: Path, actors: int, turns: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Alternate the variants.

    Returns:
        For each variant and turn, mean seconds of a round by part, and ``opening``: seconds until the run was open.
    """
    servers: dict[str, Server] = {}
    opening: dict[str, float] = {}
    try:
        for variant in variants:
            config = configuration(variant, method, folder, actors)
            run_dir = folder / str(config.run.name)
            population = enlarge(build_population(config.data, 0), variant.clients, variant.examples)
            write_new_run(run_dir, config, population, {})
            if variant.aged:
                age(run_dir, config, population)
            started = time.perf_counter()
            servers[variant.label] = Server(run_dir, config)
            opening[variant.label] = time.perf_counter() - started
        seconds: dict[str, list[dict[str, float]]] = {label: [] for label in servers}
        for turn in range(-1, turns):  # the first is for warm-up
            for label in list(servers) if turn % 2 else list(reversed(servers)):
                started = time.perf_counter()
                reports = [servers[label].round() for _ in range(rounds)]
                means = {
                    part: statistics.fmean(report.seconds[part] for report in reports)
                    for part in ("train_and_aggregate", "commit")
                }
                means |= {"round": (time.perf_counter() - started) / rounds, "opening": opening[label]}
                if turn >= 0:
                    seconds[label].append(means)
    finally:
        for server in servers.values():
            server.close()
    return seconds


def table(variants: Sequence[Variant], seconds: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Format medians in ms; the last column is the round's time relative to the first variant's in the same turn."""
    lines = [
        f"{'':24}{'a round, ms':>12}{'a client':>10}{'without commit':>16}{'commit':>8}{'opening':>9}{'ratio (range)':>26}"
    ]
    first = [turn["round"] for turn in seconds[variants[0].label]]
    for variant in variants:
        turns = seconds[variant.label]
        middle = {part: 1000 * statistics.median(turn[part] for turn in turns) for part in turns[0]}
        ratios = [turn["round"] / base for turn, base in zip(turns, first, strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"
        lines.append(
            f"{variant.label:24}{middle['round']:12.1f}{middle['round'] / variant.cohort:10.2f}"
            f"{middle['train_and_aggregate']:16.1f}{middle['commit']:8.1f}{middle['opening']:9.0f}{spread:>26}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curve", choices=list(CURVES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["fedavg", "fedper"])
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each variant")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in a turn")
    parser.add_argument(
        "--actors", type=int, default=0, help="Ray client actors; 0: everything in this process, without Ray"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    variants = CURVES[arguments.curve]
    if arguments.actors:
        import ray

        places = arguments.actors * len(variants)  # the actors of all variants exist; one variant works at a time
        ray.init("local", num_cpus=places, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    for method in arguments.methods:
        with tempfile.TemporaryDirectory(prefix="raydfl-benchmark-") as folder:
            seconds = measure(variants, method, Path(folder), arguments.actors, arguments.turns, arguments.rounds)
        print(f"\n{method}: {arguments.turns} turns of {arguments.rounds} rounds")
        print(table(variants, seconds), flush=True)


if __name__ == "__main__":
    main()
