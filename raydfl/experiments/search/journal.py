"""The events of a search, a line of JSON for each event, in the order in which it was decided.

The journal is the state of a search: from it, whoever decides which settings come next and which trials stop is brought back to
where it was when the search was interrupted, decision by decision. What trials have learned lies in their run folders.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import writing
from raydfl.experiments.plan import label_of

_ADVICE = "make room or make the folder writable; the same command goes on"

Status = Literal["running", "finished", "stopped", "failed"]
"""stopped: by the scheduler. A trial that was interrupted is still running."""


@dataclass
class TrialRecord:
    """The record of one trial."""

    number: int
    values: dict[str, Any]
    parent: int | None = None
    rounds: list[int] = field(default_factory=list)
    """Evaluated rounds, rising."""
    scores: list[float] = field(default_factory=list)
    """The metric after each of them, as recorded; NaN where it was none."""
    status: Status = "running"
    reason: str = ""
    """Why it failed, which rule stopped it, or why it is worthless although it is finished."""

    @property
    def text(self) -> str:
        """Its settings in one line: ``method.alpha=0.5 method.vl=0.1``."""
        return " ".join(f"{key}={label_of(value)}" for key, value in self.values.items())

    @property
    def reported(self) -> int:
        """The last round that is known; 0: none."""
        return self.rounds[-1] if self.rounds else 0

    @property
    def score(self) -> float:
        """The last one; NaN: none."""
        return self.scores[-1] if self.scores else math.nan

    @property
    def worthless(self) -> bool:
        """True when all rounds are done and show nothing: raydfl.runs.report.diagnosis."""
        return self.status == "finished" and bool(self.reason)

    @property
    def over(self) -> bool:
        """True when nothing is left to do. A failed trial is tried again another time."""
        return self.status in ("finished", "stopped")


class Journal:
    """The events of a search, on the disk and as records of its trials."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a last line that was torn by a crash is removed.

        Raises:
            RunDirectoryError: a line in the middle is damaged.
        """
        self.path = path
        self.trials: dict[int, TrialRecord] = {}
        self.events: list[dict[str, Any]] = []
        for event in self._read():
            self._apply(event)

    def _read(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                event = json.loads(line)
                known = event["event"] in ("trial", "round", "end") and isinstance(event["trial"], int)
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:
                raise RunDirectoryError(
                    f"{self.path} is damaged in line {number}; restore it from a copy, or give the search another folder with "
                    f"dir=..."
                )
            yield event

    def add(self, event: Literal["trial", "round", "end"], trial: int, **values: Any) -> None:
        """Write an event down before anything is done because of it.

        Raises:
            ResourcesError: the disk is full or the folder cannot be written.
        """
        entry = {"event": event, "trial": trial, **values}
        text = json.dumps(entry, default=str) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (
            writing(self.path.parent, len(text), self.path.name, _ADVICE),
            self.path.open("a", encoding="utf-8") as file,
        ):
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._apply(json.loads(text))

    def _apply(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        number = event["trial"]
        if event["event"] == "trial":
            self.trials[number] = TrialRecord(number, event["values"], event.get("parent"))
            return
        record = self.trials[number]
        if event["event"] == "end":
            record.status, record.reason = event["status"], event.get("reason", "")
        else:
            record.status, record.reason = "running", ""  # of a failed trial that is tried again
        if event.get("round", 0) > record.reported:
            record.rounds.append(event["round"])
            record.scores.append(float("nan") if event["score"] is None else event["score"])


def plain_score(score: float) -> float | None:
    """Return a score for JSON, which has no NaN."""
    return score if math.isfinite(score) else None
