"""Results of a study: each contestant's scores, its difference from the control, and its rank."""

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
from raydfl.experiments.study import Study, Trial, count_rounds, list_keys
from raydfl.runs.report import Curve, RunRecord, find_problems, read_run

SUMMARIES = {
    "tail": "mean of the last evaluations",
    "last": "last evaluation",
    "best": "best evaluation",
    "chosen": "in the round of run.best",
}
"""Descriptions of the summaries of a run's evaluations."""
CONFIDENCE = 0.95
"""Confidence level of the intervals of differences."""
FEWEST = 8
"""Minimum number of scores for an estimate of importance."""
_TREES = 200
_SHUFFLES = 20


def format_number(value: float | None, signed: bool = False) -> str:
    """Format a number for tables, with ``-`` for None and NaN."""
    return "-" if value is None or np.isnan(value) else f"{value:{'+' if signed else ''}.2f}"


@dataclass(frozen=True)
class Spread:
    """A score of several runs, in the table's unit."""

    by_repeat: Mapping[str, float]
    """Scores by the value of the repeated setting, ``run.seed=1``."""

    @property
    def values(self) -> list[float]:
        """The values in the order of the repeats."""
        return list(self.by_repeat.values())

    @property
    def mean(self) -> float:
        """The mean; NaN without values."""
        return float(np.mean(self.values)) if self.by_repeat else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation (divided by n - 1); NaN for fewer than two values."""
        return float(np.std(self.values, ddof=1)) if len(self.by_repeat) > 1 else math.nan

    def __str__(self) -> str:
        return (
            format_number(self.mean)
            if len(self.by_repeat) < 2
            else f"{format_number(self.mean)} ± {format_number(self.std)}"
        )


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its confidence interval."""

    mean: float
    low: float
    """Lower end of the interval; NaN for fewer than two pairs."""
    high: float
    """Upper end of the interval; NaN for fewer than two pairs."""
    n: int
    """Number of pairs."""

    @classmethod
    def between(cls, treatment: Spread, control: Spread) -> Difference | None:
        """Compute ``treatment - control`` over common repeats, with the interval of Student's t; ``None`` without pairs."""
        scores, baseline = treatment.by_repeat, control.by_repeat
        differences = [scores[repeat] - baseline[repeat] for repeat in scores if repeat in baseline]
        if not differences or not np.isfinite(differences).all():
            return None
        mean, n = float(np.mean(differences)), len(differences)
        half = float(stats.sem(differences) * stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) if n > 1 else math.nan
        return cls(mean, mean - half, mean + half, n)

    def __str__(self) -> str:
        interval = (
            "" if math.isnan(self.low) else f" [{format_number(self.low, True)}, {format_number(self.high, True)}]"
        )
        return f"{format_number(self.mean, True)}{interval}"


@dataclass(frozen=True)
class Contestant:
    """Results of a cell with a draw."""

    trials: tuple[Trial, ...]
    """Trials, one per repeat."""
    metrics: tuple[MetricSettings, ...]
    """The headline, then the further metrics."""
    runs: tuple[dict[str, Any], ...]
    """Row of each trial: labels, draw, folder, state and scores."""
    curves: tuple[Curve, ...]
    """The headline over the rounds of each run with results, in the table's unit."""
    evaluations: list[str]
    """Distinct counts and intervals of the headline's evaluations: ``last 10 of 30, every 5 rounds``."""
    best: bool = False
    """Whether the contestant is the best of its group."""
    paper: tuple[float, float | None] | None = None
    """Mean and spread in the paper."""
    difference: Difference | None = None
    """The headline's difference from the control."""
    paper_difference: float | None = None
    """Difference from the control in the paper."""

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
        """A readable name."""
        return ", ".join(filter(None, (*self.labels, self.draw)))

    @property
    def states(self) -> list[str]:
        """Descriptions of the trials' states: ``finished``, ``stopped (asha)``, ``begun: round 4``."""
        return [row["state"] for row in self.runs]

    @property
    def done(self) -> int:
        """Number of finished runs."""
        return self.states.count("finished")

    @property
    def complete(self) -> bool:
        """True if all runs are finished."""
        return self.done == len(self.trials)

    @property
    def rounds(self) -> int:
        """Maximum completed rounds of a trial."""
        return max(int(row["rounds"]) for row in self.runs)

    @property
    def worthless(self) -> int:
        """Number of finished runs that diverged or could not learn. The mean includes them."""
        return sum(bool(row.get("worthless")) for row in self.runs)

    def score(self, summary: str, metric: int = 0) -> Spread:
        """Return a score of all runs.

        Args:
            summary: Key of :data:`SUMMARIES`.
            metric: Index of the metric; 0: the headline.
        """
        name = f"{self.metrics[metric].title}, {SUMMARIES[summary]}"
        return Spread({row["repeat"]: row[name] for row in self.runs if name in row})

    @property
    def n(self) -> str:
        """Description of the number of runs, including unfinished runs."""
        worthless = f" ({self.worthless} worthless)" if self.worthless else ""
        if self.complete:
            return f"{self.done}{worthless}"
        if len(self.trials) == 1:
            return self.states[0] + worthless
        unfinished = [state for state in self.states if state not in ("finished", "missing")]
        text = f"{self.done} of {len(self.trials)} runs" if self.done or unfinished else "missing"
        return text + (f" ({', '.join(unfinished)})" if unfinished else "") + worthless


