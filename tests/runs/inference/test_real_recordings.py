"""Predictions for held-out files of spoken digits. Oracle: the recorded accuracy of the run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from used_runs import TINY, make_run_config

from raydfl import classify
from raydfl.engine.storage.record import read_rows, to_rows
from raydfl.runs._run import run

RECORDINGS = (
    Path(os.environ.get("RAYDFL_DATA") or Path(__file__).parents[4] / "shared" / "data") / "fsdd" / "recordings"
)


@pytest.mark.slow
@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="there are no recordings of FSDD")
def test_predictions_of_held_out_digits_match_the_recorded_accuracy(tmp_path: Path) -> None:
    config = make_run_config(
        tmp_path,
        RECORDINGS,
        whole_data={
            "name": "fsdd",
            "root": str(RECORDINGS.parent),
            "features": {"sample_rate": 8000, "bands": 32, "hop_ms": 20, "normalise": "clip"},
            "partition": {"by": "group"},
            "cache": str(tmp_path / "cache"),
        },
        method={"name": "fedavg"},
        models={"model": {**TINY, "hidden": 16}},
        train={"rounds": 2, "cohort": 1.0, "batch_size": 16, "optimiser": {"name": "adam", "lr": 0.01}},
    )
    outcome = run(config)
    held_out = [RECORDINGS / f"{d}_{s}_{t}.wav" for d in range(10) for s in speakers() for t in range(5)]
    results = classify(outcome.run_dir, held_out)
    accuracy = np.mean([prediction.label == prediction.file.name[0] for prediction in results])
    rows = [
        row for row in to_rows(read_rows(outcome.run_dir)) if row.metric == "model/accuracy" and row.split == "test"
    ]
    assert len(held_out) == 300
    assert accuracy == pytest.approx(next(row.value for row in rows if row.round == 2 and not row.client))
    assert accuracy > 0.2  # better than chance


def speakers() -> list[str]:
    return sorted({path.name.split("_")[1] for path in RECORDINGS.glob("*.wav")})
