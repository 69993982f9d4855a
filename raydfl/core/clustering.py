"""Clustering of clients by their updates: distances, HDBSCAN, what becomes of noise, and names that last from round to round.

HDBSCAN (R. Campello, D. Moulavi, J. Sander, Density-Based Clustering Based on Hierarchical Density Estimates, PAKDD 2013) is the
one of the package ``hdbscan``. It finds the number of clusters itself, and calls some points noise.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

Distance = Literal["cosine", "l1", "l2", "inner"]

UNLIKE = 2.0
"""The distance of updates whose tensors have different names or shapes: as large as that of opposite ones."""


def distances(vectors: Sequence[Mapping[str, Tensor]], kind: Distance) -> np.ndarray:
    """Return the distances between updates: float64 [updates, updates], symmetric, 0 on the diagonal.

    ``cosine`` is 1 - cos, from 0 to 2; an update of zeros is at 1 from all others. ``l1`` and ``l2`` are those of the norms, and
    ``inner`` is the largest inner product of a pair minus the pair's: these three are divided by their mean over all pairs, so that
    1 is the mean distance. Updates with tensors of different names or shapes are at a distance of 2.

    Args:
        vectors: the tensors of each update.
        kind: of the distance.
    """
    count = len(vectors)
    found = np.full((count, count), UNLIKE)
    alike: dict[Hashable, list[int]] = {}
    for position, tensors in enumerate(vectors):
        alike.setdefault(tuple((name, tuple(value.shape)) for name, value in tensors.items()), []).append(position)
    pairs: list[tuple[list[int], np.ndarray]] = []
    for positions in alike.values():
        rows = np.stack(
            [
                np.concatenate([v.detach().cpu().double().numpy().ravel() for v in vectors[p].values()])
                for p in positions
            ]
        )
        pairs.append((positions, _between(rows, kind)))
    if kind != "cosine":
        apart = np.concatenate([matrix[np.triu_indices(len(matrix), 1)] for _, matrix in pairs])
        if kind == "inner" and len(apart):
            pairs = [(positions, apart.max() - matrix) for positions, matrix in pairs]
            apart = apart.max() - apart
        scale = float(apart.mean()) if len(apart) else 0.0
        pairs = [(positions, matrix / scale if scale > 0 else matrix) for positions, matrix in pairs]
    for positions, matrix in pairs:
        found[np.ix_(positions, positions)] = (matrix + matrix.T) / 2
    np.fill_diagonal(found, 0)
    return np.asarray(np.maximum(found, 0))


def _between(rows: np.ndarray, kind: Distance) -> np.ndarray:
    """Return distances of vectors, or for ``inner`` their products: float64 [rows, rows]."""
    if kind == "cosine":
        norms = np.sqrt((rows * rows).sum(axis=1))
        unit = rows / np.where(norms > 0, norms, 1)[:, None]
        return np.asarray(1 - np.clip(unit @ unit.T, -1, 1))
    if kind == "inner":
        return np.asarray(rows @ rows.T)
    return np.stack([np.abs(rows - row).sum(axis=1) if kind == "l1" else _norms(rows - row) for row in rows])


def _norms(rows: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt((rows * rows).sum(axis=1)))


def hdbscan_labels(
    matrix: np.ndarray, min_cluster_size: int, min_samples: int, selection: str, epsilon: float, single: bool
) -> np.ndarray:
    """Return HDBSCAN's label of each point, -1 for noise: int64 [points].

    Args:
        matrix: float64 [points, points]: distances.
        min_cluster_size: points of the smallest cluster.
        min_samples: neighbours that make a point's surroundings dense.
        selection: ``eom`` or ``leaf``: which clusters of the hierarchy.
        epsilon: clusters nearer to each other are one.
        single: whether all points may be one cluster.
    """
    from hdbscan import HDBSCAN  # with scikit-learn a second, which other runs need not wait for

    model = HDBSCAN(
        metric="precomputed",
        min_cluster_size=min_cluster_size,
        min_samples=min(min_samples, len(matrix) - 1),
        cluster_selection_method=selection,
        cluster_selection_epsilon=float(epsilon),
        allow_single_cluster=single,
        core_dist_n_jobs=1,
    )
    return np.asarray(model.fit(matrix).labels_, np.int64)


def with_noise(labels: np.ndarray, matrix: np.ndarray, threshold: float) -> np.ndarray:
    """Return labels in which no point is noise.

    A point of noise joins the cluster to whose members its mean distance is smallest, if that is below the threshold; else it is a
    cluster of its own. Where all points are noise they are one cluster.

    Args:
        labels: int64 [points], -1 for noise.
        matrix: float64 [points, points]: distances.
        threshold: 0: every point of noise is a cluster of its own.
    """
    clusters = [int(label) for label in np.unique(labels) if label >= 0]
    if not clusters:
        return np.zeros(len(labels), np.int64)
    found = labels.copy()
    following = max(clusters) + 1
    for point in np.flatnonzero(labels < 0):
        means = [float(matrix[point, labels == cluster].mean()) for cluster in clusters]
        nearest = int(np.argmin(means))
        if means[nearest] < threshold:
            found[point] = clusters[nearest]
        else:
            found[point], following = following, following + 1
    return found


def match(labels: Sequence[int], before: Sequence[str]) -> dict[int, str]:
    """Return which cluster is which of the round before: those with the most members in common, each name once.

    Args:
        labels: the cluster of each client.
        before: the name of the cluster that each was in; empty: in none.

    Returns:
        The names by label; a cluster that has no member of a former one, or whose members' name another one took, has none.
    """
    from scipy.optimize import linear_sum_assignment

    clusters, names = list(dict.fromkeys(labels)), list(dict.fromkeys(name for name in before if name))
    common = np.zeros((len(clusters), len(names)))
    for label, name in zip(labels, before, strict=True):
        if name:
            common[clusters.index(label), names.index(name)] += 1
    rows, columns = linear_sum_assignment(common, maximize=True)
    return {clusters[r]: names[c] for r, c in zip(rows, columns, strict=True) if common[r, c] > 0}


def purity(labels: Sequence[Hashable], truth: Sequence[Hashable]) -> float:
    """Return the share of points that are of the kind of which most points of their cluster are, 0..1.

    >>> purity([1, 1, 1, 2, 2], ["a", "a", "b", "b", "b"])
    0.8
    """
    from sklearn.metrics.cluster import contingency_matrix

    return float(
        contingency_matrix(list(map(str, truth)), list(map(str, labels))).max(axis=0).sum() / max(1, len(labels))
    )


def adjusted_rand_index(labels: Sequence[Hashable], truth: Sequence[Hashable]) -> float:
    """Return how well clusters and kinds agree, corrected for chance (Hubert and Arabie): 1 is equal, 0 as by chance."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(list(map(str, truth)), list(map(str, labels))))
