"""Data poisoning: whose labels are flipped, and whose recordings are altered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from raydfl.core.seeds import generator, seed_for
from raydfl.core.users_code import naming_failures
from raydfl.data.corruption import NOISELESS, Noise, noise_for
from raydfl.data.features.alteration import UNALTERED, Alteration, Alterations
from raydfl.data.features.kinds import AnyFeatures


class Poisoner(Protocol):
    """Whoever alters training data: as much of an attack as data need to know (raydfl/attacks)."""

    @property
    def poisons(self) -> bool:
        """Return whether attackers train on other recordings or labels than honest clients."""

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Refuse options that do not fit the data."""

    def candidates(self, ids: Sequence[str], seed: int) -> np.ndarray:
        """Return who attacks in some round: bool [clients]."""

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return which of an attacker's ``count`` training clips are altered: bool [count]."""

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Return the labels that an attacker trains on: int64 [clips]."""

    def target_class(self, classes: Sequence[str]) -> int | None:
        """Return the class that altered clips are to be taken for; ``None``: nothing to measure."""

    def alteration(self) -> Alteration | None:
        """Return what is done to chosen recordings; ``None``: nothing."""


@dataclass(frozen=True)
class Poisoned:
    """The training clips of a federation as attackers would have them; where nobody ever attacks, as they are."""

    attacker: np.ndarray
    """bool [clients]: those who attack in some round."""
    altered: np.ndarray
    """bool [clips]: those whose recordings are altered."""
    labels: np.ndarray
    """int64 [clips]."""


def poison(
    attack: Poisoner, ids: Sequence[str], classes: Sequence[str], client: np.ndarray, labels: np.ndarray, seed: int
) -> Poisoned:
    """Do to training data what an attack does.

    Args:
        client: int [clips], ascending: whose each clip is.
        labels: int64 [clips]: what honest clients train on.
        seed: the run's.

    Raises:
        DataError: more attackers than clients, or an unknown id.
    """
    attacker = attack.candidates(ids, seed)
    altered, flipped = np.zeros(len(labels), bool), labels.copy()
    bounds = np.searchsorted(client, np.arange(len(ids) + 1))
    for number in np.flatnonzero(attacker).tolist():
        mine = slice(bounds[number], bounds[number + 1])
        rng = generator(seed, 0, ids[number], "attack data")
        with naming_failures(attack, "altered", kind="attack"):
            altered[mine] = attack.altered(mine.stop - mine.start, rng)
        with naming_failures(attack, "labels", kind="attack"):
            flipped[mine] = attack.labels(labels[mine], altered[mine], classes, rng)
    return Poisoned(attacker, altered, flipped)


def alterations_for(clips: Sequence[str], altered: np.ndarray, what: Alteration, seed: int) -> Alterations:
    """Return what is done to clips of these names; those with ``altered`` (bool [clips]) false stay as they are."""
    seeds = (
        seed_for(seed, 0, clip, "alteration") if yes else UNALTERED for clip, yes in zip(clips, altered, strict=True)
    )
    return Alterations(what, tuple(seeds))


def noise_of_some(clips: Sequence[str], noisy: np.ndarray, snr_db: float, seed: int) -> Noise:
    """Return the noise of those clips of these names with ``noisy`` (bool [clips]) true: what :func:`noise_for` gives them."""
    drawn = noise_for(clips, snr_db, seed).seeds
    return Noise(snr_db, tuple(own if yes else NOISELESS for own, yes in zip(drawn, noisy, strict=True)))
