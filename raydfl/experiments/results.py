"""Results of a study: a row for each contestant, with its runs' scores, its difference from the control and its rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from raydfl.engine import Config
from raydfl.experiments.importance import measure_importance
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Study, Trial, keys_of, rounds_done
from raydfl.runs.report import Curve, RunRecord, problems_of, read_run

SUMMARIES = {"tail": "mean of the last evaluations", "last": "last evaluation", "best": "best evaluation"}
CHOSEN = {"chosen": "in the round of run.best"}
"""Summaries of a run's evaluations, in words."""
CONFIDENCE = 0.95
"""Level of the intervals of differences."""


def shown(value: float | None, signed: bool = False) -> str:
    """Return a number as tables show it; ``-`` when there is none."""
    return "-" if value is None or np.isnan(value) else f"{value:{'+' if signed else ''}.2f}"


@dataclass(frozen=True)
class Spread:
    """One score of several runs, in the table's unit."""

    by_repeat: Mapping[str, float]
    """By the repeated setting, ``run.seed=1``."""

    @property
    def values(self) -> list[float]:
        """The values in the order of the repeats."""
        return list(self.by_repeat.values())

    @property
    def mean(self) -> float:
        """The mean; NaN of no values."""
        return float(np.mean(self.values)) if self.by_repeat else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation (divided by n - 1); NaN of fewer than two values."""
        return float(np.std(self.values, ddof=1)) if len(self.by_repeat) > 1 else math.nan

    def __str__(self) -> str:
        return shown(self.mean) if len(self.by_repeat) < 2 else f"{shown(self.mean)} ± {shown(self.std)}"


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its interval."""

    mean: float
    low: float
    """NaN of fewer than two pairs, as ``high``."""
    high: float
    n: int
    """Number of pairs."""

    @classmethod
    def between(cls, one: Spread, other: Spread) -> Difference | None:
        """Return ``one - other`` over the repeats that both have; ``None``: there is none.

        The interval is that of Student's t distribution.
        """
        pairs = [
            value - other.by_repeat[repeat] for repeat, value in one.by_repeat.items() if repeat in other.by_repeat
        ]
        if not pairs or not np.isfinite(pairs).all():
            return None
        mean, half = float(np.mean(pairs)), math.nan
        if len(pairs) > 1:
            error = float(np.std(pairs, ddof=1)) / math.sqrt(len(pairs))
            half = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(pairs) - 1))
        return cls(mean, mean - half, mean + half, len(pairs))

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{shown(self.low, True)}, {shown(self.high, True)}]"
        return f"{shown(self.mean, True)}{interval}"


@dataclass(frozen=True)
class Contestant:
    """Results of one choice of labels and draw."""

    trials: tuple[Trial, ...]
    """One for each repeat."""
    metrics: tuple[MetricSettings, ...]
    """The headline first."""
    scores: Mapping[tuple[str, str], Spread]
    """By title of the metric and summary (a key of :data:`SUMMARIES`)."""
    done: int
    """Runs that are finished."""
    states: tuple[str, ...]
    """The state of each trial in words: ``finished``, ``stopped (asha)``, ``round 4``."""
    curves: tuple[Curve, ...]
    """The headline over the rounds of every run that is shown, in the table's unit."""
    rounds: int
    """Most rounds of a trial so far."""
    evaluations: tuple[str, ...] = ()
    """Count and interval of the headline's evaluations, each value once: ``last 10 of 30, every 5 rounds``."""
    worthless: int = 0
    """Finished runs that diverged or could not learn. They count like others."""
    best: bool = False
    """Whether it is the best of those that it is compared with."""
    paper: tuple[float, float | None] | None = None
    """The paper's mean and spread."""
    difference: Difference | None = None
    """The headline's difference from the control."""
    paper_difference: float | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The cell."""
        return self.trials[0].labels

    @property
    def draw(self) -> str:
        """The name of the draw; empty without domains."""
        return self.trials[0].draw

    @property
    def values(self) -> Mapping[str, Any]:
        """The draw."""
        return self.trials[0].values

    @property
    def name(self) -> str:
        """A name for people."""
        return ", ".join(filter(None, (*self.labels, self.draw)))

    @property
    def complete(self) -> bool:
        """True when all runs are finished."""
        return self.done == len(self.trials)

    def score(self, summary: str, metric: int = 0) -> Spread:
        """Return one score; by default the headline's."""
        return self.scores[self.metrics[metric].title, summary]

    @property
    def n(self) -> str:
        """The number of runs, and those that lack, in words."""
        worthless = f" ({self.worthless} worthless)" if self.worthless else ""
        if self.complete:
            return f"{self.done}{worthless}"
        if len(self.trials) == 1:
            return self.states[0] + worthless
        begun = [state for state in self.states if state not in ("finished", "missing")]
        text = f"{self.done} of {len(self.trials)} runs" if self.done or begun else "missing"
        return text + (f" ({', '.join(begun)})" if begun else "") + worthless


