"""Corruption of chosen clients' training data: background noise and wrong labels, as FedMLAC's robustness experiments have them.

Their source is FedAudio (Zhang et al., ICASSP 2023). Deviations from its code:

- Noise: one generator for each clip, from the run's seed and the clip's name. FedAudio seeds its generator with 8 for every
  file, so all clips there get the same pattern, scaled. The noise is added at the features' sample rate, before the log-mel.
- Wrong labels: FedAudio repairs empty rows of the transition matrix for 4 classes only; here for any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, field_validator

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator, seed_for
from raydfl.core.settings import Settings

NOISELESS = -1
"""In place of a clip's seed: no noise."""
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


class NoiseSettings(Settings):
    """White Gaussian noise in the waves of training clips."""

    snr_db: Annotated[
        float,
        Field(ge=-100, le=300, description="Power of the clip over the power of its noise, in decibels. -100 to 300."),
    ]
    clients: Annotated[Share, Field(description=CLIENTS)] = 1.0

    _check = field_validator("clients")(share_in_range)


class LabelErrorSettings(Settings):
    """Wrong labels of training clips, by a transition matrix for each client."""

    rate: Annotated[
        float, Field(ge=0, le=1, description="Expected share of a client's clips with a wrong label, 0 to 1.")
    ]
    clients: Annotated[Share, Field(description=CLIENTS)] = 1.0

    _check = field_validator("clients")(share_in_range)


class CorruptSettings(Settings):
    """Corruption of the training data; validation and test stay clean."""

    noise: Annotated[NoiseSettings | None, Field(description="Background noise. null: none.")] = None
    labels: Annotated[LabelErrorSettings | None, Field(description="Wrong labels. null: none.")] = None


@dataclass(frozen=True)
class Noise:
    """The noise of some clips."""

    snr_db: float
    """Power of the clip over the power of the noise, in decibels."""
    seeds: tuple[int, ...]
    """One for each clip, at least 0; :data:`NOISELESS` leaves the clip as it is."""

    def part(self, start: int, stop: int) -> Noise:
        """Return the noise of clips ``start`` to ``stop - 1``."""
        return Noise(self.snr_db, self.seeds[start:stop])


def noise_for(clips: Iterable[str], snr_db: float, seed: int) -> Noise:
    """Return the noise of clips of these names in a run of this seed."""
    return Noise(snr_db, tuple(seed_for(seed, 0, clip, "noise") for clip in clips))


def add_noise(wave: np.ndarray, snr_db: float, seed: int) -> np.ndarray:
    """Add white Gaussian noise of power mean(wave^2) / 10^(snr_db / 10) to ``wave`` (float32 [samples])."""
    power = float(np.mean(np.square(wave, dtype=np.float64)))
    noise = np.random.default_rng(seed).standard_normal(wave.size)
    result: np.ndarray = (wave + noise * np.sqrt(power / 10 ** (snr_db / 10))).astype(np.float32)
    return result


def choose_clients(ids: Sequence[str], wanted: Share, seed: int, purpose: str) -> np.ndarray:
    """Choose whose data are corrupted: bool [clients].

    Args:
        purpose: keeps the draws for noise and for labels apart.

    Raises:
        DataError: more clients than there are, or an unknown id.
    """
    return draw_clients(ids, wanted, generator(seed, 0, "", f"corrupt {purpose}"), "data.corrupt", "corrupted")


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
