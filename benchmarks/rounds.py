"""Compare the time of a round of raydfl with bare PyTorch loops and peer frameworks, on the same work, interleaved.

The work: the Free Spoken Digit Dataset, 60 clients (each speaker's clips dealt to ten), 12 a round, one epoch, batch
16, log-mel 64 x 101, SGD; FedAvg of CRNN-Base or CRNN-Lite with kernel 5, and FedMLAC with both. With images of digits
in place of the clips, FedAvg of a small CNN, dealt to 60 clients too. Without counterpart in the peers: FedAvg of
FedSTAR's network, ResNet-18, ShuffleNetV2 and, on 9 frames of 128 bands, Fed-ProFiLA's network; methods that cut the
second and third of these; and, with images of digits beside the clips, ModalityMirror, whose first phase has the first
four of the timed rounds. Dropout is off so that the models can be compared: all contestants draw the same cohorts and
batches and must reach the same global model.

    python benchmarks/rounds.py --root PATH/TO/fsdd
    python benchmarks/rounds.py --root PATH/TO/fsdd --pictures PATH/TO/mnist --works cnn modality_mirror

A round of raydfl is timed at the user's driver: it includes planning, dispatch, object store, aggregation and the
commit to disk. The contestants alternate every few rounds, so that a busy machine affects all of them; ratios compare
neighbouring turns. Each contestant is started for its turn and ended after it, because an idle cluster would still take
a tenth of a core. README.md beside this file has the details.

    python benchmarks/rounds.py --root PATH/TO/fsdd --works crnn_lite --against PATH/TO/EARLIER --turns 40 --rounds 5

compares this version of raydfl with an earlier one, in a checkout with ``.venv``. Both versions keep their actors, and
each idles during the other's turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from peers.model import ARCHITECTURES
from peers.turns import Process
from peers.work import Work
from torch import Tensor

from raydfl import make_config
from raydfl.core.seeds import generator
from raydfl.core.types import State
from raydfl.core.yaml import to_yaml
from raydfl.data.population import Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.networks import build_models
from raydfl.experiments.statistics import Difference, Spread
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

PEERS, BLAZEFL = (Path(__file__).parents[1] / folder / "bin" / "python" for folder in (".venv-peers", ".venv-blazefl"))
"""Pythons of the peers. BlazeFL needs a newer Python than the rest support, free-threaded for its threads."""
WORKS: Mapping[str, Mapping[str, str]] = {
    "crnn_base": {"model": "crnn_base"},
    "crnn_lite": {"model": "crnn_lite"},
    "fedmlac": {"plugin": "crnn_lite", "local": "crnn_base"},
    "cnn": {"model": "cnn_small"},
    "split_cnn": {"model": "split_cnn"},
    "resnet18": {"model": "resnet18"},
    "shufflenet_v2": {"model": "shufflenet_v2"},
    "film_cnn": {"model": "film_cnn"},
    "modality_mirror": {"audio": "crnn_lite", "image": "cnn_small", "fusion": "fusion"},
}
"""Architectures by model name."""
KERNEL = 5
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "split_cnn": {"dropout": 0.0},
    "resnet18": {},
    "shufflenet_v2": {},
    "film_cnn": {"dropout": 0.0},
    "cnn_small": {},
    "fusion": {"dropout": 0.0},
}
"""Options by architecture; default: a kernel of KERNEL and no dropout."""
SHAPES: Mapping[str, Mapping[str, Any]] = {"film_cnn": {"bands": 128, "seconds": 0.08}}
"""Settings of clips with 9 frames of 128 bands."""
OURS = "raydfl, 2 actors"
PEER_COMMANDS: Mapping[str, tuple[Path, Sequence[str]]] = {
    "Flower, 2 client slots": (PEERS, ("flower",)),
    "pfl-research, 2 processes": (PEERS, ("pfl_research",)),
    "FedJAX jit": (PEERS, ("fedjax", "--backend", "jit")),
    "FedJAX pmap, 2 devices": (PEERS, ("fedjax", "--backend", "pmap")),
    "BlazeFL threads": (BLAZEFL, ("blazefl", "--pool", "threads")),
    "BlazeFL processes": (BLAZEFL, ("blazefl", "--pool", "processes")),
}
"""Python, module of ``peers`` and its options, by contestant."""
WARM_UP = 4
"""Warm-up rounds at the start of a turn, not timed."""
MIRROR, FIRST_ROUNDS = "modality_mirror", WARM_UP + 4
"""A work of two phases, and the rounds of its first."""
CUT: Mapping[str, Mapping[str, object]] = {
    "FedRolex, half of the channels": {"name": "fedrolex", "share": 0.5},
    "FedAPTA, 0.4 pruned": {"name": "fedapta", "ratio": 0.4},
    "FedAPTA, masks alone": {"name": "fedapta", "ratio": 0.4, "drift": "off"},
}
"""Methods with partial client networks, for CUT_WORKS. The reference is the bare loop of the whole network."""
CUT_WORKS = ("resnet18", "shufflenet_v2")
PICTURED = ("cnn", MIRROR)
"""Works that need images of digits."""


class Contestant(Protocol):
    """A program that does rounds of the work."""

    def run(self, rounds: int) -> None:
        """Do the given number of further rounds."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the state dict of the global model."""
        ...

    def close(self) -> None:
        """End the contestant."""
        ...


