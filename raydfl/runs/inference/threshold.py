"""Threshold from which on a score is called anomalous: the one that the run recorded, or one that is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from raydfl.engine.storage import record

_SPLITS = ("client_test", "validation")
"""Splits beside whose scores it is recorded, the first that has one is read."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold of scores."""

    value: float
    """A score of at least this is anomalous."""
    origin: str
    """Its origin, in words."""

    def decision(self, score: float) -> str:
        """Return ``"anomaly"`` or ``"normal"``."""
        return "anomaly" if score >= self.value else "normal"


def recorded_threshold(run_dir: Path, model: str, client: str, until_round: int) -> Threshold | None:
    """Return the threshold that was recorded last for a model, of a client's scores or the mean over clients.

    Args:
        run_dir: the run's folder.
        model: its name in the record.
        client: whose; empty: the mean over the clients that were measured.
        until_round: the last committed round.
    """
    names = [f"{model}/threshold", f"{model.rpartition(':')[2]}/threshold"]
    where = pc.field("metric").isin(names) & (pc.field("client") == client) & (pc.field("phase") == "evaluate")
    found: dict[str, dict[str, Any]] = {}
    for row in record.read_rows(run_dir, until_round, where=where).to_pylist():
        if row["count"]:
            found[row["split"]] = row  # by rising rounds
    row = next((found[split] for split in _SPLITS if split in found), None)
    if row is None:
        return None
    whose = f"of {client}" if client else f"of each of {row['count']:.0f} clients, their mean"
    return Threshold(
        float(row["value"]), f"objective.quantile of the scores of normal training clips {whose}, round {row['round']}"
    )
