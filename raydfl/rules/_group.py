"""The input of a collecting rule: the tensors of one key that the same clients sent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, cast

import numpy as np

from raydfl.core.errors import RaydflError
from raydfl.core.ops import ClientVectors, Parts, sums_are_compiled
from raydfl.core.tensors import Layout
from raydfl.core.types import Ratio, Tensors, Update
from raydfl.rules._tensor_sum import Part, TensorSum
from raydfl.rules._weights import Weight, absent, divided, flat, number_or_elements, total_of, weight_of


@dataclasses.dataclass
class Group:
    """The tensors of one key that the same clients sent, and what a rule may need to combine them."""

    layout: Layout
    """Where each tensor lies in a row, and in the vector that a rule returns."""
    rows: Sequence[np.ndarray]
    """One float32 [elements] for each client, in client order. Read-only: they may be other processes' memory."""
    updates: Sequence[Update]
    """Where the rows come from: their clients and weights."""
    current: Tensors
    """The server's tensors of this key."""
    report: dict[str, Ratio] = dataclasses.field(default_factory=dict)
    """What the rule has to say about this group; the reports of all groups are added up."""
    influence: np.ndarray | None = None
    """What the rule leaves of each client, if it says so: float64 [clients], 0 (left out) to 1 (as in a plain mean)."""
    random: np.random.Generator | None = dataclasses.field(default=None, repr=False)
    """See :attr:`rng`."""
    _scratch: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32), repr=False)

    @cached_property
    def _rows(self) -> ClientVectors:
        return ClientVectors(self.rows)

    @cached_property
    def _numbers(self) -> list[float] | None:
        """The clients' weights where all of them are plain numbers."""
        weights = [(update, update.weight) for update in self.updates]
        if any(isinstance(weight, Mapping) for _, weight in weights):
            return None
        return [cast(float, weight_of(update, weight, "", ())) for update, weight in weights]

    @property
    def rng(self) -> np.random.Generator:
        """The source of random numbers, seeded by run and round.

        Raises:
            RaydflError: the rule was called without one.
        """
        if self.random is None:
            raise RaydflError(
                "this rule draws random numbers: call it as rule(updates, current, numpy.random.default_rng(1))"
            )
        return self.random

    @cached_property
    def server(self) -> np.ndarray:
        """The server's tensors as one vector: float32 [elements], read-only; 0 where it has none."""
        vector = flat(self.current, self.layout)
        vector.flags.writeable = False
        return vector

    def layers(self, by: Literal["module", "tensor"]) -> dict[str, list[str]]:
        """Return the tensors' names by layer: each tensor for itself, or all tensors of a module (names up to the last dot)."""
        layers: dict[str, list[str]] = {}
        for name in self.layout.names:
            layers.setdefault(name.rpartition(".")[0] or name if by == "module" else name, []).append(name)
        return layers

    def matrix(self, names: Sequence[str] | None = None) -> np.ndarray:
        """Return some tensors (all by default), one client in each row: float32 [clients, their elements], to work in.

        The next call overwrites it: fresh memory of this size would cost more than the work that is done in it.
        """
        columns = [self.layout.columns(name) for name in names or self.layout.names]
        width = sum(part.stop - part.start for part in columns)
        if self._scratch.size < len(self.rows) * width:
            self._scratch = np.empty(len(self.rows) * width, np.float32)
        matrix = self._scratch[: len(self.rows) * width].reshape(len(self.rows), width)
        for target, row in zip(matrix, self.rows, strict=True):
            start = 0
            for part in columns:
                stop = start + part.stop - part.start
                target[start:stop] = row[part]
                start = stop
        return matrix

    def parts(self, names: Sequence[str]) -> Parts:
        """Return where some tensors lie in a row: ranges of elements, with neighbours joined."""
        parts: list[tuple[int, int]] = []
        for name in names:
            columns = self.layout.columns(name)
            if parts and parts[-1][1] == columns.start:
                parts[-1] = (parts[-1][0], columns.stop)
            else:
                parts.append((columns.start, columns.stop))
        return parts

    def squared_deviations(self, names: Sequence[str]) -> np.ndarray:
        """Return how far each client's values of some tensors, taken as one vector, are from the uniform mean of all clients.

        The rows are read where they lie; see :meth:`raydfl.core.ops.sums.Rows.squared_deviations` for the precision.

        Returns:
            The squared Euclidean distances: float64 [clients].
        """
        return self._rows.squared_deviations(self.parts(names))

    def mean(self, name: str, kept: Sequence[int]) -> np.ndarray:
        """Return the weighted mean of one tensor over some of the clients: float32 [elements].

        It is that of :class:`WeightedMean` over these clients, bit for bit.

        Args:
            kept: positions in ``rows``, ascending.
        """
        columns, shape = self.layout.columns(name), self.layout.shapes[self.layout.positions[name]]
        weights = [weight_of(self.updates[row], self.updates[row].weight, name, shape) for row in kept]
        total = self._sum(columns, shape, weights, kept)
        return divided(total.total.reshape(shape), total.counted, self.current.get(name)).reshape(-1)

    def means(self, names: Sequence[str], kept: Sequence[int]) -> dict[str, np.ndarray]:
        """Compute :meth:`mean` of several tensors, faster: to the bit where sums are compiled or everybody is kept.

        Otherwise they are rounded to float32 on the way: in float64 these means would cost NumPy more than all that a rule
        does besides.
        """
        weights = [] if self._numbers is None else [self._numbers[row] for row in kept]
        weight = total_of(weights)
        if weight == 0:
            return {name: self.mean(name, kept) for name in names}
        parts = self.parts(names)
        if sums_are_compiled() or len(kept) == len(self.rows):
            sums, begin = np.zeros(sum(stop - start for start, stop in parts)), 0
            for start, stop in parts:
                self._rows.add_to(sums[begin : begin + stop - start], weights, kept, start)
                begin += stop - start
            sums /= weight
            means = sums.astype(np.float32)
        else:
            # A power of two changes no digit; with weights below 1 the sum cannot overflow.
            shares = np.ldexp(weights, -math.frexp(weight)[1])
            means = self._rows.approximate_sum(shares, kept, parts) / shares.sum()
        columns = [self.layout.columns(name) for name in names]
        edges = np.cumsum([part.stop - part.start for part in columns])
        return dict(zip(names, np.split(means, edges[:-1]), strict=True))

    def squared_distances(self, point: np.ndarray) -> np.ndarray:
        """Return each client's squared Euclidean distance to a vector [elements]: float64 [clients]."""
        return self._rows.squared_distances(point)

    def pairwise(self) -> np.ndarray:
        """Return the squared Euclidean distances between all clients: float64 [clients, clients].

        See :meth:`raydfl.core.ops.sums.Rows.pairwise` for the precision.
        """
        return self._rows.pairwise()

    def ordered(self, chosen: Sequence[int] | None = None) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the values of each element in ascending order, some elements at a time: see :meth:`ClientVectors.ordered`."""
        return self._rows.ordered(range(len(self.rows)) if chosen is None else chosen)

    def average(
        self, factors: Sequence[float] | np.ndarray, *, uniform: bool, towards: np.ndarray | None = None
    ) -> np.ndarray:
        """Average over the clients, each one's weight multiplied by a factor, summed in float64.

        With factors of 1 it is that of :class:`WeightedMean`, or uniform of :class:`UniformMean`, bit for bit.

        Args:
            factors: one for each client; 0 leaves it out.
            uniform: every weight above 0 counts 1.
            towards: [elements]; what a factor takes away from a client's weight is given to this vector, so that factors
                move the clients towards it. Factors are at most 1 then.

        Returns:
            float32 [elements]; what nobody has any weight for is as the server has it, or 0.
        """
        if self._numbers is not None:
            size = self.layout.size
            return self._average(slice(0, size), (size,), self._numbers, factors, uniform, towards)
        vector = np.empty(self.layout.size, np.float32)
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            weights = [number_or_elements(update, update.weight, name, shape) for update in self.updates]
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
        """Compute :meth:`average` of some elements, taken as an array of that shape, from all clients' weights for them."""
        if uniform:
            weights = [np.sign(weight) for weight in weights]
        chosen = [position for position, factor in enumerate(factors) if factor > 0]
        total = self._sum(columns, shape, [float(factors[row]) * weights[row] for row in chosen], chosen)
        summed, counted = total.total.reshape(shape), total.counted
        if towards is not None:
            everything = total_of(weights)
            summed += (everything - counted) * towards[columns].reshape(shape)
            counted = everything
        return divided(summed, counted, self.server[columns])

    def _sum(
        self, columns: slice, shape: tuple[int, ...], weights: Sequence[Weight], chosen: Sequence[int]
    ) -> TensorSum:
        """Add up some elements, taken as an array of that shape, of some clients with their weights for them."""
        total = TensorSum(shape, np.zeros(columns.stop - columns.start))
        if all(isinstance(weight, float) for weight in weights):
            self._rows.add_to(total.total, cast("Sequence[float]", weights), chosen, columns.start)
            total.counted = total_of(weights)
        else:
            rows = (self.rows[row][columns].reshape(shape) for row in chosen)
            total.add([Part(row, weight, None) for row, weight in zip(rows, weights, strict=True)])
        return total

    def voters(self, fill: float | None = None) -> Voters:
        """Return the clients that have any weight, each with a value for every element.

        Args:
            fill: stands where an element of a client has no weight; by default the server's value, as if the client had
                left it as it was.
        """
        if self._numbers is not None and all(weight > 0 for weight in self._numbers):
            return Voters(self, list(range(len(self.rows))), [])
        rows, positions, masks = [], [], []
        for position, (row, update) in enumerate(zip(self.rows, self.updates, strict=True)):
            mask = absent(update, self.layout)
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
    """The clients of a group that have any weight."""

    group: Group
    """These clients only; its report is the whole group's."""
    positions: Sequence[int]
    """Where they are in the whole group, ascending."""
    masks: Sequence[np.ndarray]
    """Elements without weight, bool [elements], of each client that has such elements."""
