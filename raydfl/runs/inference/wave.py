"""Export of models with samples as input: front end, network and mean over segments in one ONNX graph.

The module repeats the steps of :mod:`raydfl.runs.inference.recordings` after resampling. The length of a batch is free; its
recordings are equally long. Before writing, the export compares the graph with ``raydfl predict``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from torch import Tensor, nn

from raydfl.core.errors import DataError, InputError
from raydfl.data.features import BY_TRAINING_CLIPS, EPSILON, FeatureSettings, KaldiFeatures, SpeechEmbeddingFeatures
from raydfl.data.features.front_ends import FRONT_ENDS, larger, smaller, take
from raydfl.objectives import Classify, Events, Objective, TokenObjective, Verify, count_frames_per_token
from raydfl.runs.inference import embedding
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.network import OPSET, Graph, compare, trace
from raydfl.runs.inference.recordings import LEAST_FRAMES, FrontEnd

_SECONDS = (0.004, 0.31, 1.0, 2.37)
"""Lengths of the recordings for the comparison with raydfl predict."""

Network = Callable[[Tensor, Tensor | None], Tensor]
"""Function from ``x`` and ``lengths`` to the outputs to average over segments."""


def read_settings(model: RunModel) -> FeatureSettings | KaldiFeatures | SpeechEmbeddingFeatures:
    """Return the settings of a model's stored features.

    Raises:
        InputError: raydfl does not compute such features from samples, or trims the recordings first.
    """
    settings = model.view.stored_features
    if isinstance(settings, FeatureSettings) and settings.trim_db is not None:
        raise InputError(
            f"--input wave: model {model.name!r} was trained on recordings without silence at both ends (data.features.trim_db), "
            f"and the graph does not trim. Omit --input, and feed the network with features."
        )
    if isinstance(settings, FeatureSettings | KaldiFeatures | SpeechEmbeddingFeatures):
        return settings
    raise InputError(
        f"--input wave: raydfl does not compute features of the kind {settings.kind} (model {model.name!r}) from samples. Omit "
        f"--input, and feed the network with features."
    )


class Features(nn.Module):
    """The front end of a run's features, with the normalisation, padding and rounding of its feature cache."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: RunModel) -> None:
        """Build the portable form of the run's front end.

        Raises:
            InputError: Unsupported features, or unknown statistics of the training clips.
        """
        super().__init__()
        self.settings = settings = read_settings(model)
        self.front_end: Any
        if isinstance(settings, SpeechEmbeddingFeatures):
            self.front_end = embedding.TraceableEmbedding(settings)
        else:
            self.front_end = FRONT_ENDS[type(settings)](settings)
            self.front_end.portable = True
        statistics = model.statistics if settings.normalise in BY_TRAINING_CLIPS else np.array([[0.0], [1.0 - EPSILON]])
        if statistics is None:
            raise InputError(
                f"--input wave: the statistics of the training clips of {model.run_dir} are unknown (data.features.normalise: "
                f"{settings.normalise}), because its data are at sites or an early version wrote it. Omit --input."
            )
        mean, deviation = torch.from_numpy(statistics + np.array([[0.0], [EPSILON]])).float()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("deviation", deviation, persistent=False)

    def forward(self, samples: Tensor) -> tuple[Tensor, int]:
        """Compute features, float32 [batch, frames, bands], and return them with the number of frames before padding."""
        x, settings = self.front_end(samples), self.settings
        if settings.normalise == "clip":
            x = compute_z_scores(x)
        x, sounding = self.normalise(x), x.shape[1]
        if settings.frames is not None:
            x = take(torch.cat([x, x.new_zeros(x.shape[0], settings.frames, settings.bands)], 1), 0, settings.frames)
        return x, sounding

    def normalise(self, x: Tensor) -> Tensor:
        """Normalise features by the training clips' statistics, and round them like the feature cache."""
        if self.settings.normalise in BY_TRAINING_CLIPS:
            x = (x - self.mean) / self.deviation
        return x.half().float() if self.settings.dtype == "float16" else x


