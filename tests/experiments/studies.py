"""What tests of studies share: files, and runs as they would be left behind, with known numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from raydfl.engine.storage.folder import write_config
from raydfl.engine.storage.record import MetricRow, rows_path, write_rows
from raydfl.experiments.study import Trial

StudyFile = Callable[..., Path]
"""Writes a study's file, with other keys as keywords: ``search_file(samples=3)``."""


def leave(
    run: Trial,
    scores: Mapping[str, Sequence[float]],
    finished: bool = True,
    done: int | None = None,
    first: int = 1,
) -> None:
    """A run directory with these scores at rounds ``first``, ``first + 1``, ...; ``"test model/accuracy"``."""
    run.run_dir.mkdir(parents=True)
    write_config(run.run_dir, run.config)
    about = {"id": run.run_dir.name, "digest": run.config.digest(), "classes": ["a", "b"], "models": {}, "clients": 3}
    (run.run_dir / "run.json").write_text(json.dumps(about))
    rows = []
    for name, values in scores.items():
        split, _, metric = name.partition(" ")
        rows += [
            MetricRow(place, "evaluate", "", split, metric, value, 10.0) for place, value in enumerate(values, first)
        ]
    if rows:
        write_rows(rows_path(run.run_dir, max(row.round for row in rows)), sorted(rows, key=lambda row: row.round))
    done = run.config.train.rounds if done is None else done
    (run.run_dir / "LATEST").write_text(f"{done:06d}-00000000.safetensors")
    if finished:
        (run.run_dir / "report.html").write_text("the page of a run")
