"""Results of a study: a row for each contestant, with its runs' scores, its difference from the control and its rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

from raydfl.core.seeds import seed_for
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Study, Trial, keys_of, rounds_done
from raydfl.runs.report import Curve, RunRecord, find_problems, read_run

SUMMARIES = {
    "tail": "mean of the last evaluations",
    "last": "last evaluation",
    "best": "best evaluation",
    "chosen": "in the round of run.best",
}
"""Summaries of a run's evaluations, in words."""
CONFIDENCE = 0.95
"""Level of the intervals of differences."""
FEWEST = 8
"""Scores without which no importance is given."""
_TREES = 200
_SHUFFLES = 20


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
            one.by_repeat[repeat] - other.by_repeat[repeat] for repeat in one.by_repeat if repeat in other.by_repeat
        ]
        if not pairs or not np.isfinite(pairs).all():
            return None
        mean, n = float(np.mean(pairs)), len(pairs)
        half = float(stats.sem(pairs) * stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) if n > 1 else math.nan
        return cls(mean, mean - half, mean + half, n)

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
    runs: tuple[dict[str, Any], ...]
    """A row for each trial: labels, draw, folder, state and its own scores."""
    curves: tuple[Curve, ...]
    """The headline over the rounds of every run that is shown, in the table's unit."""
    evaluations: list[str]
    """Count and interval of the headline's evaluations, each value once: ``last 10 of 30, every 5 rounds``."""
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
    def states(self) -> list[str]:
        """The state of each trial in words: ``finished``, ``stopped (asha)``, ``round 4``."""
        return [row["state"] for row in self.runs]

    @property
    def done(self) -> int:
        """Runs that are finished."""
        return self.states.count("finished")

    @property
    def complete(self) -> bool:
        """True when all runs are finished."""
        return self.done == len(self.trials)

    @property
    def rounds(self) -> int:
        """Most rounds of a trial so far."""
        return max(int(row["rounds"]) for row in self.runs)

    @property
    def worthless(self) -> int:
        """Finished runs that diverged or could not learn. They count like others."""
        return sum(bool(row.get("worthless")) for row in self.runs)

    def score(self, summary: str, metric: int = 0) -> Spread:
        """Return one score, by a key of :data:`SUMMARIES`; by default the headline's."""
        name = f"{self.metrics[metric].title}, {SUMMARIES[summary]}"
        return Spread({row["repeat"]: row[name] for row in self.runs if name in row})

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
    failed: Mapping[str, str]
    """Reasons by name of the trial."""
    open: int
    """Trials that are neither over nor failed."""

    @property
    def runs(self) -> list[dict[str, Any]]:
        """A row for each run."""
        return [row for each in self.contestants for row in each.runs]

    @property
    def complete(self) -> bool:
        """True when nothing is left to do."""
        return not self.failed and not self.open

    @property
    def best(self) -> Contestant | None:
        """The best draw; ``None``: there is no score, or the study has no domains."""
        scored = [each for each in self.contestants if math.isfinite(each.score(self.summary).mean)]
        found = min(scored, key=lambda each: _rank(each, self.summary), default=None)
        return found if self.study.settings.domains else None

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
        titles = {key: text for key, text in SUMMARIES.items() if key in (self.summary, "tail", "last", "best")}
        counts = {text.partition(",")[0] for text in self.kinds_of_evaluations}
        return titles | ({"tail": f"mean of the {counts.pop()} evaluations"} if len(counts) == 1 else {})

    @property
    def kinds_of_evaluations(self) -> list[str]:
        """Count and interval of evaluations of all runs, the most frequent first."""
        counts = Counter(text for each in self.contestants for text in each.evaluations)
        return [text for text, _ in counts.most_common()]

    @property
    def headline(self) -> str:
        """Name of the measured quantity: ``accuracy (%), mean of the last 3 of 3 evaluations``."""
        titles = {each.metrics[0].unit for each in self.contestants} or {self.study.first.metric.unit}
        return f"{titles.pop() if len(titles) == 1 else 'headline'}, {self.titles[self.summary]}"

    @cached_property
    def importance(self) -> dict[str, float]:
        """The share of each domain; empty: there are too few draws."""
        return measure_importance(
            self.study, [(each.values, each.score(self.summary).mean) for each in self.contestants]
        )


def collect(study: Study, state: StudyState) -> StudyResults:
    """Read what the runs of a study recorded. In a study without domains only finished runs count."""
    groups: dict[tuple[tuple[str, ...], str], list[Trial]] = {}
    known, records = state.known, dict[str, RunRecord]()
    for trial in known:
        groups.setdefault((trial.labels, trial.draw), []).append(trial)
    place = {labels: index for index, labels in enumerate(study.cells)}
    groups = dict(sorted(groups.items(), key=lambda item: place[item[0][0]]))
    found = {key: _read_contestant(study, state, trials, records) for key, trials in groups.items()}
    compared = [_compare(study, each, found) for each in found.values()]
    if study.settings.domains:
        compared.sort(key=lambda each: (place[each.labels], *_rank(each, study.settings.summarised)))
    unfinished = {trial.name: state.of(trial) for trial in known if not trial.finished}
    failed = {name: each.reason for name, each in unfinished.items() if each.status == "failed"}
    over = {trial.identity for trial in known if state.is_over(trial) or trial.name in failed}
    return StudyResults(study, tuple(_mark_best(study, compared)), failed, max(0, study.total - len(over)))


