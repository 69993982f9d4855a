"""The interface of a rule, and what it returns."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.settings import StrictTypes
from raydfl.core.types import Metrics, Ratio, Tensors, Update


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """The result of a rule."""

    tensors: dict[str, dict[str, Tensor]]
    """By key, then by name: everything that the server had or the clients sent; float32. A rule that remembers something keeps
    it under a key of its own, which it finds in ``current`` in the next round."""
    report: Mapping[str, Ratio]
    """What the rule did: ``"lpa/pruned/plugin/gru"`` = clients left out, of the clients that took part."""
    influence: np.ndarray | None = None
    """What the rule left of each update, in the order of the updates: float64 [updates], 0 (left out) to 1 (as in a plain mean).
    ``None``: the rule does not judge clients as a whole."""

    def metrics(self) -> Metrics:
        """Return what is recorded of a round: the report, and what follows from the influence.

        ``rule/left_out`` counts the clients without any, ``rule/influence`` is its mean, and ``rule/influences`` the array.
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
    """A rule; the fields of a subclass are its options."""

    relative: ClassVar[bool] = False
    """Whether updates are measured from the server's tensors. Such a rule is refused for a method whose clients send changes of
    something besides (:attr:`raydfl.Method.changes`): those are not near the server's tensors."""

    @abstractmethod
    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Combine the updates, which are read once, in client order.

        Args:
            updates: finite tensors; each update names the key that it changes. Some may be cut: :func:`raydfl.rules.filled` gives
                them whole, with weight 0 for what was not sent.
            current: the server's tensors by key; what no update changes is returned as it is.
            rng: where a rule that draws random numbers gets them; seeded by run and round.

        Raises:
            RaydflError: tensors of one name differ in shape, or a weight is missing, negative, not finite or of another
                shape than its tensor; or the rule draws random numbers and ``rng`` is missing.
        """


def over_current(changed: dict[str, dict[str, Tensor]], current: Mapping[str, Tensors]) -> dict[str, dict[str, Tensor]]:
    """Return what the server had, with the changed tensors in their place: names keep their order, new ones come last."""
    keys = dict.fromkeys((*current, *changed))
    return {key: {**current.get(key, {}), **changed.get(key, {})} for key in keys}
