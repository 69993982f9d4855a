"""The page about one run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from raydfl.core.errors import InputError
from raydfl.core.metrics import HARMONIC_MEAN, OF_CLIENTS, OF_FIT, SCORES, base_name, model_name, worst_decile
from raydfl.core.nested import flatten, get_path
from raydfl.runs.report import figures as plots
from raydfl.runs.report.data import SPLITS, Key, RunRecord, place
from raydfl.runs.report.figures import Series
from raydfl.runs.report.groups import group_pictures
from raydfl.runs.report.machines import machine_pictures, strangest
from raydfl.runs.report.models import about_models
from raydfl.runs.report.page import (
    UNITS,
    Figures,
    Picture,
    Pictures,
    choice_notes,
    model_label,
    problem_notes,
    render,
    score_text,
    shown_curve,
    split_name,
    unfinished,
    value_text,
)
from raydfl.runs.report.time import time_pictures, totals
from raydfl.runs.report.traffic import traffic_rows
from raydfl.runs.words import duration, size

_LISTED = 200
"""Skipped clips, and failures of clients, that a page lists."""


def single_page(run: RunRecord) -> str:
    """Return the page as HTML."""
    notes = [unfinished(run), *choice_notes(run), *problem_notes(run), *run.missing, *run.remarks]
    sentences, commands = about_models(run)
    return render(
        "run.html.j2",
        title=run.id,
        subtitle=_subtitle(run),
        notes=[note for note in notes if note],
        tiles=_tiles(run),
        results=[_result_row(run, key) for key in run.ordered()],
        **_pictures(run, Pictures()),
        strangest=strangest(run),
        traffic=traffic_rows(run),
        skipped=_skipped(run),
        incidents=run.incidents,
        listed=_LISTED,
        models=_model_rows(run),
        about_models=sentences,
        commands=commands,
        settings=[(key, value_text(value)) for key, value in flatten(run.config).items()],
    )


def figures_of(run: RunRecord, title: str = "") -> dict[str, Figure]:
    """Return the figures of a run's page by their titles, in the page's order, on white.

    Args:
        run: the run.
        title: of the only one that is wanted; empty: all.

    Raises:
        InputError: the page has no figure of that title.
    """
    figures = Figures(title)
    _pictures(run, figures)
    if title and title not in figures.drawn:
        there = ", ".join(repr(each) for each in figures.titles) or "none yet: no round is recorded"
        raise InputError(f"{run.folder} has no figure {title!r}; there are {there}")
    for figure in figures.drawn.values():
        figure.set_facecolor("white")
    return figures.drawn


def _pictures(run: RunRecord, pictures: Pictures) -> dict[str, list[Picture]]:
    """Return the page's pictures by section."""
    return {
        "learning": [*_learning_curves(run, pictures), *_reported_pictures(run, pictures)],
        "clients": _spread_pictures(run, pictures),
        "confusions": _confusion_pictures(run, pictures),
        "groups": group_pictures(run, pictures),
        "machines": machine_pictures(run, pictures),
        "pruning": _pruning_picture(run, pictures),
        "failures": _failure_pictures(run, pictures),
        "costs": _cost_pictures(run, pictures),
    }


def _subtitle(run: RunRecord) -> str:
    parts = [run.method and f"method {run.method}", run.data and f"data {run.data}"]
    seed = get_path(run.config, "run.seed")
    parts += [f"phase {name} from round {first}" for name, first in _phases(run).items()]
    parts += [f"seed {seed}" if seed is not None else "", str(run.about.get("created", ""))]
    parts += [f"raydfl {run.about['raydfl']}" if "raydfl" in run.about else ""]
    return " · ".join(part for part in parts if part)


