"""Compare FedAPTA with its baselines on small data: the tables and figures of docs/fedapta.md.

A federation has several data sets with five clients each; the server does not know the data set of a client. All
networks are one small CNN (two convolutions of 8 and 16 filters with stride 2, a hidden layer of 32 units) on 28 x 28:
images, or 28 frames of 28 bands. All contestants have the same clips, order of clips, steps, optimiser and rounds; the
last round counts. Nothing is chosen by the test: learning rate, rounds and sizes were chosen with seed 0, which no
table uses.

    python benchmarks/fedapta.py --data FOLDER --tables personal pruned

``FOLDER`` contains ``mnist``, ``notmnist`` and ``fsdd``; the remaining tasks are generated speech. Each table starts
with the budget of its runs. ``--kept FOLDER`` stores finished runs, so that an interrupted table can continue. Figures
are written to ``--figures``. ``MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000`` saves time.
"""

from __future__ import annotations

import gzip
import math
import shutil
import statistics
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import matplotlib as mpl
import numpy as np
from result_tables import (
    find_result_file,
    folders,
    once,
    options,
    percent,
    print_head,
    print_row,
    print_tables,
    run_name,
    settings,
    train_federation,
)
from torch import Tensor, nn

from raydfl import final_state, read_rows
from raydfl.core.clustering import distances
from raydfl.engine.config import make_config
from raydfl.engine.groups._grouped import KEPT
from raydfl.models._width import scale_channels

mpl.use("Agg")
from matplotlib import pyplot as plt

SIZE = 28
RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Pruning ratios of the paper's five kinds of devices."""
SHARES = tuple(round(math.sqrt(1 - ratio), 4) for ratio in RATIOS)
"""Fractions of channels with the same number of weights: a convolution loses inputs and outputs."""

GERMAN = ["hallo", "danke", "bitte", "ja", "nein", "links", "rechts", "oben", "unten", "halt"]
SPEECH = {"sample_rate": 8000, "bands": SIZE, "window_ms": 32, "hop_ms": 32, "seconds": 0.87}


def image(mean: float, deviation: float) -> dict[str, Any]:
    """Return the features of an image."""
    return {"kind": "image", "size": SIZE, "mean": mean, "deviation": deviation}


TASKS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"name": "mnist", "root": "mnist", "features": image(0.1307, 0.3081)},
    "letters": {"name": "mnist", "root": "notmnist", "features": image(0.427, 0.459)},
    "spoken": {"name": "fsdd", "root": "fsdd", "features": SPEECH},
    "words": {"name": "spoken_words", "speakers": 20, "takes": 5, "features": SPEECH},
    "german": {
        "name": "spoken_words",
        "languages": ["de"],
        "words": GERMAN,
        "speakers": 20,
        "takes": 5,
        "features": SPEECH,
    },
}
"""Ten classes and about a thousand clips each."""
MIXED, AUDIO = ("digits", "letters", "spoken"), ("spoken", "words", "german")

APTA: Mapping[str, Any] = {"name": "fedapta", "ratio_from": "device"}
GROUPS: Mapping[str, Any] = {"name": "hdbscan", "min_cluster_size": 3}

