"""A model of a run as a module that takes samples and returns the answer: front end, network, mean over segments.

The module repeats the steps of :mod:`raydfl.runs.inference.recordings` that follow resampling. Lengths are free in an export. The
graph is compared with ``raydfl predict`` before it is written. All recordings of a batch are equally long.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.inliner
import torch
from torch import Tensor, nn

from raydfl.core.errors import DataError, InputError
from raydfl.data.features import BY_TRAINING_CLIPS, EPSILON, FeatureSettings, KaldiFeatures
from raydfl.data.features.front_ends import FRONT_ENDS, Spectral, larger, smaller, take
from raydfl.objectives import Classify, Objective
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.network import Graph, compare, trace
from raydfl.runs.inference.recordings import LEAST_FRAMES, FrontEnd

_SECONDS = (0.004, 0.31, 1.0, 2.37)
"""Lengths of the recordings on which graph and raydfl are compared."""

Network = Callable[[Tensor, Tensor | None], Tensor]
"""From x and lengths to the outputs that are averaged over segments."""


def read_settings(model: RunModel) -> FeatureSettings | KaldiFeatures:
    """Return the settings of the features that a model's view is stored with.

    Raises:
        InputError: the features are of another kind.
    """
    settings = model.view.stored_features
    if isinstance(settings, FeatureSettings | KaldiFeatures):
        return settings
    raise InputError(
        f"--input wave: the features of model {model.name!r} are of the kind {settings.kind}, which raydfl does not compute of "
        f"samples itself; leave --input out, and give the network such features"
    )


class Features(nn.Module):
    """A model's features with everything that a run's cache has: normalisation, padding and rounding."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: RunModel) -> None:
        """Build the portable form of the run's front end.

        Raises:
            InputError: features of another kind, or unknown statistics of training clips.
        """
        super().__init__()
        self.settings = settings = read_settings(model)
        self.front_end: Spectral = FRONT_ENDS[type(settings)](settings)  # type: ignore[assignment]
        self.front_end.portable = True
        statistics = model.statistics if settings.normalise in BY_TRAINING_CLIPS else np.array([[0.0], [1.0 - EPSILON]])
        if statistics is None:
            raise InputError(
                f"--input wave: {model.run_dir} does not know the statistics of its training clips (data.features.normalise: "
                f"{settings.normalise}): its data lie at sites, or an earlier version made it; leave --input out"
            )
        mean, deviation = torch.from_numpy(statistics + np.array([[0.0], [EPSILON]])).float()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("deviation", deviation, persistent=False)

    def forward(self, samples: Tensor) -> tuple[Tensor, int]:
        """Return features float32 [batch, frames, bands] of recordings, and the number of frames that are no padding."""
        x, settings = self.front_end(samples), self.settings
        if settings.normalise == "clip":
            x = z_scores(x)
        x, sounding = self.normalised(x), x.shape[1]
        if settings.frames is not None:
            x = take(torch.cat([x, x.new_zeros(x.shape[0], settings.frames, settings.bands)], 1), 0, settings.frames)
        return x, sounding

    def normalised(self, x: Tensor) -> Tensor:
        """Return features normalised by training clips and rounded as in the run's cache."""
        if self.settings.normalise in BY_TRAINING_CLIPS:
            x = (x - self.mean) / self.deviation
        return x.half().float() if self.settings.dtype == "float16" else x


