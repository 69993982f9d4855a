"""Conclusions of a study: contestants that learned, differences from the control, and the best contestants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from raydfl.experiments.contestants import Contestant
from raydfl.experiments.protocol import is_untrained
from raydfl.experiments.statistics import Difference, Key, describe_difference, find_significant
from raydfl.experiments.study import Study


def find_controls(study: Study, contestants: Iterable[Contestant]) -> dict[tuple[str, ...], Contestant]:
    """Find the first contestant with the most controls for the data of each cell. Older results have fewer controls."""
    found: dict[tuple[str, ...], Contestant] = {}
    for contestant in contestants:
        labels = study.get_data_labels(contestant.labels)
        if contestant.controls and (labels not in found or len(contestant.controls) > len(found[labels].controls)):
            found[labels] = contestant
    return found


def has_learned(contestant: Contestant, measured: Contestant | None) -> bool:
    """Return whether the mean of the last evaluations is more than two standard errors better than chance and majority.

    An unknown standard error (of rankings such as the equal error rate) counts as 0.
    """
    mean, sign = contestant.score("tail").mean, contestant.metrics[0].sign
    controls = {} if measured is None else measured.controls
    levels = [controls[name] for name in ("chance", "majority") if name in controls]
    return math.isnan(mean) or all(
        sign * (mean - level.mean) > (0.0 if math.isnan(error) else 2 * error) for level, error in levels
    )


def compare(
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


def conclude(study: Study, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Add conclusions to the contestants of a confirmatory study."""
    by_labels = {contestant.labels: contestant for contestant in contestants}
    significant = find_significant(_compute_p_values(by_labels.items()), study.comparisons)
    concluded = []
    for contestant in contestants:
        control = by_labels.get(study.find_control(contestant.labels), contestant)
        conclusion = _describe_conclusion(
            study, contestant, control, contestant.labels in significant, study.comparisons
        )
        concluded.append(replace(contestant, conclusion=conclusion))
    return concluded


def compare_pairs(study: Study, contestants: Mapping[tuple[str, ...], Contestant]) -> dict[str, tuple[Difference, str]]:
    """Compare the further pairs of contestants with the same metric.

    The correction is for all comparisons, because pairs may be added after the results are known. The comparisons with the
    control have a correction for their own number.
    """
    pairs, summary = study.list_pairs(), study.settings.summarised
    comparisons = study.comparisons + len(pairs)
    found: dict[str, tuple[Contestant, Contestant]] = {}
    for labels in pairs:
        if all(label in contestants for label in labels):
            first, second = (contestants[label] for label in labels)
            difference = Difference.between(first.score(summary), second.score(summary))
            if difference is not None and first.metrics[0].unit == second.metrics[0].unit:
                common = [a for a, b in zip(*labels, strict=True) if a == b]
                names = [", ".join(text for text in label if text not in common) for label in labels]
                where = f" ({', '.join(common)})" if common else ""
                found[f"{names[0]} minus {names[1]}{where}"] = replace(first, difference=difference), second
    p_values = _compute_p_values([*contestants.items(), *((name, first) for name, (first, _) in found.items())])
    significant = find_significant(p_values, comparisons)
    return {
        name: (first.difference, _describe_conclusion(study, first, second, name in significant, comparisons))
        for name, (first, second) in found.items()
        if first.difference is not None
    }


def mark_best(study: Study, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Mark the best contestants (several for equal scores) of each group.

    A group has the cells with equal labels except on the last axis. With domains, it has the draws of a cell.
    """
    search, groups = bool(study.settings.domains), dict[tuple[str, ...], list[Contestant]]()
    for contestant in contestants:
        groups.setdefault(contestant.labels if search else contestant.labels[:-1], []).append(contestant)
    best: set[int] = set()
    for group in groups.values():
        ranks = {
            id(contestant): contestant.rank(study.settings.summarised) for contestant in group if contestant.complete
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


def _compute_p_values(contestants: Iterable[tuple[Key, Contestant]]) -> dict[Key, float]:
    """Compute the p-values of all differences with the planned number of repeats. A decision before would favour chance."""
    return {
        key: contestant.difference.p_value
        for key, contestant in contestants
        if contestant.difference is not None and contestant.difference.n == len(contestant.trials)
    }


def _describe_conclusion(
    study: Study, contestant: Contestant, control: Contestant, significant: bool, comparisons: int
) -> str:
    """Describe the conclusion from a contestant's difference, or the reason for a missing conclusion.

    Exploratory studies have no conclusions.
    """
    difference = contestant.difference
    if not study.settings.confirmatory:
        return ""
    if difference is not None and difference.n < len(contestant.trials):
        return "unfinished"
    if not contestant.learned:
        return "did not learn"
    if difference is None:
        return ""
    sign, smallest = contestant.metrics[0].sign, study.settings.difference
    conclusion = describe_difference(difference, significant, comparisons, smallest, sign)
    trained = [part.labels for part in (contestant, control) if not is_untrained(part.labels)]
    if any(labels in study.tuned and not study.tuned[labels].own for labels in trained):
        conclusion += " (not tuned)"
    return conclusion + ("" if control.learned else ", but the control did not learn")
