"""The way to a population: clips are listed, divided, corrupted where that is asked for, and their features prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.core.progress import Progress
from raydfl.core.users_code import naming_failures
from raydfl.data.client_ids import ClientIds
from raydfl.data.corruption import LabelErrorSettings, NoiseSettings, choose_clients, wrong_labels
from raydfl.data.division import CLIENT_TEST, TRAINING, VALIDATION, Division, divide, list_clips
from raydfl.data.features.alteration import Alteration
from raydfl.data.features.cache import FeatureStore, prepare
from raydfl.data.features.digests import rows_of
from raydfl.data.features.extraction import RunChunks
from raydfl.data.features.statistics import group_numbers, normalise_groups, statistics_of
from raydfl.data.features.wave import BY_TRAINING_CLIPS
from raydfl.data.listing import column_codes
from raydfl.data.manifest import remarks_of
from raydfl.data.parts import join_parts
from raydfl.data.poisoning import Poisoner, alterations_for, noise_of_some, poison
from raydfl.data.pools import HIDDEN_LABEL, NO_LABEL, UNLABELLED
from raydfl.data.population import CLEAN, Population
from raydfl.data.presence import clients_without
from raydfl.data.profile import profile_columns
from raydfl.data.segment import segments
from raydfl.data.settings import DataSettings, ViewSettings, with_place
from raydfl.data.tables import ROLES, Tables, clips_table, encode, table_prefix


def build_population(
    data: DataSettings,
    seed: int,
    progress: Progress | None = None,
    run_chunks: RunChunks | None = None,
    attack: Poisoner | None = None,
    classes: Sequence[str] | None = None,
    labels_needed: bool = True,
) -> Population:
    """List the clips, divide them, and make sure that their features are in the cache.

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
    if data.parts:
        return join_parts(
            {name: _part(name, part, seed, progress, run_chunks, labels_needed) for name, part in data.each.items()}
        )
    complete = classes is None
    manifest, own = list_clips(data, seed, progress, complete)
    for name in data.columns:
        column_codes(manifest, name)
    classes = own if classes is None else classes
    all_learnt = complete and labels_needed
    division = divide(manifest, classes, data, seed, all_learnt)  # before the long work: what cannot be done fails now
    shared = data.partition.by == "table"
    if attack is not None:
        with naming_failures(attack, "check", kind="attack"):
            attack.check(classes, data.features)
        if shared and attack.poisons:
            raise ConfigError(
                "attack: attackers would train on altered recordings or labels, but by data.partition.by: table clients may share "
                "clips; take an attack on what clients send, or another partition"
            )
        with naming_failures(attack, "candidates", kind="attack"):
            attack.candidates(division.partition.ids, seed)
    prepared = functools.partial(prepare, data.source, cache=data.cache, progress=progress, run_chunks=run_chunks)
    store = prepared(manifest, data.stored_features, unreadable=data.unreadable)
    messages = remarks_of(manifest)
    if data.split.as_published is not None:
        messages.append(
            "data.split.as_published: clips that are trained on are tested on too, so scores say how well clips are known, not "
            "how well a failing machine is heard"
        )
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
        division = divide(manifest, classes, data, seed, all_learnt, usable)
    dropped = len(division.split.train) - len(division.partition.rows)
    if dropped and division.partition.table is not None:
        messages.append(f"{dropped} training clips belong to no client: none of {data.partition.file} has them")
    elif dropped:
        messages.append(
            f"{dropped} training clips belong to no client: theirs would have fewer than {data.partition.minimum} clips"
        )
    assembler = _Assembler(manifest, division, classes, data, seed, prepared, complete)
    return assembler.population(store, None if shared else attack, skipped, messages)


def _part(
    name: str,
    data: DataSettings,
    seed: int,
    progress: Progress | None,
    run_chunks: RunChunks | None,
    labels_needed: bool,
) -> Population:
    """Return the population of one of ``data.parts``; what is wrong with its recordings says whose they are."""
    try:
        return build_population(data, seed, progress, run_chunks, labels_needed=labels_needed)
    except (ConfigError, DataError) as error:
        raise with_place(error, f"data.parts.{name}") from error


