"""Whom the aggregation rule listened to: the influences that a run recorded, by client."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from raydfl.errors import RunDirectoryError
from raydfl.record import read_rows


def influences(run_dir: Path, until_round: int | None = None) -> dict[int, dict[str, float]]:
    """What the rule left of each client's update, 0 (left out) to 1 (as in a plain mean), by round and client id.

    A round records one array in the order of its updates; whose they are is said by the clients' own rows of that round.

    Args:
        run_dir: the run's folder.
        until_round: the last committed round: see :func:`raydfl.record.read_rows`.

    Returns:
        Empty where the rule does not judge clients as a whole (the means, the median, the trimmed mean).

    Raises:
        RunDirectoryError: a file of the record is damaged, or clients' rows are missing.
    """
    recorded = read_rows(
        run_dir, until_round, where=pc.field("metric") == "rule/influences", columns=("round", "array")
    ).to_pylist()
    clients: dict[int, dict[str, None]] = {}
    trained = (pc.field("split") == "train") & (pc.field("phase") == "train") & (pc.field("client") != "")
    if recorded:
        for row in read_rows(run_dir, until_round, where=trained, columns=("round", "client")).to_pylist():
            clients.setdefault(row["round"], {})[row["client"]] = None
    found: dict[int, dict[str, float]] = {}
    for row in recorded:
        ids = list(clients.get(row["round"], ()))
        if len(ids) != len(row["array"]):
            raise RunDirectoryError(
                f"{run_dir}: round {row['round']} has influences of {len(row['array'])} updates, but rows of {len(ids)} clients; "
                f"the method has to return metrics for each client, or the record is not whole"
            )
        found[row["round"]] = dict(zip(ids, row["array"], strict=True))
    return found
