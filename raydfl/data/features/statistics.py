"""Z-scores with the statistics of a group's training clips (``normalise: group``).

A band's mean and deviation are computed over all frames of the group's training clips. Held-out clips use them too, so they never
affect a training feature. Clips of a group without training clips, and new recordings at inference, use the statistics over the
training clips of all groups. All clips without a group form a group.

The cache contains unnormalised features for every division of the clips. Each division adds a store of normalised features, with
the further file ``statistics.npy``: float64 [2, groups + 1, bands], means and deviations of all groups, and last those over all
groups.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from raydfl.data.features.cache import FORMAT, FeatureStore, open_or_make, write_store
from raydfl.data.features.wave import EPSILON


def number_groups(manifest: pa.Table) -> np.ndarray:
    """Number the groups of clips in order of appearance, int64 [clips]. Clips without a group form a group."""
    column = manifest.column("group").combine_chunks().dictionary_encode(null_encoding="encode")
    numbers: np.ndarray = column.indices.to_numpy().astype(np.int64)
    return numbers


def load_statistics(store: FeatureStore) -> np.ndarray:
    """Load the means and deviations of a store by :func:`normalise_groups`, float64 [2, groups + 1, bands]."""
    statistics: np.ndarray = np.load(store.folder / "statistics.npy")
    return statistics


def z_scores(matrix: np.ndarray, statistics: np.ndarray) -> np.ndarray:
    """Compute z-scores of features, float32 [frames, bands], with means and deviations, float64 [2, bands]."""
    mean, deviation = statistics
    result: np.ndarray = ((matrix - mean) / (deviation + EPSILON)).astype(np.float32)
    return result


def normalise_groups(
    store: FeatureStore, group: np.ndarray, training: np.ndarray, dtype: str, clean: FeatureStore | None = None
) -> FeatureStore:
    """Normalise the clips of a store by group, or open the cached result.

    Args:
        store: Unnormalised features.
        group: Number of each clip's group in the whole data set, int64 [clips].
        training: Training clips, the source of the statistics, bool [clips].
        dtype: Stored dtype.
        clean: The result for the whole data set. Its statistics normalise all clips except training clips. None: this call
            makes the result for the whole data set.

    Raises:
        ResourcesError: The disk is full or the cache folder is not writable.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = [FORMAT, "group", store.folder.name, dtype, None if clean is None else clean.folder.name]
    digest.update(json.dumps(names).encode())
    digest.update(group.tobytes() + training.tobytes())
    like = np.zeros((0, store.bands), dtype)

    def make() -> None:
        groups = int(group.max(initial=-1)) + 1 if clean is None else load_statistics(clean).shape[1] - 1
        statistics = _compute_statistics(store, group, training, groups)
        held_out = statistics if clean is None else load_statistics(clean)
        parts = _normalise(store, group, training, statistics, held_out)
        facts = {"of": store.folder.name, "failures": dict(store.failures)}
        write_store(folder, store.lengths, store.length, parts, like, facts, statistics=statistics)

    folder = store.folder.with_name(digest.hexdigest())
    return open_or_make(folder, store.frames.size * like.itemsize, make)


def _compute_statistics(store: FeatureStore, group: np.ndarray, training: np.ndarray, groups: int) -> np.ndarray:
    # In float64, because float32 sums over many frames lose digits.
    frames = np.zeros((groups + 1, 1))
    total, squares = np.zeros((2, groups + 1, store.bands))
    for clip in np.flatnonzero(training).tolist():
        values = store.clip(clip)[: store.lengths[clip]].astype(np.float64)
        number = group[clip]
        frames[number] += len(values)
        total[number] += values.sum(axis=0)
        squares[number] += np.square(values).sum(axis=0)
    for sums in (frames, total, squares):
        sums[-1] = sums[:-1].sum(axis=0)
    # Groups without training clips get the statistics over all groups.
    numbers = np.where(frames[:, 0] > 0, np.arange(groups + 1), groups)
    mean = total[numbers] / np.maximum(frames[numbers], 1)
    deviation = np.sqrt(np.maximum(squares[numbers] / np.maximum(frames[numbers], 1) - np.square(mean), 0))
    return np.stack([mean, deviation])


def _normalise(
    store: FeatureStore, group: np.ndarray, training: np.ndarray, statistics: np.ndarray, held_out: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the normalised frames of each clip, with ``held_out`` statistics unless it is a training clip."""
    for clip, length in enumerate(store.lengths.tolist()):
        matrix = np.zeros(store.clip(clip).shape, np.float32)
        chosen = statistics if training[clip] else held_out
        matrix[:length] = z_scores(store.clip(clip)[:length], chosen[:, group[clip]])
        yield matrix