@dataclass(frozen=True)
class _Rows:
    """The places of clips in their store."""

    starts: np.ndarray
    frames: np.ndarray
    store: np.ndarray
    """int8: position of the store."""

    @classmethod
    def of(cls, stores: Sequence[FeatureStore], clips: np.ndarray) -> _Rows:
        """Find clips in the last of the stores."""
        offsets, number = stores[-1].offsets, np.full(len(clips), len(stores) - 1, np.int8)
        return cls(offsets[clips], offsets[clips + 1] - offsets[clips], number)

    def take(self, where: np.ndarray) -> _Rows:
        return _Rows(self.starts[where], self.frames[where], self.store[where])

    def replaced(self, where: np.ndarray, other: _Rows) -> _Rows:
        starts, frames, store = self.starts.copy(), self.frames.copy(), self.store.copy()
        starts[where], frames[where], store[where] = other.starts, other.frames, other.store
        return _Rows(starts, frames, store)


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


class _Assembler:
    """The way from a division of clips and their features to the tables of a population."""

    def __init__(
        self,
        manifest: pa.Table,
        division: Division,
        classes: Sequence[str],
        data: DataSettings,
        seed: int,
        prepared: Callable[..., FeatureStore],
        complete: bool,
    ) -> None:
        self.manifest = manifest
        self.division = division
        self.classes = classes
        self.data = data
        self.seed = seed
        self.ids = ClientIds.from_strings(division.partition.ids)
        self._prepared = prepared
        self._complete = complete
        partition = division.partition
        self._shared = partition.ranges is not None
        """Clients have clips in common: no clip is one client's."""
        client = np.zeros(len(partition.rows), np.int64)
        if not self._shared:
            client = np.repeat(np.arange(len(self.ids)), np.diff(partition.offsets))
        trained, validated, tested = (division.role == role for role in (TRAINING, VALIDATION, CLIENT_TEST))
        self.train, self.train_of = partition.rows[trained], client[trained]
        self._pool = division.pool[trained]
        self.validation, self.validation_of = partition.rows[validated], client[validated]
        self.client_test, self.client_test_of = partition.rows[tested], client[tested]
        self._group = self._statistics_of(client)
        self._is_train = np.isin(np.arange(manifest.num_rows), self.train)
        self._columns = {name: column_codes(manifest, name) for name in data.columns}
        self.stores: list[FeatureStore] = []
        self.unread: list[tuple[str, str]] = []
        """Clips without a further view, since its file cannot be read, with the reason."""
        self.messages: list[str] = []
        """About further views."""

    def _statistics_of(self, client: np.ndarray) -> np.ndarray:
        """Return whose statistics each clip is normalised with, as a number: int64 [clips of the manifest].

        Args:
            client: int64, one for each of the partition's rows.
        """
        if self.data.features.normalise == "part":
            return np.zeros(self.manifest.num_rows, np.int64)
        if self.data.features.normalise == "client":
            numbers = np.full(
                self.manifest.num_rows, len(self.ids), np.int64
            )  # no client's: those of all training clips
            numbers[self.division.partition.rows] = client
            return numbers
        return group_numbers(self.manifest)

    def population(
        self, store: FeatureStore, attack: Poisoner | None, skipped: Sequence[tuple[str, str]], messages: Sequence[str]
    ) -> Population:
        """Return the population.

        Args:
            store: features of all clips, not yet normalised by group.
            attack: as for :func:`build_population`.
            skipped: as for :class:`Population`.
            messages: what is to be said before this has anything to say.
        """
        division, ids = self.division, self.ids
        self.stores.append(self._normalised(store, np.arange(self.manifest.num_rows)))
        training = self._training()
        blocks = [
            *self._pools("train", training.rows, training.labels),
            self._held_out("validation", self.validation, self.validation_of),
            self._held_out("client_test", self.client_test, self.client_test_of),
            self._held_out("server_validation", division.split.validation),
            self._held_out("test", division.split.test),
        ]
        if attack is not None:
            blocks += self._attacked(attack, training)
        clips = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        arrays: dict[str, np.ndarray] = {}
        if self.data.features.normalise in BY_TRAINING_CLIPS:
            arrays["statistics"] = statistics_of(self.stores[CLEAN])
            messages = [*messages, *self._strange_groups()]
        further = {name: values for name, (_, values) in self._columns.items()}
        if UNLABELLED in division.pools:
            further[HIDDEN_LABEL] = list(self.classes)
        pipeline = self.data.pipeline
        if len(training.rows.frames):
            pipeline.check_size(int(training.rows.frames.max()), store.bands, "data.transforms")
        arrays |= pipeline.make_tables(self.data.features, self.seed, table_prefix(""))
        length = _common_length(clips["frames"], pipeline.cut)
        views: dict[str, tuple[FeatureStore | None, int | None]] = {}
        without = clients_without(self.data.missing, ids, self.seed)
        for name, view in self.data.views.items():
            try:
                views[name], starts, frames = self._view(name, view)
                arrays |= view.pipeline.make_tables(view.features, self.seed, table_prefix(name))
            except (ConfigError, DataError) as error:
                raise with_place(error, f"data.views.{name}") from error
            clips[f"view:{name}:start"], clips[f"view:{name}:frames"] = starts[clips["clip"]], frames[clips["clip"]]
            if name in without:
                clips[f"view:{name}:frames"][(clips["client"] >= 0) & without[name][clips["client"]]] = 0
        population = Population(
            Tables(
                clips_table(clips, division.pools, further),
                pa.record_batch({**ids.columns(), **self._client_columns(training.rows.frames)}),
                arrays,
            ),
            self.classes,
            length,
            self.stores,
            [*skipped, *self.unread],
            [*messages, *self.messages],
            separator=None if self.data.label_sets is None else self.data.label_sets.separator,
            views=views,
        )
        return population.use(self.data)

    def _client_columns(self, frames: np.ndarray) -> dict[str, pa.Array]:
        """Return the columns of the clients table beside the ids.

        Args:
            frames: int64 [training clips].
        """
        partition, found = self.division.partition, {}
        if partition.ranges is not None:
            found = self._ranges(frames, partition.ranges)
        else:
            if partition.group_of.max() >= 0:
                found["group"] = encode(partition.group_of.astype(np.int32), partition.groups)
            flags = {"noisy": self._noisy, "label_errors": self._with_label_errors}
            found |= {name: pa.array(flag) for name, flag in flags.items() if flag.any()}
        if self.data.features.normalise in BY_TRAINING_CLIPS:
            bounds = partition.ranges or np.searchsorted(
                self.train_of, [np.arange(len(self.ids)), np.arange(1, len(self.ids) + 1)]
            )
            everything = statistics_of(self.stores[CLEAN]).shape[1] - 1
            found["statistics"] = pa.array(_statistics(everything, self._group[self.train], *bounds))
        return found | profile_columns(self.manifest, partition, self.data.profile)

    def _view(self, name: str, view: ViewSettings) -> tuple[tuple[FeatureStore, int | None], np.ndarray, np.ndarray]:
        """Prepare the features of a further view.

        Returns:
            The store with the frames of every example that has the view (``None`` if they differ), and the place of each clip's
            features: int64 and int32 [clips of the manifest], 0 frames if the clip lacks the view.
        """
        manifest, where = self.manifest, f"data.views.{name}"
        if view.column not in manifest.column_names:
            hint = nearest(view.column, manifest.column_names)
            raise DataError(f"{where}.column: the manifest has no column {view.column!r}; {hint}")
        dataset = self.data.source.open()
        paths = [dataset.file_of(row, view.column) for row in rows_of(manifest)]
        there = np.array([number for number, path in enumerate(paths) if path is not None], np.int64)
        if not len(there) and self._complete:  # other sites may have some
            raise DataError(f"{where}.column: no row of the manifest has a file in the column {view.column!r}")
        table = manifest.take(pa.array(there))
        table = table.set_column(
            table.column_names.index("path"), "path", pa.array([paths[number] for number in there], pa.string())
        )
        store = self._prepared(table, view.stored_features, unreadable=self.data.unreadable)
        starts, counts = np.zeros((2, manifest.num_rows), np.int64)
        starts[there], counts[there] = store.offsets[:-1], np.diff(store.offsets)
        failed = there[sorted(store.failures)]
        counts[failed] = 0
        clips_of = manifest.column("clip")
        self.unread += [
            (clips_of[clip].as_py(), f"view {name}: {store.failures[place]}")
            for clip, place in zip(failed.tolist(), sorted(store.failures), strict=True)
        ]
        if len(failed):
            self.messages.append(
                f"view {name}: {len(failed)} of {len(there)} files cannot be read; these clips are without it, the first "
                f"{clips_of[int(failed[0])].as_py()}"
            )
        present = counts[counts > 0]
        if not len(present):
            return (store, None), starts, counts.astype(np.int32)
        view.pipeline.check_size(int(present.max()), store.bands, f"{where}.transforms")
        return (store, _common_length(present, view.pipeline.cut)), starts, counts.astype(np.int32)

    @functools.cached_property
    def _noisy(self) -> np.ndarray:
        """Clients whose training clips are noisy: bool [clients]."""
        return self._chosen(self.data.corrupt.noise, "noise")

    @functools.cached_property
    def _with_label_errors(self) -> np.ndarray:
        """Clients of whose training clips some have wrong labels: bool [clients]."""
        return self._chosen(self.data.corrupt.labels, "labels")

    def _chosen(self, corruption: NoiseSettings | LabelErrorSettings | None, purpose: str) -> np.ndarray:
        if corruption is None:
            return np.zeros(len(self.ids), bool)
        return choose_clients(self.ids, corruption.clients, self.seed, purpose)

    def _training(self) -> _Training:
        """Return the training clips; the noisy ones' features become a store of their own."""
        rows = _Rows.of(self.stores, self.train)
        if self._shared:
            return _Training(self.train, self.train_of, rows, self._labels(), self.train_of.astype(bool))
        mine = self._noisy[self.train_of]
        affected = np.sort(self.train[mine])
        if len(affected):
            everything = np.ones(len(affected), bool)
            self.stores.append(self._features(affected, everything, None, ~everything))
            rows = rows.replaced(mine, _Rows.of(self.stores, np.searchsorted(affected, self.train[mine])))
        return _Training(self.train, self.train_of, rows, self._labels(), mine)

    def _labels(self) -> np.ndarray:
        """Return the training clips' labels with the wrong ones in place."""
        labels: np.ndarray = self.division.labels[self.train]  # a copy: by positions
        wrong = self.data.corrupt.labels
        if wrong is None:
            return labels
        bounds = np.searchsorted(self.train_of, np.arange(len(self.ids) + 1))
        for number in np.flatnonzero(self._with_label_errors):
            mine = bounds[number] + np.flatnonzero(labels[bounds[number] : bounds[number + 1]] >= 0)
            labels[mine] = wrong_labels(labels[mine], len(self.classes), wrong.rate, self.seed, self.ids[int(number)])
        return labels

    def _normalised(self, store: FeatureStore, clips: np.ndarray) -> FeatureStore:
        """Return the features of these clips of the manifest as the settings want them."""
        if self.data.features.normalise not in BY_TRAINING_CLIPS:
            return store
        clean = self.stores[CLEAN] if self.stores else None
        return normalise_groups(store, self._group[clips], self._is_train[clips], self.data.features.dtype, clean)

    def _features(
        self, clips: np.ndarray, noisy: np.ndarray, alteration: Alteration | None, altered: np.ndarray
    ) -> FeatureStore:
        """Return the features of some clips (ascending), noisy and altered where the flags (bool [clips]) say so."""
        names = self.manifest.column("clip").take(pa.array(clips)).to_pylist()
        snr = None if self.data.corrupt.noise is None else self.data.corrupt.noise.snr_db
        store = self._prepared(
            self.manifest.take(pa.array(clips)),
            self.data.stored_features,
            noise=None if snr is None or not noisy.any() else noise_of_some(names, noisy, snr, self.seed),
            alterations=None if alteration is None else alterations_for(names, altered, alteration, self.seed),
        )
        return self._normalised(store, clips)

    def _pools(self, role: str, rows: _Rows, labels: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Return the columns of all training clips, pool by pool."""
        blocks = []
        for number, name in enumerate(self.division.pools):
            mine = self._pool == number
            blocks.append(
                self._block(
                    role,
                    rows.take(mine),
                    np.where(name == UNLABELLED, NO_LABEL, labels[mine]),
                    self.train[mine],
                    None if self._shared else self.train_of[mine],
                    number,
                    labels[mine] if name == UNLABELLED else None,
                )
            )
        return blocks

    def _ranges(self, frames: np.ndarray, ranges: tuple[np.ndarray, np.ndarray]) -> dict[str, pa.Array]:
        """Return the ranges of training examples of clients that may share them.

        Args:
            frames: int64 [training clips].
            ranges: of each client, in training clips.
        """
        clip, _, _ = segments(frames, self.data.segment, None)
        before = np.searchsorted(clip, np.arange(len(frames) + 1)).astype(np.int32)
        return {name: pa.array(before[bound]) for name, bound in zip(("first", "stop"), ranges, strict=True)}

    def _held_out(self, role: str, clips: np.ndarray, owners: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the columns of held-out clips."""
        rows = _Rows.of(self.stores[: CLEAN + 1], clips)
        return self._block(role, rows, self.division.labels[clips], clips, owners)

    def _block(
        self,
        role: str,
        rows: _Rows,
        labels: np.ndarray,
        clips: np.ndarray,
        owners: np.ndarray | None,
        pool: int = -1,
        hidden: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the columns of the clips of one role and pool.

        Args:
            role: one of ROLES.
            rows: places of the clips' features.
            labels: int64 [clips].
            clips: int64 [clips], rows of the manifest.
            owners: int64 [clips], ascending; ``None``: the server, or clients that share clips.
            pool: number of the training pool; -1: the clips are held out, and cut into segments as test clips are.
            hidden: int64 [clips], hidden labels of unlabelled clips.
        """
        segment = self.data.test_segments if pool < 0 else self.data.segment
        stride = self.data.segment.test_stride if self.data.segment is not None and pool < 0 else None
        clip, first, frames = segments(rows.frames, segment, stride)
        columns = {
            "role": np.full(len(clip), ROLES.index(role), np.int8),
            "pool": np.full(len(clip), pool, np.int8),
            "client": np.full(len(clip), -1, np.int32) if owners is None else owners[clip].astype(np.int32),
            "store": rows.store[clip],
            "clip": clips[clip].astype(np.int32),
            "label": labels[clip].astype(np.int32),
            "start": (rows.starts[clip] + first).astype(np.int64),
            "frames": frames.astype(np.int32),
        }
        for name, (codes, _) in self._columns.items():
            columns[f"column:{name}"] = codes[clips[clip]]
        if UNLABELLED in self.division.pools:
            none = np.full(len(clips), -1) if hidden is None else np.maximum(hidden, -1)
            columns[f"column:{HIDDEN_LABEL}"] = none[clip].astype(np.int32)
        return columns

    def _attacked(self, attack: Poisoner, training: _Training) -> list[dict[str, np.ndarray]]:
        """Return the blocks attack and triggered. The features that they need become the last of the stores."""
        poisoned = poison(attack, self.ids, self.classes, training.client, training.labels, self.seed)
        mine = poisoned.attacker[training.client]
        with naming_failures(attack, "target_class", kind="attack"):
            target = attack.target_class(self.classes)
        with naming_failures(attack, "alteration", kind="attack"):
            alteration = attack.alteration()
        test, truth = self.division.split.test, self.division.labels
        triggered = test[:0] if target is None or alteration is None else test[truth[test] != target]
        rows, sounds = training.rows, _Rows.of(self.stores[: CLEAN + 1], triggered)
        clips = np.concatenate([training.clips[mine], triggered])
        if alteration is not None and len(clips):
            order = np.argsort(clips)
            none = np.zeros(len(triggered), bool)
            noisy, changed = np.r_[training.noisy[mine], none][order], np.r_[poisoned.altered[mine], ~none][order]
            clips = clips[order]
            self.stores.append(self._features(clips, noisy, alteration, changed))
            rows = rows.replaced(mine, _Rows.of(self.stores, np.searchsorted(clips, training.clips[mine])))
            sounds = _Rows.of(self.stores, np.searchsorted(clips, triggered))
        return [
            *self._pools("attack", rows, poisoned.labels),
            self._block("triggered", sounds, truth[triggered], triggered, None),
        ]

    def _strange_groups(self) -> list[str]:
        """Return what is to be said of groups without training clips."""
        if self.data.features.normalise != "group":
            return []
        split, own = self.division.split, self._group[self.train]
        held_out = (self.validation, self.client_test, split.validation, split.test)
        used = self._group[np.concatenate([self.train, *held_out])]
        strange = len(np.setdiff1d(used, own))
        if not strange:
            return []
        return [
            f"{strange} of {len(np.unique(used))} groups have no training clip: theirs are normalised with the "
            "statistics of all training clips"
        ]


def _statistics(everything: int, group: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the index of each client's statistics (see :meth:`Population.statistics`): int32 [clients].

    Args:
        everything: index of the statistics over all training clips.
        group: int64 [training clips].
        first: int64 [clients]: the first training clip of each.
        stop: int64 [clients]: the one behind its last.
    """
    changes = np.cumsum(np.concatenate([[0], group[1:] != group[:-1]]))
    alike = changes[first] == changes[stop - 1]
    return np.where(alike, group[first], everything).astype(np.int32)


def _common_length(counts: np.ndarray, cut: int | None) -> int | None:
    """Return the common number of frames after the cut, ``None`` if examples differ."""
    counts = counts if cut is None else np.minimum(counts, cut)
    return cast(int, counts[0].item()) if np.ptp(counts) == 0 else None
