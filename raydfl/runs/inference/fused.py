"""Predictions of models that fuse several views, such as sound and images, with a student for missing views.

A recording is the file of ``data.features``. Its file for a view of ``data.views`` is

- the recording itself, if it is a video and the view reads images, or if both are sound from the same column;
- otherwise the file with the recording's stem in the folder of the view.

The fusion model predicts recordings with all views, the student the rest. ``Prediction.model`` names the model.
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
from raydfl.data import AbsentError, is_video
from raydfl.data.features import BY_TRAINING_CLIPS, ImageFeatures
from raydfl.runs.inference.model import RunFusion, RunModel, open_model
from raydfl.runs.inference.recordings import (
    FrontEnd,
    Prediction,
    Recording,
    Source,
    answer,
    get_name,
    predictions,
    recordings,
    remove_name,
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
    """Classify recordings with a trained model of a run.

    Args:
        run_dir: Run folder.
        files: Audio files that libsndfile decodes (wav, flac, ogg, opus, mp3, aiff ...), of any sample rate and number of
            channels, and folders of them.
        model: Name of the model. Default: the shared model, or with ``client`` the client's private model.
        client: Id of the client whose model is used. Default: the server's model.
        trust: Approve the code named by the run's configuration.
        best: Use the best round by ``run.best`` instead of the last round.
        views: File or folder of each further view by name, for a model of several views.

    Returns:
        One prediction per file. ``error`` is set for unreadable files.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run directory, or has no completed round.
        InputError: Unknown model or client, ``views`` for a model of one view, or a run without ``run.best``.
    """
    paths = [Path(file) for file in files]
    opened = open_model(run_dir, model, client, trust, best, bool(views))
    if isinstance(opened, RunModel):
        return list(predictions(opened, paths))
    return list(predict_fused(opened, paths, {name: Path(path) for name, path in (views or {}).items()}))


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
    """Classify recordings in memory with a trained model of a run.

    Args:
        run_dir: Run folder.
        arrays: Recordings, float32 [samples] or [samples, channels] in -1..1. For models of images: uint8 [rows, columns] or
            [rows, columns, 3].
        rate: Sample rate in Hz. Unused for images.
        views: Arrays of each further view by name, one per recording. ``None``: the view is missing.
        model: Name of the model. Default: the shared model, or with ``client`` the client's private model.
        client: Id of the client whose model is used. Default: the server's model.
        best: Use the best round by ``run.best`` instead of the last round.
        trust: Approve the code named by the run's configuration.

    Returns:
        One prediction per recording. ``error`` is set where prediction fails.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run directory, or has no completed round.
        InputError: Unknown model, client or view, arrays of a wrong shape or dtype, or a missing rate.
    """
    fusion = open_model(run_dir, model, client, trust, best, bool(views))
    if isinstance(fusion, RunModel):
        return list(predictions(fusion, [_make_recording(fusion, *pair, rate) for pair in enumerate(arrays)]))
    arrays_by_view = {FIRST_VIEW: arrays, **(views or {})}
    ends = make_front_ends(fusion, views or ())
    sources: list[dict[str, Recording | None]] = [{} for _ in arrays]
    for encoder in fusion.encoders:
        name = encoder.spec.view
        values = arrays_by_view.get(name, [None] * len(arrays))
        if len(values) != len(arrays):
            raise InputError(
                f"view {name!r}: {len(values)} arrays for {len(arrays)} recordings. Pass None for each missing array."
            )
        for index, array in enumerate(values):
            absent = array is None and name != FIRST_VIEW
            sources[index][name] = None if absent else _make_recording(encoder, index, array, rate)
    return [_predict_recording(fusion, source, ends) for source in sources]


def predict_fused(model: RunFusion, files: Sequence[Path], views: Mapping[str, Path]) -> Iterator[Prediction]:
    """Yield the predictions of a fusion model for recordings, in order.

    Args:
        model: Fusion model. Its student predicts recordings with missing views.
        files: Recordings of the first view, and folders of them.
        views: Folder with the files of each further view by name, or a single file. File stems match the recordings'.

    Raises:
        InputError: Unknown view, missing file or folder, or a view with unknown normalisation statistics.
    """
    ends = make_front_ends(model, views)
    for name, path in views.items():
        if not path.exists():
            raise InputError(f"view {name!r}: there is no file or folder {path}")
    further = {
        encoder.spec.view: _ViewFiles(encoder, views.get(encoder.spec.view))
        for encoder in model.encoders
        if encoder.spec.view != FIRST_VIEW
    }
    first = _get_first_encoder(model)
    listed, failures = recordings(files, isinstance(first.view.features, ImageFeatures))
    for file, reason in failures.items():
        yield Prediction(file, first.classes, np.zeros(0), reason)
    for file in listed:
        try:
            sources = {FIRST_VIEW: file, **{name: view.find_file(file) for name, view in further.items()}}
        except DataError as error:
            yield Prediction(file, first.classes, np.zeros(0), str(error))
            continue
        yield _predict_recording(model, sources, ends)


def make_front_ends(model: RunFusion, views: Iterable[str]) -> dict[str, FrontEnd]:
    """Build the front end of each view of a fusion model.

    Args:
        model: Fusion model.
        views: Names of the views with files or arrays.

    Raises:
        InputError: Unknown view, or a view with unknown normalisation statistics.
    """
    known = [encoder.spec.view for encoder in model.encoders if encoder.spec.view != FIRST_VIEW]
    for name in views:
        if name not in known:
            raise InputError(f"model {model.name!r} reads no view {name!r}; it reads {', '.join(known)}")
    for encoder in model.encoders:
        if encoder.view.features.normalise in BY_TRAINING_CLIPS and encoder.statistics is None:
            raise InputError(
                f"model {model.name!r}: the normalisation statistics of this run are unknown "
                f"(normalise: {encoder.view.features.normalise}). Choose a model of one view with --model."
            )
    return {encoder.spec.view: FrontEnd(encoder) for encoder in model.encoders}


def _get_first_encoder(model: RunFusion) -> RunModel:
    """Return the model of the first view."""
    return next(encoder for encoder in model.encoders if encoder.spec.view == FIRST_VIEW)


class _ViewFiles:
    """The files of a view of ``data.views``."""

    def __init__(self, encoder: RunModel, path: Path | None) -> None:
        self._images = isinstance(encoder.view.features, ImageFeatures)
        self._same = encoder.view.column == "path"
        self._files: dict[str, list[Path]] | None = None
        self._single = path if path is not None and not path.is_dir() else None
        if path is not None and self._single is None:
            self._files = {}
            for file in recordings([path], self._images)[0]:
                self._files.setdefault(file.stem, []).append(file)

    def find_file(self, file: Path) -> Path | None:
        """Return the view's file for a recording, or ``None`` if the recording lacks the view.

        Raises:
            DataError: Several files have the recording's stem.
        """
        if self._single is not None:
            return self._single
        if self._files is None:
            return file if (is_video(str(file)) if self._images else self._same) else None
        candidates = self._files.get(file.stem, [])
        if len(candidates) > 1:
            raise DataError(f"several files have its name: {', '.join(map(str, candidates[:3]))}")
        return candidates[0] if candidates else None


def _predict_recording(
    model: RunFusion, sources: Mapping[str, Source | None], ends: Mapping[str, FrontEnd]
) -> Prediction:
    """Predict one recording with the fusion model, or with its student if a view is missing.

    Args:
        model: Fusion model.
        sources: File or array by view. ``None``: the view is missing.
        ends: Front end by view, from :func:`make_front_ends`.
    """
    main, first = sources[FIRST_VIEW], _get_first_encoder(model)
    assert main is not None  # noqa: S101 - the first view is never missing
    file = get_name(main)
    matrices: dict[str, np.ndarray] = {}
    for name, source in sources.items():
        matrix = None if source is None else _compute_matrix(ends[name], source, optional=name != FIRST_VIEW)
        if source is None or matrix is None:
            (prediction,) = predictions(model.student, [main])
            return dataclasses.replace(prediction, model=model.student.name)
        if isinstance(matrix, str):
            where = f"view {name}: {get_name(source)}: " if name != FIRST_VIEW else ""
            return Prediction(file, first.classes, np.zeros(0), where + matrix)
        matrices[name] = matrix
    logits = [model.logits(batch) for batch in _make_batches(matrices, ends)]
    return Prediction(
        file, first.classes, answer(first, torch.cat(logits)), answers=first.objective.answers, model=model.name
    )


def _compute_matrix(end: FrontEnd, source: Source, optional: bool) -> np.ndarray | str | None:
    """Return the features of a file or array, an error text, or ``None`` if a video lacks an optional view."""
    path = get_name(source)
    try:
        matrix: np.ndarray | str = end.matrix(source)
    except AbsentError as error:
        return None if optional else remove_name(error, path)
    except RaydflError as error:
        return remove_name(error, path)
    return end.normalise({path: matrix})[path]


def _make_batches(matrices: Mapping[str, np.ndarray], ends: Mapping[str, FrontEnd]) -> Iterator[Batch]:
    """Yield the segments of the first view, each with the complete input of every further view."""
    further = {
        name: _unpack_single(ends[name].inputs(matrix)) for name, matrix in matrices.items() if name != FIRST_VIEW
    }
    for x, lengths in ends[FIRST_VIEW].inputs(matrices[FIRST_VIEW]):
        count, first_lengths = len(x), {} if lengths is None else {FIRST_VIEW: lengths}
        yield Batch(
            {FIRST_VIEW: x, **{name: view.expand(count, *view.shape[1:]) for name, (view, _) in further.items()}},
            torch.zeros(count, dtype=torch.int64),
            {**first_lengths, **{name: size.expand(count) for name, (_, size) in further.items() if size is not None}},
            {name: torch.ones(count, dtype=torch.bool) for name in further},
        )


def _unpack_single(values: Iterable[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    (only,) = values
    return only


def _make_recording(model: RunModel, index: int, array: ArrayLike | None, rate: int | None) -> Recording:
    """Check an array, and wrap it as a recording for the model's view."""
    name, values = Path(f"array-{index}"), np.asarray(array)
    if isinstance(model.view.features, ImageFeatures):
        return Recording(name, values)  # ImageFeatures checks the shape later
    if rate is None:
        raise InputError("the rate of the recordings is missing. Pass it in Hz, for example rate=16000.")
    if values.ndim not in (1, 2) or not np.issubdtype(values.dtype, np.floating):
        advice = (
            "Divide integers by 2 ** (bits - 1)."
            if np.issubdtype(values.dtype, np.integer)
            else "Pass several recordings as a list."
        )
        raise InputError(
            f"a recording must be float32 [samples] or [samples, channels] in -1..1, not {values.dtype} {list(values.shape)}. "
            f"{advice}"
        )
    if values.ndim == 2 and values.shape[1] > values.shape[0]:
        raise InputError(
            f"an array {list(values.shape)} would be {values.shape[0]} samples of {values.shape[1]} channels. Pass several "
            f"recordings as list(array), and put channels last with array.T."
        )
    return Recording(name, values.astype(np.float32, copy=False), rate)
