"""Group: the input of a collecting rule."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, cast

import numpy as np

from raydfl.core.errors import RaydflError
from raydfl.core.ops import ClientVectors, Ranges, sums_are_compiled
from raydfl.core.tensors import Layout
from raydfl.core.types import Ratio, Tensors, Update
from raydfl.rules._tensor_sum import Contribution, TensorSum
from raydfl.rules._weights import (
    Weight,
    add_in_order,
    divide,
    find_unweighted,
    flatten_current,
    read_float64_weight,
    read_weight,
)


@dataclasses.dataclass
class Group:
    """Tensors of one key from the same clients, with operations for rules."""

    layout: Layout
    """The position of each tensor in a row, and in the vector that a rule returns."""
    rows: Sequence[np.ndarray]
    """float32 [elements] for each client, in client order. Read-only, because other processes may share the memory."""
    updates: Sequence[Update]
    """The update of each row, with its client and weight."""
    current: Tensors
    """The server's tensors of this key."""
    report: dict[str, Ratio] = dataclasses.field(default_factory=dict)
    """Metrics of the rule for this group. The metrics of all groups are added up."""
    influence: np.ndarray | None = None
    """Influence of each client: float64 [clients], from 0 (excluded) to 1 (as in a plain mean). A rule may leave it unset."""
    random: np.random.Generator | None = dataclasses.field(default=None, repr=False)
    """The generator of :attr:`rng`, if the caller of the rule passed it."""
    _scratch: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32), repr=False)

    @cached_property
    def _rows(self) -> ClientVectors:
        return ClientVectors(self.rows)

    @cached_property
    def _scalar_weights(self) -> list[float] | None:
        """The clients' weights, or ``None`` if a client has weights by tensor or by element."""
        weights = [(update, update.weight) for update in self.updates]
        if any(isinstance(weight, Mapping) for _, weight in weights):
            return None
        return [cast(float, read_weight(update, weight, "", ())) for update, weight in weights]

    @property
    def rng(self) -> np.random.Generator:
        """Random number generator, seeded by run and round.

        Raises:
            RaydflError: the rule was called without a generator.
        """
        if self.random is None:
            raise RaydflError(
                "This rule draws random numbers: call it as rule(updates, current, numpy.random.default_rng(1))."
            )
        return self.random

    @cached_property
    def server(self) -> np.ndarray:
        """The server's tensors as one read-only vector: float32 [elements]. Missing tensors are 0."""
        vector = flatten_current(self.current, self.layout)
        vector.flags.writeable = False
        return vector

    def layers(self, by: Literal["module", "tensor"]) -> dict[str, list[str]]:
        """Group the tensors' names by layer.

        Args:
            by: ``"tensor"``: each tensor is a layer. ``"module"``: tensors with the same name up to the last dot are a layer.
        """
        return group_layers(self.layout.names, by)

    def matrix(self, names: Sequence[str] | None = None) -> np.ndarray:
        """Copy tensors into a matrix, a row for each client.

        Args:
            names: the tensors, all by default.

        Returns:
            float32 [clients, elements], writable. The next call overwrites it.
        """
        # Reuse the memory, because allocating a matrix of this size costs more than most rules' work in it.
        columns = [self.layout.columns(name) for name in names or self.layout.names]
        width = sum(tensor.stop - tensor.start for tensor in columns)
        if self._scratch.size < len(self.rows) * width:
            self._scratch = np.empty(len(self.rows) * width, np.float32)
        matrix = self._scratch[: len(self.rows) * width].reshape(len(self.rows), width)
        for target, row in zip(matrix, self.rows, strict=True):
            start = 0
            for tensor in columns:
                stop = start + tensor.stop - tensor.start
                target[start:stop] = row[tensor]
                start = stop
        return matrix

    def find_ranges(self, names: Sequence[str]) -> Ranges:
        """Compute the ranges of elements that tensors occupy in a row. Adjacent tensors share a range."""
        ranges: list[tuple[int, int]] = []
        for name in names:
            columns = self.layout.columns(name)
            if ranges and ranges[-1][1] == columns.start:
                ranges[-1] = (ranges[-1][0], columns.stop)
            else:
                ranges.append((columns.start, columns.stop))
        return ranges

    def squared_deviations(self, names: Sequence[str]) -> np.ndarray:
        """Compute the squared Euclidean distance of each client to the uniform mean of all clients.

        :meth:`raydfl.core.ops.ClientVectors.compute_squared_deviations` documents the precision.

        Args:
            names: the tensors, taken as one vector.

        Returns:
            float64 [clients].
        """
        return self._rows.compute_squared_deviations(self.find_ranges(names))

    def mean(self, name: str, kept: Sequence[int]) -> np.ndarray:
        """Compute the weighted mean of one tensor over selected clients.

        Args:
            name: the tensor.
            kept: positions of the clients in ``rows``, ascending.

        Returns:
            float32 [elements], equal to the bit to :class:`WeightedMean` over these clients.
        """
        columns, shape = self.layout.columns(name), self.layout.shapes[self.layout.positions[name]]
        weights = [read_weight(self.updates[row], self.updates[row].weight, name, shape) for row in kept]
        total = self._sum(columns, shape, weights, kept)
        return divide(total.total.reshape(shape), total.weight, self.current.get(name)).reshape(-1)

    def means(self, names: Sequence[str], kept: Sequence[int]) -> dict[str, np.ndarray]:
        """Compute :meth:`mean` of several tensors in fewer operations.

        The bits are those of :meth:`mean` if sums are compiled or all clients are kept. Without compiled operators,
        intermediate results are rounded to float32: NumPy's float64 would take longer than the rest of the rule.
        """
        weights = [] if self._scalar_weights is None else [self._scalar_weights[row] for row in kept]
        weight = add_in_order(weights)
        if weight == 0:
            return {name: self.mean(name, kept) for name in names}
        ranges = self.find_ranges(names)
        if sums_are_compiled() or len(kept) == len(self.rows):
            sums, begin = np.zeros(sum(stop - start for start, stop in ranges)), 0
            for start, stop in ranges:
                self._rows.add_to(sums[begin : begin + stop - start], weights, kept, start)
                begin += stop - start
            sums /= weight
            means = sums.astype(np.float32)
        else:
            # Scaling by a power of two is exact, and with weights below 1 the sum cannot overflow.
            shares = np.ldexp(weights, -math.frexp(weight)[1])
            means = self._rows.approximate_sum(shares, kept, ranges) / shares.sum()
        columns = [self.layout.columns(name) for name in names]
        edges = np.cumsum([tensor.stop - tensor.start for tensor in columns])
        return dict(zip(names, np.split(means, edges[:-1]), strict=True))

    def squared_distances(self, point: np.ndarray) -> np.ndarray:
        """Compute each client's squared Euclidean distance to a vector float32 [elements]: float64 [clients]."""
        return self._rows.compute_squared_distances(point)

    def pairwise(self) -> np.ndarray:
        """Compute the squared Euclidean distances between all clients: float64 [clients, clients].

        :meth:`raydfl.core.ops.ClientVectors.pairwise` documents the precision.
        """
        return self._rows.pairwise()

    def iter_sorted(self, chosen: Sequence[int] | None = None) -> Iterator[tuple[int, int, np.ndarray]]:
        """Sort the clients' values of each element, block by block.

        Args:
            chosen: positions of the clients in ``rows``, all by default.

        Yields:
            The first element of a block, the end of the block, and float32 [elements, clients], ascending in each row.
        """
        return self._rows.iter_sorted(range(len(self.rows)) if chosen is None else chosen)

    def ordered(self, chosen: Sequence[int] | None = None) -> Iterator[tuple[int, int, np.ndarray]]:
        """Sort values (deprecated name of :meth:`iter_sorted`)."""
        warnings.warn("Group.ordered is now named iter_sorted", DeprecationWarning, stacklevel=2)
        return self.iter_sorted(chosen)

    def average(
        self, factors: Sequence[float] | np.ndarray, *, uniform: bool, towards: np.ndarray | None = None
    ) -> np.ndarray:
        """Average the clients with their weights multiplied by factors. Sums are in float64.

        With factors of 1 the result equals :class:`WeightedMean` (or :class:`UniformMean` if ``uniform``) to the bit.

        Args:
            factors: one factor for each client. 0 excludes the client.
            uniform: replace every weight above 0 by 1.
            towards: float32 [elements]. This vector receives the weight that factors below 1 take from the clients.
                Factors must be at most 1 if it is set.

        Returns:
            float32 [elements]. Elements without weight keep the server's value, or are 0 if the server has none.
        """
        if self._scalar_weights is not None:
            size = self.layout.size
            return self._average(slice(0, size), (size,), self._scalar_weights, factors, uniform, towards)
        vector = np.empty(self.layout.size, np.float32)
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            weights = [read_float64_weight(update, update.weight, name, shape) for update in self.updates]
            columns = self.layout.columns(name)
            vector[columns] = self._average(columns, shape, weights, factors, uniform, towards).reshape(-1)
        return vector

    def _average(
        self,
        columns: slice,
        shape: tuple[int, ...],
        weights: Sequence[Weight],
        factors: Sequence[float] | np.ndarray,
        uniform: bool,
        towards: np.ndarray | None,
    ) -> np.ndarray:
        """Compute :meth:`average` for a range of elements, reshaped to ``shape``."""
        if uniform:
            weights = [np.sign(weight) for weight in weights]
        chosen = [position for position, factor in enumerate(factors) if factor > 0]
        total = self._sum(columns, shape, [float(factors[row]) * weights[row] for row in chosen], chosen)
        summed, counted = total.total.reshape(shape), total.weight
        if towards is not None:
            full_weight = add_in_order(weights)
            summed += (full_weight - counted) * towards[columns].reshape(shape)
            counted = full_weight
        return divide(summed, counted, self.server[columns])

    def _sum(
        self, columns: slice, shape: tuple[int, ...], weights: Sequence[Weight], chosen: Sequence[int]
    ) -> TensorSum:
        """Add up a range of elements over the chosen clients, reshaped to ``shape`` and multiplied by their weights."""
        total = TensorSum(shape, np.zeros(columns.stop - columns.start))
        if all(isinstance(weight, float) for weight in weights):
            self._rows.add_to(total.total, cast("Sequence[float]", weights), chosen, columns.start)
            total.weight = add_in_order(weights)
        else:
            rows = (self.rows[row][columns].reshape(shape) for row in chosen)
            total.add([Contribution(row, weight, None) for row, weight in zip(rows, weights, strict=True)])
        return total

    def voters(self, fill: float | None = None) -> Voters:
        """Select the clients with a positive weight for any element.

        Args:
            fill: value of elements without weight. By default they get the server's value, as if unchanged.
        """
        if self._scalar_weights is not None and all(weight > 0 for weight in self._scalar_weights):
            return Voters(self, list(range(len(self.rows))), [])
        rows, positions, masks = [], [], []
        for position, (row, update) in enumerate(zip(self.rows, self.updates, strict=True)):
            mask = find_unweighted(update, self.layout)
            if mask is not None:
                if mask.all():
                    continue
                masks.append(mask)
                rows.append(np.where(mask, self.server if fill is None else np.float32(fill), row))
            else:
                rows.append(row)
            positions.append(position)
        updates = [self.updates[position] for position in positions]
        group = Group(self.layout, rows, updates, self.current, report=self.report, random=self.random)
        return Voters(group, positions, masks)


@dataclasses.dataclass(frozen=True)
class Voters:
    """The clients of a group with a positive weight."""

    group: Group
    """A group of these clients only. It shares the report of the whole group."""
    positions: Sequence[int]
    """Positions of the clients in the whole group, ascending."""
    masks: Sequence[np.ndarray]
    """bool [elements] for each client with unweighted elements, true where the element has no weight."""


def group_layers(names: Iterable[str], by: Literal["module", "tensor"]) -> dict[str, list[str]]:
    """Group the names of tensors by layer, like :meth:`Group.layers`."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name if by == "module" else name, []).append(name)
    return layers
