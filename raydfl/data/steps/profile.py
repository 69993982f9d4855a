"""Profile: additional columns of clients, dealt from configured values or read from the data."""

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
"""Names of the columns in every profile."""

Value = bool | int | float | str


class ProfileSettings(Settings):
    """A column of the client profiles, dealt from ``values`` or read from a ``column`` of the data."""

    values: tuple[Value, ...] = Field(
        (), description="Values to deal to clients. Repeat a value to deal it more often."
    )
    deal: Literal["turn", "draw"] = Field(
        "turn",
        description="turn: cycle through the values in the clients' order. draw: draw each client's by the run's seed.",
    )
    column: str | None = Field(
        None,
        description="Column of the manifest or of the table of clients, in place of values. In a manifest, all training clips of "
        "a client must have the same value.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> ProfileSettings:
        if bool(self.values) == (self.column is not None):
            raise ValueError("give either values to deal, or a column of the manifest")
        return self


def deal_values(name: str, settings: ProfileSettings, clients: int, seed: int) -> np.ndarray:
    """Deal ``settings.values`` to the clients.

    Returns:
        Position of each client's value: [clients], in the smallest unsigned integer type.
    """
    kind = np.min_scalar_type(len(settings.values) - 1)
    if settings.deal == "turn":
        return np.resize(np.arange(len(settings.values), dtype=kind), clients)
    return generator(seed, 0, "", f"profile/{name}").integers(len(settings.values), size=clients).astype(kind)


def add_profiles(tables: Assignment, profile: Mapping[str, ProfileSettings]) -> Assignment:
    """Add the columns ``profile:NAME`` of clients, read from the list or from the user's table of clients.

    Values are sorted by their text. Booleans, integers and floats keep their type; all other types become text.

    Raises:
        DataError: the column is missing, or has nulls, values of an unsupported type, or several values for a client.
    """
    columns: dict[str, pa.Array] = {}
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
                    f"data.profile.{name}: column {settings.column!r} of the table of clients has the type {values.type}. Write "
                    f"booleans, numbers or strings"
                ) from error
            codes = to_numbers(encoded)
        else:
            encoded, codes = _find_values(tables, settings.column, f"data.profile.{name}")
        columns[f"profile:{name}"] = _sort_values(codes, encoded.dictionary)
    return replace(tables, clients=set_columns(tables.clients, columns))


def read_channels(tables: Assignment, name: str, settings: ProfileSettings, seed: int) -> np.ndarray:
    """Read the audio channel of each client from a profile: int64 [clients].

    Raises:
        DataError: a value is not an integer from 0 to 1000.
    """
    key = f"profile:{name}"
    if key in tables.clients.schema.names:
        values = tables.clients.column(key).to_pylist()
    else:
        values = [settings.values[code] for code in deal_values(name, settings, tables.clients.num_rows, seed)]
    for client, value in zip(tables.ids, values, strict=True):
        if type(value) is not int or not 0 <= value <= 1000:
            raise DataError(
                f"data.device: data.profile.{name} is {value!r} for client {client!r}. Write the number of a channel, 0 (the "
                f"first) to 1000"
            )
    return np.array(values, np.int64)


def _find_values(tables: Assignment, column: str, where: str) -> tuple[pa.DictionaryArray, np.ndarray]:
    """Return a column of the list, and the code of each client's value: int [clients]."""
    encoded = tables.column(column, where)
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    client, ids = tables.codes("client"), tables.ids
    client = client[client >= 0]  # the clips are sorted by client
    codes, bounds = to_numbers(encoded)[: len(client)], np.searchsorted(client, np.arange(len(ids) + 1))
    # A client's clips agree if their least and greatest codes are equal.
    least, most = (extreme.reduceat(codes, bounds[:-1]) for extreme in (np.minimum, np.maximum))
    for number in np.flatnonzero((least < 0) | (least < most))[:1].tolist():
        values = encoded[bounds[number] : bounds[number + 1]].to_pylist()
        _reject_values(values, where, column, ids[number])
    return encoded, least


def _sort_values(codes: np.ndarray, values: pa.Array) -> pa.DictionaryArray:
    """Encode the clients' values with a dictionary of the used values, sorted by their text.

    Args:
        codes: int [clients], position of each client's value.
        values: candidate values of any type.
    """
    kind = values.type
    typed = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    known = {str(value): value if typed else str(value) for value in values.to_pylist()}
    texts = list(map(str, values.to_pylist()))
    names = sorted({texts[code] for code in pa.array(codes).unique().to_pylist()})
    position = {text: number for number, text in enumerate(names)}
    sorted_codes = np.array([position.get(text, -1) for text in texts], np.int32)[codes]
    return encode(sorted_codes, pa.array([known[name] for name in names], kind if typed else pa.string()))


def _reject_values(values: Sequence[object], where: str, column: str, client: str) -> NoReturn:
    """Raise the error for a client whose clips have no value or several values in a column."""
    different = list(dict.fromkeys(values))
    if None in different:
        raise DataError(f"{where}: column {column!r} has no value for a clip of client {client!r}. Fill it in")
    shown = ", ".join(map(repr, different[:2]))
    raise DataError(
        f"{where}: column {column!r} has the values {shown} for clips of client {client!r}, but a profile has a single value. "
        f"Set data.partition.by so that a client's clips agree, or choose another column"
    )
