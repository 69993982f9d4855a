"""Results of a study: each contestant's scores, its difference from the control, and its rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from raydfl.core.metrics import base_name
from raydfl.core.seeds import seed_for
from raydfl.experiments.protocol import is_untrained
from raydfl.experiments.records import RunResult, read_result, write_result
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.state import StudyState
from raydfl.experiments.statistics import Difference, Spread, describe_difference, find_significant
from raydfl.experiments.study import Study, Trial, count_rounds
from raydfl.runs.report import Curve, PlateauSettings, align, find_plateau

SUMMARIES = {
    "tail": "mean of the last evaluations",
    "last": "last evaluation",
    "best": "best evaluation",
    "chosen": "in the round of run.best",
}
"""Descriptions of the summaries of a run's evaluations."""
FEWEST = 8
"""Minimum number of scores for an estimate of importance."""
_TREES = 200
_SHUFFLES = 20


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
    learned: bool = True
    """Whether the headline is more than two standard errors better than chance and majority. True if their scores are unknown."""
    conclusion: str = ""
    """Conclusion from the difference. Empty without a difference, and in exploratory studies."""
    results: tuple[RunResult, ...] = ()
    """Results of the runs with results."""
    paper: tuple[float, float | None] | None = None
    """Mean and spread in the paper."""
    difference: Difference | None = None
    """The headline's difference from the control."""
    paper_difference: float | None = None
    """Difference from the control in the paper."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the cell."""
        return self.trials[0].labels

    @property
    def draw(self) -> str:
        """Name of the draw. Empty without domains."""
        return self.trials[0].draw

    @property
    def values(self) -> Mapping[str, Any]:
        """Drawn values by setting."""
        return self.trials[0].values

    @property
    def name(self) -> str:
        """Name of the cell and the draw, for tables and messages."""
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
        """Largest number of completed rounds of a run."""
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

    def find_curves(self, metric: int) -> list[Curve]:
        """Return a metric over the rounds of each run that measured it, in the table's unit.

        Args:
            metric: Index of the metric; 0: the headline.
        """
        trials = {trial.result[0]: trial for trial in self.trials}
        curves = (result.find_curve(trials[result.identity], self.metrics[metric]) for result in self.results)
        return [curve for curve in curves if curve is not None]

    @property
    def budget(self) -> dict[str, float]:
        """Means of the budget over the runs, by column."""
        columns = dict.fromkeys(column for result in self.results for column in result.budget)
        recorded = {
            column: [result.budget[column] for result in self.results if column in result.budget] for column in columns
        }
        return {column: float(np.mean(values)) for column, values in recorded.items()}

    @property
    def controls(self) -> dict[str, tuple[Spread, float]]:
        """Controls without training by name: scores in the table's unit, and the mean standard error on the test clips."""
        headline = self.metrics[0]
        measured, scale = (headline.split, base_name(headline.score)), headline.scale
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for result in self.results:
            for control in result.controls:
                if (control["split"], control["metric"]) == measured and control["value"] is not None:
                    error = control["standard_error"]
                    found.setdefault(control["name"], {})[result.repeat] = (
                        scale * control["value"],
                        math.nan if error is None else scale * error,
                    )
        return {
            name: (
                Spread({repeat: value for repeat, (value, _) in values.items()}),
                float(np.mean([error for _, error in values.values()])),
            )
            for name, values in found.items()
        }

    def score_at_plateau(self, rule: PlateauSettings, study: Study) -> Spread:
        """Return the headline at each run's own plateau: the mean of the evaluations of the rule.

        Runs without a plateau have no value.
        """
        values = {}
        for result in self.results:
            trial = next(trial for trial in self.trials if trial.result[0] == result.identity)
            held_out, curve = (
                result.find_curve(trial, study.make_plateau_metric(trial)),
                result.find_curve(trial, self.metrics[0]),
            )
            place = None if held_out is None else find_plateau(held_out, rule, self.metrics[0].sign)
            if held_out is not None and curve is not None and place is not None:
                rounds = held_out.rounds[place : place + 1 + rule.evaluations]
                values[result.repeat] = float(np.mean(curve.values[np.isin(curve.rounds, rounds)]))
        return Spread(values)

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
    further: Mapping[str, tuple[Difference, str]] = field(default_factory=dict)
    """Differences and conclusions of the further pairs of ``compare``, by ``A minus B``."""

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
        trained = [contestant for contestant in self.contestants if not is_untrained(contestant.labels)]
        counts = Counter(text for contestant in trained for text in contestant.evaluations)
        return [text for text, _ in counts.most_common()]

    @property
    def headline(self) -> str:
        """Name of the headline: ``accuracy (%), mean of the last 3 of 3 evaluations``."""
        titles = {contestant.metrics[0].unit for contestant in self.contestants} or {self.study.first.metric.unit}
        return f"{titles.pop() if len(titles) == 1 else 'headline'}, {self.titles[self.summary]}"

    @property
    def controls(self) -> dict[tuple[str, ...], Contestant]:
        """A contestant with controls for each cell, by the labels of all axes except the contestants' axis.

        The controls without training depend only on the data.
        """
        return _find_controls(self.study, self.contestants)

    @cached_property
    def plateaus(self) -> dict[tuple[str, ...], float | None]:
        """Round of the plateau of each control, by labels; ``None``: the mean validation score was still rising at the end."""
        rule, control = self.study.settings.plateau, self.study.settings.control
        found = dict[tuple[str, ...], float | None]()
        for contestant in self.contestants if rule is not None else ():
            if all(
                control.get(name, label) == label
                for name, label in zip(self.study.axes, contestant.labels, strict=True)
            ):
                found[contestant.labels] = _find_mean_plateau(contestant, rule, self.study)  # type: ignore[arg-type]
        return found

    @cached_property
    def importance(self) -> dict[str, float]:
        """Importance of each domain, with the sum 1; empty with too few draws."""
        return measure_importance(
            self.study, [(contestant.values, contestant.score(self.summary).mean) for contestant in self.contestants]
        )


