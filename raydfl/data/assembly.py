"""Assembly of a part from assigned clips and their features."""

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
from raydfl.data.noise import NOISELESS, ClipNoise, seed_noise
from raydfl.data.part import CLEAN, Part, StoredView
from raydfl.data.segment import segments
from raydfl.data.settings import DataSettings, relocate_error
from raydfl.data.steps.corrupt import ALTERED
from raydfl.data.steps.events import check_times, split_events
from raydfl.data.steps.listing import NO_LABEL, UNLABELLED, Assignment
from raydfl.data.steps.pools import HIDDEN_LABEL
from raydfl.data.steps.profile import read_channels
from raydfl.data.tables import POOLED, Tables, clips_table, table_prefix, view_column
from raydfl.data.views import View

_END = 0.1
"""Largest excess of an event over its clip in seconds. Annotations are rounded, and features lack an incomplete last window."""
_COMMON = -1
"""Code of the channel in the settings, in contrast to a client's channel."""


class Assembler:
    """Builder of a part: it finds the features of assigned clips, and cuts clips into examples.

    Args:
        manifest: the clips.
        tables: the assigned clips.
        data: the configuration.
        seed: seed of the run.
        prepare: computes missing features of clips.
        complete: whether the manifest contains all clips of the federation.
    """

    def __init__(
        self,
        manifest: pa.Table,
        tables: Assignment,
        data: DataSettings,
        seed: int,
        prepare: Callable[..., FeatureStore],
        complete: bool,
    ) -> None:
        self.manifest, self.data, self.seed = manifest, data, seed
        order = [tables.codes(name) for name in ("client", "pool", "role")]  # lexsort's first key is the last
        self.tables = tables.select(np.lexsort(order))
        self.clip, self.client = self.tables.codes("clip"), self.tables.codes("client")
        self.train = self.tables.has_role("train")
        self._prepare, self._complete = prepare, complete
        self._trained = np.isin(np.arange(manifest.num_rows), self.clip[self.train])
        self._group = self._group_clips()
        self.stores: list[FeatureStore] = []
        self.failures: dict[int, str] = {}
        """Manifest rows of clips that are unreadable with noise, alteration or their client's channel, with the reasons."""
        self.unread: list[tuple[str, str]] = []
        """Clips with an unreadable file in a view of ``data.views``, with the reasons."""
        self.messages: list[str] = []
        """Messages about ``data.views``."""

    def _group_clips(self) -> np.ndarray:
        """Return the normalisation group of each clip, int64 [rows of the manifest]. A group shares statistics."""
        if self.data.features.normalise == "part":
            return np.zeros(self.manifest.num_rows, np.int64)
        if self.data.features.normalise != "client":
            return number_groups(self.manifest)
        without_owner = (
            self.tables.clients.num_rows
        )  # a group without training clips uses the statistics of all of them
        numbers, owned = np.full(self.manifest.num_rows, without_owner, np.int64), self.client >= 0
        numbers[self.clip[owned]] = self.client[owned]
        return numbers

    def build_part(
        self,
        features: tuple[np.ndarray, np.ndarray, np.ndarray],
        skipped: Sequence[tuple[str, str]],
        messages: Sequence[str],
    ) -> Part:
        """Build the part.

        Args:
            features: the result of :meth:`find_features`, if :attr:`failures` is empty.
            skipped: unreadable clips, with the reasons.
            messages: messages to the user about the features.
        """
        tables, data, classes = self.tables, self.data, self.tables.classes
        starts, frames, store_index = features
        store = self.stores[CLEAN]
        arrays: dict[str, np.ndarray] = {}
        messages = [*messages, *tables.messages]
        if data.features.normalise in BY_TRAINING_CLIPS:
            arrays["statistics"] = load_statistics(self.stores[CLEAN])
            messages += self._describe_untrained_groups()
        (first_name, first_view), *additional_views = data.all_views.items()
        if self.train.any():
            # Only training clips pass the transforms, so only their lengths must suit them.
            first_view.pipeline.check_size(int(frames[self.train].max()), store.bands, "data.transforms")
        arrays |= first_view.pipeline.make_tables(data.features, self.seed, table_prefix(first_name))
        self._check_events()
        row, first, length = self._cut(frames)
        label, pools = tables.codes("label"), tables.pools
        label = np.where(label < 0, NO_LABEL, label)
        examples = {
            "role": tables.codes("role"),
            "pool": tables.codes("pool"),
            "client": self.client,
            "store": store_index,
            "clip": self.clip,
            "label": label,
            "start": starts,
        }
        meanings: dict[str, list[str]] = {}
        for name in data.columns:
            examples[f"column:{name}"] = tables.codes(f"batch:{name}")
            meanings[name] = tables.clips.column(f"batch:{name}").dictionary.to_pylist()
        if UNLABELLED in pools:
            # Hidden labels stay in a separate column, because metrics of pseudo-labels compare against them.
            hidden = examples["pool"] == pools.index(UNLABELLED)
            examples["label"] = np.where(hidden, NO_LABEL, label)
            examples[f"column:{HIDDEN_LABEL}"] = np.where(hidden, np.maximum(label, -1), -1)
            meanings[HIDDEN_LABEL] = classes
        common_length = _find_common_length(length, first_view.pipeline.cut)
        views = {first_name: StoredView(common_length, tuple(self.stores), store.bands)}
        for name, view in additional_views:
            try:
                views[name], view_starts, view_frames = self._prepare_view(name, view)
                arrays |= view.pipeline.make_tables(view.features, self.seed, table_prefix(name))
            except (ConfigError, DataError) as error:
                raise relocate_error(error, view.where) from error
            examples[view_column(name, "start")], present = view_starts[self.clip], view_frames[self.clip]
            if name in data.missing:
                present[tables.codes(f"lacks:{name}")] = 0
            examples[view_column(name, "frames")] = present
        # Small integers, because a federation may have millions of examples. Rows of a store exceed int32.
        kinds = {"role": np.int8, "pool": np.int8, "store": np.int8, "start": np.int64}
        cut: dict[str, np.ndarray] = {}
        for name, values in examples.items():
            wide = name.startswith("view:") and name.endswith(":start")
            cut[name] = values[row].astype(np.int64 if wide else kinds.get(name, np.int32))
            if name == "start":
                cut["start"] += first
                cut["frames"] = length.astype(np.int32)
        return Part(
            Tables(clips_table(cut), self._build_clients(row), arrays),
            classes,
            views,
            pools,
            meanings,
            None if data.label_sets is None else data.label_sets.separator,
            data.label_sequences,
            None if data.events is None else data.features.frame_seconds,
            [*skipped, *self.unread],
            [*messages, *self.messages],
        )

    def find_features(
        self, store: FeatureStore, alteration: Alteration | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the features of all clips. Each kind of noise, alteration and channel has a separate feature store.

        Args:
            store: features of all clips before normalisation by group.
            alteration: change of attackers to recordings.

        Returns:
            First frame, number of frames, and store index of each clip.
        """
        self.stores.append(self._normalise(store, np.arange(self.manifest.num_rows)))
        offsets = self.stores[CLEAN].offsets
        starts, frames = offsets[self.clip], np.diff(offsets)[self.clip]
        store_index, kind = np.zeros(len(starts), np.int8), self.tables.codes("store")
        channel = self._find_channels()
        for code, source in sorted({*zip(kind.tolist(), channel.tolist(), strict=True)} - {(CLEAN, _COMMON)}):
            rows = np.flatnonzero((kind == code) & (channel == source))
            clips, firsts = np.unique(self.clip[rows], return_index=True)
            changed = self._prepare_changed(
                clips, self.tables.select(rows[firsts]), alteration if code == ALTERED else None, source
            )
            if changed.failures:
                self.failures |= {int(clips[place]): reason for place, reason in changed.failures.items()}
                continue
            self.stores.append(self._normalise(changed, clips))
            offsets, place = self.stores[-1].offsets, np.searchsorted(clips, self.clip[rows])
            starts[rows], frames[rows] = offsets[place], np.diff(offsets)[place]
            store_index[rows] = len(self.stores) - 1
        return starts, frames, store_index

    def _find_channels(self) -> np.ndarray:
        """Return the channel of each clip's client, int64 [assigned clips]; ``_COMMON`` for the channel in the settings."""
        channel, data = np.full(len(self.client), _COMMON), self.data
        if data.device is not None:
            owned = self.client >= 0
            client_channels = read_channels(self.tables, data.device, data.profile[data.device], self.seed)
            channel[owned] = client_channels[self.client[owned]]
            # Clients with the channel of the settings share the clean store.
            common = getattr(data.features, "channel", "first")
            channel[channel == (0 if common == "first" else common)] = _COMMON
        return channel

    def _prepare_changed(
        self, clips: np.ndarray, tables: Assignment, alteration: Alteration | None, channel: int
    ) -> FeatureStore:
        """Prepare the features of clips with noise, alteration or a client's channel, before normalisation by group.

        Args:
            clips: int [clips], ascending rows of the manifest.
            tables: the clips. The columns ``noise`` and ``altered`` are masks of the changes.
            alteration: change of attackers to recordings.
            channel: channel of the recordings; ``_COMMON``: the channel in the settings.
        """
        names, noise, alterations = tables.clips.column("clip").to_pylist(), None, None
        noisy, altered = tables.codes("noise"), tables.codes("altered")
        if self.data.corrupt.noise is not None and noisy.any():
            noise = seed_noise(names, self.data.corrupt.noise.snr_db, self.seed)
            seeds = (seed if is_noisy else NOISELESS for seed, is_noisy in zip(noise.seeds, noisy, strict=True))
            noise = ClipNoise(noise.snr_db, tuple(seeds))
        if alteration is not None:
            seeds = (
                seed_for(self.seed, 0, name, "alteration") if is_altered else UNALTERED
                for name, is_altered in zip(names, altered, strict=True)
            )
            alterations = Alterations(alteration, tuple(seeds))
        features = self.data.first_view.stored_features
        if channel != _COMMON:
            features = features.model_copy(update={"channel": channel})
        try:
            return self._prepare(
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

    def _normalise(self, store: FeatureStore, clips: np.ndarray) -> FeatureStore:
        """Normalise features of manifest rows by group, client or part, if the settings require it."""
        if self.data.features.normalise not in BY_TRAINING_CLIPS:
            return store
        clean = self.stores[CLEAN] if self.stores else None
        return normalise_groups(store, self._group[clips], self._trained[clips], self.data.features.dtype, clean)

    def _cut(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut clips into examples.

        Returns:
            Row of the example's clip in the tables, first frame in the clip, and number of frames: int64 [examples] each.
        """
        data, parts = self.data, []
        pooled = self.tables.has_role(*POOLED)
        test_stride = None if data.segment is None else data.segment.test_stride
        for mask, segment, stride in (
            (pooled, data.segment, None),
            (~pooled, data.first_view.test_segments, test_stride),
        ):
            rows = np.flatnonzero(mask)
            clip, first, length = segments(frames[rows], segment, stride)
            parts.append((rows[clip], first, length))
        row, first, length = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(row, kind="stable")  # a client's segments must be adjacent, in the order of the tables
        return row[order], first[order], length[order]

    def _check_events(self) -> None:
        """Reject events after the end of their clip, if labels are events.

        Raises:
            DataError: naming the first of these clips.
        """
        if self.data.events is None:
            return
        features, frame_seconds = self.data.features, self.data.features.frame_seconds or 0.0
        clips = np.unique(self.clip)
        seconds = self.stores[CLEAN].lengths[clips] * frame_seconds
        limits = [getattr(features, "seconds", None), features.frames and features.frames * frame_seconds]
        longest = min((limit for limit in limits if limit is not None), default=np.inf) - _END
        seconds[seconds >= longest] = np.inf  # the features end before the clip
        exact = self.manifest.column("seconds").to_numpy()[clips]
        seconds = np.where(np.isnan(exact), seconds, exact) + _END
        labels = self.manifest.column("label").combine_chunks().dictionary_encode()
        _, events = split_events(labels.dictionary.to_pylist())
        names = self.manifest.column("clip").take(pa.array(clips)).to_pylist()
        check_times(events[labels.indices.to_numpy()[clips]], seconds, names)

    def _build_clients(self, row: np.ndarray) -> pa.RecordBatch:
        """Build the table of clients.

        Args:
            row: int64 [examples], row of the example's clip in the tables.
        """
        clients = self.tables.clients
        columns = {name: clients.column(name) for name in clients.schema.names if not name.startswith("column:")}
        shared = "first" in columns
        if shared:
            # Ranges of clips become ranges of examples: a clip may have several segments.
            bounds = tuple(columns[name].to_numpy() for name in ("first", "stop"))
            before = np.searchsorted(row, np.arange(self.train.sum() + 1)).astype(np.int32)  # training clips come first
            columns |= {name: pa.array(before[bound]) for name, bound in zip(("first", "stop"), bounds, strict=True)}
        if self.data.features.normalise in BY_TRAINING_CLIPS:
            rows = np.flatnonzero(self.train)
            if not shared:  # the clips of a client are not adjacent if it has several pools
                rows = rows[np.argsort(self.client[rows], kind="stable")]
                ends = np.searchsorted(self.client[rows], np.arange(clients.num_rows + 1))
                bounds = (ends[:-1], ends[1:])
            overall = load_statistics(self.stores[CLEAN]).shape[1] - 1
            columns["statistics"] = pa.array(_find_statistics(overall, self._group[self.clip[rows]], *bounds))
        order = ("client", "by_id", "group", "first", "stop", "noisy", "label_errors", "statistics")
        return pa.record_batch({name: columns[name] for name in [*order, *columns] if name in columns})

    def _prepare_view(self, name: str, view: View) -> tuple[StoredView, np.ndarray, np.ndarray]:
        """Load a view's features, or compute them if they are not in the cache.

        Returns:
            The view, and the first frame and the number of frames of each clip, int64 and int32 [rows of the manifest]. Clips
            without the view have 0 frames.
        """
        manifest, where = self.manifest, view.where
        if view.column not in manifest.column_names:
            hint = nearest(view.column, manifest.column_names)
            raise DataError(f"{where}.column: the manifest has no column {view.column!r}. {hint}")
        dataset = self.data.source.open()
        paths = [dataset.file_of(row, view.column) for row in iterate_rows(manifest)]
        rows = np.array([row for row, path in enumerate(paths) if path is not None], np.int64)
        if not len(rows) and self._complete:  # further sites may have files
            raise DataError(
                f"{where}.column: no row of the manifest has a file in column {view.column!r}. Add files, or remove {where}"
            )
        table = manifest.take(pa.array(rows))
        table = table.set_column(
            table.column_names.index("path"), "path", pa.array([paths[row] for row in rows], pa.string())
        )
        store = self._prepare(table, view.stored_features, unreadable=self.data.unreadable)
        starts, counts = np.zeros((2, manifest.num_rows), np.int64)
        starts[rows], counts[rows] = store.offsets[:-1], np.diff(store.offsets)
        failed = rows[sorted(store.failures)]
        counts[failed] = 0
        clip_names = manifest.column("clip")
        self.unread += [
            (clip_names[clip].as_py(), f"view {name}: {store.failures[place]}")
            for clip, place in zip(failed.tolist(), sorted(store.failures), strict=True)
        ]
        if len(failed):
            self.messages.append(
                f"view {name}: {len(failed)} of {len(rows)} files cannot be read. Their clips lack the view, the first "
                f"{clip_names[int(failed[0])].as_py()}"
            )
        present = counts[counts > 0]
        length = None
        if len(present):
            view.pipeline.check_size(int(present.max()), store.bands, f"{where}.transforms")
            length = _find_common_length(present, view.pipeline.cut)
        return StoredView(length, (store,)), starts, counts.astype(np.int32)

    def _describe_untrained_groups(self) -> list[str]:
        """Return a message about groups without training clips, if any."""
        if self.data.features.normalise != "group":
            return []
        groups, trained = np.unique(self._group[self.clip]), np.unique(self._group[self.clip[self.train]])
        untrained = len(np.setdiff1d(groups, trained))
        if not untrained:
            return []
        return [
            f"{untrained} of {len(groups)} groups have no training clip. Their clips are normalised with the statistics of all "
            "training clips"
        ]


def _find_statistics(overall: int, group: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the index of each client's statistics, int32 [clients]: its group's, or the overall ones for mixed groups.

    Args:
        overall: index of the statistics over all training clips.
        group: int64 [training clips], normalisation group of each clip.
        first: int64 [clients], first training clip of each client.
        stop: int64 [clients], end of the training clips of each client.
    """
    # A client has a single group if the group does not change between its first and last clip.
    changes = np.cumsum(np.concatenate([[0], group[1:] != group[:-1]]))
    single = changes[first] == changes[stop - 1]
    return np.where(single, group[first], overall).astype(np.int32)


def _find_common_length(counts: np.ndarray, cut: int | None) -> int | None:
    """Return the common number of frames after the cut; ``None`` if examples differ."""
    counts = counts if cut is None else np.minimum(counts, cut)
    return cast(int, counts[0].item()) if np.ptp(counts) == 0 else None