@dataclass(frozen=True)
class StudyResults:
    """The current results of a study."""

    study: Study
    contestants: tuple[Contestant, ...]
    """Contestants in the order of the axes. The draws of a cell are ranked: finished draws first, worthless draws last."""
    failed: Mapping[str, str]
    """Reasons of failures by name of the trial."""
    open: int
    """Number of unfinished trials without a failure."""

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Rows of all runs."""
        return [row for contestant in self.contestants for row in contestant.runs]

    @property
    def complete(self) -> bool:
        """True if all trials are over."""
        return not self.failed and not self.open

    @property
    def best(self) -> Contestant | None:
        """The best draw of a search; ``None`` without scores or without domains."""
        scored = [contestant for contestant in self.contestants if math.isfinite(contestant.score(self.summary).mean)]
        best = min(scored, key=lambda contestant: _rank(contestant, self.summary), default=None)
        return best if self.study.settings.domains else None

    @property
    def scored(self) -> list[tuple[Trial, float]]:
        """Pairs of a trial and its last score, in the table's unit."""
        spreads = [
            (trial, contestant.score("last").by_repeat)
            for contestant in self.contestants
            for trial in contestant.trials
        ]
        return [(trial, values[trial.repeat]) for trial, values in spreads if trial.repeat in values]

    @property
    def summary(self) -> str:
        """The summary of the headline."""
        return self.study.settings.summarised

    @property
    def titles(self) -> dict[str, str]:
        """Titles of the summaries. The title of ``tail`` has the number of evaluations, if it is equal for all runs."""
        titles = {key: text for key, text in SUMMARIES.items() if key in (self.summary, "tail", "last", "best")}
        counts = {text.partition(",")[0] for text in self.kinds_of_evaluations}
        return titles | ({"tail": f"mean of the {counts.pop()} evaluations"} if len(counts) == 1 else {})

    @property
    def kinds_of_evaluations(self) -> list[str]:
        """Counts and intervals of evaluations, the most frequent first."""
        counts = Counter(text for contestant in self.contestants for text in contestant.evaluations)
        return [text for text, _ in counts.most_common()]

    @property
    def headline(self) -> str:
        """Name of the headline: ``accuracy (%), mean of the last 3 of 3 evaluations``."""
        titles = {contestant.metrics[0].unit for contestant in self.contestants} or {self.study.first.metric.unit}
        return f"{titles.pop() if len(titles) == 1 else 'headline'}, {self.titles[self.summary]}"

    @cached_property
    def importance(self) -> dict[str, float]:
        """Importance of each domain, with the sum 1; empty with too few draws."""
        return measure_importance(
            self.study, [(contestant.values, contestant.score(self.summary).mean) for contestant in self.contestants]
        )


def collect(study: Study, state: StudyState) -> StudyResults:
    """Collect the results of a study from its runs. Without domains, only finished runs count."""
    groups: dict[tuple[tuple[str, ...], str], list[Trial]] = {}
    known, records = state.known, dict[str, RunRecord]()
    for trial in known:
        groups.setdefault((trial.labels, trial.draw), []).append(trial)
    order = {labels: index for index, labels in enumerate(study.cells)}
    groups = dict(sorted(groups.items(), key=lambda item: order[item[0][0]]))
    contestants = {key: _read_contestant(study, state, trials, records) for key, trials in groups.items()}
    compared = [_compare(study, contestant, contestants) for contestant in contestants.values()]
    if study.settings.domains:
        compared.sort(key=lambda contestant: (order[contestant.labels], *_rank(contestant, study.settings.summarised)))
    unfinished = {trial.name: state.get(trial) for trial in known if not trial.finished}
    failed = {name: trial_state.reason for name, trial_state in unfinished.items() if trial_state.status == "failed"}
    over = {trial.identity for trial in known if state.is_over(trial) or trial.name in failed}
    return StudyResults(study, tuple(_mark_best(study, compared)), failed, max(0, study.total - len(over)))