@dataclass(frozen=True)
class StudyResults:
    """A study's results so far."""

    study: Study
    contestants: tuple[Contestant, ...]
    """In the order of the axes. The draws of a cell are ranked: finished ones first, worthless ones last."""
    runs: tuple[dict[str, Any], ...]
    """A row for each run: labels, draw, folder, state and its own scores."""
    failed: Mapping[str, str]
    """Reasons by name of the trial."""
    open: int
    """Trials that are neither over nor failed."""
    importance: Mapping[str, float]
    """The share of each domain; empty: there are too few draws."""

    @property
    def complete(self) -> bool:
        """True when nothing is left to do."""
        return not self.failed and not self.open

    @property
    def best(self) -> Contestant | None:
        """The best draw; ``None``: there is no score, or the study has no domains."""
        scored = [each for each in self.contestants if math.isfinite(each.score(self.summary).mean)]
        return (
            min(scored, key=lambda each: _rank(each, self.summary)) if scored and self.study.settings.domains else None
        )

    @property
    def scored(self) -> list[tuple[Trial, float]]:
        """Trials with their last score, in the table's unit."""
        spreads = [(trial, each.score("last").by_repeat) for each in self.contestants for trial in each.trials]
        return [(trial, values[trial.repeat]) for trial, values in spreads if trial.repeat in values]

    @property
    def summary(self) -> str:
        """The summary of the headline."""
        return self.study.settings.summarised

    @property
    def titles(self) -> dict[str, str]:
        """Titles of the summaries. If all runs have equally many evaluations, that of the tail states how many it averages."""
        titles = {**SUMMARIES, **(CHOSEN if self.summary == "chosen" else {})}
        counts = {text.partition(",")[0] for text in self.kinds_of_evaluations}
        return titles | ({"tail": f"mean of the {counts.pop()} evaluations"} if len(counts) == 1 else {})

    @property
    def kinds_of_evaluations(self) -> list[str]:
        """Count and interval of evaluations of all runs, the most frequent first."""
        return [
            text for text, _ in Counter(text for each in self.contestants for text in each.evaluations).most_common()
        ]

    @property
    def headline(self) -> str:
        """Name of the measured quantity: ``accuracy (%), mean of the last 3 of 3 evaluations``."""
        titles = {each.metrics[0].unit for each in self.contestants} or {self.study.first.metric.unit}
        return f"{titles.pop() if len(titles) == 1 else 'headline'}, {self.titles[self.summary]}"


def collect(study: Study, state: StudyState) -> StudyResults:
    """Read what the runs of a study recorded. In a study without domains only finished runs count."""
    groups: dict[tuple[tuple[str, ...], str], list[Trial]] = {}
    known = state.known
    for trial in known:
        groups.setdefault((trial.labels, trial.draw), []).append(trial)
    place = {labels: index for index, labels in enumerate(study.cells)}
    read: dict[str, RunRecord] = {}
    rows: list[dict[str, Any]] = []
    found = [
        _read_contestant(study, state, trials, read, rows)
        for _, trials in sorted(groups.items(), key=lambda item: place[item[0][0]])
    ]
    summary, compared = study.settings.summarised, _compare(study, found)
    if study.settings.domains:
        compared.sort(key=lambda each: (place[each.labels], *_rank(each, summary)))
    failed = {
        trial.name: state.of(trial).reason
        for trial in known
        if state.of(trial).status == "failed" and not trial.finished
    }
    over = {trial.identity for trial in known if state.is_over(trial) or trial.name in failed}
    return StudyResults(
        study,
        tuple(_mark_best(study, compared)),
        tuple(rows),
        failed,
        max(0, study.total - len(over)),
        measure_importance(study, [(each.values, each.score(summary).mean) for each in compared]),
    )


def _rank(contestant: Contestant, summary: str) -> tuple[bool, bool, bool, float]:
    """Return a key that sorts the best first: scored, not worthless, finished, and then by its score."""
    mean = contestant.score(summary).mean
    loss = -contestant.metrics[0].sign * mean
    return math.isnan(mean), bool(contestant.worthless), not contestant.complete, 0.0 if math.isnan(loss) else loss


