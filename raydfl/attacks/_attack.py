"""Attack: what a simulated attacker does, to find out how a method and a rule stand it. Built in: ``raydfl/attacks``.

An attacker is an ordinary client of the federation that is made to misbehave: its recordings or labels are altered before it
trains, it does not train at all, or what it sends is replaced. What a client sends means all tensors of its update, taken as the
difference to what the server has; tensors that a method sends as differences already (``Method.changes``) are taken as they are.
The weight of the update and the client's private state stay those of honest work.

An attack is a frozen dataclass; its fields are its options. One of your own is a subclass of :class:`Attack`,
:class:`UpdateAttack` or :class:`ColludingAttack`, named in a configuration as ``my_attack.py:Class``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from raydfl.attacks._statistics import HonestUpdates
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.needs import Needs
from raydfl.core.seeds import generator
from raydfl.core.settings import StrictTypes
from raydfl.core.types import Update
from raydfl.data import Share, draw_clients, share_in_range
from raydfl.data.features import Alteration, AnyFeatures
from raydfl.methods import Method
from raydfl.training import Step


@dataclasses.dataclass(frozen=True, slots=True)
class Cohort:
    """The clients of one round, as far as an attacker counts them."""

    clients: int
    """All of them."""
    attackers: int
    """Those that attack."""
    share: float
    """The attackers' share of the cohort's training examples, above 0, to 1."""


@dataclass(frozen=True, kw_only=True)
class Attack(StrictTypes):
    """Base of every attack: who attacks and when. By itself it does nothing."""

    clients: Annotated[
        Share,
        Field(
            description="who attacks: a share of all clients (0.2; 1.0: all), a number (an integer), or a list of ids; the first "
            "two are drawn by the run's seed"
        ),
    ] = 0.2
    draw: Annotated[
        Literal["run", "round"],
        Field(description="run: the same clients attack in the whole run; round: others are drawn for every round"),
    ] = "run"
    start: Annotated[int, Field(ge=1, description="first round in which they attack, counted from 1")] = 1
    stop: Annotated[
        int | None, Field(ge=1, description="last round in which they attack; null: until the run ends")
    ] = None

    _clients_in_range = field_validator("clients")(share_in_range)

    @model_validator(mode="after")
    def _start_before_stop(self) -> Attack:
        if self.stop is not None and self.stop < self.start:
            raise ValueError(f"stop {self.stop} is before start {self.start}")
        return self

    def attackers(self, ids: Sequence[str], seed: int, round_index: int) -> np.ndarray:
        """Return who attacks in the round after ``round_index`` completed ones: bool [clients].

        Args:
            ids: of all clients.
            seed: the run's.

        Raises:
            DataError: more attackers than clients, or an unknown id.
        """
        if round_index + 1 < self.start or (self.stop is not None and round_index + 1 > self.stop):
            return np.zeros(len(ids), bool)
        rng = generator(seed, 0 if self.draw == "run" else round_index, "", "attackers")
        return draw_clients(ids, self.clients, rng, "attack", "attackers")

    def candidates(self, ids: Sequence[str], seed: int) -> np.ndarray:
        """Return who attacks in any round: bool [clients].

        Raises:
            DataError: more attackers than clients, or an unknown id.
        """
        drawn = self.attackers(ids, seed, self.start - 1)
        return np.full(len(ids), drawn.any()) if self.draw == "round" and not isinstance(self.clients, tuple) else drawn

    @property
    def needs(self) -> Needs:
        """The needs of other settings: recordings, labels and clips that the attack can change, and one list of classes."""
        aims = type(self).labels is not Attack.labels or type(self).target_class is not Attack.target_class
        return Needs(
            recordings=self.alters, labels="one" if aims else "any", one_class_list=True, own_clips=self.poisons
        )

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Refuse options that do not fit the data, with a ConfigError or DataError."""

    @property
    def poisons(self) -> bool:
        """Return whether attackers train on other recordings or labels than honest clients."""
        return self.alters or type(self).labels is not Attack.labels

    @property
    def alters(self) -> bool:
        """Return whether it alters recordings, that is, has an :meth:`alteration` of its own."""
        return type(self).alteration is not Attack.alteration

    def alteration(self) -> Alteration | None:
        """Return what to do to chosen recordings of attackers before their features are computed; by default nothing."""
        return None

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Choose which of an attacker's ``count`` training clips are altered: bool [count]; by default none."""
        return np.zeros(count, bool)

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Return the labels that an attacker trains on: int64 [clips]; by default the true ones.

        Args:
            labels: int64 [clips]: indices into ``classes``.
            altered: bool [clips]: as :meth:`altered` chose.
            rng: of the client, the same in every round.
        """
        return labels

    def target_class(self, classes: Sequence[str]) -> int | None:
        """Return the class that altered clips should be taken for, whose success is measured. ``None``: nothing to measure."""
        return None

    def local(self, method: Method, step: Step) -> Update:
        """Do an attacker's work in place of the method's ``local``; by default just that."""
        return method.local(step)


@dataclass(frozen=True, kw_only=True)
class UpdateAttack(Attack, ABC):
    """An attack on what the attacker itself sends. It needs nobody else's update, so rules that stream go on doing so."""

    @abstractmethod
    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """Return what is sent in place of an honest change.

        Args:
            change: float64 [elements]: what the client sends, less what the server has; not to be written into.
            rng: of (run seed, round, client).

        Returns:
            float [elements]; ``change`` itself leaves the update as it is, to the bit.
        """


@dataclass(frozen=True, kw_only=True)
class ColludingAttack(Attack, ABC):
    """An attack in which all attackers of a round send the same, made from honest updates. The server waits for all updates."""

    knowledge: Annotated[
        Literal["all", "own"],
        Field(
            description="what the attackers know: all: the updates of all honest clients of the round (where there are none, their "
            "own); own: only the updates that they would send themselves if they were honest"
        ),
    ] = "all"

    @abstractmethod
    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        """Return the change that every attacker sends: float [elements]."""


def class_index(name: str | int, classes: Sequence[str], where: str) -> int:
    """Return the index of a class that an option names.

    Args:
        where: the option, for the message.

    Raises:
        ConfigError: there is no such class; the nearest is named.
    """
    if str(name) not in classes:
        raise ConfigError(f"{where}: the data have no class {str(name)!r}; {nearest(str(name), classes)}")
    return list(classes).index(str(name))


def drawn_share(count: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw a share of ``count`` things, rounded half up: bool [count]."""
    chosen = np.zeros(count, bool)
    chosen[rng.permutation(count)[: int(np.floor(share * count + 0.5))]] = True
    return chosen
