"""Weights & Biases, offline: a run's numbers in the run's folder ``wandb``, which ``wandb sync`` sends when you want it.

Needs the extra ``wandb``. Nothing is sent by itself; with the environment's WANDB_MODE=online it is sent as it is written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from typing import Any

from raydfl.core.errors import InputError
from raydfl.runs.tracking._tracker import FilesTracker, Status


class WandbTracker(FilesTracker):
    """Writes W&B's files."""

    def open(self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin the files of a run whose id follows from its name and digest, so that a resumed one is the same run.

        Raises:
            InputError: the package is missing.
        """
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise InputError(
                "track.also: wandb needs the package 'wandb'; install raydfl[wandb], or take it out of track.also"
            ) from error
        shutil.rmtree(self.run_dir / "wandb", ignore_errors=True)
        identity = hashlib.sha256(repr((run_name, sorted(tags.items()))).encode()).hexdigest()[:16]
        # It watches neither the machine nor the code: what is mirrored is the record.
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True)
        self._run = wandb.init(
            project=self.project,
            name=run_name,
            id=identity,
            dir=str(self.run_dir),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            config={**params, **tags},
            settings=quiet,
        )

    def write(self, number: int, metrics: Mapping[str, float]) -> None:
        """Write a round's numbers."""
        self._run.log(dict(metrics), step=number)

    def finish(self, status: Status) -> None:
        """Close the files."""
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)
