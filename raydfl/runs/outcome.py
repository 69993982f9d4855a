"""The end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from raydfl.core.types import Problem
from raydfl.engine import Leader


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run."""

    run_dir: Path
    round: int
    """Rounds completed and committed."""
    finished: bool
    """True when all configured rounds are done, or run.stop has ended the training; else it was stopped and can be resumed."""
    scores: dict[str, float] = field(default_factory=dict)
    """The last evaluation, ``"test plugin/accuracy" -> 0.81``."""
    problems: tuple[Problem, ...] = ()
    """What went wrong although rounds are done, the worst first: raydfl.runs.report.diagnosis."""
    ended: str = ""
    """Why run.stop has ended the training before its last round; empty: it has not."""
    best: Leader | None = None
    """The best round by run.best, whose models are kept; ``None``: there is none, or it is not asked for."""

    @property
    def status(self) -> Literal["finished", "stopped", "failed"]:
        """The end in a word: ``"stopped"`` by the user or a study, to be resumed; ``"failed"``: see ``problems``."""
        return "stopped" if not self.finished else "failed" if self.worthless else "finished"

    @property
    def worthless(self) -> str:
        """The reason why the run shows nothing; empty when it shows something."""
        return "; ".join(problem.text for problem in self.problems if problem.worthless)
