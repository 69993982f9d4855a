"""Corrupt: chosen clients' training clips get noise and wrong labels, as in FedMLAC's robustness experiments.

Their source is FedAudio (Zhang et al., ICASSP 2023), which repairs empty rows of the transition matrix for 4 classes only; here
they are repaired for any number. ``remove_views`` takes views from clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.core.settings import Settings
from raydfl.data.client_ids import to_numbers
from raydfl.data.steps.listing import Assignment, set_columns
from raydfl.data.tables import encode

STORES = ("clean", "noisy", "altered")
"""Kinds of features of a clip."""
CLEAN, NOISY, ALTERED = range(len(STORES))
SPARSITY = 0.4
"""Share of a transition matrix's off-diagonal cells that are 0."""

Share = int | float | tuple[str, ...]
CLIENTS = "Which clients: a share (0.2; 1.0: all), a number (an integer), or a list of ids; the first two draw them."
"""The meaning of a setting of the type :data:`Share`."""


def share_in_range(value: Share) -> Share:
    """Return ``value`` if it can be a share, number or list of clients; else raise a ValueError."""
    if isinstance(value, float) and not 0 <= value <= 1:
        raise ValueError("a share of the clients must be between 0.0 and 1.0; for a number of clients write an integer")
    if isinstance(value, int) and value < 0:
        raise ValueError("a number of clients must be at least 0")
    return value


class _ClientsSettings(Settings):
    clients: Share = Field(1.0, description=CLIENTS)

    _check = field_validator("clients")(share_in_range)


class NoiseSettings(_ClientsSettings):
    """White Gaussian noise in the waves of training clips."""

    snr_db: float = Field(
        ge=-100, le=300, description="Power of the clip over the power of its noise, in decibels. -100 to 300."
    )


class LabelErrorSettings(_ClientsSettings):
    """Wrong labels of training clips, by a transition matrix for each client."""

    rate: float = Field(ge=0, le=1, description="Expected share of a client's clips with a wrong label, 0 to 1.")


class CorruptSettings(Settings):
    """Corruption of the training data; validation and test stay clean."""

    noise: NoiseSettings | None = Field(None, description="Background noise. null: none.")
    labels: LabelErrorSettings | None = Field(None, description="Wrong labels. null: none.")


def corrupt(tables: Assignment, settings: CorruptSettings, seed: int) -> Assignment:
    """Add ``store``, ``noise`` and ``altered``, put wrong labels in place, and flag the clients whose data are corrupted.

    Raises:
        DataError: more clients than there are, or an unknown id.
    """
    noisy = choose_clients(tables, None if settings.noise is None else settings.noise.clients, "noisy", seed)
    wrong = choose_clients(tables, None if settings.labels is None else settings.labels.clients, "label_errors", seed)
    label, client, train = tables.codes("label").copy(), tables.codes("client"), tables.has_role("train")
    if settings.labels is not None:
        rows, bounds = tables.train_bounds()
        for number in np.flatnonzero(wrong).tolist():
            mine = rows[bounds[number] : bounds[number + 1]]
            mine = mine[label[mine] >= 0]
            label[mine] = wrong_labels(label[mine], len(tables.classes), settings.labels.rate, seed, tables.ids[number])
    noise = train & (client >= 0)
    noise[noise] = noisy[client[noise]]
    flags = {name: pa.array(flag) for name, flag in (("noisy", noisy), ("label_errors", wrong)) if flag.any()}
    return replace(tables, clients=set_columns(tables.clients, flags)).set_clips(
        label=encode(label, tables.classes),
        store=encode(noise.astype(np.int8), STORES),
        noise=pa.array(noise),
        altered=pa.array(np.zeros(len(noise), bool)),
    )


_PURPOSES = {"noisy": "noise", "label_errors": "labels"}


