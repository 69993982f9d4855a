"""Compare FedSTAR with its baselines on small data: the tables of docs/fedstar.md.

One split for each seed, the same labelled clips for all contestants, the last round counts, and nothing is chosen by
the test. Each table starts with the budget of its runs.

A spoken digit takes 0.43 s, not the second of the paper's words, and a client has 180 clips, not thousands. Clips are
therefore padded to half a second, the 48 frames of a crop, and a step has 16 clips, so that an epoch has about twenty
steps. These values were chosen with a seed that no table uses.

    python benchmarks/fedstar.py --root PATH/TO/fsdd --tables contestants
    python benchmarks/fedstar.py --root PATH/TO/fsdd --tables scarce limited --rounds 20 --cohort 0.4
    python benchmarks/fedstar.py --root PATH/TO/fsdd --esc PATH/TO/ESC-10 --tables uses --seeds 1 --rounds 3
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
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
from safetensors.torch import load_file, save_file

from raydfl import read_rows
from raydfl.data import Population
from raydfl.engine.config import load_config, make_config
from raydfl.runs.folder import export

JOB = Path(__file__).parents[1] / "jobs" / "fedstar" / "fsdd.yaml"
LANGUAGES = ["en-us", "de", "fr", "es", "it", "ru"]
POINTS = (1, 2, 5, 10, 20, 30)
"""Rounds with a column in the table of acceptance, if the run has them."""

CONTESTANTS: Mapping[str, Mapping[str, Any]] = {
    "FedSTAR, T = 1": {},
    "FedSTAR, T = 4": {"method": {"temperature": 4.0}},
    "supervised": {"method": {"learn_from": "labelled"}},
    "supervised, as often": {"method": {"learn_from": "labelled_as_often"}},
    "all labels": {"method": {"learn_from": "labelled"}, "unlabelled": None},
}
CENTRALISED = {
    "one client, FedSTAR": {"clients": 1},
    "one client, all labels": {"clients": 1, "method": {"learn_from": "labelled"}, "unlabelled": None},
}


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    # The fraction of zero pseudo-labels is NaN.
    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")

    accuracy: list[tuple[int, float]]
    """Of the test clips, by round."""
    train: dict[str, dict[int, tuple[float, float]]]
    """Value and count of the training metrics, by name and round, over all clients of the round."""
    without_labels: int
    """Clients without labelled clips."""
    seconds: float
    """Processor time of the rounds."""

    @property
    def last(self) -> float:
        """Return the accuracy in the last evaluated round."""
        return self.accuracy[-1][1]


@dataclass(frozen=True)
class Bench:
    """The settings common to all runs."""

    root: Path
    folder: Path
    rounds: int
    frames: int
    batch: int
    least_seconds: float
    cohort: float
    seeds: Sequence[int]
    esc: Path | None
    chosen: Sequence[str]
    kept: Path
    figures: Path | None

    def run(self, seed: int, **changes: Any) -> Result:
        """Train one federation and read its metrics. Tables with equal runs share them.

        Args:
            seed: of the run.
            changes: ``method``, ``data``, ``unlabelled``, ``clients``, ``models``, ``train``, ``evaluate`` and
                ``objective``, in place of the job's own.
        """
        values = load_config(JOB, [f"data.root={self.root}"]).model_dump(mode="json", exclude={"track"})
        method = dict(changes.get("method", {}))
        values["method"] = method if "name" in method else {"name": "fedstar", "rising_rounds": self.rounds} | method
        values["data"]["features"]["least_seconds"] = self.least_seconds
        values["data"]["transforms"][0] |= {"size": self.frames, "stride": 98 if self.frames == 96 else self.frames}
        values["data"]["partition"]["clients"] = changes.get("clients", 15)
        values["data"] |= changes.get("data", {})
        if values["data"]["root"] is None:  # generated speech
            del values["data"]["root"]
        values["data"]["unlabelled"] = changes.get("unlabelled", values["data"]["unlabelled"])
        values["train"] |= {"rounds": self.rounds, "batch_size": self.batch, "cohort": self.cohort} | changes.get(
            "train", {}
        )
        values["evaluate"]["every"] = changes.get("every", self.rounds)
        values["models"] = changes.get("models", values["models"])
        values["objective"] = changes.get("objective", values["objective"])
        values["ray"] |= {"actors": 0}
        values["run"] = {"seed": seed, "dir": str(self.folder), "name": run_name()}
        config = make_config(values)

        def make() -> Result:
            with train_federation(config) as (folder, seconds):
                population = Population.load(folder / "population")
                pools = [population.profile(index).get("pools") for index in range(len(population))]
                if changes.get("export"):
                    export(folder, config)[0].replace(changes["export"])
                return _read(folder, seconds, sum(each is not None and not each["labelled"] for each in pools))

        file = find_result_file(self.kept, settings(config))
        if changes.get("export"):
            file.unlink(missing_ok=True)  # the trained model is not kept
        return once(file, Result, make)


def _read(folder: Path, seconds: float, without_labels: int) -> Result:
    accuracy, train = [], {}
    for row in read_rows(folder, where=None).to_pylist():
        if row["client"]:
            continue
        if row["split"] == "test" and row["metric"] == "model/accuracy":
            accuracy.append((row["round"], row["value"]))
        if row["split"] == "train":
            train.setdefault(row["metric"], {})[row["round"]] = row["value"], row["count"]
    return Result(sorted(accuracy), train, without_labels, seconds)


def _compare(bench: Bench, contestants: Mapping[str, Mapping[str, Any]], **common: Any) -> None:
    """Print the accuracy in the last round and its cost: steps and clips in a round of all clients, processor time."""
    contestants = {name: own for name, own in contestants.items() if not bench.chosen or name in bench.chosen}
    print_head(["accuracy, %", "steps a round", "clips a round", "clients without a label", "processor, s"])
    for name, changes in contestants.items():
        found = [bench.run(seed, **{**common, **changes}) for seed in bench.seeds]
        steps = [value * count for each in found for value, count in each.train["steps"].values()]
        clips = [count for each in found for _, count in each.train["loss"].values()]
        without = statistics.fmean(each.without_labels for each in found)
        seconds = statistics.fmean(each.seconds for each in found)
        cells = [f"{statistics.fmean(steps):.0f}", f"{statistics.fmean(clips):.0f}", f"{without:.1f}", f"{seconds:.0f}"]
        print_row(name, [percent([each.last for each in found]), *cells])


def contestants(bench: Bench) -> None:
    """FSDD, 3 % of the labels, 15 clients."""
    _compare(bench, CONTESTANTS)


def centralised(bench: Bench) -> None:
    """The same clips with one client: a round has as many clips, in many more steps."""
    _compare(bench, CENTRALISED, train={"cohort": 1.0})


def speakers(bench: Bench) -> None:
    """The same, tested on unseen speakers."""
    _compare(bench, CONTESTANTS, data={"split": {"test": {"by": "group", "values": ["theo", "yweweler"]}}})


def scarce(bench: Bench) -> None:
    """FSDD, 3 % of the labels dealt by label, 30 clients: labels are scarcer than clients."""
    _compare(bench, CONTESTANTS, clients=30)
    print("\nWith one clip of each label in all:\n")
    few = {"keep_clips": 1, "partition": {"by": "iid", "clients": 30}}
    data = {"partition": {"by": "dirichlet", "clients": 30, "alpha": 100.0}}
    _compare(
        bench, {name: own for name, own in CONTESTANTS.items() if "unlabelled" not in own}, unlabelled=few, data=data
    )


def acceptance(bench: Bench) -> None:
    """Fractions of accepted and of correct pseudo-labels over the rounds, %."""
    points = [point for point in POINTS if point <= bench.rounds]
    print_head([f"round {point}" for point in points])
    for name in ("FedSTAR, T = 1", "FedSTAR, T = 4"):
        found = [bench.run(seed, **CONTESTANTS[name]) for seed in bench.seeds]
        for metric, said in {"accepted": "accepted", "pseudo_label_accuracy": "right ones"}.items():
            cells = []
            for point in points:
                known = [each.train[metric][point][0] for each in found if each.train[metric].get(point, (0, 0))[1]]
                cells.append(percent(known) if known else "none accepted")
            print_row(f"{name}: {said}", cells)
    if bench.figures is not None:
        _draw_guesses(bench, bench.figures / "fedstar-guesses.svg")


def _draw_guesses(bench: Bench, path: Path) -> None:
    """Draw the mean over the seeds, and the range, of the accepted and of the correct fraction."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = path.name
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    said = {"accepted": "guesses that are accepted, %", "pseudo_label_accuracy": "accepted guesses that are right, %"}
    for axis, (metric, title) in zip(axes, said.items(), strict=True):
        for name in ("FedSTAR, T = 1", "FedSTAR, T = 4"):
            rounds: dict[int, list[float]] = {}
            for seed in bench.seeds:
                for index, (value, count) in bench.run(seed, **CONTESTANTS[name]).train[metric].items():
                    if count:
                        rounds.setdefault(index, []).append(100 * value)
            at = [index for index, values in sorted(rounds.items()) if len(values) == len(bench.seeds)]
            axis.plot(at, [statistics.fmean(rounds[index]) for index in at], label=name.removeprefix("FedSTAR, "))
            lowest, highest = [min(rounds[index]) for index in at], [max(rounds[index]) for index in at]
            axis.fill_between(at, lowest, highest, alpha=0.2)
        axis.set(title=title, xlabel="round", ylim=(0, 100))
        axis.title.set_size("medium")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def pretraining(bench: Bench) -> None:
    """Rounds to 50 % accuracy with and without COLA pre-training on generated speakers with different words."""
    target, keep = 0.5, ["output.*"]
    front_end = load_config(JOB, [f"data.root={bench.root}"]).data.features.model_dump(mode="json") | {
        "least_seconds": 1.5
    }
    with tempfile.TemporaryDirectory(prefix="raydfl-cola-") as folder:
        cola, noise = Path(folder) / "cola.safetensors", Path(folder) / "noise.safetensors"
        corpus = {
            "name": "spoken_words",
            "speakers": 40,
            "words": "speech_commands_10",
            "takes": 4,
            "features": front_end,
        }
        made = bench.run(
            bench.seeds[0],
            method={"name": "fedavg"},
            objective={"name": "contrast", "frames": bench.frames, "size": 256},
            data={**corpus, "root": None, "transforms": [], "partition": {"by": "iid", "clients": 4}, "split": {}},
            unlabelled=None,
            train={"cohort": 1.0, "batch_size": 128, "optimiser": {"name": "adam", "lr": 0.0001}},
            export=cola,
        )
        print(f"Pre-training: {bench.rounds} rounds, {made.seconds:.0f} s, {made.last:.2f} of the other crops found.\n")
        random = torch.Generator().manual_seed(0)
        drawn = {}
        for name, tensor in load_file(cola).items():
            values = torch.randn(tensor.shape, generator=random)
            drawn[name] = values * (tensor.norm() / values.norm().clamp_min(1e-12))
        save_file(drawn, noise)
        starts: dict[str, Any] = {"none": {}, "COLA": cola, "random weights of the same norm": noise}
        print(f"| initial weights | rounds to {100 * target:.0f} % | accuracy, % |")
        print("|---|---|---|")
        for name, file in starts.items():
            start = {"file": str(file), "keep": keep, "ignore": [*keep, "objective.*"]}
            model = {"name": "split_cnn", **({"init_from": start} if file else {})}
            found = [bench.run(seed, models={"model": model}, every=1) for seed in bench.seeds]
            reached = [next((r for r, value in each.accuracy if value >= target), None) for each in found]
            said = ", ".join("not reached" if each is None else str(each) for each in reached)
            print_row(name, [said, percent([each.last for each in found])])


