"""Phases: which rounds belong to which phase of a method. A method that names none has a single one, without a name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raydfl.core.errors import ConfigError, nearest
from raydfl.training import TrainSettings


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a run in their order."""

    names: tuple[str, ...] = ("",)
    first: tuple[int, ...] = (0,)
    """Rounds that are completed before each begins."""

    @classmethod
    def from_settings(cls, names: Sequence[str], train: TrainSettings, method: str) -> Phases:
        """Return the phases of a run.

        Args:
            names: of the method's phases; empty: a single one.
            train: how many rounds there are, and how many each phase has.
            method: its name, for the messages.

        Raises:
            ConfigError: settings of a phase that the method does not have, or rounds of the phases that do not fit.
        """
        names = tuple(names) or cls().names
        check_phases(train.phases, names, "train.phases", method)
        given = [train.phases[name].rounds if name in train.phases else None for name in names]
        if given[-1] is not None:
            raise ConfigError(
                f"train.phases.{names[-1]}.rounds: {given[-1]}; the last phase has what is left of train.rounds; leave it out"
            )
        first = [0]
        for rounds in given[:-1]:
            first.append(first[-1] + (rounds or max(1, train.rounds // len(names))))
        if any(given) and first[-1] > train.rounds:
            raise ConfigError(
                f"train.phases: {names[-1]!r} would begin after round {first[-1]}, and train.rounds is {train.rounds}; raise "
                f"train.rounds, or lower the rounds of the phases before"
            )
        return cls(names, tuple(first))

    def as_begun(self, first: Sequence[int]) -> Phases:
        """Return the phases with the rounds in which they really began; ``first`` is empty if none has ended early."""
        return Phases(self.names, tuple(first)) if first else self

    def end(self, name: str, round_index: int) -> Phases:
        """Return the phases of a run of which one ends after so many completed rounds: the next begins then.

        Those after that keep their numbers of rounds, and the last has what is left.
        """
        number = self.number(name)
        earlier = self.first[number] - round_index
        return Phases(self.names, (*self.first[:number], *(first - earlier for first in self.first[number:])))

    def at(self, round_index: int) -> str:
        """Return the phase of the round after so many completed ones."""
        begun = sum(first <= round_index for first in self.first)
        return self.names[max(begun, 1) - 1]

    def number(self, name: str) -> int:
        """Return the place of a phase, from 1 on."""
        return self.names.index(name) + 1


def check_phases(given: Iterable[str], names: Sequence[str], where: str, method: str) -> None:
    """Refuse the name of a phase that the method does not have.

    Raises:
        ConfigError: naming it.
    """
    for name in given:
        if name not in filter(None, names):
            hint = nearest(name, names) if any(names) else f"it has none; leave {where} out"
            raise ConfigError(f"{where}: method {method!r} has no phase {name!r}; {hint}")
