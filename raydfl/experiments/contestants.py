"""Contestants of a study: the scores, curves and budgets of a cell's runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raydfl.core.metrics import base_name
from raydfl.experiments.records import RunResult, read_result, write_result
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.state import StudyState
from raydfl.experiments.statistics import Difference, Spread
from raydfl.experiments.study import Study, Trial, count_rounds
from raydfl.runs.report import Curve, PlateauSettings, align, find_plateau

SUMMARIES = {
    "tail": "mean of the last evaluations",
    "last": "last evaluation",
    "best": "best evaluation",
    "chosen": "in the round of run.best",
}
"""Descriptions of the summaries of a run's evaluations."""


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

    def find_held_out_curve(self, study: Study) -> Curve | None:
        """Return the runs' mean score on held-out data over the rounds; ``None`` if a run did not measure it."""
        trials = {trial.result[0]: trial for trial in self.trials}
        found = [
            result.find_curve(trials[result.identity], study.make_plateau_metric(trials[result.identity]))
            for result in self.results
        ]
        curves = [curve for curve in found if curve is not None]
        if not curves or len(curves) < len(found):
            return None
        rounds, values, totals = align(curves)
        return Curve(rounds, values.mean(axis=0), totals.sum(axis=0))

    def find_plateau(self, rule: PlateauSettings, study: Study) -> float | None:
        """Return the round of the plateau of the mean held-out score; ``None`` if it was still improving, or is not known."""
        curve = self.find_held_out_curve(study)
        place = None if curve is None else find_plateau(curve, rule, study.make_plateau_metric(self.trials[0]).sign)
        return None if curve is None or place is None else float(curve.rounds[place])

    def score_at_plateau(self, rule: PlateauSettings, study: Study) -> Spread:
        """Return the mean of the headline's evaluations from the plateau on. Without a plateau, no run has a value."""
        start = self.find_plateau(rule, study)
        if start is None:
            return Spread({})
        trials = {trial.result[0]: trial for trial in self.trials}
        values = {}
        for result in self.results:
            curve = result.find_curve(trials[result.identity], self.metrics[0])
            if curve is not None:
                values[result.repeat] = float(np.mean(curve.values[curve.rounds >= start]))
        return Spread(values)

    def rank(self, summary: str) -> tuple[bool, bool, bool, float]:
        """Return a sort key that puts the best contestant first: with a score, not worthless, finished, then by score."""
        mean = self.score(summary).mean
        loss = -self.metrics[0].sign * mean
        return (
            math.isnan(mean),
            bool(self.worthless) or not self.learned,
            not self.complete,
            0.0 if math.isnan(loss) else loss,
        )

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


def read_contestant(
    study: Study, state: StudyState, trials: Sequence[Trial], known: dict[str, RunResult]
) -> Contestant:
    """Read the results of a cell with a draw. Without domains, only finished runs count.

    Args:
        study: The study.
        state: State of the study's runs.
        trials: The cell's trials, one per repeat.
        known: Results of runs by identity, extended by those of new trials.
    """
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
            for summary, value in _summarise(curve, metric, result.chosen).items():
                if summary in (study.settings.summarised, "tail", "last", "best"):
                    row[f"{metric.title}, {SUMMARIES[summary]}"] = value
    paper = study.settings.paper_scores().get(trials[0].labels)
    return Contestant(
        tuple(trials), metrics, tuple(rows), tuple(curves), list(evaluations), paper=paper, results=tuple(results)
    )


def _summarise(curve: Curve, metric: MetricSettings, chosen: int = 0) -> dict[str, float]:
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