def _rank(contestant: Contestant, summary: str) -> tuple[bool, bool, bool, float]:
    """Return a sort key that puts the best contestant first: with a score, not worthless, finished, then by score."""
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
        done, finished = count_rounds(trial.run_dir), trial.finished
        row = {**dict(zip(study.axes, trial.labels, strict=True)), **trial.values, "repeat": trial.repeat}
        row |= {"run": trial.run_dir.name, "rounds": done, "finished": finished}
        row["state"] = "finished" if finished else state.get(trial).describe(done)
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
            candidates = (record.curves.get(key) for key in list_keys(trial.config, metric))
            curve = next((candidate for candidate in candidates if candidate is not None), None)
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
    paper = study.settings.paper_scores().get(trials[0].labels)
    return Contestant(tuple(trials), metrics, tuple(rows), tuple(curves), list(evaluations), paper=paper)


def summarise(curve: Curve, metric: MetricSettings, chosen: int = 0) -> dict[str, float]:
    """Summarise the evaluations of a run, without evaluations of untrained models.

    Args:
        curve: The metric over the rounds.
        metric: The metric and its direction.
        chosen: The best round by ``run.best``; 0: none.

    Returns:
        Scores by the keys of :data:`SUMMARIES`.
    """
    best = np.nanmax if metric.best == "max" else np.nanmin
    values = curve.trained
    selected = curve.values[(curve.rounds == chosen) & (curve.rounds > 0)]
    return {
        "tail": curve.tail,
        "last": float(values[-1]) if len(values) else math.nan,
        "best": float(best(values)) if np.isfinite(values).any() else math.nan,
        "chosen": float(selected[0]) if len(selected) else math.nan,
    }


def _compare(
    study: Study, contestant: Contestant, others: Mapping[tuple[tuple[str, ...], str], Contestant]
) -> Contestant:
    """Add the difference from the control to a contestant, if the control has the same metric."""
    settings, summary, papers = study.settings, study.settings.summarised, study.settings.paper_scores()
    cell = tuple(settings.control.get(name, label) for name, label in zip(study.axes, contestant.labels, strict=True))
    control, paper = others.get((cell, contestant.draw)), papers.get(cell)
    if cell == contestant.labels or (control is not None and control.metrics[0].unit != contestant.metrics[0].unit):
        return contestant
    return replace(
        contestant,
        difference=None if control is None else Difference.between(contestant.score(summary), control.score(summary)),
        paper_difference=None if contestant.paper is None or paper is None else contestant.paper[0] - paper[0],
    )


def _mark_best(study: Study, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Mark the best contestants (several for equal scores) of each group.

    A group has the cells with equal labels except on the last axis. With domains, it has the draws of a cell.
    """
    search, groups = bool(study.settings.domains), dict[tuple[str, ...], list[Contestant]]()
    for contestant in contestants:
        groups.setdefault(contestant.labels if search else contestant.labels[:-1], []).append(contestant)
    best: set[int] = set()
    for group in groups.values():
        ranks = {
            id(contestant): _rank(contestant, study.settings.summarised) for contestant in group if contestant.complete
        }
        ranks = {key: rank for key, rank in ranks.items() if not rank[0]}  # Only contestants with a score.
        comparable = search or all(contestant.complete for contestant in group)
        if (
            comparable
            and len(set(ranks.values())) > 1
            and len({contestant.metrics[0].title for contestant in group}) == 1
        ):
            best |= {key for key, rank in ranks.items() if rank == min(ranks.values())}
    return [replace(contestant, best=id(contestant) in best) for contestant in contestants]


def measure_importance(study: Study, scored: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """Measure the permutation importance of each domain with a random forest.

    The forest predicts scores from settings. The importance of a setting is the mean increase of the squared error after shuffling
    the setting. It is measured on the training data of the forest, so it is unreliable with few trials.

    Args:
        study: The study.
        scored: Draws with their scores. Non-finite scores are ignored.

    Returns:
        Importance by domain, with the sum 1. Empty with too few scores, or if no setting has an effect.
    """
    known = [(values, score) for values, score in scored if math.isfinite(score)]
    domains = study.settings.domains
    if not domains or len(known) < FEWEST:
        return {}
    from sklearn.ensemble import RandomForestRegressor  # Importing it takes a second.
    from sklearn.inspection import permutation_importance

    positions = np.array([[domain.position(values[key]) for key, domain in domains.items()] for values, _ in known])
    scores = np.array([score for _, score in known])
    state = seed_for(study.settings.seed, 0, "", "search importance") % 2**32
    forest = RandomForestRegressor(_TREES, random_state=state, n_jobs=1).fit(positions, scores)
    rise = permutation_importance(
        forest, positions, scores, scoring="neg_mean_squared_error", n_repeats=_SHUFFLES, random_state=state, n_jobs=1
    ).importances_mean
    rise = np.maximum(rise, 0.0)
    return dict(zip(domains, (rise / rise.sum()).tolist(), strict=True)) if rise.sum() > 0 else {}
