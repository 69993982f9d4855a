"""Helpers for tests of studies: study files, and run folders with given scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from raydfl.engine.storage.folder import write_config
from raydfl.engine.storage.record import MetricRow, rows_path, write_rows
from raydfl.experiments.study import Trial

StudyFile = Callable[..., Path]
"""Writes a study's file, with changed keys as keywords: ``search_file(samples=3)``."""


def write_run_folder(
    run: Trial,
    scores: Mapping[str, Sequence[float]],
    finished: bool = True,
    last_round: int | None = None,
    first: int = 1,
) -> None:
    """Write a run folder with scores, such as ``"test model/accuracy"``, at rounds ``first``, ``first + 1``, ..."""
    run.run_dir.mkdir(parents=True)
    write_config(run.run_dir, run.config)
    manifest = {
        "id": run.run_dir.name,
        "digest": run.config.digest(),
        "classes": ["a", "b"],
        "models": {},
        "clients": 3,
    }
    (run.run_dir / "run.json").write_text(json.dumps(manifest))
    rows = []
    for name, values in scores.items():
        split, _, metric = name.partition(" ")
        rows += [
            MetricRow(round_index, "evaluate", "", split, metric, value, 10.0)
            for round_index, value in enumerate(values, first)
        ]
    if rows:
        write_rows(rows_path(run.run_dir, max(row.round for row in rows)), sorted(rows, key=lambda row: row.round))
    last_round = run.config.train.rounds if last_round is None else last_round
    (run.run_dir / "LATEST").write_text(f"{last_round:06d}-00000000.safetensors")
    if finished:
        (run.run_dir / "report.html").write_text("the page of a run")
