"""The scores of a run: learning curves, results, the distribution over clients, and confusion matrices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from raydfl.controls import Control
from raydfl.core.metrics import HARMONIC_MEAN, OF_CLIENTS, OF_FIT, SCORES, base_name, model_name, worst_decile
from raydfl.runs.report.data import SPLITS, Curve, Key, RunRecord, sort_key
from raydfl.runs.report.figures import INK, SHARES, Axes, Plot, Series, plot, plot_curves, scale_percent
from raydfl.runs.report.page import Section

UNITS = {name: f"{score.title} ({score.unit})" for name, score in SCORES.items() if score.drawn}
"""Scores in the learning curves, with the titles of their axes."""
_REPORTED = 40
"""Maximum number of figures of reported metrics. Each takes 0.1 s, and clients choose how many metrics they report."""


def format_split(split: str) -> str:
    """Return the displayed name of a split."""
    return SPLITS.get(split, split)


def format_model(metric: str) -> str:
    """Return the model of a metric, or ``-`` if the metric has no model."""
    return model_name(metric) or "-"


def format_score(base: str, value: float | None) -> str:
    """Format a score: fractions in per cent, losses as numbers, missing scores as ``-``."""
    if value is None or not np.isfinite(value):
        return "-" if value is None else str(value)
    if not SCORES[base].share:
        return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.4g}"
    return f"{100 * value:.1f} %"


def select_curve(run: RunRecord, key: Key) -> Curve:
    """Return the curve of a score. If clients measured the score, return their unweighted mean."""
    return run.curves.get((key[0], f"{key[1]}_client_mean"), run.curves[key])


def show_learning(run: RunRecord) -> Section:
    """Show a figure for each score, with a curve per model and split, and a figure for each metric reported by losses."""
    return Section("Learning curves", [*_draw_scores(run), *_draw_over_time(run), *_draw_reported_metrics(run)])


def _draw_scores(run: RunRecord) -> Iterator[Plot]:
    for base, unit in UNITS.items():
        series = [_make_series(run, key) for key in run.sort_scores(base)]
        if series:
            bands = any(item.low is not None for item in series)
            caption = "Bands: mean ± standard deviation over clients." if bands else ""
            yield plot_curves(SCORES[base].title, caption, series, unit, percent=SCORES[base].share)


def _draw_over_time(run: RunRecord) -> Iterator[Plot]:
    """Draw the main score over the virtual time of ``train.fleet``, if the run has it."""
    score, series = SCORES[run.headline], []
    for item in (_make_series(run, key) for key in run.sort_scores(run.headline)):
        seconds = run.find_seconds(item.x)
        if seconds is not None:
            series.append(dataclasses.replace(item, x=seconds))
    if series:
        title = f"{score.title} over virtual time"
        yield plot_curves(title, "", series, UNITS[run.headline], percent=score.share, virtual=True)


def _draw_reported_metrics(run: RunRecord) -> Iterator[Plot]:
    reported = {
        name: Series(name, curve.rounds, curve.values)
        for (split, name), curve in run.curves.items()
        if split == "train" and not _is_engine_metric(name)
    }
    caption = "Reported by the losses in training, over all clients of a round."
    if len(reported) > _REPORTED:
        caption += f" Only the first {_REPORTED} of {len(reported):,} metrics are drawn. All are in rows/."
    for name, series in itertools.islice(reported.items(), _REPORTED):
        yield plot_curves(name, caption, [series], name)


def _is_engine_metric(name: str) -> bool:
    """Return whether the engine records a training metric, not a loss."""
    return name in OF_FIT or name.endswith((*OF_CLIENTS, HARMONIC_MEAN)) or base_name(name) in SCORES or "/" in name


def _choose_look(run: RunRecord, key: Key) -> tuple[str, int, int]:
    """Return a curve's label, colour (by model) and dashes (by split). They are the same in all figures of a page."""
    split, metric = key
    splits = sorted({split for split, _ in run.scores()}, key=lambda name: sort_key(name, list(SPLITS)))
    label = f"{model_name(metric)}, {format_split(split)}" if model_name(metric) else format_split(split)
    return label, run.models.index(model_name(metric)), splits.index(split)


def _make_series(run: RunRecord, key: Key) -> Series:
    split, metric = key
    label, colour, dash = _choose_look(run, key)
    curve, low, high = run.curves[key], None, None
    mean, deviation = (run.curves.get((split, metric + end)) for end in OF_CLIENTS[:2])
    if mean is not None and deviation is not None and split != "train":
        curve, low, high = mean, mean.values - deviation.values, mean.values + deviation.values
        if SCORES[base_name(metric)].share:
            low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
        label += " (mean of clients)"
    return Series(label, curve.rounds, curve.values, low, high, colour, dash)


def show_results(run: RunRecord) -> Section:
    """Show the last, mean and best value of each score."""
    return Section(
        "Results",
        headings=(
            *("score", "last", "model", "data", "mean of the last ten", "best"),
            *("clients, mean ± std", "clients, worst tenth"),
        ),
        rows=[*(_make_result_row(run, key) for key in run.sort_scores()), *map(_make_control_row, run.controls)],
        hint="Scores are over all examples. In the last two columns, each "
        "client counts once." + " Rows without a round are controls, with the standard error." * bool(run.controls),
        notes=[run.controls_note] if run.controls_note else [],
    )


