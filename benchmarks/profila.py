"""Compare Fed-ProFiLA-AD with its baselines on generated machines: the tables of docs/profila.md.

Machines are clients. Each trains on its normal clips; unseen normal and anomalous clips test it, whole, in segments of
9 frames. Statistics and thresholds come from training clips. Nothing is chosen by the test, and the last round counts.
All networks score by the distance to the mean of the client's own training clips, so that methods differ only in the
network.

    python benchmarks/profila.py --tables contestants ablation strength joining
    python benchmarks/profila.py --tables contestants --ids 6 --seeds 1

Keeping freed memory in the process saves a fifth of the time: MALLOC_TRIM_THRESHOLD_=4000000000
MALLOC_MMAP_THRESHOLD_=4000000000.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from result_tables import (
    find_result_file,
    folders,
    mean,
    once,
    open_server,
    options,
    print_head,
    print_row,
    print_tables,
    run_name,
)
from safetensors.torch import load_file, save_file
from sklearn.metrics import f1_score, precision_recall_curve, roc_auc_score

from raydfl.cluster.server import Server
from raydfl.core.types import Tensors
from raydfl.engine.config import Config, load_config, make_config
from raydfl.engine.orders import keys_of
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.worker import Worker
from raydfl.training import Step, predict

JOB = Path(__file__).parents[1] / "jobs" / "profila" / "machines.yaml"
BODY = ["model/adapter", "model/output", "model/objective"]
ALL = [*BODY, "model/film", "model/encoder"]
STRENGTHS: tuple[float | None, ...] = (None, -20.0, -15.0, -10.0, -5.0, 0.0)
EPOCHS = (0, 1, 5)
"""Local epochs of a joining machine."""

FEDAVG = {"method": {"name": "fedavg"}}
AS_RUN = {
    "method": {"name": "profila_as_run"},
    "data": {
        "split": {
            "test": None,
            "client_test": {"by": "split", "values": ["test"]},
            "validation": {"by": "clip", "fraction": 0.3, "stratify": True},
        },
        "pools": {
            "normal": {"column": "condition", "values": ["normal"]},
            "anomalous": {"column": "condition", "values": ["anomaly"]},
        },
        "validation_clips": 12,
    },
}
"""Anomalous training clips, about a fifth of the normal ones; 30 % of a client's clips are for steering."""

COLA = {**FEDAVG, "objective": {"name": "contrast", "frames": 9, "size": 128}, "data": {"transforms": []}}
"""Pre-training on the same clips: match two crops of one clip."""

CONTESTANTS: Mapping[str, Mapping[str, Any]] = {
    "untrained": {**FEDAVG, "rounds": 0},
    "FedAvg": FEDAVG,
    "FedAvg, spread 1": {**FEDAVG, "spread": 1.0},
    "FedProx, mu 0.01": {"method": {"name": "fedprox", "mu": 0.01}},
    "SCAFFOLD (SGD)": {
        "method": {"name": "scaffold"},
        "train": {"optimiser": {"name": "sgd", "lr": 0.05, "clip_norm": 1.0}},
    },
    "FedPer": {"method": {"name": "fedper", "personal": BODY}},
    "each by itself": {"method": {"name": "fedper", "personal": ALL}},
    "one client with all clips": {**FEDAVG, "central": True},
    "ProFiLA, normal clips alone": {"method": {"beta": 0.0, "adaptive_lr": False}},
    "ProFiLA, anomalies to steer by": {},
    "ProFiLA, as run": AS_RUN,
    "autoencoder (FedAvg)": {**FEDAVG, "objective": {"name": "reconstruct", "normal": ["normal"], "bins": 9}},
    "untrained, Mahalanobis": {**FEDAVG, "rounds": 0, "score": "mahalanobis"},
    "untrained, nearest": {**FEDAVG, "rounds": 0, "score": "nearest"},
    "FedAvg, Mahalanobis": {**FEDAVG, "score": "mahalanobis"},
    "FedAvg, nearest": {**FEDAVG, "score": "nearest"},
    "COLA": {**FEDAVG, "rounds": 0, "begin": COLA},
    "COLA, Mahalanobis": {**FEDAVG, "rounds": 0, "begin": COLA, "score": "mahalanobis"},
    "COLA, nearest": {**FEDAVG, "rounds": 0, "begin": COLA, "score": "nearest"},
    "COLA, then FedAvg": {**FEDAVG, "begin": COLA},
}
PUBLISHED = {"split": {"test": None, "as_published": True}}
"""The leaking protocol: train on all normal and some anomalous clips, and test on all clips."""
AS_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "untrained": {**FEDAVG, "rounds": 0, "data": PUBLISHED},
    "FedAvg": {**FEDAVG, "data": PUBLISHED},
    "FedPer": {**CONTESTANTS["FedPer"], "data": PUBLISHED},
    "ProFiLA, as run": {
        "method": {"name": "profila_as_run", "steer": "test"},
        "data": {**PUBLISHED, "pools": AS_RUN["data"]["pools"]},
    },
}
WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "adaptive weights": {"alpha": 1.0, "beta": 0.0},
    "adaptive learning rates": {"adaptive_lr": False},
    "progressive alignment": {"lam": [0.0, 0.0]},
    "moving prototype": {"prototype_momentum": 1.0},
    "private adapter and projection": {"personal": ["model/objective"]},
}