class Answer(nn.Module):
    """From samples float32 [batch, samples] to the answers float32 [batch, answers] of ``raydfl predict``."""

    def __init__(self, model: RunModel, network: Network) -> None:
        """Take a model of a run.

        Args:
            model: of the run.
            network: gives the outputs that are averaged over the segments of a recording.

        Raises:
            InputError: a front end that cannot be exported, or an objective with its own answer for a recording's segments.
        """
        super().__init__()
        objective = model.objective
        own = type(objective).answer_of_clip is not Objective.answer_of_clip
        if own or (objective.averages_logits() and not isinstance(objective, Classify)):
            raise InputError(
                f"--input wave: {type(objective).__name__} answers for a recording in a way of its own, which ONNX does not know; "
                f"leave --input out, and do with the outputs for its segments what the objective does"
            )
        self.features, self.network, self.objective = Features(model), network, objective
        self.segment, self.pipeline = model.view.test_segments, model.view.pipeline
        self.with_lengths = takes_lengths(model)

    def forward(self, samples: Tensor) -> Tensor:
        """Return the answers."""
        parts = self.parts(*self.features(samples))
        batch, count, size = parts.shape[:3]
        x, lengths = parts.flatten(0, 1), None
        if self.with_lengths:
            lengths = torch.full((x.shape[0],), size)
            filled = torch.cat([x, x.new_zeros(x.shape[0], LEAST_FRAMES, x.shape[2])], 1)
            x = take(filled, 0, larger(size, LEAST_FRAMES))
        mean = self.network(x, lengths).reshape(batch, count, -1).mean(1)
        return self.objective.answer(mean) if self.objective.averages_logits() else mean

    def parts(self, x: Tensor, sounding: int) -> Tensor:
        """Cut recordings into the segments or crops that the network sees: float32 [batch, segments, frames, bands].

        Args:
            x: float32 [batch, frames, bands].
            sounding: frames that are no padding.
        """
        segment, cut, late = self.segment, self.pipeline.cut, self.pipeline.late
        size, count, stride = x.shape[1], 1, 1
        if segment is not None:
            stride = segment.test_stride or segment.stride
            beyond = larger(size - segment.frames, 0)
            if segment.keep_last:
                count = beyond // stride + 1
            else:  # rounded, halves to even: a half is rounded up if the whole number below it is odd
                odd = beyond // stride % 2
                count = larger((2 * beyond + stride - 1 + odd) // (2 * stride), 1)
            size = smaller(size, segment.frames)
        first = torch.arange(count) * stride
        if cut is not None:
            first = first + larger(size - cut, 0) // 2
            size = smaller(size, cut)
        places = first.unsqueeze(1) + torch.arange(size)
        parts = x.index_select(1, places.flatten()).reshape(x.shape[0], count, size, x.shape[2])
        if late is not None and late.z_score:
            parts = z_scores(parts, (places < sounding).float().unsqueeze(2))
        return parts


def answer_graph(model: RunModel, network: Graph) -> bytes:
    """Return the ONNX model from ``samples`` float32 [batch, samples] to the answer float32 [batch, answers].

    Args:
        model: of the run.
        network: its network as a graph, from features.

    Raises:
        InputError: see :class:`Answer`; a node of it gives way to the network's graph.
    """
    inner = onnx.load_from_string(network.content)
    averaged = model.output_names[0 if model.objective.averages_logits() else -1]
    module = Answer(model, _Placeholder(len(model.classes))).eval()
    content = trace(module, {"samples": torch.randn(2, 12_000)}, [{0: "batch", 1: "samples"}], [model.output_names[-1]])
    proto = onnx.load_from_string(content)
    constants = [onnx.helper.make_node("Constant", [], [each.name], value=each) for each in inner.graph.initializer]
    names = [value.name for value in inner.graph.input]
    nodes = [*constants, *inner.graph.node]
    proto.functions.append(
        onnx.helper.make_function("raydfl", "Network", names, [averaged], nodes, [*inner.opset_import])
    )
    proto = onnx.inliner.inline_local_functions(proto)
    operators = [each for each in proto.opset_import if not each.domain]
    del proto.opset_import[:]
    proto.opset_import.extend(operators)
    whole: bytes = proto.SerializeToString()
    return whole


class _Placeholder(nn.Module):
    """The node whose place the network's graph takes."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        given = (x,) if lengths is None else (x, lengths)
        shape = (x.shape[0], self.answers)
        return torch.onnx.ops.symbolic("raydfl::Network", given, dtype=x.dtype, shape=shape, version=1)


def takes_lengths(model: RunModel) -> bool:
    """Return whether the network is told how many frames count: where recordings keep their length."""
    return model.length is None or model.view.stored_features.frames is None


def z_scores(x: Tensor, real: Tensor | None = None) -> Tensor:
    """Return z-scores of each band over the frames.

    Args:
        x: float32 [..., frames, bands].
        real: float32, broadcast to ``x``: 1 for frames, 0 for padding, which becomes 0. ``None``: there is no padding.
    """
    # A band that never changes becomes exactly 0, without rounding errors, if one of its frames is subtracted first.
    x = x - x[..., :1, :]
    if real is None:
        real = torch.ones_like(x[..., :1])
    count = real.sum(-2, keepdim=True).clamp_min(1.0)
    away = (x - (x * real).sum(-2, keepdim=True) / count) * real
    return away / ((away.square().sum(-2, keepdim=True) / count).sqrt() + EPSILON)


def largest_difference(answer: Callable[[np.ndarray], np.ndarray], model: RunModel, tolerant: bool = False) -> float:
    """Return the largest difference of an answer to that of ``raydfl predict``, on recordings of several lengths.

    Args:
        answer: from samples float32 [batch, samples] to the answers.
        model: of the run.
        tolerant: accept any difference, as of a network in int8.

    Raises:
        InputError: the difference is larger than 1e-4 (relative to scores above 1).
    """
    front_end, rate, differences = FrontEnd(model), read_settings(model).sample_rate, [0.0]
    for seconds in _SECONDS:
        samples = make_sounds(round(seconds * rate), rate)
        expected = predict_waves(front_end, samples, rate)
        if expected is None:
            continue
        differences.append(compare(answer(samples), expected, model, f"for {seconds} s", tolerant))
    return max(differences)


def predict_waves(front_end: FrontEnd, waves: np.ndarray, rate: int) -> np.ndarray | None:
    """Return the answers of ``raydfl predict`` for recordings float32 [batch, samples]: float64 [batch, answers].

    ``None``: the recordings are shorter than the network takes.

    Raises:
        RaydflError: an output of the network is not finite.
    """
    try:
        return np.stack([front_end.answer_to(wave, rate) for wave in waves])
    except DataError:
        return None


def make_sounds(samples: int, rate: int) -> np.ndarray:
    """Return a rising tone in noise and a falling one, float32 [2, samples]."""
    random = np.random.default_rng(samples)
    time = np.arange(samples) / rate
    pitch = np.array([[200.0], [900.0]]) + np.array([[300.0], [-200.0]]) * time
    found = 0.3 * np.sin(2 * np.pi * pitch * time) + 0.02 * random.standard_normal((2, samples))
    return found.astype(np.float32)
