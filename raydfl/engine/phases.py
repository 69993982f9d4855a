"""Phases of a run and their rounds.

The phases are those of the method. For a method without phases they are those of ``train.phases``, or a single one with an empty
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raydfl.core.errors import ConfigError, nearest
from raydfl.training import TrainSettings


@dataclass(frozen=True, slots=True)
class Phases:
    """Phases of a run in order."""

    names: tuple[str, ...] = ("",)
    first: tuple[int, ...] = (0,)
    """Number of completed rounds before each phase."""

    @classmethod
    def from_settings(cls, names: Sequence[str], train: TrainSettings, method: str) -> Phases:
        """Divide the rounds of a run into phases.

        Args:
            names: Names of the method's phases; empty: those of ``train``, or a single phase.
            train: Training settings, with the number of rounds of the run and of its phases.
            method: Name of the method, for messages.

        Raises:
            ConfigError: A phase is unknown, a single phase is set, or the rounds of the phases exceed ``train.rounds``.
        """
        if not names and len(train.phases) == 1:
            raise ConfigError(
                f"train.phases: {next(iter(train.phases))!r} would be the only phase of method {method!r}. Name two or more, such "
                f"as {{warm_up: {{rounds: 20, local_epochs: 4}}, rest: {{}}}}, or set train instead"
            )
        names = tuple(names) or tuple(train.phases) or cls().names
        check_phases(train.phases, names, "train.phases", method)
        lengths = [train.phases[name].rounds if name in train.phases else None for name in names]
        if lengths[-1] is not None:
            raise ConfigError(
                f"train.phases.{names[-1]}.rounds is {lengths[-1]}, but the last phase always has the rest of train.rounds. Remove "
                f"the setting"
            )
        first = [0]
        for rounds in lengths[:-1]:
            first.append(first[-1] + (rounds or max(1, train.rounds // len(names))))  # the default is an equal share
        if any(lengths) and first[-1] > train.rounds:
            raise ConfigError(
                f"train.phases: {names[-1]!r} would begin after round {first[-1]}, but train.rounds is {train.rounds}. Raise "
                f"train.rounds, or lower the rounds of the earlier phases"
            )
        return cls(names, tuple(first))

    def replace_first(self, first: Sequence[int]) -> Phases:
        """Return the phases with their actual first rounds. ``first`` is empty if no phase ended early."""
        return Phases(self.names, tuple(first)) if first else self

    def end(self, name: str, round_index: int) -> Phases:
        """Return the phases after an early end of a phase. The next phase begins after ``round_index`` rounds.

        Later phases keep their numbers of rounds. The last phase has the rest.
        """
        number = self.number(name)
        earlier = self.first[number] - round_index
        return Phases(self.names, (*self.first[:number], *(first - earlier for first in self.first[number:])))

    def find(self, round_index: int) -> str:
        """Return the phase of the next round after ``round_index`` completed rounds."""
        begun = sum(first <= round_index for first in self.first)
        return self.names[max(begun, 1) - 1]

    def number(self, name: str) -> int:
        """Return the number of a phase. The first phase is 1."""
        return self.names.index(name) + 1


def check_phases(phases: Iterable[str], names: Sequence[str], where: str, method: str) -> None:
    """Reject unknown names of phases.

    Args:
        phases: Names to check.
        names: Names of the method's phases.
        where: Place of the setting, for the message.
        method: Name of the method, for the message.

    Raises:
        ConfigError: A phase is unknown.
    """
    for name in phases:
        if name not in filter(None, names):
            hint = f". {nearest(name, names)}" if any(names) else f", because it has no phases. Remove {where}"
            raise ConfigError(f"{where}: method {method!r} has no phase {name!r}{hint}")
