"""The report that compares several runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raydfl.core.metrics import SCORES, base_name, model_name
from raydfl.core.nested import flatten, get_path
from raydfl.runs.report.data import SPLITS, Key, RunRecord, align, sort_key
from raydfl.runs.report.figures import SERIES, Plot, Series, plot_curves
from raydfl.runs.report.page import Section, format_value, render_page
from raydfl.runs.report.run import format_cost, list_notes
from raydfl.runs.report.scores import UNITS, format_model, format_score, format_split, select_curve

_NAMED = 3
"""Maximum number of names in a label."""

Groups = Mapping[str, Sequence[RunRecord]]
"""Runs grouped by configuration without the seed, by a label of the configuration."""


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """Return the comparison of several runs as an HTML page."""
    groups = _group_by_configuration(runs)
    models = list(dict.fromkeys(name for run in runs for name in run.models))
    keys = sorted(
        {key for run in runs for key in run.scores()},
        key=lambda key: (sort_key(key[0], list(SPLITS)), models.index(model_name(key[1])), key[1]),
    )
    headlines = {run.headline for run in runs}
    main = [key for key in keys if base_name(key[1]) in headlines]
    return render_page(
        f"{len(runs)} runs of {len(groups)} configuration{'s' if len(groups) > 1 else ''}",
        " · ".join(groups),
        [
            _show_scores(groups, keys),
            Section("Learning curves", [*_draw_curves(groups, keys), *_draw_curves(groups, main, virtual=True)]),
            _show_differences(groups),
            _show_runs(groups),
        ],
        [f"{run.id}: {note}" for run in runs for note in list_notes(run)],
    )


def _group_by_configuration(runs: Sequence[RunRecord]) -> Groups:
    by_key: dict[str, list[RunRecord]] = {}
    for run in runs:
        key = json.dumps(_select_settings(run), sort_keys=True, default=str) if run.config else str(run.folder)
        by_key.setdefault(key, []).append(run)
    firsts = [members[0] for members in by_key.values()]
    groups = [(_join_names(members) or _label_group(members[0], firsts), members) for members in by_key.values()]
    for attribute in ("id", "folder"):  # Labels may still be equal, so add the run's id, then its folder.
        labels = [label for label, _ in groups]
        groups = [
            (f"{label} ({getattr(members[0], attribute)})" if labels.count(label) > 1 else label, members)
            for label, members in groups
        ]
    return dict(groups)


def _join_names(runs: Sequence[RunRecord]) -> str:
    """Return the names of runs if all have a ``run.name``: ``avg-1, avg-2``, or ``avg-1 ... avg-5``. Otherwise return ""."""
    if any(get_path(run.config, "run.name") is None for run in runs):
        return ""
    names = [run.id for run in runs]
    return ", ".join(names) if len(names) <= _NAMED else f"{names[0]} ... {names[-1]}"


def _label_group(run: RunRecord, firsts: Sequence[RunRecord]) -> str:
    """Return the method, followed by up to four settings that differ between the groups of this method."""
    settings = flatten(_select_settings(run))
    rivals = [flatten(_select_settings(rival)) for rival in firsts if rival.config and rival.method == run.method]
    differing = [key for key in settings if any(rival.get(key) != settings[key] for rival in rivals)]
    words = [
        f"{key.removeprefix('method.')}={format_value(settings[key])}" for key in differing if key != "method.name"
    ]
    return " ".join([run.method or run.id, *words[:4]])


def _select_settings(run: RunRecord) -> dict[str, Any]:
    """Return the configuration without the seed and settings that do not affect the results."""
    return {key: value for key, value in run.config.items() if key not in ("run", "ray", "track")}


def _draw_curves(groups: Groups, keys: Sequence[Key], virtual: bool = False) -> Iterator[Plot]:
    """Draw a figure for each score and split. Colours are those of the groups, dashes those of the models.

    Args:
        groups: The runs of each configuration.
        keys: Splits and metrics.
        virtual: Whether x is the virtual time, instead of the round. Runs without ``train.fleet`` are left out.
    """
    models = list(dict.fromkeys(model_name(metric) for _, metric in keys))
    numbers = {label: number for number, label in enumerate(groups)}
    for base, split in itertools.product(UNITS, dict.fromkeys(split for split, _ in keys)):
        series = []
        metrics = [metric for name, metric in keys if name == split and base_name(metric) == base]
        for (label, runs), metric in itertools.product(groups.items(), metrics):
            selected = [select_curve(run, (split, metric)) for run in runs if (split, metric) in run.curves]
            if not selected:
                continue
            rounds, values, _ = align(selected)
            times = [run.find_seconds(rounds) for run in runs if (split, metric) in run.curves] if virtual else [rounds]
            known = [time for time in times if time is not None]
            if len(rounds) and len(known) == len(times):  # rounds with measurements of all runs
                name = f"{label}: {model_name(metric)}" if model_name(metric) else label
                dash = models.index(model_name(metric)) + numbers[label] // len(SERIES) * len(models)
                dots = values if len(selected) > 1 and not virtual else None
                x = np.mean(known, axis=0)
                series.append(Series(name, x, values.mean(axis=0), None, None, numbers[label], dash, dots))
        if series:
            chance = _find_chance(groups, base, split)
            several = any(len(runs) > 1 for runs in groups.values())
            captions = [f"Mean over seeds{', of time and score' * virtual}."] * several
            captions += ["Dots: single seeds."] * any(item.dots is not None for item in series)
            captions += ["Dotted line: chance."] * (chance is not None)
            title = f"{SCORES[base].title}, {format_split(split)}{', over virtual time' * virtual}"
            caption, share = " ".join(captions), SCORES[base].share
            yield plot_curves(title, caption, series, UNITS[base], percent=share, level=chance, virtual=virtual)


def _find_chance(groups: Groups, base: str, split: str) -> float | None:
    """Return the score of chance on a split, if it is the same in all runs with controls."""
    values = {
        control.value
        for run in itertools.chain(*groups.values())
        for control in run.controls
        if control.name == "chance" and (base_name(control.metric), control.split) == (base, split)
    }
    return values.pop() if len(values) == 1 else None


def _show_scores(groups: Groups, keys: Sequence[Key]) -> Section:
    headlines = {run.headline for runs in groups.values() for run in runs}
    measured = {base_name(metric) for _, metric in keys}
    always = () if headlines - {"accuracy", "loss"} else ("accuracy", "macro_f1", "loss")
    bases = [base for base in UNITS if base in always or base in measured]
    headline = ", ".join(SCORES[name].title for name in SCORES if name in headlines)
    bases.sort(key=lambda base: base not in headlines)
    titles = [SCORES[base].title for base in bases]
    rows = (_make_score_rows(groups, key, bases) for key in keys if base_name(key[1]) in headlines)
    return Section(
        "Final scores",
        headings=(
            *("run", *titles, "model", "data", "seeds"),
            *(f"{headline}, mean of the last ten", f"{headline}, worst tenth of clients"),
        ),
        rows=[*itertools.chain.from_iterable(rows), *_make_control_rows(groups, bases)],
        hint="Scores of each run's last measurement. For runs with different seeds: mean (range). Scores measured by clients are "
        "means over clients.",
    )


def _make_score_rows(groups: Groups, key: Key, bases: Sequence[str]) -> Iterator[list[str]]:
    """Yield the final scores of a model on a split, with a row for each group."""
    split, metric = key
    headline = base_name(metric)
    for label, members in groups.items():
        runs = [run for run in members if key in run.curves]
        if not runs:
            continue
        scores = []
        for base in bases:
            # A backdoor's success is measured on copies of the test data, so it is shown in their row.
            source = "triggered" if (split, base) == ("test", "attack_success") else split
            score = (source, metric.removesuffix(headline) + base)
            scores.append(_format_range(base, [select_curve(run, score).last for run in runs if score in run.curves]))
        curves = [select_curve(run, key) for run in runs]
        means = [curve.mean_of_ten for curve in curves if curve.mean_of_ten is not None]
        worst = [run.curves.get((split, f"{metric}_worst_decile")) for run in runs]
        yield [
            *(label, *scores, format_model(metric), format_split(split), str(len(runs))),
            _format_range(headline, means if len(means) == len(runs) else []),
            _format_range(headline, [curve.last for curve in worst if curve is not None]),
        ]


def _make_control_rows(groups: Groups, bases: Sequence[str]) -> Iterator[list[str]]:
    """Yield the scores of the controls, with a row for each data set, control and test set."""
    values: dict[tuple[str, str, str, str], list[float]] = {}
    for run in itertools.chain(*groups.values()):
        for control in run.controls:
            values.setdefault((control.name, run.data, control.metric, control.split), []).append(control.value)
    for (name, data, metric, split), found in values.items():
        cells = [_format_range(base, found) if base == base_name(metric) else "-" for base in bases]
        yield [f"{name} ({data})", *cells, format_model(metric), format_split(split), str(len(found)), "-", "-"]


def _format_range(base: str, values: Sequence[float]) -> str:
    """Format mean and range: ``81.2 % (79.0 to 83.5)``, or ``81.2 %`` for one value, or ``-`` without values."""
    if not values:
        return "-"
    mean = format_score(base, float(np.mean(values)))
    low, high = (format_score(base, edge).removesuffix(" %") for edge in (min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def _show_differences(groups: Groups) -> Section:
    """Show the settings that differ between groups, with each group's value."""
    settings = [flatten(_select_settings(runs[0])) for runs in groups.values()]
    rows = [
        [key, *(format_value(values[key]) if key in values else "-" for values in settings)]
        for key in dict.fromkeys(itertools.chain(*settings))
    ]
    return Section(
        "Different settings", headings=("setting", *groups), rows=[row for row in rows if len(set(row[1:])) > 1]
    )


def _show_runs(groups: Groups) -> Section:
    rows = []
    for label, run in ((label, run) for label, runs in groups.items() for run in runs):
        seed = get_path(run.config, "run.seed")
        rounds = f"{run.done} of {run.total}" if run.total else str(run.done)
        rows.append((run.id, label, "-" if seed is None else str(seed), rounds, *format_cost(run), str(run.folder)))
    headings = ("run", "configuration", "seed", "rounds", "sent", "time in rounds", "folder")
    return Section("Runs", headings=headings, rows=rows)
