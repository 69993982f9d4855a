"""The examples of a population: assigned clips get their features and are cut into examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pyarrow as pa

from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.core.seeds import seed_for
from raydfl.data.features.alteration import UNALTERED, Alteration, Alterations
from raydfl.data.features.cache import FeatureStore
from raydfl.data.features.digests import iterate_rows
from raydfl.data.features.statistics import load_statistics, normalise_groups, number_groups
from raydfl.data.features.wave import BY_TRAINING_CLIPS
from raydfl.data.noise import NOISELESS, Noise, noise_for
from raydfl.data.part import CLEAN, Part, StoredView
from raydfl.data.segment import segments
from raydfl.data.settings import DataSettings, with_place
from raydfl.data.steps.corrupt import ALTERED
from raydfl.data.steps.listing import NO_LABEL, UNLABELLED, Assignment
from raydfl.data.steps.pools import HIDDEN_LABEL
from raydfl.data.steps.profile import read_channels
from raydfl.data.tables import POOLED, Tables, clips_table, table_prefix, view_column
from raydfl.data.views import View

_COMMON = -1
"""The channel of the settings, in place of a client's own."""


class Assembler:
    """The way from assigned clips and their features to the tables of a part, with a row for each example."""

    def __init__(
        self,
        manifest: pa.Table,
        tables: Assignment,
        data: DataSettings,
        seed: int,
        prepared: Callable[..., FeatureStore],
        complete: bool,
    ) -> None:
        self.manifest, self.data, self.seed = manifest, data, seed
        order = [tables.codes(name) for name in ("client", "pool", "role")]
        self.tables = tables.select(np.lexsort(order))
        self.clip, self.client = self.tables.codes("clip"), self.tables.codes("client")
        self.train = self.tables.has_role("train")
        self._prepared, self._complete = prepared, complete
        self._trained = np.isin(np.arange(manifest.num_rows), self.clip[self.train])
        self._group = self._load_statistics()
        self.stores: list[FeatureStore] = []
        self.failures: dict[int, str] = {}
        """Rows of the list whose clips cannot be read with noise, altered or in their client's channel, with the reasons."""
        self.unread: list[tuple[str, str]] = []
        """Clips without a view of ``data.views``, since its file cannot be read, with the reason."""
        self.messages: list[str] = []
        """About ``data.views``."""

    def _load_statistics(self) -> np.ndarray:
        """Return whose statistics each clip is normalised with, as a number: int64 [clips of the list]."""
        if self.data.features.normalise == "part":
            return np.zeros(self.manifest.num_rows, np.int64)
        if self.data.features.normalise != "client":
            return number_groups(self.manifest)
        nobody = self.tables.clients.num_rows  # their statistics are those of all training clips
        numbers, owned = np.full(self.manifest.num_rows, nobody, np.int64), self.client >= 0
        numbers[self.clip[owned]] = self.client[owned]
        return numbers

    def part(
        self,
        found: tuple[np.ndarray, np.ndarray, np.ndarray],
        skipped: Sequence[tuple[str, str]],
        messages: Sequence[str],
    ) -> Part:
        """Return the part.

        Args:
            found: the result of :meth:`find_features`, without :attr:`failures`.
            skipped: as for :class:`Part`.
            messages: to the user, before those of the tables.
        """
        tables, data, classes = self.tables, self.data, self.tables.classes
        starts, frames, number = found
        store = self.stores[CLEAN]
        arrays: dict[str, np.ndarray] = {}
        messages = [*messages, *tables.messages]
        if data.features.normalise in BY_TRAINING_CLIPS:
            arrays["statistics"] = load_statistics(self.stores[CLEAN])
            messages += self._strange_groups()
        (first_name, first_view), *others = data.all_views.items()
        if self.train.any():
            first_view.pipeline.check_size(int(frames[self.train].max()), store.bands, "data.transforms")
        arrays |= first_view.pipeline.make_tables(data.features, self.seed, table_prefix(first_name))
        row, first, length = self._cut(frames)
        label, pools = tables.codes("label"), tables.pools
        label = np.where(label < 0, NO_LABEL, label)
        examples = {
            "role": tables.codes("role"),
            "pool": tables.codes("pool"),
            "client": self.client,
            "store": number,
            "clip": self.clip,
            "label": label,
            "start": starts,
        }
        meanings: dict[str, list[str]] = {}
        for name in data.columns:
            examples[f"column:{name}"] = tables.codes(f"batch:{name}")
            meanings[name] = tables.clips.column(f"batch:{name}").dictionary.to_pylist()
        if UNLABELLED in pools:
            hidden = examples["pool"] == pools.index(UNLABELLED)
            examples["label"] = np.where(hidden, NO_LABEL, label)
            examples[f"column:{HIDDEN_LABEL}"] = np.where(hidden, np.maximum(label, -1), -1)
            meanings[HIDDEN_LABEL] = classes
        frames_of_all = _common_length(length, first_view.pipeline.cut)
        views = {first_name: StoredView(frames_of_all, tuple(self.stores), store.bands)}
        for name, view in others:
            try:
                views[name], view_starts, view_frames = self._view(name, view)
                arrays |= view.pipeline.make_tables(view.features, self.seed, table_prefix(name))
            except (ConfigError, DataError) as error:
                raise with_place(error, view.where) from error
            examples[view_column(name, "start")], present = view_starts[self.clip], view_frames[self.clip]
            if name in data.missing:
                present[tables.codes(f"lacks:{name}")] = 0
            examples[view_column(name, "frames")] = present
        kinds = {"role": np.int8, "pool": np.int8, "store": np.int8, "start": np.int64}
        cut: dict[str, np.ndarray] = {}
        for name, values in examples.items():
            wide = name.startswith("view:") and name.endswith(":start")
            cut[name] = values[row].astype(np.int64 if wide else kinds.get(name, np.int32))
            if name == "start":
                cut["start"] += first
                cut["frames"] = length.astype(np.int32)
        return Part(
            Tables(clips_table(cut), self._clients(row), arrays),
            classes,
            views,
            pools,
            meanings,
            None if data.label_sets is None else data.label_sets.separator,
            [*skipped, *self.unread],
            [*messages, *self.messages],
        )

    def find_features(
        self, store: FeatureStore, alteration: Alteration | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the features of all clips. Noisy clips, altered clips and clips of other channels have stores of their own.

        Args:
            store: features of all clips, not yet normalised by group.
            alteration: what attackers do to recordings.

        Returns:
            First frames, numbers of frames, and positions of the stores.
        """
        self.stores.append(self._normalised(store, np.arange(self.manifest.num_rows)))
        offsets = self.stores[CLEAN].offsets
        starts, frames = offsets[self.clip], np.diff(offsets)[self.clip]
        number, kind = np.zeros(len(starts), np.int8), self.tables.codes("store")
        channel = self._find_channels()
        for code, own in sorted({*zip(kind.tolist(), channel.tolist(), strict=True)} - {(CLEAN, _COMMON)}):
            rows = np.flatnonzero((kind == code) & (channel == own))
            clips, firsts = np.unique(self.clip[rows], return_index=True)
            changed = self._changed(
                clips, self.tables.select(rows[firsts]), alteration if code == ALTERED else None, own
            )
            if changed.failures:
                self.failures |= {int(clips[place]): reason for place, reason in changed.failures.items()}
                continue
            self.stores.append(self._normalised(changed, clips))
            offsets, place = self.stores[-1].offsets, np.searchsorted(clips, self.clip[rows])
            starts[rows], frames[rows] = offsets[place], np.diff(offsets)[place]
            number[rows] = len(self.stores) - 1
        return starts, frames, number

    def _find_channels(self) -> np.ndarray:
        """Return the channel of each clip's client, int64 [clips of the tables]; ``_COMMON`` if it is the settings' channel."""
        channel, data = np.full(len(self.client), _COMMON), self.data
        if data.device is not None:
            owned = self.client >= 0
            own = read_channels(self.tables, data.device, data.profile[data.device], self.seed)
            channel[owned] = own[self.client[owned]]
            common = getattr(data.features, "channel", "first")
            channel[channel == (0 if common == "first" else common)] = _COMMON
        return channel

    def _changed(
        self, clips: np.ndarray, tables: Assignment, alteration: Alteration | None, channel: int
    ) -> FeatureStore:
        """Return the features of noisy or altered clips, or of clips of another channel, not yet normalised by group.

        Args:
            clips: int [clips], ascending: rows of the list.
            tables: with these clips; the columns ``noise`` and ``altered`` name the changed ones.
            channel: of their recordings; ``_COMMON``: the settings' channel.
        """
        names, noise, alterations = tables.clips.column("clip").to_pylist(), None, None
        noisy, altered = tables.codes("noise"), tables.codes("altered")
        if self.data.corrupt.noise is not None and noisy.any():
            drawn = noise_for(names, self.data.corrupt.noise.snr_db, self.seed)
            seeds = (seed if yes else NOISELESS for seed, yes in zip(drawn.seeds, noisy, strict=True))
            noise = Noise(drawn.snr_db, tuple(seeds))
        if alteration is not None:
            seeds = (
                seed_for(self.seed, 0, name, "alteration") if yes else UNALTERED
                for name, yes in zip(names, altered, strict=True)
            )
            alterations = Alterations(alteration, tuple(seeds))
        features = self.data.first_view.stored_features
        if channel != _COMMON:
            features = features.model_copy(update={"channel": channel})
        try:
            return self._prepared(
                self.manifest.take(pa.array(clips)),
                features,
                noise=noise,
                alterations=alterations,
                unreadable=self.data.unreadable,
            )
        except DataError as error:
            if channel == _COMMON:
                raise
            raise DataError(f"data.device: channel {channel} of {self.data.device!r}: {error}") from error

    def _normalised(self, store: FeatureStore, clips: np.ndarray) -> FeatureStore:
        """Return the features of these clips of the list as the settings want them."""
        if self.data.features.normalise not in BY_TRAINING_CLIPS:
            return store
        clean = self.stores[CLEAN] if self.stores else None
        return normalise_groups(store, self._group[clips], self._trained[clips], self.data.features.dtype, clean)

    def _cut(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut clips into examples: the clip of each (a row of the tables), its first frame there, its number of frames."""
        data, found = self.data, []
        pooled = self.tables.has_role(*POOLED)
        test_stride = None if data.segment is None else data.segment.test_stride
        for mine, segment, stride in (
            (pooled, data.segment, None),
            (~pooled, data.first_view.test_segments, test_stride),
        ):
            rows = np.flatnonzero(mine)
            clip, first, length = segments(frames[rows], segment, stride)
            found.append((rows[clip], first, length))
        row, first, length = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(row, kind="stable")
        return row[order], first[order], length[order]

    def _clients(self, row: np.ndarray) -> pa.RecordBatch:
        """Return the table of clients.

        Args:
            row: int64 [examples]: the clip of each, a row of the tables.
        """
        clients = self.tables.clients
        found = {name: clients.column(name) for name in clients.schema.names if not name.startswith("column:")}
        shared = "first" in found
        if shared:
            bounds = tuple(found[name].to_numpy() for name in ("first", "stop"))
            before = np.searchsorted(row, np.arange(self.train.sum() + 1)).astype(np.int32)  # training clips come first
            found |= {name: pa.array(before[bound]) for name, bound in zip(("first", "stop"), bounds, strict=True)}
        if self.data.features.normalise in BY_TRAINING_CLIPS:
            rows = np.flatnonzero(self.train)
            if not shared:  # clips of several pools lie apart, and are one client's all the same
                rows = rows[np.argsort(self.client[rows], kind="stable")]
                ends = np.searchsorted(self.client[rows], np.arange(clients.num_rows + 1))
                bounds = (ends[:-1], ends[1:])
            everything = load_statistics(self.stores[CLEAN]).shape[1] - 1
            found["statistics"] = pa.array(_statistics(everything, self._group[self.clip[rows]], *bounds))
        order = ("client", "by_id", "group", "first", "stop", "noisy", "label_errors", "statistics")
        return pa.record_batch({name: found[name] for name in [*order, *found] if name in found})

    def _view(self, name: str, view: View) -> tuple[StoredView, np.ndarray, np.ndarray]:
        """Prepare the features of a view of ``data.views``.

        Returns:
            The view, and the place of each clip's features: int64 and int32 [clips of the list], 0 frames if the clip lacks it.
        """
        manifest, where = self.manifest, view.where
        if view.column not in manifest.column_names:
            hint = nearest(view.column, manifest.column_names)
            raise DataError(f"{where}.column: the manifest has no column {view.column!r}; {hint}")
        dataset = self.data.source.open()
        paths = [dataset.file_of(row, view.column) for row in iterate_rows(manifest)]
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
        length = None
        if len(present):
            view.pipeline.check_size(int(present.max()), store.bands, f"{where}.transforms")
            length = _common_length(present, view.pipeline.cut)
        return StoredView(length, (store,)), starts, counts.astype(np.int32)

    def _strange_groups(self) -> list[str]:
        """Return a message about groups without training clips."""
        if self.data.features.normalise != "group":
            return []
        groups, trained = np.unique(self._group[self.clip]), np.unique(self._group[self.clip[self.train]])
        strange = len(np.setdiff1d(groups, trained))
        if not strange:
            return []
        return [
            f"{strange} of {len(groups)} groups have no training clip: theirs are normalised with the "
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
