"""The page that compares several runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raydfl.core.metrics import SCORES, base_name, model_name
from raydfl.core.nested import flatten, get_path
from raydfl.runs.report.data import SPLITS, Key, RunRecord, align, place
from raydfl.runs.report.figures import Picture, Series, curves
from raydfl.runs.report.page import Section, render_page, value_text
from raydfl.runs.report.run import notes_of, sent_and_time
from raydfl.runs.report.scores import UNITS, model_label, score_text, shown_curve, split_name

Groups = Mapping[str, Sequence[RunRecord]]
"""Runs that differ only in their seed, by what tells their configuration from the others."""


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the page as HTML."""
    groups = _group(runs)
    models = list(dict.fromkeys(name for run in runs for name in run.models))
    keys = sorted(
        {key for run in runs for key in run.scores()},
        key=lambda key: (place(key[0], list(SPLITS)), models.index(model_name(key[1])), key[1]),
    )
    return render_page(
        f"{len(runs)} runs of {len(groups)} configuration{'s' if len(groups) > 1 else ''}",
        " · ".join(groups),
        [
            _show_scores(groups, keys),
            Section("Learning curves", list(_curves(groups, keys))),
            _show_differences(groups),
            _show_runs(groups),
        ],
        [f"{run.id}: {note}" for run in runs for note in notes_of(run)],
    )


def _group(runs: Sequence[RunRecord]) -> Groups:
    parts: dict[str, list[RunRecord]] = {}
    for run in runs:
        key = json.dumps(_decisive(run), sort_keys=True, default=str) if run.config else str(run.folder)
        parts.setdefault(key, []).append(run)
    groups = [(_label(part[0], [other[0] for other in parts.values()]), part) for part in parts.values()]
    for more in ("id", "folder"):  # labels that are equal even so
        labels = [label for label, _ in groups]
        groups = [
            (f"{label} ({getattr(part[0], more)})" if labels.count(label) > 1 else label, part)
            for label, part in groups
        ]
    return dict(groups)


def _label(run: RunRecord, others: Sequence[RunRecord]) -> str:
    """Return the method with up to four settings in which runs of the same method differ."""
    own = flatten(_decisive(run))
    rivals = [flatten(_decisive(other)) for other in others if other.config and other.method == run.method]
    differing = [key for key in own if any(rival.get(key) != own[key] for rival in rivals)]
    words = [f"{key.removeprefix('method.')}={value_text(own[key])}" for key in differing if key != "method.name"]
    return " ".join([run.method or run.id, *words[:4]])


def _decisive(run: RunRecord) -> dict[str, Any]:
    """Return the configuration without the seed and without what does not change the numbers."""
    return {key: value for key, value in run.config.items() if key not in ("run", "ray", "track")}


def _curves(groups: Groups, keys: Sequence[Key]) -> Iterator[Picture]:
    """Draw a figure for each score and split; a group's model looks the same in all, and no other has its colour and dashes."""
    looks: dict[tuple[str, str], int] = {}
    for (label, runs), (_, metric) in itertools.product(groups.items(), keys):
        if any(metric == own for run in runs for _, own in run.curves):
            looks.setdefault((label, model_name(metric)), len(looks))
    for base, split in itertools.product(UNITS, dict.fromkeys(split for split, _ in keys)):
        series = []
        metrics = [metric for own, metric in keys if own == split and base_name(metric) == base]
        for (label, runs), metric in itertools.product(groups.items(), metrics):
            found = [shown_curve(run, (split, metric)) for run in runs if (split, metric) in run.curves]
            if not found:
                continue
            rounds, values, _ = align(found)
            if len(rounds):  # in which all of them were measured
                name = f"{label}: {model_name(metric)}" if model_name(metric) else label
                low, high = (values.min(axis=0), values.max(axis=0)) if len(found) > 1 else (None, None)
                look = looks[label, model_name(metric)]
                series.append(Series(name, rounds, values.mean(axis=0), low, high, look, look))
        if series:
            caption = "Mean over seeds, with the range." if any(item.low is not None for item in series) else ""
            title = f"{SCORES[base].title}, {split_name(split)}"
            yield curves(title, caption, series, UNITS[base], percent=SCORES[base].share)


