"""The tables of clips and clients, and queries of them.

``clips.arrow`` has a row for each example, sorted by role, pool and client:

======================= ============ ==============================================================================
column                  type         meaning
======================= ============ ==============================================================================
role                    dictionary   one of :data:`ROLES`
pool                    dictionary   pool of a training example; null for other roles
client                  int32        position of the owner; -1: the server, or clients that share clips
store                   int8         feature store: 0 clean, then noisy and altered features if there are any
clip                    int32        row of the manifest; the segments of a clip follow one another
label                   int32        index into the labels; negative: none
start, frames           int64, int32 place of the features in the store
column:NAME             dictionary   further columns (``data.columns``)
view:NAME:start, frames int64, int32 place of a view's features; 0 frames: the clip lacks the view
======================= ============ ==============================================================================

``clients.arrow`` has a row for each client. Only ``client`` is always there. Private state and commits name a client by its row.

======================= ============ ==============================================================================
client                  large_string id
by_id                   int32        positions in the order of the ids, unless the ids ascend
place                   dictionary   site of the client's data; without the column all are where the run is
group                   dictionary   group of which the client was made
noisy, label_errors     bool         whether its training data are corrupted; without the column nobody's are
first, stop             int32        range of the client's rows of the first pool, where clients share clips
statistics              int32        index of the client's statistics in its part (see :meth:`Population.statistics`)
profile:NAME            dictionary   ``data.profile``, if its source is a column
examples                int64        number of training examples, where the clips are at sites
has:VIEW                bool         whether the client has a view, where the clips are at sites
======================= ============ ==============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from raydfl.core.part_names import qualify
from raydfl.core.settings import FIRST_VIEW
from raydfl.data.client_ids import ClientIds, to_numbers

ROLES = ("train", "validation", "client_test", "server_validation", "test", "attack", "triggered")
"""Uses of an example, in the order of the table of clips. Attackers train on ``attack`` in place of ``train``."""
POOLED = ("train", "attack")
"""Roles whose examples are in pools."""


def clips_table(columns: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Make a table of clips of columns by name, ``role`` as codes."""
    return pa.record_batch(
        {name: encode(own, ROLES) if name == "role" else pa.array(own) for name, own in columns.items()}
    )


def no_clips() -> pa.RecordBatch:
    """Make a table without clips, for a federation whose clips are elsewhere."""
    kinds = {"role": np.int8, "pool": np.int8, "client": np.int32}
    return clips_table({name: np.zeros(0, kind) for name, kind in kinds.items()})


def view_column(view: str, name: str) -> str:
    """Return the column of the clips table that holds ``start`` or ``frames`` of a view."""
    return name if view == FIRST_VIEW else f"view:{view}:{name}"


def table_prefix(view: str) -> str:
    """Return the prefix of the names of the tables of a view's transforms."""
    return "transforms." if view == FIRST_VIEW else f"transforms-{view}."


def encode(codes: np.ndarray, values: Sequence[Any] | pa.Array) -> pa.DictionaryArray:
    """Make a dictionary column.

    Args:
        codes: int [rows]: the position of each row's value; negative for null.
        values: the distinct values.
    """
    absent = codes < 0
    known = values if isinstance(values, pa.Array) else pa.array(values, None if len(values) else pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=absent if absent.any() else None), known)


Column = tuple[Sequence[Any], np.ndarray]
"""Values, and int [clients]: the position of each client's value; -1 if it is unknown."""
_T = TypeVar("_T")


