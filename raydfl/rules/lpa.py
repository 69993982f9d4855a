"""LPA: layer-wise pruning aggregation, the rule of FedMLAC (equations 10 to 14 of its paper)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Ratio, Tensors, Update
from raydfl.rules._collecting import CollectingRule
from raydfl.rules._group import Group, group_layers
from raydfl.rules._rule import Aggregate, Selection, TwoPassRule
from raydfl.rules.weighted_mean import WeightedMean

_INFLUENCE = "influence"
"""Metric of the first sum of a round: the influence of each update."""


@dataclass(frozen=True)
class LayerwisePruning(CollectingRule, TwoPassRule):
    """Layer-wise pruning aggregation of FedMLAC.

    For each layer, the rule sorts the clients by the Euclidean distance of their parameters to the uniform mean. It excludes
    the floor(vl n) nearest and the floor(vh n) farthest of n clients, and averages the remaining clients by their weights.
    Different layers of the new model can therefore come from different clients.

    Ties follow the client order. If no client would remain, the client with the median distance stays. A single client is
    never excluded. The report counts the clients excluded from each layer (``lpa/pruned/...``). The influence of a client is
    the fraction of elements that it contributed to.

    With blocks, equation 10's mean is the sum of the blocks' uniform sums. Equation 11 needs this mean, so distances take a pass of
    their own over the updates, and the weighted sums of equation 14 another. Sums and distances are float64 in both forms, but in
    another order. The clients of a layer differ only if two distances agree to about 15 digits.
    """

    associative: ClassVar[bool] = True

    vl: Annotated[
        float,
        Field(ge=0, lt=1, description="Fraction of clients excluded for the smallest distances. 0: none."),
    ] = 0.1
    vh: Annotated[
        float,
        Field(ge=0, lt=1, description="Fraction of clients excluded for the largest distances. 0: none."),
    ] = 0.1
    by: Annotated[
        Literal["module", "tensor"],
        Field(description="Layers: all tensors of a module (weights and biases together), or each tensor."),
    ] = "module"

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset :attr:`associative`, because a subclass may combine updates differently."""
        super().__init_subclass__(**options)
        if "associative" not in vars(cls):
            cls.associative = False

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Prune and average the updates, or average sums of pruned updates."""
        updates = iter(updates)
        first = next(updates, None)
        if first is None:
            return super().__call__((), current, rng)
        updates = itertools.chain((first,), updates)
        if first.senders is None:
            return super().__call__(updates, current, rng)
        report = dict(first.metrics)
        influence = cast(np.ndarray, report.pop(_INFLUENCE))
        return Aggregate(WeightedMean()(updates, current).tensors, cast("dict[str, Ratio]", report), influence)

    def combine(self, group: Group) -> np.ndarray:
        """Prune and average each layer."""
        vector = np.empty(group.layout.size, dtype=np.float32)
        clients = len(group.rows)
        group.influence = np.zeros(clients)
        for layer, names in group.layers(self.by).items():
            kept = list(range(clients))
            if clients > 1 and sum(self._count_pruned(clients)) > 0:
                kept = self._keep(group.squared_deviations(names))
            for name, mean in group.means(names, kept).items():
                vector[group.layout.columns(name)] = mean
            elements = sum(stop - start for start, stop in group.find_ranges(names))
            group.influence[kept] += elements
            group.report[f"lpa/pruned/{layer}"] = Ratio(clients - len(kept), clients)
        group.influence /= max(1, group.layout.size)
        return vector

    def _count_pruned(self, clients: int) -> tuple[int, int]:
        """Return the numbers of clients to exclude for the smallest and for the largest distances."""
        # In binary, 0.29 * 100 is 28.999..., so a small constant is added.
        return math.floor(self.vl * clients + 1e-9), math.floor(self.vh * clients + 1e-9)

    def _keep(self, squares: np.ndarray) -> list[int]:
        """Return the positions of the remaining clients, ascending.

        Args:
            squares: squared distances, float64 [clients].
        """
        clients = len(squares)
        smallest, largest = self._count_pruned(clients)
        order = np.argsort(squares, kind="stable").tolist()
        middle = (clients - 1) // 2
        last = clients - largest
        return sorted(order[smallest:last] if smallest < last else order[middle : middle + 1])

    def sum_updates(self, updates: Iterable[Update], layouts: Mapping[str, Layout]) -> list[Update]:
        """Add the updates with equal weights, or partial sums."""
        uniform = (u if u.senders is not None else dataclasses.replace(u, weight=1.0) for u in updates)
        return WeightedMean().sum_updates(uniform, layouts)

    def measure_update(self, update: Update, means: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Compute the squared Euclidean distance of each tensor to the mean, in float64."""
        sent = FlatTensors.from_tensors(update.tensors)
        squares = {}
        for name in sent.layout.names:
            difference = sent.vector[sent.layout.columns(name)] - means[name]
            squares[name] = float(np.square(difference, out=difference).sum())
        return squares

    def select(self, measured: Mapping[str, np.ndarray], layouts: Mapping[str, Layout]) -> Selection:
        """Prune each layer among the clients that sent it."""
        kept: dict[str, np.ndarray] = {}
        report: dict[str, Ratio] = {}
        contributed, elements = [], []
        for key, squares in measured.items():
            layout, sent = layouts[key], ~np.isnan(squares)
            sizes = np.diff(layout.offsets)
            kept[key] = np.zeros_like(sent)
            # Tensors from the same clients are pruned together.
            groups: dict[bytes, list[str]] = {}
            for name, column in zip(layout.names, sent.T, strict=True):
                groups.setdefault(column.tobytes(), []).append(name)
            for group_names in groups.values():
                clients = np.flatnonzero(sent[:, layout.positions[group_names[0]]])
                for layer, names in group_layers(group_names, self.by).items():
                    columns = np.array([layout.positions[name] for name in names])
                    remaining = clients[self._keep(squares[np.ix_(clients, columns)].sum(axis=1))]
                    kept[key][np.ix_(remaining, columns)] = True
                    pruned = Ratio(len(clients) - len(remaining), len(clients))
                    report[f"lpa/pruned/{layer}"] = report.get(f"lpa/pruned/{layer}", Ratio(0, 0)) + pruned
            contributed.append(kept[key] @ sizes)
            elements.append(np.where(sent.any(axis=1), np.maximum(sent @ sizes, 1), 0))
        totals = np.stack(elements, axis=1)
        influence = np.stack(contributed, axis=1)[totals > 0] / totals[totals > 0]
        return Selection(kept, {**report, _INFLUENCE: influence})

    def add_selected(self, updates: Iterable[Update], layouts: Mapping[str, Layout]) -> list[Update]:
        """Add the updates with their weights."""
        return WeightedMean().sum_updates(updates, layouts)