def limited(bench: Bench) -> None:
    """Clients with labels of few classes: 3 each, or a number drawn with variance 0.5."""
    for variance in (0.0, 0.5):
        print(f"\nsigma_c {variance:g}:\n")
        labelled = {"by": "classes", "clients": 15, "classes": 3, "variance": variance}
        unlabelled = {"keep": 0.03, "partition": {"by": "quantity", "clients": 15, "spread": 0.25}}
        chosen = {name: own for name, own in CONTESTANTS.items() if "unlabelled" not in own}
        _compare(bench, chosen, data={"partition": labelled}, unlabelled=unlabelled)


def uses(bench: Bench) -> None:
    """Practical value: languages of generated speech, and ESC-10, with 5 labels a class."""
    few = {"unlabelled": {"keep_clips": 5}}
    print("\nSix languages, 8 clients:\n")
    words = {"name": "spoken_words", "root": None, "label": "language", "languages": LANGUAGES, "speakers": 60}
    chosen = {name: {**own, **({} if "unlabelled" in own else few)} for name, own in CONTESTANTS.items()}
    _compare(bench, chosen, clients=8, data={**words, "words": ["one", "two", "three"], "split": {}})
    if bench.esc is not None:
        print("\nESC-10, 4 clients:\n")
        sounds = {"name": "esc", "root": str(bench.esc), "split": {"test": {"by": "clip", "fraction": 0.25}}}
        _compare(bench, chosen, clients=4, data=sounds)


