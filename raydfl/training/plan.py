"""Plan: composition of training batches from several pools of examples.

A client's training examples may be in several pools: ``step.data.train`` is the first, ``step.data.pools`` has all by name.
Without a plan :func:`raydfl.training.fit` uses the first pool only. A plan concatenates the pools and draws positions in the
result, so that every executor needs arrays of positions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from raydfl.core.errors import ConfigError, nearest
from raydfl.data import ClientData, Examples
from raydfl.training.step import Step

POOL = "pool"
"""Column of a planned batch with each example's pool: its position in ``Plan.rows``, from 0."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of examples from each pool in a batch, and of batches in an epoch.

    Each pool is traversed in random order, and again in a new order if the epoch is longer. No example appears twice in a
    batch, even where two orders meet (exception: ``repeats``). Pools without examples at a client are skipped. If the leading
    pool is empty, the first pool with examples leads.
    """

    rows: Mapping[str, int]
    """Examples in a batch by pool name. A smaller pool contributes all its examples (see ``repeats``)."""
    leads: str | None = None
    """Pool that an epoch traverses once. Its last batch may be smaller. ``None``: the first pool of ``rows``."""
    steps: int | None = None
    """Batches in an epoch, instead of a leading pool."""
    repeats: bool = False
    """Whether a pool smaller than its rows fills them by repeating examples within a batch."""

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ConfigError: no pool, a number below 1, or a leading pool outside ``rows``.
        """
        if not self.rows or any(count < 1 for count in self.rows.values()):
            raise ConfigError(f"Plan(rows={dict(self.rows)}): give at least one pool, and at least 1 example of each.")
        if self.leads is not None and self.leads not in self.rows:
            raise ConfigError(f"Plan(leads={self.leads!r}): no such pool in rows. {nearest(self.leads, self.rows)}")
        if self.steps is not None and (self.steps < 1 or self.leads is not None):
            raise ConfigError(f"Plan(steps={self.steps}): give at least 1 step, and either steps or leads.")

    def examples(self, data: ClientData) -> Examples:
        """Concatenate a client's examples of the plan's pools, with the column :data:`POOL`.

        Raises:
            ConfigError: the run has no pool with this name.
        """
        for name in self.rows:
            if name not in data.pools:
                raise ConfigError(
                    f"The method's Plan(rows=...) names the pool {name!r}, but the run has no such pool. Create pools with "
                    f"data.pools or data.unlabelled. {nearest(name, data.pools)}"
                )
        return Examples.concatenate([data.pools[name] for name in self.rows], POOL)

    def order(self, examples: Examples, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw the batches of one epoch.

        Args:
            examples: result of :meth:`examples`.
            rng: generator for the shuffles.

        Returns:
            Positions in ``examples`` of each batch, int64 [at most the sum of rows]. Empty if all pools are empty.
        """
        pools = [np.flatnonzero(examples.columns[POOL] == number) for number in range(len(self.rows))]
        nonempty = [number for number, pool in enumerate(pools) if len(pool)]
        if not nonempty:
            return []
        rows = [
            count if self.repeats else min(count, len(pool))
            for count, pool in zip(self.rows.values(), pools, strict=True)
        ]
        leader = 0 if self.leads is None else [*self.rows].index(self.leads)
        leader = leader if leader in nonempty else nonempty[0]
        steps = self.steps if self.steps is not None else -(-len(pools[leader]) // rows[leader])
        fixed_length = self.steps is not None
        streams = {
            number: _draw_rows(pools[number], rows[number], rng, fixed_length or number != leader)
            for number in nonempty
        }
        return [np.concatenate([next(streams[number]) for number in nonempty]) for _ in range(steps)]


def _draw_rows(pool: np.ndarray, rows: int, rng: np.random.Generator, restart: bool) -> Iterator[np.ndarray]:
    """Yield ``rows`` positions of a pool at a time, without repeats in a batch if the pool is large enough.

    With ``restart`` a new order continues the pool without end. Otherwise the last batch may be smaller.
    """
    order = rng.permutation(pool)
    while True:
        while restart and len(order) < rows:
            fresh = rng.permutation(pool)
            # These complete the last batch of the old order, so they must differ from its remaining positions.
            filling = fresh[~np.isin(fresh, order)][: rows - len(order)]
            order = np.concatenate([order, filling, fresh[~np.isin(fresh, filling)]])
        if not len(order):
            return
        yield order[:rows]
        order = order[rows:]


def draw_order(step: Step, examples: Examples, plan: Plan | None) -> list[np.ndarray]:
    """Draw the positions of each batch of a client's epoch from its step's generator."""
    return examples.order(step.training.batch_size, step.rng) if plan is None else plan.order(examples, step.rng)


def find_weights(step: Step, examples: Examples) -> np.ndarray | None:
    """Return the weight of each of a client's examples, float32 [examples]. ``None`` without class weights."""
    return balance_classes(np.asarray(examples.labels)) if step.training.class_weights == "balanced" else None


def balance_classes(labels: np.ndarray) -> np.ndarray:
    """Compute weights of examples with the mean 1 and equal sums for all classes that occur.

    Args:
        labels: Labels of a client's training examples, int64 [examples].

    Returns:
        float32 [examples].
    """
    counts = np.bincount(labels)
    weights: np.ndarray = len(labels) / (np.count_nonzero(counts) * counts[labels])
    return weights.astype(np.float32)
