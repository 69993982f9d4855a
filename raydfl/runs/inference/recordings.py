"""Predictions of a run's model for recordings, through the run's own front end.

A recording is processed like a test clip: select the channel, resample, compute features, normalise, pad (raydfl.data.features),
cut into segments (raydfl.data.segment), apply softmax, average over the segments. There are two differences:

- ``normalise: group`` uses the statistics of all training clips, or with ``client`` of the client's group. A run with data at
  sites, or of an early version, has no statistics. It normalises each folder of recordings as one group.
- A custom data set's ``read`` is not called. Files are decoded as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from raydfl.core.errors import DataError, InputError, RaydflError
from raydfl.core.isolation import call_isolated
from raydfl.core.settings import FIRST_VIEW
from raydfl.data import Event, Examples, Frames, escape_path, has_decoder, read_audio, read_image, segments
from raydfl.data.features import (
    BY_TRAINING_CLIPS,
    FeatureExtractor,
    FeatureStore,
    FileFeatures,
    ImageFeatures,
    WaveFeatures,
    z_scores,
)
from raydfl.data.sets import PACKED_SUFFIXES, list_contents, list_recordings
from raydfl.objectives import count_frames_per_token
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.threshold import Threshold

Argument = TypeVar("Argument")

_log = logging.getLogger(__name__)

_NO_CLASS = ("text", "intervals", "embedding")
"""Kinds of answers without a most probable class."""
_BATCH = 64
LEAST_FRAMES = 64
"""Minimum number of frames of inputs with lengths. Shorter inputs are padded, so that pooling leaves at least one frame."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recording or an image in memory."""

    name: Path
    """Name for ``Prediction.file``."""
    values: np.ndarray
    """float32 [samples] or [samples, channels]; for images uint8 [rows, columns] or [rows, columns, channels]."""
    rate: int = 0
    """Sample rate in Hz. Unused for images."""


Source = Path | Recording


