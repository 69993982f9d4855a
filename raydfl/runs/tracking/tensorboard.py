"""TensorBoard: a run's metrics in event files in its folder ``tensorboard``, for ``tensorboard --logdir runs``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from tensorboardX import SummaryWriter

from raydfl.runs.tracking._tracker import FilesTracker, Status


class TensorBoardTracker(FilesTracker):
    """Tracker with TensorBoard's event files."""

    def open(self, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Start a new event file with the settings as text."""
        folder = self.run_dir / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        rows = "".join(f"| `{name}` | {value} |\n" for name, value in sorted({**params, **tags}.items()))
        self._writer.add_text(run_name, f"| setting | value |\n|---|---|\n{rows}", 0)

    def write(self, number: int, metrics: Mapping[str, float]) -> None:
        """Write a round's metrics and flush them to the disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def finish(self, status: Status) -> None:
        """Close the event file."""
        self._writer.close()
