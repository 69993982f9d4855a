"""Streaming inference for CRNNs: pieces of any number of samples, with an answer after every piece.

Each answer treats all samples so far as one recording, and equals the answer of ``raydfl predict``. The state of a stream:

- ``heard``, int64 [1]: number of samples so far;
- ``tail``, float32 [batch, samples]: the last samples, input of future frames;
- ``frames``, float32 [batch, frames, bands]: the last frames, input of future convolutions;
- ``hidden``, float32 [1, batch, units]: state of the GRU after its last final step;
- ``total``, float32 [batch, units]: sum of the GRU's outputs up to its last final step. Only for one answer per recording.

A step is final when no future sample can change it. Each call starts after the last final step, and later calls recompute the rest.
Transcripts and events have an answer at each step. Their graph also returns ``final``, int64 [1], the number of final steps.
No shape depends on the state: a call computes the largest number of frames and steps its samples can need, and masks the surplus.
The ends follow the rules of a complete recording: reflection, zero padding of each convolution, and poolings that drop a remainder.

Limits: only unidirectional GRUs, and no normalisation over the whole clip, because future frames are unknown. Streams are neither
cut nor padded, so ``seconds``, ``least_seconds`` and ``frames`` have no effect. With Kaldi features, answers before one window
(25 ms) differ from predict's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.errors import InputError
from raydfl.data.features import FeatureSettings, SpeechEmbeddingFeatures
from raydfl.models import CRNN
from raydfl.objectives import TokenObjective
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.network import compare, replace_modules, trace
from raydfl.runs.inference.recordings import FrontEnd
from raydfl.runs.inference.wave import Features, make_sounds, omit_filter, predict_waves, read_settings

_SECONDS, _PIECE = 0.83, 0.02


class Streaming(nn.Module):
    """Module from samples float32 [batch, samples] and a state to answers and the next state."""

    def __init__(self, model: RunModel) -> None:
        """Build the streaming form of a run's model.

        Raises:
            InputError: The model does not support streaming. The message names an alternative to train.
        """
        super().__init__()
        self.network = network = _check_network(model)
        self.features, self.objective = Features(model), model.objective
        self.front_end = front_end = self.features.front_end
        self.pool: int = network.pool
        self.layers = len(network.convolutions)
        side = int(network.convolutions[0].padding[0])  # type: ignore[index]
        self.together: int = self.pool**self.layers
        """P: number of frames per step. Step s depends on frames ``P s - A`` to ``P s + P - 1 + A``."""
        self.edges = [side * sum(self.pool**exponent for exponent in range(layer)) for layer in range(self.layers + 1)]
        """Receptive field beyond a step's frames on each side, by number of convolutions. The last is A."""
        self.around, self.kept_frames = self.edges[-1], 2 * self.edges[-1] + self.together
        # Frame t is final once this number of samples follows t * hop. Reflection at the start needs the samples before it.
        self.needed = max(len(front_end.window) - front_end.before, front_end.before + 1)
        self.kept_samples = front_end.before + self.needed
        units, bands = network.gru.hidden_size, self.features.settings.bands
        self.shapes: dict[str, list[int | str]] = {
            "heard": [1],
            "tail": ["batch", self.kept_samples],
            "frames": ["batch", self.kept_frames, bands],
            "hidden": [1, "batch", units],
            "total": ["batch", units],
        }
        """Shapes of the state inputs by name, with ``"batch"`` for the free dimension. They start as zeros; afterwards they are the
        outputs ``next_heard`` ... of the preceding call."""
        if isinstance(self.objective, TokenObjective):
            del self.shapes["total"]

    def start(self, batch: int) -> tuple[Tensor, ...]:
        """Create the state before the first call."""
        sizes = ([batch if size == "batch" else int(size) for size in shape] for shape in self.shapes.values())
        heard, *rest = map(torch.zeros, sizes)
        return heard.long(), *rest

    def forward(
        self,
        samples: Tensor,
        heard: Tensor,
        tail: Tensor,
        frames: Tensor,
        hidden: Tensor,
        total: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the answers for all samples so far, or for all steps of this call and ``final``, and the next state."""
        before, after = heard[0], heard[0] + samples.shape[1]
        first_frame, final_frame = self._count_final_frames(before), self._count_final_frames(after)
        first_step, final_step = self._count_final_steps(first_frame), self._count_final_steps(final_frame)
        lengths = [self._count_frames(after)]
        """Lengths of a recording that ends now, before each convolution and after the last. They are at least 1 frame."""
        for _ in range(self.layers):
            lengths.append((lengths[-1] // self.pool).clamp_min(1))
        count = (samples.shape[1] + self.needed - 1) // self.front_end.hop + 1
        steps = (count + self.around + self.together - 1) // self.together
        sounds = torch.cat([tail, samples], 1)
        known = torch.cat(
            [frames, self._compute_new_frames(sounds, first_frame + torch.arange(count), before, after)], 1
        )
        begin = first_step * self.together - self.around
        required = begin + torch.arange(steps * self.together + 2 * self.around)
        x = _take_clamped(known, required - first_frame + self.kept_frames)
        x = torch.where(_is_inside(required, lengths[0]), x, 0.0)
        for layer, convolution in enumerate(self.network.convolutions, start=1):
            maps = F.conv1d(x.transpose(1, 2), convolution.weight, convolution.bias).relu().unsqueeze(2)  # type: ignore[arg-type]
            # max_pool2d, because torch.export takes the frames of max_pool1d for a constant.
            x = F.max_pool2d(maps, (1, self.pool)).squeeze(2).transpose(1, 2)
            if layer < self.layers:  # the next convolution pads with 0, not with the convolution of zeros
                begin = first_step * self.pool ** (self.layers - layer) - self.edges[self.layers - layer]
                x = torch.where(_is_inside(begin + torch.arange(x.shape[1]), lengths[layer]), x, 0.0)
        outputs = self.network.gru(x, hidden)[0]
        numbers = torch.arange(steps)[None, :, None]
        begun, final = numbers < lengths[-1] - first_step, (final_step - first_step).reshape(1)
        states = torch.cat([hidden.transpose(0, 1), outputs], 1)
        state = (
            after.reshape(1),
            _take_clamped(sounds, samples.shape[1] + torch.arange(self.kept_samples)),
            _take_clamped(known, final_frame - first_frame + torch.arange(self.kept_frames)),
            _take_clamped(states, final).transpose(0, 1),
        )
        if isinstance(self.objective, TokenObjective):
            tokens = self.objective.activate(self.network.output(outputs))
            return torch.where(begun, tokens, self.objective.fill(torch.zeros_like(tokens))), final, *state
        assert total is not None  # noqa: S101 - the state of other objectives
        complete = total + torch.where(begun, outputs, 0.0).sum(1)
        answers = self.objective.answer(self.network.output(complete / lengths[-1]))
        return answers, *state, total + torch.where(numbers < final, outputs, 0.0).sum(1)

    def _count_frames(self, samples: Tensor) -> Tensor:
        """Return the number of frames of a recording."""
        past = samples if self.front_end.centred else (samples - len(self.front_end.window)).clamp_min(0)
        count: Tensor = past // self.front_end.hop + 1
        return count

    def _count_final_frames(self, samples: Tensor) -> Tensor:
        """Return the number of frames that later samples cannot change."""
        hop = self.front_end.hop
        count: Tensor = (samples - self.needed + hop).clamp_min(0) // hop
        return count

    def _count_final_steps(self, frames: Tensor) -> Tensor:
        """Return the number of GRU steps that later frames cannot change."""
        steps: Tensor = (frames - self.around).clamp_min(0) // self.together
        return steps

    def _compute_new_frames(self, sounds: Tensor, numbers: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Compute features of a recording that ends now, float32 [batch, frames, bands].

        Args:
            sounds: Samples from ``before - kept_samples`` to ``after``, float32 [batch, samples].
            numbers: Indices of the frames, int64 [frames].
            before: Number of samples before this call.
            after: Number of samples after this call.
        """
        front_end = self.front_end
        places = front_end.places(front_end.positions(numbers), after.clamp_min(front_end.shortest) - 1)
        windows = _take_clamped(sounds, (places - before + self.kept_samples).flatten())
        windows = windows.reshape(sounds.shape[0], *places.shape)
        logarithms = front_end.logarithms(torch.where(places < after, windows, 0.0))
        return self.features.normalise(logarithms)


def _take_clamped(x: Tensor, places: Tensor) -> Tensor:
    """Select entries of dimension 1, with indices clamped to the valid range."""
    return x.index_select(1, places.clamp(0, x.shape[1] - 1))


def _is_inside(numbers: Tensor, length: Tensor) -> Tensor:
    """Return whether each frame is in a recording of ``length`` frames, bool [1, frames, 1]."""
    return ((numbers >= 0) & (numbers < length))[None, :, None]


def _check_network(model: RunModel) -> CRNN:
    """Return the network of a model, if it supports streaming.

    Raises:
        InputError: The model does not support streaming.
    """
    tokens, features, pipeline = isinstance(model.objective, TokenObjective), read_settings(model), model.view.pipeline
    network: Any = model.network.network if tokens else model.network  # of a predictor
    subject = f"--streaming: model {model.name!r} ({model.spec.architecture})"
    if not isinstance(network, CRNN) or not (tokens or model.objective.answers in ("class", "set")):
        raise InputError(
            f"{subject} does not support streaming. Use a CRNN, such as crnn_tiny, crnn_lite or crnn_mid, for classes, transcripts "
            f"or events, or export with --input wave."
        )
    if network.gru.bidirectional:
        raise InputError(
            f"{subject} has a bidirectional GRU, which needs the end of a recording. Train with bidirectional: false, as "
            f"crnn_lite does, or export with --input wave."
        )
    if model.view.test_segments is not None or pipeline.cut is not None:
        raise InputError(
            f"{subject} reads segments or crops of a recording. Train without data.segment and random_crop, or export with "
            f"--input wave."
        )
    if isinstance(features, SpeechEmbeddingFeatures):
        raise InputError(
            f"{subject} reads a pretrained encoder (data.features.kind: speech_embedding), which needs the whole recording. Train "
            f"on the kind logmel, or export with --input wave."
        )
    late = pipeline.late is not None and pipeline.late.z_score
    if features.normalise == "clip" or late:
        raise InputError(
            f"{subject} was trained on features normalised over the whole clip (data.features.normalise: clip), but a stream's "
            f"end is unknown. Train with normalise: part, group, client or none, or export with --input wave."
        )
    if isinstance(features, FeatureSettings) and features.wave == "unit_norm":
        raise InputError(
            f"{subject} was trained on samples divided by the loudness of the whole clip (data.features.wave: unit_norm), but a "
            f"stream's end is unknown. Train with wave: as_is, or export with --input wave."
        )
    return network


def remove_limits(model: RunModel) -> RunModel:
    """Return the model with settings that neither cut nor pad recordings."""
    names, features = ("seconds", "least_seconds", "frames"), model.view.features
    free = {name: None for name in names if name in type(features).model_fields}
    return replace(model, view=replace(model.view, features=features.model_copy(update=free)), length=None)


class Stream:
    """A batch of streams through an ONNX Runtime session."""

    def __init__(self, session: Any, batch: int = 1) -> None:
        """Start new streams.

        Args:
            session: Session of the streaming graph.
            batch: Number of parallel streams.
        """
        self._session = session
        _, *state = session.get_inputs()
        self._tokens: np.ndarray | None = None
        """The final tokens."""
        dtypes = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
        sizes = {item.name: [batch if size == "batch" else size for size in item.shape] for item in state}
        self._state = {item.name: np.zeros(sizes[item.name], dtypes[item.type]) for item in state}

    def process(self, samples: np.ndarray) -> np.ndarray:
        """Process the next samples, float32 [batch, samples], and return the answers so far.

        Returns:
            float32 [batch, answers], or [batch, tokens, answers] for transcripts and events.
        """
        answers, *rest = self._session.run(None, {"samples": samples, **self._state})
        state = rest[-len(self._state) :]
        self._state = dict(zip(self._state, state, strict=True))
        if len(rest) > len(state):  # outputs at each token
            begun = 0 if self._tokens is None else self._tokens.shape[1]
            answers = answers if self._tokens is None else np.concatenate([self._tokens, answers], axis=1)
            self._tokens = answers[:, : begun + int(rest[0][0])]
        return np.asarray(answers)


def build_stream_graph(model: RunModel) -> bytes:
    """Build the streaming ONNX model from ``samples`` and a state to answers and the next state.

    Raises:
        InputError: The model does not support streaming.
    """
    module = Streaming(model)
    examples = dict(zip(("samples", *module.shapes), (torch.randn(2, 1_000), *module.start(2)), strict=True))
    sizes = [{n: size for n, size in enumerate(shape) if size == "batch"} for shape in module.shapes.values()]
    final = ["final"] if isinstance(model.objective, TokenObjective) else []
    outputs = [model.output_names[-1], *final, *(f"next_{name}" for name in module.shapes)]
    return trace(replace_modules(module).eval(), examples, [{0: "batch", 1: "samples"}, *sizes], outputs)


def measure_difference(process: Callable[[np.ndarray], np.ndarray], model: RunModel) -> float:
    """Return the largest absolute difference between streamed answers and the network's answers.

    Args:
        process: Function from the next samples of two streams to their answers.
        model: Model of a run.

    Raises:
        InputError: The difference exceeds 1e-4.
    """
    front_end, settings = FrontEnd(omit_filter(remove_limits(model))), read_settings(model)
    rate, window, worst = settings.sample_rate, settings.window, 0.0
    waves, piece = make_sounds(round(_SECONDS * rate), rate), round(_PIECE * rate)
    for end in range(piece, waves.shape[1] + 1, piece):
        answers = process(waves[:, end - piece : end])
        if end >= window and (end % (5 * piece) == 0 or end <= 3 * piece):
            expected = predict_waves(front_end, waves[:, :end], rate)
            if expected is not None:
                worst = max(worst, compare(answers, expected, model, f"after {end / rate:.2f} s of a stream"))
    return worst