PERSONAL: Mapping[str, Mapping[str, Any]] = {
    "FedAPTA": {**APTA, "tasks": GROUPS},
    "FedAPTA, updates accumulated": {**APTA, "tasks": {**GROUPS, "accumulate": 1.0}},
    "FedAPTA, nothing pruned": {"name": "fedapta", "ratio": 0, "tasks": GROUPS},
    "FedAvg over all": {"name": "fedavg"},
    "FedAvg, discovered tasks": {"name": "fedavg", "tasks": GROUPS},
    "FedAvg for each true task": {"name": "fedavg", "tasks": "known"},
    "Ditto": {"name": "ditto"},
    "FedGen": {"name": "fedgen"},
    "MOON": {"name": "moon", "projection": None},  # the network of all further contestants
    "MOON, mu 0.1": {"name": "moon", "projection": None, "mu": 0.1},
    "FedBABU": {"name": "fedbabu"},
    "FedNTD": {"name": "fedntd"},
    "FedLC": {"name": "fedlc"},
}
PRUNED: Mapping[str, Mapping[str, Any]] = {
    "FedAPTA": {**APTA, "tasks": GROUPS},
    "FedAPTA, true tasks": {**APTA, "tasks": "known"},
    "FedAPTA, one model": {**APTA, "tasks": "none"},
    "FedLPS": {"name": "fedlps", "ratio_from": "device"},
    "FedDrop": {"name": "feddrop", "share": "share"},
    "FedRolex": {"name": "fedrolex", "share": "share"},
    "Hermes": {"name": "hermes", "target": 0.4},
    "FedMP": {"name": "fedmp", "speed_from": "share"},
}
ABLATION: Mapping[str, Mapping[str, Any]] = {
    "FedAPTA": {**APTA, "tasks": GROUPS},
    "shares: uniform": {**APTA, "tasks": GROUPS, "solver": "uniform"},
    "shares: trust-constr": {**APTA, "tasks": GROUPS, "solver": "trust-constr"},
    "importance: sum": {**APTA, "tasks": GROUPS, "importance": "sum"},
    "no recovery": {**APTA, "tasks": GROUPS, "recover": False},
    "no clustering": {**APTA, "tasks": "none"},
    "true tasks": {**APTA, "tasks": "known"},
    "drift: server": {**APTA, "tasks": GROUPS, "drift": "server"},
    "drift: off": {**APTA, "tasks": GROUPS, "drift": "off"},
    "true tasks, drift: off": {**APTA, "tasks": "known", "drift": "off"},
    "nothing pruned": {"name": "fedapta", "ratio": 0, "tasks": GROUPS},
}
DISCOVERY: Mapping[str, Mapping[str, Any]] = {
    "last layer": {},
    "last 2 layers": {"layers": 2},
    "all 4 layers": {"layers": 4},
    "accumulated by 0.5": {"accumulate": 0.5},
    "accumulated": {"accumulate": 1.0},
    "all layers, accumulated": {"layers": 4, "accumulate": 1.0},
    "1 epoch, not 2": {"epochs": 1},
    "4 epochs, not 2": {"epochs": 4},
}
"""Options of the clustering, and local epochs."""