def get_name(source: Source) -> Path:
    """Return the name of a file or of a recording in memory."""
    return source if isinstance(source, Path) else source.name


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's prediction for one recording."""

    file: Path
    """The recording. Arrays are named ``array-0``, ``array-1`` ... in order."""
    classes: tuple[str, ...]
    probabilities: np.ndarray
    """float64 [classes], or [1] for a score. Probabilities of a single class add up to 1. For a transcript: their logarithms,
    [tokens, classes]. For events: [tokens, classes]. For an embedding: its values, [size], of length 1. Empty after an error."""
    error: str = ""
    """Reason why prediction failed. Empty: it succeeded."""
    answers: str = "class"
    """Kind of the objective's answer: "class", "set" (several classes), "score", "text" (a transcript), "intervals" (events) or
    "embedding"."""
    labels: tuple[str, ...] = ()
    """Predicted classes of a "set". Empty for a single class: see :attr:`label`."""
    text: str = ""
    """Transcript of the recording. Empty for other answers."""
    intervals: tuple[Event, ...] = ()
    """Events in the recording: onset and offset in seconds, and class. Empty for other answers."""
    model: str = ""
    """Name of the predicting model, if it varies between recordings."""
    threshold: Threshold | None = None
    """Threshold of the anomaly score. ``None``: unknown, or the answer is not a score."""

    @property
    def decision(self) -> str:
        """``"anomaly"`` or ``"normal"``. Empty without a score or a threshold."""
        return "" if self.threshold is None or self.error else self.threshold.decision(self.score)

    @property
    def score(self) -> float:
        """Anomaly score. NaN for objectives without a score, and after an error."""
        return float(self.probabilities[0]) if self.answers == "score" and not self.error else float("nan")

    @property
    def label(self) -> str:
        """The most probable class, the first among equals. Empty after an error, and for a transcript, events or an embedding."""
        return "" if self.error or self.answers in _NO_CLASS else self.top(1)[0][0]

    @property
    def probability(self) -> float:
        """Probability of :attr:`label`, 0 to 1. NaN after an error, and for a transcript, events or an embedding."""
        return float("nan") if self.error or self.answers in _NO_CLASS else self.top(1)[0][1]

    @property
    def embedding(self) -> np.ndarray:
        """Embedding of the recording, float64 [size], of length 1. Empty for other answers and after an error."""
        return self.probabilities if self.answers == "embedding" else np.zeros(0)

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the ``count`` most probable classes with their probabilities, most probable first."""
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(self.classes[index], float(self.probabilities[index])) for index in order.tolist()]


def predictions(model: RunModel, sources: Sequence[Source]) -> Iterator[Prediction]:
    """Yield the predictions for recordings, files and folders, in order.

    Without the statistics of ``normalise: group``, recordings are grouped by folder. Recordings in memory form one group.

    Raises:
        InputError: The objective predicts nothing about a recording, or the run was trained on features from a file.
    """
    if model.objective.answers == "none":
        raise InputError(
            f"model {model.name!r} of {model.run_dir} was trained for an objective without predictions. Fine-tune the model for "
            f"another objective, or read its outputs with raydfl.load_model or raydfl export."
        )
    front_end = FrontEnd(model)
    files = [source for source in sources if isinstance(source, Path)]
    paths, failures = recordings(files, isinstance(model.view.features, ImageFeatures))
    listed: list[Source] = [*paths, *(source for source in sources if isinstance(source, Recording))]
    for file, reason in failures.items():
        yield Prediction(file, model.classes, np.zeros(0), reason)
    if model.view.features.normalise in BY_TRAINING_CLIPS and model.statistics is None:
        folders: dict[Path, list[Source]] = {}
        for source in listed:
            folders.setdefault(get_name(source).absolute().parent, []).append(source)
        groups = list(folders.values())
    else:
        groups = [[source] for source in listed]
    for group in groups:
        named = {get_name(source): source for source in group}
        matrices = front_end.normalise(
            {file: attempt(front_end.matrix, source, file) for file, source in named.items()}
        )
        for file, matrix in matrices.items():
            values = matrix if isinstance(matrix, str) else attempt(front_end.probabilities, matrix, file)
            if isinstance(values, str):
                yield Prediction(file, model.classes, np.zeros(0), values)
            else:
                classes, objective = model.classes, model.objective
                chosen = objective.chosen(values) if objective.answers == "set" else np.zeros(len(classes), bool)
                labels = tuple(name for name, has in zip(classes, chosen, strict=True) if has)
                text = write_transcript(model, values) if objective.answers == "text" else ""
                yield Prediction(
                    file,
                    classes,
                    values,
                    answers=objective.answers,
                    labels=labels,
                    text=text,
                    intervals=tuple(list_intervals(model, values)) if objective.answers == "intervals" else (),
                    threshold=model.threshold,
                )


def recordings(files: Iterable[Path], pictures: bool = False) -> tuple[list[Path], dict[Path, str]]:
    """List recordings without duplicates, searching folders at any depth.

    Videos count as recordings and as images if a decoder is installed. Other files in folders cause a warning. Recordings in tar
    archives and in Parquet or Arrow files are listed by address (raydfl.data.packed).

    Args:
        files: Files, folders, archives and tables.
        pictures: Search for images instead of recordings.

    Returns:
        The recordings, and the error text of each unusable entry of ``files``.
    """
    listed: dict[Path, None] = {}
    failures: dict[Path, str] = {}
    for file in files:
        if not os.path.isdir(file):  # noqa: PTH112  (pathlib's raises below an unreadable folder)
            try:
                packed = file.suffix.lower() in PACKED_SUFFIXES
                listed.update(dict.fromkeys(map(Path, list_contents(file, pictures)) if packed else [file]))
            except DataError as error:
                failures[file] = remove_name(error, file)
            continue
        try:
            inside, left_out = list_recordings(file, pictures, films=has_decoder())
        except DataError as error:
            failures[file] = str(error)
            continue
        if left_out:
            _log.warning(left_out)
        if not inside:
            noun = "image" if pictures else "recording"
            failures[file] = f"the folder has no {noun} in a supported format"
        listed.update(dict.fromkeys(file / name for name in inside))
    return list(listed), failures


class FrontEnd:
    """Converter from a recording to the probabilities of the classes.

    Raises:
        InputError: The run was trained on features from a file.
    """

    def __init__(self, model: RunModel) -> None:
        self._model = model
        features = model.view.features
        if isinstance(features, FileFeatures):
            raise InputError(
                f"{model.run_dir} was trained on features from a file ({features.path.name}), so it cannot compute features of "
                "recordings. Use raydfl export, and feed the network with features from the same source."
            )
        self._settings = model.view.stored_features
        self._extractor = None
        if isinstance(self._settings, WaveFeatures):
            self._extractor = FeatureExtractor(self._settings)

    def matrix(self, source: Source) -> np.ndarray:
        """Compute the features of a recording, float32 [frames, bands], or the stored rows of an image.

        Features are not padded. They are normalised unless normalisation needs the statistics of a group.
        """
        if isinstance(self._settings, ImageFeatures):
            return self._settings.to_rows(source.values if isinstance(source, Recording) else _read(read_image, source))
        assert self._extractor is not None  # noqa: S101 - see __init__
        if isinstance(source, Recording):
            return self._extractor(source.values, source.rate)
        return self._extractor(*_read(read_audio, source))

    def answer_to(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """Compute the answers for samples, float64 [answers], normalised with the run's statistics.

        Args:
            samples: float32 [samples] or [samples, channels].
            rate: Sample rate in Hz.
        """
        assert self._extractor is not None  # noqa: S101 - an image has no samples
        name = Path()
        matrix = self.normalise({name: self._extractor(samples, rate)})[name]
        assert not isinstance(matrix, str)  # noqa: S101 - the input is not an error text
        return self.probabilities(matrix)

    def normalise(self, matrices: dict[Path, np.ndarray | str]) -> dict[Path, np.ndarray | str]:
        """Compute z-scores for ``normalise: group``, by the run's statistics or else by the matrices' own."""
        known = [matrix for matrix in matrices.values() if not isinstance(matrix, str)]
        if self._settings.normalise not in BY_TRAINING_CLIPS or not known:
            return matrices
        statistics = self._model.statistics
        if statistics is None:
            frames = np.concatenate(known).astype(np.float64)
            statistics = np.stack([frames.mean(axis=0), frames.std(axis=0)])
        return {
            file: matrix if isinstance(matrix, str) else z_scores(matrix, statistics)
            for file, matrix in matrices.items()
        }

    def probabilities(self, matrix: np.ndarray) -> np.ndarray:
        """Compute the answer averaged over segments: probabilities float64 [classes], or the score float64 [1]."""
        outputs = torch.cat([self._model.logits(*batch) for batch in self.inputs(matrix)])
        return answer(self._model, outputs, self._make_examples(matrix))

    def inputs(self, matrix: np.ndarray) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the network's inputs ``x`` and ``lengths`` for batches of a recording's segments."""
        for batch in self._make_examples(matrix).batches(_BATCH, None):
            x = batch.x
            if batch.lengths is not None and x.shape[1] < LEAST_FRAMES:
                x = torch.nn.functional.pad(x, (0, 0, 0, LEAST_FRAMES - x.shape[1]))
            yield x, batch.lengths

    def _make_examples(self, matrix: np.ndarray) -> Examples:
        """Cut a recording into segments, padded and stored like the run's test clips."""
        settings, segment = self._settings, self._model.view.test_segments
        padded = matrix
        if settings.frames is not None:
            padded = np.zeros((settings.frames, matrix.shape[1]), np.float32)
            padded[: len(matrix)] = matrix
        frames = padded.astype(settings.dtype)
        pipeline = self._model.view.pipeline
        stride = None if segment is None else segment.test_stride
        _, starts, counts = segments(np.array([len(frames)]), segment, stride)
        length = self._model.length
        if length is not None and (pipeline.window(starts, counts)[1] != length).any():
            length = None  # this recording has another number of frames than the run's clips
        offsets, lengths = np.array([0, len(frames)]), np.array([len(matrix)], np.int32)
        store = FeatureStore(self._model.run_dir, frames, offsets, lengths, settings.frames, {})
        zeros = np.zeros(len(starts), np.int64)  # recordings have no labels and no clip numbers
        view = Frames(store, starts, counts, length, pipeline)
        return Examples({FIRST_VIEW: view}, zeros, zeros, frame_seconds=settings.frame_seconds or 0.0)