class Answer(nn.Module):
    """Module from samples float32 [batch, samples] to the answers of ``raydfl predict``, float32 [batch, answers].

    With outputs at each token: float32 [batch, tokens, answers], for events before the median filter.
    """

    def __init__(self, model: RunModel, network: Network) -> None:
        """Combine the front end and the network of a run's model.

        Args:
            model: Model of a run.
            network: Function that computes the outputs to average over the segments of a recording.

        Raises:
            InputError: The front end cannot be exported, or the objective overrides ``answer_of_clip``.
        """
        super().__init__()
        objective = model.objective
        if isinstance(objective, TokenObjective):
            overridden = model.view.test_segments is not None
        else:
            overridden = type(objective).answer_of_clip is not Objective.answer_of_clip
        if overridden or (objective.averages_logits() and not isinstance(objective, Classify | Verify)):
            raise InputError(
                f"--input wave: {type(objective).__name__} combines the segments of a recording in Python, which ONNX cannot "
                f"express. Omit --input, and combine the outputs for segments in your application."
            )
        self.features, self.network, self.objective = Features(model), network, objective
        self.segment, self.pipeline = model.view.test_segments, model.view.pipeline
        self.with_lengths = takes_lengths(model)

    def forward(self, samples: Tensor) -> Tensor:
        """Compute the answers."""
        parts = self.parts(*self.features(samples))
        batch, count, size = parts.shape[:3]
        x, lengths = parts.flatten(0, 1), None
        if self.with_lengths:
            lengths = torch.full((x.shape[0],), size)
            filled = torch.cat([x, x.new_zeros(x.shape[0], LEAST_FRAMES, x.shape[2])], 1)
            x = take(filled, 0, larger(size, LEAST_FRAMES))
        outputs = self.network(x, lengths)
        if isinstance(self.objective, TokenObjective):
            return outputs  # of the only segment
        mean = outputs.reshape(batch, count, -1).mean(1)
        return self.objective.answer(mean) if self.objective.averages_logits() else mean

    def parts(self, x: Tensor, sounding: int) -> Tensor:
        """Cut recordings into the network's segments or crops, float32 [batch, segments, frames, bands].

        Args:
            x: Features, float32 [batch, frames, bands].
            sounding: Number of frames before padding.
        """
        segment, cut, late = self.segment, self.pipeline.cut, self.pipeline.late
        size, count, stride = x.shape[1], 1, 1
        if segment is not None:
            stride = segment.test_stride or segment.stride
            beyond = larger(size - segment.frames, 0)
            if segment.keep_last:
                count = beyond // stride + 1
            else:  # round half to even, as raydfl.data.segment does
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
            parts = compute_z_scores(parts, (places < sounding).float().unsqueeze(2))
        return parts


def build_answer_graph(model: RunModel, network: Graph) -> bytes:
    """Build the ONNX model from ``samples`` float32 [batch, samples] to answers float32 [batch, answers].

    Args:
        model: Model of a run.
        network: Graph of its network, with features as input. It replaces a placeholder node.

    Raises:
        InputError: The front end or the objective cannot be exported.
    """
    inner = onnx.load_from_string(network.content)
    averaged = model.output_names[0 if model.objective.averages_logits() else -1]
    module = Answer(model, _Placeholder(model)).eval()
    content = trace(module, {"samples": torch.randn(2, 12_000)}, [{0: "batch", 1: "samples"}], [model.output_names[-1]])
    proto = onnx.load_from_string(content)
    proto.functions.append(_to_function("Network", inner, averaged))
    if isinstance(module.features.settings, SpeechEmbeddingFeatures):
        encoder = embedding.read_embedding(OPSET)
        proto.functions.append(_to_function(embedding.NAME, encoder, encoder.graph.output[0].name))
    proto = onnx.inliner.inline_local_functions(proto)
    operators = [opset for opset in proto.opset_import if not opset.domain]
    del proto.opset_import[:]
    proto.opset_import.extend(operators)
    whole: bytes = proto.SerializeToString()
    return whole


