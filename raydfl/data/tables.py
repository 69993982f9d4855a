"""The tables of clips and clients, and queries of them.

``clips.arrow`` has a row for each example, sorted by role, pool and client:

======================= ============ ==============================================================================
column                  type         meaning
======================= ============ ==============================================================================
role                    dictionary   one of :data:`ROLES`
pool                    dictionary   pool of a training example; null for other roles
client                  int32        position of the owner; -1: the server, or clients that share clips
store                   int8         feature store: 0 for clean features, then noisy and altered features
clip                    int32        row of the manifest; the segments of a clip are adjacent
label                   int32        index into the labels; negative if unlabelled
start, frames           int64, int32 place of the features in the store
column:NAME             dictionary   additional columns (``data.columns``)
view:NAME:start, frames int64, int32 place of a view's features; 0 frames: the clip lacks the view
======================= ============ ==============================================================================

``clients.arrow`` has a row for each client. Only ``client`` is mandatory. Private state and commits refer to a client by its row.

======================= ============ ==============================================================================
client                  large_string client id
by_id                   int32        permutation that sorts the ids; absent if they are sorted
place                   dictionary   site of the client's data; absent if all data are local to the run
group                   dictionary   group from which the client was made
noisy, label_errors     bool         whether its training data are corrupted; absent if no client's are
first, stop             int32        range of the client's rows of the first pool, if clients share clips
statistics              int32        index of the client's statistics in its part (see :meth:`Population.statistics`)
profile:NAME            dictionary   ``data.profile``, if its source is a column
examples                int64        number of training examples, if the clips are at sites
has:VIEW                bool         whether the client has a view, if the clips are at sites
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

ROLES = ("train", "validation", "client_test", "server_validation", "test", "attack", "triggered", "canary")
"""Roles of an example, in the order of the table of clips. Attackers train on ``attack`` instead of ``train``. Canary clips have a
row of the role ``canary``, and a row of the role ``train`` if their coin includes them."""
POOLED = ("train", "attack")
"""Roles with pools of examples."""


def clips_table(columns: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Build a table of clips from arrays by column. ``role`` contains indices into :data:`ROLES`."""
    return pa.record_batch(
        {name: encode(array, ROLES) if name == "role" else pa.array(array) for name, array in columns.items()}
    )


def make_empty_clips() -> pa.RecordBatch:
    """Build an empty table of clips, for a federation with all clips at sites."""
    kinds = {"role": np.int8, "pool": np.int8, "client": np.int32}
    return clips_table({name: np.zeros(0, kind) for name, kind in kinds.items()})


def view_column(view: str, name: str) -> str:
    """Return the column of ``start`` or ``frames`` of a view in the table of clips."""
    return name if view == FIRST_VIEW else f"view:{view}:{name}"


def table_prefix(view: str) -> str:
    """Return the prefix of the names of a view's transform arrays."""
    return "transforms." if view == FIRST_VIEW else f"transforms-{view}."


def encode(codes: np.ndarray, values: Sequence[Any] | pa.Array) -> pa.DictionaryArray:
    """Build a dictionary column.

    Args:
        codes: int [rows], the index of each row's value; negative for null.
        values: the distinct values.
    """
    null = codes < 0
    dictionary = values if isinstance(values, pa.Array) else pa.array(values, None if len(values) else pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=null if null.any() else None), dictionary)


Column = tuple[Sequence[Any], np.ndarray]
"""Values, and int [clients]: the index of each client's value, -1 if unknown."""
_T = TypeVar("_T")


