"""One HTML page about a run, or about several runs side by side. Self-contained: no scripts, nothing fetched from a network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from raydfl import plots
from raydfl.errors import InputError
from raydfl.metrics import HIGHER_IS_BETTER, base_name, model_name, worst_decile
from raydfl.plots import Series
from raydfl.progress import duration, size
from raydfl.report_models import about_models
from raydfl.rundata import SPLITS, Curve, Key, Run, dig, flatten, place, read_run
from raydfl.track import without_password

_SCORES = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "average_recall": "average recall",
    "attack_success": "attack success",
    "loss": "loss",
}
_UNITS = {
    "accuracy": "accuracy (%)",
    "macro_f1": "macro F1 (%)",
    "attack_success": "attack success (%)",
    "loss": "loss (nats)",
}
_DERIVED = ("_client_mean", "_client_std", "_worst_decile")
_LISTED = 200
"""Skipped clips that a page lists."""


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one HTML page: about a run, or comparing several.

    Args:
        run_dirs: run directories; unfinished ones too. Runs whose configurations differ in nothing but the seed and
            where they ran are shown as one, with mean and range.
        out: the file to write, replaced when it is there; or a folder, for ``report.html`` in it.

    Returns:
        The file.

    Raises:
        InputError: no run directory given, or ``out`` cannot be written.
        RunDirectoryError: a folder is missing, is no run directory, or holds a damaged file.
    """
    folders = list(dict.fromkeys(folder.resolve() for folder in run_dirs))
    if not folders:
        raise InputError("no run directory is given; name at least one, such as runs/<name>")
    runs = [read_run(folder) for folder in folders]
    page = _single_page(runs[0]) if len(runs) == 1 else _comparison_page(runs)
    out = out / "report.html" if out.is_dir() else out
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise InputError(f"the report {out} cannot be written: {error.strerror}; name another file") from error
    return out


# -- words -----------------------------------------------------------------------------------------------------------


def _split(split: str) -> str:
    return SPLITS.get(split, split)


def _model(metric: str) -> str:
    return model_name(metric) or "-"


def _score(base: str, value: float | None) -> str:
    """A score as a page shows it: shares in per cent, losses as they are."""
    if value is None or not np.isfinite(value):
        return "-" if value is None else str(value)
    return f"{value:.3f}" if base == "loss" else f"{100 * value:.1f} %"