def _show_scores(groups: Groups, keys: Sequence[Key]) -> Section:
    headlines = {run.headline for runs in groups.values() for run in runs}
    measured = {base_name(metric) for _, metric in keys}
    always = () if headlines - {"accuracy", "loss"} else ("accuracy", "macro_f1", "loss")
    bases = [base for base in UNITS if base in always or base in measured]
    headline = ", ".join(SCORES[name].title for name in SCORES if name in headlines)
    titles = [SCORES[base].title for base in bases]
    rows = (_score_rows(groups, key, bases) for key in keys if base_name(key[1]) in headlines)
    return Section(
        "Final scores",
        headings=(
            *("configuration", "model", "data", "runs", *titles),
            *(f"{headline}, mean of the last", f"{headline}, worst tenth of clients"),
        ),
        rows=list(itertools.chain.from_iterable(rows)),
        hint="At each run's last measurement; of runs that differ only in their seed the mean, with the range in brackets. Where "
        "clients were measured, each client counts once.",
    )


def _score_rows(groups: Groups, key: Key, bases: Sequence[str]) -> Iterator[list[str]]:
    """Yield the final scores of one model on one split, a row for each group that has it."""
    split, metric = key
    headline = base_name(metric)
    for label, every in groups.items():
        runs = [run for run in every if key in run.curves]
        if not runs:
            continue
        scores = []
        for base in bases:
            # A backdoor's success belongs to the test data, of which it is measured on copies.
            source = "triggered" if (split, base) == ("test", "attack_success") else split
            score = (source, metric.removesuffix(headline) + base)
            scores.append(_mean_and_range(base, [shown_curve(run, score).last for run in runs if score in run.curves]))
        curves = [shown_curve(run, key) for run in runs]
        averaged = "; ".join(dict.fromkeys(curve.tail_text for curve in curves))
        worst = [run.curves.get((split, f"{metric}_worst_decile")) for run in runs]
        yield [
            *(label, model_label(metric), split_name(split), str(len(runs)), *scores),
            f"{_mean_and_range(headline, [curve.tail for curve in curves])} ({averaged})",
            _mean_and_range(headline, [curve.last for curve in worst if curve is not None]),
        ]


def _mean_and_range(base: str, values: Sequence[float]) -> str:
    """Return ``81.2 % (79.0 to 83.5)``; of one value only itself, of none ``-``."""
    if not values:
        return "-"
    mean = score_text(base, float(np.mean(values)))
    low, high = (score_text(base, edge).removesuffix(" %") for edge in (min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def _show_differences(groups: Groups) -> Section:
    """Show the settings in which the groups differ, with the value in each."""
    settings = [flatten(_decisive(runs[0])) for runs in groups.values()]
    rows = [
        [key, *(value_text(each[key]) if key in each else "-" for each in settings)]
        for key in dict.fromkeys(itertools.chain(*settings))
    ]
    return Section("What differs", headings=("setting", *groups), rows=[row for row in rows if len(set(row[1:])) > 1])


def _show_runs(groups: Groups) -> Section:
    rows = []
    for label, run in ((label, run) for label, runs in groups.items() for run in runs):
        seed = get_path(run.config, "run.seed")
        rounds = f"{run.done} of {run.total}" if run.total else str(run.done)
        rows.append((run.id, label, "-" if seed is None else str(seed), rounds, *sent_and_time(run), str(run.folder)))
    headings = ("run", "configuration", "seed", "rounds", "sent", "time in rounds", "folder")
    return Section("Runs", headings=headings, rows=rows)
