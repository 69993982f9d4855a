"""Results of a search: the best settings, and a row for each trial."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydfl.core.yaml import to_yaml
from raydfl.experiments.plan import label_of
from raydfl.experiments.search.importance import importances
from raydfl.experiments.search.journal import Journal, TrialRecord
from raydfl.experiments.search.plan import Search, trial_name
from raydfl.experiments.table import shown, to_csv, to_parquet, to_table, write_files

_ADVICE = "make room or make the folder writable; the same command writes the tables again"


@dataclass(frozen=True)
class SearchResults:
    """A search as it stands."""

    search: Search
    records: tuple[TrialRecord, ...]
    """Every trial that was begun, by number."""
    ranked: tuple[TrialRecord, ...]
    """Those with a score, the best first: finished ones before stopped and unfinished ones, which had fewer rounds; worthless ones
    last."""
    importance: dict[str, float]
    """The share of each setting; empty: too few trials to say."""

    @property
    def best(self) -> TrialRecord | None:
        """The best of the finished trials; of all while none is finished."""
        return self.ranked[0] if self.ranked else None

    @property
    def failed(self) -> dict[str, str]:
        """Reasons by name of the trial."""
        return {trial_name(record.number): record.reason for record in self.records if record.status == "failed"}

    @property
    def open(self) -> int:
        """Trials that are left to do, or to be finished, after an interruption."""
        return max(0, self.search.trials - sum(record.status != "running" for record in self.records))

    @property
    def complete(self) -> bool:
        """True when nothing is left to do."""
        return not self.failed and not self.open

    def shown(self, score: float) -> str:
        """Return a score in the table's unit."""
        return shown(score * self.search.settings.metric.scale)


def collect(search: Search, journal: Journal) -> SearchResults:
    """Rank the trials."""
    records = [journal.trials[number] for number in sorted(journal.trials)]
    sign = search.settings.metric.sign
    known = [record for record in records if math.isfinite(record.score)]
    full = 0 if search.first.run.stop is not None else search.rounds  # a trial may have stopped by itself
    ranked = sorted(
        known,
        key=lambda r: (r.worthless, not (r.status == "finished" and r.reported >= full), -sign * r.score, r.number),
    )
    return SearchResults(search, tuple(records), tuple(ranked), importances(search, records))


def columns(results: SearchResults) -> list[str]:
    """Return the headings of :func:`lines`."""
    parents = ["from"] if any(record.parent is not None for record in results.records) else []
    title = results.search.settings.metric.title
    return ["trial", "state", "rounds", title, *results.search.settings.space, *parents]


def lines(results: SearchResults) -> list[list[str]]:
    """Return the table's cells as text: ranked trials, then those without a score."""
    rest = [record for record in results.records if record not in results.ranked]
    found = []
    for record in (*results.ranked, *rest):
        state = f"stopped ({record.reason})" if record.status == "stopped" else record.status
        stops = results.search.first.run.stop is not None
        if stops and record.status == "finished" and record.reported < results.search.rounds:
            state = "stopped (run.stop)"
        state = "not finished" if record.status == "running" else "worthless" if record.worthless else state
        line = [trial_name(record.number), state, str(record.reported), results.shown(record.score)]
        line += [label_of(record.values[key]) for key in results.search.settings.space]
        if "from" in columns(results):
            line += ["" if record.parent is None else trial_name(record.parent)]
        found.append(line)
    return found


def best_config(results: SearchResults) -> dict[str, Any] | None:
    """Return the configuration of the best trial, with all rounds, for a run of its own; ``None`` when no trial has a score."""
    if results.best is None:
        return None
    config = results.search.config_of(results.best.values, results.best.number).model_dump(mode="json")
    config["run"] |= {"name": None, "dir": "runs"}
    config["track"] = results.search.track.model_dump(mode="json")
    return config


def best_command(results: SearchResults) -> str:
    """Return the command that trains with the best settings."""
    return f"raydfl run {shlex.quote(str(results.search.output('best.yaml')))}"


def records_of(results: SearchResults) -> list[dict[str, Any]]:
    """Return a flat record for each trial: numbers as they are, the score not scaled."""
    found = []
    for record in results.records:
        row: dict[str, Any] = {"trial": trial_name(record.number), "state": record.status, "reason": record.reason}
        row |= {"rounds": record.reported, "score": record.score, "from": record.parent}
        row |= {
            key: value if isinstance(value, (int, float, str, bool)) else label_of(value)
            for key, value in record.values.items()
        }
        found.append(row)
    return found


def write_tables(results: SearchResults) -> list[Path]:
    """Write ``trials.csv``, ``trials.parquet`` and, once there is a score, ``best.yaml``, in the search's folder.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    table, place = to_table(records_of(results)), results.search.output
    contents = {place("trials.csv"): to_csv(table), place("trials.parquet"): to_parquet(table)}
    config = best_config(results)
    if config is not None:
        contents[place("best.yaml")] = to_yaml(config, flow=False).encode()
    return write_files(contents, _ADVICE)
