"""The data of a run directory: curves, confusion matrices and clients' scores, for reports and user code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from raydfl.controls import Control
from raydfl.core.errors import ConfigError, RunDirectoryError, translate_failures
from raydfl.core.files import read_json
from raydfl.core.metrics import SCORES, base_name, model_name
from raydfl.core.nested import get_path
from raydfl.core.yaml import read_yaml
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
from raydfl.runs.report.controls import read_controls

if TYPE_CHECKING:
    import pandas as pd

SPLITS = {
    "test": "test data",
    "triggered": "test data with the trigger",
    "server_validation": "server's validation data",
    "server": "server's data",
    "client_test": "clients' own test data",
    "validation": "clients' held-out clips",
    "train": "training data",
}
"""Displayed names of the splits, in the order of the report."""
_LAST = 10  # maximum number of evaluations in the mean of a tail
_TIMELINES = 3  # number of last rounds with a timeline

Key = tuple[str, str]
"""(split, metric)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the rounds."""

    rounds: NDArray[np.float64]
    values: NDArray[np.float64]
    totals: NDArray[np.float64]
    """Sums of ``value * count`` over the phases of a round."""

    @property
    def last(self) -> float:
        """Last value of the curve."""
        return float(self.values[-1])

    @property
    def trained(self) -> NDArray[np.float64]:
        """The values without round 0, the evaluation before training."""
        return self.values[self.rounds > 0]

    @property
    def tail(self) -> float:
        """The mean of at most the last ten values, without round 0. NaN without values."""
        values = self.trained[-_LAST:]
        return float(values.mean()) if len(values) else float("nan")

    @property
    def mean_of_ten(self) -> float | None:
        """The mean of the last ten values, without round 0. ``None`` with fewer values."""
        return self.tail if len(self.trained) >= _LAST else None

    @property
    def tail_text(self) -> str:
        """The number of values in :attr:`tail`, such as ``last 3 of 3``."""
        return f"last {min(_LAST, len(self.trained))} of {len(self.trained)}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The data of a run directory."""

    folder: Path
    about: Mapping[str, Any]
    """Content of run.json. Empty if the file is missing."""
    config: Mapping[str, Any]
    """Content of config.yaml. Empty if the file is missing."""
    curves: Mapping[Key, Curve]
    """The server's and pooled metrics."""
    confusions: Mapping[Key, tuple[int, NDArray[np.float64]]]
    """Round and matrix of the last confusion matrix of each model and split."""
    clients: Mapping[Key, tuple[int, NDArray[np.float64]]]
    """Round and clients' values [clients] of the last measurement of each headline."""
    timelines: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """Timelines float64 [clients, 4] of the last rounds, from Watch.timeline of raydfl.engine.telemetry."""
    memberships: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """Groups by round (``train.groups``), float64 [2, clients]: the number of each client's group (0: none), and the number of its
    true group (-1: unknown)."""
    missing: Sequence[str] = field(default_factory=list)
    """Remarks on missing files and measurements."""
    incidents: Sequence[tuple[int, str, str, str, str]] = ()
    """Failed and late clients: (round, phase, client, ``"failed"`` or ``"late"``, reason)."""
    facts: Mapping[str, tuple[int, float, str]] = field(default_factory=dict)
    """Last (round, value, text) of the run's facts, such as ``"best_round"`` and ``"stopped"``."""
    controls: Sequence[Control] = ()
    """Scores without training, from ``controls.json``."""
    controls_note: str = ""
    """Reason for missing controls."""

    @property
    def remarks(self) -> list[str]:
        """Remarks on the clients' data, from before the first round."""
        return [str(text) for text in self.about.get("remarks", ())]

    @property
    def id(self) -> str:
        """The run's name."""
        return str(self.about.get("id", self.folder.name))

    @property
    def method(self) -> str:
        """The method's name. Empty if config.yaml and run.json have none."""
        name = get_path(self.config, "method.name") or self.about.get("method", "")
        return str(name.get("name", "") if isinstance(name, Mapping) else name)

    @property
    def data(self) -> str:
        """The name of the data set or of its parts. Empty if config.yaml and run.json have none."""
        if parts := get_path(self.config, "data.parts"):
            return "+".join(map(str, parts))
        name = get_path(self.config, "data.name") or self.about.get("data", "")
        return str(name.get("name", "") if isinstance(name, Mapping) else name)

    @property
    def done(self) -> int:
        """Number of recorded rounds."""
        return int(max((curve.rounds[-1] for curve in self.curves.values()), default=0))

    @property
    def stopped(self) -> str:
        """Reason of ``run.stop`` to end the training in the last recorded round. Empty if it did not."""
        round_index, _, reason = self.facts.get("stopped", (0, 0.0, ""))
        return reason if round_index and round_index == self.done else ""

    @property
    def total(self) -> int:
        """Number of configured rounds. 0 if unknown."""
        return int(get_path(self.config, "train.rounds") or 0)

    @property
    def models(self) -> list[str]:
        """Names of the models in run.json, followed by further models with scores."""
        return list(dict.fromkeys([*self.architectures, *sorted(model_name(metric) for _, metric in self.scores())]))

    @property
    def architectures(self) -> dict[str, list[Mapping[str, Any]]]:
        """Descriptions of each model's architectures in run.json. A plain name becomes a description of this name."""
        models = self.about.get("models")
        return {
            str(name): [
                kind if isinstance(kind, Mapping) else {"architecture": kind}
                for kind in (value if isinstance(value, list) else [value])
            ]
            for name, value in (models.items() if isinstance(models, Mapping) else ())
        }

    def find_seconds(self, rounds: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Return the virtual seconds [rounds] at the end of some rounds; ``None`` without ``train.fleet``."""
        seconds = self.curves.get(("server", "virtual_seconds"))
        return None if seconds is None else np.interp(rounds, [0, *seconds.rounds], [0, *seconds.values])

    @property
    def headline(self) -> str:
        """The main score: the first measured headline of raydfl.core.metrics.SCORES, or the loss."""
        measured = {base_name(metric) for _, metric in self.curves}
        return next((name for name, score in SCORES.items() if score.headline and name in measured), "loss")

    def classes_of(self, metric: str) -> list[str]:
        """Return the names of a metric's classes, in its part of the data or in all data. Empty if unknown."""
        parts, part = self.about.get("parts"), metric.partition(":")[0]
        names = parts.get(part) if isinstance(parts, Mapping) else self.about.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    def scores(self, *bases: str) -> list[Key]:
        """Return the (split, metric) of all measured scores, or of the scores with the base names ``bases``."""
        return [key for key in self.curves if base_name(key[1]) in (bases or SCORES)]

    def sort_scores(self, *bases: str) -> list[Key]:
        """Return :meth:`scores` in the order of the report: by split, model and score."""
        splits, scores, models = list(SPLITS), list(SCORES), self.models
        return sorted(
            self.scores(*bases),
            key=lambda key: (
                sort_key(key[0], splits),
                models.index(model_name(key[1])),
                scores.index(base_name(key[1])),
            ),
        )

    @property
    def history(self) -> pd.DataFrame:
        """The curves as a table: one row per round, one column per metric (``"test plugin/accuracy"``). NaN: not measured.

        Scores come first, in the order of the report. The other metrics follow in alphabetical order.
        """
        import pandas as pd  # The import takes 0.3 s, and reports do not need it.

        keys = dict.fromkeys([*self.sort_scores(), *sorted(self.curves)])
        columns = {
            f"{split} {metric}": pd.Series(curve.values, curve.rounds.astype(np.int64))
            for split, metric in keys
            for curve in [self.curves[split, metric]]
        }
        return pd.DataFrame(columns).sort_index().rename_axis("round")

    def totals(self, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the rounds with a metric, and its totals [rounds] over all splits."""
        curves = [curve for (_, name), curve in self.curves.items() if name == metric] or [Curve(*np.empty((3, 0)))]
        rounds, indices = np.unique(np.concatenate([curve.rounds for curve in curves]), return_inverse=True)
        return rounds, np.bincount(indices, np.concatenate([curve.totals for curve in curves])).astype(np.float64)

    def sum_totals(self, *metrics: str) -> float | None:
        """Return the sum of the metrics' totals over all rounds. ``None`` without recorded metrics."""
        recorded = [totals for _, totals in map(self.totals, metrics) if len(totals)]
        return float(np.concatenate(recorded).sum()) if recorded else None


def read_run(folder: str | Path) -> RunRecord:
    """Read the data of a run directory. Missing files and measurements are listed in ``missing``.

    Raises:
        RunDirectoryError: The folder is missing, is not a run directory, or contains a damaged file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunDirectoryError(f"there is no run directory {folder}. Give the folder printed by `raydfl run`.")
    if not any((folder / name).exists() for name in ("config.yaml", "run.json", "rows")):
        raise RunDirectoryError(
            f"{folder} is not a run directory: it has no config.yaml, run.json or rows/. Give the folder printed by `raydfl run`."
        )
    missing = []
    config = _read_mapping(folder / "config.yaml", lambda path: read_yaml(path, saved=True))
    about = _read_mapping(folder / "run.json", _read_about)
    if not config:
        missing.append("config.yaml is missing, so the configuration is not shown.")
    if not about:
        missing.append("run.json is missing, so the names of classes and models are unknown.")
    initial = about.get("config")
    if initial and config and (edit := describe_edit(folder, initial, config)):
        missing.append(
            f"config.yaml was changed since the run began ({edit}), so the configuration below is not the trained configuration."
        )
    # Rows after the last commit belong to rounds that a resume repeats.
    latest = RunStore(folder).latest()
    until = None if latest is None else round_of(latest)
    server_rows = pc.field("client") == ""
    pooled = to_rows(read_rows(folder, until, where=server_rows & (pc.field("metric") != TIMELINE)))
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
    curves = {key: _make_curve(rounds) for key, rounds in points.items()}
    lost = list_missing_rounds((row.round for row in pooled), until or 0)
    if lost:
        missing.append(f"The files in rows/ of rounds {lost} are missing, so their measurements are not shown.")
    clients = _read_client_scores(folder, until, curves)
    timelines = _read_timelines(folder, until, pooled)
    incidents = _read_incidents(folder, until)
    facts = {row.metric: (row.round, row.value, row.note) for row in pooled if row.note}
    return RunRecord(
        *(folder, about, config, curves, confusions, clients, timelines, memberships, missing, incidents, facts),
        *read_controls(folder),
    )


def _read_incidents(folder: Path, until: int | None) -> list[tuple[int, str, str, str, str]]:
    """Read the clients' rows with a note."""
    columns = ("round", "phase", "client", "metric", "note")
    rows = read_rows(
        folder, until, where=pc.field("note").is_valid() & (pc.field("client") != ""), columns=columns
    ).to_pylist()
    return [(row["round"], row["phase"], row["client"], row["metric"], row["note"]) for row in rows]


def _read_timelines(folder: Path, until: int | None, pooled: Sequence[MetricRow]) -> dict[int, NDArray[np.float64]]:
    """Read the timelines of the last recorded rounds."""
    last = max((row.round for row in pooled), default=0)
    where = (pc.field("metric") == TIMELINE) & (pc.field("round") > last - _TIMELINES)
    return {row.round: row.array for row in to_rows(read_rows(folder, until, where=where)) if row.array is not None}


def _make_curve(points: Mapping[int, tuple[float, float]]) -> Curve:
    rounds = sorted(points)
    return Curve(
        np.array(rounds, np.float64),
        np.array([points[r][0] for r in rounds], np.float64),
        np.array([points[r][1] for r in rounds], np.float64),
    )


def _read_client_scores(
    folder: Path, until: int | None, curves: Mapping[Key, Curve]
) -> dict[Key, tuple[int, NDArray[np.float64]]]:
    """Read the clients' headline scores at the last measurement of each model and split, without reading other rows."""
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


def _read_mapping(path: Path, read: Callable[[Path], Any]) -> Mapping[str, Any]:
    """Read a file with a mapping. A missing file gives an empty mapping."""
    if not path.exists():
        return {}
    remedy = "Restore it from a copy, or move it away to continue without it."
    try:
        with translate_failures(lambda reason: RunDirectoryError(f"{path} cannot be read: {reason}. {remedy}")):
            value = read(path)
    except ConfigError as error:
        raise RunDirectoryError(f"{error}. {remedy}") from error
    if not isinstance(value, Mapping):
        raise RunDirectoryError(f"{path} must contain a mapping, not {type(value).__name__}. Restore it from a copy.")
    return value


def _read_about(path: Path) -> Any:
    """Read and check run.json."""
    about = read_json(path)
    if isinstance(about, Mapping):
        check_about(about)
    return about


def align(curves: Sequence[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the common rounds of all curves, and their values and totals [curves, rounds] in these rounds."""
    rounds = functools.reduce(np.intersect1d, (curve.rounds for curve in curves))
    indices = [np.searchsorted(curve.rounds, rounds) for curve in curves]
    pairs = list(zip(curves, indices, strict=True))
    return rounds, np.array([c.values[i] for c, i in pairs]), np.array([c.totals[i] for c, i in pairs])


def sort_key(item: str, order: Sequence[str]) -> tuple[int, str]:
    """Return a sort key: names in ``order`` come first, in this order, and other names follow alphabetically."""
    return (order.index(item) if item in order else len(order), item)