def configuration(
    data: Mapping[str, object],
    runs: Path,
    work: str,
    actors: int,
    together: int = 1,
    method: Mapping[str, object] | None = None,
) -> Config:
    """Return the work as a configuration of raydfl, optionally with a different method."""
    method = method or {"name": work if work in (MIRROR, "fedmlac") else "fedavg"}
    crnn = {"kernel": KERNEL, "dropout": 0.0}
    models = {name: {"name": kind, **OPTIONS.get(kind, crnn)} for name, kind in WORKS[work].items()}
    if work == MIRROR:
        models["image"]["view"] = "image"
    phases = {"phases": {"multimodal": {"rounds": FIRST_ROUNDS}}} if work == MIRROR else {}
    return make_config(
        {
            "method": dict(method),
            "models": models,
            "data": dict(data),
            "train": {
                "rounds": 10**6,
                "cohort": 12,
                "local_epochs": 1,
                "batch_size": 16,
                "together": together,
                "optimiser": {"lr": 0.05},
                **phases,
            },
            "evaluate": {"every": 10**6, "server": False, "clients": "none"},
            "ray": {"actors": actors, "cpus": 0.25},
            "run": {"dir": str(runs), "name": "-".join(map(str, (work, *method.values(), actors, together)))},
            "track": {"mlflow": False},
        }
    )


IMAGES: Mapping[str, object] = {"kind": "image", "size": 28, "mean": 0.1307, "deviation": 0.3081}


def fsdd(root: Path, pictures: Path | None = None, bands: int = 64, seconds: float = 1.0) -> dict[str, object]:
    """Return the clips for raydfl, with images of digits beside them if their folder is given."""
    features = {"sample_rate": 8000, "bands": bands, "window_ms": 25, "hop_ms": 10, "seconds": seconds}
    data = {"name": "fsdd", "root": str(root), "features": features, "partition": {"by": "group", "shards": 10}}
    if pictures is None:
        return data
    views = {"views": {"image": {"column": "image", "features": IMAGES}}, "missing": {"image": 0.3}}
    return data | {"name": "spoken_and_written", "pictures": str(pictures)} | views


def mnist(pictures: Path) -> dict[str, object]:
    """Return the images of digits alone. A quarter is left out as test images, because either split may be missing."""
    split = {"test": {"by": "clip", "fraction": 0.25}}
    partition = {"by": "iid", "clients": 60}
    return {"name": "mnist", "root": str(pictures), "features": IMAGES, "split": split, "partition": partition}


