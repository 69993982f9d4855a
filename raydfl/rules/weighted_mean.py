"""The mean weighted by what each update weighs: FedAvg's rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import ClientVectors
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._cuts import whole_layout
from raydfl.rules._rule import Aggregate, Rule, over_current
from raydfl.rules._tensor_sum import Part, TensorSum
from raydfl.rules._weights import check_shapes, divided, total_of, weight_of

_TOGETHER = (
    4  # whole updates, or as many elements of cut ones, that a running mean adds at once: each then costs little
)
# more than reading it
_MOST = 64  # updates that it adds at once, however small they are


class _RunningMean:
    """The weighted mean of one key's updates, of which it keeps the sums, and the last few to add them together."""

    def __init__(self, current: Tensors) -> None:
        self._current = current
        self._shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
        self._layout: Layout | None = None  # of the first update
        self._flat = np.zeros(0)  # the totals of its tensors, one after another
        self._sums: dict[str, TensorSum] = {}
        self._plain: list[tuple[np.ndarray, float]] = []  # updates with that layout and one weight for all
        self._parts: dict[str, list[Part]] = {}  # of updates of any other form, by tensor
        self._waiting = 0  # updates in one of the two
        self._elements = 0  # of those
        self._size = 0  # elements of the largest whole update

    def add(self, update: Update, weight: float | Mapping[str, float | Tensor]) -> None:
        """Add one update, counted with ``weight`` in place of its own."""
        sent = FlatTensors.of(update.tensors)
        plain = sent.layout == self._layout and not isinstance(weight, Mapping) and not update.cuts
        if self._parts if plain else self._plain:
            self._add_waiting()
        if plain:
            # The same sums as below, in few operations however many tensors there are.
            self._plain.append((sent.vector, cast(float, weight_of(update, weight, "", ()))))
        else:
            self._take_apart(update, sent, weight)
        self._waiting, self._elements = self._waiting + 1, self._elements + sent.layout.size
        if self._waiting == _MOST or self._elements >= _TOGETHER * self._size:
            self._add_waiting()

    def _take_apart(self, update: Update, sent: FlatTensors, weight: float | Mapping[str, float | Tensor]) -> None:
        whole = whole_layout(update, sent.layout, self._shapes)
        check_shapes(update, whole, self._shapes)
        self._size = max(self._size, whole.size)
        if self._layout is None:
            self._layout, self._flat = whole, np.zeros(whole.size)
            self._sums = {
                name: TensorSum(shape, self._flat[whole.columns(name)])
                for name, shape in zip(whole.names, whole.shapes, strict=True)
            }
        for name, shape, size in zip(sent.layout.names, whole.shapes, sent.layout.shapes, strict=True):
            if name not in self._sums:
                self._sums[name] = TensorSum(shape, np.zeros(math.prod(shape)))
            values = sent.vector[sent.layout.columns(name)].reshape(size)
            counted = weight_of(update, weight, name, size)
            self._parts.setdefault(name, []).append(Part(values, counted, update.cuts.get(name) if shape else None))

    def _add_waiting(self) -> None:
        for name, parts in self._parts.items():
            self._sums[name].add(parts)
        if self._plain and self._layout is not None:
            weights = [weight for _, weight in self._plain]
            ClientVectors([vector for vector, _ in self._plain]).add_to(self._flat, weights)
            for name in self._layout.names:
                self._sums[name].counted = total_of(weights, self._sums[name].counted)
        self._plain, self._parts, self._waiting, self._elements = [], {}, 0, 0

    def result(self) -> dict[str, Tensor]:
        """Return the mean by name, each tensor in memory of its own."""
        self._add_waiting()
        return {
            name: torch.from_numpy(divided(each.total.reshape(each.shape), each.counted, self._current.get(name)))
            for name, each in self._sums.items()
        }


@dataclass(frozen=True)
class WeightedMean(Rule):
    """The mean weighted by ``Update.weight`` (the number of examples, as a rule), summed in float64.

    It keeps one sum for each parameter and at most four updates, or as many elements of cut ones: its memory does not grow with
    the cohort.
    """

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """See :class:`Rule`."""
        means: dict[str, _RunningMean] = {}
        for update in updates:
            if update.key not in means:
                means[update.key] = _RunningMean(current.get(update.key, {}))
            means[update.key].add(update, self._counted(update.weight))
        return Aggregate(over_current({key: mean.result() for key, mean in means.items()}, current), {})

    def _counted(self, weight: Any) -> Any:
        return weight