class Tables:
    """The tables of clips and clients, and arrays by name: ``statistics``, and arrays of transforms (:func:`table_prefix`).

    Queries of clips need the tables of a single part. :meth:`split` returns them.

    Args:
        clips: a row for each example.
        clients: a row for each client.
        arrays: arrays by name. With several parts, names have the prefix ``PART.``.
        first: position of the first client in the column ``client`` of clips.
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
        self._cache: dict[str, Any] = {}

    def split(self) -> dict[str, Tables]:
        """Return the tables of each part without a copy. Client positions are relative to the part."""
        parts: dict[str, Tables] = {}
        names = self.clients.column("part").dictionary.to_pylist()
        clips, clients = (_find_parts(table, len(names)) for table in (self.clips, self.clients))
        by_id = self.read_clients("by_id")
        for name, rows, span in zip(names, clips, clients, strict=True):
            columns = _select_columns(self.clients, span)
            if by_id is not None:
                columns["by_id"] = pa.array(by_id[(by_id >= span.start) & (by_id < span.stop)] - np.int32(span.start))
            prefix = qualify(name, ".", "")
            arrays = {key.removeprefix(prefix): a for key, a in self.arrays.items() if key.startswith(prefix)}
            part_clips = pa.record_batch(_select_columns(self.clips, rows))
            parts[name] = Tables(part_clips, pa.record_batch(columns), arrays, span.start)
        return parts

    def block(self, role: str, pool: int = 0) -> slice:
        """Return the rows of a role. Training roles (:data:`POOLED`) have a block for each pool."""
        return self.remember(f"block {role} {pool}", lambda: self._find_block(role, pool))

    def _find_block(self, role: str, pool: int) -> slice:
        rows = slice(*_find_code(self.read_clips("role"), ROLES.index(role)))
        if role not in POOLED:
            return rows
        first, stop = _find_code(self.read_clips("pool", rows), pool)
        return slice(rows.start + first, rows.start + stop)

    def remember(self, key: str, make: Callable[[], _T]) -> _T:
        """Return the cached result of a query, or compute it with ``make``."""
        if key not in self._cache:
            self._cache[key] = make()
        result: _T = self._cache[key]
        return result

    def read_clips(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return a column of clips as a NumPy array. A dictionary column gives its codes, -1 for null."""
        first, stop, _ = rows.indices(self.clips.num_rows)
        return to_numbers(self.clips.column(name).slice(first, stop - first))

    def read_clients(self, name: str) -> np.ndarray | None:
        """Return a column of clients as a NumPy array, or ``None`` if it is absent."""
        if name not in self.clients.schema.names:
            return None
        return self.remember(f"clients {name}", lambda: to_numbers(self.clients.column(name)))

    @property
    def ranges(self) -> tuple[np.ndarray, np.ndarray] | None:
        """First and stop rows of each client in the first pool (int32 [clients] each); ``None`` unless clients share clips."""
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
        """Return a mask of the clients at a place: bool [clients]."""
        mask: np.ndarray = np.asarray(self.read_clients("place")) == self.places.index(place)
        return mask

    def fill_clips(self, local: Tables, place: str, columns: Mapping[str, np.ndarray]) -> Tables:
        """Combine the clients of the federation with the clips of a place.

        Args:
            local: tables of the place. Its clients are the clients of the place, in the same order.
            place: name of the place.
            columns: additional columns of the clips.
        """
        first = int(np.argmax(self.is_at(place)))
        client = local.read_owners()
        additional = {f"column:{name}": pa.array(codes) for name, codes in columns.items()}
        clips = dict(zip(local.clips.schema.names, local.clips.columns, strict=True)) | additional
        clips["client"] = pa.array(np.where(client < 0, client, client + first))
        clients = self.clients
        for name, bound in zip(("first", "stop"), local.ranges or (), strict=False):
            bounds = np.zeros(len(self.ids), bound.dtype)
            bounds[first : first + len(bound)] = bound
            clients = clients.append_column(name, pa.array(bounds))
        return Tables(pa.record_batch(clips), clients, local.arrays)

    def read_owners(self, rows: slice = slice(None)) -> np.ndarray:
        """Return the position of each clip's owner, int32 [rows]. Negative: no owner."""
        return self.read_clips("client", rows) - np.int32(self._first)

    def rows(self, role: str, client: int, pool: int = 0) -> slice:
        """Return the rows of a client's clips with a role, in a pool for training roles."""
        block = self.block(role, pool)
        if self.ranges is not None:
            first, stop = (int(bound[client]) + block.start for bound in self.ranges)
            return slice(first, stop) if role == "train" else slice(0, 0)
        first, stop = _find_code(self.read_clips("client", block), self._first + client)
        return slice(block.start + first, block.start + stop)

    def has(self, role: str) -> bool:
        """Return whether any clip has a role."""
        first, stop = _find_code(self.read_clips("role"), ROLES.index(role))
        return first < stop

    def num_examples(self, client: int, pool: int = 0) -> int:
        """Return the number of a client's training examples in a pool."""
        examples = self.read_clients("examples")
        if examples is not None:
            return int(examples[client])
        rows = self.rows("train", client, pool)
        return int(rows.stop - rows.start)

    def sizes(self) -> np.ndarray:
        """Return the number of training examples of each client in the first pool, int64 [clients]."""
        examples = self.read_clients("examples")
        if examples is not None:
            return examples
        if self.ranges is not None:
            sizes: np.ndarray = self.ranges[1].astype(np.int64)
            sizes -= self.ranges[0]  # in place, because a federation may have millions of clients
            return sizes
        return np.bincount(self.read_owners(self.block("train")), minlength=len(self.ids))

    def owners(self, view: str) -> np.ndarray:
        """Return a mask of the clients with a view of any training example: bool [clients]."""
        stored = self.read_clients(f"has:{view}")
        return self.remember(f"owners {view}", lambda: self._find_owners(view)) if stored is None else stored

    def _find_owners(self, view: str) -> np.ndarray:
        train = slice(*_find_code(self.read_clips("role"), ROLES.index("train")))
        present = self.read_clips(view_column(view, "frames"), train) > 0
        if self.ranges is not None:
            before = np.r_[0, np.cumsum(present)]
            mask: np.ndarray = before[self.ranges[1]] > before[self.ranges[0]]
            return mask
        return np.bincount(self.read_owners(train)[present], minlength=len(self.ids)) > 0

    def profile(self, client: int, views: Sequence[str], pools: Sequence[str]) -> dict[str, Any]:
        """Return the profile of a client.

        Args:
            views: names of ``data.views``.
            pools: names of the pools.
        """
        names = [name.removeprefix("profile:") for name in self.clients.schema.names if name.startswith("profile:")]
        columns = {name: self.column(name, views) for name in ("group", "noisy", "label_errors", "views", *names)}
        profile = {name: values[int(codes[client])] for name, (values, codes) in columns.items() if codes[client] >= 0}
        if len(pools) > 1 and "examples" not in self.clients.schema.names:
            profile["pools"] = {name: self.num_examples(client, number) for number, name in enumerate(pools)}
        return profile

    def column(self, name: str, views: Sequence[str]) -> Column:
        """Return a profile column of all clients. ``pools`` is not available."""
        return self.remember(f"profile {name}", lambda: self._find_column(name, views))

    def _find_column(self, name: str, views: Sequence[str]) -> Column:
        if name in ("noisy", "label_errors"):
            stored = self.read_clients(name)
            return (False, True), np.broadcast_to(np.int8(0), len(self.ids)) if stored is None else stored.view(np.int8)
        if name == "views" and views:
            masks = np.stack([self.owners(view) for view in views], axis=1)
            kinds, codes = np.unique(masks, axis=0, return_inverse=True)
            return [tuple(np.array(views)[kind].tolist()) for kind in kinds], codes.reshape(-1)
        key = "group" if name == "group" else f"profile:{name}"
        stored = self.read_clients(key)
        if stored is None:
            return (), np.broadcast_to(np.int8(-1), len(self.ids))
        return self.clients.column(key).dictionary.to_pylist(), stored

    def label_counts(self, role: str, labels: int, clients: slice | np.ndarray) -> np.ndarray:
        """Count the clips of each client by label: int64 [selected clients, labels].

        Args:
            role: role of the clips. Training roles count the first pool.
            labels: number of labels.
            clients: a slice or int [selected clients].
        """
        block = self.block(role)
        label, starts_clip = self.read_clips("label", block), self._find_starts(block)
        if self.ranges is not None and role == "train":
            first, stop = (bound[clients] for bound in self.ranges)
            counts = np.empty((len(first), labels), np.int64)
            for number in range(labels):
                before = np.concatenate([[0], np.cumsum(starts_clip & (label == number))])
                counts[:, number] = before[stop] - before[first]
            return counts
        client = self.read_owners(block).astype(np.int64)
        starts_clip[1:] |= client[1:] != client[:-1]
        starts_clip &= label >= 0
        cells = np.bincount(client[starts_clip] * labels + label[starts_clip], minlength=len(self.ids) * labels)
        return cells.reshape(len(self.ids), labels)[clients]

    def count_labels(self, labels: int) -> np.ndarray:
        """Count the training clips of all clients by label: int64 [labels]. A shared clip counts once per owner."""
        if self.ranges is None:
            counts: np.ndarray = self.label_counts("train", labels, slice(None)).sum(axis=0)
            return counts
        block = self.block("train")
        label = self.read_clips("label", block)
        # The number of ranges that contain a row is the number of its owners.
        started, stopped = (np.cumsum(np.bincount(bound, minlength=len(label) + 1))[:-1] for bound in self.ranges)
        counted = self._find_starts(block) & (label >= 0)
        return np.bincount(label[counted], (started - stopped)[counted], labels).astype(np.int64)

    def _find_starts(self, block: slice) -> np.ndarray:
        """Return a mask of each clip's first segment: bool [rows]."""
        clips = self.read_clips("clip", block)
        return np.concatenate([np.ones(min(len(clips), 1), bool), clips[1:] != clips[:-1]])

    def holds_same(self, other: Tables) -> bool:
        """Return whether clips and clients are equal. Arrays are ignored, because the last bits of features may differ."""
        return _are_equal(self.clips, other.clips) and _are_equal(self.clients, other.clients)