def _to_function(name: str, model: Any, output: str) -> Any:
    """Convert an ONNX model to a function with its constants, in place of a placeholder node."""
    constants = [onnx.helper.make_node("Constant", [], [item.name], value=item) for item in model.graph.initializer]
    inputs = [value.name for value in model.graph.input]
    nodes = [*constants, *model.graph.node]
    return onnx.helper.make_function("raydfl", name, inputs, [output], nodes, [*model.opset_import])


class _Placeholder(nn.Module):
    """Placeholder node for the network's graph."""

    def __init__(self, model: RunModel) -> None:
        super().__init__()
        self.answers = len(model.classes)
        self.step = count_frames_per_token(model.network) if isinstance(model.objective, TokenObjective) else None

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        inputs = (x,) if lengths is None else (x, lengths)
        # Nothing follows a network with tokens, so their number need not be exact.
        tokens = () if self.step is None else (x.shape[1] // self.step,)
        shape = (x.shape[0], *tokens, self.answers)
        return torch.onnx.ops.symbolic("raydfl::Network", inputs, dtype=x.dtype, shape=shape, version=1)


def takes_lengths(model: RunModel) -> bool:
    """Return whether the network needs lengths, because recordings have different numbers of frames."""
    return model.length is None or model.view.stored_features.frames is None


def compute_z_scores(x: Tensor, real: Tensor | None = None) -> Tensor:
    """Compute z-scores of each band over the frames.

    Args:
        x: Features, float32 [..., frames, bands].
        real: 1 for frames and 0 for padding, float32, broadcast to ``x``. Padding becomes 0. ``None``: no padding.
    """
    # Subtracting a frame first makes constant bands exactly 0, without rounding errors.
    x = x - x[..., :1, :]
    if real is None:
        real = torch.ones_like(x[..., :1])
    count = real.sum(-2, keepdim=True).clamp_min(1.0)
    away = (x - (x * real).sum(-2, keepdim=True) / count) * real
    return away / ((away.square().sum(-2, keepdim=True) / count).sqrt() + EPSILON)


def measure_difference(answer: Callable[[np.ndarray], np.ndarray], model: RunModel, tolerant: bool = False) -> float:
    """Return the largest absolute difference from the answers of ``raydfl predict``, on recordings of several lengths.

    Args:
        answer: Function from samples float32 [batch, samples] to answers.
        model: Model of a run.
        tolerant: Accept any difference, as for int8.

    Raises:
        InputError: The difference exceeds 1e-4, relative to the largest answer if it is above 1.
    """
    front_end, rate, differences = FrontEnd(omit_filter(model)), read_settings(model).sample_rate, [0.0]
    for seconds in _SECONDS:
        samples = make_sounds(round(seconds * rate), rate)
        expected = predict_waves(front_end, samples, rate)
        if expected is None:
            continue
        differences.append(compare(answer(samples), expected, model, f"for {seconds} s", tolerant))
    return max(differences)


def omit_filter(model: RunModel) -> RunModel:
    """Return the model without the median filter of events, which no graph computes."""
    if not isinstance(model.objective, Events):
        return model
    return replace(model, objective=replace(model.objective, median_filter=0.0))


def predict_waves(front_end: FrontEnd, waves: np.ndarray, rate: int) -> np.ndarray | None:
    """Compute the answers of ``raydfl predict`` for recordings float32 [batch, samples].

    Returns:
        Answers, float64 [batch, answers], or ``None`` if the recordings are too short for the network.

    Raises:
        RaydflError: An output of the network is not finite.
    """
    try:
        return np.stack([front_end.answer_to(wave, rate) for wave in waves])
    except DataError:
        return None


def make_sounds(samples: int, rate: int) -> np.ndarray:
    """Synthesise a rising and a falling tone in noise, float32 [2, samples]."""
    random = np.random.default_rng(samples)
    time = np.arange(samples) / rate
    pitch = np.array([[200.0], [900.0]]) + np.array([[300.0], [-200.0]]) * time
    waves = 0.3 * np.sin(2 * np.pi * pitch * time) + 0.02 * random.standard_normal((2, samples))
    return waves.astype(np.float32)
