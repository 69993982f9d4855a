"""Thresholds of anomaly scores, recorded by a run or chosen by the user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from raydfl.engine.storage import record

_SPLITS = ("client_test", "validation")
"""Splits with a recorded threshold, in order of preference."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold of anomaly scores."""

    value: float
    """Scores of at least this value are anomalous."""
    origin: str
    """Description of the origin."""

    def decision(self, score: float) -> str:
        """Classify a score as ``"anomaly"`` or ``"normal"``."""
        return "anomaly" if score >= self.value else "normal"


def read_threshold(run_dir: Path, model: str, client: str, until_round: int) -> Threshold | None:
    """Read the newest threshold of a model from the metrics table.

    Args:
        run_dir: Run folder.
        model: Name of the model in the metrics table.
        client: Id of the client. Empty: the mean over the evaluated clients.
        until_round: The last committed round.

    Returns:
        The threshold, or ``None`` if no threshold is recorded.
    """
    names = [f"{model}/threshold", f"{model.rpartition(':')[2]}/threshold"]
    where = pc.field("metric").isin(names) & (pc.field("client") == client) & (pc.field("phase") == "evaluate")
    newest: dict[str, dict[str, Any]] = {}
    for row in record.read_rows(run_dir, until_round, where=where).to_pylist():
        if row["count"]:
            newest[row["split"]] = row  # rows are sorted by round
    row = next((newest[split] for split in _SPLITS if split in newest), None)
    if row is None:
        return None
    owner = f"of {client}" if client else f"of each of {row['count']:.0f} clients, their mean"
    return Threshold(
        float(row["value"]), f"objective.quantile of the scores of normal training clips {owner}, round {row['round']}"
    )
