"""The clients of a federation and the server's held-out data: two tables, mapped into memory, and queries of them.

``clips.arrow`` has a row for each example, sorted by role, pool and client:

=================== ============ ==================================================================================
column              type         meaning
=================== ============ ==================================================================================
role                dictionary   one of :data:`ROLES`; ``attack`` is what attackers train on in place of ``train``
pool                dictionary   pool of a training example; null for other roles
client              int32        position of the owner; -1: the server, or clients that share clips
store               int8         feature store: 0 clean, then noisy and altered features if there are any
clip                int32        row of the manifest; the segments of a clip follow one another
label               int32        index into the labels; negative: none
start, frames       int64, int32 place of the features in the store
column:NAME         dictionary   further columns (``data.columns``)
VIEW:start, :frames int64, int32 place of a further view's features; 0 frames: the clip lacks the view
=================== ============ ==================================================================================

``clients.arrow`` has a row for each client. Only ``client`` is always there. Private state and commits name a client by its row.

=================== ============ ==================================================================================
client              large_string id
by_id               int32        positions in the order of the ids, unless the ids ascend
group               dictionary   group of which the client was made
noisy, label_errors bool         whether its training data are corrupted; without the column nobody's are
first, stop         int32        range of the client's rows of the first pool, where clients share clips
statistics          int32        index of the client's statistics (see :meth:`Population.statistics`)
profile:NAME        dictionary   ``data.profile``, if its source is a column
examples            int64        number of training examples, where the clips are elsewhere (sites, parts)
has:VIEW            bool         whether the client has a further view, where the clips are elsewhere
=================== ============ ==================================================================================
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa

from raydfl.core.errors import DataError, nearest
from raydfl.data import population_folder
from raydfl.data.examples import ClientData, Examples
from raydfl.data.features.cache import FeatureStore, open_store
from raydfl.data.label_sets import sets_of
from raydfl.data.settings import DataSettings
from raydfl.data.shards import Shard, Site, only_site, shards_at
from raydfl.data.tables import POOLED, ROLES, ClientIds, table_prefix, to_numbers
from raydfl.data.transforms import PLAIN

CLEAN, NOISY = 0, 1
"""Positions in a population's stores."""
Column = tuple[Sequence[Any], np.ndarray]
"""Values, and int [clients]: the position of each client's value; -1 if it is unknown."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """Clients that follow one another in the population and have a data set, classes and a test set of their own."""

    name: str
    first: int
    """Index of its first client."""
    population: Population
    """The part by itself, in which its clients are numbered from 0."""


class Population:
    """Clients and held-out data. Made by raydfl.data.build, raydfl.cluster.sites, or :meth:`load`.

    Args:
        clips: the table of clips.
        clients: the table of clients.
        classes: labels of the clips; a label with a separator names several classes.
        length: frames of every example, ``None`` when they differ.
        stores: the clean features, and the noisy and altered ones if there are any. Empty: no example will be read.
        arrays: ``statistics`` (see :meth:`statistics`) and tables of transforms (:func:`table_prefix`), by name.
        skipped: names of unreadable clips, or clips without a readable view, with the reasons.
        messages: messages to the user about the clips and clients.
        bands: features of a frame; ``None``: those of the stores.
        sites: places of the data, if they are not here.
        parts: parts of the federation. The clients' ids and numbers of examples are then all that this population has itself.
        separator: separator of the classes in a label; ``None``: a label is one class.
        views: for each further view its store (``None``: not opened) and the frames of every example, ``None`` when they differ.
    """

    def __init__(
        self,
        clips: pa.RecordBatch,
        clients: pa.RecordBatch,
        classes: Sequence[str],
        length: int | None,
        stores: Sequence[FeatureStore],
        arrays: Mapping[str, np.ndarray] | None = None,
        skipped: Sequence[tuple[str, str]] = (),
        messages: Sequence[str] = (),
        bands: int | None = None,
        sites: Sequence[Site] = (),
        parts: Sequence[Part] = (),
        separator: str | None = None,
        views: Mapping[str, tuple[FeatureStore | None, int | None]] | None = None,
    ) -> None:
        self._clips, self._clients, self._arrays = clips, clients, dict(arrays or {})
        self._labels, self._separator = tuple(classes), separator
        self.classes: tuple[str, ...] = self._labels
        """Names of the classes."""
        self.sets: np.ndarray | None = None
        """bool [labels, classes]: the classes of each label, where a label is a set of them."""
        if separator is not None:
            names, self.sets = sets_of(self._labels, separator)
            self.classes = tuple(names)
        self.length = length
        self.stores = tuple(stores)
        self.skipped: tuple[tuple[str, str], ...] = tuple((clip, reason) for clip, reason in skipped)
        self.messages: tuple[str, ...] = tuple(messages)
        self.columns: Mapping[str, tuple[str, ...]] = {
            name.removeprefix("column:"): tuple(clips.column(name).dictionary.to_pylist())
            for name in clips.schema.names
            if name.startswith("column:")
        }
        """The values of further columns by name; an example has an index into them."""
        self.pools: tuple[str, ...] = tuple(clips.column("pool").dictionary.to_pylist())
        """Names of the pools of training examples."""
        self.bands = stores[CLEAN].bands if bands is None else bands
        """Features of a frame."""
        self._views = {name: store for name, (store, _) in (views or {}).items()}
        self.view_lengths: dict[str, int | None] = {name: length for name, (_, length) in (views or {}).items()}
        """Like :attr:`length`, of each further view by name, for examples that have it."""
        self._pipelines = dict.fromkeys(self._views, PLAIN)
        self.pipeline = PLAIN
        """The pipeline from stored features to a batch, set by :meth:`use`."""
        self.ids = ClientIds.from_table(clients)
        self.parts = tuple(parts)
        """Data sets with classes of their own; empty: this is one."""
        self._sites = tuple(sites)
        self._known: dict[str, Any] = {}
        self._blocks = _find_blocks(clips, self.pools)
        self._used = {role for (role, _), rows in self._blocks.items() if rows.start < rows.stop}

    def __len__(self) -> int:
        return len(self.ids)

    def use(self, data: DataSettings) -> Population:
        """Apply the transforms of the settings to batches, with the tables of this population; return the population."""
        for part in self.parts:
            part.population.use(data.each[part.name])
        self.pipeline = data.pipeline.with_tables(self._arrays, table_prefix(""))
        self._pipelines = {
            name: view.pipeline.with_tables(self._arrays, table_prefix(name)) for name, view in data.views.items()
        }
        for made in ("test", "triggered", "validation"):
            self.__dict__.pop(made, None)
        return self

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """The sites at which the data lie, in the clients' order; a single one without a name unless there are several."""
        if self._sites:
            return self._sites
        if self.parts:  # each has shards of its own
            return (only_site(len(self), {}),)
        splits = {"test": self.test, "triggered": self.triggered, "server_validation": self.validation}
        return (only_site(len(self), {split: examples.clips for split, examples in splits.items()}),)

    @property
    def shards(self) -> list[Shard]:
        """The parts in which the server's data are measured, one site after another."""
        return shards_at(self.sites)

    def site_of(self, index: int) -> str:
        """Return the name of the site of a client."""
        if not self._sites:
            return ""
        return self._sites[bisect.bisect_right(self._sites, index, key=lambda site: site.stop)].name

    @property
    def each(self) -> dict[str, Population]:
        """The parts by name; this population itself, under no name, where there are none."""
        return {part.name: part.population for part in self.parts} or {"": self}

    def part_of(self, index: int) -> str:
        """Return the name of the part of a client; empty where there are none."""
        return self._part(index).name if self.parts else ""

    def _part(self, index: int) -> Part:
        return self.parts[bisect.bisect_right(self.parts, index, key=lambda part: part.first) - 1]

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

    def _of_clients(self, name: str) -> np.ndarray | None:
        """Return a column of the clients table as numbers, ``None`` if there is none."""
        if name not in self._clients.schema.names:
            return None
        return self._remember(f"clients {name}", lambda: to_numbers(self._clients.column(name)))

    def _remember(self, key: str, make: Callable[[], _T]) -> _T:
        if key not in self._known:
            self._known[key] = make()
        found: _T = self._known[key]
        return found

    def _of_clips(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return some rows of a column of the clips table as numbers."""
        first, stop, _ = rows.indices(self._clips.num_rows)
        return to_numbers(self._clips.column(name).slice(first, stop - first))

    def _rows(self, role: str, index: int, pool: str = "") -> slice:
        """Return the rows of a client in the clips table."""
        block = self._blocks[role, pool or self.pools[0] if role in POOLED else ""]
        first, stop = self._of_clients("first"), self._of_clients("stop")
        if first is not None and stop is not None:
            if role != "train":
                return slice(0, 0)
            return slice(block.start + int(first[index]), block.start + int(stop[index]))
        wanted = np.array([index, index + 1], np.int32)  # of the column's type, or searchsorted copies the column
        begin, end = (np.searchsorted(self._of_clips("client", block), wanted) + block.start).tolist()
        return slice(begin, end)

    def num_examples(self, index: int) -> int:
        """Return how many training examples a client has in the first pool."""
        examples = self._of_clients("examples")
        return self._size("", index) if examples is None else int(examples[index])

    def _size(self, pool: str, index: int) -> int:
        rows = self._rows("train", index, pool)
        return int(rows.stop - rows.start)

    def num_with_view(self, name: str) -> int:
        """Return how many training examples of the first pool have a further view."""
        return int(np.count_nonzero(self._of_clips(f"{name}:frames", self._blocks["train", self.pools[0]])))

    def owners(self, view: str) -> np.ndarray:
        """Return which clients have a further view of any of their training examples: bool [clients]."""
        stored = self._of_clients(f"has:{view}")
        return self._remember(f"owners {view}", lambda: self._find_owners(view)) if stored is None else stored

    def _find_owners(self, view: str) -> np.ndarray:
        first, stop = self._of_clients("first"), self._of_clients("stop")
        train = slice(self._blocks["train", self.pools[0]].start, self._blocks["train", self.pools[-1]].stop)
        present = self._of_clips(f"{view}:frames", train) > 0
        if first is not None and stop is not None:
            before = np.r_[0, np.cumsum(present)]
            shared: np.ndarray = before[stop] > before[first]
            return shared
        found = np.zeros(len(self), bool)
        found[self._of_clips("client", train)[present]] = True
        return found

    def profile(self, index: int) -> dict[str, Any]:
        """Return the profile of a client.

        That is: ``group`` (where clients are made of groups), ``noisy``, ``label_errors``, the columns of ``data.profile`` by name,
        ``views`` (names of the further views that it has, where there are any), ``pools`` (examples in each, where there are
        several), ``part`` (where there are parts).
        """
        if self.parts:
            part = self._part(index)
            return {"part": part.name, **part.population.profile(index - part.first)}
        names = [name.removeprefix("profile:") for name in self._clients.schema.names if name.startswith("profile:")]
        columns = {name: self.column(name) for name in ("group", "noisy", "label_errors", "views", *names)}
        facts = {name: values[int(of[index])] for name, (values, of) in columns.items() if of[index] >= 0}
        if len(self.pools) > 1:
            facts["pools"] = {name: self._size(name, index) for name in self.pools}
        return facts

    def column(self, name: str) -> Column:
        """Return one entry of all clients' profiles; not for ``pools``, which is no single value."""
        return self._remember(f"profile {name}", lambda: self._find_column(name))

    def _find_column(self, name: str) -> Column:
        if self.parts:
            if name == "part":
                sizes = [len(part.population) for part in self.parts]
                return [part.name for part in self.parts], np.repeat(np.arange(len(sizes)), sizes)
            return _join([part.population.column(name) for part in self.parts])
        if name in ("noisy", "label_errors"):
            stored = self._of_clients(name)
            return (False, True), np.broadcast_to(np.int8(0), len(self)) if stored is None else stored.view(np.int8)
        if name == "views" and self._views:
            table = np.stack([self.owners(view) for view in self._views], axis=1)
            kinds, of = np.unique(table, axis=0, return_inverse=True)
            names = np.array([*self._views])
            return [tuple(names[kind].tolist()) for kind in kinds], of.reshape(-1)
        stored = self._of_clients(key := "group" if name == "group" else f"profile:{name}")
        if stored is None:
            return (), np.broadcast_to(np.int8(-1), len(self))
        return self._clients.column(key).dictionary.to_pylist(), stored

    def sizes(self) -> np.ndarray:
        """Return int64 [clients]: training examples of each client in the first pool."""
        examples, first, stop = (self._of_clients(name) for name in ("examples", "first", "stop"))
        if examples is not None:
            return examples
        if first is not None and stop is not None:
            sizes: np.ndarray = stop.astype(np.int64)
            sizes -= first  # in place: there may be millions of clients
            return sizes
        return np.bincount(self._of_clips("client", self._blocks["train", self.pools[0]]), minlength=len(self))

    def data(self, index: int, attacking: bool = False) -> ClientData:
        """Return a client's data; its ``test`` is empty unless clients hold out a test set of their own.

        Args:
            attacking: with the training data of a client that attacks.
        """
        if self.parts:
            part = self._part(index)
            return part.population.data(index - part.first, attacking)
        poisoned = attacking and "attack" in self._used
        rows = [self._rows("attack" if poisoned else "train", index, pool) for pool in self.pools]
        # All training examples of a client are in one store, so that a batch may mix pools; an empty pool takes theirs.
        store = max(int(self._of_clips("store", own).max(initial=CLEAN)) for own in rows)
        first, *further = (self._examples(own, store) for own in rows)
        return ClientData(
            first,
            self._examples(self._rows("validation", index)),
            self._examples(self._rows("client_test", index)),
            dict(zip(self.pools[1:], further, strict=True)),
            self.pools[0],
        )

    def first_examples(self, count: int) -> Examples | None:
        """Return some training examples, as they are without attacks and noise; ``None`` where all are at sites."""
        block = self._blocks["train", self.pools[0]]
        return self._examples(slice(block.start, min(block.start + count, block.stop))) if self.stores else None

    @functools.cached_property
    def test(self) -> Examples:
        """The server's test data."""
        return self._examples(self._blocks["test", ""])

    @functools.cached_property
    def triggered(self) -> Examples:
        """Copies of test clips with the trigger of a backdoor, under their true labels, none of which is its target; or empty."""
        return self._examples(self._blocks["triggered", ""], len(self.stores) - 1)

    @functools.cached_property
    def validation(self) -> Examples:
        """The server's validation data (``split.server_validation``, ``split.official_validation: validation``); else empty."""
        return self._examples(self._blocks["server_validation", ""])

    def statistics(self, client: int | None = None) -> np.ndarray | None:
        """Return the mean and deviation (float64 [2, bands]) with which further recordings are normalised by group.

        Args:
            client: its group's, if all its training clips are of one group. ``None``, or a client of several groups: those over
                all training clips.

        Returns:
            ``None`` without ``normalise: group``, or where the data lie at sites.
        """
        if self.parts and client is not None:
            part = self._part(client)
            return part.population.statistics(client - part.first)
        of = self._of_clients("statistics")
        if of is None:
            return None
        values: np.ndarray = self._arrays["statistics"]
        return values[:, -1 if client is None else int(of[client])]

    def class_counts(self) -> np.ndarray:
        """Return int64 [classes]: training clips of all clients together by class, a clip once for each client that has it."""
        if self.parts:
            return np.concatenate([part.population.class_counts() for part in self.parts])
        first, stop = self._of_clients("first"), self._of_clients("stop")
        if first is None or stop is None:
            summed: np.ndarray = self.label_counts().sum(axis=0)
            return summed
        block = self._blocks["train", self.pools[0]]
        labels = self._of_clips("label", block)
        begun, ended = (np.cumsum(np.bincount(bound, minlength=len(labels) + 1))[:-1] for bound in (first, stop))
        counted = self._begin_clips(block) & (labels >= 0)
        return self._by_class(
            np.bincount(labels[counted], (begun - ended)[counted], len(self._labels)).astype(np.int64)
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
        if self.parts:
            return _block_diagonal([part.population.label_counts(of) for part in self.parts])[clients]
        block = self._blocks[of, self.pools[0] if of == "train" else ""]
        labels, begins, number = self._of_clips("label", block), self._begin_clips(block), len(self._labels)
        first, stop = self._of_clients("first"), self._of_clients("stop")
        if first is not None and stop is not None and of == "train":
            counts = np.empty((len(first[clients]), number), np.int64)
            for label in range(number):
                before = np.concatenate([[0], np.cumsum(begins & (labels == label))])
                counts[:, label] = before[stop[clients]] - before[first[clients]]
            return self._by_class(counts)
        client = self._of_clips("client", block).astype(np.int64)
        begins[1:] |= client[1:] != client[:-1]
        begins &= labels >= 0
        cells = np.bincount(client[begins] * number + labels[begins], minlength=len(self) * number)
        return self._by_class(cells.reshape(len(self), number)[clients])

    def _begin_clips(self, block: slice) -> np.ndarray:
        """Return which rows are the first segment of their clip: bool [rows]."""
        clips = self._of_clips("clip", block)
        return np.concatenate([np.ones(min(len(clips), 1), bool), clips[1:] != clips[:-1]])

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
        for part in self.parts:
            part.population.save(population_folder.part_folder(folder, part.name), again)
        facts = {
            "classes": self._labels,
            "separator": self._separator,
            "length": self.length,
            "stores": [str(store.folder) for store in self.stores],
            "views": {
                name: [None if store is None else str(store.folder), self.view_lengths[name]]
                for name, store in self._views.items()
            },
            "bands": self.bands,
            "skipped": self.skipped,
            "messages": self.messages,
            "sites": [[site.name, site.first, site.stop, dict(site.shards)] for site in self._sites],
            "parts": [[part.name, part.first, part.population.bands] for part in self.parts],
        }
        tables = None if again else population_folder.Tables(self._clips, self._clients, self._arrays)
        population_folder.write(folder, facts, tables)

    def is_saved_in(self, folder: Path) -> bool:
        """Return whether the folder holds the same clips, clients and features, which may lie in another cache."""
        with population_folder.refusing_damage(folder):
            facts, saved = population_folder.read(folder)
        stores = [*self.stores, *(store for store in self._views.values() if store is not None)]
        named = [*facts["stores"], *(store for store, _ in facts["views"].values() if store is not None)]
        return (
            all(part.population.is_saved_in(population_folder.part_folder(folder, part.name)) for part in self.parts)
            and list(self._labels) == facts["classes"]
            and [store.folder.name for store in stores] == [Path(store).name for store in named]
            and _are_equal(self._clips, saved.clips)
            and _are_equal(self._clients, saved.clients)
        )

    @classmethod
    def load(
        cls, folder: Path, verify: bool = False, verify_features: bool = False, bands: int | None = None
    ) -> Population:
        """Map what :meth:`save` wrote, in milliseconds and without a copy. The file of an early version is converted.

        Args:
            verify: read everything but the features and compare it with its digest.
            verify_features: the same with the features.
            bands: features of a frame, where no example will be read: features, of further views too, may be on another machine, or
                gone.

        Raises:
            RunDirectoryError: a file is missing or damaged.
            DataError: the features in the cache are missing or damaged.
        """
        with population_folder.refusing_damage(folder):
            facts, tables = population_folder.read(folder, verify)

            def opened(store: str | None) -> FeatureStore | None:
                return None if store is None or bands is not None else open_store(Path(store), verify_features)

            parts = [
                Part(
                    name,
                    first,
                    cls.load(
                        population_folder.part_folder(folder, name),
                        verify,
                        verify_features,
                        None if bands is None else own,
                    ),
                )
                for name, first, own in facts["parts"]
            ]
            return cls(
                tables.clips,
                tables.clients,
                facts["classes"],
                facts["length"],
                [store for store in map(opened, facts["stores"]) if store is not None],
                tables.arrays,
                facts["skipped"],
                facts["messages"],
                facts["bands"] if bands is None else bands,
                [Site(*site) for site in facts["sites"]],
                parts,
                facts["separator"],
                {name: (opened(store), length) for name, (store, length) in facts["views"].items()},
            )

    def _examples(self, rows: slice, store: int = CLEAN) -> Examples:
        labels, clips = (self._of_clips(name, rows).astype(np.int64) for name in ("label", "clip"))
        views = {}
        for number, (name, view) in enumerate(self._views.items(), 1):
            assert view is not None  # noqa: S101 - examples are read where their data lie
            starts, frames = (self._of_clips(f"{name}:{column}", rows) for column in ("start", "frames"))
            views[name] = Examples(
                view,
                starts,
                frames,
                labels,
                clips,
                self.view_lengths[name],
                pipeline=self._pipelines[name],
                stream=number,
            )
        return Examples(
            self.stores[store],
            self._of_clips("start", rows),
            self._of_clips("frames", rows),
            labels,
            clips,
            self.length,
            {name: self._of_clips(f"column:{name}", rows).astype(np.int64) for name in self.columns},
            classes=self.classes,
            sets=self.sets,
            pipeline=self.pipeline,
            views=views,
        )


def _find_blocks(clips: pa.RecordBatch, pools: Sequence[str]) -> dict[tuple[str, str], slice]:
    """Return the rows of each role and pool; the pool of other roles than training is empty."""
    bounds = np.searchsorted(to_numbers(clips.column("role")), np.arange(len(ROLES) + 1, dtype=np.int8)).tolist()
    blocks: dict[tuple[str, str], slice] = {}
    for role, first, stop in zip(ROLES, bounds, bounds[1:], strict=False):
        if role not in POOLED:
            blocks[role, ""] = slice(first, stop)
            continue
        codes = to_numbers(clips.column("pool").slice(first, stop - first))
        inner = (np.searchsorted(codes, np.arange(len(pools) + 1, dtype=codes.dtype)) + first).tolist()
        blocks |= {(role, pool): slice(*ends) for pool, *ends in zip(pools, inner, inner[1:], strict=False)}
    return blocks


def _are_equal(one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    """Return whether two tables have equal columns. Statistics are left out: they are computed from features."""
    return one.schema.names == other.schema.names and all(
        _texts(own) == _texts(same) and np.array_equal(to_numbers(own), to_numbers(same))
        if pa.types.is_dictionary(own.type) and pa.types.is_dictionary(same.type)
        else own.equals(same)
        for own, same in zip(one.columns, other.columns, strict=True)
    )


def _texts(column: pa.DictionaryArray) -> list[str]:
    """Return the values as text: early versions read numbers in profiles as text."""
    return list(map(str, column.dictionary.to_pylist()))


def _join(columns: Sequence[Column]) -> Column:
    """Concatenate the columns of several parts."""
    values: list[Any] = []
    places = []
    for own, of in columns:
        places.append(np.where(of < 0, -1, of.astype(np.int64) + len(values)))
        values += own
    return values, np.concatenate(places)


def _block_diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Return int64 matrices one below and beside the other, with zeros elsewhere."""
    whole = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.int64)
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole
