"""Population based training in turns: between two turns the worst members become changed copies of the best.

M. Jaderberg and others, Population Based Training of Neural Networks, 2017: truncation selection, and perturbation or a new
draw of each setting. Members go in step: a turn begins when all have done the rounds of the last one. So a turn is a function
of the file and of the scores, whatever the number of trials at a time, and each trial's state is a copy of a run folder that
nobody is writing to. Each member of each turn is a trial of its own: number = turn * members + member.
"""

from __future__ import annotations

import math

from raydfl.core import seeds
from raydfl.experiments.search.journal import TrialRecord
from raydfl.experiments.search.plan import Search, Trial, Values
from raydfl.experiments.search.settings import PopulationScheduler


def members_of(search: Search, scheduler: PopulationScheduler, turn: int, before: list[TrialRecord]) -> list[Trial]:
    """Return the trials of a turn.

    Args:
        turn: counted from 0.
        before: those of the turn before, all finished, by member; empty for the first turn.
    """
    rounds = search.turns[turn]
    if turn == 0:
        return [search.trial(member, search.drawn(member), rounds=rounds) for member in range(search.samples)]
    parents = _copied(search, scheduler.share, before)
    trials = []
    for member, record in enumerate(before):
        parent = parents.get(member, record)
        values = record.values if parent is record else _explored(search, scheduler, turn, member, parent.values)
        trials.append(search.trial(turn * search.samples + member, values, parent.number, rounds))
    return trials


def _copied(search: Search, share: float, before: list[TrialRecord]) -> dict[int, TrialRecord]:
    """Return, by member among the worst, the one among the best that takes its place: the worst gets the best, and so on."""
    sign = search.settings.metric.sign
    losses = [-sign * record.score if math.isfinite(record.score) else math.inf for record in before]
    ranked = sorted(range(len(before)), key=losses.__getitem__)
    count = max(1, math.floor(share * len(before)))
    return {worst: before[best] for best, worst in zip(ranked[:count], reversed(ranked), strict=False)}


def _explored(search: Search, scheduler: PopulationScheduler, turn: int, member: int, values: Values) -> Values:
    """Return the values of a copy: each one drawn anew, or moved up or down."""
    changed = {}
    for key, domain in search.settings.space.items():
        rng = seeds.generator(search.settings.seed, turn, str(member), f"search explore {key}")
        if rng.random() < scheduler.resample:
            changed[key] = domain.draw(rng)
        else:
            changed[key] = domain.neighbour(values[key], scheduler.factor, up=bool(rng.random() < 0.5))
    return changed
