"""HDBSCAN groups: the server clusters the changes of the clients' last layers, as in step 7 of FedAPTA.

R. Campello, D. Moulavi, J. Sander, Density-Based Clustering Based on Hierarchical Density Estimates, PAKDD 2013. With D_i the
change of client i's last layers since the received model:

    d_ij = 1 - <D_i, D_j> / (||D_i|| ||D_j||)        groups = HDBSCAN(d)

A cohort with fewer than twice ``min_cluster_size`` clients is one group, and so is a cohort of noise only. ``tasks/undivided``
records such rounds. Clients' profiles only serve to measure the result (purity, adjusted Rand index).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.clustering import Distance, assign_noise, distances, hdbscan_labels
from raydfl.core.options import OURS, PAPER
from raydfl.engine.groups._layers import LayerClusters


@dataclass(frozen=True, kw_only=True)
class Hdbscan(LayerClusters):
    """Groups by HDBSCAN on the changes of the last layers."""

    distance: Annotated[Distance, Field(description="Distance between two updates (paper: cosine)."), PAPER] = "cosine"
    min_cluster_size: Annotated[int, Field(ge=2, description="Smallest number of clients in a cluster."), OURS] = 5
    min_samples: Annotated[
        int,
        Field(ge=1, description="Number of neighbours in HDBSCAN's density estimate. More neighbours: more noise."),
        OURS,
    ] = 2
    selection: Annotated[
        Literal["eom", "leaf"],
        Field(description="HDBSCAN's selection of clusters: eom (excess of mass), or leaf (the smallest clusters)."),
        OURS,
    ] = "eom"
    epsilon: Annotated[
        float, Field(ge=0, description="Distance below which clusters are merged. 0: no merging."), OURS
    ] = 0.0
    single: Annotated[bool, Field(description="Allow a single cluster of all clients."), OURS] = False
    noise: Annotated[
        Literal["attach", "alone"],
        Field(description="Group of noise clients. attach: the nearest cluster's. alone: a separate group for each."),
        OURS,
    ] = "attach"
    threshold: Annotated[
        float, Field(ge=0, description="Mean distance to a cluster above which a client is not attached to it."), OURS
    ] = 1.0

    def labels(self, heads: Sequence[Mapping[str, Tensor]]) -> tuple[np.ndarray, int, bool]:
        """Cluster clients by their changes.

        Returns:
            The cluster of each client, the number of noise clients, and whether all clients are in one group for lack of clusters.
        """
        if len(heads) < 2 * self.min_cluster_size:
            return np.zeros(len(heads), np.int64), 0, True
        matrix = distances(heads, self.distance)
        clusters = hdbscan_labels(
            matrix, self.min_cluster_size, self.min_samples, self.selection, self.epsilon, self.single
        )
        threshold = self.threshold if self.noise == "attach" else 0.0
        return assign_noise(clusters, matrix, threshold), int((clusters < 0).sum()), bool((clusters < 0).all())
