"""The clients of a federation and the server's held-out data."""

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
    """The clients and held-out data of a federation. :func:`build_population` or :meth:`load` creates it.

    With several parts, ``parts[NAME]`` gives the classes, test set and features of a part.

    Args:
        parts: data sets by name, in the order of their clients. The name of a single data set is empty.
        tables: tables of all parts; ``None``: join the tables of the parts.
    """

    def __init__(self, parts: Mapping[str, Part], tables: Tables | None = None) -> None:
        if tables is None:
            tables = join_tables({name: part.tables for name, part in parts.items()})
            split = tables.split()
            parts = {name: dataclasses.replace(part, tables=split[name]) for name, part in parts.items()}
        self._tables, self._parts = tables, parts
        self.ids = tables.ids
        self.classes = tuple(qualify(name, "/", label) for name, part in parts.items() for label in part.classes)
        """Names of the classes."""
        self.skipped = tuple(
            (qualify(name, "/", clip), reason) for name, part in parts.items() for clip, reason in part.skipped
        )
        """Unreadable clips, and clips with an unreadable view, with the reasons."""
        self.messages = tuple(qualify(name, ": ", text) for name, part in parts.items() for text in part.messages)
        """Messages to the user about the clips and clients."""
        stops = [*itertools.accumulate(len(part.tables.ids) for part in parts.values())]
        self.spans: dict[str, range] = dict(zip(parts, map(range, [0, *stops], stops), strict=True))
        """Range of the positions of each part's clients."""

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def parts(self) -> Mapping[str, Population]:
        """The population of each data set, by name."""
        return {name: Population({"": part}, part.tables) for name, part in self._parts.items()}

    @property
    def _part(self) -> Part:
        """The single data set."""
        [part] = self._parts.values()
        return part

    def use(self, data: DataSettings) -> Population:
        """Set the transforms of all batches according to the settings, and return the population."""
        for name, part in self._parts.items():
            part.use(data.each[name])
        return self

    @property
    def views(self) -> Mapping[str, StoredView]:
        """The features of all views by name, starting with the first view."""
        return self._part.views

    @property
    def stores(self) -> tuple[FeatureStore, ...]:
        """The feature stores of the first view."""
        return self.views[FIRST_VIEW].stores

    @property
    def pools(self) -> Sequence[str]:
        """Names of the pools of training examples."""
        return self._part.pools

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Values of additional columns (``data.columns``) by name. Examples have indices into them."""
        return self._part.columns

    @property
    def sets(self) -> np.ndarray | None:
        """Classes of each label, bool [labels, classes]; ``None``: each label is a single class."""
        return self._part.sets

    @property
    def sequences(self) -> np.ndarray | None:
        """Classes of each label in order, int32 [labels, longest], -1 after the end; ``None``: labels are not transcripts."""
        return self._part.sequences

    @property
    def events(self) -> np.ndarray | None:
        """Events of each label, float64 [labels, most events, 3]; ``None``: labels are not events."""
        return self._part.events

    def shape(self, view: str, data: DataSettings) -> int | tuple[int, int, int]:
        """Return the input shape of a network for a view: bands, or (channels, rows, columns) of images."""
        settings = data.all_views[view]
        return settings.pipeline.shape(self.views[view].bands or settings.features.bands)

    @property
    def test(self) -> Examples:
        """The server's test data."""
        return self._part.read_held_out("test")

    @property
    def triggered(self) -> Examples:
        """Test clips with a backdoor's trigger and their true labels, except clips of its target class. Empty without backdoor."""
        return self._part.read_held_out("triggered")

    @property
    def validation(self) -> Examples:
        """The server's validation data (``split.server_validation``, ``split.official_validation: validation``). May be empty."""
        return self._part.read_held_out("server_validation")

    @functools.cached_property
    def shards(self) -> Sequence[Shard]:
        """The shards of the server's data, ordered by place."""
        if self._part.shards is not None:
            return self._part.shards
        splits = {"test": self.test, "triggered": self.triggered, "server_validation": self.validation}
        return cut_shards({split: examples.clips for split, examples in splits.items()})

    @property
    def has_validation(self) -> bool:
        """True if the server has validation data."""
        if self._part.shards is not None:
            return any(shard.split == "server_validation" for shard in self._part.shards)
        return self._part.tables.has("server_validation")

    @property
    def places(self) -> tuple[str, ...]:
        """The places of clients and clips, in the clients' order: names of sites, or an empty name for local data."""
        return self._tables.places

    def place_of(self, index: int) -> str:
        """Return the place of a client."""
        return self._tables.place_of(index)

    @property
    def has_clips(self) -> bool:
        """True if the table of clips has rows. Without rows, all clips are at sites."""
        return bool(self._tables.clips.num_rows)

    def load_place(self, place: str, folder: Path) -> Population:
        """Add the clips of a site to the population, for a process at the site.

        Args:
            place: name of the site.
            folder: folder of the site's populations.

        Raises:
            RunDirectoryError: a file is missing or damaged.
            DataError: the features in the cache are missing or damaged.
        """
        parts = dict(self._parts)
        for name, part in parts.items() if place in self.places else ():
            if not part.tables.is_at(place).any():
                continue
            local = Population.load(part_folder(folder, name), verify=True, verify_features=True)._part
            views = {key: dataclasses.replace(view, length=part.views[key].length) for key, view in local.views.items()}
            columns = {
                key: np.array([[*values].index(value) for value in local.columns[key]], np.int32)[
                    local.tables.read_clips(f"column:{key}")
                ]
                for key, values in part.columns.items()  # codes must refer to the values of all places
            }
            tables = part.tables.fill_clips(local.tables, place, columns)
            parts[name] = dataclasses.replace(part, tables=tables, views=views, pools=local.pools)
        return Population(parts, self._tables)

    def part_of(self, index: int) -> str:
        """Return the name of a client's part."""
        return next(name for name, span in self.spans.items() if index < span.stop)

    def _locate(self, index: int) -> tuple[Part, int]:
        """Return a client's part, and its position in the part."""
        name = self.part_of(index)
        return self._parts[name], index - self.spans[name].start

    def index(self, client_id: str) -> int:
        """Return the position of a client.

        Raises:
            DataError: the id is unknown.
        """
        try:
            return self.ids.index(client_id)
        except ValueError:
            raise DataError(
                f"there is no client {client_id!r} among {len(self)} clients. {nearest(client_id, self.ids)}"
            ) from None

    def num_examples(self, index: int) -> int:
        """Return the number of a client's training examples in the first pool."""
        part, position = self._locate(index)
        return part.tables.num_examples(position)

    def num_with_view(self, name: str) -> int:
        """Return the number of training examples in the first pool with a view."""
        tables = self._part.tables
        return int(np.count_nonzero(tables.read_clips(view_column(name, "frames"), tables.block("train"))))

    def owners(self, view: str) -> np.ndarray:
        """Return a mask of the clients with a view of any training example: bool [clients]."""
        return self._part.tables.owners(view)

    def profile(self, index: int) -> dict[str, Any]:
        """Return the profile of a client.

        Returns:
            ``noisy``, ``label_errors``, and the columns of ``data.profile``; if available, ``group``, ``views`` (names of
            ``data.views``), ``pools`` (number of examples in each pool) and ``part``.
        """
        part, position = self._locate(index)
        return {**describe_part(self.part_of(index)), **part.tables.profile(position, part.optional_views, part.pools)}

    def column(self, name: str) -> Column:
        """Return a profile column of all clients. ``pools`` is not available."""
        if name == "part":
            values = [[*describe_part(part).values()] for part in self._parts]
            sizes = map(len, self.spans.values())
            return join_columns(
                [(names, np.full(size, len(names) - 1, np.int8)) for names, size in zip(values, sizes, strict=True)]
            )
        return join_columns([part.tables.column(name, part.optional_views) for part in self._parts.values()])

    def sizes(self) -> np.ndarray:
        """Return the number of training examples of each client in the first pool, int64 [clients]."""
        return np.concatenate([part.tables.sizes() for part in self._parts.values()])

    def data(self, index: int, attacking: bool = False) -> ClientData:
        """Return a client's examples.

        Args:
            index: position of the client.
            attacking: whether to return an attacker's training data.
        """
        part, position = self._locate(index)
        tables = part.tables
        role = "attack" if attacking and tables.has("attack") else "train"
        rows = [tables.rows(role, position, pool) for pool in range(len(part.pools))]
        # A client's training examples share a store, so that a batch may mix pools. An empty pool must use it too.
        store = max(int(tables.read_clips("store", pool_rows).max(initial=CLEAN)) for pool_rows in rows)
        return ClientData(
            {pool: part.examples(pool_rows, store) for pool, pool_rows in zip(part.pools, rows, strict=True)},
            part.examples(tables.rows("validation", position)),
            part.examples(tables.rows("client_test", position)),
        )

    def read_canaries(self, index: int) -> Examples:
        """Return a client's canary clips (``data.corrupt.canaries``), in the training data or not, cut as test clips."""
        part, position = self._locate(index)
        return part.examples(part.tables.rows("canary", position))

    def read_role(self, role: str) -> list[Examples]:
        """Return the examples of a role, of all clients and pools: a sequence for each feature store with examples."""
        return self._part.read_role(role)

    def first_examples(self, count: int) -> Examples | None:
        """Return adjacent training examples of a feature store, preferably of the clean store.

        Args:
            count: maximal number of examples.

        Returns:
            ``None`` if the features are not loaded, or at sites.
        """
        if not self.stores:
            return None
        tables = self._part.tables
        block = tables.block("train")
        store = tables.read_clips("store", block)
        edges = np.array([0, *np.flatnonzero(np.diff(store)) + 1, len(store)])
        clean = np.append(store, CLEAN)[edges[:-1]] == CLEAN
        longest = int(np.argmax(np.where(clean, np.diff(edges), -1)))  # the first range if all are corrupted
        first, stop = block.start + int(edges[longest]), block.start + int(edges[longest + 1])
        return self._part.examples(slice(first, min(first + count, stop)))

    def statistics(self, client: int | None = None) -> np.ndarray | None:
        """Return the mean and deviation for normalising new recordings by group.

        Args:
            client: position of a client, for the statistics of its group. ``None``, or a client with several groups: the
                statistics of all training clips.

        Returns:
            float64 [2, bands]; ``None`` without ``normalise: group``, ``client`` or ``part``, or if the data are at sites.
        """
        part, position = (self._part, -1) if client is None else self._locate(client)
        rows = part.tables.read_clients("statistics")
        if rows is None:
            return None
        values: np.ndarray = part.tables.arrays["statistics"]
        return values[:, -1 if client is None else int(rows[position])]

    def class_counts(self) -> np.ndarray:
        """Count the training clips of all clients by class: int64 [classes]. A shared clip counts once per owner."""
        return np.concatenate(
            [part.sum_by_class(part.tables.count_labels(len(part.labels))) for part in self._parts.values()]
        )

    def label_counts(
        self, of: Literal["train", "validation", "client_test"] = "train", clients: slice | np.ndarray = slice(None)
    ) -> np.ndarray:
        """Count the clips of each client by class: int64 [selected clients, classes]. Corrupted labels count as they are.

        Args:
            of: role of the clips.
            clients: a slice or int [selected clients].
        """
        positions = np.arange(len(self))[clients]
        counts = np.zeros((len(positions), len(self.classes)), np.int64)
        column = 0
        for part, span in zip(self._parts.values(), self.spans.values(), strict=True):
            rows = np.flatnonzero((positions >= span.start) & (positions < span.stop))
            part_counts = part.tables.label_counts(of, len(part.labels), positions[rows] - span.start)
            counts[rows, column : column + len(part.classes)] = part.sum_by_class(part_counts)
            column += len(part.classes)
        return counts

    def save(self, folder: Path, again: bool = False) -> None:
        """Write the population to a folder. The features stay in the cache.

        Args:
            folder: the folder.
            again: the folder contains equal tables. Update only the paths of the features.

        Raises:
            ResourcesError: the disk is full, or the folder is not writable.
        """
        parts = {name: part.to_facts() for name, part in self._parts.items()}
        population_folder.write(folder, parts, self._tables, again)

    def is_saved_in(self, folder: Path) -> bool:
        """Return whether a folder contains equal clips, clients and features. The path of the cache may differ."""
        with population_folder.translate_damage(folder):
            saved_facts, saved = population_folder.read(folder)
        facts = {name: part.to_facts() for name, part in self._parts.items()}
        return _name_features(saved_facts) == _name_features(facts) and self._tables.holds_same(saved)

    @classmethod
    def load(
        cls,
        folder: Path,
        verify: bool = False,
        verify_features: bool = False,
        features: bool = True,
        cache: Path | None = None,
    ) -> Population:
        """Memory-map a saved population, in milliseconds. Older formats are converted.

        Args:
            folder: the folder of :meth:`save`.
            verify: verify the digests of the tables.
            verify_features: verify the digests of the features.
            features: whether to open the features. Without them, no examples are available.
            cache: folder of the features, if another machine has saved the population; ``None``: as saved.

        Raises:
            RunDirectoryError: a file is missing or damaged.
            DataError: the features in the cache are missing or damaged.
        """
        with population_folder.translate_damage(folder):
            facts, tables = population_folder.read(folder, verify)
            split = tables.split()
            parts = {
                name: Part.from_facts(split[name], facts[name], features, verify_features, cache) for name in split
            }
            return cls(parts, tables)


def _name_features(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels and feature names of each part, without the path of the cache."""
    return {
        name: [list(part["labels"]), [Path(store).name for view in part["views"].values() for store in view["stores"]]]
        for name, part in facts.items()
    }
