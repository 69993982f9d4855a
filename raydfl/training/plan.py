"""Plan: which examples of which pools each batch of a training is made of.

A client's training examples may be in several pools (``step.data.train`` is the first, ``step.data.pools`` has all by name).
Without a plan :func:`raydfl.training.fit` goes through the first alone. With one, the pools are laid end to end and the plan
draws positions in them, so that every executor needs arrays of positions and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from raydfl.core.errors import ConfigError, nearest
from raydfl.data import ClientData, Examples
from raydfl.training.step import Step

POOL = "pool"
"""The column of a planned batch that says which of the plan's pools each example is of: 0 for the first that the plan names."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of examples of each pool in a batch, and of batches in an epoch.

    Each pool is gone through in random order; a pool that ends before the epoch does begins again in a new order. No example is
    twice in a batch (but see ``repeats``), also where a batch has the end of one order and the beginning of the next. A pool that
    has no examples at this client gives none, and when it is the one that leads, the first pool that has some leads.
    """

    rows: Mapping[str, int]
    """Examples of each pool in a batch, by the pool's name. A pool smaller than that gives all it has (see ``repeats``)."""
    leads: str | None = None
    """The pool that an epoch goes through once; its last batch may have fewer examples of it. ``None``: the first of ``rows``."""
    steps: int | None = None
    """Batches of an epoch, in place of a pool that leads."""
    repeats: bool = False
    """True: a pool smaller than its rows fills them, with some examples several times in a batch."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: no pool, a number below 1, or a leading pool that is not among ``rows``.
        """
        if not self.rows or any(count < 1 for count in self.rows.values()):
            raise ConfigError(f"Plan(rows={dict(self.rows)}): give at least one pool, and at least 1 example of each")
        if self.leads is not None and self.leads not in self.rows:
            raise ConfigError(f"Plan(leads={self.leads!r}): no such pool in rows; {nearest(self.leads, self.rows)}")
        if self.steps is not None and (self.steps < 1 or self.leads is not None):
            raise ConfigError(f"Plan(steps={self.steps}): give at least 1 step, and either steps or leads")

    def examples(self, data: ClientData) -> Examples:
        """Return the client's examples of the plan's pools, end to end, with the column :data:`POOL`.

        Raises:
            ConfigError: the federation has no pool of that name.
        """
        for name in self.rows:
            if name not in data.pools:
                raise ConfigError(
                    f"the method's Plan(rows=...) names the pool {name!r}, which the clients of this run do not have; "
                    f"{nearest(name, data.pools)}; data.pools and data.unlabelled make pools"
                )
        return Examples.concatenate([data.pools[name] for name in self.rows], POOL)

    def order(self, examples: Examples, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the positions (int64 [at most the sum of rows]) of each batch of one epoch.

        Args:
            examples: what :meth:`examples` returned.
            rng: shuffles.
        """
        pools = [np.flatnonzero(examples.columns[POOL] == number) for number in range(len(self.rows))]
        full = [number for number, pool in enumerate(pools) if len(pool)]
        if not full:
            return []
        rows = [
            count if self.repeats else min(count, len(pool))
            for count, pool in zip(self.rows.values(), pools, strict=True)
        ]
        leader = 0 if self.leads is None else [*self.rows].index(self.leads)
        leader = leader if leader in full else full[0]
        steps = self.steps if self.steps is not None else -(-len(pools[leader]) // rows[leader])
        whole = self.steps is not None
        drawn = {number: _draw(pools[number], rows[number], rng, whole or number != leader) for number in full}
        return [np.concatenate([next(drawn[number]) for number in full]) for _ in range(steps)]


def _draw(pool: np.ndarray, rows: int, rng: np.random.Generator, again: bool) -> Iterator[np.ndarray]:
    """Yield ``rows`` positions of a pool at a time, none twice in a batch if the pool has so many.

    After the pool's end comes what is left of it, or with ``again`` that and the beginning of a new order.
    """
    order = rng.permutation(pool)
    while True:
        while again and len(order) < rows:
            fresh = rng.permutation(pool)
            beside = fresh[~np.isin(fresh, order)][: rows - len(order)]  # in one batch with the rest of the old order
            order = np.concatenate([order, beside, fresh[~np.isin(fresh, beside)]])
        if not len(order):
            return
        yield order[:rows]
        order = order[rows:]


def order_of(step: Step, examples: Examples, plan: Plan | None) -> list[np.ndarray]:
    """Return the positions of each batch of one epoch of a client, drawn from its step's generator."""
    return examples.order(step.training.batch_size, step.rng) if plan is None else plan.order(examples, step.rng)
