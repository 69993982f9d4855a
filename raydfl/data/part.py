"""A data set of a federation: its clients and clips, their features, and the values of its integer codes."""

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
from raydfl.data.label_sets import split_labels
from raydfl.data.settings import DataSettings
from raydfl.data.shards import Shard
from raydfl.data.steps.events import contains_classes, split_events
from raydfl.data.steps.label_sequences import LabelSequenceSettings, contains_units, split_sequences
from raydfl.data.tables import POOLED, Tables, table_prefix, view_column
from raydfl.data.transforms import PLAIN, Pipeline
from raydfl.data.trials import TRIALS

CLEAN = 0
"""Index of the store with clean features."""


@dataclass(frozen=True, slots=True)
class StoredView:
    """The features of a view of all examples."""

    length: int | None
    """Frames of each example with the view; ``None`` if they differ."""
    stores: tuple[FeatureStore, ...] = ()
    """The clean features, then noisy and altered features. Empty if the features are not loaded."""
    bands: int | None = None
    """Features of a frame; ``None``: the value of the settings."""
    pipeline: Pipeline = PLAIN
    """The pipeline from stored features to a batch, set by :meth:`Part.use`."""


@dataclass
class Part:
    """A data set of a federation (``data.parts``)."""

    tables: Tables
    """The tables of clips and clients."""
    labels: Sequence[str]
    """Labels of the clips. With a separator, a label may have several classes. With transcripts, a label is a sequence."""
    views: dict[str, StoredView]
    """The features of all views by name, starting with the first view."""
    pools: Sequence[str] = ("train",)
    """Names of the pools of training examples."""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of additional columns (``data.columns``) by name. The table of clips has indices into them."""
    separator: str | None = None
    """Separator of the classes in a label; ``None``: each label is a single class."""
    transcripts: LabelSequenceSettings | None = None
    """Form of transcripts as labels; ``None``: each label is a class, or a set of classes."""
    frame_seconds: float | None = None
    """Time between two frames of the first view, if labels are events. ``None``: labels are not events."""
    skipped: Sequence[tuple[str, str]] = ()
    """Unreadable clips, and clips with an unreadable view, with the reasons."""
    messages: Sequence[str] = ()
    """Messages to the user about the clips and clients."""
    shards: Sequence[Shard] | None = None
    """Shards of the server's data at sites; ``None`` if the data are local."""

    def __post_init__(self) -> None:
        """Split the labels into classes."""
        self.pools, self.columns = tuple(self.pools), {name: tuple(values) for name, values in self.columns.items()}
        self.classes: tuple[str, ...] = tuple(self.labels)
        """Names of the classes."""
        self.sets: np.ndarray | None = None
        """Classes of each label, bool [labels, classes]; ``None``: each label is a single class."""
        if self.separator is not None:
            names, self.sets = split_labels(self.classes, self.separator)
            self.classes = tuple(names)
        self.sequences: np.ndarray | None = None
        """Classes of each label in order, int32 [labels, longest], -1 after the end; ``None``: labels are not transcripts."""
        if self.transcripts is not None:
            names, self.sequences = split_sequences(self.classes, self.transcripts)
            self.classes = tuple(names)
        self.events: np.ndarray | None = None
        """Events of each label, float64 [labels, most events, 3]: onset and offset in seconds, and class, -1 after the last event.
        ``None``: labels are not events."""
        if self.frame_seconds is not None:
            names, self.events = split_events(self.classes)
            self.classes, self.sets = tuple(names), contains_classes(self.events, len(names))
        self._held_out: dict[str, Examples] = {}

    @classmethod
    def from_facts(
        cls, tables: Tables, facts: Mapping[str, Any], features: bool, verify: bool, cache: Path | None = None
    ) -> Part:
        """Create a part from the result of :meth:`to_facts`.

        Args:
            tables: tables of the part.
            facts: plain values.
            features: whether to open the features.
            verify: whether to verify the digests of the features.
            cache: folder of the features; ``None``: as in the facts.

        Raises:
            DataError: the features in the cache are missing or damaged.
        """
        views = {
            name: StoredView(
                view["length"],
                tuple(
                    open_store(Path(folder) if cache is None else cache / Path(folder).name, verify)
                    for folder in view["stores"]
                    if features
                ),
                view["bands"],
            )
            for name, view in facts["views"].items()
        }
        shards = None if facts["shards"] is None else [Shard(*shard) for shard in facts["shards"]]
        plain = {name: value for name, value in facts.items() if name not in ("views", "shards")}
        if plain.get("transcripts") is not None:
            plain["transcripts"] = LabelSequenceSettings(**plain["transcripts"])
        return cls(tables, views=views, shards=shards, **plain)

    def to_facts(self) -> dict[str, Any]:
        """Convert the part, except its tables, to plain values for JSON."""
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
        form: dict[str, Any] = {} if self.transcripts is None else {"transcripts": self.transcripts.model_dump()}
        form |= {} if self.frame_seconds is None else {"frame_seconds": self.frame_seconds}
        return {"views": views, "shards": shards, **{name: getattr(self, name) for name in names}, **form}

    @property
    def optional_views(self) -> list[str]:
        """Names of the views in ``data.views``."""
        return [name for name in self.views if name != FIRST_VIEW]

    def use(self, data: DataSettings) -> None:
        """Set the pipelines of all views according to the settings."""
        for name, view in self.views.items():
            pipeline = data.all_views[name].pipeline.add_tables(self.tables.arrays, table_prefix(name))
            self.views[name] = dataclasses.replace(view, pipeline=pipeline)
        self._held_out.clear()

    def read_held_out(self, role: str) -> Examples:
        """Return the server's examples of a role."""
        if role not in self._held_out:
            self._held_out[role] = self.examples(self.tables.block(role))
        return self._held_out[role]

    def read_role(self, role: str) -> list[Examples]:
        """Return the examples of a role, of all clients and pools: a sequence for each feature store with examples."""
        blocks = [self.tables.block(role, pool) for pool in range(len(self.pools) if role in POOLED else 1)]
        rows = slice(blocks[0].start, blocks[-1].stop)
        stores = self.tables.read_clips("store", rows)
        return [self.examples(rows, int(store)).take(np.flatnonzero(stores == store)) for store in np.unique(stores)]

    def sum_by_class(self, counts: np.ndarray) -> np.ndarray:
        """Convert counts of labels, int64 [..., labels], to counts of classes, int64 [..., classes]."""
        members = self.sets if self.sequences is None else contains_units(self.sequences, len(self.classes))
        return counts if members is None else counts @ members.astype(np.int64)

    def examples(self, rows: slice, store: int | None = None) -> Examples:
        """Return the examples in a range of rows with a common feature store.

        Args:
            rows: rows of the table of clips.
            store: index of the store; ``None``: read it from the rows.
        """

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
            self.sequences,
            "" if self.transcripts is None else self.transcripts.joint,
            self.events,
            self.frame_seconds or 0.0,
            self.tables.arrays.get(TRIALS),
        )