def _are_equal(left: pa.RecordBatch, right: pa.RecordBatch) -> bool:
    """Return whether two tables have equal columns."""
    return left.schema.names == right.schema.names and all(
        _agree(_read_texts(a), _read_texts(b)) and np.array_equal(to_numbers(a), to_numbers(b))
        if pa.types.is_dictionary(a.type) and pa.types.is_dictionary(b.type)
        else a.equals(b)
        for a, b in zip(left.columns, right.columns, strict=True)
    )


def _agree(left: Sequence[str], right: Sequence[str]) -> bool:
    """Return whether equal codes mean equal values. Later versions append roles."""
    return all(a == b for a, b in zip(left, right, strict=False))


def _read_texts(column: pa.DictionaryArray) -> list[str]:
    """Return the values as text, because early versions stored numbers in profiles as text."""
    return list(map(str, column.dictionary.to_pylist()))


def join_columns(columns: Sequence[Column]) -> Column:
    """Concatenate the columns of several parts."""
    values: list[Any] = []
    codes = []
    for part_values, part_codes in columns:
        # The smallest integer type, because a federation may have millions of clients.
        kind = np.min_scalar_type(-len(values) - len(part_values) - 1)
        codes.append(np.where(part_codes < 0, kind.type(-1), part_codes.astype(kind) + kind.type(len(values))))
        values += part_values
    return values, np.concatenate(codes)