class Light(nn.Module):
    """Two convolutions and a hidden layer, for images of 28 x 28, or 28 frames of 28 bands."""

    images: ClassVar[bool | None] = None  # both

    def __init__(
        self, inputs: int | tuple[int, int, int], classes: int, width: float = 1.0, scaled: bool = False
    ) -> None:
        """Build the network.

        Args:
            inputs: bands; or channels, rows and columns.
            classes: outputs.
            width: fraction of the channels to build.
            scaled: divide the convolutions' outputs by ``width`` while training.
        """
        super().__init__()
        first, second, hidden = (scale_channels(channels, width) for channels in (8, 16, 32))
        self.scale = 1 / width if scaled else 1.0
        self.first = nn.Conv2d(1, first, 5, stride=2, padding=2)
        self.second = nn.Conv2d(first, second, 3, stride=2, padding=1)
        self.hidden = nn.Linear(second * 7 * 7, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits float32 [batch, classes]."""
        logits: Tensor = self.output(self.embed(x))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the hidden layer's output, float32 [batch, hidden]."""
        x = x if x.ndim == 4 else x.unsqueeze(1)
        for convolution in (self.first, self.second):
            x = convolution(x).relu()
            if self.training and self.scale != 1:
                x = x * self.scale
        hidden: Tensor = self.hidden(x.flatten(1)).relu()
        return hidden

    def channels(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Return the tensors of each layer's channels."""
        return {
            "first.weight": (("first",), (), (), ()),
            "first.bias": (("first",),),
            "second.weight": (("second",), ("first",), (), ()),
            "second.bias": (("second",),),
            "hidden.weight": (("hidden",), ("second",)),
            "hidden.bias": (("hidden",),),
            "output.weight": ((), ("hidden",)),
        }


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    scores: dict[str, float]
    """The scores after the last round, by ``split task:model/accuracy``, pooled over clients or models."""
    rounds: dict[str, list[float]]
    """``tasks/...`` of each round."""
    seconds: float
    """Processor time of the rounds."""
    bytes_up: float
    """In the last round, of all clients."""
    heads: list[tuple[str, list[float]]] = field(default_factory=list)
    """If requested: each client with its update's distances to the first client's, for each metric."""


@dataclass(frozen=True)
class Bench:
    """The settings common to all runs."""

    data: Path
    folder: Path
    kept: Path
    rounds: int
    clients: int
    epochs: int
    clips: int
    lr: float
    seeds: Sequence[int]
    only: Sequence[str]
    figures: Path | None

    def run(self, seed: int, tasks: Sequence[str], method: Mapping[str, Any], **changes: Any) -> Result:
        """Train one federation and read its metrics. Tables with equal runs share them.

        Args:
            seed: of the run.
            tasks: of the federation.
            method: with its options.
            changes: ``clients`` (of each task), ``partition`` (kind and options), ``epochs``, ``rounds``, ``cohort``,
                ``model`` (options) and ``heads`` (true: read the distances of updates).
        """
        counts = changes.get("clients", [self.clients] * len(tasks))
        partition = changes.get("partition", {"by": "iid"})
        parts = {}
        for task, count in zip(tasks, counts, strict=True):
            own = dict(TASKS[task])
            if "root" in own:
                own["root"] = str(self.subset(own["root"]))
            parts[task] = {**own, "partition": {**partition, "clients": count}}
        rounds = changes.get("rounds", self.rounds)
        values: dict[str, Any] = {
            "method": dict(method),
            "models": {"model": {"name": f"{Path(__file__).absolute()}:Light", **changes.get("model", {})}},
            "data": {
                "profile": {"device": {"values": list(RATIOS)}, "share": {"values": list(SHARES)}},
                "split": {"test": {"by": "clip", "fraction": 0.2}, "client_test": {"fraction": 0.3}},
                "heads": "common",
                "parts": parts,
            },
            "train": {
                "rounds": rounds,
                "cohort": changes.get("cohort", 1.0),
                "local_epochs": changes.get("epochs", self.epochs),
                "batch_size": 16,
                "together": len(tasks) * max(counts),
                "optimiser": {
                    "name": "sgd",
                    "lr": self.lr,
                    "decay": 0.998,
                    "weight_decay": 0.001,
                    "clip_norm": 10,
                },
            },
            "evaluate": {"every": rounds, "clients": "all", "client_test_clips": 0},
            "ray": {"actors": 0},
            "track": {"mlflow": False},
            "run": {"seed": seed, "dir": str(self.folder), "name": run_name()},
        }
        if isinstance(values["method"].get("tasks"), Mapping):
            values["method"]["tasks"] = dict(values["method"]["tasks"])
        config = make_config(values)
        decides = settings(config) + str(changes.get("heads", ""))
        for place in (self.kept, Path(__file__).parent.absolute()):
            decides = decides.replace(str(place), "")

        def make() -> Result:
            with train_federation(config) as (folder, seconds):
                return _read(folder, rounds, seconds, tasks if changes.get("heads") else ())

        return once(find_result_file(self.kept, decides), Result, make)

    def subset(self, name: str) -> Path:
        """Return a folder with the first clips of a data set, created if it is missing."""
        source, folder = self.data / name, self.kept / "data" / f"{name}-{self.clips}"
        if folder.is_dir():
            return folder
        made = folder.with_suffix(".part")
        shutil.rmtree(made, ignore_errors=True)
        if name == "fsdd":
            (made / "recordings").mkdir(parents=True)
            for take in range(math.ceil(self.clips / 60)):
                for path in (source / "recordings").glob(f"*_{take}.wav"):
                    shutil.copy(path, made / "recordings" / path.name)
        else:
            made.mkdir(parents=True)
            for file, start in (("t10k-images-idx3-ubyte", 16), ("t10k-labels-idx1-ubyte", 8)):
                content = gzip.decompress((source / f"{file}.gz").read_bytes())
                each = (len(content) - start) // struct.unpack(">I", content[4:8])[0]
                head = content[:4] + struct.pack(">I", self.clips) + content[8:start]
                (made / file).write_bytes(head + content[start : start + each * self.clips])
        made.rename(folder)
        return folder


def _read(folder: Path, rounds: int, seconds: float, tasks: Sequence[str]) -> Result:
    scores: dict[str, float] = {}
    found: dict[str, dict[int, float]] = {}
    sent = 0.0
    for row in read_rows(folder, where=None).to_pylist():
        if row["client"] or row["array"] is not None:
            continue
        if row["metric"].startswith("tasks/"):
            found.setdefault(row["metric"], {})[row["round"]] = row["value"]
        elif row["metric"] == "bytes_up" and row["round"] == rounds and row["phase"] == "train":
            sent = row["value"] * row["count"]
        elif row["round"] == rounds and row["metric"].endswith("/accuracy") and row["split"] in ("test", "client_test"):
            scores[f"{row['split']} {row['metric']}"] = row["value"]
    by_round = {name: [value for _, value in sorted(of.items())] for name, of in found.items()}
    return Result(scores, by_round, seconds, sent, _distances(folder, tasks) if tasks else [])


METRICS = ("cosine", "l1", "l2", "inner")


def _distances(folder: Path, tasks: Sequence[str]) -> list[tuple[str, list[float]]]:
    """Return each client's task, and the distances of its last layer's change to the first client's."""
    heads: dict[int, dict[str, Tensor]] = {}
    for name, value in final_state(folder).tensors[KEPT].items():
        number, _, tensor = name.partition("/")
        heads.setdefault(int(number), {})[tensor] = value
    vectors = [heads[number] for number in sorted(heads)]
    rows = [distances(vectors, metric)[0] for metric in METRICS]  # type: ignore[arg-type]  # they are its names
    each = len(vectors) // len(tasks)
    return [(tasks[n // each], [float(row[n]) for row in rows]) for n in range(len(vectors))]


def _measure_tasks(result: Result, tasks: Sequence[str], split: str) -> list[float]:
    """Return the accuracy of each task at its clients, of personal models if there are any."""
    names = ("personal", "model") if split == "client_test" else ("model",)
    return [
        next(result.scores[key] for name in names if (key := f"{split} {task}:{name}/accuracy") in result.scores)
        for task in tasks
    ]


def _compare(bench: Bench, tasks: Sequence[str], contestants: Mapping[str, Mapping[str, Any]], **changes: Any) -> None:
    print(
        "| | " + " | ".join(tasks) + " | mean | worst task | server: mean | groups | purity | up, MB | processor, s |"
    )
    print("|---" * (len(tasks) + 8) + "|")
    for name, method in contestants.items():
        if bench.only and name not in bench.only:
            continue
        found = [bench.run(seed, tasks, method, **changes) for seed in bench.seeds]
        here = [_measure_tasks(each, tasks, "client_test") for each in found]
        there = [statistics.fmean(_measure_tasks(each, tasks, "test")) for each in found]
        groups = [each.rounds["tasks/groups"][-1] for each in found if "tasks/groups" in each.rounds]
        purity = [each.rounds["tasks/purity"][-1] for each in found if "tasks/purity" in each.rounds]
        cells = [percent([of[place] for of in here]) for place in range(len(tasks))]
        cells += [percent([statistics.fmean(of) for of in here]), percent([min(of) for of in here]), percent(there)]
        cells += [
            f"{statistics.fmean(groups):.1f}" if groups else "",
            f"{statistics.fmean(purity):.2f}" if purity else "",
        ]
        cells += [f"{statistics.fmean(each.bytes_up for each in found) / 1e6:.1f}"]
        cells += [f"{statistics.fmean(each.seconds for each in found):.0f}"]
        print_row(name, cells)


def personal(bench: Bench) -> None:
    """The paper's table 3, images and sound."""
    _compare(bench, MIXED, PERSONAL)


def personal_sound(bench: Bench) -> None:
    """The paper's table 3, sound."""
    _compare(bench, AUDIO, PERSONAL)


def pruned(bench: Bench) -> None:
    """Unequal devices: images and sound."""
    _compare(bench, MIXED, PRUNED)


def pruned_sound(bench: Bench) -> None:
    """Unequal devices: sound."""
    _compare(bench, AUDIO, PRUNED)


def skewed(bench: Bench) -> None:
    """Labels by Dirichlet(0.5) within each task."""
    names = (
        "FedAPTA",
        "FedAPTA, updates accumulated",
        "FedAvg over all",
        "FedAvg, discovered tasks",
        "FedAvg for each true task",
        "Ditto",
        "FedBABU",
    )
    chosen = {name: PERSONAL[name] for name in names}
    _compare(bench, MIXED, chosen, partition={"by": "dirichlet", "alpha": 0.5, "minimum": 20})


def ablation(bench: Bench) -> None:
    """Remove each part of FedAPTA in turn."""
    _compare(bench, MIXED, ABLATION)


def ratios(bench: Bench) -> None:
    """The paper's figure 2: one task, five clients, the same ratio for all; accuracy of the server's whole network, %."""
    points, task = (0.0, 0.2, 0.4, 0.6, 0.8), ("letters",)
    apta = {"name": "fedapta", "tasks": "none", "drift": "off"}
    curves: dict[str, Callable[[float], tuple[dict[str, Any], dict[str, Any]]]] = {
        "FedAPTA, ramp": lambda r: ({**apta, "ratio": r}, {}),
        "FedAPTA, uniform": lambda r: ({**apta, "ratio": r, "solver": "uniform"}, {}),
        "FedAPTA, trust-constr": lambda r: ({**apta, "ratio": r, "solver": "trust-constr"}, {}),
        "FedLPS": lambda r: ({"name": "fedlps", "ratio": r}, {}),
        "FedDrop": lambda r: ({"name": "feddrop", "share": math.sqrt(1 - r)}, {}),
        "FedRolex": lambda r: ({"name": "fedrolex", "share": math.sqrt(1 - r)}, {}),
        "born small": lambda r: ({"name": "fedavg"}, {"model": {"width": math.sqrt(1 - r)}}),
    }
    found: dict[str, list[list[float]]] = {}
    print_head([f"ratio {point:g}" for point in points])
    for name, make in curves.items():
        found[name] = []
        for point in points:
            method, changes = make(point)
            runs = [bench.run(seed, task, method, **changes) for seed in bench.seeds]
            found[name].append([_measure_tasks(each, task, "test")[0] for each in runs])
        print_row(name, [percent(values) for values in found[name]])
    if bench.figures:
        figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        for name, of in found.items():
            axes.plot(points, [100 * statistics.fmean(values) for values in of], marker="o", markersize=3, label=name)
        axes.set(xlabel="share of the weights that is pruned or left out", ylabel="accuracy, %", xticks=points)
        axes.legend(fontsize=8)
        _save(figure, bench.figures / "fedapta-ratios.svg")


def similarity(bench: Bench) -> None:
    """The paper's figure 3: distance of device 0's update of the last layer to its own task's and to foreign ones."""
    # What is kept of earlier rounds is nothing, but the changes of the round are in the state.
    method = {**APTA, "tasks": {**GROUPS, "accumulate": 1e-9}}
    moments = sorted({1, 5, bench.rounds})
    print("| round | | " + " | ".join(METRICS) + " |\n|---" + "|---" * (1 + len(METRICS)) + "|")
    shown = {}
    for moment in moments:
        runs = [bench.run(seed, MIXED, method, rounds=moment, heads=True) for seed in bench.seeds]
        shown[moment] = runs[0].heads
        for what in ("its own task", "other tasks"):
            cells = []
            for place in range(len(METRICS)):
                values = [
                    of[place]
                    for each in runs
                    for number, (task, of) in enumerate(each.heads)
                    if number and (task == each.heads[0][0]) == (what == "its own task")
                ]
                cells.append(f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
            print(f"| {moment} | {what} | " + " | ".join(cells) + " |", flush=True)
    if bench.figures:
        figure, grid = plt.subplots(
            len(moments),
            len(METRICS),
            figsize=(8, 1.6 * len(moments)),
            layout="constrained",
            squeeze=False,
            sharex=True,
        )
        colours = dict(zip(MIXED, ("tab:blue", "tab:orange", "tab:green"), strict=True))
        for row, moment in zip(grid, moments, strict=True):
            for axes, place in zip(row, range(len(METRICS)), strict=True):
                of = shown[moment][1:]
                axes.bar(range(1, 1 + len(of)), [v[place] for _, v in of], color=[colours[task] for task, _ in of])
                axes.set_title(f"{METRICS[place]}, round {moment}", fontsize=8)
                axes.tick_params(labelsize=7)
        handles = [mpl.patches.Patch(color=colour, label=task) for task, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(colours), fontsize=8)
        _save(figure, bench.figures / "fedapta-similarity.svg")


def discovery(bench: Bench) -> None:
    """Groups over the rounds: purity, adjusted Rand index, clusters of the round."""
    order = ("digits", "spoken", "letters", "words", "german")
    cases: dict[str, tuple[Sequence[str], dict[str, Any]]] = {}
    for count in (2, 3, 4, 5):
        cases[f"{count} tasks"] = order[:count], {}
    cases["3 of sound"] = AUDIO, {}
    cases["2 of images"] = ("digits", "letters"), {}
    cases["3 tasks of 8, 4 and 3 clients"] = order[:3], {"clients": [8, 4, 3]}
    cases["5 tasks of 8, 7, 4, 3 and 3"] = order, {"clients": [8, 7, 4, 3, 3]}
    for count in (3, 5):
        cases[f"{count} tasks, half of the clients a round"] = order[:count], {"cohort": 0.5}
        cases[f"{count} tasks, half a round, updates accumulated"] = order[:count], {"cohort": 0.5}
    points = [point for point in (1, 2, 5, 10, 20) if point <= bench.rounds]
    print_head([f"round {point}" for point in points])
    for name, (tasks, changes) in cases.items():
        groups = GROUPS | DISCOVERY["accumulated" if "accumulated" in name else "last layer"]
        found = [bench.run(seed, tasks, {**APTA, "tasks": groups}, **changes).rounds for seed in bench.seeds]
        cells = []
        for point in points:
            values = [statistics.fmean(each[f"tasks/{what}"][point - 1] for each in found) for what in SHOWN]
            cells.append("{:.2f}, {:.2f}, {:.1f}".format(*values))
        print_row(name, cells)


SHOWN = ("purity", "rand_index", "clusters")


def helps(bench: Bench) -> None:
    """Aids to the discovery of tasks: adjusted Rand index, mean over the first rounds and in the last round; FedAPTA."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
    for axes, tasks in zip(panels, (MIXED, AUDIO), strict=True):
        print(f"\n{', '.join(tasks)}:\n")
        print_head(["rounds 1 to 5", "last round", "clusters in the last round"])
        for name, chosen in DISCOVERY.items():
            own = dict(chosen)
            epochs = own.pop("epochs", bench.epochs)
            method = {**APTA, "tasks": {**GROUPS, **own}}
            found = [bench.run(seed, tasks, method, epochs=epochs).rounds for seed in bench.seeds]
            index = np.mean([each["tasks/rand_index"] for each in found], axis=0)
            early = [statistics.fmean(each["tasks/rand_index"][:5]) for each in found]
            last = [each["tasks/rand_index"][-1] for each in found]
            clusters = statistics.fmean(each["tasks/clusters"][-1] for each in found)
            cells = [f"{statistics.fmean(of):.2f} ({min(of):.2f} to {max(of):.2f})" for of in (early, last)]
            print_row(name, [*cells, f"{clusters:.1f}"])
            axes.plot(range(1, 1 + len(index)), index, label=name, linewidth=1.2)
        axes.set(title=", ".join(tasks), xlabel="round")
    panels[0].set_ylabel("adjusted Rand index")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    if bench.figures:
        _save(figure, bench.figures / "fedapta-discovery.svg")


def _save(figure: Any, path: Path) -> None:
    """Write a figure whose bytes depend only on its content."""
    plt.rcParams["svg.hashsalt"] = path.name
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


TABLES: Mapping[str, Callable[[Bench], None]] = {
    "personal": personal,
    "pruned": pruned,
    "ratios": ratios,
    "helps": helps,
    "discovery": discovery,
    "ablation": ablation,
    "similarity": similarity,
    "personal_sound": personal_sound,
    "pruned_sound": pruned_sound,
    "skewed": skewed,
}


def main() -> None:
    """Train the runs of the tables, and print them."""
    parser = options(__doc__, TABLES, rounds=10)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist, notmnist and fsdd")
    parser.add_argument("--clients", type=int, default=5, help="of each task")
    parser.add_argument("--epochs", type=int, default=2, help="local epochs of a round")
    parser.add_argument("--clips", type=int, default=1000, help="of each data set that is read from files")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--only", nargs="+", default=(), help="contestants, by name; default: all of a table")
    parser.add_argument("--figures", type=Path, help="folder for the figures")
    given = parser.parse_args()
    budget = (
        f"{given.rounds} rounds, {given.clients} clients a task, {given.clips} clips, {given.epochs} epochs of batches of 16, "
        f"SGD at {given.lr:g}, seeds {given.seeds}."
    )
    with folders(given.kept) as (runs, kept):
        bench = Bench(
            given.data.absolute(),
            runs,
            kept,
            given.rounds,
            given.clients,
            given.epochs,
            given.clips,
            given.lr,
            given.seeds,
            given.only,
            given.figures,
        )
        print_tables(TABLES, given.tables, budget, bench)


if __name__ == "__main__":
    main()
