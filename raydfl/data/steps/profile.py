"""Profile: clients get further columns, dealt by the configuration or read from a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NoReturn

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from raydfl.core.errors import DataError
from raydfl.core.seeds import generator
from raydfl.core.settings import Settings
from raydfl.data.client_ids import to_numbers
from raydfl.data.steps.listing import Assignment, set_columns
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


def add_profiles(tables: Assignment, profile: Mapping[str, ProfileSettings]) -> Assignment:
    """Add the columns ``profile:NAME`` of clients whose source is a column of the list or of the user's table of clients.

    Their values are in the order of their text. Truth values, integers and decimals keep their type; other values become text.

    Raises:
        DataError: there is no such column, or it has nulls, values of an unfit type, or several values for a client.
    """
    found: dict[str, pa.Array] = {}
    for name, settings in profile.items():
        column = f"column:{settings.column}"
        if settings.column is None:
            continue
        if column in tables.clients.schema.names:
            values = tables.clients.column(column)
            try:
                encoded = values.dictionary_encode()
            except pa.ArrowNotImplementedError as error:
                raise DataError(
                    f"data.profile.{name}: column {settings.column!r} of the table of clients is of the type {values.type}; it "
                    f"must hold truth values, numbers or strings"
                ) from error
            codes = to_numbers(encoded)
        else:
            encoded, codes = _find_values(tables, settings.column, f"data.profile.{name}")
        found[f"profile:{name}"] = _sort_values(codes, encoded.dictionary)
    return replace(tables, clients=set_columns(tables.clients, found))


def read_channels(tables: Assignment, name: str, settings: ProfileSettings, seed: int) -> np.ndarray:
    """Return the channel that a profile gives each client: int64 [clients].

    Raises:
        DataError: a value is no channel.
    """
    key = f"profile:{name}"
    if key in tables.clients.schema.names:
        values = tables.clients.column(key).to_pylist()
    else:
        values = [settings.values[code] for code in dealt(name, settings, tables.clients.num_rows, seed)]
    for client, value in zip(tables.ids, values, strict=True):
        if type(value) is not int or not 0 <= value <= 1000:
            raise DataError(
                f"data.device: data.profile.{name} is {value!r} for client {client!r}; it must be the number of a channel, 0 to "
                f"1000; 0 is the first"
            )
    return np.array(values, np.int64)


def _find_values(tables: Assignment, column: str, where: str) -> tuple[pa.DictionaryArray, np.ndarray]:
    """Return a column of the list, and the code of each client's value: int [clients]."""
    encoded = tables.column(column, where)
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    client, ids = tables.codes("client"), tables.ids
    client = client[client >= 0]  # the clips are sorted by client
    codes, bounds = to_numbers(encoded)[: len(client)], np.searchsorted(client, np.arange(len(ids) + 1))
    least, most = (extreme.reduceat(codes, bounds[:-1]) for extreme in (np.minimum, np.maximum))
    for number in np.flatnonzero((least < 0) | (least < most))[:1].tolist():
        values = encoded[bounds[number] : bounds[number + 1]].to_pylist()
        _refuse(values, where, column, ids[number])
    return encoded, least


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
