"""Scores of a run's own test clips, written to ``scores.csv`` in the run folder for the report.

The metrics table has no values of single clips, for privacy. Scoring needs the list of recordings and the feature cache, so it runs
on request on a machine with the data.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raydfl.core.errors import InputError
from raydfl.data import Examples, Population, list_clips
from raydfl.engine.storage import local_run
from raydfl.objectives import Verify
from raydfl.runs.inference.mistakes import answer_clips, predict_tests, write_table
from raydfl.runs.inference.model import RunModel, _Run
from raydfl.runs.inference.threshold import Threshold

SCORES_FILE = "scores.csv"


@dataclass(frozen=True, slots=True)
class TestedClip:
    """A test clip with its anomaly score and decision."""

    client: str
    """Id of the client. Empty for the server's test clips."""
    clip: str
    """Name in the list of recordings."""
    label: str
    score: float
    threshold: float | None
    """Scores of at least this value are anomalous. ``None``: unknown."""
    decision: str
    """``"anomaly"`` or ``"normal"``. Empty without a threshold."""


def score_tests(
    run_dir: str | Path,
    model: str | None = None,
    threshold: Threshold | None = None,
    trust: bool = False,
    best: bool = False,
) -> Path:
    """Score the test clips of a run with the clients' and the shared model, and write ``scores.csv``.

    For classes, transcripts, events and trials, predict the server's test clips instead, and write ``predictions.csv``
    (:mod:`raydfl.runs.inference.mistakes`).

    Args:
        run_dir: Run folder.
        model: Name of the model, as in :func:`raydfl.runs.inference.load_model`.
        threshold: Threshold for all clips. ``None``: the recorded thresholds.
        trust: Approve the code named by the run's configuration.
        best: Use the best round by ``run.best`` instead of the last round.

    Returns:
        Path of the file. Its rows have the fields of :class:`TestedClip`, sorted by falling score within each client.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run directory, or has no completed round.
        InputError: The objective predicts sets of classes or embeddings, the run has no test clips, or its data are at sites.
        DataError: Recordings or features are missing.
    """
    folder = local_run(run_dir)
    run = _Run(folder, trust, best)
    if run.config.data.sites:
        raise InputError(f"the test clips of {folder} are at its sites (data.sites). Score them there.")
    if run.method.objective.answers in ("class", "text", "intervals") or isinstance(run.method.objective, Verify):
        return predict_tests(run, model)
    if run.method.objective.answers != "score":
        trained = "embeddings" if run.method.objective.answers == "embedding" else "sets of classes"
        raise InputError(f"{folder} was trained for {trained}. Omit --test.")
    clips = list(_score_clips(run, model, threshold))
    if not clips:
        raise InputError(f"{folder} has no test clips. Hold some out with data.split.client_test or data.split.test.")
    return write_table(folder / SCORES_FILE, clips)


def read_scores(run_dir: Path) -> list[TestedClip]:
    """Read the scores written by :func:`score_tests`, or return an empty list."""
    path = run_dir / SCORES_FILE
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {"score": float(row["score"]), "threshold": float(row["threshold"]) if row["threshold"] else None}
    return [TestedClip(**row) for row in rows]


def _score_clips(run: _Run, model: str | None, threshold: Threshold | None) -> Iterator[TestedClip]:
    population = Population.load(run.run_dir / "population").use(run.config.data)
    first = 0
    for part, data in run.config.data.each.items():
        clients = population.parts[part]
        names = list_clips(data, run.config.run.seed)[0].column("clip").to_pylist()
        for number in range(len(clients)):
            test = clients.data(number).test
            if len(test):
                client = population.ids[first + number]
                yield from _apply_model(run.load_client(model, client), test, names, client, threshold)
        first += len(clients)
        if len(clients.test):
            shared = f"{part}:{model or next(iter(type(run.method).models))}" if part else model
            yield from _apply_model(run.load_shared(shared), clients.test, names, "", threshold)


def _apply_model(
    model: RunModel, test: Examples, names: Sequence[str], client: str, threshold: Threshold | None
) -> Iterator[TestedClip]:
    """Yield the clips of a test set with their scores, in falling order of the scores."""
    limit = model.threshold if threshold is None else threshold
    numbers, answers = answer_clips(model, test)
    scores, first = answers[:, 0], np.unique(test.clips, return_index=True)[1]
    labels = [test.classes[label] for label in test.labels[first].tolist()]
    for place in np.argsort(-scores, kind="stable").tolist():
        score = float(scores[place])
        yield TestedClip(
            client,
            names[int(numbers[place])],
            labels[place],
            score,
            None if limit is None else limit.value,
            "" if limit is None else limit.decision(score),
        )
