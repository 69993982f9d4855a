"""LPA: layer-wise pruning aggregation, the rule of FedMLAC."""

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

    For each layer, the clients are sorted by the Euclidean distance of their parameters to the uniform mean of all; those
    with the smallest and the largest deviations are left out, and the others are averaged by their weights. A layer of the
    new model can therefore come from other clients than the next layer. Equations 10 to 14 of the paper.

    Ties go by client order. Where nobody would be left, the client of median deviation is kept. One client is never pruned.
    The report counts the clients left out of each layer; a client's influence is the share of elements that it was kept for.
    """

    vl: Annotated[
        float, Field(ge=0, lt=1, description="share of clients left out for the smallest deviation, 0..1")
    ] = 0.1
    vh: Annotated[float, Field(ge=0, lt=1, description="share of clients left out for the largest deviation, 0..1")] = (
        0.1
    )
    by: Annotated[
        Literal["module", "tensor"],
        Field(description="what a layer is: all tensors of a module (weights and biases together), or each tensor"),
    ] = "module"

    def combine(self, group: Group) -> np.ndarray:
        """See :class:`CollectingRule`."""
        vector = np.empty(group.layout.size, dtype=np.float32)
        clients = len(group.rows)
        group.influence = np.zeros(clients)
        # 0.29 * 100 is 28.999...: the guard makes the floor the one of the decimal numbers that the user wrote.
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
            elements = sum(stop - start for start, stop in group.parts(names))
            group.influence[kept] += elements
            group.report[f"lpa/pruned/{layer}"] = Ratio(clients - len(kept), clients)
        group.influence /= max(1, group.layout.size)
        return vector
