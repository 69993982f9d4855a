"""Corrupt: add noise and wrong labels to training clips of chosen clients, as in FedMLAC's robustness experiments.

Source: FedAudio (Zhang et al., ICASSP 2023). FedAudio repairs empty rows of the transition matrix for 4 classes only; raydfl
repairs them for any number of classes. ``remove_views`` removes views from clients.
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
from raydfl.data.steps.label_sequences import LabelSequenceSettings, replace_units, split_sequences
from raydfl.data.steps.listing import Assignment, set_columns
from raydfl.data.tables import encode

STORES = ("clean", "noisy", "altered")
"""Variants of a clip's features."""
CLEAN, NOISY, ALTERED = range(len(STORES))
SPARSITY = 0.4
"""Fraction of zeros among the off-diagonal cells of a transition matrix."""

Share = int | float | tuple[str, ...]
CLIENTS = "Clients: a fraction (0.2; 1.0: all), a count (an integer), or a list of ids. A fraction or count is drawn."
"""Description of a setting of the type :data:`Share`."""


def check_share(value: Share) -> Share:
    """Return ``value`` unchanged if it is a valid fraction, count or list of clients.

    Raises:
        ValueError: a fraction outside 0 to 1, or a negative count.
    """
    if isinstance(value, float) and not 0 <= value <= 1:
        raise ValueError(
            "a fraction of the clients must be between 0.0 and 1.0. Write an integer for a number of clients"
        )
    if isinstance(value, int) and value < 0:
        raise ValueError("a number of clients must be at least 0")
    return value


class _ClientsSettings(Settings):
    clients: Share = Field(1.0, description=CLIENTS)

    _check = field_validator("clients")(check_share)


class NoiseSettings(_ClientsSettings):
    """White Gaussian noise in the waveforms of training clips."""

    snr_db: float = Field(
        ge=-100,
        le=300,
        description="Signal-to-noise ratio in decibels, from -100 (noise alone) to 300 (inaudible noise).",
    )


class LabelErrorSettings(_ClientsSettings):
    """Wrong labels of training clips, drawn by a transition matrix for each client."""

    rate: float = Field(
        ge=0,
        le=1,
        description="Expected fraction of wrong labels in a client's clips, or of wrong units in transcripts. 0: none; 1: all.",
    )


class CanarySettings(_ClientsSettings):
    """Training clips with a wrong label, half of them left out by fair coins, for ``raydfl audit``."""

    clips: int = Field(ge=10, description="Number of canary clips, drawn from all training clips of the clients.")


class CorruptSettings(Settings):
    """Corruption of the training data. Validation and test data stay clean."""

    noise: NoiseSettings | None = Field(None, description="Background noise. null: none.")
    labels: LabelErrorSettings | None = Field(None, description="Wrong labels. null: none.")
    canaries: CanarySettings | None = Field(None, description="Canary clips, to audit the run. null: none.")


def corrupt(
    tables: Assignment, settings: CorruptSettings, seed: int, transcripts: LabelSequenceSettings | None = None
) -> Assignment:
    """Add the columns ``store``, ``noise`` and ``altered``, replace labels, and flag the corrupted clients.

    Args:
        tables: the assigned clips.
        settings: noise and label errors.
        seed: seed of the run.
        transcripts: form of labels that are transcripts. Label errors replace their units, except the space.

    Raises:
        DataError: more clients than the federation has, or an unknown id.
    """
    noisy = choose_clients(tables, None if settings.noise is None else settings.noise.clients, "noisy", seed)
    wrong = choose_clients(tables, None if settings.labels is None else settings.labels.clients, "label_errors", seed)
    label, client, train = tables.codes("label").copy(), tables.codes("client"), tables.has_role("train")
    known = {name: number for number, name in enumerate(tables.classes)}
    units, sequences = ([], None) if transcripts is None else split_sequences(tables.classes, transcripts)
    if settings.labels is not None:
        rows, bounds = tables.train_bounds()
        for number in np.flatnonzero(wrong).tolist():
            clips = rows[bounds[number] : bounds[number + 1]]
            clips = clips[label[clips] >= 0]
            rate, owner = settings.labels.rate, tables.ids[number]
            if transcripts is None or sequences is None:
                label[clips] = draw_labels(label[clips], len(known), rate, seed, owner)
                continue
            drawn = sequences[label[clips]]
            # A new space could divide or join words, and would be removed at an end.
            others = np.array([number for number, unit in enumerate(units) if unit != " "], np.int32)
            replaced = np.isin(drawn, others)
            codes = np.searchsorted(others, drawn[replaced])
            drawn[replaced] = others[draw_labels(codes, len(others), rate, seed, owner)]
            texts = replace_units(units, transcripts, drawn)
            label[clips] = [known.setdefault(text, len(known)) for text in texts]
    noise = train & (client >= 0)
    noise[noise] = noisy[client[noise]]
    flags = {name: pa.array(flag) for name, flag in (("noisy", noisy), ("label_errors", wrong)) if flag.any()}
    return replace(tables, clients=set_columns(tables.clients, flags)).set_clips(
        label=encode(label, [*known]),
        store=encode(noise.astype(np.int8), STORES),
        noise=pa.array(noise),
        altered=pa.array(np.zeros(len(noise), bool)),
    )