def collect(study: Study, state: StudyState) -> StudyResults:
    """Collect the results of a study from its runs. Without domains, only finished runs count."""
    groups: dict[tuple[tuple[str, ...], str], list[Trial]] = {}
    known, read = state.known, dict[str, RunResult]()
    for trial in known:
        groups.setdefault((trial.labels, trial.draw), []).append(trial)
    order = {labels: index for index, labels in enumerate(study.cells)}
    groups = dict(sorted(groups.items(), key=lambda item: order[item[0][0]]))
    contestants = {key: _read_contestant(study, state, trials, read) for key, trials in groups.items()}
    controls = _find_controls(study, contestants.values())
    contestants = {
        key: replace(
            contestant, learned=_has_learned(contestant, controls.get(study.get_data_labels(contestant.labels)))
        )
        for key, contestant in contestants.items()
    }
    compared = [_compare(study, contestant, contestants) for contestant in contestants.values()]
    compared = _conclude(study, compared)
    if study.settings.domains:
        compared.sort(key=lambda contestant: (order[contestant.labels], *_rank(contestant, study.settings.summarised)))
    unfinished = {trial.name: state.get(trial) for trial in known if not trial.finished}
    failed = {name: trial_state.reason for name, trial_state in unfinished.items() if trial_state.status == "failed"}
    over = {trial.identity for trial in known if state.is_over(trial) or trial.name in failed}
    further = _compare_pairs(study, {contestant.labels: contestant for contestant in compared})
    return StudyResults(study, tuple(_mark_best(study, compared)), failed, max(0, study.total - len(over)), further)


def _rank(contestant: Contestant, summary: str) -> tuple[bool, bool, bool, float]:
    """Return a sort key that puts the best contestant first: with a score, not worthless, finished, then by score."""
    mean = contestant.score(summary).mean
    loss = -contestant.metrics[0].sign * mean
    return (
        math.isnan(mean),
        bool(contestant.worthless) or not contestant.learned,
        not contestant.complete,
        0.0 if math.isnan(loss) else loss,
    )


