"""Weights & Biases, offline: a run's metrics in its folder ``wandb``. ``wandb sync`` uploads them.

Needs the extra ``wandb``. Nothing is uploaded automatically, unless the environment variable WANDB_MODE is ``online``.
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
    """Tracker with offline files of Weights & Biases."""

    def open(self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Start the files of a run. Its W&B id is a hash of name and digest, so a resumed run keeps its id.

        Raises:
            InputError: The package ``wandb`` is not installed.
        """
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise InputError(
                "track.also: wandb needs the package 'wandb'. Install raydfl[wandb], or remove wandb from track.also."
            ) from error
        shutil.rmtree(self.run_dir / "wandb", ignore_errors=True)
        identity = hashlib.sha256(repr((run_name, sorted(tags.items()))).encode()).hexdigest()[:16]
        # Only the run's metrics are copied, not measurements of the machine or the user's code.
        wandb_settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=self.project,
            name=run_name,
            id=identity,
            dir=str(self.run_dir),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            config={**params, **tags},
            settings=wandb_settings,
        )

    def write(self, number: int, metrics: Mapping[str, float]) -> None:
        """Write a round's metrics."""
        self._run.log(dict(metrics), step=number)

    def finish(self, status: Status) -> None:
        """Close the files."""
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)