def beyond(bench: Bench) -> None:
    """Thresholds for each class, and weak and strong views. Views exclude segments: the middle of test clips is used."""
    crop = {"name": "random_crop", "size": bench.frames}
    features = load_config(JOB, [f"data.root={bench.root}"]).data.features.model_dump(mode="json")
    masks = {"name": "spec_augment", "frames": bench.frames // 5, "bands": 12}
    strong = {"strong": {"column": "path", "features": features, "transforms": [crop, masks]}}
    kinds: dict[str, Mapping[str, Any]] = {
        "FedSTAR": {"method": {}},
        "thresholds for each class": {"method": {"per_class": True}},
        "weak and strong view": {"method": {"strong": "strong"}, "data": {"transforms": [crop], "views": strong}},
        "both": {
            "method": {"per_class": True, "strong": "strong"},
            "data": {"transforms": [crop], "views": strong},
        },
        "both, threshold 0.95": {
            "method": {"per_class": True, "strong": "strong", "threshold": [0.95, 0.95], "mix": "added"},
            "data": {"transforms": [crop], "views": strong},
        },
    }
    _compare(bench, kinds, data={"transforms": [crop]})


TABLES: Mapping[str, Callable[[Bench], None]] = {
    "contestants": contestants,
    "acceptance": acceptance,
    "centralised": centralised,
    "speakers": speakers,
    "scarce": scarce,
    "pretraining": pretraining,
    "limited": limited,
    "uses": uses,
    "beyond": beyond,
}


def main() -> None:
    """Train the runs of the tables, and print them."""
    parser = options(__doc__, TABLES, rounds=30)
    parser.add_argument("--root", type=Path, required=True, help="the Free Spoken Digit Dataset")
    parser.add_argument("--esc", type=Path, help="ESC-10 or ESC-50; default: leave out this part of uses")
    parser.add_argument("--frames", type=int, default=48, help="frames of a crop; the paper has 96")
    parser.add_argument("--least-seconds", type=float, default=0.5, help="shorter clips are padded; the paper has 1")
    parser.add_argument("--batch", type=int, default=16, help="clips of a step; the paper has 64")
    parser.add_argument("--cohort", type=float, default=0.8, help="fraction of the clients in a round")
    parser.add_argument("--only", nargs="+", default=(), help="contestants, by name; default: all of a table")
    parser.add_argument(
        "--figures", type=Path, help="folder for fedstar-guesses.svg, drawn with the table of acceptance"
    )
    given = parser.parse_args()
    budget = (
        f"{given.rounds} rounds, {given.cohort:g} of the clients in each, steps of {given.batch} clips, crops of "
        f"{given.frames} frames, seeds {given.seeds}."
    )
    with folders(given.kept) as (runs, kept):
        bench = Bench(
            given.root.absolute(),
            runs,
            given.rounds,
            given.frames,
            given.batch,
            given.least_seconds,
            given.cohort,
            given.seeds,
            given.esc,
            given.only,
            kept,
            given.figures,
        )
        print_tables(TABLES, given.tables, budget, bench)


if __name__ == "__main__":
    main()
