"""How a population comes about: clips are listed, divided, spoilt where that is asked for, and their features prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError
from raydfl.core.progress import Progress
from raydfl.core.seeds import generator
from raydfl.data.corruption import choose_clients, wrong_labels
from raydfl.data.features.alteration import Alteration
from raydfl.data.features.cache import FeatureStore, prepare
from raydfl.data.features.extraction import RunChunks
from raydfl.data.features.statistics import group_numbers, normalise_groups, statistics_of
from raydfl.data.listing import deal_ungrouped, kept_labels
from raydfl.data.manifest import remarks_of
from raydfl.data.names import Names
from raydfl.data.partition import Partition, natural_order, partition_clips
from raydfl.data.poisoning import Poisoner, alterations_for, noise_of_some, poison
from raydfl.data.population import CLEAN, NOISY, Population
from raydfl.data.remote import fetch_recordings
from raydfl.data.segment import SegmentSettings, segments
from raydfl.data.settings import DataSettings
from raydfl.data.split import Split, hold_out, split_clips


def build_population(
    data: DataSettings,
    seed: int,
    progress: Progress | None = None,
    run_chunks: RunChunks | None = None,
    attack: Poisoner | None = None,
    classes: Sequence[str] | None = None,
    labels_needed: bool = True,
) -> Population:
    """Lists the clips, divides them, and makes sure that their features are in the cache.

    Args:
        data: the configuration.
        seed: the run's: it decides the split, the partition, the local hold-outs and the corruption.
        progress: shown while features are made.
        run_chunks: executes chunks of that work, on a cluster for example; local processes when ``None``.
        attack: what attackers do to their recordings and labels, if there are any.
        classes: of the whole federation, where these clips are a part of it and need not show them all.
        labels_needed: whether each class has to be learnt, so that one without training clips is a mistake.

    Raises:
        ConfigError: options that the data set does not take, or an attack that does not fit the data.
        DataError: recordings that cannot be used, or a split or partition that they do not allow.
        ResourcesError: no room for the features.
    """
    complete = classes is None
    manifest, own = list_clips(data, seed, progress, complete)
    classes = own if classes is None else classes
    division = divide(
        manifest, classes, data, seed, complete and labels_needed
    )  # before the long work: what cannot be done fails now
    if attack is not None:
        attack.check(classes, data.features)
        attack.candidates(Names.of(division.partition.ids), seed)
    store = _prepare(data, manifest, progress, run_chunks)
    messages = remarks_of(manifest)
    skipped: list[tuple[str, str]] = []
    if store.failures:
        clips = manifest.column("clip")
        skipped = [(clips[index].as_py(), reason) for index, reason in sorted(store.failures.items())]
        messages.append(
            f"{len(skipped)} of {manifest.num_rows} clips cannot be read and are left out, the first {skipped[0][0]}"
        )
        usable = np.delete(np.arange(manifest.num_rows), sorted(store.failures))
        if not len(usable):
            raise DataError(
                f"none of {manifest.num_rows} clips can be read, the first {skipped[0][0]}: {skipped[0][1]}"
            )
        division = _divide(manifest, usable, classes, data, seed, complete and labels_needed)
    dropped = len(division.split.train) - len(division.partition.rows)
    if dropped:
        messages.append(
            f"{dropped} training clips belong to no client: theirs would have fewer than {data.partition.minimum} clips"
        )
    return _assemble(division, store, manifest, classes, data, seed, progress, run_chunks, skipped, messages, attack)


def _prepare(
    data: DataSettings, manifest: pa.Table, progress: Progress | None, run_chunks: RunChunks | None
) -> FeatureStore:
    return prepare(
        data.source,
        manifest,
        data.features,
        cache=data.cache,
        unreadable=data.unreadable,
        progress=progress,
        run_chunks=run_chunks,
    )


@dataclass(frozen=True)
class Division:
    """Who has which clips. Clips are numbered as in the manifest."""

    labels: np.ndarray
    """int64 [clips of the manifest]."""
    split: Split
    partition: Partition
    held_out: np.ndarray
    """bool, one for each of the partition's rows: the client's own validation."""


def list_clips(
    data: DataSettings, seed: int, progress: Progress | None = None, complete: bool = True
) -> tuple[pa.Table, list[str]]:
    """List the configured data set: its manifest and the names of its classes; no clip is opened.

    What is behind a URI is copied first.

    Args:
        seed: the run's: it decides to whom ``data.ungrouped: deal`` deals.
        complete: whether these are all clips of the federation, so that a label to be left out must be among theirs.

    Raises:
        ConfigError: options that the data set does not take.
        DataError: recordings that are not there, or a list that cannot be used.
    """
    for uri in data.uris.values():
        fetch_recordings(uri, data.cache, progress)
    manifest = data.source.open().manifest()
    labels = natural_order(manifest.column("label").unique().to_pylist())
    if data.leave_out:
        labels = kept_labels(labels, data.leave_out if complete else set(data.leave_out) & set(labels))
        manifest = manifest.filter(pc.is_in(manifest.column("label"), pa.array(labels)))
    if data.ungrouped == "deal" and manifest.column("group").null_count:
        manifest = deal_ungrouped(manifest, seed)
    return manifest, labels


def divide(
    manifest: pa.Table, classes: Sequence[str], data: DataSettings, seed: int, complete: bool = True
) -> Division:
    """Divide the clips among the clients as if all of them could be read.

    Args:
        complete: whether these are all clips of the federation, so that a class without clips is a mistake.

    Raises:
        DataError: a split or partition that the recordings do not allow.
    """
    return _divide(manifest, np.arange(manifest.num_rows), classes, data, seed, complete)


def _divide(
    manifest: pa.Table, usable: np.ndarray, classes: Sequence[str], data: DataSettings, seed: int, complete: bool
) -> Division:
    """Splits and partitions the ``usable`` rows (int64, ascending) of the manifest."""
    position = {name: number for number, name in enumerate(classes)}
    labels = np.array([position[label] for label in manifest.column("label").to_pylist()], np.int64)
    table = manifest if len(usable) == manifest.num_rows else manifest.take(pa.array(usable))
    split = split_clips(table, data.split, seed)
    partition = partition_clips(table, split.train, labels[usable], data.partition, seed)
    split = Split(usable[split.train], usable[split.validation], usable[split.test])
    partition = Partition(
        partition.ids, usable[partition.rows], partition.offsets, partition.groups, partition.group_of
    )
    if complete and data.label_sets is None:
        _check_classes(classes, labels, usable, split, partition)
    held_out = np.zeros(len(partition.rows), bool)
    if data.split.validation:
        for client_id, start, stop in zip(partition.ids, partition.offsets, partition.offsets[1:], strict=False):
            rng = generator(seed, 0, client_id, "local validation")
            held_out[start:stop] = hold_out(int(stop - start), data.split.validation, rng)
    return Division(labels, split, partition, held_out)


def _check_classes(
    classes: Sequence[str], labels: np.ndarray, usable: np.ndarray, split: Split, partition: Partition
) -> None:
    """Refuses a class that no client could learn."""

    def count(rows: np.ndarray) -> np.ndarray:
        return np.bincount(labels[rows], minlength=len(classes))

    for number in np.flatnonzero(count(partition.rows) == 0):
        raise DataError(
            f"no client has a clip of label {classes[int(number)]!r}: of its {np.sum(labels == number)} clips "
            f"{count(usable)[number]} can be read, {count(split.test)[number]} are in the test set and "
            f"{count(split.validation)[number]} in the server's validation set; choose data.split or data.partition "
            "differently, or leave the label out of the data"
        )


def _assemble(
    division: Division,
    store: FeatureStore,
    manifest: pa.Table,
    classes: Sequence[str],
    data: DataSettings,
    seed: int,
    progress: Progress | None,
    run_chunks: RunChunks | None,
    skipped: Sequence[tuple[str, str]],
    messages: Sequence[str],
    attack: Poisoner | None,
) -> Population:
    partition, held_out = division.partition, division.held_out
    ids = Names.of(partition.ids)
    client = np.repeat(np.arange(len(ids)), np.diff(partition.offsets))
    train, train_of = partition.rows[~held_out], client[~held_out]
    validation, validation_of = partition.rows[held_out], client[held_out]
    labels = _corrupted_labels(division.labels[train], train_of, ids, len(classes), data, seed)
    noisy = np.zeros(len(ids), bool)
    group, is_train = group_numbers(manifest), np.isin(np.arange(manifest.num_rows), train)
    stores: list[FeatureStore] = []

    def normalised(store: FeatureStore, clips: np.ndarray) -> FeatureStore:
        """Return the features of these clips of the manifest as the settings want them."""
        if data.features.normalise != "group":
            return store
        return normalise_groups(
            store, group[clips], is_train[clips], data.features.dtype, stores[CLEAN] if stores else None
        )

    def features(
        clips: np.ndarray, noisy: np.ndarray, alteration: Alteration | None, altered: np.ndarray
    ) -> FeatureStore:
        """Return the features of some clips (ascending), noisy and altered where the flags (bool [clips]) say so."""
        names = manifest.column("clip").take(pa.array(clips)).to_pylist()
        snr = None if data.corrupt.noise is None else data.corrupt.noise.snr_db
        store = prepare(
            data.source,
            manifest.take(pa.array(clips)),
            data.features,
            cache=data.cache,
            noise=None if snr is None or not noisy.any() else noise_of_some(names, noisy, snr, seed),
            alterations=None if alteration is None else alterations_for(names, altered, alteration, seed),
            progress=progress,
            run_chunks=run_chunks,
        )
        return normalised(store, clips)

    stores.append(normalised(store, np.arange(manifest.num_rows)))
    train_rows = _Rows.of(store, train)
    if data.corrupt.noise is not None:
        noisy = choose_clients(ids, data.corrupt.noise.clients, seed, "noise")
        affected = np.sort(train[noisy[train_of]])
        if len(affected):
            everything = np.ones(len(affected), bool)
            stores.append(features(affected, everything, None, ~everything))
            mine = noisy[train_of]
            train_rows = train_rows.replaced(mine, _Rows.of(stores[NOISY], np.searchsorted(affected, train[mine])))
    stride = None if data.segment is None else data.segment.test_stride
    arrays = {
        **_columns("train", train_rows, labels, train, data.segment, None, (train_of, len(ids))),
        **_columns(
            "validation",
            _Rows.of(store, validation),
            division.labels[validation],
            validation,
            data.segment,
            stride,
            (validation_of, len(ids)),
        ),
    }
    for name, rows in (("server_validation", division.split.validation), ("test", division.split.test)):
        arrays |= _columns(name, _Rows.of(store, rows), division.labels[rows], rows, data.segment, stride, None)
    if attack is not None:
        training = _Training(train, train_of, train_rows, labels, noisy[train_of])
        arrays |= _attacked(attack, training, division, ids, classes, data, seed, stores, features)
    arrays |= {f"ids/{name}": array for name, array in ids.arrays.items()}
    arrays |= {f"groups/{name}": array for name, array in Names.of(partition.groups).arrays.items()}
    arrays |= {
        "groups_of": partition.group_of.astype(np.int32),
        "noisy": noisy,
        "label_errors": _with_label_errors(ids, data, seed),
    }
    if data.features.normalise == "group":
        arrays |= _statistics(stores[CLEAN], group[train], train_of, len(ids))
        used = np.concatenate([train, validation, division.split.validation, division.split.test])
        strange = len(np.setdiff1d(group[used], group[train]))
        if strange:
            messages = [
                *messages,
                f"{strange} of {len(np.unique(group[used]))} groups have no training clip: theirs are normalised with the "
                "statistics of all training clips",
            ]
    separator = None if data.label_sets is None else data.label_sets.separator
    return Population(classes, _common_length(arrays), stores, arrays, skipped, messages, separator=separator)


def _statistics(store: FeatureStore, group: np.ndarray, client: np.ndarray, clients: int) -> dict[str, np.ndarray]:
    """Return what a recording of each client would be normalised with: see :meth:`Population.statistics`.

    Args:
        store: normalised by group.
        group: int64 [training clips].
        client: int64 [training clips], ascending: whose each clip is.
    """
    values = statistics_of(store)
    bounds = np.searchsorted(client, np.arange(clients))
    lowest, highest = np.minimum.reduceat(group, bounds), np.maximum.reduceat(group, bounds)
    return {
        "statistics/values": values,
        "statistics/of": np.where(lowest == highest, lowest, values.shape[1] - 1).astype(np.int32),
    }


def _with_label_errors(ids: Names, data: DataSettings, seed: int) -> np.ndarray:
    if data.corrupt.labels is None:
        return np.zeros(len(ids), bool)
    return choose_clients(ids, data.corrupt.labels.clients, seed, "labels")


def _corrupted_labels(
    labels: np.ndarray, client: np.ndarray, ids: Names, classes: int, data: DataSettings, seed: int
) -> np.ndarray:
    """Return ``labels`` (int64 [clips], of clients ``client``, ascending) with the wrong ones in place."""
    if data.corrupt.labels is None:
        return labels
    labels = labels.copy()
    bounds = np.searchsorted(client, np.arange(len(ids) + 1))
    for number in np.flatnonzero(_with_label_errors(ids, data, seed)):
        mine = slice(bounds[number], bounds[number + 1])
        labels[mine] = wrong_labels(labels[mine], classes, data.corrupt.labels.rate, seed, ids[int(number)])
    return labels


@dataclass(frozen=True)
class _Rows:
    """Where clips lie in their store."""

    starts: np.ndarray
    frames: np.ndarray

    @classmethod
    def of(cls, store: FeatureStore, clips: np.ndarray) -> _Rows:
        return cls(store.offsets[clips], store.offsets[clips + 1] - store.offsets[clips])

    def replaced(self, where: np.ndarray, other: _Rows) -> _Rows:
        starts, frames = self.starts.copy(), self.frames.copy()
        starts[where], frames[where] = other.starts, other.frames
        return _Rows(starts, frames)


@dataclass(frozen=True)
class _Training:
    """All clients' training clips, by client; one entry for each clip."""

    clips: np.ndarray
    """int64: rows of the manifest."""
    client: np.ndarray
    """int64, ascending."""
    rows: _Rows
    labels: np.ndarray
    """int64: wrong ones as they are."""
    noisy: np.ndarray
    """bool."""