def choose_clients(tables: Assignment, wanted: Share | None, name: str, seed: int) -> np.ndarray:
    """Choose the clients whose data are corrupted, by their column of the user's table or by a draw: bool [clients].

    Args:
        wanted: of the settings; ``None``: there is no such corruption.
        name: ``noisy`` or ``label_errors``; it keeps the draws apart.
    """
    own = f"column:{name}"
    if own in tables.clients.schema.names:
        chosen = to_numbers(tables.clients.column(own))
        if chosen.any() and wanted is None:
            raise DataError(f"data.tables.clients: there are {name} clients, so set data.corrupt.{_PURPOSES[name]} too")
        return chosen
    if wanted is None:
        return np.zeros(tables.clients.num_rows, bool)
    rng = generator(seed, 0, "", f"corrupt {_PURPOSES[name]}")
    return draw_clients(tables.ids, wanted, rng, "data.corrupt", "corrupted")


def remove_views(tables: Assignment, missing: Mapping[str, float], seed: int) -> Assignment:
    """Add the columns ``lacks:VIEW`` for views that are taken from clients.

    A client loses a view of its training clips, its hold-out and its own test; the server keeps it. Exactly ``share * clients``
    clients lose it, rounded half up, each view drawn by itself. Those of a smaller share are among those of a larger one.

    Args:
        missing: by view the share of the clients, 0 to 1.
    """
    client = tables.codes("client")
    for view, share in missing.items():
        # 0.29 of 50 clients is 14.5, though not in floating point
        number = math.floor(round(share * tables.clients.num_rows, 9) + 0.5)
        rng = generator(seed, 0, "", f"missing {view}")
        without = draw_clients(tables.ids, number, rng, f"data.missing.{view}", "without")
        tables = tables.set_clips(**{f"lacks:{view}": pa.array((client >= 0) & without[client])})
    return tables


def draw_clients(ids: Sequence[str], wanted: Share, rng: np.random.Generator, where: str, what: str) -> np.ndarray:
    """Return which clients a share, a number or a list of ids means: bool [clients].

    Args:
        where: the group of settings that asks, for the messages.
        what: what they are to be, for the messages.

    Raises:
        DataError: more clients than there are, or an unknown id.
    """
    chosen = np.zeros(len(ids), bool)
    if isinstance(wanted, tuple):
        for name in wanted:
            if name not in ids:
                raise DataError(f"{where}: there is no client {name!r}; {nearest(name, ids)}")
            chosen[ids.index(name)] = True
        return chosen
    number = wanted if isinstance(wanted, int) else int(np.floor(wanted * len(ids) + 0.5))
    if number > len(ids):
        raise DataError(f"{where}: {number} clients are to be {what}, there are {len(ids)}")
    chosen[rng.permutation(len(ids))[:number]] = True
    return chosen


def transition_matrix(classes: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return the probability that label ``row`` becomes ``column``: float64 [classes, classes].

    The diagonal is ``1 - rate``; 40 % of the other cells, drawn at random, are 0; the others of a row share ``rate`` evenly. A row
    that lost all its cells gets one back.
    """
    if classes < 2:
        raise DataError(f"data.corrupt.labels needs at least 2 classes, the data have {classes}")
    rows, columns = np.nonzero(~np.eye(classes, dtype=bool))
    possible = np.zeros((classes, classes), bool)
    possible[rows, columns] = True
    dropped = rng.permutation(len(rows))[: int(np.floor(SPARSITY * len(rows) + 0.5))]
    possible[rows[dropped], columns[dropped]] = False
    for row in np.flatnonzero(~possible.any(axis=1)):
        possible[row, rng.choice(np.delete(np.arange(classes), row))] = True
    matrix: np.ndarray = possible * (rate / possible.sum(axis=1, keepdims=True))
    np.fill_diagonal(matrix, 1 - rate)
    return matrix


def wrong_labels(labels: np.ndarray, classes: int, rate: float, seed: int, client_id: str) -> np.ndarray:
    """Draw a client's labels (int64 [clips]) by its transition matrix: int64 [clips]."""
    rng = generator(seed, 0, client_id, "label errors")
    bounds = np.cumsum(transition_matrix(classes, rate, rng), axis=1)
    drawn = rng.random(len(labels))
    # The last bound may be 0.999...: the number of bounds passed is then one too many.
    result: np.ndarray = np.minimum((drawn[:, None] >= bounds[labels]).sum(axis=1), classes - 1).astype(np.int64)
    return result