def make_work(config: Config, rounds: int) -> Work:
    """Write down raydfl's first rounds for the other contestants."""
    population = Population.load(create(config, Progress("quiet")) / "population").use(config.data)
    clients, method, seed = Clients(population, config), config.components.method, config.run.seed
    sizes = [population.num_examples(index) for index in range(len(population))]
    whole = [next(population.data(index).train.batches(size, None)) for index, size in enumerate(sizes)]
    cohort = config.train.cohort_size(len(population))
    cohorts = []
    orders = torch.zeros((rounds, cohort, max(sizes)), dtype=torch.int64)
    seeing = [bool(clients[index].profile.get("views")) for index in range(len(clients))]
    widest = clients[seeing.index(True)] if any(seeing) else clients[0]
    built = build_models(method, widest.models, seed)
    state = method.init(clients, [built], generator(seed, 0, "", "init")) if any(seeing) else State(0, {})
    if any(seeing):
        state = dataclasses.replace(state, phase=method.phases[0])
    for r in range(rounds):
        if any(seeing) and r == FIRST_ROUNDS:
            state = dataclasses.replace(method.begin_phase(state), phase=method.phases[1])
        state = dataclasses.replace(state, round_index=r)
        tasks = method.plan(state, clients, generator(seed, r, "", "plan"), cohort)
        cohorts.append(sorted(clients.index_of(task.client_id) for task in tasks))
        for position, index in enumerate(cohorts[-1]):
            order = generator(seed, r, clients[index].id, "train").permutation(sizes[index])
            orders[r, position, : sizes[index]] = torch.from_numpy(order)
    return Work(
        x=torch.cat([batch.x for batch in whole]),
        y=torch.cat([batch.y for batch in whole]),
        offsets=[sum(sizes[:index]) for index in range(len(sizes) + 1)],
        cohorts=cohorts,
        orders=orders,
        architectures={spec.name: spec.architecture for spec in widest.models},
        weights={
            name: {key: value.clone() for key, value in model.state_dict().items() if value.is_floating_point()}
            for name, model in built.items()
        },
        classes=len(population.classes),
        kernel=KERNEL,
        batch_size=config.train.batch_size,
        lr=config.train.optimiser.lr,
        images=torch.cat([batch.views["image"] for batch in whole]) if any(seeing) else None,
        seeing=seeing if any(seeing) else None,
        first_rounds=FIRST_ROUNDS if any(seeing) else 0,
    )


def contestants(work: str, data: Mapping[str, object], runs: Path, rounds: int) -> dict[str, Callable[[], Contestant]]:
    """Return functions that start each contestant, by name; the first is the reference."""
    path = runs / f"{work}.pt"
    make_work(configuration(data, runs, work, 1), rounds).save(path)

    def process(name: str, python: str | Path, module: str, *options: str) -> Callable[[], Contestant]:
        log = runs / f"{work}-{name.replace(' ', '-')}.log"
        return lambda: Process(name, [python, "-m", f"peers.{module}", path, *options], log)

    known: dict[str, Callable[[], Contestant]] = {
        "bare loop, 1 thread": process("bare loop 1", sys.executable, "bare"),
        "bare loop, 2 threads": process("bare loop 2", sys.executable, "bare", "--threads", "2"),
    }
    if work not in (MIRROR, "fedmlac"):
        known["bare loop, 2 processes"] = process("bare loop 3", sys.executable, "bare", "--processes", "2")
        if work in OPTIONS:  # networks that amplify rounding quickly
            known["bare loop, other last digits"] = process("bare loop 4", sys.executable, "bare", "--rounding")
        if WORKS[work]["model"] in ARCHITECTURES:
            for name, (python, (module, *options)) in PEER_COMMANDS.items():
                if python.exists():
                    known[name] = process(name.partition(",")[0], python, module, *options)
    for name, actors, together, method in (
        ("raydfl, 1 actor", 1, 1, None),
        ("raydfl, 2 actors", 2, 1, None),
        ("raydfl, 2 actors, 6 together", 2, 6, None),
        *((name, 2, 1, method) for name, method in CUT.items() if work in CUT_WORKS),
    ):
        config = configuration(data, runs, work, actors, together, method)
        file = runs / f"{config.run.name}.yaml"
        file.write_text(to_yaml(config.model_dump(mode="json"), flow=False))
        known[name] = ours(name, file, runs / f"{config.run.name}.log")
    return known