def answer(model: RunModel, logits: Tensor, examples: Examples | None = None) -> np.ndarray:
    """Compute the objective's answer for a recording, float64 [classes], from the logits of its segments.

    Args:
        model: Model of a run.
        logits: Outputs of the model, float32 [segments, ...].
        examples: The segments. ``None``: the answer does not depend on their times.

    Raises:
        RaydflError: The answer is not finite.
    """
    objective, outputs = model.objective, logits.double()
    if examples is None:
        values: np.ndarray = objective.answer_of_clip(outputs).numpy()
    else:
        values = objective.answer_of_examples(outputs, examples, model.network).numpy()
    if not np.isfinite(values).all():
        raise RaydflError("the model's output is not finite: its training diverged")
    return values


def write_transcript(model: RunModel, values: np.ndarray) -> str:
    """Return the transcript of a recording from the objective's answer, float64 [tokens, classes]."""
    return model.objective.transcript(values, model.classes[1:], find_separator(model))  # the first class is the blank


def find_separator(model: RunModel) -> str:
    """Return the text between two units of a transcript."""
    return "" if model.data.label_sequences is None else model.data.label_sequences.joint


def find_token_seconds(model: RunModel) -> float:
    """Return the time between two tokens of a network with outputs at each token."""
    return count_frames_per_token(model.network) * (model.view.features.frame_seconds or 0.0)


def list_intervals(model: RunModel, values: np.ndarray) -> list[Event]:
    """Return the events in a recording from the objective's answer, float64 [tokens, classes]."""
    return model.objective.intervals(values, model.classes, model.network, model.view.features.frame_seconds or 0.0)


def attempt(function: Callable[[Argument], np.ndarray], argument: Argument, file: Path) -> np.ndarray | str:
    """Call a function for a recording, and return its result or the text of its error."""
    try:
        return function(argument)
    except RaydflError as error:
        return remove_name(error, file)


def remove_name(error: RaydflError, file: Path) -> str:
    """Return an error's text without the leading name of the file."""
    return str(error).removeprefix(f"{escape_path(file)}: ")


def _read(read: Callable[[str], Any], source: Path | str) -> Any:
    """Read a file in a helper process."""
    return call_isolated(read, str(source), where=str(source))