_PURPOSES = {"noisy": "noise", "label_errors": "labels"}


def choose_clients(tables: Assignment, share: Share | None, name: str, seed: int) -> np.ndarray:
    """Choose the clients with corrupted data, by a column of the user's table or by a draw: bool [clients].

    Args:
        share: setting of the corruption; ``None``: off.
        name: ``noisy`` or ``label_errors``, the column's name. It also seeds the draw.

    Raises:
        DataError: too many clients, an unknown id, or a column without the setting.
    """
    column = f"column:{name}"
    if column in tables.clients.schema.names:
        chosen = to_numbers(tables.clients.column(column))
        if chosen.any() and share is None:
            raise DataError(
                f"data.tables.clients: column {name!r} marks clients. Set data.corrupt.{_PURPOSES[name]} too, or remove the column"
            )
        return chosen
    if share is None:
        return np.zeros(tables.clients.num_rows, bool)
    rng = generator(seed, 0, "", f"corrupt {_PURPOSES[name]}")
    return draw_clients(tables.ids, share, rng, "data.corrupt", "corrupted")


def remove_views(tables: Assignment, missing: Mapping[str, float], seed: int) -> Assignment:
    """Add the columns ``lacks:VIEW`` for the views missing at clients.

    A client loses a view of its training, validation and test clips. The server keeps the view. Each view is drawn separately, for
    ``fraction * clients`` clients, halves rounded up. A larger fraction only adds clients.

    Args:
        missing: fraction of the clients without the view, 0 to 1, by view.
    """
    client = tables.codes("client")
    for view, fraction in missing.items():
        # 0.29 of 50 clients is 14.5, but 14.499... in floating point
        number = math.floor(round(fraction * tables.clients.num_rows, 9) + 0.5)
        rng = generator(seed, 0, "", f"missing {view}")
        affected = draw_clients(tables.ids, number, rng, f"data.missing.{view}", "without")
        tables = tables.set_clips(**{f"lacks:{view}": pa.array((client >= 0) & affected[client])})
    return tables


def draw_clients(ids: Sequence[str], share: Share, rng: np.random.Generator, where: str, what: str) -> np.ndarray:
    """Resolve a fraction, a count or a list of ids to a mask over clients: bool [clients].

    Args:
        where: the group of settings, for the messages.
        what: the effect on the clients, such as "corrupted", for the messages.

    Raises:
        DataError: a count above the number of clients, or an unknown id.
    """
    chosen = np.zeros(len(ids), bool)
    if isinstance(share, tuple):
        for name in share:
            if name not in ids:
                raise DataError(f"{where}: unknown client {name!r}. {nearest(name, ids)}")
            chosen[ids.index(name)] = True
        return chosen
    number = share if isinstance(share, int) else int(np.floor(share * len(ids) + 0.5))
    if number > len(ids):
        raise DataError(
            f"{where}: {number} clients are to be {what}, but the federation has {len(ids)}. Lower the number"
        )
    chosen[rng.permutation(len(ids))[:number]] = True
    return chosen


def draw_transition_matrix(classes: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the probabilities of label errors: float64 [true class, drawn class].

    The diagonal is ``1 - rate``. Of the off-diagonal cells, 40 % drawn at random are 0; the rest of a row shares ``rate`` evenly. A
    row without cells gets one back at random.

    Raises:
        DataError: fewer than 2 classes.
    """
    if classes < 2:
        raise DataError(
            f"data.corrupt.labels needs at least 2 classes, but the data have {classes}. Set data.corrupt.labels to null"
        )
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


def draw_labels(labels: np.ndarray, classes: int, rate: float, seed: int, client_id: str) -> np.ndarray:
    """Draw a client's wrong labels by its transition matrix: int64 [clips]."""
    rng = generator(seed, 0, client_id, "label errors")
    bounds = np.cumsum(draw_transition_matrix(classes, rate, rng), axis=1)
    uniform = rng.random(len(labels))
    # Rounding may leave the last bound at 0.999..., so the class may exceed the last by 1.
    result: np.ndarray = np.minimum((uniform[:, None] >= bounds[labels]).sum(axis=1), classes - 1).astype(np.int64)
    return result
