"""K-means groups: the server clusters the directions of the changes of the clients' last layers.

S. Lloyd, Least squares quantization in PCM, IEEE Transactions on Information Theory 28 (2), 1982; k-means++ chooses the first
centres, and the best of ten starts counts. With changes of length 1, the squared Euclidean distance is twice the cosine distance,
so clients with more steps are not farther away:

    ||D_i / ||D_i|| - D_j / ||D_j|| ||^2 = 2 (1 - cos(D_i, D_j))

The number of groups must be known. A cohort with fewer directions is a single group, recorded as ``tasks/undivided``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import OURS
from raydfl.engine.groups._layers import LayerClusters

_DIGITS = 6
"""Compared digits of a direction's elements. Rounding affects later digits."""
_STARTS = 10
"""Repetitions with different first centres."""


@dataclass(frozen=True, kw_only=True)
class KMeans(LayerClusters):
    """Groups by k-means on the directions of the last layers' changes."""

    clusters: Annotated[int, Field(ge=2, description="Number of groups."), OURS] = 2

    def labels(self, heads: Sequence[Mapping[str, Tensor]]) -> tuple[np.ndarray, int, bool]:
        """Cluster clients by the directions of their changes. A tensor of a different shape counts as a different tensor."""
        if not heads:
            return np.zeros(0, np.int64), 0, True
        changes = [{(name, value.shape): value.double() for name, value in head.items()} for head in heads]
        zeros = {key: torch.zeros_like(value) for change in changes for key, value in change.items()}
        rows = [torch.cat([change.get(key, zero).reshape(-1) for key, zero in zeros.items()]) for change in changes]
        directions = torch.nn.functional.normalize(torch.stack(rows)).numpy()
        if len(np.unique(directions.round(_DIGITS), axis=0)) < self.clusters:
            return np.zeros(len(heads), np.int64), 0, True
        from sklearn.cluster import KMeans as Clustering  # takes a second to import

        fitted = Clustering(self.clusters, n_init=_STARTS, random_state=0).fit(directions)
        return fitted.labels_.astype(np.int64), 0, False
