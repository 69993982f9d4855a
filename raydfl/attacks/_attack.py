"""Base classes of attacks.

An attacker is an ordinary client with altered recordings or labels, without training, or with a replaced update. An attack
on the update replaces the client's change: all tensors of the update minus the server's tensors, as one vector. Tensors that
a method sends as differences (``Method.changes``) are part of the change without subtraction. The weight of the update and
the client's private state remain those of honest training.

An attack is a frozen dataclass whose fields are its options. A configuration names a user-defined attack as
``my_attack.py:Class``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from raydfl.attacks._statistics import HonestUpdates
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.needs import Needs
from raydfl.core.seeds import generator
from raydfl.core.settings import StrictTypes
from raydfl.core.types import Update
from raydfl.data import Share, check_share, draw_clients
from raydfl.data.features import Alteration, AnyFeatures
from raydfl.methods import Method
from raydfl.training import Step


@dataclasses.dataclass(frozen=True, slots=True)
class Cohort:
    """Size of a round's cohort and of its attackers."""

    clients: int
    """Number of clients, attackers included."""
    attackers: int
    """Number of attackers."""
    share: float
    """The attackers' fraction of the cohort's training examples, above 0 and at most 1."""


@dataclass(frozen=True, kw_only=True)
class Attack(StrictTypes):
    """Base class of attacks, with the choice of attackers and rounds."""

    clients: Annotated[
        Share,
        Field(
            description="Attackers: a fraction of the clients (1.0: all), a count (an integer), or a list of ids. Fractions and "
            "counts are drawn with the run's seed."
        ),
    ] = 0.2
    draw: Annotated[
        Literal["run", "round"],
        Field(description="run: draw the attackers once for the run. round: draw new attackers for every round."),
    ] = "run"
    start: Annotated[int, Field(ge=1, description="First round with attacks, counted from 1.")] = 1
    stop: Annotated[
        int | None, Field(ge=1, description="Last round with attacks. null: the last round of the run.")
    ] = None

    _clients_in_range = field_validator("clients")(check_share)

    @model_validator(mode="after")
    def _start_before_stop(self) -> Attack:
        if self.stop is not None and self.stop < self.start:
            raise ValueError(f"stop {self.stop} is before start {self.start}; set stop to at least {self.start}")
        return self

    def attackers(self, ids: Sequence[str], seed: int, round_index: int) -> np.ndarray:
        """Draw the attackers of a round.

        Args:
            ids: ids of all clients.
            seed: seed of the run.
            round_index: number of completed rounds.

        Returns:
            bool [clients], true for attackers.

        Raises:
            DataError: the option names more attackers than clients, or an unknown id.
        """
        if round_index + 1 < self.start or (self.stop is not None and round_index + 1 > self.stop):
            return np.zeros(len(ids), bool)
        rng = generator(seed, 0 if self.draw == "run" else round_index, "", "attackers")
        return draw_clients(ids, self.clients, rng, "attack", "attackers")

    def candidates(self, ids: Sequence[str], seed: int) -> np.ndarray:
        """Determine the clients that may attack in any round: bool [clients].

        Raises:
            DataError: the option names more attackers than clients, or an unknown id.
        """
        # The first round with attacks shows the attackers of the whole run, unless each round draws new attackers.
        mask = self.attackers(ids, seed, self.start - 1)
        return np.full(len(ids), mask.any()) if self.draw == "round" and not isinstance(self.clients, tuple) else mask

    @property
    def needs(self) -> Needs:
        """The attack's requirements on other settings: recordings, labels, a single class list, and clips to poison."""
        uses_labels = type(self).labels is not Attack.labels or type(self).target_class is not Attack.target_class
        return Needs(
            recordings=self.alters, labels="one" if uses_labels else "any", one_class_list=True, own_clips=self.poisons
        )

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Check the options against the data.

        Raises:
            ConfigError: an option does not fit the classes or the features.
            DataError: a file of the options cannot be used.
        """

    @property
    def poisons(self) -> bool:
        """True if attackers train on altered recordings or labels."""
        return self.alters or type(self).labels is not Attack.labels

    @property
    def alters(self) -> bool:
        """True if the attack alters recordings, because its class overrides :meth:`alteration`."""
        return type(self).alteration is not Attack.alteration

    def alteration(self) -> Alteration | None:
        """Return the alteration of attackers' recordings, applied before feature extraction. ``None`` by default."""
        return None

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Choose the altered training clips of an attacker. None by default.

        Args:
            count: number of the attacker's training clips.
            rng: generator of the client, the same in every round.

        Returns:
            bool [count], true for altered clips.
        """
        return np.zeros(count, bool)

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Return the training labels of an attacker. By default the true labels.

        Args:
            labels: int64 [clips], true labels as indices into ``classes``.
            altered: bool [clips], the choice of :meth:`altered`.
            classes: names of the classes.
            rng: generator of the client, the same in every round.

        Returns:
            int64 [clips].
        """
        return labels

    def target_class(self, classes: Sequence[str]) -> int | None:
        """Return the target class of altered clips, or ``None`` if the attack has no success rate to measure."""
        return None

    def local(self, method: Method, step: Step) -> Update:
        """Compute the update of an attacker. By default honest training."""
        return method.local(step)


