"""One data set of a federation: its clients and clips, its features, and the names behind the numbers of its tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raydfl.core.settings import FIRST_VIEW
from raydfl.data.examples import Examples, Frames
from raydfl.data.features.cache import FeatureStore, open_store
from raydfl.data.label_sets import sets_of
from raydfl.data.settings import DataSettings
from raydfl.data.shards import Shard
from raydfl.data.tables import Tables, table_prefix, view_column
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
    """The pipeline from stored features to a batch, set by :meth:`Part.use`."""


@dataclass
class Part:
    """A data set of a federation (``data.parts``)."""

    tables: Tables
    """Its clips and clients."""
    labels: Sequence[str]
    """Labels of the clips; a label with a separator names several classes."""
    views: dict[str, StoredView]
    """The features of every view by name, the first view's first."""
    pools: Sequence[str] = ("train",)
    """Names of the pools of training examples."""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The values of further columns by name; an example has an index into them."""
    separator: str | None = None
    """Separator of the classes in a label; ``None``: a label is one class."""
    skipped: Sequence[tuple[str, str]] = ()
    """Names of unreadable clips, or clips without a readable view, with the reasons."""
    messages: Sequence[str] = ()
    """Messages to the user about the clips and clients."""
    shards: Sequence[Shard] | None = None
    """Shards of the server's data at sites; ``None``: the data are here."""

    def __post_init__(self) -> None:
        """Find the classes of each label."""
        self.pools, self.columns = tuple(self.pools), {name: tuple(own) for name, own in self.columns.items()}
        self.classes: tuple[str, ...] = tuple(self.labels)
        """Names of the classes."""
        self.sets: np.ndarray | None = None
        """bool [labels, classes]: the classes of each label, where a label is a set of them."""
        if self.separator is not None:
            names, self.sets = sets_of(self.classes, self.separator)
            self.classes = tuple(names)
        self._held: dict[str, Examples] = {}

    @classmethod
    def from_facts(cls, tables: Tables, facts: Mapping[str, Any], features: bool, verify: bool) -> Part:
        """Make a part of what :meth:`to_facts` returned.

        Args:
            tables: of the part.
            facts: plain values.
            features: whether to open the features.
            verify: whether to compare the features with their digests.

        Raises:
            DataError: the features in the cache are missing or damaged.
        """
        views = {
            name: StoredView(
                view["length"],
                tuple(open_store(Path(folder), verify) for folder in view["stores"] if features),
                view["bands"],
            )
            for name, view in facts["views"].items()
        }
        shards = None if facts["shards"] is None else [Shard(*shard) for shard in facts["shards"]]
        others = {name: value for name, value in facts.items() if name not in ("views", "shards")}
        return cls(tables, views=views, shards=shards, **others)

    def to_facts(self) -> dict[str, Any]:
        """Return everything but the tables as plain values."""
        views = {
            name: {
                "length": view.length,
                "stores": [str(store.folder) for store in view.stores],
                "bands": view.bands,
            }
            for name, view in self.views.items()
        }
        shards = None if self.shards is None else [dataclasses.astuple(shard) for shard in self.shards]
        names = ("labels", "pools", "columns", "separator", "skipped", "messages")
        return {"views": views, "shards": shards, **{name: getattr(self, name) for name in names}}

    @property
    def optional_views(self) -> list[str]:
        """Names of ``data.views``."""
        return [name for name in self.views if name != FIRST_VIEW]

    def use(self, data: DataSettings) -> None:
        """Apply the transforms of the settings to batches."""
        for name, view in self.views.items():
            pipeline = data.all_views[name].pipeline.add_tables(self.tables.arrays, table_prefix(name))
            self.views[name] = dataclasses.replace(view, pipeline=pipeline)
        self._held.clear()

    def held_out(self, role: str) -> Examples:
        """Return the server's examples of a role."""
        if role not in self._held:
            self._held[role] = self.examples(self.tables.block(role))
        return self._held[role]

    def sum_by_class(self, counts: np.ndarray) -> np.ndarray:
        """Return int64 [..., classes], made of int64 [..., labels]."""
        return counts if self.sets is None else counts @ self.sets.astype(np.int64)

    def examples(self, rows: slice, store: int | None = None) -> Examples:
        """Return the examples in these rows; without ``store`` all are in the store of their rows."""

        def read(name: str) -> np.ndarray:
            return self.tables.read_clips(name, rows)

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