def _read_contestant(
    study: Study, state: StudyState, trials: Sequence[Trial], read: dict[str, RunRecord], rows: list[dict[str, Any]]
) -> Contestant:
    config = trials[0].config
    metrics = (trials[0].metric, *(study.resolve(metric, config) for metric in study.settings.also))
    values: dict[tuple[str, str], dict[str, float]] = {}
    curves: list[Curve] = []
    states: list[str] = []
    evaluations: list[str] = []
    worthless = 0
    for trial in trials:
        done, finished, known = rounds_done(trial.run_dir), trial.finished, state.of(trial)
        states.append(_describe_state(known.status, known.reason, done, finished))
        row = {**dict(zip(study.axes, trial.labels, strict=True)), **trial.values}
        row |= {
            "repeat": trial.repeat,
            "run": trial.run_dir.name,
            "rounds": done,
            "finished": finished,
            "state": states[-1],
        }
        rows.append(row)
        if not finished and not (study.settings.domains and done):
            continue
        if trial.identity not in read:
            read[trial.identity] = read_run(trial.run_dir)
        record = read[trial.identity]
        problems = problems_of(record)
        row["problems"] = "; ".join(problem.text for problem in problems)
        row["worthless"] = finished and any(problem.worthless for problem in problems)
        worthless += row["worthless"]
        best = record.curves.get(("server", "best_round"))
        for place, metric in enumerate(metrics):
            curve = curve_of(record, trial.config, metric)
            if curve is None:
                continue
            if not place:
                curves.append(curve)
                row["evaluations"] = _describe_evaluations(curve, trial.config.evaluate.every)
                evaluations.append(row["evaluations"])
            for summary, value in summarise(curve, metric, 0 if best is None else int(best.last)).items():
                if summary in SUMMARIES or study.settings.summarised == summary:
                    values.setdefault((metric.title, summary), {})[trial.repeat] = value
                    row[f"{metric.title}, {(SUMMARIES | CHOSEN)[summary]}"] = value
    return Contestant(
        trials=tuple(trials),
        metrics=metrics,
        scores={
            (metric.title, summary): Spread(values.get((metric.title, summary), {}))
            for metric in metrics
            for summary in (*SUMMARIES, *CHOSEN)
        },
        done=states.count("finished"),
        states=tuple(states),
        curves=tuple(curves),
        rounds=max(rounds_done(trial.run_dir) for trial in trials),
        evaluations=tuple(dict.fromkeys(evaluations)),
        worthless=worthless,
        paper=study.settings.published().get(trials[0].labels),
    )


def _describe_state(status: str, reason: str, done: int, finished: bool) -> str:
    if finished:
        return "finished"
    if status in ("stopped", "failed"):
        return f"stopped ({reason})" if status == "stopped" else "failed"
    return f"begun: round {done}" if done else "missing"


def _describe_evaluations(curve: Curve, every: int) -> str:
    return f"{curve.tail_text}, every {f'{every} rounds' if every > 1 else 'round'}"


def curve_of(run: RunRecord, config: Config, metric: MetricSettings) -> Curve | None:
    """Return a metric over the rounds in the table's unit; ``None``: it is not recorded."""
    for key in keys_of(config, metric):
        found = run.curves.get(key)
        if found is not None:
            return Curve(found.rounds, found.values * metric.scale, found.totals)
    return None


def summarise(curve: Curve, metric: MetricSettings, chosen: int = 0) -> dict[str, float]:
    """Return the scores of one run, by the keys of :data:`SUMMARIES` and :data:`CHOSEN`. Untrained models do not count.

    Args:
        curve: the metric over the rounds.
        metric: decides whether larger is better.
        chosen: the best round by ``run.best``; 0: there is none.
    """
    best = np.nanmax if metric.best == "max" else np.nanmin
    values = curve.trained
    there = curve.values[(curve.rounds == chosen) & (curve.rounds > 0)]
    return {
        "tail": curve.tail,
        "last": float(values[-1]) if len(values) else math.nan,
        "best": float(best(values)) if np.isfinite(values).any() else math.nan,
        "chosen": float(there[0]) if len(there) else math.nan,
    }


def _compare(study: Study, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Return the contestants with their differences from the control, where one is named and has the same metric."""
    settings, summary = study.settings, study.settings.summarised
    by_name = {(each.labels, each.draw): each for each in contestants}
    published, found = settings.published(), []
    for each in contestants:
        home = tuple(settings.control.get(name, label) for name, label in zip(study.axes, each.labels, strict=True))
        other, compared = by_name.get((home, each.draw)), each
        same = other is None or other.metrics[0].unit == each.metrics[0].unit
        if settings.control and home != each.labels and same:
            paper = published.get(home)
            known = each.paper is not None and paper is not None
            compared = replace(
                each,
                difference=None if other is None else Difference.between(each.score(summary), other.score(summary)),
                paper_difference=each.paper[0] - paper[0] if known else None,  # type: ignore[index]
            )
        found.append(compared)
    return found


def _mark_best(study: Study, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Mark the best of cells that differ only in the last axis, if all are complete; with domains the best draw of each cell.

    Equals are all marked.
    """
    summary, groups = study.settings.summarised, dict[tuple[str, ...], list[Contestant]]()
    for each in contestants:
        groups.setdefault(each.labels if study.settings.domains else each.labels[:-1], []).append(each)
    best: set[int] = set()
    for group in groups.values():
        ranks = {id(each): _rank(each, summary) for each in group if each.complete}
        ranks = {key: rank for key, rank in ranks.items() if not rank[0]}  # those with a score
        first = min(ranks.values(), default=None)
        comparable = bool(study.settings.domains) or all(each.complete for each in group)
        if comparable and len(set(ranks.values())) > 1 and len({each.metrics[0].title for each in group}) == 1:
            best |= {key for key, rank in ranks.items() if rank == first}
    return [replace(each, best=id(each) in best) for each in contestants]