def ours(name: str, config: Path, log: Path) -> Callable[[], Contestant]:
    """Return a function that starts raydfl on a configuration."""
    return lambda: Process(name, [sys.executable, "-m", "peers.ours", config], log)


def compare_versions(
    earlier: Path, work: str, data: Mapping[str, object], runs: Path, actors: int, turns: int, rounds: int
) -> str:
    """Alternate this version of raydfl and an earlier one.

    Returns:
        The time of a round over the earlier version's, as the geometric mean of all turns with Student's t 95 %
        confidence interval, and the earlier version's median.
    """
    config = configuration(data, runs, work, actors).model_dump(mode="json", exclude_unset=True)
    contestants: list[Process] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    try:
        for tree, python in (
            (earlier, earlier / ".venv/bin/python"),
            (Path(__file__).parents[1], Path(sys.executable)),
        ):
            file = runs / f"version-{actors}-{len(contestants)}.yaml"
            config["run"]["name"] = file.stem
            file.write_text(to_yaml(config, flow=False))
            command = ["env", "-C", tree, f"PYTHONPATH={tree / 'benchmarks'}", python, "-m", "peers.ours", file]
            contestants.append(Process(str(tree), command, file.with_suffix(".log")))
        for contestant in contestants:
            contestant.run(WARM_UP)
        for turn in range(turns):
            for number in (0, 1) if turn % 2 else (1, 0):
                started = time.perf_counter()
                contestants[number].run(rounds)
                seconds[number].append((time.perf_counter() - started) / rounds)
    finally:
        for contestant in contestants:
            contestant.close()
    before, now = (Spread({str(turn): math.log(value) for turn, value in enumerate(times)}) for times in seconds)
    change = Difference.between(now, before)
    assert change is not None  # noqa: S101
    mean, low, high = map(math.exp, (change.mean, change.low, change.high))
    return f"{mean:.3f} [{low:.3f}, {high:.3f}] of {1000 * statistics.median(seconds[0]):.0f} ms"


def choose(
    known: Mapping[str, Callable[[], Contestant]], words: Sequence[str] | None
) -> dict[str, Callable[[], Contestant]]:
    """Return the first contestant, and those whose name contains one of the words; all without words."""
    for word in words or ():
        if not any(word in name for name in known):
            print(f"no contestant has {word!r} in its name: {'; '.join(known)}")
    first = next(iter(known))
    return {n: start for n, start in known.items() if n == first or not words or any(word in n for word in words)}