@dataclass(frozen=True)
class Machine:
    """The measurements at one client."""

    name: str
    scores: list[float]
    """Of its test clips, the mean over a clip's segments."""
    strange: list[bool]
    threshold: float
    """95 % quantile of the scores of the client's training clips."""
    spread: float
    """Mean squared distance of its training clips' outputs, of length 1, from their mean."""

    @property
    def auc(self) -> float:
        """Area under the ROC curve."""
        return float(roc_auc_score(self.strange, self.scores))

    @property
    def partial_auc(self) -> float:
        """The same up to a false positive rate of 0.1, standardised so that chance is 0.5."""
        return float(roc_auc_score(self.strange, self.scores, max_fpr=0.1))

    @property
    def f1(self) -> float:
        """F1 at the threshold."""
        return float(f1_score(self.strange, np.array(self.scores) >= self.threshold, zero_division=0))

    @property
    def oracle_f1(self) -> float:
        """F1 at the best threshold on the test itself."""
        precision, recall, _ = precision_recall_curve(self.strange, self.scores)
        return float(np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12)))


@dataclass(frozen=True)
class Result:
    """One run, measured after some rounds."""

    machines: dict[int, list[Machine]]
    """By rounds done."""
    seconds: float
    """Processor time."""

    @property
    def last(self) -> list[Machine]:
        """The machines after the last round."""
        return self.machines[max(self.machines)]


