"""The clients of a federation and the server's held-out data: tables of clips and clients, and the features of the clips."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raydfl.core.errors import DataError, nearest
from raydfl.core.part_names import describe_part, qualify
from raydfl.core.settings import FIRST_VIEW
from raydfl.data import population_folder
from raydfl.data.examples import ClientData, Examples
from raydfl.data.features.cache import FeatureStore
from raydfl.data.part import CLEAN, Part, StoredView
from raydfl.data.population_folder import part_folder
from raydfl.data.settings import DataSettings
from raydfl.data.shards import Shard, cut_shards
from raydfl.data.tables import Column, Tables, join_columns, join_tables, view_column


class Population:
    """Clients and held-out data. Made by raydfl.data.build, raydfl.cluster.sites, or :meth:`load`.

    What several data sets have each for themselves (classes, test, features) is asked of ``parts[NAME]``.

    Args:
        parts: data sets by name, in the order of their clients. A single one may have an empty name.
        tables: of all parts; ``None``: they are joined here.
    """

    def __init__(self, parts: Mapping[str, Part], tables: Tables | None = None) -> None:
        if tables is None:
            tables = join_tables({name: part.tables for name, part in parts.items()})
            own = tables.split()
            parts = {name: dataclasses.replace(part, tables=own[name]) for name, part in parts.items()}
        self._tables, self._parts = tables, parts
        self.ids = tables.ids
        self.classes = tuple(qualify(name, "/", label) for name, part in parts.items() for label in part.classes)
        """Names of the classes."""
        self.skipped = tuple(
            (qualify(name, "/", clip), reason) for name, part in parts.items() for clip, reason in part.skipped
        )
        """Names of unreadable clips, or clips without a readable view, with the reasons."""
        self.messages = tuple(qualify(name, ": ", text) for name, part in parts.items() for text in part.messages)
        """Messages to the user about the clips and clients."""
        stops = [*itertools.accumulate(len(part.tables.ids) for part in parts.values())]
        self.spans: dict[str, range] = dict(zip(parts, map(range, [0, *stops], stops), strict=True))
        """Positions of each part's clients."""

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def parts(self) -> Mapping[str, Population]:
        """Populations of single data sets, by name."""
        return {name: Population({"": part}, part.tables) for name, part in self._parts.items()}

    @property
    def _part(self) -> Part:
        """The only data set."""
        [part] = self._parts.values()
        return part

    def use(self, data: DataSettings) -> Population:
        """Apply the transforms of the settings to batches; return the population."""
        for name, part in self._parts.items():
            part.use(data.each[name])
        return self

    @property
    def views(self) -> Mapping[str, StoredView]:
        """The features of every view by name, the first view's first."""
        return self._part.views

    @property
    def stores(self) -> tuple[FeatureStore, ...]:
        """The stores of the first view."""
        return self.views[FIRST_VIEW].stores

    @property
    def pools(self) -> Sequence[str]:
        """Names of the pools of training examples."""
        return self._part.pools

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """The values of further columns by name; an example has an index into them."""
        return self._part.columns

    @property
    def sets(self) -> np.ndarray | None:
        """The classes of each label, where a label is a set of them: bool [labels, classes]."""
        return self._part.sets

    def shape(self, view: str, data: DataSettings) -> int | tuple[int, int, int]:
        """Return what a network gets of a view: bands of a frame; of images channels, rows and columns."""
        settings = data.all_views[view]
        return settings.pipeline.shape(self.views[view].bands or settings.features.bands)

    @property
    def test(self) -> Examples:
        """The server's test data."""
        return self._part.held_out("test")

    @property
    def triggered(self) -> Examples:
        """Copies of test clips with the trigger of a backdoor, under their true labels, none of which is its target; or empty."""
        return self._part.held_out("triggered")

    @property
    def validation(self) -> Examples:
        """The server's validation data (``split.server_validation``, ``split.official_validation: validation``); else empty."""
        return self._part.held_out("server_validation")

    @functools.cached_property
    def shards(self) -> Sequence[Shard]:
        """The shards of the server's data, place by place."""
        if self._part.shards is not None:
            return self._part.shards
        splits = {"test": self.test, "triggered": self.triggered, "server_validation": self.validation}
        return cut_shards({split: examples.clips for split, examples in splits.items()})

    @property
    def has_validation(self) -> bool:
        """Return whether the server has validation data."""
        if self._part.shards is not None:
            return any(shard.split == "server_validation" for shard in self._part.shards)
        return self._part.tables.has("server_validation")

    @property
    def places(self) -> tuple[str, ...]:
        """The places of clients and clips, in the clients' order: names of sites; empty: wherever the run is."""
        return self._tables.places

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
            folder: of the site's own populations.

        Raises:
            RunDirectoryError: a file is missing or damaged.
            DataError: the features in the cache are missing or damaged.
        """
        parts = dict(self._parts)
        for name, part in parts.items() if place in self.places else ():
            if not part.tables.is_at(place).any():
                continue
            own = Population.load(part_folder(folder, name), verify=True, verify_features=True)._part
            views = {key: dataclasses.replace(view, length=part.views[key].length) for key, view in own.views.items()}
            columns = {
                key: np.array([[*values].index(value) for value in own.columns[key]], np.int32)[
                    own.tables.read_clips(f"column:{key}")
                ]
                for key, values in part.columns.items()  # numbers stand for the values of all places
            }
            tables = part.tables.fill_clips(own.tables, place, columns)
            parts[name] = dataclasses.replace(part, tables=tables, views=views, pools=own.pools)
        return Population(parts, self._tables)

    def part_of(self, index: int) -> str:
        """Return the name of the part of a client."""
        return next(name for name, span in self.spans.items() if index < span.stop)

    def _locate(self, index: int) -> tuple[Part, int]:
        """Return the part of a client, and the client's position in it."""
        name = self.part_of(index)
        return self._parts[name], index - self.spans[name].start

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
        part, own = self._locate(index)
        return part.tables.num_examples(own)

    def num_with_view(self, name: str) -> int:
        """Return how many training examples of the first pool have a view of ``data.views``."""
        tables = self._part.tables
        return int(np.count_nonzero(tables.read_clips(view_column(name, "frames"), tables.block("train"))))

    def owners(self, view: str) -> np.ndarray:
        """Return which clients have a view of any of their training examples: bool [clients]."""
        return self._part.tables.owners(view)

    def profile(self, index: int) -> dict[str, Any]:
        """Return the profile of a client.

        That is: ``group`` (where clients are made of groups), ``noisy``, ``label_errors``, the columns of ``data.profile`` by name,
        ``views`` (names of those of ``data.views`` that it has, where there are any), ``pools`` (examples in each, where there are
        several), ``part`` (where there are parts).
        """
        part, own = self._locate(index)
        return {**describe_part(self.part_of(index)), **part.tables.profile(own, part.optional_views, part.pools)}

    def column(self, name: str) -> Column:
        """Return one entry of all clients' profiles, except ``pools``."""
        if name == "part":
            named = [[*describe_part(part).values()] for part in self._parts]
            sizes = map(len, self.spans.values())
            return join_columns(
                [(own, np.full(size, len(own) - 1, np.int8)) for own, size in zip(named, sizes, strict=True)]
            )
        return join_columns([part.tables.column(name, part.optional_views) for part in self._parts.values()])

    def sizes(self) -> np.ndarray:
        """Return int64 [clients]: training examples of each client in the first pool."""
        return np.concatenate([part.tables.sizes() for part in self._parts.values()])

    def data(self, index: int, attacking: bool = False) -> ClientData:
        """Return a client's data; its ``test`` is empty unless clients hold out a test set of their own.

        Args:
            attacking: with the training data of a client that attacks.
        """
        part, own = self._locate(index)
        tables = part.tables
        role = "attack" if attacking and tables.has("attack") else "train"
        rows = [tables.rows(role, own, pool) for pool in range(len(part.pools))]
        # All training examples of a client are in one store, so that a batch may mix pools; an empty pool takes theirs.
        store = max(int(tables.read_clips("store", of_pool).max(initial=CLEAN)) for of_pool in rows)
        return ClientData(
            {pool: part.examples(of_pool, store) for pool, of_pool in zip(part.pools, rows, strict=True)},
            part.examples(tables.rows("validation", own)),
            part.examples(tables.rows("client_test", own)),
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
        tables = self._part.tables
        block = tables.block("train")
        store = tables.read_clips("store", block)
        edges = np.array([0, *np.flatnonzero(np.diff(store)) + 1, len(store)])
        clean = np.append(store, CLEAN)[edges[:-1]] == CLEAN
        longest = int(np.argmax(np.where(clean, np.diff(edges), -1)))  # the first of all if none is clean
        first, stop = block.start + int(edges[longest]), block.start + int(edges[longest + 1])
        return self._part.examples(slice(first, min(first + count, stop)))

    def statistics(self, client: int | None = None) -> np.ndarray | None:
        """Return the mean and deviation (float64 [2, bands]) with which further recordings are normalised by group.

        Args:
            client: its group's, if all its training clips are of one group. ``None``, or a client of several groups: those over
                all training clips.

        Returns:
            ``None`` without ``normalise: group``, or where the data lie at sites.
        """
        part, own = (self._part, -1) if client is None else self._locate(client)
        of = part.tables.read_clients("statistics")
        if of is None:
            return None
        values: np.ndarray = part.tables.arrays["statistics"]
        return values[:, -1 if client is None else int(of[own])]

    def class_counts(self) -> np.ndarray:
        """Return int64 [classes]: training clips of all clients together by class, a clip once for each client that has it."""
        return np.concatenate(
            [part.sum_by_class(part.tables.count_labels(len(part.labels))) for part in self._parts.values()]
        )

    def label_counts(
        self, of: Literal["train", "validation", "client_test"] = "train", clients: slice | np.ndarray = slice(None)
    ) -> np.ndarray:
        """Return int64 [clients, classes]: clips of each client by class, wrong labels as they are.

        Of several parts each has columns of its own, in the order of :attr:`classes`.

        Args:
            of: role of the clips. Clients without tests of their own have none in ``client_test``.
            clients: a part of the clients, or int [some clients].
        """
        wanted = np.arange(len(self))[clients]
        counts = np.zeros((len(wanted), len(self.classes)), np.int64)
        column = 0
        for part, span in zip(self._parts.values(), self.spans.values(), strict=True):
            own = np.flatnonzero((wanted >= span.start) & (wanted < span.stop))
            found = part.tables.label_counts(of, len(part.labels), wanted[own] - span.start)
            counts[own, column : column + len(part.classes)] = part.sum_by_class(found)
            column += len(part.classes)
        return counts

    def save(self, folder: Path, again: bool = False) -> None:
        """Write everything but the features, which stay in the cache.

        Args:
            again: the folder holds equal tables; only the places of the features are written.

        Raises:
            ResourcesError: the disk is full or the folder cannot be written.
        """
        parts = {name: part.to_facts() for name, part in self._parts.items()}
        population_folder.write(folder, parts, self._tables, again)

    def is_saved_in(self, folder: Path) -> bool:
        """Return whether the folder holds equal clips, clients and features. The cache may be another."""
        with population_folder.refusing_damage(folder):
            facts, saved = population_folder.read(folder)
        own = {name: part.to_facts() for name, part in self._parts.items()}
        return _name_features(facts) == _name_features(own) and self._tables.holds_same(saved)

    @classmethod
    def load(
        cls, folder: Path, verify: bool = False, verify_features: bool = False, features: bool = True
    ) -> Population:
        """Map what :meth:`save` wrote, in milliseconds and without a copy. Files of earlier versions are converted.

        Args:
            verify: read everything but the features and compare it with its digest.
            verify_features: the same with the features.
            features: whether examples will be read. Otherwise features may be on another machine, or gone.

        Raises:
            RunDirectoryError: a file is missing or damaged.
            DataError: the features in the cache are missing or damaged.
        """
        with population_folder.refusing_damage(folder):
            facts, tables = population_folder.read(folder, verify)
            own = tables.split()
            parts = {name: Part.from_facts(own[name], facts[name], features, verify_features) for name in own}
            return cls(parts, tables)


def _name_features(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of each part, and the names of its features without the place of the cache."""
    return {
        name: [list(part["labels"]), [Path(store).name for view in part["views"].values() for store in view["stores"]]]
        for name, part in facts.items()
    }
