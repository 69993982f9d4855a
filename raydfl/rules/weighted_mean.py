"""Weighted mean of the updates, summed in float64: the rule of FedAvg."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import ClientVectors
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._cuts import whole_layout
from raydfl.rules._rule import Aggregate, Rule, merge_tensors
from raydfl.rules._tensor_sum import Contribution, TensorSum
from raydfl.rules._weights import add_in_order, check_shapes, divide, read_weight

# Updates are added in batches, because reading and writing the sums for each update would cost as much as reading it.
_BATCH = 4  # size of a batch, in whole updates' elements
_LARGEST_BATCH = 64  # size of a batch of small (cut) updates


class _RunningSum:
    """Weighted sum of the updates of one key, with a batch of pending updates.

    Args:
        layout: layout of the server's tensors.
    """

    def __init__(self, layout: Layout) -> None:
        self._shapes = dict(zip(layout.names, layout.shapes, strict=True))
        self._layout: Layout | None = None  # of the first update
        self._flat = np.zeros(0)  # sums of the first update's tensors, concatenated
        self._sums: dict[str, TensorSum] = {}
        self._plain: list[tuple[np.ndarray, float]] = []  # pending updates in the first layout, with scalar weights
        self._contributions: dict[str, list[Contribution]] = {}  # all other pending updates, by tensor
        self._pending = 0  # number of pending updates
        self._elements = 0  # elements of pending updates
        self._size = 0  # elements of the largest whole update
        self._senders = Counter[str]()  # added updates by tensor

    def add(self, update: Update, weight: float | Mapping[str, float | Tensor]) -> None:
        """Add an update. ``weight`` replaces the update's own weight."""
        sent = FlatTensors.from_tensors(update.tensors)
        plain = sent.layout == self._layout and not isinstance(weight, Mapping) and not update.cuts
        # Pending updates are all of one form: their order must not change.
        if self._contributions if plain else self._plain:
            self._flush()
        if plain:
            # The same sums as in _add_tensors, with one operation for all tensors.
            self._plain.append((sent.vector, cast(float, read_weight(update, weight, "", ()))))
        else:
            self._add_tensors(update, sent, weight)
        self._pending, self._elements = self._pending + 1, self._elements + sent.layout.size
        if self._pending == _LARGEST_BATCH or self._elements >= _BATCH * self._size:
            self._flush()

    def _add_tensors(self, update: Update, sent: FlatTensors, weight: float | Mapping[str, float | Tensor]) -> None:
        whole = whole_layout(update, sent.layout, self._shapes)
        check_shapes(update, whole, self._shapes)
        self._size = max(self._size, whole.size)
        self._open_sums(whole)
        for name, shape, size in zip(sent.layout.names, whole.shapes, sent.layout.shapes, strict=True):
            values = sent.vector[sent.layout.columns(name)].reshape(size)
            tensor_weight = read_weight(update, weight, name, size)
            cut = update.cuts.get(name) if shape else None
            self._contributions.setdefault(name, []).append(Contribution(values, tensor_weight, cut))

    def _open_sums(self, layout: Layout) -> None:
        """Create the missing sums of tensors, with zeros."""
        if self._layout is None:
            self._layout, self._flat = layout, np.zeros(layout.size)
            self._sums = {
                name: TensorSum(shape, self._flat[layout.columns(name)])
                for name, shape in zip(layout.names, layout.shapes, strict=True)
            }
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if name not in self._sums:
                self._sums[name] = TensorSum(shape, np.zeros(math.prod(shape)))

    def add_sum(self, update: Update) -> None:
        """Add a partial sum over several clients."""
        self._flush()
        sent = cast(FlatTensors, update.tensors)
        check_shapes(update, sent.layout, self._shapes)
        self._open_sums(sent.layout)
        if sent.layout == self._layout:
            self._flat += sent.vector
        for name in sent.layout.names:
            weight = update.weight[name] if isinstance(update.weight, Mapping) else update.weight
            self._sums[name].add_weight(weight.numpy() if isinstance(weight, Tensor) else weight)
            if sent.layout != self._layout:
                self._sums[name].total += sent.vector[sent.layout.columns(name)]
        self._senders.update(update.senders or {})

    def _flush(self) -> None:
        for name, contributions in self._contributions.items():
            self._sums[name].add(contributions)
            self._senders[name] += len(contributions)
        if self._plain and self._layout is not None:
            weights = [weight for _, weight in self._plain]
            ClientVectors([vector for vector, _ in self._plain]).add_to(self._flat, weights)
            for name in self._layout.names:
                self._sums[name].weight = add_in_order(weights, self._sums[name].weight)
                self._senders[name] += len(weights)
        self._plain, self._contributions, self._pending, self._elements = [], {}, 0, 0

    def compute_means(self, current: Tensors) -> dict[str, Tensor]:
        """Return the mean of each tensor by name, in separate memory.

        Args:
            current: the server's tensors, for elements of weight 0.
        """
        self._flush()
        return {
            name: torch.from_numpy(divide(sums.total.reshape(sums.shape), sums.weight, current.get(name)))
            for name, sums in self._sums.items()
        }

    def to_update(self, key: str) -> Update:
        """Return the sum as an update."""
        self._flush()
        layout = Layout.from_shapes({name: sums.shape for name, sums in self._sums.items()})
        vector = self._flat
        if layout != self._layout:
            vector = np.concatenate([sums.total for sums in self._sums.values()])
        weights = {name: sums.weight for name, sums in self._sums.items()}
        numbers = {weight for weight in weights.values() if isinstance(weight, float)}
        weight: float | dict[str, float | Tensor] = {
            name: value if isinstance(value, float) else torch.from_numpy(value) for name, value in weights.items()
        }
        if len(numbers) == 1 and all(isinstance(value, float) for value in weights.values()):
            weight = numbers.pop()
        return Update(FlatTensors(layout, vector), weight, key=key, senders=dict(self._senders))


@dataclass(frozen=True)
class WeightedMean(Rule):
    """Mean weighted by ``Update.weight``, by default the number of examples. Sums are in float64.

    The rule streams the updates. It stores a sum for each parameter and at most four updates (or the same number of elements
    of cut updates), so memory does not grow with the cohort.
    """

    associative: ClassVar[bool] = True

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Average the updates, or the partial sums of updates, with their weights."""
        sums = self._add_updates(updates, {key: Layout.from_tensors(tensors) for key, tensors in current.items()})
        means = {key: total.compute_means(current.get(key, {})) for key, total in sums.items()}
        return Aggregate(merge_tensors(means, current), {})

    def sum_updates(self, updates: Iterable[Update], layouts: Mapping[str, Layout]) -> list[Update]:
        """Add the updates with their weights."""
        return [total.to_update(key) for key, total in self._add_updates(updates, layouts).items()]

    def _add_updates(self, updates: Iterable[Update], layouts: Mapping[str, Layout]) -> dict[str, _RunningSum]:
        sums: dict[str, _RunningSum] = {}
        for update in updates:
            if update.key not in sums:
                sums[update.key] = _RunningSum(layouts.get(update.key, Layout((), ())))
            if update.senders is None:
                sums[update.key].add(update, self._effective_weight(update.weight))
            else:
                sums[update.key].add_sum(update)
        return sums

    def _effective_weight(self, weight: Any) -> Any:
        return weight