def _read_contestant(
    study: Study, state: StudyState, trials: Sequence[Trial], known: dict[str, RunResult]
) -> Contestant:
    metrics = (trials[0].metric, *(study.resolve(metric, trials[0].config) for metric in study.settings.also))
    curves: list[Curve] = []
    rows: list[dict[str, Any]] = []
    results: list[RunResult] = []
    evaluations: dict[str, None] = {}
    for trial in trials:
        finished = trial.finished
        stored = finished and trial.result_file is not None
        done = trial.config.train.rounds if stored else count_rounds(trial.run_dir)
        row = {**dict(zip(study.axes, trial.labels, strict=True)), **trial.values, "repeat": trial.repeat}
        row |= {"run": trial.run_dir.name, "rounds": done, "finished": finished}
        row["state"] = "finished" if finished else state.get(trial).describe(done)
        rows.append(row)
        if not finished and not (study.settings.domains and done):
            continue
        if trial.identity not in known:
            if finished:
                write_result(study, trial)
            known[trial.identity] = read_result(study, trial)
        result = replace(known[trial.identity], repeat=trial.repeat)
        results.append(result)
        row["rounds"] = result.rounds
        row["problems"] = result.problems
        row["worthless"] = finished and result.worthless
        for place, metric in enumerate(metrics):
            curve = result.find_curve(trial, metric)
            if curve is None:
                continue
            if not place:
                row["evaluations"] = (
                    f"{curve.tail_text}, every {f'{result.every} rounds' if result.every > 1 else 'round'}"
                )
                evaluations[row["evaluations"]] = None
                curves.append(curve)
            for summary, value in summarise(curve, metric, result.chosen).items():
                if summary in (study.settings.summarised, "tail", "last", "best"):
                    row[f"{metric.title}, {SUMMARIES[summary]}"] = value
    paper = study.settings.paper_scores().get(trials[0].labels)
    return Contestant(
        tuple(trials), metrics, tuple(rows), tuple(curves), list(evaluations), paper=paper, results=tuple(results)
    )


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


def _find_mean_plateau(control: Contestant, rule: PlateauSettings, study: Study) -> float | None:
    """Return the round of the plateau of the mean validation curve of a control's runs."""
    trials = {trial.result[0]: trial for trial in control.trials}
    curves = [
        result.find_curve(trial, study.make_plateau_metric(trial))
        for result in control.results
        for trial in [trials[result.identity]]
    ]
    if not curves or any(curve is None for curve in curves):
        return None
    rounds, values, totals = align([curve for curve in curves if curve is not None])
    mean = Curve(rounds, values.mean(axis=0), totals.sum(axis=0))
    place = find_plateau(mean, rule, control.metrics[0].sign)
    return None if place is None else float(rounds[place])


def _find_controls(study: Study, contestants: Iterable[Contestant]) -> dict[tuple[str, ...], Contestant]:
    """Find a contestant with controls for the data of each cell."""
    measured = [
        (study.get_data_labels(contestant.labels), contestant) for contestant in contestants if contestant.controls
    ]
    return dict(reversed(measured))


def _has_learned(contestant: Contestant, measured: Contestant | None) -> bool:
    """Return whether the mean of the last evaluations is more than two standard errors better than chance and majority.

    An unknown standard error (of rankings such as the equal error rate) counts as 0.
    """
    mean, sign = contestant.score("tail").mean, contestant.metrics[0].sign
    controls = {} if measured is None else measured.controls
    levels = [controls[name] for name in ("chance", "majority") if name in controls]
    return math.isnan(mean) or all(
        sign * (mean - level.mean) > (0.0 if math.isnan(error) else 2 * error) for level, error in levels
    )


