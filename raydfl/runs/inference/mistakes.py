"""Predictions of a run's own test clips, and the recordings of the worst mistakes, to listen to in the report.

``predictions.csv`` in the run's folder has a row for each test clip of the server, or for each of the worst trials of a
verification, with the prediction of the shared model. The folder ``mistakes`` has the recordings with the worst predictions. Both
need the list of recordings and the feature cache, so they are written on request on a machine with the data.
"""

from __future__ import annotations

import csv
import io
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import soundfile
import torch
from scipy.signal import resample_poly
from sklearn.metrics import roc_curve

from raydfl.core.errors import InputError, RaydflError
from raydfl.core.files import write_durably
from raydfl.core.metrics import count_edits
from raydfl.data import DataSettings, Event, Examples, Population, join_units, list_clips, write_events
from raydfl.data.features import WaveFeatures
from raydfl.objectives import Verify
from raydfl.runs.inference.model import RunModel, _Run
from raydfl.runs.inference.recordings import answer, list_intervals, write_transcript

PREDICTIONS_FILE = "predictions.csv"
MISTAKES_FOLDER = "mistakes"
_RECORDINGS = 12
"""Number of recordings to keep."""
_TRIALS = 1000
"""Number of trials to keep, the worst first."""
_PAUSE = 0.5
"""Seconds between the clips of a trial."""
_SECONDS = 10
"""Maximum length of a kept recording."""
_BATCH = 64


@dataclass(frozen=True, slots=True)
class PredictedClip:
    """A test clip of the server, or a trial of two clips, with its prediction."""

    clip: str
    """Name in the list of recordings, after the part's name and a colon with ``data.parts``. Names of a trial are joined."""
    group: str
    """Owner. Empty: unknown, or a trial."""
    label: str
    predicted: str
    probability: float
    """Probability of the predicted class. Transcript: geometric mean over its tokens. Events: mean probability of the decisions at
    all tokens. Trial: cosine of both embeddings."""
    recording: str = ""
    """File in the folder ``mistakes``. Empty: not kept."""


def predict_tests(run: _Run, model: str | None = None) -> Path:
    """Predict the server's test clips, and write ``predictions.csv`` and ``mistakes``.

    Args:
        run: The run.
        model: Name of the shared model, as in :func:`raydfl.runs.inference.load_model`.

    Returns:
        Path of ``predictions.csv``.

    Raises:
        InputError: The server has no test clips, or the model is not shared.
        DataError: The list of recordings or the features are missing.
    """
    population = Population.load(run.run_dir / "population").use(run.config.data)
    folder = run.run_dir / MISTAKES_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    clips: list[PredictedClip] = []
    for part, data in run.config.data.each.items():
        test = population.parts[part].test
        if len(test):
            shared = f"{part}:{model or next(iter(type(run.method).models))}" if part else model
            manifest = list_clips(data, run.config.run.seed)[0]
            clips += _predict(run.load_shared(shared), test, manifest, data, part, folder)
    if not clips:
        raise InputError(f"{run.run_dir} has no test clips at the server. Hold some out with data.split.test.")
    return write_table(run.run_dir / PREDICTIONS_FILE, clips)


def read_predictions(run_dir: Path) -> list[PredictedClip]:
    """Read the predictions written by :func:`predict_tests`, or return an empty list."""
    path = run_dir / PREDICTIONS_FILE
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = [{**row, "probability": float(row["probability"])} for row in csv.DictReader(file)]
    return [PredictedClip(**row) for row in rows]


def write_table(path: Path, clips: Sequence[Any]) -> Path:
    """Write instances of a dataclass as the rows of a CSV file, and return its path."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(clips[0])])
    writer.writerows(astuple(clip) for clip in clips)
    write_durably(path, text.getvalue().encode())
    return path


def _predict(
    model: RunModel, test: Examples, manifest: pa.Table, data: DataSettings, part: str, folder: Path
) -> Iterator[PredictedClip]:
    """Yield the clips of a test set, the worst mistakes first: the most confident, or those with the most errors."""
    trials = isinstance(model.objective, Verify)
    compare = _detect if test.events is not None else _transcribe if test.sequences is not None else _classify
    numbers, truth, predicted, probabilities, errors = (_verify if trials else compare)(model, test)
    order = np.lexsort((-probabilities, -errors))[: _TRIALS if trials else None]
    each = 2 if trials else 1
    listed = manifest.take(numbers[order].ravel()).to_pylist()
    rows = [listed[start : start + each] for start in range(0, len(listed), each)]
    wrong = min(_RECORDINGS, int(np.count_nonzero(errors))) if isinstance(data.features, WaveFeatures) else 0
    sounds = iter(data.source.read_clips("read", [clip for clips in rows[:wrong] for clip in clips]))
    for rank, (place, clips) in enumerate(zip(order.tolist(), rows, strict=True)):
        name = " and ".join(f"{part}:{clip['clip']}" if part else clip["clip"] for clip in clips)
        heard = [next(sounds) for _ in clips] if rank < wrong else []
        recording = ""
        if heard and all(isinstance(sound, tuple) for sound in heard):  # an error if only the features are cached
            recording = f"{part}-{rank:02}.wav" if part else f"{rank:02}.wav"
            folder.mkdir(exist_ok=True)
            samples, rate = _join_sounds(cast(Any, heard))
            soundfile.write(folder / recording, samples, rate, subtype="PCM_16")
        yield PredictedClip(
            name,
            "" if trials else clips[0]["group"] or "",
            truth[place],
            predicted[place],
            round(float(probabilities[place]), 4),
            recording,
        )


def _join_sounds(sounds: Sequence[tuple[np.ndarray, int]]) -> tuple[np.ndarray, int]:
    """Join the beginnings of recordings, with a pause between them: float [samples], and the rate of the first one in Hz."""
    rate = sounds[0][1]
    pause = np.zeros(round(_PAUSE * rate))
    parts = [samples.reshape(len(samples), -1)[: _SECONDS * own, 0] for samples, own in sounds]
    rates = [own for _, own in sounds]
    parts = [part if own == rate else resample_poly(part, rate, own) for part, own in zip(parts, rates, strict=True)]
    return np.concatenate([part for sound in parts for part in (pause, sound)][1:]), rate


_Answers = tuple[np.ndarray, Sequence[str], Sequence[str], np.ndarray, np.ndarray]
"""Clips int64 [clips] or [trials, 2], true and predicted labels, and float [clips] each: probability, errors (0: correct)."""


def answer_clips(model: RunModel, test: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Compute the answers of clips: int64 [clips] in ascending order, and float64 [clips, answers]."""
    outputs = torch.cat([model.logits(batch.x, batch.lengths) for batch in test.batches(_BATCH, None)]).double()
    numbers = np.unique(test.clips)
    answers = [model.objective.answer_of_clip(outputs[torch.from_numpy(test.clips == number)]) for number in numbers]
    return numbers, np.stack(answers)


