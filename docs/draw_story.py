"""Draw the figures of docs/start.md from the runs of its ten steps.

python docs/draw_story.py FOLDER OUT

FOLDER has the runs ``runs/mine``, with its references, and ``runs/better``. The figures are written into OUT:

- ``story-curve.svg``: test accuracy by round of the federation, of the same clips pooled and of each client alone;
- ``story-scores.svg``: the scores of these runs and of ``better``, with their 95 % intervals.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import raydfl
from matplotlib.figure import Figure

METRIC = "test model/accuracy"
RUNS = {
    "federation": "mine",
    "same clips pooled": "mine/reference/pooled",
    "each client alone": "mine/reference/local",
    "on the speech embedding": "better",
}
WIDTH, HEIGHT = 7.2, 3.2


def load_runs(folder: Path) -> dict[str, raydfl.Result]:
    """Load the runs of the story by their names in the figures."""
    return {name: raydfl.load_result(folder / "runs" / path) for name, path in RUNS.items()}


def draw_curves(runs: dict[str, raydfl.Result]) -> Figure:
    """Draw the accuracy by round of the federation and its references."""
    figure = Figure((WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    for name, result in [*runs.items()][:3]:
        curve = result.history[METRIC].dropna()
        axes.plot(curve.index, curve, marker="o", markersize=4, label=name)
    score = runs["federation"].verdict.scores[0]
    axes.axhline(score.raw, color="grey", linestyle=":", label=f"raw features ({score.raw_name})")
    axes.axhline(
        score.guessing,
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"always {score.majority_class!r}",
    )
    axes.set_xticks(runs["federation"].history[METRIC].dropna().index)
    axes.set(xlabel="round", ylabel="accuracy of unseen speakers", ylim=(0, 1.03))
    axes.legend(fontsize=8, loc="lower right")
    return figure


def draw_scores(runs: dict[str, raydfl.Result]) -> Figure:
    """Draw the last score of each run with its interval."""
    figure = Figure((WIDTH, 0.6 * HEIGHT), layout="constrained")
    axes = figure.subplots()
    scores = {name: result.verdict.scores[0] for name, result in runs.items()}
    for place, score in enumerate(reversed(scores.values())):
        axes.plot(
            [score.low, score.high], [place, place], linewidth=5, alpha=0.4, solid_capstyle="butt"
        )
        axes.plot(score.value, place, marker="o", color="black", markersize=5)
        axes.annotate(
            f"{score.value:.2f}",
            (score.value, place),
            (0, 6),
            textcoords="offset points",
            ha="center",
            size=8,
        )
    axes.axvline(scores["federation"].guessing, color="black", linestyle="--", linewidth=1)
    axes.set(
        xlabel="accuracy with its 95 % interval; dashed: guessing",
        xlim=(0, 1.03),
        ylim=(-0.6, len(scores) - 0.3),
    )
    axes.set_yticks(range(len(scores)), [*reversed(scores)])
    return figure


def main() -> None:
    """Write both figures."""
    folder, out = map(Path, sys.argv[1:])
    mpl.rcParams["svg.hashsalt"] = "raydfl"  # equal files for equal runs
    runs = load_runs(folder)
    for name, figure in {"curve": draw_curves(runs), "scores": draw_scores(runs)}.items():
        figure.savefig(out / f"story-{name}.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
