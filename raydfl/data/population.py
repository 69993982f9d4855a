"""The clients of a federation and the server's held-out data: who has which examples, in a few memory-mapped arrays.

A client is a range of those arrays and nothing else, so 100,000 of them cost some megabytes that all processes of a node share.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raydfl.core.errors import DataError, nearest
from raydfl.data import population_file
from raydfl.data.client_profiles import ClientProfiles, joined
from raydfl.data.examples import ClientData, Examples
from raydfl.data.features.cache import FeatureStore
from raydfl.data.holdings import block_diagonal, holdings_of
from raydfl.data.label_sets import sets_of
from raydfl.data.names import Names
from raydfl.data.population_file import folder_of, table_prefix
from raydfl.data.settings import DataSettings
from raydfl.data.shards import Shard, Site, only_site, shards_at
from raydfl.data.transforms import PLAIN

CLEAN, NOISY = 0, 1
"""Positions in a population's stores."""


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
        arrays: raydfl.data.population_file says which, and what is in them.
        skipped: clips that were left out because they cannot be read, or of which a further view cannot, with the reasons.
        messages: what the user should know about how this population came about.
        bands: features of a frame; ``None``: those of the stores.
        sites: where the data lie, if not here: there are no stores then, and no examples.
        columns: names of the values of further columns, by column: a code is an index into them.
        pools: names of the pools of training clips, that of the part train first.
        parts: where the federation is of several: then all is theirs but the clients' names and how many training examples each
            has (see raydfl.data.parts).
        separator: what stands between the classes that a label names; ``None``: a label is one class.
        views: of each further view by name its store (``None``: at the sites), and the frames of every example that has it,
            ``None`` when they differ. No pool has the name of a view.
        profile_types: types of the columns of profiles that are no text (see raydfl.data.client_profiles).
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
        profile_types: Mapping[str, str] | None = None,
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
        self._holdings = holdings_of(self._arrays, len(self._labels))
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
        self.ids = Names.among(arrays, "ids")
        self._profile_types = dict(profile_types or {})
        self._profiles = ClientProfiles(self._arrays, len(self.ids), tuple(self._views), self._profile_types)
        self.parts = tuple(parts)
        """Data sets with classes of their own; empty: this is one."""
        self._sites = tuple(sites)

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
        mine = self._holdings.range_of("train" if pool == self.pools[0] else f"train@{pool}", index)
        return int(mine.stop - mine.start)

    def num_with_view(self, name: str) -> int:
        """Return how many training examples of the first pool have a further view."""
        return int(np.count_nonzero(self._arrays[f"train@{name}/counts"]))

    def owners(self, view: str) -> np.ndarray:
        """Return which clients have a further view of any of their training examples: bool [clients]."""
        return self._profiles.owners(view)

    def profile(self, index: int) -> dict[str, Any]:
        """Return what else is known of a client.

        That is: ``group`` (where clients are made of groups), ``noisy``, ``label_errors``, the columns of ``data.profile`` by name,
        ``views`` (names of the further views that it has, where there are any), ``pools`` (examples in each, where there are
        several), ``part`` (where there are parts).
        """
        if self.parts:
            part = self._part(index)
            return {"part": part.name, **part.population.profile(index - part.first)}
        facts = self._profiles.of(index)
        if len(self.pools) > 1:
            facts["pools"] = {name: self._size(name, index) for name in self.pools}
        return facts

    def column(self, name: str) -> tuple[Sequence[Any], np.ndarray]:
        """Return what the profiles of all clients say under one name, but for ``pools``, which are no single value.

        Returns:
            The values, and int [clients]: the position of each client's among them; -1 where nothing is known of it.
        """
        if self.parts:
            if name == "part":
                sizes = [len(part.population) for part in self.parts]
                return [part.name for part in self.parts], np.repeat(np.arange(len(sizes)), sizes)
            return joined(part.population.column(name) for part in self.parts)
        return self._profiles.column(name)

    def sizes(self) -> np.ndarray:
        """Return int64 [clients]: training examples of each client in the first pool."""
        return self._holdings.sizes()

    def data(self, index: int, attacking: bool = False) -> ClientData:
        """Return a client's data; its ``test`` is empty unless clients hold out a test set of their own.

        Args:
            attacking: with the training data of a client that attacks.
        """
        if self.parts:
            part = self._part(index)
            return part.population.data(index - part.first, attacking)
        store, range_of = CLEAN, self._holdings.range_of
        train = self._holdings.trained_on_by_attackers if attacking else "train"
        if train == "attack" and self._arrays["altered"][index]:
            store = len(self.stores) - 1
        elif self._profiles.column("noisy")[1][index]:
            store = NOISY
        tests = range_of("client_test", index) if "client_test/starts" in self._arrays else None
        first, *further = self.pools
        return ClientData(
            self._examples(train, range_of("train", index), store),
            self._examples("validation", range_of("validation", index)),
            self._examples("test", slice(0, 0)) if tests is None else self._examples("client_test", tests),
            {name: self._examples(f"{train}@{name}", range_of(f"train@{name}", index), store) for name in further},
            first,
        )

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
        if self.parts:
            return np.concatenate([part.population.class_counts() for part in self.parts])
        return self._by_class(self._holdings.labels_of_all())

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
        if not self._holdings.has(of):
            return np.zeros((len(self), len(self.classes)), np.int64)[clients]
        return self._by_class(self._holdings.label_counts(of, clients))

    def _by_class(self, counts: np.ndarray) -> np.ndarray:
        """Return int64 [..., classes], made of int64 [..., labels]."""
        return counts if self.sets is None else counts @ self.sets.astype(np.int64)

    def save(self, folder: Path, again: bool = False) -> None:
        """Write everything but the features, which stay in the cache, to the file ``population.safetensors`` in ``folder``.

        Args:
            again: replace the file of a run by that of equal data. The types of its profile columns stay.

        Raises:
            ResourcesError: the disk is full or the folder cannot be written.
        """
        for part in self.parts:
            part.population.save(folder_of(folder, part.name), again)
        of_parts = [(part.name, part.first, part.population.bands) for part in self.parts]
        arguments = self._arguments()
        if again:
            arguments["profile_types"] = population_file.read_facts(folder).get("profile_types")
        population_file.write(folder, arguments, of_parts)

    def _arguments(self) -> dict[str, Any]:
        """Return what it was made of but for ``parts``: the constructor's arguments by name."""
        return {
            "classes": self._labels,
            "length": self.length,
            "stores": self.stores,
            "arrays": self._arrays,
            "skipped": self.skipped,
            "messages": self.messages,
            "bands": self.bands,
            "sites": self._sites,
            "columns": self.columns,
            "pools": self.pools,
            "separator": self._separator,
            "views": {name: (store, self.view_lengths[name]) for name, store in self._views.items()},
            "profile_types": self._profile_types,
        }

    def is_saved_in(self, folder: Path) -> bool:
        """Return whether it is the population that :meth:`save` wrote there, whose features may lie in another cache."""
        parts_are = all(part.population.is_saved_in(folder_of(folder, part.name)) for part in self.parts)
        return parts_are and population_file.is_written_in(folder, self._arguments())

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
        with population_file.refusing_damage(folder):
            arguments, of_parts = population_file.read(folder, verify, verify_features, bands)
            parts = [
                Part(name, first, cls.load(folder_of(folder, name), verify, verify_features, own))
                for name, first, own in of_parts
            ]
            return cls(**arguments, parts=parts)

    def _examples(self, part: str, where: slice, store: int = CLEAN) -> Examples:
        labels, clips = (self._arrays[f"{part}/{column}"][where].astype(np.int64) for column in ("labels", "clips"))
        views = {}
        for number, (name, view) in enumerate(self._views.items(), 1):
            assert view is not None  # noqa: S101 - examples are asked for where their data lie
            frames, length = self._frames(f"{_trained_on(part)}@{name}", where), self.view_lengths[name]
            views[name] = Examples(view, *frames, labels, clips, length, pipeline=self._pipelines[name], stream=number)
        return Examples(
            self.stores[store],
            *self._frames(part, where),
            labels,
            clips,
            self.length,
            {name: self._arrays[f"{part}/column/{name}"][where].astype(np.int64) for name in self.columns},
            classes=self.classes,
            sets=self.sets,
            pipeline=self.pipeline,
            views=views,
        )

    def _frames(self, part: str, where: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return where in their store examples begin, and how many frames each has."""
        return self._arrays[f"{part}/starts"][where], self._arrays[f"{part}/counts"][where]


def _trained_on(part: str) -> str:
    """Return the part whose clips those of ``attack`` or ``attack@POOL`` are."""
    kind, mark, pool = part.partition("@")
    return f"train{mark}{pool}" if kind == "attack" else part
