"""Scores of a run's own test clips, one by one, for those who may see them: the record holds no clip of a client's.

They need the recordings' list and the cached features, so they are made where a run's data lie, when asked for. The file
``scores.csv`` in the run's folder has them; the report shows it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch

from raydfl.core.errors import InputError
from raydfl.core.files import write_durably
from raydfl.data import Examples, Population, list_clips
from raydfl.engine.storage import local_run
from raydfl.runs.inference.model import RunModel, _Run
from raydfl.runs.inference.threshold import Threshold

SCORES_FILE = "scores.csv"
_BATCH = 64


@dataclass(frozen=True, slots=True)
class TestedClip:
    """A test clip and what a model says of it."""

    client: str
    """Whose; empty: the server's."""
    clip: str
    """Its name in the list of recordings."""
    label: str
    score: float
    threshold: float | None
    """From which score on it is anomalous; ``None``: not known."""
    decision: str
    """``"anomaly"``, ``"normal"``, or empty where there is no threshold."""


def score_tests(
    run_dir: str | Path,
    model: str | None = None,
    threshold: Threshold | None = None,
    trust: bool = False,
    best: bool = False,
) -> Path:
    """Score the test clips of a run, each client's by the client's model and the server's by the shared one; write ``scores.csv``.

    Args:
        run_dir: the run's folder.
        model: see :func:`raydfl.runs.inference.load_model`.
        threshold: of all; ``None``: the recorded ones.
        trust: see :func:`raydfl.runs.inference.load_model`.
        best: see :func:`raydfl.runs.inference.load_model`.

    Returns:
        The file. Its rows are those of :class:`TestedClip`, the highest score of each client first.

    Raises:
        RunDirectoryError: no run directory, or no round is completed yet.
        InputError: the run gives no scores, has no test clips here, or its data lie at sites.
        DataError: recordings or features are no longer there.
    """
    folder = local_run(run_dir)
    run = _Run(folder, trust, best)
    if run.method.objective.answers != "score":
        raise InputError(f"{folder} was not trained for an objective that gives scores; leave out --test")
    if run.config.data.sites:
        raise InputError(f"the test clips of {folder} lie at its sites (data.sites); score them there")
    clips = list(_scored(run, model, threshold))
    if not clips:
        raise InputError(f"{folder} has no test clips; hold some out with data.split.client_test or data.split.test")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(TestedClip)])
    writer.writerows(astuple(clip) for clip in clips)
    path = folder / SCORES_FILE
    write_durably(path, text.getvalue().encode())
    return path


def read_scores(run_dir: Path) -> list[TestedClip]:
    """Return what :func:`score_tests` wrote; nothing where it was not asked for."""
    path = run_dir / SCORES_FILE
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            TestedClip(
                row["client"],
                row["clip"],
                row["label"],
                float(row["score"]),
                float(row["threshold"]) if row["threshold"] else None,
                row["decision"],
            )
            for row in csv.DictReader(file)
        ]


def _scored(run: _Run, model: str | None, threshold: Threshold | None) -> Iterator[TestedClip]:
    population = Population.load(run.run_dir / "population").use(run.config.data)
    first = 0
    for part, data in run.config.data.each.items():
        of_part = population.parts[part]
        names = list_clips(data, run.config.run.seed)[0].column("clip").to_pylist()
        for number in range(len(of_part)):
            test = of_part.data(number).test
            if len(test):
                client = population.ids[first + number]
                yield from _of_model(run.clients_model(model, client), test, names, client, threshold)
        first += len(of_part)
        if len(of_part.test):
            shared = f"{part}:{model or next(iter(type(run.method).models))}" if part else model
            yield from _of_model(run.shared_model(shared), of_part.test, names, "", threshold)


def _of_model(
    model: RunModel, test: Examples, names: Sequence[str], client: str, threshold: Threshold | None
) -> Iterator[TestedClip]:
    """Yield the clips of one test, the highest score first."""
    used = model.threshold if threshold is None else threshold
    outputs = torch.cat([model.logits(batch.x, batch.lengths) for batch in test.batches(_BATCH, None)]).double()
    numbers, first = np.unique(test.clips, return_index=True)
    scores = [
        float(model.objective.answer_of_clip(outputs[torch.from_numpy(test.clips == number)])[0]) for number in numbers
    ]
    labels = [test.classes[label] for label in test.labels[first].tolist()]
    for place in np.argsort(-np.array(scores), kind="stable").tolist():
        score = scores[place]
        yield TestedClip(
            client,
            names[int(numbers[place])],
            labels[place],
            score,
            None if used is None else used.value,
            "" if used is None else used.decision(score),
        )
