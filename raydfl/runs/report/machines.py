"""Anomaly detectors in a report: scores by machine, the clips with the highest scores, and whether normal scores drift."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydfl.core.metrics import base_name
from raydfl.runs.inference.tested import TestedClip, read_scores
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.figures import INK, SERIES, Axes, Picture, Series, curves
from raydfl.runs.report.page import Section
from raydfl.runs.report.scores import model_label, split_name

_MACHINES = 12
"""Machines whose scores are drawn."""
_CLIPS = 20
"""Clips with the highest scores that are listed."""
_BINS = 24


def show_machines(run: RunRecord) -> Section:
    """Show the scores of ``scores.csv``, and the mean normal score over the rounds beside the threshold."""
    return Section("Machines", [*_histograms(run), *_drift(run)])


def show_strangest(run: RunRecord) -> Section:
    """Show the clips with the highest scores, beside their thresholds if known."""

    def strangeness(clip: TestedClip) -> float:
        return clip.score / clip.threshold if clip.threshold else clip.score

    chosen = sorted(read_scores(run.folder), key=strangeness, reverse=True)[:_CLIPS]
    return Section(
        "Clips with the highest scores",
        headings=("client", "clip", "label", "score", "decision"),
        rows=[(each.client, each.clip, each.label, f"{each.score:.4g}", each.decision) for each in chosen],
        hint="Where thresholds are known, beside them. Of the test clips, from scores.csv.",
    )


def _histograms(run: RunRecord) -> Iterator[Picture]:
    machines: dict[str, list[TestedClip]] = {}
    for clip in read_scores(run.folder):
        machines.setdefault(clip.client, []).append(clip)
    if not machines:
        return
    objective = run.config.get("objective")
    normal = objective.get("normal", ()) if isinstance(objective, dict) else ()
    shown = dict(list(machines.items())[:_MACHINES])

    def draw(*rows: Axes) -> None:
        finite = [clip.score for clips in shown.values() for clip in clips if np.isfinite(clip.score)]
        edges = np.histogram_bin_edges(finite, _BINS).tolist()
        for axes, (name, clips) in zip(rows, shown.items(), strict=True):
            anomalous = [bool(normal) and clip.label not in normal for clip in clips]
            for number, label in enumerate(("normal", "anomalous")):
                scores = [clip.score for clip, strange in zip(clips, anomalous, strict=True) if strange == bool(number)]
                axes.hist(scores, edges, color=SERIES[number], alpha=0.6, label=label)
            if clips[0].threshold is not None:
                axes.axvline(clips[0].threshold, color=INK, linewidth=1.0, linestyle="--")
            axes.set_ylabel(name or "the server's test", rotation=0, ha="right", va="center")
            axes.set_yticks([])
        rows[-1].set_xlabel("score")

    caption = "Test clips of each machine; the line is the threshold. From scores.csv (raydfl predict --test)."
    if len(machines) > _MACHINES:
        caption += f" The first {_MACHINES} of {len(machines)} machines."
    yield Picture("scores", caption, draw, 0.9 + 0.9 * len(shown), len(shown))


def _drift(run: RunRecord) -> Iterator[Picture]:
    for (split, metric), curve in run.curves.items():
        loss = run.curves.get((split, f"{metric.rpartition('/')[0]}/loss"))
        if base_name(metric) == "threshold" and split != "train" and loss is not None:
            series = [
                Series("mean score of normal clips", loss.rounds, loss.values),
                Series("threshold, mean of clients", curve.rounds, curve.values, colour=1, dash=1),
            ]
            caption = (
                "Where both move together, scores change their scale; where normal scores rise above it, they drift."
            )
            yield curves(
                f"normal scores over rounds, {model_label(metric)}, {split_name(split)}", caption, series, "score"
            )
