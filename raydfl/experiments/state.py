"""The state of a study in addition to its run folders: the points of started trials, and stopped and failed trials."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from raydfl.core.errors import RunDirectoryError, translate_failures
from raydfl.core.files import write_durably
from raydfl.experiments.records import write_result
from raydfl.experiments.study import Study, Trial, distinct

Status = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class TrialState:
    """Point and status of a started trial."""

    point: dict[str, Any]
    status: Status = "running"
    reason: str = ""
    """Reason of a failure, scheduler of an early stop, or reason of a worthless result."""

    def describe(self, done: int) -> str:
        """Describe the state of an unfinished trial with ``done`` committed rounds."""
        if self.status in ("stopped", "failed"):
            return f"stopped ({self.reason})" if self.status == "stopped" else "failed"
        return f"begun: round {done}" if done else "missing"


@dataclass
class StudyState:
    """The states of a study's trials, stored in ``NAME-trials.json``."""

    study: Study
    trials: dict[str, TrialState] = field(default_factory=dict)
    """States by the names of run folders."""
    mlflow: str | None = None
    """Id of the study's run in MLflow."""

    @classmethod
    def read(cls, study: Study) -> StudyState:
        """Read the state of a study. A new study has an empty state.

        Raises:
            RunDirectoryError: The file is damaged.
        """
        path = study.output("-trials.json")
        with translate_failures(
            lambda _: RunDirectoryError(
                f"{path} is damaged. Restore it from a copy, or remove it to train stopped trials again."
            )
        ):
            values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            trials = {str(name): TrialState(**trial) for name, trial in values.get("trials", {}).items()}
            return cls(study, trials, values.get("mlflow"))

    def write(self) -> None:
        """Write the state durably.

        Raises:
            ResourcesError: The disk is full, or the folder is not writable.
        """
        values = {"mlflow": self.mlflow, "trials": {name: asdict(trial) for name, trial in self.trials.items()}}
        advice = "make room or make the folder writable; the same command continues"
        write_durably(self.study.output("-trials.json"), json.dumps(values, indent=1, default=str).encode(), advice)

    def note(self, trial: Trial, status: Status, reason: str = "") -> None:
        """Set the state of a trial, and write all states. Write the result of a finished trial."""
        self.trials[trial.run_dir.name] = TrialState(trial.point, status, reason)
        self.write()
        if status == "finished":
            write_result(self.study, trial)

    def get(self, trial: Trial) -> TrialState:
        """Return the state of a trial. Unknown trials have the status ``running``."""
        return self.trials.get(trial.run_dir.name, TrialState(trial.point))

    def is_over(self, trial: Trial) -> bool:
        """Return whether a trial is finished or stopped. The next command repeats failed trials."""
        return trial.finished or self.get(trial).status == "stopped"

    @property
    def skipped(self) -> list[str]:
        """With optuna and pbt, names of trials without a value for a domain, because the study's file was edited."""
        domains = self.study.settings.domains.keys() if self.study.settings.sequential else set[str]()
        return [name for name, state in self.trials.items() if not domains <= state.point.keys()]

    @property
    def known(self) -> list[Trial]:
        """All planned trials, or with optuna and pbt all started trials."""
        if not self.study.settings.sequential:
            return list(self.study.trials)
        names = [name for name in self.trials if name not in self.skipped]
        return [self.study.trial(self.trials[name].point, name.removeprefix("trial-")) for name in names]

    @property
    def waiting(self) -> list[Trial]:
        """Unfinished trials, without duplicates."""
        return [trial for trial in distinct(self.known) if not self.is_over(trial)]

    @property
    def left(self) -> int:
        """Number of unfinished trials."""
        if not self.study.settings.sequential:
            return len(self.waiting)
        return self.study.samples - sum(map(self.is_over, self.known))