@dataclass(frozen=True, kw_only=True)
class UpdateAttack(Attack, ABC):
    """Base class of attacks on the attacker's own update. Rules can still stream the updates."""

    repeats: ClassVar[bool] = False
    """True: :meth:`change` receives a generator with the same seed in every round."""

    @abstractmethod
    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """Replace an honest change.

        Args:
            change: float64 [elements], the client's tensors minus the server's. Do not write to it.
            cohort: size of the cohort.
            rng: generator seeded by run, round and client (by run and client if :attr:`repeats`).

        Returns:
            float [elements]. Return ``change`` itself to keep the update unchanged to the bit.
        """


@dataclass(frozen=True, kw_only=True)
class ColludingAttack(Attack, ABC):
    """Base class of attacks in which all attackers of a round send the same change, computed from honest updates.

    The server collects all updates of a round before it calls :meth:`together`.
    """

    knowledge: Annotated[
        Literal["all", "own"],
        Field(
            description="Knowledge of the attackers. all: the updates of all honest clients of the round (without honest clients, "
            "as own). own: the attackers' own honest updates."
        ),
    ] = "all"

    @abstractmethod
    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        """Compute the common change of all attackers.

        Args:
            known: the updates that the attackers know.
            cohort: size of the cohort.

        Returns:
            float [elements].
        """


def class_index(name: str | int, classes: Sequence[str], where: str) -> int:
    """Find the index of a class by its name in an option.

    Args:
        name: the name.
        classes: names of the classes.
        where: the option, for the error message.

    Raises:
        ConfigError: the class is unknown. The message suggests the nearest name.
    """
    if str(name) not in classes:
        raise ConfigError(f"{where}: the data have no class {str(name)!r}. {nearest(str(name), classes)}")
    return list(classes).index(str(name))


def draw_share(count: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw a fraction of ``count`` clips, rounded half up: bool [count]."""
    # np.round would round halves to even numbers.
    chosen = np.zeros(count, bool)
    chosen[rng.permutation(count)[: int(np.floor(share * count + 0.5))]] = True
    return chosen


def return_received(method: Method, step: Step) -> Update:
    """Return the shared tensors as received, with differences of 0, without training. Private state does not change."""
    # The server may have requested only some of the client's networks, as in a later phase.
    tensors = next((tensors for tensors in step.received.values() if tensors), None) or step.floating_state()
    sent = {
        name: torch.zeros_like(value) if name.startswith(method.changes) else value
        for name, value in tensors.items()
        if method.shared(name)
    }
    return step.update(tensors=sent)
