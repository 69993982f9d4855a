"""The mean weighted by what each update weighs: FedAvg's rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.ops import ClientVectors
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._cuts import whole_layout
from raydfl.rules._rule import Aggregate, Rule, over_current
from raydfl.rules._weights import check_shapes, divided, number_or_elements, total_of, weight_of

_STRIP = 32_768  # elements of a product that are worked on at a time: as float64 they stay in the second-level cache
_TOGETHER = 4  # updates that a running mean adds at once: each then costs little more than reading it


class _RunningMean:
    """The weighted mean of one key's updates, of which it keeps the sums, and the last few to add them together."""

    def __init__(self, current: Tensors) -> None:
        self._current = current
        self._shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
        self._totals: dict[str, np.ndarray] = {}  # float64 [elements]; those of the first update lie in _flat
        self._weights: dict[str, float | np.ndarray] = {}  # an array has the tensor's dimensions and broadcasts to it
        self._layout = Layout((), ())  # of _flat
        self._flat = np.zeros(0)
        self._waiting: list[tuple[np.ndarray, float]] = []  # updates with that layout, and what they count

    def add(self, update: Update, weight: float | Mapping[str, float | Tensor]) -> None:
        """Add one update, counted with ``weight`` in place of its own."""
        sent = FlatTensors.of(update.tensors)
        if sent.layout == self._layout and not isinstance(weight, Mapping) and not update.cuts:
            # The same sums as below, in few operations however many tensors there are.
            self._waiting.append((sent.vector, cast(float, weight_of(update, weight, "", ()))))
            if len(self._waiting) == _TOGETHER:
                self._add_waiting()
            return
        self._add_waiting()
        whole = whole_layout(update, sent.layout, self._shapes)
        check_shapes(update, whole, self._shapes)
        if not self._totals:
            self._layout, self._flat = whole, np.zeros(whole.size)
            self._totals = {name: self._flat[whole.columns(name)] for name in whole.names}
        rows = ClientVectors([sent.vector])
        for name, own, shape in zip(sent.layout.names, sent.layout.shapes, whole.shapes, strict=True):
            columns = sent.layout.columns(name)
            if name not in self._totals:
                self._totals[name] = np.zeros(math.prod(shape))
            total, counted = self._totals[name], number_or_elements(update, weight, name, own)
            if name in update.cuts:
                counted = _add_cut(total.reshape(shape), sent[name].numpy(), counted, update.cuts[name])
            elif isinstance(counted, np.ndarray) and counted.shape == shape:
                rows.add_to(total, [counted.reshape(-1)], start=columns.start)
            elif isinstance(counted, np.ndarray):
                _add_broadcast(total.reshape(shape), sent[name].numpy(), counted)
            else:
                rows.add_to(total, [counted], start=columns.start)
            self._weights[name] = self._weights.get(name, 0.0) + counted

    def _add_waiting(self) -> None:
        weights = [weight for _, weight in self._waiting]
        ClientVectors([vector for vector, _ in self._waiting]).add_to(self._flat, weights)
        for name in self._layout.names:
            self._weights[name] = total_of(weights, self._weights[name])
        self._waiting = []

    def result(self) -> dict[str, Tensor]:
        """Return the mean by name, each tensor in memory of its own."""
        self._add_waiting()
        return {
            name: torch.from_numpy(
                divided(total.reshape(self._shapes[name]), self._weights[name], self._current.get(name))
            )
            for name, total in self._totals.items()
        }


def _add_broadcast(total: np.ndarray, values: np.ndarray, weight: np.ndarray) -> None:
    """Add ``weight * values`` to ``total`` in float64, some rows at a time.

    Args:
        total: float64.
        values: float32 of its shape.
        weight: float64 that broadcasts to it.
    """
    rows = max(1, _STRIP * len(total) // max(1, total.size))
    for begin in range(0, len(total), rows):
        part = slice(begin, begin + rows)
        products = values[part].astype(np.float64)  # several times as fast as products of different types
        products *= weight if len(weight) == 1 else weight[part]
        total[part] += products


def _add_cut(total: np.ndarray, values: np.ndarray, weight: float | np.ndarray, cut: Cut) -> np.ndarray:
    """Add weighted values to ``total`` at their place.

    Returns:
        Their weight as what broadcasts to the total: 0 where nothing was added; 1 place for dimensions that are whole.
    """
    total[cut.place(total.shape)] += values.astype(np.float64) * weight
    given = np.shape(weight) or (1,) * total.ndim
    shape = [
        size if kept is not None or own > 1 else 1
        for size, kept, own in zip(total.shape, cut.indices, given, strict=True)
    ]
    elements = np.zeros(shape)
    elements[cut.place(shape)] = weight
    return elements


@dataclass(frozen=True)
class WeightedMean(Rule):
    """The mean weighted by ``Update.weight`` (the number of examples, as a rule), summed in float64.

    It keeps one sum for each parameter and at most four updates: its memory does not grow with the cohort.
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
