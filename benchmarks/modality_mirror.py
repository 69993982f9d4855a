"""Compare ModalityMirror with its baselines on spoken digits with images of digits: the tables of docs/modality_mirror.md.

100 clients, labels by Dirichlet(0.1), 10 clients a round; UniFL draws 10 from each of its two populations.
ModalityMirror trains for two phases, so baselines are measured after the rounds of one phase, and after the rounds of
both. Nothing is chosen by the test, and the last round counts. A client has about 20 training clips: steps of 8 clips
and 2 epochs, chosen with a seed that no table uses.

    python benchmarks/modality_mirror.py --root PATH/TO/fsdd --pictures PATH/TO/mnist --tables missing
    python benchmarks/modality_mirror.py --root PATH/TO/fsdd --pictures PATH/TO/mnist --rounds 5 --seeds 1 --tables helps

Keeping freed memory in the process saves time: MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from raydfl import read_rows
from raydfl.engine.config import load_config, make_config

mpl.use("Agg")
import matplotlib.pyplot as plt

JOB = Path(__file__).parents[1] / "jobs" / "spoken_and_written.yaml"
FEATURES = {"sample_rate": 8000, "seconds": 0.64, "bands": 40, "window_ms": 32, "hop_ms": 20}
MIRROR, MULTIFL, UNIFL, HARMONY = "modality_mirror", "multifl", "unifl", "harmony"
TITLES = {MIRROR: "ModalityMirror", MULTIFL: "MultiFL", UNIFL: "UniFL", HARMONY: "Harmony"}
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Fractions of the clients without the image: the paper's table 1."""
MORE_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of its figure 3."""
USUAL = 0.3
SOUNDS: Mapping[str, float | None] = {"clean": None, "10 dB": 10.0, "0 dB": 0.0, "-10 dB": -10.0}
PICTURES = {"strong": 0.0, "weak": 1.0}
"""Deviation of the noise in images, in shares of white."""


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    scores: dict[str, dict[int, float]]
    """Of the test, by name and rounds done."""
    confusion: dict[str, list[list[float]]]
    """Of the test after the last round, by model; rows are the truth."""
    seconds: float
    """Processor time."""


@dataclass(frozen=True)
class Bench:
    """The settings common to all runs."""

    root: Path
    pictures: Path
    folder: Path
    kept: Path
    rounds: int
    seeds: Sequence[int]
    figures: Path | None
    clients: int

    def run(self, seed: int, name: str, missing: float = USUAL, **changes: Any) -> Result:
        """Train one federation for the rounds of two phases. Tables with equal runs share them.

        Args:
            seed: of the run.
            name: of the method.
            missing: fraction of the clients without the image.
            changes: ``method``, ``data`` and ``train``, in place of the job's own.
        """
        values = load_config(JOB, [f"data.root={self.root}", f"data.pictures={self.pictures}"])
        given = values.model_dump(mode="json", exclude={"track"})
        given["method"] = {"name": name} | changes.get("method", {})
        given["objective"] = {"name": "classify", "top_k": 5}
        given["data"]["partition"]["clients"] = self.clients
        given["data"] |= {"features": FEATURES, "missing": {"image": missing}} | changes.get("data", {})
        given["train"] |= {"rounds": 2 * self.rounds, "batch_size": 8, "local_epochs": 2} | changes.get("train", {})
        given["train"]["phases"] = self._phases(name)
        given["evaluate"] |= {"every": self.rounds, "clients": "none"}
        given["ray"] |= {"actors": 0}
        given["run"] = {"seed": seed, "dir": str(self.folder), "name": run_name()}
        config = make_config(given)

        def make() -> Result:
            with train_federation(config) as (folder, seconds):
                return _read(folder, seconds)

        return once(find_result_file(self.kept, settings(config)), Result, make)

    def _phases(self, method: str) -> dict[str, Any]:
        """Give Harmony's first phase as many rounds as the audio models of all methods get, with few rounds of fusion."""
        return {
            MIRROR: {"multimodal": {"rounds": self.rounds}},
            HARMONY: {"unimodal": {"rounds": 2 * self.rounds - 1}},
        }.get(method, {})

    def scores(self, score: str, name: str, missing: float = USUAL, rounds: int = 2, **changes: Any) -> list[float]:
        """Return a test score after the rounds of one or two phases, for each seed."""
        found = [self.run(seed, name, missing, **changes).scores[score] for seed in self.seeds]
        return [each.get(rounds * self.rounds, each[max(each)]) for each in found]


