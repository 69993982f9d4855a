"""LPA: layer-wise pruning aggregation, the rule of FedMLAC (equations 10 to 14 of its paper)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.types import Ratio
from raydfl.rules._collecting import CollectingRule
from raydfl.rules._group import Group


@dataclass(frozen=True)
class LayerwisePruning(CollectingRule):
    """Layer-wise pruning aggregation of FedMLAC.

    For each layer, the rule sorts the clients by the Euclidean distance of their parameters to the uniform mean. It excludes
    the clients with the smallest and the largest distances and averages the remaining clients by their weights. Different
    layers of the new model can therefore come from different clients.

    Ties follow the client order. If no client would remain, the client with the median distance stays. A single client is
    never excluded. The report counts the clients excluded from each layer. The influence of a client is the fraction of
    elements that it contributed to.
    """

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

    def combine(self, group: Group) -> np.ndarray:
        """Prune and average each layer."""
        vector = np.empty(group.layout.size, dtype=np.float32)
        clients = len(group.rows)
        group.influence = np.zeros(clients)
        # In binary, 0.29 * 100 is 28.999..., so a small constant is added.
        smallest, largest = (math.floor(share * clients + 1e-9) for share in (self.vl, self.vh))
        for layer, names in group.layers(self.by).items():
            kept = list(range(clients))
            if clients > 1 and smallest + largest > 0:
                order = np.argsort(group.squared_deviations(names), kind="stable").tolist()
                middle = (clients - 1) // 2
                last = clients - largest
                kept = sorted(order[smallest:last] if smallest < last else order[middle : middle + 1])
            for name, mean in group.means(names, kept).items():
                vector[group.layout.columns(name)] = mean
            elements = sum(stop - start for start, stop in group.find_ranges(names))
            group.influence[kept] += elements
            group.report[f"lpa/pruned/{layer}"] = Ratio(clients - len(kept), clients)
        group.influence /= max(1, group.layout.size)
        return vector
