"""The answers of a model that fuses several views, such as sound and picture, for what there is of each recording.

A recording is the file of ``data.features``. Its file of a view of ``data.views`` is

- the recording itself, if that is a film and the view reads images, or if both are sound and of one column;
- else the file in the folder given for the view whose name is the recording's, but for the ending.

Where a recording has all views the fusion answers, where it lacks one the student. Which of them it was stands in the prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from raydfl.core.errors import DataError, InputError, RaydflError
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch
from raydfl.data import AbsentError, is_film
from raydfl.data.features import BY_TRAINING_CLIPS, ImageFeatures
from raydfl.runs.inference.model import RunFusion, RunModel, open_model
from raydfl.runs.inference.recordings import (
    FrontEnd,
    Prediction,
    Recording,
    Source,
    answer,
    name_of,
    predictions,
    recordings,
    without_name,
)


def classify(
    run_dir: str | Path,
    files: Iterable[str | Path],
    *,
    model: str | None = None,
    client: str | None = None,
    trust: bool = False,
    best: bool = False,
    views: Mapping[str, str | Path] | None = None,
) -> list[Prediction]:
    """Classify recordings with a trained model of a run; one result for each file, also for those that cannot be read.

    Args:
        run_dir: the run's folder.
        files: recordings of any kind that libsndfile decodes (wav, flac, ogg, opus, mp3, aiff ...), of any rate and number of
            channels, and folders of them.
        model: by default the shared one, or with ``client`` the one that the client does not share.
        client: whose model; by default the server's.
        trust: approves the code that the run's configuration names.
        best: whether it is the best round's, by ``run.best``; by default the last round's.
        views: with a model that reads several views, by name the file or the folder of theirs: see
            :func:`fused_predictions`.

    Raises:
        RunDirectoryError: no run directory, or no round is completed yet.
        InputError: no such model or client, views for a model that reads one, or the run keeps no best round.
    """
    given = [Path(file) for file in files]
    opened = open_model(run_dir, model, client, trust, best, bool(views))
    if isinstance(opened, RunModel):
        return list(predictions(opened, given))
    return list(fused_predictions(opened, given, {name: Path(path) for name, path in (views or {}).items()}))


def classify_arrays(
    run_dir: str | Path,
    arrays: Sequence[ArrayLike],
    rate: int | None = None,
    *,
    views: Mapping[str, Sequence[ArrayLike | None]] | None = None,
    model: str | None = None,
    client: str | None = None,
    best: bool = False,
    trust: bool = False,
) -> list[Prediction]:
    """Return a prediction for each recording in memory, also for those of which nothing can be said.

    Args:
        run_dir: the run's folder.
        arrays: recordings, float32 [samples] or [samples, channels], -1..1; where the model reads images, uint8 [rows, columns] or
            [rows, columns, 3].
        rate: of the recordings in Hz; of images none.
        views: with a model that reads several views, by name an array for each recording; ``None``: absent.
        model: by default the shared one, or with ``client`` the one that the client does not share.
        client: whose model; by default the server's.
        best: whether it is the best round's, by ``run.best``; by default the last round's.
        trust: approves the code that the run's configuration names.

    Raises:
        RunDirectoryError: no run directory, or no round is completed yet.
        InputError: no such model, client or view; arrays that are no recordings; or no rate.
    """
    fusion = open_model(run_dir, model, client, trust, best, bool(views))
    if isinstance(fusion, RunModel):
        return list(predictions(fusion, [_recording(fusion, *each, rate) for each in enumerate(arrays)]))
    given = {FIRST_VIEW: arrays, **(views or {})}
    ends = front_ends(fusion, views or ())
    sources: list[dict[str, Recording | None]] = [{} for _ in arrays]
    for encoder in fusion.encoders:
        name = encoder.spec.view
        values = given.get(name, [None] * len(arrays))
        if len(values) != len(arrays):
            raise InputError(
                f"view {name!r}: {len(values)} arrays for {len(arrays)} recordings; give None where it is absent"
            )
        for index, array in enumerate(values):
            absent = array is None and name != FIRST_VIEW
            sources[index][name] = None if absent else _recording(encoder, index, array, rate)
    return [fused_prediction(fusion, each, ends) for each in sources]


def fused_predictions(model: RunFusion, files: Sequence[Path], views: Mapping[str, Path]) -> Iterator[Prediction]:
    """Yield the predictions for these recordings and those in these folders, one after another in the order given.

    Args:
        model: it answers where all views are there; else its student does.
        files: of the first view: recordings, and folders of them.
        views: by name a folder in which a view's files lie, with the recordings' names, or a file.

    Raises:
        InputError: a view that the model does not read, or one whose normalisation is not known.
    """
    ends = front_ends(model, views)
    for name, path in views.items():
        if not path.exists():
            raise InputError(f"view {name!r}: there is no file or folder {path}")
    others = {
        encoder.spec.view: _Files(encoder, views.get(encoder.spec.view))
        for encoder in model.encoders
        if encoder.spec.view != FIRST_VIEW
    }
    first = _first(model)
    listed, failures = recordings(files, isinstance(first.view.features, ImageFeatures))
    for file, reason in failures.items():
        yield Prediction(file, first.classes, np.zeros(0), reason)
    for file in listed:
        try:
            sources = {FIRST_VIEW: file, **{name: view.of(file) for name, view in others.items()}}
        except DataError as error:
            yield Prediction(file, first.classes, np.zeros(0), str(error))
            continue
        yield fused_prediction(model, sources, ends)


def front_ends(model: RunFusion, views: Iterable[str]) -> dict[str, FrontEnd]:
    """Return the way into the model of each view that it reads.

    Args:
        model: it answers.
        views: names of views of which something is given.

    Raises:
        InputError: a view that the model does not read, or one whose normalisation is not known.
    """
    known = [encoder.spec.view for encoder in model.encoders if encoder.spec.view != FIRST_VIEW]
    for name in views:
        if name not in known:
            raise InputError(f"model {model.name!r} reads no view {name!r}; it reads {', '.join(known)}")
    for encoder in model.encoders:
        if encoder.view.features.normalise in BY_TRAINING_CLIPS and encoder.statistics is None:
            raise InputError(
                f"model {model.name!r}: this run does not know with which statistics a recording is normalised "
                f"(normalise: {encoder.view.features.normalise}); choose one model with --model"
            )
    return {encoder.spec.view: FrontEnd(encoder) for encoder in model.encoders}


def _first(model: RunFusion) -> RunModel:
    """Return the model of the first view."""
    return next(encoder for encoder in model.encoders if encoder.spec.view == FIRST_VIEW)


class _Files:
    """The files of a view of ``data.views``."""

    def __init__(self, encoder: RunModel, given: Path | None) -> None:
        self._images = isinstance(encoder.view.features, ImageFeatures)
        self._same = encoder.view.column == "path"
        self._files: dict[str, list[Path]] | None = None
        self._one = given if given is not None and not given.is_dir() else None
        if given is not None and self._one is None:
            self._files = {}
            for file in recordings([given], self._images)[0]:
                self._files.setdefault(file.stem, []).append(file)

    def of(self, file: Path) -> Path | None:
        """Return the file of a recording, or ``None`` where it has none.

        Raises:
            DataError: several have its name.
        """
        if self._one is not None:
            return self._one
        if self._files is None:
            return file if (is_film(str(file)) if self._images else self._same) else None
        found = self._files.get(file.stem, [])
        if len(found) > 1:
            raise DataError(f"several files have its name: {', '.join(map(str, found[:3]))}")
        return found[0] if found else None


def fused_prediction(
    model: RunFusion, sources: Mapping[str, Source | None], ends: Mapping[str, FrontEnd]
) -> Prediction:
    """Return the prediction for one recording: the fusion's, or that of its student where a view is absent.

    Args:
        model: it answers.
        sources: by view; ``None``: absent.
        ends: see :func:`front_ends`.
    """
    given, first = sources[FIRST_VIEW], _first(model)
    assert given is not None  # noqa: S101 - nobody asks about nothing
    file = name_of(given)
    matrices: dict[str, np.ndarray] = {}
    for name, source in sources.items():
        matrix = None if source is None else _matrix(ends[name], source, optional=name != FIRST_VIEW)
        if source is None or matrix is None:
            (found,) = predictions(model.student, [given])
            return dataclasses.replace(found, model=model.student.name)
        if isinstance(matrix, str):
            where = f"view {name}: {name_of(source)}: " if name != FIRST_VIEW else ""
            return Prediction(file, first.classes, np.zeros(0), where + matrix)
        matrices[name] = matrix
    logits = [model.logits(batch) for batch in _batches(matrices, ends)]
    return Prediction(
        file, first.classes, answer(first, torch.cat(logits)), answers=first.objective.answers, model=model.name
    )


def _matrix(end: FrontEnd, source: Source, optional: bool) -> np.ndarray | str | None:
    """Return the features of a file or array, why there are none, or ``None`` where a film lacks what is ``optional``."""
    path = name_of(source)
    try:
        matrix: np.ndarray | str = end.matrix(source)
    except AbsentError as error:
        return None if optional else without_name(error, path)
    except RaydflError as error:
        return without_name(error, path)
    return end.normalised({path: matrix})[path]


def _batches(matrices: Mapping[str, np.ndarray], ends: Mapping[str, FrontEnd]) -> Iterator[Batch]:
    """Yield a recording's segments of the first view, each with the whole of the others."""
    others = {name: _only(ends[name].inputs(matrix)) for name, matrix in matrices.items() if name != FIRST_VIEW}
    for x, lengths in ends[FIRST_VIEW].inputs(matrices[FIRST_VIEW]):
        count, of_first = len(x), {} if lengths is None else {FIRST_VIEW: lengths}
        yield Batch(
            {FIRST_VIEW: x, **{name: own.expand(count, *own.shape[1:]) for name, (own, _) in others.items()}},
            torch.zeros(count, dtype=torch.int64),
            {**of_first, **{name: own.expand(count) for name, (_, own) in others.items() if own is not None}},
            {name: torch.ones(count, dtype=torch.bool) for name in others},
        )


def _only(values: Iterable[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    (only,) = values
    return only


def _recording(model: RunModel, index: int, array: ArrayLike | None, rate: int | None) -> Recording:
    """Return one array, checked, for a model of its view."""
    name, values = Path(f"array-{index}"), np.asarray(array)
    if isinstance(model.view.features, ImageFeatures):
        return Recording(name, values)  # of what shape it is the features check
    if rate is None:
        raise InputError("the rate of the recordings is missing; give it in Hz: rate=16000")
    if values.ndim not in (1, 2) or not np.issubdtype(values.dtype, np.floating):
        advice = (
            "divide whole numbers by 2 ** (bits - 1)"
            if np.issubdtype(values.dtype, np.integer)
            else "several are a list"
        )
        raise InputError(
            f"a recording is float32 [samples] or [samples, channels], -1..1, not {values.dtype} {list(values.shape)}; {advice}"
        )
    if values.ndim == 2 and values.shape[1] > values.shape[0]:
        raise InputError(
            f"an array {list(values.shape)} would be {values.shape[0]} samples of {values.shape[1]} channels; several recordings "
            f"are a list: list(array), and channels come last: array.T"
        )
    return Recording(name, values.astype(np.float32, copy=False), rate)
