"""List: the first table of clips, made from a data set's manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError, nearest
from raydfl.data.client_ids import ClientIds, to_numbers
from raydfl.data.tables import encode

STANDARD = ("clip", "path", "label", "group", "split", "seconds")
"""Columns of every list."""
TRAIN, LABELLED, UNLABELLED = "train", "labelled", "unlabelled"
"""Names of pools: the default pool, then the two pools of ``data.unlabelled``."""
MAIN_UNIT = "main unit"
"""Column of clips with the rarest unit of each transcript, or the rarest class of its events."""
NO_LABEL = -100
"""Class of an unlabelled example. PyTorch's ``cross_entropy`` ignores it."""


@dataclass(frozen=True)
class Assignment:
    """Assignment of clips to the clients and the server: a table of clips and a table of clients.

    A clip has a row for each of its uses. Every step adds columns to the table of clips:

    ============ ========= =========== ====================================================================================
    column       step      type        meaning
    ============ ========= =========== ====================================================================================
    clip         list      dictionary  name; its code is the clip's row in the list
    label        list      dictionary  name of the class; null: unknown
    column:NAME  list      any         additional column of the list
    batch:NAME   list      dictionary  column carried by batches (``data.columns``)
    main unit    list      dictionary  rarest unit of a transcript, or rarest class of a clip's events
    role         split     dictionary  one of :data:`raydfl.data.tables.ROLES`
    pool         pools     dictionary  pool of a training clip
    client       partition dictionary  owner; null: the server, or clients that share clips
    store        corrupt   dictionary  features: clean, noisy or altered
    noise        corrupt   bool        whether the recording gets noise
    altered      corrupt   bool        whether an attacker alters the recording
    lacks:VIEW   corrupt   bool        whether ``data.missing`` removes the view from the owner
    ============ ========= =========== ====================================================================================

    After the step partition, clips are sorted by client and pool. The server's clips come last.
    """

    clips: pa.RecordBatch
    clients: pa.RecordBatch
    """Columns as in raydfl.data.tables; ``column:NAME`` is a column of the user's table of clients."""
    messages: tuple[str, ...] = ()
    """Messages to the user."""

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        names: list[str] = self.clips.column("label").dictionary.to_pylist()
        return names

    @property
    def strata(self) -> str:
        """Column for partitions and splits by label: the rarest unit of a transcript or class of events, else the label."""
        return MAIN_UNIT if MAIN_UNIT in self.clips.schema.names else "label"

    @property
    def pools(self) -> list[str]:
        """Names of the pools."""
        names: list[str] = self.clips.column("pool").dictionary.to_pylist()
        return names

    @property
    def ids(self) -> ClientIds:
        """Ids of the clients in their order."""
        return ClientIds.from_table(self.clients)

    def codes(self, name: str) -> np.ndarray:
        """Return a column of clips as numbers, -1 for null."""
        return to_numbers(self.clips.column(name))

    def has_role(self, *roles: str) -> np.ndarray:
        """Return a mask of the clips with any of the roles: bool [clips]."""
        names = self.clips.column("role").dictionary.to_pylist()
        mask: np.ndarray = np.isin(self.codes("role"), [names.index(role) for role in roles])
        return mask

    def train_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of all training clips, and the bounds of each client's clips among them.

        Returns:
            rows: int64 [training clips].
            bounds: int64 [clients + 1]; client i has ``rows[bounds[i]:bounds[i + 1]]``.
        """
        rows = np.flatnonzero(self.has_role("train"))
        return rows, np.searchsorted(self.codes("client")[rows], np.arange(self.clients.num_rows + 1))

    def sizes(self, *roles: str) -> np.ndarray:
        """Count the clips of each client, by default of all roles: int64 [clients]."""
        if "first" in self.clients.schema.names:  # clients share clips, so clips have no owner
            first, stop = (self.clients.column(name).to_numpy() for name in ("first", "stop"))
            sizes: np.ndarray = np.subtract(stop, first, dtype=np.int64)
            return sizes
        client = self.codes("client")
        return np.bincount(client[(client >= 0) & (not roles or self.has_role(*roles))], minlength=len(self.ids))

    def column(self, name: str, where: str) -> pa.Array:
        """Return a column of the list.

        Args:
            where: the setting that names the column.

        Raises:
            DataError: the list lacks the column.
        """
        key = name if name in (*STANDARD, MAIN_UNIT) else f"column:{name}"
        if key not in self.clips.schema.names:
            known = [*STANDARD, *(key[7:] for key in self.clips.schema.names if key.startswith("column:"))]
            raise DataError(f"{where}: the recordings have no column {name!r}. {nearest(name, known)}")
        return self.clips.column(key)

    def texts(self, name: str, where: str) -> np.ndarray:
        """Return a column of the list as text: object [clips], ``None`` for a missing value."""
        values = self.column(name, where).to_pylist()
        return np.array([None if value is None else str(value) for value in values], dtype=object)

    def select(self, rows: np.ndarray) -> Assignment:
        """Return the tables with a selection of clips: a mask (bool [clips]) or rows (int [rows])."""
        chosen = pa.array(rows)
        clips = self.clips.filter(chosen) if rows.dtype == bool else self.clips.take(chosen)
        return replace(self, clips=clips)

    def set_clips(self, **columns: pa.Array) -> Assignment:
        """Return the tables with columns of clips added or replaced."""
        return replace(self, clips=set_columns(self.clips, columns))

    def add_message(self, message: str) -> Assignment:
        """Return the tables with a message appended."""
        return replace(self, messages=(*self.messages, message))


def set_columns(table: pa.RecordBatch, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return a table with columns added or replaced."""
    return pa.record_batch(dict(zip(table.schema.names, table.columns, strict=True)) | dict(columns))


