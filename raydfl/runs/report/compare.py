"""The page that compares several runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydfl.core.metrics import SCORES, base_name, model_name
from raydfl.core.nested import flatten, get_path
from raydfl.runs.report import figures as plots
from raydfl.runs.report.data import SPLITS, Key, RunRecord, place
from raydfl.runs.report.figures import Series
from raydfl.runs.report.page import (
    UNITS,
    Picture,
    Pictures,
    choice_notes,
    mean_and_range,
    model_label,
    problem_notes,
    render,
    shown_curve,
    split_name,
    unfinished,
    value_text,
)
from raydfl.runs.words import duration, size


@dataclass(slots=True)
class _Group:
    """Runs of one configuration that differ in their seed."""

    label: str
    runs: list[RunRecord]


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the page as HTML."""
    pictures = Pictures()
    groups = _group(runs)
    notes = [f"{run.id}: {unfinished(run)}" for run in runs if unfinished(run)]
    notes += [f"{run.id}: {note}" for run in runs for note in (*choice_notes(run), *problem_notes(run), *run.missing)]
    keys = _ordered_keys(runs)
    headlines = {run.headline for run in runs}
    attacked = any(base_name(metric) == "attack_success" for _, metric in keys)
    measured = {base_name(metric) for _, metric in keys}
    always = () if headlines - {"accuracy", "loss"} else ("accuracy", "macro_f1", "loss")
    bases = [base for base in UNITS if base in always or base in measured or (attacked and base == "attack_success")]
    return render(
        "compare.html.j2",
        title=f"{len(runs)} runs of {len(groups)} configuration{'s' if len(groups) > 1 else ''}",
        subtitle=" · ".join(group.label for group in groups),
        notes=notes,
        learning=_compared_curves(groups, keys, pictures),
        headline=", ".join(SCORES[name].title for name in SCORES if name in headlines),
        scores=[SCORES[base].title for base in bases],
        results=[row for key in keys if base_name(key[1]) in headlines for row in _compared_rows(groups, key, bases)],
        groups=[group.label for group in groups],
        differences=_differences(groups),
        runs=[_run_row(group, run) for group in groups for run in group.runs],
    )


def _group(runs: Sequence[RunRecord]) -> list[_Group]:
    """Run with equal configurations together; what each group is called is what tells it from the others."""
    by_config: dict[str, list[RunRecord]] = {}
    for run in runs:
        key = json.dumps(_decisive(run), sort_keys=True, default=str) if run.config else str(run.folder)
        by_config.setdefault(key, []).append(run)
    parts = list(by_config.values())
    groups = []
    for part in parts:
        first = part[0]
        rivals = [other[0] for other in parts if other[0].config and other[0].method == first.method]
        own = flatten(_decisive(first))
        differing = [key for key in own if any(flatten(_decisive(rival)).get(key) != own[key] for rival in rivals)]
        words = [f"{key.removeprefix('method.')}={value_text(own[key])}" for key in differing if key != "method.name"]
        groups.append(_Group(" ".join([first.method or first.id, *words[:4]]), part))
    labels = [group.label for group in groups]
    for group in groups:  # two groups that even so are called alike
        if labels.count(group.label) > 1:
            group.label = f"{group.label} ({group.runs[0].id})"
    return groups


def _decisive(run: RunRecord) -> dict[str, Any]:
    """Return the configuration without the seed and without what does not change the numbers."""
    return {key: value for key, value in run.config.items() if key not in ("run", "ray", "track")}


def _ordered_keys(runs: Sequence[RunRecord]) -> list[Key]:
    """Scores of any of the runs, by data, then model in the order of the runs."""
    models = list(dict.fromkeys(name for run in runs for name in run.models))
    keys = {key for run in runs for key in run.scores()}
    return sorted(keys, key=lambda key: (place(key[0], list(SPLITS)), models.index(model_name(key[1])), key[1]))


