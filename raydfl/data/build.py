"""The way to a population: clips are listed, divided, corrupted where that is asked for, and their features prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.core.progress import Progress
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
from raydfl.data.names import Names
from raydfl.data.parts import join
from raydfl.data.poisoning import Poisoner, alterations_for, noise_of_some, poison
from raydfl.data.pools import HIDDEN_LABEL, NO_LABEL, UNLABELLED
from raydfl.data.population import CLEAN, NOISY, Population
from raydfl.data.population_file import PRESENCE, table_prefix
from raydfl.data.presence import clients_without, owners, without_view
from raydfl.data.profile import profile_arrays
from raydfl.data.segment import segments
from raydfl.data.settings import DataSettings, ViewSettings, with_place


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
        return join(
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
        attack.check(classes, data.features)
        if shared and attack.poisons:
            raise ConfigError(
                "attack: attackers would train on altered recordings or labels, but by data.partition.by: table clients may share "
                "clips; take an attack on what clients send, or another partition"
            )
        attack.candidates(Names.of(division.partition.ids), seed)
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


class _Assembler:
    """The way from a division of clips and their features to the arrays of a population."""

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
        self.ids = Names.of(division.partition.ids)
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
        ids, division, partition = self.ids, self.division, self.division.partition
        self.stores.append(self._normalised(store, np.arange(self.manifest.num_rows)))
        training = self._training(store)
        owned = not self._shared
        arrays = {
            **self._pools("train", training.rows, training.labels, owners=self.train_of if owned else None),
            **self._held_out("validation", self.validation, owners=self.validation_of if owned else None),
            **self._held_out("server_validation", division.split.validation),
            **self._held_out("test", division.split.test),
        }
        if self.data.split.tested_by_clients:
            arrays |= self._held_out("client_test", self.client_test, owners=self.client_test_of)
        if attack is not None:
            arrays |= self._attacked(attack, training)
        arrays |= {f"ids/{name}": array for name, array in ids.arrays.items()}
        arrays |= {f"groups/{name}": array for name, array in Names.of(partition.groups).arrays.items()}
        if partition.ranges is None:
            arrays |= {
                "groups_of": partition.group_of.astype(np.int32),
                "noisy": self._noisy,
                "label_errors": self._with_label_errors,
            }
        else:
            arrays |= self._ranges(training.rows.frames, partition.ranges)
        profiles, profile_types = profile_arrays(self.manifest, partition, self.data.profile)
        arrays |= profiles
        if self.data.features.normalise in BY_TRAINING_CLIPS:
            bounds = partition.ranges or np.searchsorted(
                self.train_of, [np.arange(len(ids)), np.arange(1, len(ids) + 1)]
            )
            arrays |= _statistics(self.stores[CLEAN], self._group[self.train], *bounds)
            messages = [*messages, *self._strange_groups()]
        names = {name: values for name, (_, values) in self._columns.items()}
        if UNLABELLED in division.pools:
            names[HIDDEN_LABEL] = list(self.classes)
        pipeline = self.data.pipeline
        if len(training.rows.frames):
            pipeline.check_size(int(training.rows.frames.max()), store.bands, "data.transforms")
        arrays |= pipeline.make_tables(self.data.features, self.seed, table_prefix(""))
        length = _common_length([array for name, array in arrays.items() if name.endswith("/counts")], pipeline.cut)
        views: dict[str, tuple[FeatureStore | None, int | None]] = {}
        of_views: dict[str, np.ndarray] = {}
        for name, view in self.data.views.items():
            try:
                views[name], of_view = self._view(name, view, arrays)
                of_views |= of_view | view.pipeline.make_tables(view.features, self.seed, table_prefix(name))
            except (ConfigError, DataError) as error:
                raise with_place(error, f"data.views.{name}") from error
        arrays |= of_views
        for name, taken in clients_without(self.data.missing, ids, self.seed).items():
            arrays |= without_view(arrays, name, taken)
        arrays |= {f"{PRESENCE}/{name}": owners(arrays, name) for name in self.data.views}
        population = Population(
            self.classes,
            length,
            self.stores,
            arrays,
            [*skipped, *self.unread],
            [*messages, *self.messages],
            columns=names,
            pools=division.pools,
            separator=None if self.data.label_sets is None else self.data.label_sets.separator,
            views=views,
            profile_types=profile_types,
        )
        return population.use(self.data)

    def _view(
        self, name: str, view: ViewSettings, arrays: Mapping[str, np.ndarray]
    ) -> tuple[tuple[FeatureStore, int | None], dict[str, np.ndarray]]:
        """Prepare a further view: its store, the frames of every example that has it, and where examples of all parts lie."""
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
        found: dict[str, np.ndarray] = {}
        for column, clips in arrays.items():
            part, _, kind = column.rpartition("/")
            if kind == "clips" and part.partition("@")[0] != "attack":
                found[f"{part}@{name}/starts"] = starts[clips]
                found[f"{part}@{name}/counts"] = counts[clips].astype(np.int32)
        present = counts[counts > 0]
        if not len(present):
            return (store, None), found
        view.pipeline.check_size(int(present.max()), store.bands, f"{where}.transforms")
        return (store, _common_length([present], view.pipeline.cut)), found

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

    def _training(self, store: FeatureStore) -> _Training:
        """Return the training clips; the noisy ones' features become a store of their own."""
        if self._shared:
            return _Training(
                self.train, self.train_of, _Rows.of(store, self.train), self._labels(), self.train_of.astype(bool)
            )
        mine = self._noisy[self.train_of]
        rows, affected = _Rows.of(store, self.train), np.sort(self.train[mine])
        if len(affected):
            everything = np.ones(len(affected), bool)
            self.stores.append(self._features(affected, everything, None, ~everything))
            rows = rows.replaced(mine, _Rows.of(self.stores[NOISY], np.searchsorted(affected, self.train[mine])))
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

    def _pools(
        self, part: str, rows: _Rows, labels: np.ndarray, owners: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the columns of all training clips, the first pool's as ``part``, another's as ``part@NAME``."""
        found: dict[str, np.ndarray] = {}
        for number, name in enumerate(self.division.pools):
            mine = self._pool == number
            found |= self._part(
                part if number == 0 else f"{part}@{name}",
                _Rows(rows.starts[mine], rows.frames[mine]),
                np.where(name == UNLABELLED, NO_LABEL, labels[mine]),
                self.train[mine],
                owners=None if owners is None else owners[mine],
                hidden=labels[mine] if name == UNLABELLED else None,
            )
        return found

    def _ranges(self, frames: np.ndarray, ranges: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        """Return where in the part train the examples of clients lie who may share them.

        Args:
            frames: int64 [training clips].
            ranges: of each client, in training clips.
        """
        clip, _, _ = segments(frames, self.data.segment, None)
        before = np.searchsorted(clip, np.arange(len(frames) + 1)).astype(np.int32)
        return {f"train/{name}": before[bound] for name, bound in zip(("first", "stop"), ranges, strict=True)}

    def _held_out(self, part: str, clips: np.ndarray, owners: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the columns of clips that nobody trains on."""
        rows = _Rows.of(self.stores[CLEAN], clips)
        return self._part(part, rows, self.division.labels[clips], clips, owners=owners, tested=True)

    def _part(
        self,
        part: str,
        rows: _Rows,
        labels: np.ndarray,
        clips: np.ndarray,
        *,
        owners: np.ndarray | None = None,
        tested: bool = False,
        hidden: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the columns of one part of the population.

        Args:
            part: its name.
            rows: where each clip's features lie.
            labels: int64 [clips].
            clips: int64 [clips], rows of the manifest.
            owners: int64 [clips], ascending: the client of each clip; with them come offsets.
            tested: whether these clips are cut into segments as test clips are.
            hidden: int64 [clips], labels that nobody may learn from, where these are other ones.
        """
        segment = self.data.test_segments if tested else self.data.segment
        stride = self.data.segment.test_stride if self.data.segment is not None and tested else None
        clip, first, frames = segments(rows.frames, segment, stride)
        columns = {
            f"{part}/starts": (rows.starts[clip] + first).astype(np.int64),
            f"{part}/counts": frames.astype(np.int32),
            f"{part}/labels": labels[clip].astype(np.int32),
            f"{part}/clips": clips[clip].astype(np.int32),
        }
        for name, (codes, _) in self._columns.items():
            columns[f"{part}/column/{name}"] = codes[clips[clip]]
        if UNLABELLED in self.division.pools:
            none = np.full(len(clips), -1) if hidden is None else np.maximum(hidden, -1)
            columns[f"{part}/column/{HIDDEN_LABEL}"] = none[clip].astype(np.int32)
        if owners is not None:
            bounds = np.searchsorted(owners[clip], np.arange(len(self.ids) + 1))
            columns[f"{part}/offsets"] = bounds.astype(np.int64)
        return columns

    def _attacked(self, attack: Poisoner, training: _Training) -> dict[str, np.ndarray]:
        """Return the parts attack and triggered. The features that they need become the last of the stores."""
        poisoned = poison(attack, self.ids, self.classes, training.client, training.labels, self.seed)
        mine = poisoned.attacker[training.client]
        target, alteration = attack.target_class(self.classes), attack.alteration()
        test, truth = self.division.split.test, self.division.labels
        triggered = test[:0] if target is None or alteration is None else test[truth[test] != target]
        altered = np.zeros(len(self.ids), bool)
        rows, sounds = training.rows, _Rows.of(self.stores[CLEAN], triggered)
        clips = np.concatenate([training.clips[mine], triggered])
        if alteration is not None and len(clips):
            order = np.argsort(clips)
            none = np.zeros(len(triggered), bool)
            noisy, changed = np.r_[training.noisy[mine], none][order], np.r_[poisoned.altered[mine], ~none][order]
            clips, altered = clips[order], poisoned.attacker
            store = self._features(clips, noisy, alteration, changed)
            self.stores.append(store)
            rows = rows.replaced(mine, _Rows.of(store, np.searchsorted(clips, training.clips[mine])))
            sounds = _Rows.of(store, np.searchsorted(clips, triggered))
        columns = {"altered": altered, **self._pools("attack", rows, poisoned.labels)}
        if len(triggered):
            columns |= self._part("triggered", sounds, truth[triggered], triggered, tested=True)
        return columns

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


def _statistics(store: FeatureStore, group: np.ndarray, first: np.ndarray, stop: np.ndarray) -> dict[str, np.ndarray]:
    """Return what a recording of each client would be normalised with: see :meth:`Population.statistics`.

    Args:
        store: normalised by group.
        group: int64 [training clips].
        first: int64 [clients]: the first training clip of each.
        stop: int64 [clients]: the one behind its last.
    """
    values = statistics_of(store)
    changes = np.cumsum(np.concatenate([[0], group[1:] != group[:-1]]))
    alike = changes[first] == changes[stop - 1]
    return {
        "statistics/values": values,
        "statistics/of": np.where(alike, group[first], values.shape[1] - 1).astype(np.int32),
    }


def _common_length(parts: Sequence[np.ndarray], cut: int | None) -> int | None:
    """Return the frames that every example has in a batch, longer ones being ``cut``; ``None`` where they differ."""
    counts = np.concatenate(parts)
    counts = counts if cut is None else np.minimum(counts, cut)
    return cast(int, counts[0].item()) if np.ptp(counts) == 0 else None
