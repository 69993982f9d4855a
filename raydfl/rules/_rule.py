"""Interface of aggregation rules."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.settings import StrictTypes
from raydfl.core.tensors import Layout
from raydfl.core.types import Metrics, Ratio, Tensors, Update


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """Result of an aggregation rule."""

    tensors: dict[str, dict[str, Tensor]]
    """The server's new tensors by key and name, float32. A rule with a memory stores it under an additional key and reads it
    from ``current`` in the next round."""
    report: Mapping[str, Ratio]
    """Metrics of the rule, for example ``"lpa/pruned/plugin/gru"``: clients excluded from a layer, out of all clients."""
    influence: np.ndarray | None = None
    """Influence of each update: float64 [updates], from 0 (excluded) to 1 (as in a plain mean). ``None`` if the rule does not
    rate whole clients."""

    def metrics(self) -> Metrics:
        """Compute the metrics of the round.

        Returns:
            The report, and, if the rule rates clients: ``rule/left_out`` (clients of influence 0), ``rule/influence`` (the
            mean) and ``rule/influences`` (the array).
        """
        if self.influence is None:
            return dict(self.report)
        clients = len(self.influence)
        return {
            **self.report,
            "rule/left_out": Ratio(float(np.count_nonzero(self.influence == 0)), clients),
            "rule/influence": Ratio(float(self.influence.sum()), clients),
            "rule/influences": self.influence,
        }


@dataclass(frozen=True)
class Rule(StrictTypes, ABC):
    """Base class of aggregation rules. The fields of a subclass are its options."""

    relative: ClassVar[bool] = False
    """True if the rule measures updates from the server's tensors. Such a rule is rejected for methods whose clients send
    differences (:attr:`raydfl.Method.changes`), because differences are not close to the server's tensors."""

    changes_basis: ClassVar[bool] = False
    """True if an aggregate is in another basis than the tensors of earlier rounds. Such a rule is rejected for methods with an
    ``aggregate`` of their own and for ``train.fleet``, because these combine tensors of several rounds."""

    associative: ClassVar[bool] = False
    """True if :meth:`sum_updates` may add the updates of several clients before they reach the server (``train.block``). A subclass
    with a :meth:`__call__` of its own declares it again."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset :attr:`associative` if the subclass combines the updates itself."""
        super().__init_subclass__(**options)
        if "__call__" in vars(cls) and "associative" not in vars(cls):
            cls.associative = False

    @property
    def collects(self) -> bool:
        """True if the rule holds all updates of a round in memory. The server then rejects cohorts that do not fit."""
        return False

    def check(self, tensors: Mapping[str, Tensors]) -> None:
        """Check the server's initial tensors. The default accepts all.

        Args:
            tensors: the server's tensors by key, before the first round.

        Raises:
            ConfigError: the rule cannot aggregate these tensors.
        """

    @abstractmethod
    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Combine the updates of a round.

        Args:
            updates: updates with finite tensors, in client order. They can be read once. Some may be cut:
                :func:`raydfl.rules.fill_cuts` expands them.
            current: the server's tensors by key. Tensors without an update are returned unchanged.
            rng: generator for randomised rules, seeded by run and round.

        Raises:
            RaydflError: tensors of one name differ in shape, a weight is missing, negative, not finite or has the wrong
                shape, or ``rng`` is missing for a randomised rule.
        """

    def sum_updates(self, updates: Iterable[Update], layouts: Mapping[str, Layout]) -> list[Update]:
        """Add the updates of several clients, for a rule with :attr:`associative`.

        Args:
            updates: updates with finite tensors, in client order. They can be read once.
            layouts: layouts of the server's tensors by key.

        Returns:
            A partial sum for each key (:attr:`raydfl.Update.senders`). The rule accepts it in place of the updates.
        """
        raise NotImplementedError(f"{type(self).__name__} is associative, but has no method sum_updates.")


@dataclasses.dataclass(frozen=True)
class Selection:
    """Choice of a rule among the tensors of all clients of a round."""

    kept: Mapping[str, np.ndarray]
    """Tensors to add, by key: bool [clients, tensors]."""
    metrics: Metrics
    """Metrics of the rule, for the first sum of the chosen tensors."""


class TwoPassRule(Rule):
    """Base class of rules that compare each update with the mean of all updates before they add the updates.

    With blocks (``train.block``), the workers keep their clients' updates. :meth:`sum_updates` adds whole updates for the mean.
    Then the engine goes through the updates twice: it measures each update, and it adds the tensors that :meth:`select` chooses.
    """

    @abstractmethod
    def measure_update(self, update: Update, means: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Compare an update with the means.

        Args:
            update: the update of a client, without cuts.
            means: sum of each tensor over its senders, divided by their number: float64 [elements] by tensor name.

        Returns:
            A finite number for each tensor of the update.
        """

    @abstractmethod
    def select(self, measured: Mapping[str, np.ndarray], layouts: Mapping[str, Layout]) -> Selection:
        """Choose among the tensors of all clients.

        Args:
            measured: results of :meth:`measure_update` by key: float64 [clients, tensors], NaN for missing tensors.
            layouts: names and shapes of the tensors by key, in the order of the columns.
        """

    @abstractmethod
    def add_selected(self, updates: Iterable[Update], layouts: Mapping[str, Layout]) -> list[Update]:
        """Add updates reduced to their chosen tensors, like :meth:`sum_updates`. The rule accepts the sums as updates."""


def merge_tensors(
    changed: dict[str, dict[str, Tensor]], current: Mapping[str, Tensors]
) -> dict[str, dict[str, Tensor]]:
    """Replace changed tensors in the server's tensors. Names keep their order, and new names come last."""
    keys = dict.fromkeys((*current, *changed))
    return {key: {**current.get(key, {}), **changed.get(key, {})} for key in keys}
