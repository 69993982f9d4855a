"""Classification of recordings and images that are in memory, as a notebook or a service has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from raydfl.core.errors import InputError
from raydfl.core.settings import FIRST_VIEW
from raydfl.data.features import ImageFeatures
from raydfl.runs.inference.fused import front_ends, fused_prediction
from raydfl.runs.inference.model import RunModel, load_fusion, load_model
from raydfl.runs.inference.recordings import Prediction, Recording, predictions


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
    fusion = None if model is None else load_fusion(run_dir, model, trust, best)
    if fusion is None:
        if views:
            raise InputError("arrays of further views go with a model that reads several views, such as fusion")
        loaded = load_model(run_dir, model, client, trust, best)
        return list(predictions(loaded, [_recording(loaded, *each, rate) for each in enumerate(arrays)]))
    if client is not None:
        raise InputError(f"model {model!r} is the server's alone; leave the client out")
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
