"""The clients of a federation and the server's held-out data: who has which examples, in a few memory-mapped arrays.

A client is a range of those arrays and nothing else, so 100,000 of them cost some megabytes that all processes of a node share.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import safetensors.numpy

from raydfl.data.alter import Alteration
from raydfl.data.cache import FeatureStore, open_store, prepare
from raydfl.data.chunks import RunChunks
from raydfl.data.corrupt import choose_clients, wrong_labels
from raydfl.data.examples import ClientData, Examples
from raydfl.data.names import Names
from raydfl.data.partition import Partition, natural_order, partition_clips
from raydfl.data.poison import alterations_for, noise_of_some, poison
from raydfl.data.segment import SegmentSettings, segments
from raydfl.data.settings import DataSettings
from raydfl.data.split import Split, hold_out, split_clips
from raydfl.data.steps import Progress
from raydfl.errors import DataError, RunDirectoryError, nearest
from raydfl.files import RESUME, write_atomically, writing
from raydfl.seeds import generator

if TYPE_CHECKING:
    from raydfl.attack import Attack

FORMAT = 1
_FILE = "population.safetensors"

_CLEAN, _NOISY = 0, 1
"""Positions in a population's stores."""


class Population:
    """Clients and held-out data. Made by :func:`build_population` or :meth:`load`.

    Args:
        classes: names of the classes; a label is an index into it.
        length: frames of every example, ``None`` when they differ.
        stores: the clean features, and the noisy ones if some clients have them.
        arrays: for each of the parts train, validation (both by client), server_validation and test the columns ``starts``,
            ``counts``, ``labels``, ``clips``; ``train/offsets`` and ``validation/offsets`` (int64 [clients + 1]); the names of
            clients and groups; ``groups_of`` (int32 [clients], -1: none), ``noisy`` and ``label_errors`` (bool [clients]).
            With an attack also the parts attack (what clients train on when they attack, parallel to train) and triggered (test
            clips that carry the attack's trigger), and ``altered`` (bool [clients]: the features of its attack are in the last
            store).
        skipped: clips that were left out because they cannot be read, with the reasons.
        messages: what the user should know about how this population came about.
    """

    def __init__(
        self,
        classes: Sequence[str],
        length: int | None,
        stores: Sequence[FeatureStore],
        arrays: Mapping[str, np.ndarray],
        skipped: Sequence[tuple[str, str]] = (),
        messages: Sequence[str] = (),
    ) -> None:
        self.classes: tuple[str, ...] = tuple(classes)
        self.length = length
        self.stores = tuple(stores)
        self.skipped: tuple[tuple[str, str], ...] = tuple((clip, reason) for clip, reason in skipped)
        self.messages: tuple[str, ...] = tuple(messages)
        self._arrays = dict(arrays)
        self.ids = self._names("ids")
        self._groups = self._names("groups")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bands(self) -> int:
        """Features of a frame."""
        return self.stores[_CLEAN].bands

    def index(self, client_id: str) -> int:
        """Position of a client.

        Raises:
            DataError: there is none of that id.
        """
        try:
            return self.ids.index(client_id)
        except ValueError:
            raise DataError(
                f"there is no client {client_id!r} among {len(self)}; {nearest(client_id, self.ids)}"
            ) from None

    def num_examples(self, index: int) -> int:
        """Training examples of a client."""
        offsets = self._arrays["train/offsets"]
        return int(offsets[index + 1] - offsets[index])

    def profile(self, index: int) -> dict[str, Any]:
        """What else is known of a client: ``group`` (where clients are made of groups), ``noisy``, ``label_errors``."""
        facts: dict[str, Any] = {
            "noisy": bool(self._arrays["noisy"][index]),
            "label_errors": bool(self._arrays["label_errors"][index]),
        }
        group = int(self._arrays["groups_of"][index])
        return facts if group < 0 else {"group": self._groups[group], **facts}

    def data(self, index: int, attacking: bool = False) -> ClientData:
        """A client's data; its ``test`` is empty.

        Args:
            attacking: with the training data of a client that attacks.
        """
        parts = {}
        for part in ("train", "validation"):
            offsets = self._arrays[f"{part}/offsets"]
            where, store = slice(offsets[index], offsets[index + 1]), _CLEAN
            if part == "train" and attacking and self._arrays["altered"][index]:
                store = len(self.stores) - 1
            elif part == "train" and self._arrays["noisy"][index]:
                store = _NOISY
            parts[part] = self._examples("attack" if part == "train" and attacking else part, where, store)
        return ClientData(parts["train"], parts["validation"], self._examples("test", slice(0, 0)))

    @functools.cached_property
    def test(self) -> Examples:
        """The server's test data."""
        return self._examples("test", slice(None))

    @functools.cached_property
    def triggered(self) -> Examples:
        """Copies of test clips with the trigger of a backdoor, under their true labels, none of which is its target; or empty."""
        there = "triggered/starts" in self._arrays
        return self._examples(
            "triggered" if there else "test", slice(None) if there else slice(0, 0), len(self.stores) - 1
        )

    @functools.cached_property
    def validation(self) -> Examples:
        """The server's validation data (``split.official_validation: validation``); else empty."""
        return self._examples("server_validation", slice(None))

    def label_counts(self) -> np.ndarray:
        """int64 [clients, classes]: training clips of each client by label, wrong labels as they are."""
        offsets = self._arrays["train/offsets"]
        client = np.repeat(np.arange(len(self)), np.diff(offsets))
        clips = self._arrays["train/clips"]
        # The segments of a clip follow one another: only the first of each counts.
        first = np.ones(len(clips), bool)
        first[1:] = (clips[1:] != clips[:-1]) | (client[1:] != client[:-1])
        cell = client[first] * len(self.classes) + self._arrays["train/labels"][first]
        counts = np.bincount(cell, minlength=len(self) * len(self.classes))
        return counts.reshape(len(self), len(self.classes))

    def save(self, folder: Path) -> None:
        """Writes everything but the features, which stay in the cache, to the file ``population.safetensors`` in ``folder``.

        Raises:
            ResourcesError: the disk is full or the folder cannot be written.
        """
        arrays = {name: np.ascontiguousarray(array) for name, array in sorted(self._arrays.items())}
        facts = {
            "format": FORMAT,
            "classes": self.classes,
            "length": self.length,
            "stores": [str(store.folder) for store in self.stores],
            "skipped": self.skipped,
            "messages": self.messages,
            "digest": _digest(arrays),
        }
        content = safetensors.numpy.save(arrays, {"raydfl": json.dumps(facts)})
        with writing(folder, len(content), "the files of the population", RESUME):
            write_atomically(folder / _FILE, functools.partial(_write_bytes, content))

    @classmethod
    def load(cls, folder: Path, verify: bool = False) -> Population:
        """Opens what :meth:`save` wrote, in milliseconds and without a copy.

        Args:
            verify: read everything and compare it with its digest.

        Raises:
            RunDirectoryError: the file is missing or damaged.
            DataError: the features in the cache are.
        """
        path = folder / _FILE
        try:
            arrays, metadata = _map_safetensors(path)
            facts = json.loads(metadata["raydfl"])
            if facts["format"] != FORMAT:
                raise ValueError(f"it is of format {facts['format']}, this version of raydfl reads {FORMAT}")
            if verify and _digest(arrays) != facts["digest"]:
                raise ValueError("its content has changed")
            stores = [open_store(Path(store)) for store in facts["stores"]]
            return cls(facts["classes"], facts["length"], stores, arrays, facts["skipped"], facts["messages"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RunDirectoryError(
                f"{path} is missing or damaged ({reason}); the population of this run cannot be opened: start the run again in "
                "a new folder"
            ) from error

    def _names(self, kind: str) -> Names:
        return Names(*(self._arrays[f"{kind}/{part}"] for part in ("text", "ends", "order")))

    def _examples(self, part: str, where: slice, store: int = _CLEAN) -> Examples:
        starts, counts, labels, clips = (
            self._arrays[f"{part}/{column}"][where] for column in ("starts", "counts", "labels", "clips")
        )
        return Examples(
            self.stores[store], starts, counts, labels.astype(np.int64), clips.astype(np.int64), self.length
        )


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


_DTYPES = {"BOOL": np.bool_, "U8": np.uint8, "I32": np.int32, "I64": np.int64}


def _map_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a safetensors file as views of a read-only map (the library itself copies them), and its metadata.

    Raises:
        ValueError: the file is not of that format, or not whole.
    """
    whole = np.asarray(np.memmap(path, np.uint8, "r"))
    start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    header = json.loads(whole[8:start].tobytes())
    metadata = header.pop("__metadata__")
    ends = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if start + ends != len(whole):
        raise ValueError(f"it has {len(whole)} bytes instead of {start + ends}")
    arrays = {}
    for name, entry in header.items():
        first, stop = (start + offset for offset in entry["data_offsets"])
        arrays[name] = whole[first:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def build_population(
    data: DataSettings,
    seed: int,
    progress: Progress | None = None,
    run_chunks: RunChunks | None = None,
    attack: Attack | None = None,
) -> Population:
    """Lists the clips, divides them, and makes sure that their features are in the cache.

    Args:
        data: the configuration.
        seed: the run's: it decides the split, the partition, the local hold-outs and the corruption.
        progress: shown while features are made.
        run_chunks: executes chunks of that work, on a cluster for example; local processes when ``None``.
        attack: what attackers do to their recordings and labels, if there are any.

    Raises:
        ConfigError: options that the data set does not take, or an attack that does not fit the data.
        DataError: recordings that cannot be used, or a split or partition that they do not allow.
        ResourcesError: no room for the features.
    """
    manifest, classes = list_clips(data)
    division = divide(manifest, classes, data, seed)  # before the long work: what cannot be done fails now
    if attack is not None:
        attack.check(classes, data.features)
        attack.candidates(Names.of(division.partition.ids), seed)
    store = _prepare(data, manifest, progress, run_chunks)
    messages = []
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
        division = _divide(manifest, usable, classes, data, seed)
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


def list_clips(data: DataSettings) -> tuple[pa.Table, list[str]]:
    """The manifest of the configured data set and the names of its classes; no clip is opened.

    Raises:
        ConfigError: options that the data set does not take.
        DataError: recordings that are not there, or a list that cannot be used.
    """
    manifest = data.source.open().manifest()
    return manifest, natural_order(manifest.column("label").unique().to_pylist())


def divide(manifest: pa.Table, classes: Sequence[str], data: DataSettings, seed: int) -> Division:
    """Who has which clips if all of them can be read.

    Raises:
        DataError: a split or partition that the recordings do not allow.
    """
    return _divide(manifest, np.arange(manifest.num_rows), classes, data, seed)


def _divide(manifest: pa.Table, usable: np.ndarray, classes: Sequence[str], data: DataSettings, seed: int) -> Division:
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
    attack: Attack | None,
) -> Population:
    partition, held_out = division.partition, division.held_out
    ids = Names.of(partition.ids)
    client = np.repeat(np.arange(len(ids)), np.diff(partition.offsets))
    train, train_of = partition.rows[~held_out], client[~held_out]
    validation, validation_of = partition.rows[held_out], client[held_out]
    labels = _corrupted_labels(division.labels[train], train_of, ids, len(classes), data, seed)
    noisy = np.zeros(len(ids), bool)
    stores = [store]

    def features(
        clips: np.ndarray, noisy: np.ndarray, alteration: Alteration | None, altered: np.ndarray
    ) -> FeatureStore:
        """Of some clips (ascending), those with noise (bool [clips]) noisy, those to be altered (bool [clips]) altered."""
        names = manifest.column("clip").take(pa.array(clips)).to_pylist()
        snr = None if data.corrupt.noise is None else data.corrupt.noise.snr_db
        return prepare(
            data.source,
            manifest.take(pa.array(clips)),
            data.features,
            cache=data.cache,
            noise=None if snr is None or not noisy.any() else noise_of_some(names, noisy, snr, seed),
            alterations=None if alteration is None else alterations_for(names, altered, alteration, seed),
            progress=progress,
            run_chunks=run_chunks,
        )

    train_rows = _Rows.of(store, train)
    if data.corrupt.noise is not None:
        noisy = choose_clients(ids, data.corrupt.noise.clients, seed, "noise")
        affected = np.sort(train[noisy[train_of]])
        if len(affected):
            everything = np.ones(len(affected), bool)
            stores.append(features(affected, everything, None, ~everything))
            mine = noisy[train_of]
            train_rows = train_rows.replaced(mine, _Rows.of(stores[_NOISY], np.searchsorted(affected, train[mine])))
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
    return Population(classes, _common_length(arrays), stores, arrays, skipped, messages)


def _with_label_errors(ids: Names, data: DataSettings, seed: int) -> np.ndarray:
    if data.corrupt.labels is None:
        return np.zeros(len(ids), bool)
    return choose_clients(ids, data.corrupt.labels.clients, seed, "labels")


def _corrupted_labels(
    labels: np.ndarray, client: np.ndarray, ids: Names, classes: int, data: DataSettings, seed: int
) -> np.ndarray:
    """``labels`` (int64 [clips], of clients ``client``, ascending) with the wrong ones in place."""
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
    attack: Attack,
    training: _Training,
    division: Division,
    ids: Names,
    classes: Sequence[str],
    data: DataSettings,
    seed: int,
    stores: list[FeatureStore],
    features: Callable[[np.ndarray, np.ndarray, Alteration | None, np.ndarray], FeatureStore],
) -> dict[str, np.ndarray]:
    """The parts attack and triggered. Features that they need are made by ``features`` and added to ``stores``, as the last."""
    poisoned = poison(attack, ids, classes, training.client, training.labels, seed)
    mine = poisoned.attacker[training.client]
    target, alteration, test = attack.target_class(classes), attack.alteration(), division.split.test
    triggered = test[:0] if target is None or alteration is None else test[division.labels[test] != target]
    altered = np.zeros(len(ids), bool)
    rows, sounds = training.rows, _Rows.of(stores[_CLEAN], triggered)
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
    """The columns of one part; with ``owners`` (client of each clip, ascending; number of clients) also its offsets."""
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