def _classify(model: RunModel, test: Examples) -> _Answers:
    numbers, answers = answer_clips(model, test)
    predicted, truth = answers.argmax(axis=1), test.labels[np.unique(test.clips, return_index=True)[1]]
    names, answered = ([test.classes[label] for label in labels.tolist()] for labels in (truth, predicted))
    return numbers, names, answered, answers.max(axis=1), (predicted != truth).astype(float)


def _transcribe(model: RunModel, test: Examples) -> _Answers:
    truth = [join_units(test.classes, row, test.joint) for row in test.targets(test.labels)]
    predicted, probabilities = [], []
    for batch in test.batches(_BATCH, None):
        for outputs in model.logits(batch.x, batch.lengths).double().numpy():
            predicted.append(write_transcript(model, outputs))
            probabilities.append(np.exp(outputs.max(axis=1).mean()))
    errors = [count_edits(*pair) / max(1, len(pair[0])) for pair in zip(truth, predicted, strict=True)]
    return test.clips, truth, predicted, np.array(probabilities), np.array(errors)


def _detect(model: RunModel, test: Examples) -> _Answers:
    """Compare events. See :func:`_count_wrong_segments` for the errors."""
    numbers, truth, predicted, probabilities, errors = np.unique(test.clips), [], [], [], []
    for number in numbers.tolist():
        examples = test.take(np.flatnonzero(test.clips == number))
        outputs = torch.cat([model.logits(batch.x, batch.lengths) for batch in examples.batches(len(examples), None)])
        values = answer(model, outputs, examples)
        events = [
            (onset, offset, test.classes[int(label)])
            for onset, offset, label in cast(np.ndarray, test.events)[examples.labels[0]].tolist()
            if label >= 0
        ]
        found = list_intervals(model, values)
        truth.append(write_events(events))
        predicted.append(write_events(found))
        probabilities.append(np.maximum(values, 1 - values).mean())
        errors.append(_count_wrong_segments(events, found))
    return numbers, truth, predicted, np.array(probabilities), np.array(errors)


def _verify(model: RunModel, test: Examples) -> _Answers:
    """Decide the trials at the threshold of equal errors. Errors are distances of cosines to the threshold.

    Raises:
        RaydflError: A cosine is not finite.
    """
    objective = cast(Verify, model.objective)
    numbers, unit = answer_clips(model, test)
    left, right, same = objective.list_trials(test, np.unique(test.clips, return_index=True)[1])
    cosines = (unit[left] * unit[right]).sum(axis=1)
    if not np.isfinite(cosines).all():
        raise RaydflError(
            f"{model.description}: the embedding of a test clip is not finite, because its training diverged. Lower "
            f"train.optimiser.lr and train again."
        )
    false_positives, true_positives, thresholds = roc_curve(same, cosines, drop_intermediate=False)
    threshold = thresholds[np.abs(1 - true_positives - false_positives).argmin()]
    accepted = cosines >= threshold
    names = [["same speaker" if value else "different speakers" for value in values] for values in (same, accepted)]
    errors = np.where(accepted == same, 0, np.maximum(np.abs(cosines - threshold), 1e-12))
    return np.stack([numbers[left], numbers[right]], axis=1), names[0], names[1], cosines, errors


def _count_wrong_segments(truth: Sequence[Event], found: Sequence[Event]) -> float:
    """Return the fraction of wrong segments of 1 s among the segments of either, or of wrong classes without times."""
    weak = any(math.isinf(onset) for onset, *_ in truth)
    sets = [
        {
            (second, label)
            for onset, offset, label in events
            for second in ([0] if weak else range(int(onset), math.ceil(offset - 1e-6)))
        }
        for events in (truth, found)
    ]
    return len(sets[0] ^ sets[1]) / max(1, len(sets[0] | sets[1]))