def make_assignment(manifest: pa.Table, classes: Sequence[str]) -> Assignment:
    """Make the tables from a list of clips.

    Args:
        manifest: the list, as made by :func:`raydfl.make_manifest`.
        classes: names of the classes in their order. A clip of another class counts as unlabelled.
    """
    columns: dict[str, pa.Array] = {}
    for name in manifest.column_names:
        columns[name if name in STANDARD else f"column:{name}"] = manifest.column(name).combine_chunks()
    rows = np.arange(manifest.num_rows, dtype=np.int32)
    columns["clip"] = pa.DictionaryArray.from_arrays(
        pa.array(rows), columns["clip"]
    )  # codes survive a selection of rows
    labels = pc.index_in(columns["label"], value_set=pa.array(classes, pa.string()))
    columns["label"] = encode(to_numbers(labels.fill_null(-1)), classes)
    return Assignment(pa.record_batch(columns), pa.record_batch({"client": pa.array([], pa.large_string())}))


def add_batch_column(tables: Assignment, name: str) -> Assignment:
    """Add the column ``batch:NAME``: a column of the list, encoded as integers for batches.

    The integers count the values in natural order.

    Raises:
        DataError: the list lacks the column, or a clip has no value in it.
    """
    where = "data.columns"
    texts = tables.texts(name, where)
    absent = np.flatnonzero(texts == None)  # noqa: E711 - element by element
    if len(absent):
        clip = tables.clips.column("clip")[int(absent[0])]
        raise DataError(
            f"{where}: {len(absent)} of {len(texts)} clips have no value in column {name!r}, the first {clip}. Fill the "
            f"column, or remove it from {where}"
        )
    values = natural_order(list(set(texts.tolist())))
    code = {value: number for number, value in enumerate(values)}
    codes = np.array([code[text] for text in texts], np.int32)
    return tables.set_clips(**{f"batch:{name}": encode(codes, values)})


def describe_sizes(sizes: np.ndarray) -> str:
    """Describe sizes: ``18 to 24 clips each, median 21``."""
    if sizes.min() == sizes.max():
        return f"{sizes.min():,} clips each"
    return f"{sizes.min():,} to {sizes.max():,} clips each, median {np.median(sizes):g}"


def natural_order(names: Sequence[str]) -> list[str]:
    """Sort names with digits compared as numbers: ``a/2`` before ``a/10``."""
    return sorted(names, key=_split_digits)


_NUMBER = re.compile("([0-9]+)")


def _split_digits(name: str) -> list[Any]:
    parts: list[Any] = _NUMBER.split(name)  # text and numbers alternate, so lists compare type by type
    parts[1::2] = [(int(number), number) for number in parts[1::2]]
    return parts