def _phases(run: RunRecord) -> dict[str, int]:
    """Return the first round of each phase: as it was, or as it will be where it has not begun."""
    found, numbers = dict(run.about.get("phases", {})), run.curves.get(("server", "phase"))
    if numbers is not None:
        for number, name in enumerate(found, 1):
            if number in numbers.values:
                found[name] = int(numbers.rounds[numbers.values == number].min())
    return found


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    """(number, meaning): what one looks for first."""
    tiles = [
        (
            score_text(run.headline, shown_curve(run, key).last),
            f"{SCORES[run.headline].title} of {model_label(key[1])}, {split_name(key[0])}",
        )
        for key in run.ordered(run.headline)
        if key[0] != "train"
    ][:4]
    tiles += [
        (score_text("attack_success", shown_curve(run, key).last), f"attack success on {model_label(key[1])}")
        for key in run.ordered("attack_success")
    ][:2]
    attackers = run.curves.get(("server", "attackers"))
    if attackers is not None:
        tiles.append((f"{attackers.values.mean():.3g}", "simulated attackers a round, mean"))
    if run.curves:
        tiles.append((f"{run.done}" + (f" of {run.total}" if run.total else ""), "rounds"))
    if "best_round" in run.facts:
        tiles.append((f"{run.facts['best_round'][1]:.0f}", "best round"))
    if "clients" in run.about:
        tiles.append((str(run.about["clients"]), "clients"))
    down, up = run.total_of("bytes_down"), run.total_of("bytes_up")
    if down is not None or up is not None:
        tiles.append((size((down or 0) + (up or 0)), "sent in both directions"))
    seconds = run.total_of("seconds/round")
    if seconds is not None:
        tiles.append((duration(seconds), "spent in rounds"))
    lost = [number for number in (run.total_of("failed"), run.total_of("rejected")) if number is not None]
    if lost:
        tiles.append((f"{sum(lost):.0f}", "updates not used"))
    return tiles


def _result_row(run: RunRecord, key: Key) -> dict[str, str]:
    split, metric = key
    base, curve = base_name(metric), run.curves[key]
    ranking = np.where(
        np.isfinite(curve.values), curve.values if SCORES[base].higher_is_better else -curve.values, -np.inf
    )
    best = int(ranking.argmax())
    mean, deviation, worst = (run.curves.get((split, metric + end)) for end in OF_CLIENTS)
    clients = "-"
    if mean is not None and deviation is not None:
        clients = f"{score_text(base, mean.last)} ± {score_text(base, deviation.last)}"
    return {
        "model": model_label(metric),
        "data": split_name(split),
        "score": SCORES[base].title,
        "last": f"{score_text(base, curve.last)} (round {curve.rounds[-1]:.0f})",
        "tail": f"{score_text(base, curve.tail)} ({curve.tail_text})",
        "best": f"{score_text(base, float(curve.values[best]))} (round {curve.rounds[best]:.0f})",
        "clients": clients,
        "worst": "-" if worst is None else score_text(base, worst.last),
    }


def _skipped(run: RunRecord) -> list[tuple[str, str]]:
    """(clip, reason) of the clips that could not be read."""
    listed = run.about.get("skipped")
    found = []
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, Mapping):
            found.append((str(item.get("clip", "")), str(item.get("reason", ""))))
        else:
            found.append((str(item), ""))
    return found


def _model_rows(run: RunRecord) -> list[dict[str, str]]:
    """Return a row for each architecture of each model, from run.json."""
    rows = []
    for name, kinds in run.architectures.items():
        for about in map(dict, kinds):
            shared, parameters = about.pop("shared", None), about.pop("parameters", None)
            rows.append(
                {
                    "name": name,
                    "architecture": value_text(about.pop("architecture", "")),
                    "parameters": f"{parameters:,}" if isinstance(parameters, int) else "",
                    "shared": "" if shared is None else ("sent and averaged" if shared else "stays with the client"),
                    "more": value_text(about),
                }
            )
    return rows


def _learning_curves(run: RunRecord, pictures: Pictures) -> list[Picture]:
    """Return a figure for each score; a curve for each model and split."""
    made = []
    for base, unit in UNITS.items():
        series = [_single_series(run, key) for key in run.ordered(base)]
        if series:
            bands = any(item.low is not None for item in series)
            caption = "Bands: mean of the clients plus and minus their standard deviation." if bands else ""
            made.append(
                pictures.add(SCORES[base].title, caption, plots.curves, series, unit, percent=SCORES[base].share)
            )
    return made


_REPORTED = 40
"""Figures of reported numbers on a page. To draw one takes a tenth of a second, and clients choose how many there are."""


def _reported_pictures(run: RunRecord, pictures: Pictures) -> list[Picture]:
    """Return a figure for each number that losses report besides their value, up to :data:`_REPORTED`."""
    reported = {
        name: Series(name, curve.rounds, curve.values)
        for (split, name), curve in run.curves.items()
        if split == "train" and not _is_of_engine(name)
    }
    caption = "Reported by the losses in training, over all clients of a round."
    if len(reported) > _REPORTED:
        caption += f" Of {len(reported):,} numbers the page draws the first {_REPORTED}; all are in the record."
    shown = itertools.islice(reported.items(), _REPORTED)
    return [pictures.add(name, caption, plots.curves, [series], name) for name, series in shown]


def _is_of_engine(name: str) -> bool:
    """Return whether a metric of training is none that a loss reports."""
    return name in OF_FIT or name.endswith((*OF_CLIENTS, HARMONIC_MEAN)) or base_name(name) in SCORES or "/" in name


