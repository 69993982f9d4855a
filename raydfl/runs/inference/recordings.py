"""The answers of a run's model for recordings, by the run's own front end: a label with a probability, or its objective's answer.

A recording goes the way of a test clip: choose the channel, resample, log-mel or the run's own model, normalise, pad
(raydfl.data.features), cut into segments if the run does (raydfl.data.segment), softmax, mean over the segments. What differs:

- ``normalise: group`` takes the statistics of all training clips, with ``client`` those of the client's group; where a run does
  not know them (its data lie at sites, or an earlier version made it), the recordings of one folder count as one speaker's;
- what a data set's class of one's own does in ``read`` is not done: files are read as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from raydfl.core.errors import DataError, InputError, RaydflError
from raydfl.core.settings import FIRST_VIEW
from raydfl.data import Examples, Frames, has_decoder, read_audio, read_image, segments, shown_name
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
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.threshold import Threshold

Given = TypeVar("Given")

_log = logging.getLogger(__name__)

_BATCH = 64
LEAST_FRAMES = 64
"""Examples whose lengths the network is told are padded to that many frames: a short one then passes any pooling."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recording or an image that is in memory, in place of a file."""

    name: Path
    """What its prediction is called by."""
    values: np.ndarray
    """float32 [samples] or [samples, channels]; of an image uint8 [rows, columns] or [rows, columns, channels]."""
    rate: int = 0
    """Hz; of an image of no account."""


Source = Path | Recording