def _compared_curves(groups: Sequence[_Group], keys: Sequence[Key], pictures: Pictures) -> list[Picture]:
    """Return a figure for each score and split; a group's model looks the same in all, and no other has its colour and dashes."""
    made = []
    looks: dict[tuple[str, str], int] = {}
    for group, (_, metric) in itertools.product(groups, keys):
        if any(metric == own for run in group.runs for _, own in run.curves):
            looks.setdefault((group.label, model_name(metric)), len(looks))
    for base, unit in UNITS.items():
        for split in dict.fromkeys(key[0] for key in keys):
            metrics = [metric for s, metric in keys if s == split and base_name(metric) == base]
            series: list[Series] = []
            for group in groups:
                own = [metric for metric in metrics if any((split, metric) in run.curves for run in group.runs)]
                for metric in own:
                    label = f"{group.label}: {model_name(metric)}" if model_name(metric) else group.label
                    item = _pooled_series(group, (split, metric), label, looks[group.label, model_name(metric)])
                    series += [item] if item is not None else []
            if series:
                caption = "Mean over seeds, with the range." if any(item.low is not None for item in series) else ""
                title = f"{SCORES[base].title}, {split_name(split)}"
                made.append(pictures.add(title, caption, plots.curves, series, unit, percent=SCORES[base].share))
    return made


def _pooled_series(group: _Group, key: Key, label: str, look: int) -> Series | None:
    """Return the mean and range over the runs of a group, at the rounds in which all of them were measured."""
    curves = [shown_curve(run, key) for run in group.runs if key in run.curves]
    rounds = curves[0].rounds
    for curve in curves[1:]:
        rounds = np.intersect1d(rounds, curve.rounds)
    if not len(rounds):
        return None
    values = np.array([curve.values[np.searchsorted(curve.rounds, rounds)] for curve in curves])
    low, high = (values.min(axis=0), values.max(axis=0)) if len(curves) > 1 else (None, None)
    return Series(label, rounds, values.mean(axis=0), low, high, look, look)


def _compared_rows(groups: Sequence[_Group], key: Key, bases: Sequence[str]) -> Iterable[dict[str, str | list[str]]]:
    """Return the final scores of one model on one split, a row for each group that has it."""
    split, metric = key
    headline = base_name(metric)
    for group in groups:
        runs = [run for run in group.runs if key in run.curves]
        if runs:
            scores = []
            for base in bases:
                # A backdoor's success belongs to the test data, of which it is measured on copies.
                source = "triggered" if (split, base) == ("test", "attack_success") else split
                score = (source, metric.removesuffix(headline) + base)
                values = [shown_curve(run, score).last for run in runs if score in run.curves]
                scores.append(mean_and_range(base, values) if values else "-")
            curves = [shown_curve(run, key) for run in runs]
            averaged = "; ".join(dict.fromkeys(curve.tail_text for curve in curves))
            worst = [
                run.curves[split, f"{metric}_worst_decile"]
                for run in runs
                if (split, f"{metric}_worst_decile") in run.curves
            ]
            yield {
                "group": group.label,
                "model": model_label(metric),
                "data": split_name(split),
                "runs": str(len(runs)),
                "scores": scores,
                "tail": f"{mean_and_range(headline, [curve.tail for curve in curves])} ({averaged})",
                "worst": mean_and_range(headline, [curve.last for curve in worst]) if worst else "-",
            }


def _differences(groups: Sequence[_Group]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each group) of the settings in which the groups differ."""
    settings_of = [flatten(_decisive(group.runs[0])) for group in groups]
    rows = []
    for key in dict.fromkeys(key for settings in settings_of for key in settings):
        values = [value_text(settings[key]) if key in settings else "-" for settings in settings_of]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def _run_row(group: _Group, run: RunRecord) -> dict[str, str]:
    down, up = run.total_of("bytes_down"), run.total_of("bytes_up")
    seconds, seed = run.total_of("seconds/round"), get_path(run.config, "run.seed")
    return {
        "id": run.id,
        "group": group.label,
        "seed": "-" if seed is None else str(seed),
        "rounds": f"{run.done} of {run.total}" if run.total else str(run.done),
        "sent": "-" if down is None and up is None else size((down or 0) + (up or 0)),
        "time": "-" if seconds is None else duration(seconds),
        "folder": str(run.folder),
    }
