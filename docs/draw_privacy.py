"""Draw ``privacy-clients.svg``: the accuracy by the number of clients, from the results of privacy_clients and privacy_speech.

python docs/draw_privacy.py

A score is the mean over the last ten evaluations of a run. Points are means over seeds, bars their 95 % intervals by Student's t.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
STUDIES = {"privacy_clients": "spoken digits", "privacy_speech": "Speech Commands, unseen voices"}


def read_scores(folder: Path) -> dict[str, list[float]]:
    """Read the score of each run in per cent, by the label of its privacy."""
    scores = defaultdict(list)
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        evaluations = [value for _, value in result["scores"]["test model/accuracy"]]
        scores[result["labels"]["privacy"]].append(100 * float(np.mean(evaluations[-10:])))
    return scores


def summarise(values: list[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(half)


def draw() -> Figure:
    """Draw a panel for each study."""
    figure = Figure((7.2, 3.2), layout="constrained")
    for axes, (name, title) in zip(
        figure.subplots(1, 2, sharey=True), STUDIES.items(), strict=True
    ):
        scores = read_scores(RESULTS / name)
        for epsilon, marker in (("8", "o"), ("2", "s")):
            labels = {
                label: int(label.partition(", ")[2].replace(",", ""))
                for label in scores
                if f"epsilon {epsilon}," in label
            }
            ordered = sorted(labels, key=labels.__getitem__)
            means, halves = zip(*(summarise(scores[label]) for label in ordered), strict=True)
            clients = [labels[label] for label in ordered]
            axes.errorbar(
                clients,
                means,
                halves,
                marker=marker,
                markersize=4,
                capsize=2,
                label=f"epsilon {epsilon}",
            )
        mean, half = summarise(scores["none"])
        axes.axhline(mean, color="black", linestyle="--", linewidth=1, label="without privacy")
        axes.axhspan(mean - half, mean + half, color="black", alpha=0.1)
        axes.set(xscale="log", xlabel="clients (stated)", title=title, ylim=(0, 100))
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="accuracy (%)")
    figure.axes[1].legend(fontsize=8)
    return figure


def main() -> None:
    """Write the figure."""
    with mpl.rc_context({"svg.hashsalt": "privacy"}):
        draw().savefig(DOCS / "privacy-clients.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
