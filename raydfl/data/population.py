"""The clients of a federation and the server's held-out data: tables of clips and clients, and the features of the clips."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raydfl.core.errors import DataError, nearest
from raydfl.core.settings import FIRST_VIEW
from raydfl.data import population_folder
from raydfl.data.examples import ClientData, Examples, Frames
from raydfl.data.features.cache import FeatureStore, open_store
from raydfl.data.label_sets import sets_of
from raydfl.data.population_folder import part_folder
from raydfl.data.settings import DataSettings
from raydfl.data.shards import Shard, cut_shards
from raydfl.data.tables import Column, Tables, join_columns, join_counts, table_prefix, view_column
from raydfl.data.transforms import PLAIN, Pipeline

CLEAN = 0
"""Position of the clean features in the stores."""


@dataclass(frozen=True, slots=True)
class StoredView:
    """The features of one view of all examples."""

    length: int | None
    """Frames of every example that has the view, ``None`` when they differ."""
    stores: tuple[FeatureStore, ...] = ()
    """The clean features, and the noisy and altered ones if there are any. Empty: no example will be read."""
    bands: int | None = None
    """Features of a frame; ``None``: as the settings say."""
    pipeline: Pipeline = PLAIN
    """The pipeline from stored features to a batch, set by :meth:`Population.use`."""


class Population:
    """Clients and held-out data. Made by raydfl.data.build, raydfl.cluster.sites, or :meth:`load`.

    Args:
        tables: clips and clients.
        classes: labels of the clips; a label with a separator names several classes.
        views: the features of every view by name, the first view's first.
        skipped: names of unreadable clips, or clips without a readable view, with the reasons.
        messages: messages to the user about the clips and clients.
        shards: of the server's data, if they are elsewhere; ``None``: they are cut here.
        parts: by name, data sets with clients, classes and a test set of their own, which are joined here.
        separator: separator of the classes in a label; ``None``: a label is one class.
    """

    def __init__(
        self,
        tables: Tables,
        classes: Sequence[str],
        views: Mapping[str, StoredView],
        skipped: Sequence[tuple[str, str]] = (),
        messages: Sequence[str] = (),
        shards: Sequence[Shard] | None = None,
        parts: Mapping[str, Population] | None = None,
        separator: str | None = None,
    ) -> None:
        self._tables = tables
        self._labels, self._separator = tuple(classes), separator
        self.classes: tuple[str, ...] = self._labels
        """Names of the classes."""
        self.sets: np.ndarray | None = None
        """bool [labels, classes]: the classes of each label, where a label is a set of them."""
        if separator is not None:
            names, self.sets = sets_of(self._labels, separator)
            self.classes = tuple(names)
        self.views = dict(views)
        self.skipped: tuple[tuple[str, str], ...] = tuple((clip, reason) for clip, reason in skipped)
        self.messages: tuple[str, ...] = tuple(messages)
        self.columns: Mapping[str, tuple[str, ...]] = tables.values
        """The values of further columns by name; an example has an index into them."""
        self.pools = tables.pools
        """Names of the pools of training examples."""
        self.ids = tables.ids
        self.parts: Mapping[str, Population] = parts or {"": self}
        """Populations by part. A population of one data set is its own part, without a name."""
        self._joined = bool(parts)
        self._stops = [*itertools.accumulate(map(len, self.parts.values()))]
        self._shards = shards

    def __len__(self) -> int:
        return len(self.ids)

    def use(self, data: DataSettings) -> Population:
        """Apply the transforms of the settings to batches, with the tables of this population; return the population."""
        for name, part in self.parts.items() if self._joined else ():
            part.use(data.each[name])
        for name, view in self.views.items():
            pipeline = data.all_views[name].pipeline.with_tables(self._tables.arrays, table_prefix(name))
            self.views[name] = dataclasses.replace(view, pipeline=pipeline)
        for made in ("test", "triggered", "validation"):
            self.__dict__.pop(made, None)
        return self

    def shape(self, view: str, data: DataSettings) -> int | tuple[int, int, int]:
        """Return what a network gets of a view: bands of a frame; of images channels, rows and columns."""
        settings = data.all_views[view]
        return settings.pipeline.shape(self.views[view].bands or settings.features.bands)

    @property
    def stores(self) -> tuple[FeatureStore, ...]:
        """The stores of the first view."""
        return self.views[FIRST_VIEW].stores

    @property
    def _optional_views(self) -> list[str]:
        return [name for name in self.views if name != FIRST_VIEW]

    @functools.cached_property
    def shards(self) -> Sequence[Shard]:
        """The shards of the server's data, place by place."""
        if self._shards is not None:
            return self._shards
        splits = {"test": self.test, "triggered": self.triggered, "server_validation": self.validation}
        return cut_shards({split: examples.clips for split, examples in splits.items()})

    @property
    def has_validation(self) -> bool:
        """Return whether the server has validation data."""
        if self._shards is not None:
            return any(shard.split == "server_validation" for shard in self._shards)
        return self._tables.has("server_validation")

    @property
    def places(self) -> tuple[str, ...]:
        """The places of clients and clips, in the clients' order: names of sites; empty: wherever the run is."""
        return self._tables.places

    @property
    def place_codes(self) -> np.ndarray:
        """Positions of all clients' places in :attr:`places`: int [clients]."""
        stored = self._tables.read_clients("place")
        return np.broadcast_to(np.int32(0), len(self)) if stored is None else stored

    def place_of(self, index: int) -> str:
        """Return the place of a client."""
        return self._tables.place_of(index)

    @property
    def has_clips(self) -> bool:
        """Return whether any clips are known here. Otherwise only sites know them."""
        return bool(self._tables.clips.num_rows)

    def at(self, place: str, folder: Path) -> Population:
        """Return this population for a process at a site, with the clips that are there.

        Args:
            place: name of the site.
            folder: of the site's own population.

        Raises:
            RunDirectoryError: a file is missing or damaged.
            DataError: the features in the cache are missing or damaged.
        """
        if place not in self.places:
            return self
        if self._joined:
            at = copy.copy(self)
            at.parts = {name: part.at(place, part_folder(folder, name)) for name, part in self.parts.items()}
            return at
        own = Population.load(folder, verify=True, verify_features=True)
        views = {name: dataclasses.replace(view, length=self.views[name].length) for name, view in own.views.items()}
        tables = self._tables.with_clips(own._tables, place)
        return Population(tables, self._labels, views, shards=self.shards, separator=self._separator)

    @property
    def spans(self) -> dict[str, range]:
        """Positions of each part's clients."""
        return dict(zip(self.parts, map(range, [0, *self._stops], self._stops), strict=True))

    def part_of(self, index: int) -> str:
        """Return the name of the part of a client."""
        return [*self.parts][bisect.bisect_right(self._stops, index)]

    def _locate(self, index: int) -> tuple[Population, int]:
        """Return the part of a client, and the client's position in it."""
        name = self.part_of(index)
        return self.parts[name], index - self.spans[name].start

    def index(self, client_id: str) -> int:
        """Return the position of a client.

        Raises:
            DataError: there is no client with this id.
        """
        try:
            return self.ids.index(client_id)
        except ValueError:
            raise DataError(
                f"there is no client {client_id!r} among {len(self)}; {nearest(client_id, self.ids)}"
            ) from None

    def num_examples(self, index: int) -> int:
        """Return how many training examples a client has in the first pool."""
        return self._tables.num_examples(index)

    def num_with_view(self, name: str) -> int:
        """Return how many training examples of the first pool have a view of ``data.views``."""
        tables = self._tables
        return int(np.count_nonzero(tables.read_clips(view_column(name, "frames"), tables.block("train"))))

    def owners(self, view: str) -> np.ndarray:
        """Return which clients have a view of any of their training examples: bool [clients]."""
        return self._tables.owners(view)

    def profile(self, index: int) -> dict[str, Any]:
        """Return the profile of a client.

        That is: ``group`` (where clients are made of groups), ``noisy``, ``label_errors``, the columns of ``data.profile`` by name,
        ``views`` (names of those of ``data.views`` that it has, where there are any), ``pools`` (examples in each, where there are
        several), ``part`` (where there are parts).
        """
        if self._joined:
            part, own = self._locate(index)
            return {"part": self.part_of(index), **part.profile(own)}
        return self._tables.profile(index, self._optional_views)

    def column(self, name: str) -> Column:
        """Return one entry of all clients' profiles, except ``pools``."""
        if not self._joined:
            return self._tables.column(name, self._optional_views)
        if name == "part":
            return [*self.parts], np.repeat(np.arange(len(self.parts)), [*map(len, self.parts.values())])
        return join_columns([part.column(name) for part in self.parts.values()])

    def sizes(self) -> np.ndarray:
        """Return int64 [clients]: training examples of each client in the first pool."""
        return self._tables.sizes()

    def data(self, index: int, attacking: bool = False) -> ClientData:
        """Return a client's data; its ``test`` is empty unless clients hold out a test set of their own.

        Args:
            attacking: with the training data of a client that attacks.
        """
        if self._joined:
            part, own = self._locate(index)
            return part.data(own, attacking)
        tables = self._tables
        role = "attack" if attacking and tables.has("attack") else "train"
        rows = [tables.rows(role, index, pool) for pool in self.pools]
        # All training examples of a client are in one store, so that a batch may mix pools; an empty pool takes theirs.
        store = max(int(tables.read_clips("store", own).max(initial=CLEAN)) for own in rows)
        return ClientData(
            {pool: self._examples(own, store) for pool, own in zip(self.pools, rows, strict=True)},
            self._examples(tables.rows("validation", index)),
            self._examples(tables.rows("client_test", index)),
        )

    def first_examples(self, count: int) -> Examples | None:
        """Return training examples that lie together in one store, without attacks and noise if there are any without.

        Args:
            count: at most so many.

        Returns:
            ``None`` if all are at sites.
        """
        if not self.stores:
            return None
        block = self._tables.block("train")
        store = self._tables.read_clips("store", block)
        edges = np.array([0, *np.flatnonzero(np.diff(store)) + 1, len(store)])
        clean = np.append(store, CLEAN)[edges[:-1]] == CLEAN
        longest = int(np.argmax(np.where(clean, np.diff(edges), -1)))  # the first of all if none is clean
        first, stop = block.start + int(edges[longest]), block.start + int(edges[longest + 1])
        return self._examples(slice(first, min(first + count, stop)))

    @functools.cached_property
    def test(self) -> Examples:
        """The server's test data."""
        return self._examples(self._tables.block("test"))

    @functools.cached_property
    def triggered(self) -> Examples:
        """Copies of test clips with the trigger of a backdoor, under their true labels, none of which is its target; or empty."""
        return self._examples(self._tables.block("triggered"))

    @functools.cached_property
    def validation(self) -> Examples:
        """The server's validation data (``split.server_validation``, ``split.official_validation: validation``); else empty."""
        return self._examples(self._tables.block("server_validation"))

    def statistics(self, client: int | None = None) -> np.ndarray | None:
        """Return the mean and deviation (float64 [2, bands]) with which further recordings are normalised by group.

        Args:
            client: its group's, if all its training clips are of one group. ``None``, or a client of several groups: those over
                all training clips.

        Returns:
            ``None`` without ``normalise: group``, or where the data lie at sites.
        """
        if self._joined and client is not None:
            part, own = self._locate(client)
            return part.statistics(own)
        of = self._tables.read_clients("statistics")
        if of is None:
            return None
        values: np.ndarray = self._tables.arrays["statistics"]
        return values[:, -1 if client is None else int(of[client])]

    def class_counts(self) -> np.ndarray:
        """Return int64 [classes]: training clips of all clients together by class, a clip once for each client that has it."""
        if self._joined:
            return np.concatenate([part.class_counts() for part in self.parts.values()])
        return self._by_class(self._tables.count_labels(len(self._labels)))

    def label_counts(
        self, of: Literal["train", "validation", "client_test"] = "train", clients: slice | np.ndarray = slice(None)
    ) -> np.ndarray:
        """Return int64 [clients, classes]: clips of each client by class, wrong labels as they are.

        Of several parts each has columns of its own, in the order of :attr:`classes`.

        Args:
            of: role of the clips. Clients without tests of their own have none in ``client_test``.
            clients: a part of the clients, or int [some clients].
        """
        if self._joined:
            return join_counts([part.label_counts(of) for part in self.parts.values()])[clients]
        return self._by_class(self._tables.label_counts(of, len(self._labels), clients))

    def _by_class(self, counts: np.ndarray) -> np.ndarray:
        """Return int64 [..., classes], made of int64 [..., labels]."""
        return counts if self.sets is None else counts @ self.sets.astype(np.int64)

    def save(self, folder: Path, again: bool = False) -> None:
        """Write everything but the features, which stay in the cache.

        Args:
            again: the folder holds equal tables; only the places of the features are written.

        Raises:
            ResourcesError: the disk is full or the folder cannot be written.
        """
        parts = self.parts if self._joined else {}
        for name, part in parts.items():
            part.save(part_folder(folder, name), again)
        others = dict(self.views)
        first = others.pop(FIRST_VIEW)
        facts = {
            "classes": self._labels,
            "separator": self._separator,
            "length": first.length,
            "stores": [str(store.folder) for store in first.stores],
            "views": {
                name: [str(view.stores[CLEAN].folder) if view.stores else None, view.length]
                for name, view in others.items()
            },
            "bands": first.bands,
            "skipped": self.skipped,
            "messages": self.messages,
            "shards": None if self._shards is None else [dataclasses.astuple(shard) for shard in self._shards],
            "parts": [[name, self.spans[name].start, part.views[FIRST_VIEW].bands] for name, part in parts.items()],
        }
        population_folder.write(folder, facts, None if again else self._tables)

    def is_saved_in(self, folder: Path) -> bool:
        """Return whether the folder holds equal clips, clients and features. The cache may be another."""
        with population_folder.refusing_damage(folder):
            facts, saved = population_folder.read(folder)
        stores = [store for view in self.views.values() for store in view.stores]
        named = [*facts["stores"], *(store for store, _ in facts["views"].values() if store is not None)]
        return (
            all(part is self or part.is_saved_in(part_folder(folder, name)) for name, part in self.parts.items())
            and list(self._labels) == facts["classes"]
            and [store.folder.name for store in stores] == [Path(store).name for store in named]
            and self._tables.holds_same(saved)
        )

    @classmethod
    def load(
        cls, folder: Path, verify: bool = False, verify_features: bool = False, bands: int | None = None
    ) -> Population:
        """Map what :meth:`save` wrote, in milliseconds and without a copy. The file of an early version is converted.

        Args:
            verify: read everything but the features and compare it with its digest.
            verify_features: the same with the features.
            bands: features of a frame, where no example will be read: features may be on another machine, or gone.

        Raises:
            RunDirectoryError: a file is missing or damaged.
            DataError: the features in the cache are missing or damaged.
        """
        with population_folder.refusing_damage(folder):
            facts, tables = population_folder.read(folder, verify)

            def stored(folders: Sequence[str | None], length: int | None, of_frame: int | None = None) -> StoredView:
                here = [] if bands is not None else [Path(folder) for folder in folders if folder is not None]
                return StoredView(length, tuple(open_store(folder, verify_features) for folder in here), of_frame)

            parts = {
                name: cls.load(part_folder(folder, name), verify, verify_features, None if bands is None else own)
                for name, _, own in facts["parts"]
            }
            return cls(
                tables,
                facts["classes"],
                {
                    FIRST_VIEW: stored(facts["stores"], facts["length"], facts["bands"] if bands is None else bands),
                    **{name: stored([folder], length) for name, (folder, length) in facts["views"].items()},
                },
                facts["skipped"],
                facts["messages"],
                None if facts["shards"] is None else [Shard(*shard) for shard in facts["shards"]],
                parts,
                facts["separator"],
            )

    def _examples(self, rows: slice, store: int | None = None) -> Examples:
        """Return the examples in these rows; without ``store`` all are in the store of their rows."""

        def read(name: str) -> np.ndarray:
            return self._tables.read_clips(name, rows)

        if store is None:
            store = int(read("store").max(initial=CLEAN))
        return Examples(
            {
                name: Frames(
                    view.stores[store if name == FIRST_VIEW else CLEAN],
                    read(view_column(name, "start")),
                    read(view_column(name, "frames")),
                    view.length,
                    view.pipeline,
                    number,
                    optional=name != FIRST_VIEW,
                )
                for number, (name, view) in enumerate(self.views.items())
            },
            read("label").astype(np.int64),
            read("clip").astype(np.int64),
            {name: read(f"column:{name}").astype(np.int64) for name in self.columns},
            self.classes,
            self.sets,
        )
