"""Pictures of anomaly detectors in a report: scores by machine, the strangest clips, and whether normal scores drift."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raydfl.core.metrics import base_name
from raydfl.runs.inference.tested import TestedClip, read_scores
from raydfl.runs.report import figures as plots
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.figures import Series
from raydfl.runs.report.figures_scores import Histogram, score_histograms
from raydfl.runs.report.page import Picture, Pictures, model_label, split_name

_MACHINES = 12
"""Machines whose scores are drawn."""
_CLIPS = 20
"""Clips with the highest scores that are listed."""


def machine_pictures(run: RunRecord, pictures: Pictures) -> list[Picture]:
    """Return the histograms of ``scores.csv``, and the mean normal score over the rounds beside the threshold."""
    return [*_histograms(run, pictures), *_drift(run, pictures)]


def strangest(run: RunRecord) -> list[tuple[str, str, str, str, str]]:
    """Return client, clip, label, score and decision of the clips with the highest scores, beside their thresholds if known."""

    def strangeness(clip: TestedClip) -> float:
        return clip.score / clip.threshold if clip.threshold else clip.score

    chosen = sorted(read_scores(run.folder), key=strangeness, reverse=True)[:_CLIPS]
    return [(each.client, each.clip, each.label, f"{each.score:.4g}", each.decision) for each in chosen]


def _histograms(run: RunRecord, pictures: Pictures) -> list[Picture]:
    clips = read_scores(run.folder)
    machines = list(dict.fromkeys(clip.client for clip in clips))
    if not machines:
        return []
    normal = _normal_labels(run)
    drawn = [_histogram(name, [clip for clip in clips if clip.client == name], normal) for name in machines[:_MACHINES]]
    caption = "Test clips of each machine; the line is the threshold. From scores.csv (raydfl predict --test)."
    if len(machines) > _MACHINES:
        caption += f" The first {_MACHINES} of {len(machines)} machines."
    return [pictures.add("scores", caption, score_histograms, drawn)]


def _histogram(name: str, clips: Sequence[TestedClip], normal: Sequence[str]) -> Histogram:
    scores = np.array([clip.score for clip in clips])
    strange = np.array([clip.label not in normal for clip in clips]) if normal else np.zeros(len(clips), bool)
    return Histogram(name or "the server's test", scores[~strange], scores[strange], clips[0].threshold)


def _normal_labels(run: RunRecord) -> list[str]:
    objective = run.config.get("objective")
    return list(objective.get("normal", ())) if isinstance(objective, dict) else []


def _drift(run: RunRecord, pictures: Pictures) -> list[Picture]:
    made = []
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
            title = f"normal scores over rounds, {model_label(metric)}, {split_name(split)}"
            made.append(pictures.add(title, caption, plots.curves, series, "score"))
    return made