def _mean_and_range(base: str, values: Sequence[float]) -> str:
    """``81.2 % (79.0 to 83.5)``; of one value only itself."""
    mean = _score(base, float(np.mean(values)))
    low, high = (_score(base, edge).removesuffix(" %") for edge in (min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def _text(value: Any) -> str:
    """A setting's value in one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    return without_password(str(value))


# -- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of a page."""

    title: str
    caption: str
    svg: Markup


class Pictures:
    """Makes the pictures of one page, each with a name of its own."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, title: str, caption: str, figure: Figure) -> Picture:
        """A figure as part of the page."""
        self._count += 1
        # Safe as it is: Matplotlib escapes every text of a figure, and to_svg the description.
        svg = Markup(plots.to_svg(figure, f"figure-{self._count}", f"{title}. {caption}"))
        return Picture(title, caption, svg)


def _learning_curves(run: Run, pictures: Pictures) -> list[Picture]:
    """A figure for each score; a curve for each model and split."""
    made = []
    for base, unit in _UNITS.items():
        series = [_single_series(run, key) for key in run.ordered(base)]
        if series:
            bands = any(item.low is not None for item in series)
            caption = "Bands: mean of the clients plus and minus their standard deviation." if bands else ""
            made.append(pictures.add(_SCORES[base], caption, plots.curves(series, unit, percent=base != "loss")))
    return made


def _look(run: Run, key: Key) -> tuple[str, int, int]:
    """Label, colour (the model's) and dashes (the split's) of a curve: the same in all figures of a page."""
    split, metric = key
    splits = sorted({split for split, _ in run.scores()}, key=lambda name: place(name, list(SPLITS)))
    label = f"{model_name(metric)}, {_split(split)}" if model_name(metric) else _split(split)
    return label, run.models.index(model_name(metric)), splits.index(split)


def _single_series(run: Run, key: Key) -> Series:
    split, metric = key
    label, colour, dash = _look(run, key)
    curve, low, high = run.curves[key], None, None
    mean, deviation = (run.curves.get((split, metric + end)) for end in ("_client_mean", "_client_std"))
    if mean is not None and deviation is not None and split != "train":
        curve, low, high = mean, mean.values - deviation.values, mean.values + deviation.values
        if base_name(metric) != "loss":
            low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
        label += " (mean of clients)"
    return Series(label, curve.rounds, curve.values, low, high, colour, dash)


def _spread_pictures(run: Run, pictures: Pictures) -> list[Picture]:
    series, captions = [], []
    keys = [key for key in run.ordered("accuracy") if key in run.clients and len(run.clients[key][1])]
    for key in keys:
        round_index, values = run.clients[key]
        label, colour, dash = _look(run, key)
        series.append(Series(label, np.arange(len(values), dtype=np.float64), values, colour=colour, dash=dash))
        captions.append(
            f"{label} (round {round_index}): {len(values)} clients, mean {_score('accuracy', values.mean())}, "
            f"worst tenth {_score('accuracy', worst_decile(values))}."
        )
    if not series:
        return []
    return [pictures.add("accuracy of each client", " ".join(captions), plots.client_spread(series, "accuracy (%)"))]


def _confusion_pictures(run: Run, pictures: Pictures) -> list[Picture]:
    made = []
    names = run.about.get("classes")
    models = run.models
    ordered = sorted(run.confusions, key=lambda key: (place(key[0], list(SPLITS)), place(model_name(key[1]), models)))
    for split, metric in ordered:
        round_index, matrix = run.confusions[split, metric]
        known = names if isinstance(names, list) and len(names) == len(matrix) else range(len(matrix))
        classes = [str(name) for name in known]
        if matrix.sum():
            caption = f"Round {round_index}, {matrix.sum():,.0f} examples. Colour: share of the true class."
            made.append(pictures.add(f"{_model(metric)}, {_split(split)}", caption, plots.confusion(matrix, classes)))
    return made


def _pruning_picture(run: Run, pictures: Pictures) -> list[Picture]:
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
    return [pictures.add("layer-wise pruning (LPA)", caption, plots.pruned(layers))]


def _cost_pictures(run: Run, pictures: Pictures) -> list[Picture]:
    made = []
    sent = _totals(run, {"bytes_down": "to the clients", "bytes_up": "from the clients"})
    if sent:
        parts = [f"{item.label} {size(float(item.y.sum()))}" for item in sent]
        made.append(pictures.add("bytes sent", f"In all: {', '.join(parts)}.", plots.cumulative_bytes(sent)))
    parts_of_round = sorted({metric for _, metric in run.curves if metric.startswith("seconds/")})
    seconds = _totals(run, {metric: metric.removeprefix("seconds/").replace("_", " ") for metric in parts_of_round})
    if seconds:
        caption = "Work of several actors at once counts for each of them." if "seconds/fit" in parts_of_round else ""
        made.append(pictures.add("time per round", caption, plots.round_seconds(seconds)))
    return made


def _failure_pictures(run: Run, pictures: Pictures) -> list[Picture]:
    kinds = [item for item in _totals(run, {"failed": "failed", "rejected": "rejected"}) if item.y.sum()]
    if not kinds:
        return []
    rounds = np.unique(np.concatenate([item.x for item in kinds]))
    bars = []
    for item in kinds:
        number = np.zeros(len(rounds))
        number[np.searchsorted(rounds, item.x)] = item.y
        bars.append(Series(item.label, rounds, number, colour=item.colour))
    caption = ", ".join(f"{item.label}: {item.y.sum():.0f}" for item in bars) + "."
    return [pictures.add("updates that were not used", caption, plots.failures(bars))]


def _totals(run: Run, labels: Mapping[str, str]) -> list[Series]:
    """Totals by round of the named metrics, those that were recorded."""
    found: list[Series] = []
    for metric, label in labels.items():
        by_round: dict[float, float] = {}
        for (_, name), curve in run.curves.items():
            if name == metric:
                for round_index, total in zip(curve.rounds, curve.totals, strict=True):
                    by_round[float(round_index)] = by_round.get(float(round_index), 0.0) + float(total)
        if by_round:
            x = np.array(sorted(by_round))
            found.append(Series(label, x, np.array([by_round[r] for r in x]), colour=len(found), dash=len(found)))
    return found


# -- a page about one run --------------------------------------------------------------------------------------------


def _single_page(run: Run) -> str:
    pictures = Pictures()
    notes = [_unfinished(run), *run.missing]
    sentences, commands = about_models(run)
    return render(
        "run.html.j2",
        title=run.id,
        subtitle=_subtitle(run),
        notes=[note for note in notes if note],
        tiles=_tiles(run),
        learning=_learning_curves(run, pictures),
        results=[_result_row(run, key) for key in run.ordered()],
        clients=_spread_pictures(run, pictures),
        confusions=_confusion_pictures(run, pictures),
        pruning=_pruning_picture(run, pictures),
        failures=_failure_pictures(run, pictures),
        costs=_cost_pictures(run, pictures),
        skipped=_skipped(run),
        listed=_LISTED,
        models=_model_rows(run),
        about_models=sentences,
        commands=commands,
        settings=[(key, _text(value)) for key, value in flatten(run.config).items()],
    )


def _unfinished(run: Run) -> str:
    again = f"Go on with: raydfl resume {run.folder}"
    if not run.curves:
        return f"No round of this run is recorded yet. {again}"
    if run.done < run.total:
        return f"This run is not finished: {run.done} of {run.total} rounds are done. {again}"
    return ""


def _subtitle(run: Run) -> str:
    parts = [run.method and f"method {run.method}", run.data and f"data {run.data}"]
    seed = dig(run.config, "run.seed")
    parts += [f"seed {seed}" if seed is not None else "", str(run.about.get("created", ""))]
    parts += [f"raydfl {run.about['raydfl']}" if "raydfl" in run.about else ""]
    return " · ".join(part for part in parts if part)


def _tiles(run: Run) -> list[tuple[str, str]]:
    """(number, meaning): what one looks for first."""
    tiles = [
        (_score("accuracy", _shown(run, key).last), f"accuracy of {_model(key[1])}, {_split(key[0])}")
        for key in run.ordered("accuracy")
        if key[0] != "train"
    ][:4]
    tiles += [
        (_score("attack_success", _shown(run, key).last), f"attack success on {_model(key[1])}")
        for key in run.ordered("attack_success")
    ][:2]
    attackers = run.curves.get(("server", "attackers"))
    if attackers is not None:
        tiles.append((f"{attackers.values.mean():.3g}", "simulated attackers a round, mean"))
    if run.curves:
        tiles.append((f"{run.done}" + (f" of {run.total}" if run.total else ""), "rounds"))
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


def _shown(run: Run, key: Key) -> Curve:
    """Of a score that clients measured, their mean, each client counting once; else the score itself."""
    return run.curves.get((key[0], f"{key[1]}_client_mean"), run.curves[key])


def _result_row(run: Run, key: Key) -> dict[str, str]:
    split, metric = key
    base, curve = base_name(metric), run.curves[key]
    ranking = np.where(np.isfinite(curve.values), curve.values if HIGHER_IS_BETTER[base] else -curve.values, -np.inf)
    best = int(ranking.argmax())
    mean, deviation, worst = (run.curves.get((split, metric + end)) for end in _DERIVED)
    clients = "-"
    if mean is not None and deviation is not None:
        clients = f"{_score(base, mean.last)} ± {_score(base, deviation.last)}"
    return {
        "model": _model(metric),
        "data": _split(split),
        "score": _SCORES[base],
        "last": f"{_score(base, curve.last)} (round {curve.rounds[-1]:.0f})",
        "tail": _score(base, curve.tail),
        "best": f"{_score(base, float(curve.values[best]))} (round {curve.rounds[best]:.0f})",
        "clients": clients,
        "worst": "-" if worst is None else _score(base, worst.last),
    }


def _skipped(run: Run) -> list[tuple[str, str]]:
    """(clip, reason) of the clips that could not be read."""
    listed = run.about.get("skipped")
    found = []
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, Mapping):
            found.append((str(item.get("clip", "")), str(item.get("reason", ""))))
        else:
            found.append((str(item), ""))
    return found


def _model_rows(run: Run) -> list[dict[str, str]]:
    """A row for each architecture of each model, from run.json."""
    models = run.about.get("models")
    rows = []
    for name, value in models.items() if isinstance(models, Mapping) else []:
        for item in value if isinstance(value, list) else [value]:
            about = dict(item) if isinstance(item, Mapping) else {"architecture": item}
            shared, parameters = about.pop("shared", None), about.pop("parameters", None)
            rows.append(
                {
                    "name": str(name),
                    "architecture": _text(about.pop("architecture", "")),
                    "parameters": f"{parameters:,}" if isinstance(parameters, int) else "",
                    "shared": "" if shared is None else ("sent and averaged" if shared else "stays with the client"),
                    "more": _text(about),
                }
            )
    return rows


# -- a page about several runs ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """Runs of one configuration that differ in their seed."""

    label: str
    runs: list[Run]


def _comparison_page(runs: Sequence[Run]) -> str:
    pictures = Pictures()
    groups = _group(runs)
    notes = [f"{run.id}: {_unfinished(run)}" for run in runs if _unfinished(run)]
    notes += [f"{run.id}: {note}" for run in runs for note in run.missing]
    keys = _ordered_keys(runs)
    attacked = any(base_name(metric) == "attack_success" for _, metric in keys)
    bases = [base for base in _UNITS if attacked or base != "attack_success"]
    return render(
        "compare.html.j2",
        title=f"{len(runs)} runs of {len(groups)} configuration{'s' if len(groups) > 1 else ''}",
        subtitle=" · ".join(group.label for group in groups),
        notes=notes,
        learning=_compared_curves(groups, keys, pictures),
        scores=[_SCORES[base] for base in bases],
        results=[row for key in keys if base_name(key[1]) == "accuracy" for row in _compared_rows(groups, key, bases)],
        groups=[group.label for group in groups],
        differences=_differences(groups),
        runs=[_run_row(group, run) for group in groups for run in group.runs],
    )


def _group(runs: Sequence[Run]) -> list[_Group]:
    """Runs with equal configurations together; what each group is called is what tells it from the others."""
    by_config: dict[str, list[Run]] = {}
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
        words = [f"{key.removeprefix('method.')}={_text(own[key])}" for key in differing if key != "method.name"]
        groups.append(_Group(" ".join([first.method or first.id, *words[:4]]), part))
    labels = [group.label for group in groups]
    for group in groups:  # two groups that even so are called alike
        if labels.count(group.label) > 1:
            group.label = f"{group.label} ({group.runs[0].id})"
    return groups


def _decisive(run: Run) -> dict[str, Any]:
    """The configuration without the seed and without what does not change the numbers."""
    return {key: value for key, value in run.config.items() if key not in ("run", "ray", "track")}


def _ordered_keys(runs: Sequence[Run]) -> list[Key]:
    """Scores of any of the runs, by data, then model in the order of the runs."""
    models = list(dict.fromkeys(name for run in runs for name in run.models))
    keys = {key for run in runs for key in run.scores()}
    return sorted(keys, key=lambda key: (place(key[0], list(SPLITS)), models.index(model_name(key[1])), key[1]))


def _compared_curves(groups: Sequence[_Group], keys: Sequence[Key], pictures: Pictures) -> list[Picture]:
    """A figure for each score and split; a colour for each group, dashes for each curve."""
    made = []
    for base, unit in _UNITS.items():
        for split in dict.fromkeys(key[0] for key in keys):
            metrics = [metric for s, metric in keys if s == split and base_name(metric) == base]
            series: list[Series] = []
            for colour, group in enumerate(groups):
                own = [metric for metric in metrics if any((split, metric) in run.curves for run in group.runs)]
                for metric in own:
                    label = f"{group.label}: {model_name(metric)}" if model_name(metric) else group.label
                    item = _pooled_series(group, (split, metric), label, colour, dash=len(series))
                    series += [item] if item is not None else []
            if series:
                caption = "Mean over seeds, with the range." if any(item.low is not None for item in series) else ""
                title = f"{_SCORES[base]}, {_split(split)}"
                made.append(pictures.add(title, caption, plots.curves(series, unit, percent=base != "loss")))
    return made


def _pooled_series(group: _Group, key: Key, label: str, colour: int, dash: int) -> Series | None:
    """Mean and range over the runs of a group, at the rounds in which all of them were measured."""
    curves = [_shown(run, key) for run in group.runs if key in run.curves]
    rounds = curves[0].rounds
    for curve in curves[1:]:
        rounds = np.intersect1d(rounds, curve.rounds)
    if not len(rounds):
        return None
    values = np.array([curve.values[np.searchsorted(curve.rounds, rounds)] for curve in curves])
    low, high = (values.min(axis=0), values.max(axis=0)) if len(curves) > 1 else (None, None)
    return Series(label, rounds, values.mean(axis=0), low, high, colour, dash)


def _compared_rows(groups: Sequence[_Group], key: Key, bases: Sequence[str]) -> Iterable[dict[str, str | list[str]]]:
    """The final scores of one model on one split, a row for each group that has it."""
    split, metric = key
    for group in groups:
        runs = [run for run in group.runs if key in run.curves]
        if runs:
            scores = []
            for base in bases:
                # A backdoor's success belongs to the test data, of which it is measured on copies.
                source = "triggered" if (split, base) == ("test", "attack_success") else split
                score = (source, metric.removesuffix("accuracy") + base)
                values = [_shown(run, score).last for run in runs if score in run.curves]
                scores.append(_mean_and_range(base, values) if values else "-")
            tails = [_shown(run, key).tail for run in runs]
            worst = [
                run.curves[split, f"{metric}_worst_decile"]
                for run in runs
                if (split, f"{metric}_worst_decile") in run.curves
            ]
            yield {
                "group": group.label,
                "model": _model(metric),
                "data": _split(split),
                "runs": str(len(runs)),
                "scores": scores,
                "tail": _mean_and_range("accuracy", tails),
                "worst": _mean_and_range("accuracy", [curve.last for curve in worst]) if worst else "-",
            }


def _differences(groups: Sequence[_Group]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each group) of the settings in which the groups differ."""
    flat = [flatten(_decisive(group.runs[0])) for group in groups]
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [_text(settings[key]) if key in settings else "-" for settings in flat]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def _run_row(group: _Group, run: Run) -> dict[str, str]:
    down, up = run.total_of("bytes_down"), run.total_of("bytes_up")
    seconds, seed = run.total_of("seconds/round"), dig(run.config, "run.seed")
    return {
        "id": run.id,
        "group": group.label,
        "seed": "-" if seed is None else str(seed),
        "rounds": f"{run.done} of {run.total}" if run.total else str(run.done),
        "sent": "-" if down is None and up is None else size((down or 0) + (up or 0)),
        "time": "-" if seconds is None else duration(seconds),
        "folder": str(run.folder),
    }


def render(template: str, **values: Any) -> str:
    """A page of raydfl's own templates; every value is escaped."""
    environment = Environment(
        loader=PackageLoader("raydfl"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    render: Callable[..., str] = environment.get_template(template).render
    return render(**values)
