"""The clients of a federation and the server's held-out data: who has which examples, in a few memory-mapped arrays.

A client is a range of those arrays and nothing else, so 100,000 of them cost some megabytes that all processes of a node share.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raydfl.core.errors import DataError, RunDirectoryError, nearest
from raydfl.core.files import RESUME, write_atomically, writing
from raydfl.data.array_file import digest, file_digest, map_arrays, write_arrays
from raydfl.data.examples import ClientData, Examples
from raydfl.data.features.cache import FeatureStore, open_store
from raydfl.data.label_sets import sets_of
from raydfl.data.names import Names
from raydfl.data.settings import DataSettings
from raydfl.data.transforms import PLAIN

FORMAT = 1
POPULATION_FILE = "population.safetensors"

TABLES = "transforms"
"""The beginning of the names of transforms' tables."""

PRESENCE = "presence"
"""The beginning of the names of what says which clients have a further view."""

CLEAN, NOISY = 0, 1
"""Positions in a population's stores."""

_SHARD = 512
"""Test examples in one order of the server's evaluation."""


@dataclass(frozen=True, slots=True)
class Site:
    """Clients that follow one another in the population and whose data lie at one place, where alone they are worked on."""

    name: str
    """Empty: wherever the run is."""
    first: int
    """Index of its first client."""
    stop: int
    """Index behind its last client."""
    shards: Mapping[str, Sequence[tuple[int, int]]]
    """For each of the splits test, triggered and server_validation, the parts (first example, the one behind the last) in which it
    is measured."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the server's data that is measured by itself."""

    split: str
    start: int
    """Index of its first example among those of the split at the site."""
    stop: int
    """Index behind its last example."""
    site: str
    """Name of the site where it lies."""


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
        classes: the labels that clips have; an example's label is an index into it.
        length: frames of every example, ``None`` when they differ.
        stores: the clean features, and the noisy ones if some clients have them.
        arrays: for each of the parts train, validation (both by client), server_validation and test the columns ``starts``,
            ``counts``, ``labels``, ``clips``; ``train/offsets`` and ``validation/offsets`` (int64 [clients + 1]); the names of
            clients and groups; ``groups_of`` (int32 [clients], -1: none), ``noisy`` and ``label_errors`` (bool [clients]).
            Where a table of clients says who has which clips, these three and the offsets are not there, but ``train/first`` and
            ``train/stop`` (int32 [clients]): the part train then has each example once, and several clients may have it.
            Where clients have tests of their own also the part client_test, by client.
            With an attack also the parts attack (what clients train on when they attack, parallel to train) and triggered (test
            clips that carry the attack's trigger), and ``altered`` (bool [clients]: the features of its attack are in the last
            store). With features normalised by group ``statistics/values`` (float64 [2, groups + 1, bands], those of
            raydfl.data.features.statistics) and ``statistics/of`` (int32 [clients], the client's place in them). What transforms
            need of the outside world is under ``transforms/``. ``presence/VIEW`` (bool [clients]) says who has a further view.
        skipped: clips that were left out because they cannot be read, or of which a further view cannot, with the reasons.
        messages: what the user should know about how this population came about.
        bands: features of a frame; ``None``: those of the stores.
        sites: where the data lie, if not here: there are no stores then, and no examples.
        columns: names of the values of further columns, by column: a code is an index into them. Parts then have the columns
            ``column/NAME`` too.
        pools: names of the pools of training clips, that of the part train first; another's part is ``train@NAME``.
        parts: where the federation is of several: then all is theirs but the clients' names and how many training examples each
            has (see raydfl.data.parts).
        separator: what stands between the classes that a label names; ``None``: a label is one class.
        views: of each further view by name its store (``None``: at the sites), and the frames of every example that has it,
            ``None`` when they differ. Where examples lie in it is in the columns ``starts`` and ``counts`` (0: absent) of the parts
            train@NAME and so on. No pool has the name of a view.
    """

    def __init__(
        self,
        classes: Sequence[str],
        length: int | None,
        stores: Sequence[FeatureStore],
        arrays: Mapping[str, np.ndarray],
        skipped: Sequence[tuple[str, str]] = (),
        messages: Sequence[str] = (),
        bands: int | None = None,
        sites: Sequence[Site] = (),
        columns: Mapping[str, Sequence[str]] | None = None,
        pools: Sequence[str] = ("train",),
        parts: Sequence[Part] = (),
        separator: str | None = None,
        views: Mapping[str, tuple[FeatureStore | None, int | None]] | None = None,
    ) -> None:
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
        self._arrays = dict(arrays)
        self.columns: Mapping[str, tuple[str, ...]] = {name: tuple(values) for name, values in (columns or {}).items()}
        """The values that the codes of examples' columns stand for, by column."""
        self.pools: tuple[str, ...] = tuple(pools)
        """Names of the pools of training examples."""
        self.bands = stores[CLEAN].bands if bands is None else bands
        """Features of a frame."""
        self._views = {name: store for name, (store, _) in (views or {}).items()}
        self.view_lengths: dict[str, int | None] = {name: length for name, (_, length) in (views or {}).items()}
        """Like :attr:`length`, of each further view by name, for examples that have it."""
        self._pipelines = dict.fromkeys(self._views, PLAIN)
        self.pipeline = PLAIN
        """The way of stored features into a batch: see :meth:`use`."""
        self.ids = self._names("ids")
        self._groups = self._names("groups")
        of_profiles = [name.split("/")[1] for name in arrays if name.startswith("profile/") and name.endswith("/of")]
        self._profiles = {name: self._names(f"profile/{name}") for name in of_profiles}
        self.parts = tuple(parts)
        """Data sets with classes of their own; empty: this is one."""
        self._alike: dict[int, np.ndarray] = {}
        """The same number for each client, by number."""
        self._firsts = [part.first for part in parts]
        self._sites = tuple(sites)
        self._site_ends = [site.stop for site in sites]

    def __len__(self) -> int:
        return len(self.ids)

    def use(self, data: DataSettings) -> Population:
        """Have batches made as the settings say, with the tables that are kept with the population; return the population."""
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
        if self.parts:  # what is measured there, each of them says
            return (Site("", 0, len(self), {}),)
        splits = {"test": self.test, "triggered": self.triggered, "server_validation": self.validation}
        return (Site("", 0, len(self), {split: shards(each.clips, _SHARD) for split, each in splits.items()}),)

    @property
    def shards(self) -> list[Shard]:
        """The parts in which the server's data are measured, one site after another."""
        return [
            Shard(split, start, stop, site.name)
            for site in self.sites
            for split, parts in site.shards.items()
            for start, stop in parts
        ]

    @property
    def _shared(self) -> bool:
        """True where several clients may have an example."""
        return "train/first" in self._arrays

    def site_of(self, index: int) -> str:
        """Return the name of the site of a client."""
        return self._sites[bisect.bisect_right(self._site_ends, index)].name if self._sites else ""

    @property
    def each(self) -> dict[str, Population]:
        """The parts by name; this population itself, under no name, where there are none."""
        return {part.name: part.population for part in self.parts} or {"": self}

    def part_of(self, index: int) -> str:
        """Return the name of the part of a client; empty where there are none."""
        return self._part(index).name if self.parts else ""

    def _part(self, index: int) -> Part:
        return self.parts[bisect.bisect_right(self._firsts, index) - 1]

    def index(self, client_id: str) -> int:
        """Return the position of a client.

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
        """Return how many training examples a client has in the first pool."""
        return self._size(self.pools[0], index)

    def _size(self, pool: str, index: int) -> int:
        mine = self._of_client("train" if pool == self.pools[0] else f"train@{pool}", index)
        return int(mine.stop - mine.start)

    def num_with_view(self, name: str) -> int:
        """Return how many training examples of the first pool have a further view."""
        return int(np.count_nonzero(self._arrays[f"train@{name}/counts"]))

    def owners(self, view: str) -> np.ndarray:
        """Return which clients have a further view of any of their training examples: bool [clients]."""
        everybody = np.ones(len(self), bool)  # a population of an early version does not say it
        return self._arrays.get(f"{PRESENCE}/{view}", everybody)

    def profile(self, index: int) -> dict[str, Any]:
        """Return what else is known of a client.

        That is: ``group`` (where clients are made of groups), ``noisy``, ``label_errors``, the columns of ``data.profile`` by name,
        ``views`` (names of the further views that it has, where there are any), ``pools`` (examples in each, where there are
        several), ``part`` (where there are parts).
        """
        if self.parts:
            part = self._part(index)
            return {"part": part.name, **part.population.profile(index - part.first)}
        facts = {}
        for name in ("group", "noisy", "label_errors", "views", *self._profiles):
            values, of = self.column(name)
            if of[index] >= 0:
                facts[name] = values[int(of[index])]
        if len(self.pools) > 1:
            facts["pools"] = {name: self._size(name, index) for name in self.pools}
        return facts

    def column(self, name: str) -> tuple[Sequence[Any], np.ndarray]:
        """Return what the profiles of all clients say under one name, but for ``pools``, which are no single value.

        Returns:
            The values, and int [clients]: the position of each client's among them; -1 where nothing is known of it.
        """
        if self.parts:
            return self._column_of_parts(name)
        if name == "group":
            return self._groups, self._of_clients("groups_of", -1)
        if name in ("noisy", "label_errors"):
            return (False, True), self._of_clients(name, 0).view(np.int8)
        if name == "views" and self._views:
            return self._sets_of_views
        if name in self._profiles:
            return self._profiles[name], self._arrays[f"profile/{name}/of"]
        return (), self._of_clients("", -1)

    def _of_clients(self, name: str, other: int) -> np.ndarray:
        """Return an array of that name with one number for each client; ``other`` for all where it is not there."""
        if name in self._arrays:
            return self._arrays[name]
        if other not in self._alike:
            self._alike[other] = np.broadcast_to(np.int8(other), len(self))
        return self._alike[other]

    @functools.cached_property
    def _sets_of_views(self) -> tuple[list[tuple[str, ...]], np.ndarray]:
        """Return each set of further views that clients have, and int [clients]: the position of each client's."""
        table = np.stack([self.owners(view) for view in self._views], axis=1)
        kinds, of = np.unique(table, axis=0, return_inverse=True)
        names = np.array([*self._views])
        return [tuple(names[kind].tolist()) for kind in kinds], of.reshape(-1)

    def _column_of_parts(self, name: str) -> tuple[Sequence[Any], np.ndarray]:
        if name == "part":
            sizes = [len(part.population) for part in self.parts]
            return [part.name for part in self.parts], np.repeat(np.arange(len(sizes)), sizes)
        values: list[Any] = []
        places = []
        for part in self.parts:
            own, of = part.population.column(name)
            places.append(np.where(of < 0, -1, of.astype(np.int64) + len(values)))
            values += own
        return values, np.concatenate(places)

    def sizes(self) -> np.ndarray:
        """Return int64 [clients]: training examples of each client in the first pool."""
        if self._shared:
            sizes: np.ndarray = self._arrays["train/stop"].astype(np.int64)
            sizes -= self._arrays["train/first"]
            return sizes
        return np.diff(self._arrays["train/offsets"])

    def data(self, index: int, attacking: bool = False) -> ClientData:
        """Return a client's data; its ``test`` is empty unless clients hold out a test set of their own.

        Args:
            attacking: with the training data of a client that attacks.
        """
        if self.parts:
            part = self._part(index)
            return part.population.data(index - part.first, attacking)
        store = CLEAN
        attacking = attacking and not self._shared
        if attacking and self._arrays["altered"][index]:
            store = len(self.stores) - 1
        elif self._of_clients("noisy", 0)[index]:
            store = NOISY
        train = "attack" if attacking else "train"
        own_test = "client_test/starts" in self._arrays
        first, *further = self.pools
        return ClientData(
            self._examples(train, self._of_client("train", index), store),
            self._examples("validation", self._of_client("validation", index)),
            self._examples("client_test", self._of_client("client_test", index))
            if own_test
            else self._examples("test", slice(0, 0)),
            {
                name: self._examples(f"{train}@{name}", self._of_client(f"train@{name}", index), store)
                for name in further
            },
            first,
        )

    def _of_client(self, part: str, index: int) -> slice:
        if not self._shared:
            offsets = self._arrays[f"{part}/offsets"]
            return slice(offsets[index], offsets[index + 1])
        if part != "train":
            return slice(0, 0)
        return slice(*(int(self._arrays[f"train/{bound}"][index]) for bound in ("first", "stop")))

    def first_examples(self, count: int) -> Examples | None:
        """Return some training examples, as they are without attacks and noise; ``None`` where all are at sites."""
        return self._examples("train", slice(0, count)) if "train/starts" in self._arrays else None

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
        """The server's validation data (``split.server_validation``, ``split.official_validation: validation``); else empty."""
        return self._examples("server_validation", slice(None))

    def statistics(self, client: int | None = None) -> np.ndarray | None:
        """Return the mean and deviation (float64 [2, bands]) with which further recordings are normalised by group.

        Args:
            client: whose they are: those of its group if all its training clips are of one group. ``None``, or a client of
                several groups: those over all training clips.

        Returns:
            ``None`` without ``normalise: group``, or where the data lie at sites.
        """
        if self.parts and client is not None:
            part = self._part(client)
            return part.population.statistics(client - part.first)
        if "statistics/values" not in self._arrays:
            return None
        values: np.ndarray = self._arrays["statistics/values"]
        return values[:, -1 if client is None else int(self._arrays["statistics/of"][client])]

    def class_counts(self) -> np.ndarray:
        """Return int64 [classes]: training clips of all clients together by class, a clip once for each client that has it."""
        if not self._shared:
            summed: np.ndarray = self.label_counts().sum(axis=0)
            return summed
        labels = self._arrays["train/labels"]
        begun, ended = (
            np.cumsum(np.bincount(self._arrays[f"train/{bound}"], minlength=len(labels) + 1))[:-1]
            for bound in ("first", "stop")
        )
        first = self._firsts_of_clips() & (labels >= 0)
        counts = np.bincount(labels[first], (begun - ended)[first], len(self._labels)).astype(np.int64)
        return counts if self.sets is None else counts @ self.sets.astype(np.int64)

    def _firsts_of_clips(self) -> np.ndarray:
        """Return which training examples are the first of their clip, where these follow one another: bool [examples]."""
        clips = self._arrays["train/clips"]
        return np.concatenate([np.ones(min(len(clips), 1), bool), clips[1:] != clips[:-1]])

    def _shared_counts(self, clients: slice | np.ndarray) -> np.ndarray:
        """Return what :meth:`label_counts` says of some clients who may share clips."""
        labels, first = self._arrays["train/labels"], self._firsts_of_clips()
        bounds = [self._arrays[f"train/{bound}"][clients] for bound in ("first", "stop")]
        counts = np.empty((len(bounds[0]), len(self._labels)), np.int64)
        for label in range(len(self._labels)):
            before = np.concatenate([[0], np.cumsum(first & (labels == label))])
            counts[:, label] = before[bounds[1]] - before[bounds[0]]
        return counts if self.sets is None else counts @ self.sets.astype(np.int64)

    def label_counts(
        self, of: Literal["train", "validation", "client_test"] = "train", clients: slice | np.ndarray = slice(None)
    ) -> np.ndarray:
        """Return int64 [clients, classes]: clips of each client by class, wrong labels as they are.

        Of several parts each has columns of its own, in the order of :attr:`classes`.

        Args:
            of: what the clients have the clips for. Clients without tests of their own have none in ``client_test``.
            clients: of whom to tell: a part of them, or int [some clients].
        """
        if self.parts:
            return block_diagonal([part.population.label_counts(of) for part in self.parts])[clients]
        if self._shared and of == "train":
            return self._shared_counts(clients)
        if f"{of}/offsets" not in self._arrays:
            return np.zeros((len(self), len(self.classes)), np.int64)[clients]
        offsets, labels = self._arrays[f"{of}/offsets"], self._arrays[f"{of}/labels"]
        client = np.repeat(np.arange(len(self)), np.diff(offsets))
        clips = self._arrays[f"{of}/clips"]
        # The segments of a clip follow one another: only the first of each counts.
        first = np.ones(len(clips), bool)
        first[1:] = (clips[1:] != clips[:-1]) | (client[1:] != client[:-1])
        first &= labels >= 0
        cell = client[first] * len(self._labels) + labels[first]
        counts = np.bincount(cell, minlength=len(self) * len(self._labels)).reshape(len(self), len(self._labels))
        of_all: np.ndarray = counts if self.sets is None else counts @ self.sets.astype(np.int64)
        return of_all[clients]

    def save(self, folder: Path) -> None:
        """Write everything but the features, which stay in the cache, to the file ``population.safetensors`` in ``folder``.

        Raises:
            ResourcesError: the disk is full or the folder cannot be written.
        """
        for part in self.parts:
            part.population.save(folder / _folder_of(part.name))
        arrays = self._arrays
        facts: dict[str, Any] = {
            "format": FORMAT,
            "classes": self._labels,
            **({} if self._separator is None else {"separator": self._separator}),
            "length": self.length,
            "stores": [str(store.folder) for store in self.stores],
            "skipped": self.skipped,
            "messages": self.messages,
            "bands": self.bands,
            "views": {
                name: [None if store is None else str(store.folder), self.view_lengths[name]]
                for name, store in self._views.items()
            },
            "sites": [[site.name, site.first, site.stop, dict(site.shards)] for site in self._sites],
            "digest": _digest(arrays),
        }
        if self.columns:
            facts["columns"] = self.columns
        if len(self.pools) > 1:
            facts["pools"] = self.pools
        if self.parts:
            facts["parts"] = [[part.name, part.first, part.population.bands] for part in self.parts]
        metadata = {"raydfl": json.dumps(facts)}
        needed = sum(array.nbytes for array in arrays.values())
        with writing(folder, needed, "the files of the population", RESUME):
            write_atomically(folder / POPULATION_FILE, lambda temporary: write_arrays(temporary, arrays, metadata))

    def is_saved_in(self, folder: Path) -> bool:
        """Return whether it is the population that :meth:`save` wrote there, whose features may lie in another cache."""
        if not all(part.population.is_saved_in(folder / _folder_of(part.name)) for part in self.parts):
            return False
        _, metadata = map_arrays(folder / POPULATION_FILE)
        facts = json.loads(metadata["raydfl"])
        keys = [store.folder.name for store in (*self.stores, *self._views.values()) if store is not None]
        folders = [*facts["stores"], *(store for store, _ in facts.get("views", {}).values())]
        saved = facts["digest"], list(facts["classes"]), [Path(store).name for store in folders if store is not None]
        return saved == (_digest(self._arrays), list(self._labels), keys)

    @classmethod
    def load(
        cls, folder: Path, verify: bool = False, verify_features: bool = False, bands: int | None = None
    ) -> Population:
        """Open what :meth:`save` wrote, in milliseconds and without a copy.

        Args:
            verify: read everything but the features and compare it with its digest.
            verify_features: the same with the features.
            bands: features of a frame, where no example will be read: features, of further views too, may be on another machine, or
                gone.

        Raises:
            RunDirectoryError: the file is missing or damaged.
            DataError: the features in the cache are.
        """
        path = folder / POPULATION_FILE
        try:
            arrays, metadata = map_arrays(path)
            facts = json.loads(metadata["raydfl"])
            if facts["format"] != FORMAT:
                raise ValueError(f"it is of format {facts['format']}, this version of raydfl reads {FORMAT}")
            if verify and file_digest(path, _derived(arrays)) != facts["digest"]:
                raise ValueError("its content has changed")
            parts = [
                Part(
                    name,
                    first,
                    cls.load(folder / _folder_of(name), verify, verify_features, None if bands is None else own),
                )
                for name, first, own in facts.get("parts", ())
            ]
            there, stores = bands is None, []
            views = {
                name: (open_store(Path(store), verify_features) if store is not None and there else None, length)
                for name, (store, length) in facts.get("views", {}).items()
            }
            if bands is None:
                stores = [open_store(Path(store), verify_features) for store in facts["stores"]]
                bands = facts.get("bands")  # neither this nor sites in a population of an early version
            sites = [Site(*site) for site in facts.get("sites", ())]
            return cls(
                facts["classes"],
                facts["length"],
                stores,
                arrays,
                facts["skipped"],
                facts["messages"],
                bands,
                sites,
                facts.get("columns"),
                facts.get("pools", ("train",)),
                parts,
                facts.get("separator"),
                views,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RunDirectoryError(
                f"{path} is missing or damaged ({reason}); the population of this run cannot be opened: start the run again in "
                "a new folder"
            ) from error

    def _names(self, kind: str) -> Names:
        return Names(*(self._arrays[f"{kind}/{part}"] for part in ("text", "ends", "order")))

    def _examples(self, part: str, where: slice, store: int = CLEAN) -> Examples:
        starts, counts, labels, clips = (
            self._arrays[f"{part}/{column}"][where] for column in ("starts", "counts", "labels", "clips")
        )
        columns = {name: self._arrays[f"{part}/column/{name}"][where].astype(np.int64) for name in self.columns}
        return Examples(
            self.stores[store],
            starts,
            counts,
            labels.astype(np.int64),
            clips.astype(np.int64),
            self.length,
            columns,
            classes=self.classes,
            sets=self.sets,
            pipeline=self.pipeline,
            views={
                name: self._view(name, number, _trained_on(part), where, labels, clips)
                for number, name in enumerate(self._views, 1)
            },
        )

    def _view(self, name: str, number: int, part: str, where: slice, labels: np.ndarray, clips: np.ndarray) -> Examples:
        store = self._views[name]
        assert store is not None  # noqa: S101 - examples are asked for where their data lie
        starts, counts = (self._arrays[f"{part}@{name}/{column}"][where] for column in ("starts", "counts"))
        return Examples(
            store,
            starts,
            counts,
            labels.astype(np.int64),
            clips.astype(np.int64),
            self.view_lengths[name],
            pipeline=self._pipelines[name],
            stream=number,
        )


def _trained_on(part: str) -> str:
    """Return the part whose clips those of ``attack`` or ``attack@POOL`` are."""
    kind, mark, pool = part.partition("@")
    return f"train{mark}{pool}" if kind == "attack" else part


def table_prefix(view: str) -> str:
    """Return what the names of the tables of a view's transforms begin with."""
    return f"{TABLES} {view}/" if view else f"{TABLES}/"


def shards(clips: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Return ranges of about ``size`` examples that never part the segments of one clip."""
    starts = np.flatnonzero(np.r_[True, clips[1:] != clips[:-1]]) if len(clips) else np.zeros(0, np.int64)
    parts, begin = [], 0
    while begin < len(clips):
        later = starts[starts >= begin + size]
        end = int(later[0]) if len(later) else len(clips)
        parts.append((begin, end))
        begin = end
    return parts


def block_diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Return int64 matrices one below and beside the other, with zeros elsewhere."""
    whole = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.int64)
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole


def _folder_of(part: str) -> str:
    return f"part-{part}"


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    return digest(arrays, _derived(arrays))


def _derived(names: Iterable[str]) -> list[str]:
    """Return the names of arrays that follow from others."""
    # Statistics and tables are computed from features, whose last bits another machine's processor may round differently; presence
    # only says what the numbers of frames say already.
    return [name for name in names if name == "statistics/values" or name.startswith((TABLES, f"{PRESENCE}/"))]