def _read(folder: Path, seconds: float) -> Result:
    scores: dict[str, dict[int, float]] = {}
    arrays: dict[str, tuple[int, list[list[float]]]] = {}
    for row in read_rows(folder, where=None).to_pylist():
        if row["client"] or row["split"] != "test":
            continue
        model, _, metric = row["metric"].rpartition("/")
        if metric == "confusion":
            size = math.isqrt(len(row["array"]))
            arrays[model] = max(
                arrays.get(model, (-1, [])), (row["round"], np.reshape(row["array"], (size, size)).tolist())
            )
        else:
            scores.setdefault(row["metric"], {})[row["round"]] = row["value"]
    return Result(scores, {model: array for model, (_, array) in arrays.items()}, seconds)


def missing(bench: Bench) -> None:
    """The paper's table 1: accuracy of the audio model by the fraction without images; then top-5; then both views."""
    audio = {MIRROR: "audio", MULTIFL: "audio", UNIFL: "audio"}
    fused = {MULTIFL: "fusion", UNIFL: "fused:fusion"}
    for metric, models in (("accuracy", audio), ("top_k_accuracy", audio), ("accuracy", fused)):
        print()
        print_head([f"{share:.0%}" for share in SHARES])
        for method, model in models.items():
            for times in (2,) if method == MIRROR else (1, 2):
                cells = [percent(bench.scores(f"{model}/{metric}", method, share, times)) for share in SHARES]
                print_row(
                    f"{TITLES[method]}, {times * bench.rounds} rounds" + (", both views" if models is fused else ""),
                    cells,
                )
        if models is audio:
            harmony = percent(bench.scores(f"audio/{metric}", HARMONY))
            print_row(f"{TITLES[HARMONY]}, {2 * bench.rounds - 1} rounds", [f"{harmony} (the same)"] * len(SHARES))


def more(bench: Bench) -> None:
    """The paper's figure 3: the same for more clients without images."""
    drawn: dict[str, list[list[float]]] = {}
    print_head([f"{share:.0%}" for share in MORE_SHARES])
    for method in (MIRROR, MULTIFL, UNIFL):
        found = [bench.scores("audio/accuracy", method, share) for share in MORE_SHARES]
        drawn[TITLES[method]] = found
        print_row(f"{TITLES[method]}, {2 * bench.rounds} rounds", [percent(each) for each in found])
    if bench.figures:
        drawn[TITLES[HARMONY]] = [bench.scores("audio/accuracy", HARMONY)] * len(MORE_SHARES)
        figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
        for name, found in drawn.items():
            axes.plot(
                [100 * share for share in MORE_SHARES],
                [100 * statistics.fmean(each) for each in found],
                marker=".",
                label=name,
            )
        axes.set(xlabel="clients without images, %", ylabel="accuracy of the audio model, %")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
        plt.rcParams["svg.hashsalt"] = "modality-mirror"
        figure.savefig(bench.figures / "modality-mirror-missing.svg", metadata={"Date": None})


def classes(bench: Bench) -> None:
    """The paper's figure 2: F1 of each class against Harmony's, 30 % without images, largest change first."""
    f1 = {
        method: [_f1(bench.run(seed, method).confusion["audio"]) for seed in bench.seeds]
        for method in (MIRROR, HARMONY)
    }
    mean = {method: np.mean(found, axis=0) for method, found in f1.items()}
    print_head([TITLES[HARMONY], TITLES[MIRROR], "change", "smallest to largest"])
    change = np.array(f1[MIRROR]) - np.array(f1[HARMONY])
    for each in np.argsort(-np.abs(change.mean(axis=0))):
        of = 100 * change[:, each]
        print_row(
            f"digit {each}",
            [
                f"{100 * mean[HARMONY][each]:.1f}",
                f"{100 * mean[MIRROR][each]:.1f}",
                f"{of.mean():+.1f}",
                f"{of.min():+.1f} to {of.max():+.1f}",
            ],
        )


def _f1(confusion: Sequence[Sequence[float]]) -> np.ndarray:
    matrix = np.array(confusion)
    return 2 * np.diag(matrix) / np.maximum(matrix.sum(axis=0) + matrix.sum(axis=1), 1)


def fairness(bench: Bench) -> None:
    """The teacher's value: 30 % without images, and the same rounds without it."""
    print_head(["accuracy", "top 5", "processor, s"])
    once_all = max(
        1, 2 * bench.rounds // 10
    )  # a tenth of the clients takes part in a round, so the number of clips is equal
    central = {
        "data": {"missing": {"image": 1.0}, "partition": {"by": "iid", "clients": 1}},
        "train": {
            "cohort": 1.0,
            "rounds": once_all,
            # Chosen by validation with a seed that no table uses. Its long rounds do not learn with the job's 0.05.
            "optimiser": {"name": "sgd", "lr": 0.005, "momentum": 0.9, "clip_norm": 10.0},
        },
    }
    kinds: dict[str, tuple[str, int, Mapping[str, Any]]] = {
        f"ModalityMirror, {bench.rounds} and {bench.rounds} rounds": (MIRROR, 2, {}),
        "the same without its teacher (`kd_weight: 0`)": (MIRROR, 2, {"method": {"kd_weight": 0.0}}),
        "the same, the divergence as printed": (MIRROR, 2, {"method": {"divergence": "literal"}}),
        **{
            f"{TITLES[method]}, {n * bench.rounds} rounds": (method, n, {})
            for method in (MULTIFL, UNIFL)
            for n in (1, 2)
        },
        f"Harmony, {2 * bench.rounds - 1} rounds": (HARMONY, 2, {}),
        f"one client with all sound, as many clips: {once_all} rounds": (MULTIFL, 2, central),
    }
    for name, (method, times, changes) in kinds.items():
        accuracy, top = (
            bench.scores(f"audio/{of}", method, USUAL, times, **changes) for of in ("accuracy", "top_k_accuracy")
        )
        seconds = statistics.fmean(bench.run(seed, method, **changes).seconds for seed in bench.seeds) * times / 2
        print_row(name, [percent(accuracy), percent(top), f"{seconds:.0f}"])


def helps(bench: Bench) -> None:
    """Conditions for the teacher: sound and images with noise in training and test, and the teacher's gain."""
    print_head(["the teacher, both views", "with it", "without it", "difference, mean", "smallest to largest"])
    for picture, noise in PICTURES.items():
        for sound, snr in SOUNDS.items():
            data = {"data": {"snr_db": snr, "picture_noise": noise}}
            teacher = bench.scores("fusion/accuracy", MIRROR, USUAL, 1, **data)
            taught = bench.scores("audio/accuracy", MIRROR, **data)
            untaught = bench.scores("audio/accuracy", MIRROR, method={"kd_weight": 0.0}, **data)
            gains = [100 * (one - other) for one, other in zip(taught, untaught, strict=True)]
            span = f"{min(gains):+.1f} to {max(gains):+.1f}"
            print_row(
                f"sound {sound}, image {picture}",
                [*map(percent, (teacher, taught, untaught)), f"{statistics.fmean(gains):+.1f}", span],
            )


TABLES: Mapping[str, Callable[[Bench], None]] = {
    "fairness": fairness,
    "missing": missing,
    "more": more,
    "classes": classes,
    "helps": helps,
}


def main() -> None:
    """Train the runs of the tables, and print them."""
    parser = options(__doc__, TABLES, rounds=100, of="of each of ModalityMirror's phases")
    parser.add_argument("--root", type=Path, required=True, help="folder of the Free Spoken Digit Dataset")
    parser.add_argument("--pictures", type=Path, required=True, help="folder of MNIST's idx files")
    parser.add_argument("--figures", type=Path, help="folder for the figure")
    parser.add_argument("--clients", type=int, default=100)
    given = parser.parse_args()
    with folders(given.kept) as (runs, kept):
        bench = Bench(given.root, given.pictures, runs, kept, given.rounds, given.seeds, given.figures, given.clients)
        print_tables(
            TABLES, given.tables, f"{given.clients} clients, {given.rounds} rounds a phase, seeds {given.seeds}.", bench
        )


if __name__ == "__main__":
    main()
