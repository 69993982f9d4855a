"""Profile: what else is said of clients, dealt by the configuration or read from a column of the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NoReturn

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.core.settings import Settings
from raydfl.data.partition import Partition
from raydfl.data.tables import encode

KNOWN = ("group", "noisy", "label_errors", "part", "pools", "views")
"""Names that a profile has by itself."""

Value = bool | int | float | str


class ProfileSettings(Settings):
    """One thing that is said of every client: one of ``values``, or what a ``column`` of the manifest says of its clips."""

    values: tuple[Value, ...] = Field((), description="what clients are dealt; a value may stand there several times")
    deal: Literal["turn", "draw"] = Field(
        "turn", description="turn: in the clients' order, again and again; draw: each client's by the run's seed"
    )
    column: str | None = Field(
        None,
        description="column of the manifest, or of the table of clients, in place of values; that of a manifest must say one thing "
        "of all training clips of a client",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ProfileSettings:
        if bool(self.values) == (self.column is not None):
            raise ValueError("give either values to deal, or a column of the manifest")
        return self


def dealt(name: str, settings: ProfileSettings, clients: int, seed: int) -> np.ndarray:
    """Return the position of each client's value among ``settings.values``: [clients], integers as small as can be."""
    kind = np.min_scalar_type(len(settings.values) - 1)
    if settings.deal == "turn":
        return np.resize(np.arange(len(settings.values), dtype=kind), clients)
    return generator(seed, 0, "", f"profile/{name}").integers(len(settings.values), size=clients).astype(kind)


def profile_columns(
    manifest: pa.Table, partition: Partition, profile: Mapping[str, ProfileSettings]
) -> dict[str, pa.DictionaryArray]:
    """Read the profiles whose source is a column of the manifest or of the table of clients.

    Returns:
        Columns ``profile:NAME`` of the clients table, with values in the order of their text. Truth values, integers and
        decimals keep their type; other values become text.

    Raises:
        DataError: there is no such column, or it has nulls, or several values for a client.
    """
    found: dict[str, pa.DictionaryArray] = {}
    for name, settings in profile.items():
        if settings.column is None:
            continue
        if partition.table is not None:
            encoded = partition.table.column(settings.column).combine_chunks().dictionary_encode()
            found[f"profile:{name}"] = _sort_values(encoded.indices.to_numpy(), encoded.dictionary)
            continue
        where = f"data.profile.{name}"
        if settings.column not in manifest.column_names:
            raise DataError(
                f"{where}: the data have no column {settings.column!r}; {nearest(settings.column, manifest.column_names)}"
            )
        encoded = manifest.column(settings.column).take(pa.array(partition.rows)).combine_chunks().dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy()
        least, most = (extreme.reduceat(codes, partition.offsets[:-1]) for extreme in (np.minimum, np.maximum))
        for client in np.flatnonzero((least < 0) | (least < most))[:1].tolist():
            values = encoded.dictionary.to_pylist()
            own = codes[partition.offsets[client] : partition.offsets[client + 1]]
            _refuse(
                [values[code] if code >= 0 else None for code in own], where, settings.column, partition.ids[client]
            )
        found[f"profile:{name}"] = _sort_values(least, encoded.dictionary)
    return found


def _sort_values(codes: np.ndarray, values: pa.Array) -> pa.DictionaryArray:
    """Make a column of the values that occur, sorted by their text.

    Args:
        codes: int [clients]: the position of each client's value.
        values: of any type.
    """
    kind = values.type
    typed = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    known = {str(value): value if typed else str(value) for value in values.to_pylist()}
    texts = list(map(str, values.to_pylist()))
    names = sorted({texts[code] for code in pa.array(codes).unique().to_pylist()})
    place = {text: number for number, text in enumerate(names)}
    of = np.array([place.get(text, -1) for text in texts], np.int32)[codes]
    return encode(of, pa.array([known[name] for name in names], kind if typed else pa.string()))


def _refuse(values: Sequence[object], where: str, column: str, client: str) -> NoReturn:
    """Refuse what a column says of a client's clips, of which one has no value, or has another than the others."""
    different = list(dict.fromkeys(values))
    if None in different:
        raise DataError(f"{where}: column {column!r} has no value for a clip of client {client!r}; fill it in")
    shown = ", ".join(map(repr, different[:2]))
    raise DataError(
        f"{where}: column {column!r} says {shown} of clips of client {client!r}; it must be one value for each client, so "
        f"partition by a column that it follows (data.partition), or take another column"
    )
