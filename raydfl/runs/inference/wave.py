"""A model of a run as an ONNX graph that takes samples and gives the answer: front end, network, mean over segments.

The graph does what :mod:`raydfl.runs.inference.recordings` does with a recording once its channel is chosen and it is resampled,
step by step, and is compared with that before it is written. All recordings of a batch are equally long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto

from raydfl.core.errors import DataError, InputError
from raydfl.data.features import EPSILON, LEAST_SQUARES, FeatureSettings
from raydfl.objectives import Classify, Objective
from raydfl.runs.inference.graph import TOLERANCE, Graph, output_names
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.nodes import Nodes, Value
from raydfl.runs.inference.recordings import LEAST_FRAMES, FrontEnd
from raydfl.runs.inference.spectrum import Spectrum, settings_of, spectrum_of

_SECONDS = (0.004, 0.31, 1.0, 2.37)
"""Lengths of the recordings on which graph and raydfl are compared."""
_BATCH = 2


def answer_name(objective: Objective) -> str:
    """Return what the output of a graph is called that takes samples: the last of those of a graph that takes features."""
    return output_names(objective)[-1]


def takes_lengths(model: RunModel) -> bool:
    """Return whether the network has to be told how many frames count: where recordings keep their length."""
    return model.length is None or model.view.stored_features.frames is None


def of_waves(model: RunModel, network: Graph) -> bytes:
    """Return the ONNX model from ``samples`` float32 [batch, samples] to the answer float32 [batch, answers].

    Args:
        model: of the run.
        network: its network as a graph, from features; with lengths where :func:`takes_lengths`.

    Raises:
        InputError: a front end that cannot be written in ONNX, or an objective that says in a way of its own what it makes of the
            segments of a recording.
    """
    check_front_end(model)
    spectrum, nodes = spectrum_of(model), Nodes()
    samples = nodes.input("samples", ["batch", "samples"])
    features, sounding = _features(spectrum, model, samples)
    parts, of_part, count = _parts(model, features, sounding)
    bands = model.view.stored_features.bands
    given = {"x": parts.shaped(-1, of_part, bands)}  # [batch * segments, frames, bands]
    if network.lengths:
        x = given["x"]
        rows = x.size(0)
        given["lengths"] = nodes("Expand", nodes.listed(of_part), nodes.listed(rows))
        given["x"] = x.padded(1, 0, (of_part * -1 + LEAST_FRAMES).at_least(0), 3)
    outputs = nodes.graph(network.content, given)
    name, answers = answer_name(model.objective), len(model.classes)
    averaged = output_names(model.objective)[0 if model.objective.averages_logits() else -1]
    mean = outputs[averaged].shaped(-1, count, answers).mean(1).shaped(-1, answers)
    nodes.output(name, nodes("Softmax", mean) if averaged != name else mean, ["batch", answers])
    return nodes.model()


def check_front_end(model: RunModel) -> None:
    """Refuse a model whose way from samples to the answer cannot be written in ONNX; see :func:`of_waves`."""
    spectrum_of(model)
    objective = model.objective
    own = type(objective).answer_of_clip is not Objective.answer_of_clip
    if own or (objective.averages_logits() and not isinstance(objective, Classify)):
        raise InputError(
            f"--input wave: {type(objective).__name__} answers for a recording in a way of its own, which ONNX does not know; "
            f"leave --input out, and do with the outputs for its segments what the objective does"
        )


def _features(spectrum: Spectrum, model: RunModel, samples: Value) -> tuple[Value, Value]:
    """Return stored features float32 [batch, frames, bands] of recordings, and how many frames are no padding, int64 []."""
    settings, nodes = settings_of(model), samples.nodes
    if settings.samples is not None:
        samples = samples.cut(0, settings.samples, 1)
    if isinstance(settings, FeatureSettings):
        if settings.least_samples:
            missing = (samples.size(1) * -1 + settings.least_samples).at_least(0)
            samples = samples.padded(1, missing // 2, missing - missing // 2, 2)
        if settings.wave == "unit_norm":
            samples = samples / _norm(samples)
    if spectrum.without_mean:
        samples = samples - samples.mean(1)
    length = samples.size(1)
    numbers = nodes.places(spectrum.frames(length))
    whole = samples.padded(1, 0, (length * -1 + spectrum.shortest).at_least(0), 2)
    features = spectrum.features(whole.take(spectrum.places(numbers, length), 1))
    if settings.normalise == "clip":
        features = _z_scores(features, None)
    frames = features.size(1)
    if settings.frames is not None:
        features = features.cut(0, settings.frames, 1)
        missing = (features.size(1) * -1 + settings.frames).at_least(0)
        features = features.padded(1, 0, missing, 3, spectrum.fill)
        # The frames that fill a recording count where they are no zeros.
        frames = features.size(1) if spectrum.fill else frames
    return spectrum.stored(features), frames


def _norm(samples: Value) -> Value:
    """Return the root of the sum of squares of each recording, float32 [batch, 1], not below that of the least sum."""
    squares = samples.as_type(TensorProto.DOUBLE)
    total = (squares * squares).sum(1).at_least(np.array(LEAST_SQUARES))
    return samples.nodes("Sqrt", total).as_type(TensorProto.FLOAT)


def _parts(model: RunModel, features: Value, sounding: Value) -> tuple[Value, Value, Value]:
    """Cut recordings into the parts that the network sees one by one.

    Returns:
        float32 [batch, segments, frames, bands]; the frames and the segments, int64 [] each.
    """
    segment, pipeline, nodes = model.view.test_segments, model.view.pipeline, features.nodes
    total = features.size(1)
    if segment is None:
        of_part, count, stride = total, total * 0 + 1, 1
    else:
        of_part, stride = total.at_most(segment.frames), segment.test_stride or segment.stride
        beyond = (total - segment.frames).at_least(0)
        if segment.keep_last:
            count = beyond // stride + 1
        else:
            # Rounded, halves to even: a half is rounded up where the whole number below it is odd.
            whole = beyond // stride
            odd = whole - whole // 2 * 2
            count = ((beyond * 2 + (stride - 1) + odd) // (2 * stride)).at_least(1)
    first = nodes.places(count) * stride
    if pipeline.cut is not None:
        first = first + (of_part - pipeline.cut).at_least(0) // 2
        of_part = of_part.at_most(pipeline.cut)
    places = first.with_axes(1) + nodes.places(of_part)
    parts = features.take(places, 1)
    if pipeline.late is not None and pipeline.late.z_score:
        parts = _z_scores(parts, nodes("Cast", places < sounding, to=TensorProto.FLOAT).with_axes(0, 3))
    return parts, of_part, count


def _z_scores(x: Value, real: Value | None) -> Value:
    """Return z-scores of each band over the frames, the last dimension but one.

    Args:
        x: float32 [..., frames, bands].
        real: 1 for frames that are no padding, which becomes 0, else 0; float32 [..., frames, 1]. ``None``: all are.
    """
    # A band that never changes shall be exactly 0 and not what rounding makes of it: one of its frames is subtracted first.
    x = x - x.take(np.array([0]), -2)
    if real is None:
        away = x - x.mean(-2)
        return away / (x.nodes("Sqrt", (away * away).mean(-2)) + float(EPSILON))
    count = real.sum(-2).at_least(1.0)
    away = (x - (x * real).sum(-2) / count) * real
    return away / (x.nodes("Sqrt", (away * away).sum(-2) / count) + float(EPSILON))


def checked(content: bytes, model: RunModel, tolerant: bool = False) -> float:
    """Return the largest difference of an answer to that of ``raydfl predict``, on recordings of several lengths.

    Args:
        content: the ONNX model.
        model: of the run.
        tolerant: whether any difference will do, as where the network is in int8.

    Raises:
        InputError: it is larger than 1e-4 (relative to scores above 1).
    """
    session, front_end = session_of(content), FrontEnd(model)
    name, rate = answer_name(model.objective), settings_of(model).sample_rate
    differences = []
    for seconds in _SECONDS:
        samples = sounds(round(seconds * rate), rate)
        expected = answers_to(front_end, samples, rate)
        if expected is None:
            continue
        found = session.run([name], {"samples": samples})[0]
        difference = float(np.abs(found - expected).max())
        if not tolerant and not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
            raise InputError(
                f"the ONNX graph of model {model.name!r} ({model.spec.architecture}) answers otherwise than raydfl predict, by "
                f"{difference:.1e} for {seconds} s; nothing was written: leave --input out"
            )
        differences.append(difference)
    return max(differences, default=0.0)


def answers_to(front_end: FrontEnd, waves: np.ndarray, rate: int) -> np.ndarray | None:
    """Return what ``raydfl predict`` says of recordings float32 [batch, samples]: float64 [batch, answers].

    ``None``: nothing, for they are shorter than the network takes.

    Raises:
        RaydflError: what the network gives is not finite.
    """
    try:
        return np.stack([front_end.answer_to(wave, rate) for wave in waves])
    except DataError:
        return None


def session_of(content: bytes, threads: int = 0) -> Any:
    """Return an ONNX Runtime session on the CPU that says nothing but errors; ``threads`` 0: as many as there are cores."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def sounds(samples: int, rate: int) -> np.ndarray:
    """Return a rising tone in noise and a falling one, float32 [2, samples]."""
    random = np.random.default_rng(samples)
    time = np.arange(samples) / rate
    pitch = np.array([[200.0], [900.0]]) + np.array([[300.0], [-200.0]]) * time
    found = 0.3 * np.sin(2 * np.pi * pitch * time) + 0.02 * random.standard_normal((_BATCH, samples))
    return found.astype(np.float32)
