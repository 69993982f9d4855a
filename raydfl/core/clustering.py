"""Clustering of clients by their updates: distances, HDBSCAN, noise assignment, and stable cluster names between rounds.

HDBSCAN (R. Campello, D. Moulavi, J. Sander, Density-Based Clustering Based on Hierarchical Density Estimates, PAKDD 2013) is from
the package ``hdbscan``. It determines the number of clusters, and labels outliers as noise.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

Distance = Literal["cosine", "l1", "l2", "inner"]

UNLIKE = 2.0
"""Distance between updates with different tensor names or shapes, equal to the cosine distance of opposite updates."""


def distances(vectors: Sequence[Mapping[str, Tensor]], kind: Distance) -> np.ndarray:
    """Compute pairwise distances between updates.

    ``cosine`` is 1 - cos, from 0 to 2. An update of zeros has the distance 1 to all updates. ``l1`` and ``l2`` use the norms.
    ``inner`` is the largest inner product of all pairs minus the pair's. ``l1``, ``l2`` and ``inner`` are divided by their mean
    over all pairs. Updates with different tensor names or shapes have the distance 2.

    Args:
        vectors: the tensors of each update.
        kind: kind of distance.

    Returns:
        float64 [updates, updates], symmetric, 0 on the diagonal.
    """
    count = len(vectors)
    result = np.full((count, count), UNLIKE)
    architectures: dict[Hashable, list[int]] = {}
    for position, tensors in enumerate(vectors):
        architecture = tuple((name, tuple(value.shape)) for name, value in tensors.items())
        architectures.setdefault(architecture, []).append(position)
    blocks: list[tuple[list[int], np.ndarray]] = []
    for positions in architectures.values():
        rows = np.stack(
            [
                np.concatenate([v.detach().cpu().double().numpy().ravel() for v in vectors[p].values()])
                for p in positions
            ]
        )
        blocks.append((positions, _compare_rows(rows, kind)))
    if kind != "cosine":
        pairs = np.concatenate([matrix[np.triu_indices(len(matrix), 1)] for _, matrix in blocks])
        if kind == "inner" and len(pairs):
            blocks = [(positions, pairs.max() - matrix) for positions, matrix in blocks]
            pairs = pairs.max() - pairs
        scale = float(pairs.mean()) if len(pairs) else 0.0
        blocks = [(positions, matrix / scale if scale > 0 else matrix) for positions, matrix in blocks]
    for positions, matrix in blocks:
        # Rounding makes matrix products slightly asymmetric and negative, but HDBSCAN needs proper distances.
        result[np.ix_(positions, positions)] = (matrix + matrix.T) / 2
    np.fill_diagonal(result, 0)
    return np.asarray(np.maximum(result, 0))


def _compare_rows(rows: np.ndarray, kind: Distance) -> np.ndarray:
    """Compute distances between vectors, or for ``inner`` their inner products: float64 [rows, rows]."""
    if kind == "cosine":
        norms = np.sqrt((rows * rows).sum(axis=1))
        unit = rows / np.where(norms > 0, norms, 1)[:, None]
        return np.asarray(1 - np.clip(unit @ unit.T, -1, 1))
    if kind == "inner":
        return np.asarray(rows @ rows.T)
    return np.stack([np.abs(rows - row).sum(axis=1) if kind == "l1" else _compute_norms(rows - row) for row in rows])


def _compute_norms(rows: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt((rows * rows).sum(axis=1)))


def hdbscan_labels(
    matrix: np.ndarray, min_cluster_size: int, min_samples: int, selection: str, epsilon: float, single: bool
) -> np.ndarray:
    """Cluster points with HDBSCAN.

    Args:
        matrix: float64 [points, points]: distances.
        min_cluster_size: minimum number of points in a cluster.
        min_samples: number of neighbours in the estimate of a point's density.
        selection: clusters to select from the hierarchy, ``eom`` or ``leaf``.
        epsilon: clusters at a smaller distance are merged.
        single: whether all points may form a single cluster.

    Returns:
        int64 [points]: labels, -1 for noise.
    """
    from hdbscan import HDBSCAN  # the import takes a second with scikit-learn, and most runs do not need it

    model = HDBSCAN(
        metric="precomputed",
        min_cluster_size=min_cluster_size,
        min_samples=min(min_samples, len(matrix) - 1),  # HDBSCAN needs more points than neighbours
        cluster_selection_method=selection,
        cluster_selection_epsilon=float(epsilon),
        allow_single_cluster=single,
        core_dist_n_jobs=1,
    )
    return np.asarray(model.fit(matrix).labels_, np.int64)


def assign_noise(labels: np.ndarray, matrix: np.ndarray, threshold: float) -> np.ndarray:
    """Assign noise points to clusters.

    A noise point joins the cluster with the smallest mean distance to its members if this is below the threshold. Otherwise it
    becomes a new cluster. If all points are noise, they form a single cluster.

    Args:
        labels: int64 [points], -1 for noise.
        matrix: float64 [points, points]: distances.
        threshold: 0: each noise point becomes a new cluster.

    Returns:
        int64 [points]: labels without noise.
    """
    clusters = [int(label) for label in np.unique(labels) if label >= 0]
    if not clusters:
        return np.zeros(len(labels), np.int64)
    result = labels.copy()
    new_label = max(clusters) + 1
    for point in np.flatnonzero(labels < 0):
        means = [float(matrix[point, labels == cluster].mean()) for cluster in clusters]
        nearest = int(np.argmin(means))
        if means[nearest] < threshold:
            result[point] = clusters[nearest]
        else:
            result[point], new_label = new_label, new_label + 1
    return result


def match(labels: Sequence[int], before: Sequence[str]) -> dict[int, str]:
    """Match clusters to the previous round's clusters, maximising the number of common members.

    Args:
        labels: each client's cluster.
        before: each client's previous cluster by name. Empty: none.

    Returns:
        Previous names by label. Clusters without a match are absent.
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
    """Return the purity of clusters: the fraction of points in the majority class of their cluster, 0 to 1.

    >>> purity([1, 1, 1, 2, 2], ["a", "a", "b", "b", "b"])
    0.8
    """
    from sklearn.metrics.cluster import contingency_matrix

    return float(
        contingency_matrix(list(map(str, truth)), list(map(str, labels))).max(axis=0).sum() / max(1, len(labels))
    )


def adjusted_rand_index(labels: Sequence[Hashable], truth: Sequence[Hashable]) -> float:
    """Return the adjusted Rand index of clusters and classes (Hubert and Arabie). 1: identical; 0: agreement by chance."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(list(map(str, truth)), list(map(str, labels))))
