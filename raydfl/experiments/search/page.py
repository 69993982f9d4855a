"""The page of a search: best settings, what mattered, parallel coordinates, learning curves, every trial. Self-contained."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from raydfl.core.files import write_durably
from raydfl.experiments.plan import label_of
from raydfl.experiments.search.importance import FEWEST
from raydfl.experiments.search.journal import TrialRecord
from raydfl.experiments.search.plan import trial_name
from raydfl.experiments.search.results import SearchResults, best_command, columns, lines
from raydfl.experiments.search.settings import NoScheduler, PopulationScheduler
from raydfl.experiments.search.space import Domain
from raydfl.runs.report import Picture, Pictures, render
from raydfl.runs.report import figures as plots
from raydfl.runs.report.figures import Axis, Series

_TICKS = 5
"""Places of an axis that are labelled, at most, where its values are listed."""
_NAMED = 6
"""Curves that have a colour and a name of their own: the best ones."""


def write_page(results: SearchResults) -> Path:
    """Write ``search.html`` into the search's folder.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    search, pictures = results.search, Pictures()
    settings = search.settings
    left = search.trials - sum(record.over for record in results.records)
    best = results.best
    page = render(
        "search.html.j2",
        title=settings.title,
        subtitle=f"{len(results.records)} of {search.trials} trials · {search.folder}",
        notes=[f"{left} of {search.trials} trials are not over: raydfl search {search.file} goes on."] if left else [],
        text=settings.note,
        best=[] if best is None else [[key, label_of(value)] for key, value in best.values.items()],
        best_text="" if best is None else _best_text(results, best),
        command=best_command(results),
        explanations=_explanations(results),
        importance=_importance(results, pictures),
        parallel=_parallel(results, pictures),
        learning=_curves(results, pictures),
        headings=columns(results),
        rows=[{"cells": line, "page": (search.folder / line[0] / "report.html").exists()} for line in lines(results)],
        failures=[[trial_name(r.number), r.reason] for r in results.records if r.status == "failed" or r.worthless],
    )
    out = search.output("search.html")
    write_durably(out, page.encode())
    return out


def _best_text(results: SearchResults, best: TrialRecord) -> str:
    state = f"{best.reported} rounds" + (
        ", worthless" if best.worthless else "" if best.status == "finished" else ", not finished"
    )
    return (
        f"{trial_name(best.number)}: {results.search.settings.metric.unit} {results.shown(best.score)} after {state}."
    )


def _explanations(results: SearchResults) -> list[str]:
    settings = results.search.settings
    metric = settings.metric
    largest = "largest" if metric.best == "max" else "smallest"
    found = [
        f"Best: the {largest} {metric.title} at a trial's last evaluation, of the trials that did all rounds; of others only where "
        f"there are none."
    ]
    if metric.split == "test":
        found.append(
            "The best settings are chosen on the test data: their score is too good an estimate of what they do on new data."
        )
    if not isinstance(settings.scheduler, NoScheduler):
        found.append(f"Scheduler: {label_of(settings.scheduler.model_dump(mode='json'))}.")
    if isinstance(settings.scheduler, PopulationScheduler):
        found.append(
            "With pbt a trial's numbers are decided by the settings of all trials that it is a copy of (column from, and branches "
            "in its run.json), not by its own alone: training with the best settings from the first round on is another training."
        )
    return found


def _importance(results: SearchResults, pictures: Pictures) -> list[Picture]:
    if not results.importance:
        return []
    scored = len(results.ranked)
    caption = (
        f"What a random forest that learned the last scores of {scored} trials loses when one setting is shuffled (permutation "
        f"importance), as a share of the sum. It needs many times more trials than settings; below {FEWEST} it is left out."
    )
    if any(record.status == "stopped" for record in results.ranked):
        caption += " Trials that were stopped count with the score that they had then."
    return [pictures.add("Importance of each setting", caption, plots.shares, results.importance, "share (%)")]


def _parallel(results: SearchResults, pictures: Pictures) -> list[Picture]:
    ranked = results.ranked
    if len(ranked) < 2:
        return []
    space = results.search.settings.space
    scores = np.array([record.score for record in ranked])
    low, high = float(scores.min()), float(scores.max())
    span = high - low or 1.0
    heights = (scores - low) / span
    good = heights if results.search.settings.metric.best == "max" else 1 - heights
    strength = 0.999 * good
    strength[0] = 1.0  # the best of the finished ones, which a stopped one may surpass
    places = [
        [*(domain.position(record.values[key]) for key, domain in space.items()), height]
        for record, height in zip(ranked, heights, strict=True)
    ]
    axes = [Axis(key, _ticks(domain)) for key, domain in space.items()]
    axes.append(Axis(results.search.settings.metric.unit, [(0.0, results.shown(low)), (1.0, results.shown(high))]))
    stopped = [record.status != "finished" for record in ranked]
    caption = "A line for each trial, the best one in another colour; dashed: stopped early or not finished."
    drawn = (places, strength, axes, stopped, "")
    return [pictures.add("Parallel coordinates", caption, plots.parallel_coordinates, *drawn)]


def _ticks(domain: Domain) -> list[tuple[float, str]]:
    values = domain.ends()
    if domain.listed and len(values) > _TICKS:
        values = [values[round(index)] for index in np.linspace(0, len(values) - 1, _TICKS)]
    return [(domain.position(value), label_of(value)) for value in values]


def _curves(results: SearchResults, pictures: Pictures) -> list[Picture]:
    """Draw the score over the rounds: the best trials by name, the others in grey, those that were stopped dashed."""
    metric = results.search.settings.metric
    series = []
    for place, record in enumerate(results.ranked):
        values = np.array([score * metric.scale if math.isfinite(score) else math.nan for score in record.scores])
        named = place < _NAMED
        label = trial_name(record.number) + (f" ({record.status})" if record.status != "finished" else "")
        colour = place if named else 6
        dash = 0 if record.status == "finished" else 1
        series.append(
            Series(label if named else "", np.array(record.rounds, np.float64), values, None, None, colour, dash)
        )
    if not series:
        return []
    caption = "Dashed: stopped early or not finished."
    if len(series) > _NAMED:
        caption += f" The best {_NAMED} have names, the other {len(series) - _NAMED} are grey."
    return [pictures.add(metric.unit, caption, plots.curves, series[::-1], metric.unit)]
