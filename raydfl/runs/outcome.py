"""The end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from raydfl.core.types import Problem


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run."""

    run_dir: Path
    round: int
    """Rounds completed and committed."""
    finished: bool
    """True when all configured rounds are done; else it was stopped and can be resumed."""
    scores: dict[str, float] = field(default_factory=dict)
    """The last evaluation, ``"test plugin/accuracy" -> 0.81``."""
    problems: tuple[Problem, ...] = ()
    """What went wrong although rounds are done, the worst first: raydfl.runs.report.diagnosis."""

    @property
    def status(self) -> Literal["finished", "stopped", "failed"]:
        """The end in a word: ``"stopped"`` by the user or a stop rule, to be resumed; ``"failed"``: see ``problems``."""
        return "stopped" if not self.finished else "failed" if self.worthless else "finished"

    @property
    def worthless(self) -> str:
        """The reason why the run shows nothing; empty when it shows something."""
        return "; ".join(problem.text for problem in self.problems if problem.worthless)