def _look(run: RunRecord, key: Key) -> tuple[str, int, int]:
    """Label, colour (the model's) and dashes (the split's) of a curve: the same in all figures of a page."""
    split, metric = key
    splits = sorted({split for split, _ in run.scores()}, key=lambda name: place(name, list(SPLITS)))
    label = f"{model_name(metric)}, {split_name(split)}" if model_name(metric) else split_name(split)
    return label, run.models.index(model_name(metric)), splits.index(split)


def _single_series(run: RunRecord, key: Key) -> Series:
    split, metric = key
    label, colour, dash = _look(run, key)
    curve, low, high = run.curves[key], None, None
    mean, deviation = (run.curves.get((split, metric + end)) for end in OF_CLIENTS[:2])
    if mean is not None and deviation is not None and split != "train":
        curve, low, high = mean, mean.values - deviation.values, mean.values + deviation.values
        if SCORES[base_name(metric)].share:
            low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
        label += " (mean of clients)"
    return Series(label, curve.rounds, curve.values, low, high, colour, dash)


def _spread_pictures(run: RunRecord, pictures: Pictures) -> list[Picture]:
    series, captions = [], []
    score, title = run.headline, SCORES[run.headline].title
    keys = [key for key in run.ordered(score) if key in run.clients and len(run.clients[key][1])]
    for key in keys:
        round_index, values = run.clients[key]
        label, colour, dash = _look(run, key)
        series.append(Series(label, np.arange(len(values), dtype=np.float64), values, colour=colour, dash=dash))
        captions.append(
            f"{label} (round {round_index}): {len(values)} clients, mean {score_text(score, values.mean())}, "
            f"worst tenth {score_text(score, worst_decile(values, SCORES[score].higher_is_better))}."
        )
    if not series:
        return []
    return [
        pictures.add(
            f"{title} of each client",
            " ".join(captions),
            plots.client_spread,
            series,
            UNITS[score],
        )
    ]


def _confusion_pictures(run: RunRecord, pictures: Pictures) -> list[Picture]:
    made = []
    models = run.models
    ordered = sorted(run.confusions, key=lambda key: (place(key[0], list(SPLITS)), place(model_name(key[1]), models)))
    for split, metric in ordered:
        round_index, matrix = run.confusions[split, metric]
        known = run.classes_of(metric)
        classes = known if len(known) == len(matrix) else [str(number) for number in range(len(matrix))]
        if matrix.sum():
            caption = f"Round {round_index}, {matrix.sum():,.0f} examples. Colour: share of the true class."
            made.append(
                pictures.add(f"{model_label(metric)}, {split_name(split)}", caption, plots.confusion, matrix, classes)
            )
    return made


def _pruning_picture(run: RunRecord, pictures: Pictures) -> list[Picture]:
    start = "lpa/pruned/"
    layers = {
        metric.removeprefix(start): (curve.rounds, curve.totals)
        for (_, metric), curve in sorted(run.curves.items())
        if metric.startswith(start)
    }
    if not layers:
        return []
    means = ", ".join(f"{layer} {number.mean():.3g}" for layer, (_, number) in layers.items())
    caption = f"Mean number of clients a round that the layer was averaged without: {means}."
    return [pictures.add("layer-wise pruning (LPA)", caption, plots.pruned, layers)]


def _cost_pictures(run: RunRecord, pictures: Pictures) -> list[Picture]:
    made = []
    sent = totals(run, {"bytes_down": "to the clients", "bytes_up": "from the clients"})
    if sent:
        parts = [f"{item.label} {size(float(item.y.sum()))}" for item in sent]
        made.append(pictures.add("bytes sent", f"In all: {', '.join(parts)}.", plots.cumulative_bytes, sent))
    return [*made, *time_pictures(run, pictures)]


def _failure_pictures(run: RunRecord, pictures: Pictures) -> list[Picture]:
    kinds = [item for item in totals(run, {"failed": "failed", "rejected": "rejected"}) if item.y.sum()]
    if not kinds:
        return []
    rounds = np.unique(np.concatenate([item.x for item in kinds]))
    bars = []
    for item in kinds:
        number = np.zeros(len(rounds))
        number[np.searchsorted(rounds, item.x)] = item.y
        bars.append(Series(item.label, rounds, number, colour=item.colour))
    caption = ", ".join(f"{item.label}: {item.y.sum():.0f}" for item in bars) + "."
    return [pictures.add("updates that were not used", caption, plots.failures, bars)]