@dataclass(frozen=True)
class Bench:
    """The settings common to all runs."""

    folder: Path
    kept: Path
    rounds: int
    ids: int
    model: str
    clips: int
    strength: float
    seeds: Sequence[int]
    chosen: Sequence[str]
    figures: Path | None

    def config(self, seed: int, changes: Mapping[str, Any]) -> Config:
        """Return a run's configuration: the job's, updated by ``changes``."""
        values = load_config(JOB, []).model_dump(mode="json", exclude={"track"})
        method = dict(changes.get("method", {}))
        ours = "profila" in method.get("name", "profila")
        values["method"] = ({"name": "profila", "total_rounds": self.rounds} if ours else {}) | method
        model = changes.get("model", {})
        if "begin" in changes:
            file = self._train_file(seed, changes["begin"])
            model = {"init_from": {"file": str(file), "keep": ["objective.*"], "ignore": ["objective.*"]}}
        values["models"] = {"model": {"name": self.model} | model}
        values["objective"] = changes.get("objective", values["objective"])
        values["data"] |= {"ids": self.ids, "clips": self.clips, "strength_db": self.strength, "seed": seed}
        values["data"] |= changes.get("data", {})
        values["train"] |= {"rounds": max(1, changes.get("rounds", self.rounds))} | changes.get("train", {})
        values["evaluate"] = {"every": self.rounds + 1, "clients": "none", "server": False}
        values["run"] = {"seed": seed, "dir": str(self.folder), "name": run_name()}
        values["objective"] = values["objective"] | {key: changes[key] for key in ("score", "spread") if key in changes}
        return make_config(values)

    def run(self, seed: int, changes: Mapping[str, Any], points: Sequence[int] = ()) -> Result:
        """Train one federation and measure it after ``points`` rounds and at the end. Kept runs are not repeated."""
        config, rounds = self.config(seed, changes), changes.get("rounds", self.rounds)
        kept = self._find_result_file(config, changes, points)

        def make() -> Result:
            began = time.process_time()
            if rounds and changes.get("score") and changes["method"] == FEDAVG["method"]:
                # The same network with a different score.
                machines = {rounds: self.measure(config, self.read_trained(seed, FEDAVG))}
            elif changes.get("central"):
                one = {**FEDAVG, "data": {"partition": {"by": "iid", "clients": 1}}}
                machines = {rounds: self.measure(config, self.read_trained(seed, one))}
            else:
                machines = self._train_and_measure(config, rounds, points, kept.with_suffix(".safetensors"))
            return Result(machines, time.process_time() - began)

        return once(kept, Result, make)

    def _train_and_measure(
        self, config: Config, rounds: int, points: Sequence[int], file: Path
    ) -> dict[int, list[Machine]]:
        found = {}
        with open_server(config) as server:
            for done in range(rounds + 1):
                if done:
                    server.round()
                if (done == rounds or done in points) and hasattr(
                    server._federation.method.objective, "normal_examples"
                ):
                    found[done] = _machines(server, config)
            if rounds:
                tensors = server._federation.state.tensors["global"]
                save_file({name.removeprefix("model/"): tensor.clone() for name, tensor in tensors.items()}, file)
        return found

    def _find_result_file(self, config: Config, changes: Mapping[str, Any], points: Sequence[int] = ()) -> Path:
        """Return the path of a run's kept result; the trained tensors are beside it."""
        said = config.digest() + json.dumps([changes.get("rounds", self.rounds), "central" in changes, list(points)])
        return find_result_file(self.kept, said)

    def read_trained(self, seed: int, changes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the server's tensors after a run, by their names in the network."""
        return load_file(self._train_file(seed, changes))

    def _train_file(self, seed: int, changes: Mapping[str, Any]) -> Path:
        """Return the file of a run's trained tensors. Do the run first if it is missing."""
        self.run(seed, changes)
        return self._find_result_file(self.config(seed, changes), changes).with_suffix(".safetensors")

    def measure(self, config: Config, tensors: Tensors) -> list[Machine]:
        """Measure a network at each client of a federation, without training."""
        with open_server(config) as server:
            federation = server._federation
            own = federation.state.tensors["global"]
            given = {name: tensors.get(name.removeprefix("model/"), value) for name, value in own.items()}
            state = dataclasses.replace(federation.state, tensors={"global": given})
            federation.checkpoint = federation.checkpoint.replace_state(state)
            return _machines(server, config)


def _machines(server: Server, config: Config) -> list[Machine]:
    """Measure a server's state at every client."""
    federation = server._federation
    run_dir = Path(config.run.dir, str(config.run.name))
    clients = list(federation.clients)
    orders = federation._make_orders(federation.method.plan_evaluation(federation.state, clients), ())
    broadcast = federation.broadcast(keys_of(orders))
    worker = Worker(run_dir, config, PrivateStore(run_dir / "private"))
    return [_machine(worker.prepare(order, broadcast), federation.method.objective) for order in orders]


def _machine(step: Step, objective: Any) -> Machine:
    found = objective.evaluate(step, "model", step.data.test, 256)
    own = objective.normal_examples(step.data.train).cut_for_test()
    z = F.normalize(predict(step, "model", own, 256).double(), dim=1)
    return Machine(
        step.client.id,
        found["scores"].values.tolist(),
        found["scores"].truth.tolist(),
        found["threshold"].total,
        float((z - z.mean(dim=0)).square().sum(dim=1).mean()),
    )


def _pool_auc(machines: Sequence[Machine]) -> float:
    """Return the AUC of all machines' clips with a common threshold."""
    strange = [each for machine in machines for each in machine.strange]
    return float(roc_auc_score(strange, [each for machine in machines for each in machine.scores]))


def contestants(bench: Bench) -> None:
    """Areas under the ROC curve and F1 of all contestants."""
    _compare(bench, CONTESTANTS)
    if bench.figures is not None:
        _draw_scores(bench, bench.figures / "profila-scores.svg")


DRAWN = ("FedAvg", "ProFiLA, normal clips alone", "ProFiLA, as run", "autoencoder (FedAvg)")


def _draw_scores(bench: Bench, path: Path) -> None:
    """Draw the scores of each machine's test clips, with the first seed's machines."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "svg.hashsalt": path.name,
        "svg.fonttype": "none",
    }  # letters as paths would dominate the file's size
    runs = {name: bench.run(bench.seeds[0], CONTESTANTS[name]).last for name in DRAWN}
    machines = sorted(machine.name for machine in runs[DRAWN[0]])[:: bench.ids // 2 or 1][:4]
    figure, rows = plt.subplots(len(runs), len(machines), figsize=(9, 7), layout="constrained", squeeze=False)
    for axes, (name, found) in zip(rows, runs.items(), strict=True):
        of = {machine.name: machine for machine in found}
        for axis, machine in zip(axes, (of[each] for each in machines), strict=True):
            scores, strange = np.array(machine.scores), np.array(machine.strange, dtype=bool)
            bins = np.linspace(scores.min(), scores.max(), 21)
            axis.hist(scores[~strange], bins, alpha=0.6, histtype="stepfilled", label="normal")
            axis.hist(scores[strange], bins, alpha=0.6, histtype="stepfilled", label="anomalous")
            axis.axvline(machine.threshold, color="black", linewidth=0.8, linestyle="--", label="threshold")
            axis.set_title(f"{machine.name}, AUC {machine.auc:.2f}", fontsize="small")
            axis.tick_params(labelsize=6)
            axis.locator_params(axis="x", nbins=3)
            axis.set_yticks([])
        axes[0].set_ylabel(name, fontsize="small")
    rows[0][0].legend(frameon=False, fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})


def published(bench: Bench) -> None:
    """The leaking protocol of the paper's code, and its effect."""
    _compare(bench, AS_PUBLISHED)


def _compare(bench: Bench, kinds: Mapping[str, Mapping[str, Any]]) -> None:
    columns = ["AUC, mean machine", "worst machine", "pooled", "pAUC", "F1", "F1, oracle's threshold", "spread"]
    print_head([*columns, "processor, s"])
    for name, changes in kinds.items():
        if bench.chosen and name not in bench.chosen:
            continue
        found = [bench.run(seed, changes) for seed in bench.seeds]
        last = [each.last for each in found]
        cells = [
            mean([statistics.fmean(machine.auc for machine in run) for run in last]),
            mean([min(machine.auc for machine in run) for run in last]),
            mean([_pool_auc(run) for run in last]),
            mean([statistics.fmean(machine.partial_auc for machine in run) for run in last]),
            mean([statistics.fmean(machine.f1 for machine in run) for run in last]),
            mean([statistics.fmean(machine.oracle_f1 for machine in run) for run in last]),
            mean([statistics.fmean(machine.spread for machine in run) for run in last], 4),
            f"{statistics.fmean(each.seconds for each in found):.0f}",
        ]
        print_row(name, cells)


def ablation(bench: Bench) -> None:
    """The value of each part of ProFiLA: the mean machine's AUC, and differences from the whole with equal seeds."""
    for title, mode in {"normal": {}, "as run": AS_RUN}.items():
        print(
            f"\nMode {title}, with anomalies to steer by:\n\n| without | AUC | difference, mean | smallest to largest |"
        )
        print("|---|---|---|---|")

        def auc(seed: int, method: Mapping[str, Any], mode: Mapping[str, Any] = mode) -> float:
            run = bench.run(seed, {**mode, "method": {**mode.get("method", {}), **method}})
            return statistics.fmean(machine.auc for machine in run.last)

        whole = [auc(seed, {}) for seed in bench.seeds]
        print(f"| nothing | {mean(whole)} | | |", flush=True)
        for name, method in WITHOUT.items():
            own = [auc(seed, method) for seed in bench.seeds]
            differences = [one - other for one, other in zip(own, whole, strict=True)]
            span = f"{min(differences):+.3f} to {max(differences):+.3f}"
            print(f"| {name} | {mean(own)} | {statistics.fmean(differences):+.3f} | {span} |", flush=True)


def strength(bench: Bench) -> None:
    """The mean machine's AUC by the anomalies' strength, for networks without private tensors."""
    autoencoder = CONTESTANTS["autoencoder (FedAvg)"]
    kinds: Mapping[str, Mapping[str, Any] | None] = {"untrained": None, "FedAvg": FEDAVG, "autoencoder": autoencoder}
    print("| strength, dB | " + " | ".join("none" if each is None else f"{each:g}" for each in STRENGTHS) + " |")
    print("|---|" + "---|" * len(STRENGTHS))
    for name, changes in kinds.items():
        cells = []
        for each in STRENGTHS:
            found = []
            for seed in bench.seeds:
                config = bench.config(seed, {**(changes or FEDAVG), "data": {"strength_db": each}})
                tensors = {} if changes is None else bench.read_trained(seed, changes)
                found.append(statistics.fmean(machine.auc for machine in bench.measure(config, tensors)))
            cells.append(mean(found))
        print_row(name, cells)


def spread(bench: Bench) -> None:
    """Spread of the outputs over the rounds, and the mean machine's AUC with it."""
    points = sorted({0, 1, bench.rounds // 4, bench.rounds // 2, bench.rounds})
    print_head([f"round {point}" for point in points])
    kinds = {
        "FedAvg": FEDAVG,
        "FedAvg, objective.spread 1": {**FEDAVG, "spread": 1.0},
        "ProFiLA": {"method": {"beta": 0.0, "adaptive_lr": False}},
    }
    for name, changes in kinds.items():
        seen = [bench.run(seed, changes, points) for seed in bench.seeds]
        cells = [
            f"{statistics.fmean(m.spread for run in seen for m in run.machines[point]):.4f} "
            f"({statistics.fmean(m.auc for run in seen for m in run.machines[point]):.3f})"
            for point in points
        ]
        print_row(name, cells)


def joining(bench: Bench) -> None:
    """A machine that joins the finished federation with 10 normal clips: its AUC after some local epochs."""
    print("| initial weights | " + " | ".join(f"{epochs} epochs" for epochs in EPOCHS) + " |")
    print("|---|" + "---|" * len(EPOCHS))
    kinds: Mapping[str, Mapping[str, Any] | None] = {
        "untrained": None,
        "FedAvg": FEDAVG,
        "ProFiLA": {"method": {"beta": 0.0, "adaptive_lr": False}},
    }
    for name, changes in kinds.items():
        cells: list[list[float]] = [[] for _ in EPOCHS]
        for seed in bench.seeds:
            # The newcomer has the number after the last one's, of a corpus with the same seed.
            leave = [f"{kind}_{number:02d}" for kind in ("fan", "pump") for number in range(bench.ids)]
            new = {"ids": bench.ids + 1, "clips": 10}
            with tempfile.TemporaryDirectory(prefix="raydfl-profila-", dir=bench.folder) as folder:
                model = {}
                if changes is not None:
                    file = Path(folder) / "federation.safetensors"
                    tensors = bench.read_trained(seed, changes)
                    save_file({key: value for key, value in tensors.items() if not key.startswith("objective")}, file)
                    own = ["adapter.*", "output.*"] if "name" not in changes["method"] else []
                    model = {"init_from": {"file": str(file), "keep": [*own, "objective.*"]}}
                for place, epochs in enumerate(EPOCHS):
                    train = {"local_epochs": max(1, epochs)}
                    given = {"data": new, "train": train, "model": model, "rounds": min(1, epochs)}
                    run = bench.run(seed, {**given, "method": {"name": "fedper", "personal": ALL}})
                    cells[place] += [machine.auc for machine in run.last if machine.name not in leave]
        print_row(name, [mean(each) for each in cells])


TABLES: Mapping[str, Callable[[Bench], None]] = {
    "contestants": contestants,
    "published": published,
    "ablation": ablation,
    "strength": strength,
    "spread": spread,
    "joining": joining,
}


def main() -> None:
    """Train the runs of the tables, and print them."""
    parser = options(__doc__, TABLES, rounds=12)
    parser.add_argument("--ids", type=int, default=2, help="number of machines of each of the two kinds")
    parser.add_argument("--model", default="film_cnn_small", help="film_cnn is the paper's, with 15 times the work")
    parser.add_argument("--clips", type=int, default=40, help="normal training clips of a machine")
    parser.add_argument("--strength", type=float, default=-5.0, help="anomalies, dB over the machine's own sound")
    parser.add_argument("--only", nargs="+", default=(), help="contestants, by name; default: all")
    parser.add_argument(
        "--figures", type=Path, help="folder for profila-scores.svg, drawn with the table of contestants"
    )
    given = parser.parse_args()
    budget = (
        f"{given.rounds} rounds, {2 * given.ids} machines with {given.clips} normal clips each, anomalies at "
        f"{given.strength:g} dB, `{given.model}`, seeds {given.seeds}."
    )
    with folders(given.kept) as (runs, kept):
        common = (
            given.rounds,
            given.ids,
            given.model,
            given.clips,
            given.strength,
            given.seeds,
            given.only,
            given.figures,
        )
        print_tables(TABLES, given.tables, budget, Bench(runs, kept, *common))


if __name__ == "__main__":
    main()