def join_tables(parts: Mapping[str, Tables]) -> Tables:
    """Concatenate the tables of all parts in order. Client ids get the prefix of their part: ``digits/george``."""
    kind = np.min_scalar_type(-len(parts))
    clips, clients, arrays = [], [], dict[str, np.ndarray]()
    order: dict[str, np.ndarray] = {}
    first = 0
    for number, (name, part) in enumerate(parts.items()):
        clip_codes, client_codes = (
            encode(np.full(table.num_rows, number, kind), [*parts]) for table in (part.clips, part.clients)
        )
        client = part.read_owners()
        client = np.where(client < 0, np.int32(-1), client + np.int32(first))
        clips.append(pa.table({"part": clip_codes, **_columns(part.clips), "client": pa.array(client)}))
        ids = part.ids.select_part(name)
        columns = {name: column for name, column in _columns(part.clients).items() if name != "by_id"}
        clients.append(pa.table({"part": client_codes, **columns, "client": ids}))
        arrays |= {qualify(name, ".", key): array for key, array in part.arrays.items()}
        by_id = np.arange(len(ids), dtype=np.int32) if part.ids.by_id is None else part.ids.by_id
        order[qualify(name, "/", "")] = by_id + np.int32(first)
        first += len(ids)
    all_clients = _concatenate(clients)
    # Ids ascend by prefix, then within each part.
    by_id = np.concatenate([order[prefix] for prefix in sorted(order, key=str.encode)])
    if not np.array_equal(by_id, np.arange(first, dtype=np.int32)):
        all_clients = all_clients.add_column(2, "by_id", pa.array(by_id))
    return Tables(_concatenate(clips), all_clients, arrays)


def _concatenate(tables: Sequence[pa.Table]) -> pa.RecordBatch:
    """Concatenate tables. Missing columns become null, and dictionaries of mixed types become text."""
    kinds: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for field in table.schema:
            if pa.types.is_dictionary(field.type):
                kinds.setdefault(field.name, set()).add(field.type.value_type)
    for name in (name for name, types in kinds.items() if len(types) > 1):
        tables = [_convert_to_text(table, name) if name in table.schema.names else table for table in tables]
    table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()
    return next(iter(table.to_batches()), pa.RecordBatch.from_pylist([], table.schema))


def _convert_to_text(table: pa.Table, name: str) -> pa.Table:
    column = table.column(name).combine_chunks()
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, encode(to_numbers(column), [*map(str, column.dictionary.to_pylist())]))


def _columns(table: pa.RecordBatch) -> dict[str, pa.Array]:
    return dict(zip(table.schema.names, table.columns, strict=True))


def _select_columns(table: pa.RecordBatch, rows: range) -> dict[str, pa.Array]:
    """Return the rows of a part without its empty columns, which belong to different parts."""
    columns = _columns(table.slice(rows.start, len(rows)))
    empty = {name for name, column in columns.items() if len(column) and column.null_count == len(column)}
    return {name: column for name, column in columns.items() if name not in {"part", *empty}}


def _find_parts(table: pa.RecordBatch, number: int) -> list[range]:
    """Return the rows of each part."""
    codes = to_numbers(table.column("part"))
    stops = np.searchsorted(codes, np.arange(number, dtype=codes.dtype), "right").tolist()
    return [*map(range, [0, *stops], stops)]


def _find_code(codes: np.ndarray, code: int) -> tuple[int, int]:
    """Return the range of rows (first, stop) with a code. ``codes`` must be sorted."""
    key = codes.dtype.type(code)  # with any different dtype, searchsorted copies the column
    return int(np.searchsorted(codes, key)), int(np.searchsorted(codes, key, "right"))
