"""``normalise: group``: z-scores with the statistics of a group's training clips.

A band's mean and deviation are those over all frames of the group's training clips, so that no held-out clip changes a feature
that is trained on. Held-out clips get the statistics of their group's training clips too. A group without a training clip has
none of its own: its clips get those over the training clips of all groups, as does a recording that a run has never seen. Clips
without a group form one of their own.

The features as they are lie in the cache for every division of the clips; of them each division makes a store of its own, with
one file more: ``statistics.npy``, float64 [2, groups + 1, bands], means and deviations, last those over all groups.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from raydfl.data.features.cache import FORMAT, FeatureStore, found_or_made, write_store
from raydfl.data.features.wave import EPSILON


def group_numbers(manifest: pa.Table) -> np.ndarray:
    """Number the groups in order of appearance: int64 [clips]; clips without a group form one of their own."""
    column = manifest.column("group").combine_chunks().dictionary_encode(null_encoding="encode")
    numbers: np.ndarray = column.indices.to_numpy().astype(np.int64)
    return numbers


def statistics_of(store: FeatureStore) -> np.ndarray:
    """Return float64 [2, groups + 1, bands]: means and deviations with which :func:`normalise_groups` made a store."""
    statistics: np.ndarray = np.load(store.folder / "statistics.npy")
    return statistics


def z_scores(matrix: np.ndarray, statistics: np.ndarray) -> np.ndarray:
    """Normalise ``matrix`` (float32 [frames, bands]) with ``statistics`` (float64 [2, bands]: mean, deviation)."""
    mean, deviation = statistics
    result: np.ndarray = ((matrix - mean) / (deviation + EPSILON)).astype(np.float32)
    return result


def normalise_groups(
    store: FeatureStore, group: np.ndarray, training: np.ndarray, dtype: str, clean: FeatureStore | None = None
) -> FeatureStore:
    """Normalise the clips of ``store``, which are not normalised yet, by group; from the cache or made now.

    Args:
        group: int64 [clips]: number of each clip's group in the whole data set.
        training: bool [clips]: those of which statistics are taken.
        dtype: in which the result is kept.
        clean: the result for the whole data set: what is not for training is normalised as there. ``None``: it is made now.

    Raises:
        ResourcesError: the disk is full or the cache folder cannot be written.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = [FORMAT, "group", store.folder.name, dtype, None if clean is None else clean.folder.name]
    digest.update(json.dumps(names).encode())
    digest.update(group.tobytes() + training.tobytes())
    like = np.zeros((0, store.bands), dtype)

    def make() -> None:
        groups = int(group.max(initial=-1)) + 1 if clean is None else statistics_of(clean).shape[1] - 1
        own = _statistics(store, group, training, groups)
        others = own if clean is None else statistics_of(clean)
        parts = _normalised(store, group, training, own, others)
        facts = {"of": store.folder.name, "failures": dict(store.failures)}
        write_store(folder, store.lengths, store.length, parts, like, facts, statistics=own)

    folder = store.folder.with_name(digest.hexdigest())
    return found_or_made(folder, store.frames.size * like.itemsize, make)


def _statistics(store: FeatureStore, group: np.ndarray, training: np.ndarray, groups: int) -> np.ndarray:
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
    numbers = np.where(frames[:, 0] > 0, np.arange(groups + 1), groups)
    mean = total[numbers] / np.maximum(frames[numbers], 1)
    deviation = np.sqrt(np.maximum(squares[numbers] / np.maximum(frames[numbers], 1) - np.square(mean), 0))
    return np.stack([mean, deviation])


def _normalised(
    store: FeatureStore, group: np.ndarray, training: np.ndarray, own: np.ndarray, others: np.ndarray
) -> Iterator[np.ndarray]:
    for clip, sounding in enumerate(store.lengths.tolist()):
        matrix = np.zeros(store.clip(clip).shape, np.float32)
        statistics = own if training[clip] else others
        matrix[:sounding] = z_scores(store.clip(clip)[:sounding], statistics[:, group[clip]])
        yield matrix