def _make_result_row(run: RunRecord, key: Key) -> list[str]:
    split, metric = key
    base, curve = base_name(metric), run.curves[key]
    sign = 1 if SCORES[base].higher_is_better else -1
    best = int(np.where(np.isfinite(curve.values), sign * curve.values, -np.inf).argmax())
    mean, deviation, worst = (
        curve and format_score(base, curve.last)
        for curve in (run.curves.get((split, metric + end)) for end in OF_CLIENTS)
    )
    return [
        SCORES[base].title,
        f"{format_score(base, curve.last)} (round {curve.rounds[-1]:.0f})",
        *(format_model(metric), format_split(split)),
        format_score(base, curve.mean_of_ten),
        f"{format_score(base, float(curve.values[best]))} (round {curve.rounds[best]:.0f})",
        f"{mean} ± {deviation}" if mean and deviation else "-",
        worst or "-",
    ]


def _make_control_row(control: Control) -> list[str]:
    part, base = model_name(control.metric), base_name(control.metric)
    error = "" if control.standard_error is None else f" ± {format_score(base, control.standard_error)}"
    score = f"{format_score(base, control.value)}{error} ({control.count} clips)"
    name = f"{part}: {control.name}" if part else control.name
    return [SCORES[base].title, score, name, format_split(control.split), *"----"]


def show_clients(run: RunRecord) -> Section:
    """Show the sorted scores of the clients."""
    score = run.headline
    series, captions = [], []
    for key in run.sort_scores(score):
        round_index, values = run.clients.get(key, (0, np.empty(0)))
        if count := len(values):
            label, colour, dash = _choose_look(run, key)
            x = (np.arange(count) + 0.5) / count
            series.append(Series(label, x, np.sort(values), colour=colour, dash=dash))
            captions.append(
                f"{label} (round {round_index}): {count} clients, mean {format_score(score, values.mean())}, "
                f"worst tenth {format_score(score, worst_decile(values, SCORES[score].higher_is_better))}."
            )

    def draw(axes: Axes) -> None:
        axes.axvspan(0, 0.1, color=INK, alpha=0.08, linewidth=0)
        transform = axes.get_xaxis_transform()
        axes.text(0.05, 1.01, "worst\ntenth", transform=transform, ha="center", va="bottom", fontsize=7)
        plot(axes, series)
        scale_percent(axes, series)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")
        axes.set_xlabel("clients from the worst to the best (%)")
        axes.set_ylabel(UNITS[score])

    title, height = f"{SCORES[score].title} of each client", 2.9 + 0.16 * len(series)
    return Section("Clients", [Plot(title, " ".join(captions), draw, height)] if series else [])


def show_confusions(run: RunRecord) -> Section:
    """Show the last confusion matrix of each model and split."""
    models, plots = run.models, []
    ordered = sorted(
        run.confusions, key=lambda key: (sort_key(key[0], list(SPLITS)), sort_key(model_name(key[1]), models))
    )
    for split, metric in ordered:
        round_index, matrix = run.confusions[split, metric]
        known = run.classes_of(metric)
        classes = known if len(known) == len(matrix) else [str(number) for number in range(len(matrix))]
        if matrix.sum():
            caption = f"Round {round_index}, {matrix.sum():,.0f} examples. Colour: fraction of the true class."
            plots.append(_draw_confusion(f"{format_model(metric)}, {format_split(split)}", caption, matrix, classes))
    return Section("Confusion", plots)


def _draw_confusion(title: str, caption: str, counts: NDArray[np.float64], classes: Sequence[str]) -> Plot:
    """Draw a confusion matrix, coloured by each cell's fraction of its row. Small matrices also show counts."""
    number = len(counts)
    # The power of 0.6 keeps a fraction of 2 % visible.
    strength = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)) ** 0.6

    def draw(axes: Axes) -> None:
        edges = np.arange(number + 1) - 0.5
        # A large matrix is an image, not thousands of shapes. Its blue cannot adapt to light and dark pages.
        axes.pcolormesh(
            edges, edges, np.ma.masked_equal(strength, 0), cmap=SHARES, vmin=0, vmax=1, rasterized=number > 40
        )
        if number <= 14:
            for row, column in np.argwhere(counts > 0):
                colour = "white" if strength[row, column] > 0.6 else INK
                axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=7, color=colour)
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.grid(visible=False)
        every = max(1, -(-number // 60))  # More than 60 labels would overlap.
        ticks = range(0, number, every)
        size = 8 if number <= 20 else max(4, 160 / (number / every))
        axes.set_xticks(ticks, classes[::every], rotation=90, fontsize=size)
        axes.set_yticks(ticks, classes[::every], fontsize=size)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")

    side = min(5.4, max(3.2, 0.34 * number + 1.2))
    return Plot(title, caption, draw, side, width=side)