def _rank(contestant: Contestant, summary: str) -> tuple[bool, bool, bool, float]:
    """Return a key that sorts the best first: scored, not worthless, finished, and then by its score."""
    mean = contestant.score(summary).mean
    loss = -contestant.metrics[0].sign * mean
    return math.isnan(mean), bool(contestant.worthless), not contestant.complete, 0.0 if math.isnan(loss) else loss


def _read_contestant(
    study: Study, state: StudyState, trials: Sequence[Trial], records: dict[str, RunRecord]
) -> Contestant:
    metrics = (trials[0].metric, *(study.resolve(metric, trials[0].config) for metric in study.settings.also))
    curves: list[Curve] = []
    rows: list[dict[str, Any]] = []
    evaluations: dict[str, None] = {}
    for trial in trials:
        done, finished = rounds_done(trial.run_dir), trial.finished
        row = {**dict(zip(study.axes, trial.labels, strict=True)), **trial.values, "repeat": trial.repeat}
        row |= {"run": trial.run_dir.name, "rounds": done, "finished": finished}
        row["state"] = "finished" if finished else state.of(trial).describe(done)
        rows.append(row)
        if not finished and not (study.settings.domains and done):
            continue
        if trial.identity not in records:
            records[trial.identity] = read_run(trial.run_dir)
        record = records[trial.identity]
        problems = find_problems(record)
        row["problems"] = "; ".join(problem.text for problem in problems)
        row["worthless"] = finished and any(problem.worthless for problem in problems)
        best = record.curves.get(("server", "best_round"))
        for place, metric in enumerate(metrics):
            found = (record.curves.get(key) for key in keys_of(trial.config, metric))
            curve = next((each for each in found if each is not None), None)
            if curve is None:
                continue
            curve = Curve(curve.rounds, curve.values * metric.scale, curve.totals)
            if not place:
                every = trial.config.evaluate.every
                row["evaluations"] = f"{curve.tail_text}, every {f'{every} rounds' if every > 1 else 'round'}"
                evaluations[row["evaluations"]] = None
                curves.append(curve)
            for summary, value in summarise(curve, metric, 0 if best is None else int(best.last)).items():
                if summary in (study.settings.summarised, "tail", "last", "best"):
                    row[f"{metric.title}, {SUMMARIES[summary]}"] = value
    paper = study.settings.published().get(trials[0].labels)
    return Contestant(tuple(trials), metrics, tuple(rows), tuple(curves), list(evaluations), paper=paper)


def summarise(curve: Curve, metric: MetricSettings, chosen: int = 0) -> dict[str, float]:
    """Return the scores of one run, by the keys of :data:`SUMMARIES`. Untrained models do not count.

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


def _compare(study: Study, each: Contestant, others: Mapping[tuple[tuple[str, ...], str], Contestant]) -> Contestant:
    """Return the contestant with its difference from the control, where one is named and has the same metric."""
    settings, summary, published = study.settings, study.settings.summarised, study.settings.published()
    home = tuple(settings.control.get(name, label) for name, label in zip(study.axes, each.labels, strict=True))
    other, paper = others.get((home, each.draw)), published.get(home)
    if home == each.labels or (other is not None and other.metrics[0].unit != each.metrics[0].unit):
        return each
    return replace(
        each,
        difference=None if other is None else Difference.between(each.score(summary), other.score(summary)),
        paper_difference=None if each.paper is None or paper is None else each.paper[0] - paper[0],
    )


def _mark_best(study: Study, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Mark the best (all equals) of complete cells that differ only in the last axis; with domains the best draw of each."""
    search, groups = bool(study.settings.domains), dict[tuple[str, ...], list[Contestant]]()
    for each in contestants:
        groups.setdefault(each.labels if search else each.labels[:-1], []).append(each)
    best: set[int] = set()
    for group in groups.values():
        ranks = {id(each): _rank(each, study.settings.summarised) for each in group if each.complete}
        ranks = {key: rank for key, rank in ranks.items() if not rank[0]}  # those with a score
        comparable = search or all(each.complete for each in group)
        if comparable and len(set(ranks.values())) > 1 and len({each.metrics[0].title for each in group}) == 1:
            best |= {key for key, rank in ranks.items() if rank == min(ranks.values())}
    return [replace(each, best=id(each) in best) for each in contestants]


def measure_importance(study: Study, scored: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """Return the importance of each domain, adding up to 1; empty: there are too few scores, or no setting mattered.

    A random forest learns the scores from the settings. The importance of a setting is the mean rise of the squared error when the
    setting is shuffled. It is measured on the trials that the forest learned from: with few trials it shows little.

    Args:
        scored: draws with their scores; those that are not finite are left out.
    """
    known = [(values, score) for values, score in scored if math.isfinite(score)]
    domains = study.settings.domains
    if not domains or len(known) < FEWEST:
        return {}
    from sklearn.ensemble import RandomForestRegressor  # takes a second
    from sklearn.inspection import permutation_importance

    places = np.array([[domain.position(values[key]) for key, domain in domains.items()] for values, _ in known])
    scores = np.array([score for _, score in known])
    state = seed_for(study.settings.seed, 0, "", "search importance") % 2**32
    forest = RandomForestRegressor(_TREES, random_state=state, n_jobs=1).fit(places, scores)
    rise = permutation_importance(
        forest, places, scores, scoring="neg_mean_squared_error", n_repeats=_SHUFFLES, random_state=state, n_jobs=1
    ).importances_mean
    rise = np.maximum(rise, 0.0)
    return dict(zip(domains, (rise / rise.sum()).tolist(), strict=True)) if rise.sum() > 0 else {}