def _attacked(
    attack: Poisoner,
    training: _Training,
    division: Division,
    ids: Names,
    classes: Sequence[str],
    data: DataSettings,
    seed: int,
    stores: list[FeatureStore],
    features: Callable[[np.ndarray, np.ndarray, Alteration | None, np.ndarray], FeatureStore],
) -> dict[str, np.ndarray]:
    """Make the parts attack and triggered. ``features`` makes the features that they need, which become the last of ``stores``."""
    poisoned = poison(attack, ids, classes, training.client, training.labels, seed)
    mine = poisoned.attacker[training.client]
    target, alteration, test = attack.target_class(classes), attack.alteration(), division.split.test
    triggered = test[:0] if target is None or alteration is None else test[division.labels[test] != target]
    altered = np.zeros(len(ids), bool)
    rows, sounds = training.rows, _Rows.of(stores[CLEAN], triggered)
    clips = np.concatenate([training.clips[mine], triggered])
    if alteration is not None and len(clips):
        order = np.argsort(clips)
        none = np.zeros(len(triggered), bool)
        noisy, changed = np.r_[training.noisy[mine], none][order], np.r_[poisoned.altered[mine], ~none][order]
        clips, altered = clips[order], poisoned.attacker
        store = features(clips, noisy, alteration, changed)
        stores.append(store)
        rows = rows.replaced(mine, _Rows.of(store, np.searchsorted(clips, training.clips[mine])))
        sounds = _Rows.of(store, np.searchsorted(clips, triggered))
    columns = {
        "altered": altered,
        **_columns("attack", rows, poisoned.labels, training.clips, data.segment, None, None),
    }
    if len(triggered):
        stride = None if data.segment is None else data.segment.test_stride
        columns |= _columns("triggered", sounds, division.labels[triggered], triggered, data.segment, stride, None)
    return columns


def _columns(
    part: str,
    rows: _Rows,
    labels: np.ndarray,
    clips: np.ndarray,
    settings: SegmentSettings | None,
    stride: int | None,
    owners: tuple[np.ndarray, int] | None,
) -> dict[str, np.ndarray]:
    """Return the columns of one part; with ``owners`` (client of each clip, ascending; number of clients) also its offsets."""
    clip, first, frames = segments(rows.frames, settings, stride)
    columns = {
        f"{part}/starts": (rows.starts[clip] + first).astype(np.int64),
        f"{part}/counts": frames.astype(np.int32),
        f"{part}/labels": labels[clip].astype(np.int32),
        f"{part}/clips": clips[clip].astype(np.int32),
    }
    if owners is not None:
        client, clients = owners
        columns[f"{part}/offsets"] = np.searchsorted(client[clip], np.arange(clients + 1)).astype(np.int64)
    return columns


def _common_length(arrays: Mapping[str, np.ndarray]) -> int | None:
    counts = np.concatenate([array for name, array in arrays.items() if name.endswith("/counts")])
    return cast(int, counts[0].item()) if np.ptp(counts) == 0 else None
