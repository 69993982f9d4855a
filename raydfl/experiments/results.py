"""Results of a study: contestants with conclusions, plateaus, and the importance of searched settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from raydfl.core.seeds import seed_for
from raydfl.experiments.conclusions import compare, compare_pairs, conclude, find_controls, has_learned, mark_best
from raydfl.experiments.contestants import SUMMARIES, Contestant, read_contestant
from raydfl.experiments.protocol import is_untrained
from raydfl.experiments.records import RunResult
from raydfl.experiments.state import StudyState
from raydfl.experiments.statistics import Difference, get_kind
from raydfl.experiments.study import Study, Trial

FEWEST = 8
"""Minimum number of scores for an estimate of importance."""
_TREES = 200
_SHUFFLES = 20


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
        best = min(scored, key=lambda contestant: contestant.rank(self.summary), default=None)
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
        return find_controls(self.study, self.contestants)

    @cached_property
    def plateaus(self) -> dict[tuple[str, ...], float | None]:
        """Round of the plateau of each trained contestant with a held-out score, by labels; ``None``: it was still improving."""
        rule, measured = self.study.settings.plateau, (part for part in self.contestants if part.results)
        if rule is None:
            return {}
        return {
            part.labels: part.find_plateau(rule, self.study)
            for part in measured
            if not is_untrained(part.labels) and part.find_held_out_curve(self.study) is not None
        }

    @cached_property
    def changed(self) -> list[Contestant]:
        """Contestants with the differences of their last evaluations, if the conclusion changes."""
        if self.summary != "tail":
            return []
        study = replace(self.study, settings=self.study.settings.model_copy(update={"summary": "last"}))
        others = {(part.labels, part.draw): part for part in self.contestants}
        last = conclude(study, [compare(study, part, others) for part in self.contestants])
        return [
            new
            for part, new in zip(self.contestants, last, strict=True)
            if part.difference is not None and not is_untrained(part.labels)
            if get_kind(part.conclusion) != get_kind(new.conclusion)
        ]

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
    contestants = {key: read_contestant(study, state, trials, read) for key, trials in groups.items()}
    controls = find_controls(study, contestants.values())
    contestants = {
        key: replace(
            contestant, learned=has_learned(contestant, controls.get(study.get_data_labels(contestant.labels)))
        )
        for key, contestant in contestants.items()
    }
    compared = [compare(study, contestant, contestants) for contestant in contestants.values()]
    compared = conclude(study, compared)
    if study.settings.domains:
        compared.sort(key=lambda contestant: (order[contestant.labels], *contestant.rank(study.settings.summarised)))
    unfinished = {trial.name: state.get(trial) for trial in known if not trial.finished}
    failed = {name: trial_state.reason for name, trial_state in unfinished.items() if trial_state.status == "failed"}
    over = {trial.identity for trial in known if state.is_over(trial) or trial.name in failed}
    further = compare_pairs(study, {contestant.labels: contestant for contestant in compared})
    return StudyResults(study, tuple(mark_best(study, compared)), failed, max(0, study.total - len(over)), further)


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