class Tables:
    """The tables of clips and clients, and arrays by name: ``statistics``, and tables of transforms (:func:`table_prefix`).

    Queries of clips are for the tables of one part, see :meth:`split`.

    Args:
        clips: a row for each example.
        clients: a row for each client.
        arrays: by name; those of several parts begin with ``PART.``.
        first: number of the first client in the column ``client`` of clips.
    """

    def __init__(
        self,
        clips: pa.RecordBatch,
        clients: pa.RecordBatch,
        arrays: Mapping[str, np.ndarray] | None = None,
        first: int = 0,
    ) -> None:
        self.clips, self.clients, self.arrays, self._first = clips, clients, dict(arrays or {}), first
        self.ids = ClientIds.from_table(clients)
        self._known: dict[str, Any] = {}

    def split(self) -> dict[str, Tables]:
        """Return the tables of each part, without a copy. Positions of clients count from the part's first."""
        found: dict[str, Tables] = {}
        names = self.clients.column("part").dictionary.to_pylist()
        clips, clients = (_find_parts(table, len(names)) for table in (self.clips, self.clients))
        by_id = self.read_clients("by_id")
        for name, rows, own in zip(names, clips, clients, strict=True):
            columns = _known_columns(self.clients, own)
            if by_id is not None:
                columns["by_id"] = pa.array(by_id[(by_id >= own.start) & (by_id < own.stop)] - np.int32(own.start))
            prefix = qualify(name, ".", "")
            arrays = {key.removeprefix(prefix): a for key, a in self.arrays.items() if key.startswith(prefix)}
            own_clips = pa.record_batch(_known_columns(self.clips, rows))
            found[name] = Tables(own_clips, pa.record_batch(columns), arrays, own.start)
        return found

    def block(self, role: str, pool: int = 0) -> slice:
        """Return the rows of a role, and of its training examples those of a pool."""
        return self.remember(f"block {role} {pool}", lambda: self._find_block(role, pool))

    def _find_block(self, role: str, pool: int) -> slice:
        rows = slice(*_find_code(self.read_clips("role"), ROLES.index(role)))
        if role not in POOLED:
            return rows
        first, stop = _find_code(self.read_clips("pool", rows), pool)
        return slice(rows.start + first, rows.start + stop)

    def remember(self, key: str, make: Callable[[], _T]) -> _T:
        """Return the result of a query, which is computed once."""
        if key not in self._known:
            self._known[key] = make()
        found: _T = self._known[key]
        return found

    def read_clips(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return some rows of a column of clips as numbers."""
        first, stop, _ = rows.indices(self.clips.num_rows)
        return to_numbers(self.clips.column(name).slice(first, stop - first))

    def read_clients(self, name: str) -> np.ndarray | None:
        """Return a column of clients as numbers, or ``None`` if it is absent."""
        if name not in self.clients.schema.names:
            return None
        return self.remember(f"clients {name}", lambda: to_numbers(self.clients.column(name)))

    @property
    def ranges(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Ranges of the clients in the first pool (first rows, stops), if clients share clips."""
        first, stop = self.read_clients("first"), self.read_clients("stop")
        return None if first is None or stop is None else (first, stop)

    @property
    def places(self) -> tuple[str, ...]:
        """Places of clients, in the clients' order."""
        stored = "place" in self.clients.schema.names
        return tuple(self.clients.column("place").dictionary.to_pylist()) if stored else ("",)

    def place_of(self, client: int) -> str:
        """Return the place of a client."""
        codes = self.read_clients("place")
        return self.places[0 if codes is None else int(codes[client])]

    def is_at(self, place: str) -> np.ndarray:
        """Return which clients are at a place: bool [clients]."""
        found: np.ndarray = np.asarray(self.read_clients("place")) == self.places.index(place)
        return found

    def fill_clips(self, own: Tables, place: str, columns: Mapping[str, np.ndarray]) -> Tables:
        """Return these clients with the clips of one place.

        Args:
            own: the clips, and their owners' ranges if clients share clips. Its clients are those of the place, in order.
            place: name of the place.
            columns: further columns of the clips.
        """
        first = int(np.argmax(self.is_at(place)))
        client = own.owners_of()
        further = {f"column:{name}": pa.array(codes) for name, codes in columns.items()}
        clips = dict(zip(own.clips.schema.names, own.clips.columns, strict=True)) | further
        clips["client"] = pa.array(np.where(client < 0, client, client + first))
        clients = self.clients
        for name, bound in zip(("first", "stop"), own.ranges or (), strict=False):
            whole = np.zeros(len(self.ids), bound.dtype)
            whole[first : first + len(bound)] = bound
            clients = clients.append_column(name, pa.array(whole))
        return Tables(pa.record_batch(clips), clients, own.arrays)

    def owners_of(self, rows: slice = slice(None)) -> np.ndarray:
        """Return the positions of the clients of some clips; negative where there is none."""
        return self.read_clips("client", rows) - np.int32(self._first)

    def rows(self, role: str, client: int, pool: int = 0) -> slice:
        """Return the rows of a client's clips: see :meth:`block`."""
        block = self.block(role, pool)
        if self.ranges is not None:
            first, stop = (int(bound[client]) + block.start for bound in self.ranges)
            return slice(first, stop) if role == "train" else slice(0, 0)
        first, stop = _find_code(self.read_clips("client", block), self._first + client)
        return slice(block.start + first, block.start + stop)

    def has(self, role: str) -> bool:
        """Return whether there are clips with a role."""
        first, stop = _find_code(self.read_clips("role"), ROLES.index(role))
        return first < stop

    def num_examples(self, client: int, pool: int = 0) -> int:
        """Return how many training examples a client has in a pool."""
        examples = self.read_clients("examples")
        if examples is not None:
            return int(examples[client])
        rows = self.rows("train", client, pool)
        return int(rows.stop - rows.start)

    def sizes(self) -> np.ndarray:
        """Return int64 [clients]: training examples of each client in the first pool."""
        examples = self.read_clients("examples")
        if examples is not None:
            return examples
        if self.ranges is not None:
            sizes: np.ndarray = self.ranges[1].astype(np.int64)
            sizes -= self.ranges[0]  # in place: there may be millions of clients
            return sizes
        return np.bincount(self.owners_of(self.block("train")), minlength=len(self.ids))

    def owners(self, view: str) -> np.ndarray:
        """Return which clients have a view of any of their training examples: bool [clients]."""
        stored = self.read_clients(f"has:{view}")
        return self.remember(f"owners {view}", lambda: self._find_owners(view)) if stored is None else stored

    def _find_owners(self, view: str) -> np.ndarray:
        train = slice(*_find_code(self.read_clips("role"), ROLES.index("train")))
        present = self.read_clips(view_column(view, "frames"), train) > 0
        if self.ranges is not None:
            before = np.r_[0, np.cumsum(present)]
            shared: np.ndarray = before[self.ranges[1]] > before[self.ranges[0]]
            return shared
        return np.bincount(self.owners_of(train)[present], minlength=len(self.ids)) > 0

    def profile(self, client: int, views: Sequence[str], pools: Sequence[str]) -> dict[str, Any]:
        """Return the profile of a client.

        Args:
            views: names of ``data.views``.
            pools: names of the pools.
        """
        names = [name.removeprefix("profile:") for name in self.clients.schema.names if name.startswith("profile:")]
        columns = {name: self.column(name, views) for name in ("group", "noisy", "label_errors", "views", *names)}
        facts = {name: values[int(of[client])] for name, (values, of) in columns.items() if of[client] >= 0}
        if len(pools) > 1 and "examples" not in self.clients.schema.names:
            facts["pools"] = {name: self.num_examples(client, number) for number, name in enumerate(pools)}
        return facts

    def column(self, name: str, views: Sequence[str]) -> Column:
        """Return one entry of all clients' profiles, except ``pools``."""
        return self.remember(f"profile {name}", lambda: self._find_column(name, views))

    def _find_column(self, name: str, views: Sequence[str]) -> Column:
        if name in ("noisy", "label_errors"):
            stored = self.read_clients(name)
            return (False, True), np.broadcast_to(np.int8(0), len(self.ids)) if stored is None else stored.view(np.int8)
        if name == "views" and views:
            kinds, of = np.unique(np.stack([self.owners(view) for view in views], axis=1), axis=0, return_inverse=True)
            return [tuple(np.array(views)[kind].tolist()) for kind in kinds], of.reshape(-1)
        key = "group" if name == "group" else f"profile:{name}"
        stored = self.read_clients(key)
        if stored is None:
            return (), np.broadcast_to(np.int8(-1), len(self.ids))
        return self.clients.column(key).dictionary.to_pylist(), stored

    def label_counts(self, role: str, labels: int, clients: slice | np.ndarray) -> np.ndarray:
        """Return int64 [these clients, labels]: clips of each client by label.

        Args:
            role: of the clips; of several pools the first.
            labels: how many labels there are.
            clients: a part of the clients, or int [some clients].
        """
        block = self.block(role)
        label, begins = self.read_clips("label", block), self._begin_clips(block)
        if self.ranges is not None and role == "train":
            first, stop = (bound[clients] for bound in self.ranges)
            counts = np.empty((len(first), labels), np.int64)
            for number in range(labels):
                before = np.concatenate([[0], np.cumsum(begins & (label == number))])
                counts[:, number] = before[stop] - before[first]
            return counts
        client = self.owners_of(block).astype(np.int64)
        begins[1:] |= client[1:] != client[:-1]
        begins &= label >= 0
        cells = np.bincount(client[begins] * labels + label[begins], minlength=len(self.ids) * labels)
        return cells.reshape(len(self.ids), labels)[clients]

    def count_labels(self, labels: int) -> np.ndarray:
        """Return int64 [labels]: training clips of all clients together, a clip once for each client that has it."""
        if self.ranges is None:
            summed: np.ndarray = self.label_counts("train", labels, slice(None)).sum(axis=0)
            return summed
        block = self.block("train")
        label = self.read_clips("label", block)
        begun, ended = (np.cumsum(np.bincount(bound, minlength=len(label) + 1))[:-1] for bound in self.ranges)
        counted = self._begin_clips(block) & (label >= 0)
        return np.bincount(label[counted], (begun - ended)[counted], labels).astype(np.int64)

    def _begin_clips(self, block: slice) -> np.ndarray:
        """Return which rows are the first segment of their clip: bool [rows]."""
        clips = self.read_clips("clip", block)
        return np.concatenate([np.ones(min(len(clips), 1), bool), clips[1:] != clips[:-1]])

    def holds_same(self, other: Tables) -> bool:
        """Return whether both have equal clips and clients. Arrays are computed from features and may differ in their last bits."""
        return _are_equal(self.clips, other.clips) and _are_equal(self.clients, other.clients)


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


def join_columns(columns: Sequence[Column]) -> Column:
    """Concatenate the columns of several parts."""
    values: list[Any] = []
    codes = []
    for own, of in columns:
        kind = np.min_scalar_type(-len(values) - len(own) - 1)  # small: there may be millions of clients
        codes.append(np.where(of < 0, kind.type(-1), of.astype(kind) + kind.type(len(values))))
        values += own
    return values, np.concatenate(codes)


def join_tables(parts: Mapping[str, Tables]) -> Tables:
    """Join the tables of all parts, in the order given. A client is called by its part and its id there: ``digits/george``."""
    kind = np.min_scalar_type(-len(parts))
    clips, clients, arrays = [], [], dict[str, np.ndarray]()
    order: dict[str, np.ndarray] = {}
    first = 0
    for number, (name, own) in enumerate(parts.items()):
        tables = own.clips, own.clients
        of_clips, of_clients = (encode(np.full(each.num_rows, number, kind), [*parts]) for each in tables)
        client = own.owners_of()
        client = np.where(client < 0, np.int32(-1), client + np.int32(first))
        clips.append(pa.table({"part": of_clips, **_columns(own.clips), "client": pa.array(client)}))
        ids = own.ids.select_part(name)
        columns = {name: column for name, column in _columns(own.clients).items() if name != "by_id"}
        clients.append(pa.table({"part": of_clients, **columns, "client": ids}))
        arrays |= {qualify(name, ".", key): array for key, array in own.arrays.items()}
        by_id = np.arange(len(ids), dtype=np.int32) if own.ids.by_id is None else own.ids.by_id
        order[qualify(name, "/", "")] = by_id + np.int32(first)
        first += len(ids)
    joined = _join(clients)
    by_id = np.concatenate([order[prefix] for prefix in sorted(order, key=str.encode)])
    if not np.array_equal(by_id, np.arange(first, dtype=np.int32)):
        joined = joined.add_column(2, "by_id", pa.array(by_id))
    return Tables(_join(clips), joined, arrays)


def _join(tables: Sequence[pa.Table]) -> pa.RecordBatch:
    """Join tables. Missing columns are null, and a dictionary with values of several types becomes text."""
    kinds: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for field in table.schema:
            if pa.types.is_dictionary(field.type):
                kinds.setdefault(field.name, set()).add(field.type.value_type)
    for name in (name for name, types in kinds.items() if len(types) > 1):
        tables = [_with_text(table, name) if name in table.schema.names else table for table in tables]
    joined = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()
    return next(iter(joined.to_batches()), pa.RecordBatch.from_pylist([], joined.schema))


def _with_text(table: pa.Table, name: str) -> pa.Table:
    column = table.column(name).combine_chunks()
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, encode(to_numbers(column), [*map(str, column.dictionary.to_pylist())]))


def _columns(table: pa.RecordBatch) -> dict[str, pa.Array]:
    return dict(zip(table.schema.names, table.columns, strict=True))


def _known_columns(table: pa.RecordBatch, rows: range) -> dict[str, pa.Array]:
    """Return the columns that a part has, in its rows."""
    own = table.slice(rows.start, len(rows))
    unknown = {name for name, column in _columns(own).items() if len(own) and column.null_count == len(own)}
    return {name: column for name, column in _columns(own).items() if name not in {"part", *unknown}}


def _find_parts(table: pa.RecordBatch, number: int) -> list[range]:
    """Return the rows of each part."""
    codes = to_numbers(table.column("part"))
    stops = np.searchsorted(codes, np.arange(number, dtype=codes.dtype), "right").tolist()
    return [*map(range, [0, *stops], stops)]


def _find_code(codes: np.ndarray, code: int) -> tuple[int, int]:
    """Return the first row of a code in ascending codes, and the row behind its last."""
    wanted = codes.dtype.type(code)  # of the column's type, or searchsorted copies the column
    return int(np.searchsorted(codes, wanted)), int(np.searchsorted(codes, wanted, "right"))
