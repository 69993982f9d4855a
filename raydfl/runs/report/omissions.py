"""Omissions of a run: excluded layers and updates, failed and late clients, unreadable clips."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.figures import SERIES, Axes, Plot, label_rounds, make_integer_locator
from raydfl.runs.report.page import Section

_PRUNED = "lpa/pruned/"
_LISTED = 200
"""Maximum number of rows of a folded table."""


def show_aggregation(run: RunRecord) -> Section:
    """Show the number of clients excluded by layer-wise pruning, by layer, and the number of unused updates, over the rounds."""
    return Section("Aggregation", [*_draw_pruning(run), *_draw_failures(run)])


def _draw_pruning(run: RunRecord) -> Iterator[Plot]:
    layers = {
        metric.removeprefix(_PRUNED): curve
        for (_, metric), curve in sorted(run.curves.items())
        if metric.startswith(_PRUNED)
    }
    if not layers:
        return

    def draw(*strips: Axes) -> None:
        top = max(float(curve.totals.max()) for curve in layers.values())
        for axes, (layer, curve) in zip(strips, layers.items(), strict=True):
            axes.step(curve.rounds, curve.totals, where="mid", color=SERIES[0], linewidth=1.2)
            axes.set_ylim(0, max(1.0, top * 1.15))
            axes.yaxis.set_major_locator(make_integer_locator(2))
            axes.set_title(layer, loc="left", fontsize=8, pad=2)
        label_rounds(strips[-1])

    means = ", ".join(f"{layer} {curve.totals.mean():.3g}" for layer, curve in layers.items())
    caption = f"Excluded clients per round, mean by layer: {means}."
    height = 0.7 + 0.55 * len(layers)
    yield Plot("layer-wise pruning (LPA)", caption, draw, height, len(layers), label="excluded clients")


def _draw_failures(run: RunRecord) -> Iterator[Plot]:
    kinds = {
        name: (rounds, lost) for name in ("failed", "rejected") for rounds, lost in [run.totals(name)] if lost.sum()
    }
    if not kinds:
        return

    def draw(axes: Axes) -> None:
        x = np.unique(np.concatenate([rounds for rounds, _ in kinds.values()]))
        width = float(np.clip(300 / (x[-1] - x[0] + 1), 1, 12))  # in points; the axes are about 400 points wide
        below = np.zeros(len(x))
        for number, (name, (rounds, lost)) in enumerate(kinds.items()):
            above = below + np.bincount(np.searchsorted(x, rounds), lost, len(x))
            nonzero = above > below
            axes.vlines(
                *(x[nonzero], below[nonzero], above[nonzero]),
                color=SERIES[number],
                linewidth=width,
                capstyle="butt",
                label=name,
            )
            below = above
        axes.set_xlim(x[0] - 1, x[-1] + 1)
        axes.set_ylim(0, None)
        axes.set_ylabel("unused updates")
        axes.yaxis.set_major_locator(make_integer_locator())
        label_rounds(axes)

    caption = ", ".join(f"{name}: {lost.sum():.0f}" for name, (_, lost) in kinds.items()) + "."
    yield Plot("updates that were not used", caption, draw, 2.6)


def show_incidents(run: RunRecord) -> Section:
    """List the failed and the late clients of each round, with the reasons."""
    count = len(run.incidents)
    return Section(
        "Failed and late clients",
        headings=("round", "phase", "client", "incident", "reason"),
        rows=[(str(round_index), *words) for round_index, *words in run.incidents[-_LISTED:]],
        folded=f"{count} incident{'s' * (count != 1)}: a client was excluded from a round, or stopped by the deadline",
        notes=[f"The last {_LISTED} of {count}. All are in rows/, in column note."] * (count > _LISTED),
    )


def show_skipped(run: RunRecord) -> Section:
    """List the skipped clips with the reasons."""
    listed = run.about.get("skipped")
    clips = listed if isinstance(listed, list) else []
    count = len(clips)
    pairs = [clip if isinstance(clip, dict) else {"clip": clip} for clip in clips[:_LISTED]]
    return Section(
        "Skipped clips",
        headings=("clip", "reason"),
        rows=[(str(pair.get("clip", "")), str(pair.get("reason", ""))) for pair in pairs],
        folded=f"{count} clip{'s' * (count != 1)} skipped, because the clip is unreadable or lacks a view",
        notes=[f"The first {_LISTED} of {count}. All are in run.json."] * (count > _LISTED),
    )
