"""Anomaly detectors in a report: scores by machine, the clips with the highest scores, and whether normal scores drift."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydfl.core.metrics import base_name
from raydfl.runs.inference.tested import TestedClip, read_scores
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.figures import INK, SERIES, Axes, Plot, Series, plot_curves
from raydfl.runs.report.page import Section
from raydfl.runs.report.scores import format_model, format_split

_MACHINES = 12
"""Maximum number of machines in the histograms."""
_CLIPS = 20
"""Maximum number of listed clips."""
_BINS = 24


def show_machines(run: RunRecord) -> Section:
    """Show each machine's scores from ``scores.csv``, and the mean normal score and the threshold over the rounds."""
    return Section("Machines", [*_draw_histograms(run), *_draw_drift(run)])


def show_top_clips(run: RunRecord) -> Section:
    """List the test clips with the highest scores, relative to their thresholds if known."""

    def get_relative_score(clip: TestedClip) -> float:
        return clip.score / clip.threshold if clip.threshold else clip.score

    clips = sorted(read_scores(run.folder), key=get_relative_score, reverse=True)[:_CLIPS]
    return Section(
        "Clips with the highest scores",
        headings=("client", "clip", "label", "score", "decision"),
        rows=[(clip.client, clip.clip, clip.label, f"{clip.score:.4g}", clip.decision) for clip in clips],
        hint="Test clips of scores.csv. Clips with a threshold are ranked by score / threshold.",
    )


def _draw_histograms(run: RunRecord) -> Iterator[Plot]:
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

    caption = "Scores of each machine's test clips, from scores.csv (raydfl predict --test). Dashed line: threshold."
    if len(machines) > _MACHINES:
        caption += f" Only the first {_MACHINES} of {len(machines)} machines."
    yield Plot("scores", caption, draw, 0.9 + 0.9 * len(shown), len(shown))


def _draw_drift(run: RunRecord) -> Iterator[Plot]:
    for (split, metric), curve in run.curves.items():
        loss = run.curves.get((split, f"{metric.rpartition('/')[0]}/loss"))
        if base_name(metric) == "threshold" and split != "train" and loss is not None:
            series = [
                Series("mean score of normal clips", loss.rounds, loss.values),
                Series("threshold, mean of clients", curve.rounds, curve.values, colour=1, dash=1),
            ]
            caption = (
                "If both curves move together, the scale of the scores changes. If normal scores rise above the threshold, they "
                "drift."
            )
            yield plot_curves(
                f"normal scores over rounds, {format_model(metric)}, {format_split(split)}", caption, series, "score"
            )
