"""The state of a study that its run folders do not hold: which trials were stopped or failed, and the points of all that began."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import write_durably
from raydfl.experiments.study import Study, Trial, distinct

Status = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class TrialState:
    """The point and the status of a trial that began."""

    point: dict[str, Any]
    status: Status = "running"
    reason: str = ""
    """Why it failed, which scheduler stopped it, or why its result is worthless."""

    def describe(self, done: int) -> str:
        """Return the state of an unfinished trial with so many rounds in words."""
        if self.status in ("stopped", "failed"):
            return f"stopped ({self.reason})" if self.status == "stopped" else "failed"
        return f"begun: round {done}" if done else "missing"


@dataclass
class StudyState:
    """The states of a study's trials, by the names of their run folders, in ``NAME-trials.json``."""

    study: Study
    trials: dict[str, TrialState] = field(default_factory=dict)
    mlflow: str | None = None
    """The study's run in MLflow."""

    @classmethod
    def read(cls, study: Study) -> StudyState:
        """Read the state; a study that never began has an empty one.

        Raises:
            RunDirectoryError: the file is damaged.
        """
        path = study.output("-trials.json")
        try:
            values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            found = {str(name): TrialState(**trial) for name, trial in values.get("trials", {}).items()}
            return cls(study, found, values.get("mlflow"))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise RunDirectoryError(
                f"{path} is damaged; restore it from a copy, or remove it to train stopped trials again"
            ) from error

    def write(self) -> None:
        """Write the state durably.

        Raises:
            ResourcesError: the disk is full or the folder cannot be written.
        """
        values = {"mlflow": self.mlflow, "trials": {name: asdict(trial) for name, trial in self.trials.items()}}
        advice = "make room or make the folder writable; the same command continues"
        write_durably(self.study.output("-trials.json"), json.dumps(values, indent=1, default=str).encode(), advice)

    def note(self, trial: Trial, status: Status, reason: str = "") -> None:
        """Write down the state of a trial, as :meth:`write`."""
        self.trials[trial.run_dir.name] = TrialState(trial.point, status, reason)
        self.write()

    def of(self, trial: Trial) -> TrialState:
        """Return the state of a trial."""
        return self.trials.get(trial.run_dir.name, TrialState(trial.point))

    def is_over(self, trial: Trial) -> bool:
        """Return whether nothing is left to do for a trial. A failed trial is tried again by the next command."""
        return trial.finished or self.of(trial).status == "stopped"

    @property
    def skipped(self) -> list[str]:
        """With optuna and pbt, the trials whose points lack a domain, because the study's file was edited."""
        domains = self.study.settings.domains.keys() if self.study.settings.sequential else set[str]()
        return [name for name, state in self.trials.items() if not domains <= state.point.keys()]

    @property
    def known(self) -> list[Trial]:
        """The trials of the study: those known beforehand, or with optuna and pbt those that began."""
        if not self.study.settings.sequential:
            return list(self.study.trials)
        names = [name for name in self.trials if name not in self.skipped]
        return [self.study.trial(self.trials[name].point, name.removeprefix("trial-")) for name in names]

    @property
    def waiting(self) -> list[Trial]:
        """The trials that are left to do, each identity once."""
        return [trial for trial in distinct(self.known) if not self.is_over(trial)]

    @property
    def left(self) -> int:
        """Number of trials that are left to do."""
        if not self.study.settings.sequential:
            return len(self.waiting)
        return self.study.samples - sum(map(self.is_over, self.known))