def _conclude(study: Study, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Add conclusions to the contestants of a confirmatory study."""
    by_labels = {contestant.labels: contestant for contestant in contestants}
    significant = find_significant(_compute_p_values(contestants), study.comparisons)
    concluded = []
    for contestant in contestants:
        control = by_labels.get(study.find_control(contestant.labels), contestant)
        decided = contestant.labels in significant
        conclusion = _describe_conclusion(study, contestant, control, contestant.difference, decided, study.comparisons)
        concluded.append(replace(contestant, conclusion=conclusion))
    return concluded


def _compute_p_values(contestants: Iterable[Contestant]) -> dict[str | tuple[str, ...], float]:
    """Compute the p-values of all differences from the control with the planned number of repeats."""
    return {
        contestant.labels: contestant.difference.p_value
        for contestant in contestants
        if contestant.difference is not None and _is_complete(contestant, contestant.difference)
    }


def _is_complete(contestant: Contestant, difference: Difference) -> bool:
    """Return whether a difference has the planned number of repeats. A decision before would favour chance results."""
    return difference.n == len(contestant.trials)


def _describe_conclusion(
    study: Study,
    contestant: Contestant,
    control: Contestant,
    difference: Difference | None,
    significant: bool,
    comparisons: int,
) -> str:
    """Describe the conclusion from a difference between two contestants, or the reason for a missing conclusion.

    Exploratory studies have no conclusions.
    """
    if not study.settings.confirmatory:
        return ""
    if difference is not None and not _is_complete(contestant, difference):
        return "unfinished"
    if not contestant.learned:
        return "did not learn"
    if difference is None:
        return ""
    sign, smallest = contestant.metrics[0].sign, study.settings.difference
    conclusion = describe_difference(difference, significant, comparisons, smallest, sign)
    trained = [part.labels for part in (contestant, control) if not is_untrained(part.labels)]
    if set(trained) & set(study.untuned):
        conclusion += " (not tuned)"
    return conclusion + ("" if control.learned else ", but the control did not learn")


def _compare_pairs(
    study: Study, contestants: Mapping[tuple[str, ...], Contestant]
) -> dict[str, tuple[Difference, str]]:
    """Compare the further pairs of contestants with the same metric.

    They are corrected for all comparisons, because they may be added after the results are known. The comparisons with the
    control are not corrected for them.
    """
    pairs, summary = study.list_pairs(), study.settings.summarised
    comparisons = study.comparisons + len(pairs)
    found: dict[str, tuple[Contestant, Contestant, Difference]] = {}
    for labels in pairs:
        if all(label in contestants for label in labels):
            first, second = (contestants[label] for label in labels)
            difference = Difference.between(first.score(summary), second.score(summary))
            if difference is not None and first.metrics[0].unit == second.metrics[0].unit:
                common = [a for a, b in zip(*labels, strict=True) if a == b]
                names = [", ".join(text for text in label if text not in common) for label in labels]
                where = f" ({', '.join(common)})" if common else ""
                found[f"{names[0]} minus {names[1]}{where}"] = first, second, difference
    p_values = _compute_p_values(contestants.values())
    p_values |= {
        name: difference.p_value for name, (first, _, difference) in found.items() if _is_complete(first, difference)
    }
    significant = find_significant(p_values, comparisons)
    return {
        name: (difference, _describe_conclusion(study, first, second, difference, name in significant, comparisons))
        for name, (first, second, difference) in found.items()
    }


def _compare(
    study: Study, contestant: Contestant, others: Mapping[tuple[tuple[str, ...], str], Contestant]
) -> Contestant:
    """Add the difference from the control to a contestant, if the control has the same metric."""
    summary, papers = study.settings.summarised, study.settings.paper_scores()
    cell = study.find_control(contestant.labels)
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
        learned = {id(contestant) for contestant in group if contestant.learned}
        ranks = {key: rank for key, rank in ranks.items() if not rank[0] and key in learned}
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
        Importance by domain, with the sum 1. Empty with too few scores, if labels have own domains, or if no setting
        has an effect.
    """
    known = [(values, score) for values, score in scored if math.isfinite(score)]
    domains = study.settings.domains
    if not domains or study.searched != domains or len(known) < FEWEST:
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