def name_of(source: Source) -> Path:
    """Return the name of a file or of what is in memory."""
    return source if isinstance(source, Path) else source.name


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's answer for one recording."""

    file: Path
    """The recording; of arrays ``array-0`` and so on, as they were given."""
    classes: tuple[str, ...]
    probabilities: np.ndarray
    """float64 [classes], of one class adding up to 1, or the one score; empty when nothing can be said of the recording."""
    error: str = ""
    """Why it cannot."""
    answers: str = "class"
    """What the run's objective says of a recording: its "class", its "set" of classes, or a "score"."""
    labels: tuple[str, ...] = ()
    """The classes that it has; where it is one class empty, see :attr:`label`."""
    model: str = ""
    """The model that answered, where that differs from recording to recording."""
    threshold: Threshold | None = None
    """The score from which on a recording is anomalous; ``None``: not known, or the answer is no score."""

    @property
    def decision(self) -> str:
        """``"anomaly"`` or ``"normal"`` of a score and a threshold; empty where there is neither."""
        return "" if self.threshold is None or self.error else self.threshold.decision(self.score)

    @property
    def score(self) -> float:
        """The strangeness, where the objective gives one; NaN when there is no score."""
        return float(self.probabilities[0]) if self.answers == "score" and not self.error else float("nan")

    @property
    def label(self) -> str:
        """The most probable class, the first of equals; empty when there is none."""
        return self.top(1)[0][0] if not self.error else ""

    @property
    def probability(self) -> float:
        """Probability of :attr:`label`, 0 to 1; NaN when there is none."""
        return self.top(1)[0][1] if not self.error else float("nan")

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the ``count`` most probable classes with their probabilities, most probable first."""
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(self.classes[index], float(self.probabilities[index])) for index in order.tolist()]


def predictions(model: RunModel, given: Sequence[Source]) -> Iterator[Prediction]:
    """Yield the predictions for these recordings and those in these folders, one after another in the order given.

    Where they are normalised by statistics of training clips and these are not known, folder by folder; what is in memory then
    counts as one folder.
    """
    if model.objective.answers == "none":
        raise InputError(
            f"model {model.name!r} of {model.run_dir} was trained for an objective that says nothing of a recording; use what it "
            f"has learnt as the beginning of another model, or take its outputs with raydfl.load_model or raydfl export"
        )
    front_end = FrontEnd(model)
    files = [source for source in given if isinstance(source, Path)]
    found, failures = recordings(files, isinstance(model.view.features, ImageFeatures))
    listed: list[Source] = [*found, *(source for source in given if isinstance(source, Recording))]
    for file, reason in failures.items():
        yield Prediction(file, model.classes, np.zeros(0), reason)
    if model.view.features.normalise in BY_TRAINING_CLIPS and model.statistics is None:
        folders: dict[Path, list[Source]] = {}
        for source in listed:
            folders.setdefault(name_of(source).absolute().parent, []).append(source)
        parts = list(folders.values())
    else:
        parts = [[source] for source in listed]
    for part in parts:
        sources = {name_of(source): source for source in part}
        matrices = front_end.normalised(
            {file: attempt(front_end.matrix, source, file) for file, source in sources.items()}
        )
        for file, matrix in matrices.items():
            answered = matrix if isinstance(matrix, str) else attempt(front_end.probabilities, matrix, file)
            if isinstance(answered, str):
                yield Prediction(file, model.classes, np.zeros(0), answered)
            else:
                classes, objective = model.classes, model.objective
                chosen = objective.chosen(answered) if objective.answers == "set" else np.zeros(len(classes), bool)
                labels = tuple(name for name, has in zip(classes, chosen, strict=True) if has)
                yield Prediction(
                    file, classes, answered, answers=objective.answers, labels=labels, threshold=model.threshold
                )


def recordings(files: Iterable[Path], pictures: bool = False) -> tuple[list[Path], dict[Path, str]]:
    """Return the recordings that are meant, folders searched at any depth, each once; and folders without any, with the reason.

    Films count as both, if what decodes them is installed. A warning says which other files there are in the folders. A recording
    in a tar archive, or in a Parquet or Arrow file, stands here with its address (raydfl.data.packed).

    Args:
        files: files and folders, and archives and tables that hold recordings.
        pictures: look for images in folders, not for recordings.
    """
    listed: dict[Path, None] = {}
    failures: dict[Path, str] = {}
    for file in files:
        if not os.path.isdir(file):  # noqa: PTH112  (pathlib's raises below a folder that cannot be opened)
            try:
                packed = file.suffix.lower() in PACKED_SUFFIXES
                listed.update(dict.fromkeys(map(Path, list_contents(file, pictures)) if packed else [file]))
            except DataError as error:
                failures[file] = without_name(error, file)
            continue
        try:
            inside, left_out = list_recordings(file, pictures, films=has_decoder())
        except DataError as error:
            failures[file] = str(error)
            continue
        if left_out:
            _log.warning(left_out)
        if not inside:
            what = "image" if pictures else "recording"
            failures[file] = f"there is no {what} of a kind that is read in this folder"
        listed.update(dict.fromkeys(file / name for name in inside))
    return list(listed), failures


class FrontEnd:
    """From a file to the probabilities of the classes."""

    def __init__(self, model: RunModel) -> None:
        self._model = model
        features = model.view.features
        if isinstance(features, FileFeatures):
            raise InputError(
                f"{model.run_dir} was trained on features from a file ({features.path.name}): nothing in it can make features of "
                "recordings; use raydfl export, and give the network features that were made in the same way"
            )
        self._settings = model.view.stored_features
        self._extractor = None
        if isinstance(self._settings, WaveFeatures):
            self._extractor = FeatureExtractor(self._settings)

    def matrix(self, source: Source) -> np.ndarray:
        """Features float32 [frames, bands], not padded; normalised unless that takes the group. An image's rows as stored."""
        if isinstance(self._settings, ImageFeatures):
            return self._settings.stored(source.values if isinstance(source, Recording) else read_image(str(source)))
        assert self._extractor is not None  # noqa: S101 - see __init__
        if isinstance(source, Recording):
            return self._extractor(source.values, source.rate)
        return self._extractor(*read_audio(source))

    def answer_to(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """Return what is said of samples, float64 [answers]; where training clips normalise, with the run's statistics.

        Args:
            samples: float32 [samples] or [samples, channels].
            rate: Hz.
        """
        assert self._extractor is not None  # noqa: S101 - an image has no samples
        given = Path()
        matrix = self.normalised({given: self._extractor(samples, rate)})[given]
        assert not isinstance(matrix, str)  # noqa: S101 - nor was one given
        return self.probabilities(matrix)

    def normalised(self, matrices: dict[Path, np.ndarray | str]) -> dict[Path, np.ndarray | str]:
        """With ``normalise: group``, the z-score with the run's statistics, else with those of the recordings given."""
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
        """Return float64 [classes]: the mean over the segments of what the objective answers: probabilities, or the score."""
        return answer(self._model, torch.cat([self._model.logits(*given) for given in self.inputs(matrix)]))

    def inputs(self, matrix: np.ndarray) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield what the network gets of a recording: x and lengths of some of its segments at a time."""
        for batch in self._examples(matrix).batches(_BATCH, None):
            x = batch.x
            if batch.lengths is not None and x.shape[1] < LEAST_FRAMES:
                x = torch.nn.functional.pad(x, (0, 0, 0, LEAST_FRAMES - x.shape[1]))
            yield x, batch.lengths

    def _examples(self, matrix: np.ndarray) -> Examples:
        """Return the recording's segments, stored and padded as those of the run's test clips are."""
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
            length = None  # the run's clips all had that many frames, this one has not
        offsets, lengths = np.array([0, len(frames)]), np.array([len(matrix)], np.int32)
        store = FeatureStore(self._model.run_dir, frames, offsets, lengths, settings.frames, {})
        nothing = np.zeros(len(starts), np.int64)
        return Examples({FIRST_VIEW: Frames(store, starts, counts, length, pipeline)}, nothing, nothing)


def answer(model: RunModel, logits: Tensor) -> np.ndarray:
    """Return what the objective answers for a recording, float64 [classes]: of the logits of its segments."""
    found: np.ndarray = model.objective.answer_of_clip(logits.double()).numpy()
    if not np.isfinite(found).all():
        raise RaydflError("the model's output is not finite: its training diverged")
    return found


def attempt(function: Callable[[Given], np.ndarray], given: Given, file: Path) -> np.ndarray | str:
    """Return what the function gives for a recording, or a text that says why it cannot."""
    try:
        return function(given)
    except RaydflError as error:
        return without_name(error, file)


def without_name(error: RaydflError, file: Path) -> str:
    """Return what an error says of a file, without its name."""
    return str(error).removeprefix(f"{shown_name(file)}: ")