def measure(
    starts: Mapping[str, Callable[[], Contestant]], turns: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Alternate the contestants: each is started, does WARM_UP uncounted rounds, and then the counted ones.

    Returns:
        Seconds of a round in each turn, and the largest difference of the global model from the first contestant's
        after a turn's first rounds (later, training amplifies any rounding), except for methods with a different model;
        by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    models: dict[str, Mapping[str, Tensor]] = {}
    for turn in range(turns):
        for name in list(starts)[:: 1 if turn % 2 else -1]:
            contestant = starts[name]()
            try:
                contestant.run(WARM_UP)
                if name not in models and name not in CUT:
                    models[name] = contestant.weights()
                started = time.perf_counter()
                contestant.run(rounds)
                seconds[name].append((time.perf_counter() - started) / rounds)
            finally:
                contestant.close()
    first = next(iter(starts))
    return seconds, {name: largest_difference(model, models[first]) for name, model in models.items()}


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two state dicts.

    Raises:
        ValueError: They have different names.
    """
    if one.keys() != other.keys():
        raise ValueError(f"the models have different tensors: {sorted(one.keys() ^ other.keys())}")
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def table(results: Mapping[str, tuple[Mapping[str, list[float]], Mapping[str, float]]]) -> str:
    """Format ratios to the first contestant, and of the peers to raydfl: medians and ranges, a column for each work."""
    names = list(dict.fromkeys(name for seconds, _ in results.values() for name in seconds))
    lines = [f"{'':34}" + "".join(f"{work:>30}" for work in results)]
    for name in names:
        cells = []
        for seconds, differences in results.values():
            cell = _ratios(seconds.get(name, []), next(iter(seconds.values())))
            difference = f"{differences[name]:7.0e}" if name in differences else f"{'':7}"
            cells.append(f"{cell} {difference}" if cell else "-")
        lines.append(f"{name:34}" + "".join(f"{cell:>30}" for cell in cells))
    for name in names if OURS in names else ():
        if name in PEER_COMMANDS:
            cells = [_ratios(seconds.get(name, []), seconds.get(OURS, [])) or "-" for seconds, _ in results.values()]
            lines.append(f"{name.partition(',')[0] + ' / ' + OURS:34}" + "".join(f"{cell:>30}" for cell in cells))
    milliseconds = [1000 * statistics.median(next(iter(seconds.values()))) for seconds, _ in results.values()]
    lines.append(f"{'ms of the first, a round':34}" + "".join(f"{value:>30.0f}" for value in milliseconds))
    return "\n".join(lines)


def _ratios(times: Sequence[float], others: Sequence[float]) -> str:
    """Return median and range of one contestant's times relative to another's in the same turn; empty without turns."""
    ratios = [time / other for time, other in zip(times, others, strict=False)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the Free Spoken Digit Dataset")
    parser.add_argument("--turns", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds in a turn")
    parser.add_argument("--pictures", type=Path, help=f"folder of MNIST's idx files, for {' and '.join(PICTURED)}")
    crnns = [work for work in WORKS if work not in (*PICTURED, *OPTIONS)]
    parser.add_argument("--works", nargs="+", default=crnns, choices=list(WORKS))
    parser.add_argument(
        "--contestants",
        nargs="+",
        metavar="WORD",
        help="only contestants whose name contains one of these, and the first bare loop",
    )
    parser.add_argument("--against", type=Path, metavar="TREE", help="earlier version of raydfl, a checkout with .venv")
    arguments = parser.parse_args()
    for work in PICTURED:
        if work in arguments.works and not arguments.pictures:
            parser.error(f"--works {work} needs --pictures")
    torch.set_num_threads(1)
    missing = [name.partition(",")[0] for name, (python, _) in PEER_COMMANDS.items() if not python.exists()]
    if missing:
        print(
            f"not installed and left out: {'; '.join(missing)}: make bench-peers (BlazeFL needs Python 3.12: README.md)"
        )
    results: dict[str, tuple[Mapping[str, list[float]], Mapping[str, float]]] = {}
    rounds = WARM_UP + arguments.rounds
    try:
        with tempfile.TemporaryDirectory(prefix="raydfl-benchmark-") as folder:
            for work in arguments.works:
                pictures = arguments.pictures.resolve() if work in PICTURED else None
                data = (
                    mnist(pictures)
                    if work == "cnn"
                    else fsdd(arguments.root.resolve(), pictures, **SHAPES.get(work, {}))
                )
                if arguments.against:
                    for actors in (1, 2):
                        ratio = compare_versions(
                            arguments.against.resolve(),
                            work,
                            data,
                            Path(folder),
                            actors,
                            arguments.turns,
                            arguments.rounds,
                        )
                        print(
                            f"{work}, {actors} actors, time of a round over the earlier version's: {ratio}", flush=True
                        )
                    continue
                chosen = choose(contestants(work, data, Path(folder), rounds), arguments.contestants)
                results[work] = measure(chosen, arguments.turns, arguments.rounds)
    finally:  # measurements before a failure count
        if results:
            print(
                f"{arguments.turns} turns of {arguments.rounds} rounds; in each cell: time of a round over the first contestant's"
            )
            print(
                "of the same turn, median (range); largest difference of the model to the first contestant's "
                f"after {WARM_UP} rounds"
            )
            print(table(results))


if __name__ == "__main__":
    main()
