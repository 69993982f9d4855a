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
from raydfl.data.client_profiles import TYPES
from raydfl.data.names import Names
from raydfl.data.partition import Partition

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


def profile_arrays(
    manifest: pa.Table, partition: Partition, profile: Mapping[str, ProfileSettings]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays of profiles that are columns of the manifest or of the table of clients, and their types.

    Returns:
        For each name ``profile/NAME/of`` (int32 [clients]) and its values, as Names; and by name the type of values that are no
        text: a key of raydfl.data.client_profiles.TYPES.

    Raises:
        DataError: there is no such column, or it has nulls, or several values for a client.
    """
    arrays: dict[str, np.ndarray] = {}
    types: dict[str, str] = {}
    for name, settings in profile.items():
        if settings.column is None:
            continue
        where = f"data.profile.{name}"
        if partition.table is not None:
            column = partition.table.column(settings.column, where)
            encoded = column.combine_chunks().dictionary_encode()  # of several chunks each has codes of its own
            codes, values = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
            arrays |= _coded(name, list(map(str, values)), codes)
            types |= _type(name, values)
            continue
        if settings.column not in manifest.column_names:
            raise DataError(
                f"{where}: the data have no column {settings.column!r}; {nearest(settings.column, manifest.column_names)}"
            )
        encoded = manifest.column(settings.column).take(pa.array(partition.rows)).combine_chunks().dictionary_encode()
        values, codes = encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy()
        least, most = (extreme.reduceat(codes, partition.offsets[:-1]) for extreme in (np.minimum, np.maximum))
        for client in np.flatnonzero((least < 0) | (least < most))[:1].tolist():
            own = codes[partition.offsets[client] : partition.offsets[client + 1]]
            _refuse(
                [values[code] if code >= 0 else None for code in own], where, settings.column, partition.ids[client]
            )
        arrays |= _coded(name, list(map(str, values)), least)
        types |= _type(name, values)
    return arrays, types


def _type(name: str, values: Sequence[object]) -> dict[str, str]:
    """Return the type of a column by its name; nothing for text and for types that stay text."""
    found = type(values[0]).__name__ if values else ""
    return {name: found} if found in TYPES else {}


def _coded(name: str, texts: Sequence[str], codes: np.ndarray) -> dict[str, np.ndarray]:
    """Return what a population keeps of one name: of each client (int [clients]) the position of its text, and the texts."""
    names = sorted({texts[code] for code in np.flatnonzero(np.bincount(codes)).tolist()})
    position = {text: number for number, text in enumerate(names)}
    of = np.array([position.get(text, -1) for text in texts], np.int32)[codes]
    return {
        f"profile/{name}/of": of,
        **{f"profile/{name}/{key}": array for key, array in Names.of(names).arrays.items()},
    }


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
