"""A run directory as data: its curves, confusion matrices and clients' scores, for reports and for one's own analysis."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.files import read_regular
from raydfl.core.metrics import SCORES, base_name, model_name
from raydfl.core.nested import get_path
from raydfl.core.yaml import parse_yaml
from raydfl.engine import TIMELINE
from raydfl.engine.storage import (
    MetricRow,
    RunStore,
    check_about,
    describe_edit,
    list_missing_rounds,
    read_rows,
    round_of,
    to_rows,
)

if TYPE_CHECKING:
    import pandas as pd

SPLITS = {
    "test": "test data",
    "triggered": "test data with the trigger",
    "server_validation": "server's validation data",
    "server": "server's data",
    "client_test": "clients' own test data",
    "validation": "clients' own hold-out",
    "train": "training data",
}
"""Names of the record's splits in a report, in the order in which it shows them."""
_LAST = 10  # evaluations that a tail averages, at most
_TIMELINES = 3  # rounds whose timelines are read

Key = tuple[str, str]
"""(split, metric)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the rounds."""

    rounds: NDArray[np.float64]
    values: NDArray[np.float64]
    totals: NDArray[np.float64]
    """``value * count``, added up over the phases of a round."""

    @property
    def last(self) -> float:
        """The newest value."""
        return float(self.values[-1])

    @property
    def trained(self) -> NDArray[np.float64]:
        """The values measured after training began: round 0 is left out."""
        return self.values[self.rounds > 0]

    @property
    def tail(self) -> float:
        """The mean of the last ten values after training began, or of all if there are fewer; NaN if there are none."""
        values = self.trained[-_LAST:]
        return float(values.mean()) if len(values) else float("nan")

    @property
    def tail_text(self) -> str:
        """The number of values that :attr:`tail` averages: ``last 3 of 3``."""
        return f"last {min(_LAST, len(self.trained))} of {len(self.trained)}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run directory, read."""

    folder: Path
    about: Mapping[str, Any]
    """run.json; empty when it is missing."""
    config: Mapping[str, Any]
    """config.yaml; empty when it is missing."""
    curves: Mapping[Key, Curve]
    """The server's and pooled metrics."""
    confusions: Mapping[Key, tuple[int, NDArray[np.float64]]]
    """The last confusion matrix of each model and split, with its round."""
    clients: Mapping[Key, tuple[int, NDArray[np.float64]]]
    """Each client's value of a headline at the last measurement, with its round."""
    timelines: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """Times of the last rounds: Watch.timeline of raydfl.engine.telemetry, float64 [clients, 4]."""
    memberships: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """By round, where clients are grouped (``train.groups``): float64 [2, clients], the number of each client's group, 0 for none,
    and the kind that it truly is of, -1 where that is not known."""
    missing: Sequence[str] = field(default_factory=list)
    """Sentences about what could not be shown."""
    incidents: Sequence[tuple[int, str, str, str, str]] = ()
    """Round, phase, client, "failed" or "late", and why: of clients that were left out of a round or stopped early."""
    facts: Mapping[str, tuple[int, float, str]] = field(default_factory=dict)
    """What the run says of itself, ``"best_round"`` or ``"stopped"``, when it last did: the round, the value, and in words."""

    @property
    def remarks(self) -> list[str]:
        """Sentences about the clients' data, from before the first round."""
        return [str(text) for text in self.about.get("remarks", ())]

    @property
    def id(self) -> str:
        """The run's name."""
        return str(self.about.get("id", self.folder.name))

    @property
    def method(self) -> str:
        """The method's name; empty when neither file tells."""
        name = get_path(self.config, "method.name") or self.about.get("method", "")
        return str(name.get("name", "") if isinstance(name, Mapping) else name)

    @property
    def data(self) -> str:
        """The data set's name, or those of the parts; empty when neither file tells."""
        if parts := get_path(self.config, "data.parts"):
            return "+".join(map(str, parts))
        name = get_path(self.config, "data.name") or self.about.get("data", "")
        return str(name.get("name", "") if isinstance(name, Mapping) else name)

    @property
    def done(self) -> int:
        """Rounds completed, as far as recorded."""
        return int(max((curve.rounds[-1] for curve in self.curves.values()), default=0))

    @property
    def stopped(self) -> str:
        """The reason why ``run.stop`` has ended the training here; empty: it has not."""
        round_index, _, why = self.facts.get("stopped", (0, 0.0, ""))
        return why if round_index and round_index == self.done else ""

    @property
    def total(self) -> int:
        """Rounds that were asked for; 0 when not known."""
        return int(get_path(self.config, "train.rounds") or 0)

    @property
    def models(self) -> list[str]:
        """Names of models in the order of run.json, then those that only the record knows."""
        return list(dict.fromkeys([*self.architectures, *sorted(model_name(metric) for _, metric in self.scores())]))

    @property
    def architectures(self) -> dict[str, list[Mapping[str, Any]]]:
        """The architectures of each model as run.json describes them; a bare name as one of that name."""
        models = self.about.get("models")
        return {
            str(name): [
                kind if isinstance(kind, Mapping) else {"architecture": kind}
                for kind in (value if isinstance(value, list) else [value])
            ]
            for name, value in (models.items() if isinstance(models, Mapping) else ())
        }

    @property
    def headline(self) -> str:
        """The score to look at first: the first headline of raydfl.core.metrics.SCORES that was measured, else the loss."""
        measured = {base_name(metric) for _, metric in self.curves}
        return next((name for name, score in SCORES.items() if score.headline and name in measured), "loss")

    def classes_of(self, metric: str) -> list[str]:
        """Return the names of a metric's classes: the federation's, or the part's whose metric it is; empty: not known."""
        parts, part = self.about.get("parts"), metric.partition(":")[0]
        names = parts.get(part) if isinstance(parts, Mapping) else self.about.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    def scores(self, *bases: str) -> list[Key]:
        """(split, metric) of the scores that were measured; all of them, or those of the given base names."""
        return [key for key in self.curves if base_name(key[1]) in (bases or SCORES)]

    def ordered(self, *bases: str) -> list[Key]:
        """Return :meth:`scores` as a page shows them: by data, then model, then score."""
        splits, scores, models = list(SPLITS), list(SCORES), self.models
        return sorted(
            self.scores(*bases),
            key=lambda key: (place(key[0], splits), models.index(model_name(key[1])), scores.index(base_name(key[1]))),
        )

    @property
    def history(self) -> pd.DataFrame:
        """The curves as a table: a row a round, a column a metric, ``"test plugin/accuracy"``; NaN where it was not measured.

        Scores come first, as on the page, then all else by the alphabet.
        """
        import pandas as pd  # takes a third of a second, which a page need not wait for

        keys = dict.fromkeys([*self.ordered(), *sorted(self.curves)])
        columns = {
            f"{split} {metric}": pd.Series(curve.values, curve.rounds.astype(np.int64))
            for split, metric in keys
            for curve in [self.curves[split, metric]]
        }
        return pd.DataFrame(columns).sort_index().rename_axis("round")

    def totals(self, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the rounds in which a metric was recorded, and its totals in them over all splits."""
        found = [curve for (_, name), curve in self.curves.items() if name == metric] or [Curve(*np.empty((3, 0)))]
        rounds, places = np.unique(np.concatenate([curve.rounds for curve in found]), return_inverse=True)
        return rounds, np.bincount(places, np.concatenate([curve.totals for curve in found])).astype(np.float64)

    def total_of(self, *metrics: str) -> float | None:
        """Return the sum of metrics' totals over all rounds; ``None`` when none of them was recorded."""
        found = [totals for _, totals in map(self.totals, metrics) if len(totals)]
        return float(np.concatenate(found).sum()) if found else None


def read_run(folder: Path) -> RunRecord:
    """Read what a report needs of a run directory. What is not there yet is left out and named in ``missing``.

    Raises:
        RunDirectoryError: the folder is missing, is no run directory, or holds a damaged file.
    """
    if not folder.is_dir():
        raise RunDirectoryError(f"there is no run directory {folder}; give the folder that `raydfl run` printed")
    if not any((folder / name).exists() for name in ("config.yaml", "run.json", "rows")):
        raise RunDirectoryError(
            f"{folder} is not a run directory: it has neither config.yaml nor run.json nor rows/; "
            f"give the folder that `raydfl run` printed"
        )
    missing = []
    config = _read(folder / "config.yaml", lambda text: parse_yaml(text, "it", saved=True))
    about = _read(folder / "run.json", _about)
    if not config:
        missing.append("config.yaml is missing: the configuration is not shown.")
    if not about:
        missing.append("run.json is missing: names of classes and models are not known.")
    began = about.get("config")
    if began and config and (edit := describe_edit(folder, began, config)):
        missing.append(
            f"config.yaml was changed since the run began ({edit}): what is shown as its configuration is not what was trained."
        )
    latest = RunStore(folder).latest()
    until = None if latest is None else round_of(latest)
    of_server = pc.field("client") == ""
    pooled = to_rows(read_rows(folder, until, where=of_server & (pc.field("metric") != TIMELINE)))
    points: dict[Key, dict[int, tuple[float, float]]] = {}
    confusions: dict[Key, tuple[int, NDArray[np.float64]]] = {}
    memberships: dict[int, NDArray[np.float64]] = {}
    for row in pooled:
        key = (row.split, row.metric)
        if row.array is None:
            curve = points.setdefault(key, {})
            _, total = curve.get(row.round, (0.0, 0.0))
            curve[row.round] = (row.value, total + row.value * row.count)
        elif base_name(row.metric) == "confusion":
            confusions[key] = (row.round, row.array)
        elif row.metric == "tasks/membership":
            memberships[row.round] = row.array
    curves = {key: _curve(rounds) for key, rounds in points.items()}
    lost = list_missing_rounds((row.round for row in pooled), until or 0)
    if lost:
        missing.append(f"the files in rows/ of rounds {lost} are missing: what was measured in them is not shown.")
    clients = _client_scores(folder, until, curves)
    timelines = _timelines(folder, until, pooled)
    incidents = _incidents(folder, until)
    facts = {row.metric: (row.round, row.value, row.note) for row in pooled if row.note}
    return RunRecord(
        folder, about, config, curves, confusions, clients, timelines, memberships, missing, incidents, facts
    )


def _incidents(folder: Path, until: int | None) -> list[tuple[int, str, str, str, str]]:
    """Read what the rows say in words about single clients."""
    columns = ("round", "phase", "client", "metric", "note")
    found = read_rows(
        folder, until, where=pc.field("note").is_valid() & (pc.field("client") != ""), columns=columns
    ).to_pylist()
    return [(row["round"], row["phase"], row["client"], row["metric"], row["note"]) for row in found]


def _timelines(folder: Path, until: int | None, pooled: Sequence[MetricRow]) -> dict[int, NDArray[np.float64]]:
    """Read the timelines of the last rounds that are recorded."""
    last = max((row.round for row in pooled), default=0)
    where = (pc.field("metric") == TIMELINE) & (pc.field("round") > last - _TIMELINES)
    return {row.round: row.array for row in to_rows(read_rows(folder, until, where=where)) if row.array is not None}


def _curve(points: Mapping[int, tuple[float, float]]) -> Curve:
    rounds = sorted(points)
    return Curve(
        np.array(rounds, np.float64),
        np.array([points[r][0] for r in rounds], np.float64),
        np.array([points[r][1] for r in rounds], np.float64),
    )


def _client_scores(
    folder: Path, until: int | None, curves: Mapping[Key, Curve]
) -> dict[Key, tuple[int, NDArray[np.float64]]]:
    """Return each client's headline at the last measurement of each model and split; only those rows are read."""
    headlines = {name for name, score in SCORES.items() if score.headline}
    last = {key: int(curve.rounds[-1]) for key, curve in curves.items() if base_name(key[1]) in headlines}
    if not last:
        return {}
    where = (
        (pc.field("client") != "")
        & pc.field("round").isin(sorted(set(last.values())))
        & pc.field("metric").isin(sorted({metric for _, metric in last}))
    )
    values: dict[Key, dict[str, float]] = {}
    for row in read_rows(
        folder, until, where=where, columns=("round", "client", "split", "metric", "value")
    ).to_pylist():
        key = (row["split"], row["metric"])
        if row["round"] == last.get(key):
            values.setdefault(key, {})[row["client"]] = row["value"]
    return {key: (last[key], np.array(list(scores.values()), np.float64)) for key, scores in values.items()}


def _read(path: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    """Read a file that holds a mapping; empty when it is missing."""
    try:
        value = parse(read_regular(path).decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, ConfigError) as error:  # of text that is not UTF-8 too
        raise RunDirectoryError(
            f"{path} is damaged: {error}; restore it from a copy, or move it away to do without it"
        ) from error
    if not isinstance(value, Mapping):
        raise RunDirectoryError(f"{path} must hold a mapping, not {type(value).__name__}; restore it from a copy")
    return value


def _about(text: str) -> Any:
    """Read the text of run.json."""
    about = json.loads(text)
    if isinstance(about, Mapping):
        check_about(about)
    return about


def align(curves: Sequence[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the rounds that all curves have, and their values and totals [curves, rounds] in these."""
    rounds = functools.reduce(np.intersect1d, (curve.rounds for curve in curves))
    places = [np.searchsorted(curve.rounds, rounds) for curve in curves]
    pairs = list(zip(curves, places, strict=True))
    return rounds, np.array([c.values[i] for c, i in pairs]), np.array([c.totals[i] for c, i in pairs])


def place(item: str, order: Sequence[str]) -> tuple[int, str]:
    """Sort known names in their order and unknown ones after them by the alphabet."""
    return (order.index(item) if item in order else len(order), item)
