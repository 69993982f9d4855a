"""A CRNN as a module that hears a recording piece by piece, of any number of samples each, and answers after every piece.

The answer is always that for all that was heard so far, taken as a whole recording: as ``raydfl predict`` gives it. Between two
calls the state says what was heard:

- ``heard``, int64 [1]: how many samples;
- ``tail``, float32 [batch, samples]: the last of them, which frames to come look at;
- ``frames``, float32 [batch, frames, bands]: the last frames of features, which convolutions to come look at;
- ``hidden``, float32 [1, batch, units]: the GRU after the last of its steps that nothing to come can change;
- ``total``, float32 [batch, units]: the sum of what the GRU gave up to there.

Each call computes from there to the end of what was heard; later calls compute again what later samples could change. No shape
depends on the state: a call computes as many frames and steps as its samples can need at most, and masks the others. At the ends
the whole recording's rules hold: reflection, zeros before and after each convolution, and poolings that leave out a rest.

Limits: the answer needs no frame of the future, so a GRU in one direction and no normalisation over the whole clip. A stream is
neither cut nor filled, whatever ``seconds``, ``least_seconds`` or ``frames`` say. With Kaldi's features the answer to less than a
window (25 ms) is not predict's.
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
from raydfl.data.features import FeatureSettings
from raydfl.models import CRNN
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.network import compare, replace_modules, trace
from raydfl.runs.inference.recordings import FrontEnd
from raydfl.runs.inference.wave import Features, make_sounds, predict_waves, read_settings

STATES = ("heard", "tail", "frames", "hidden", "total")
"""Inputs besides ``samples``. They begin as zeros; in the next call they are the outputs ``next_heard`` ..."""
_SECONDS, _PIECE = 0.83, 0.02


class Streaming(nn.Module):
    """From samples float32 [batch, samples] and the state to the answers and the next state."""

    def __init__(self, model: RunModel) -> None:
        """Take a model of a run.

        Raises:
            InputError: it cannot be heard piece by piece; the message says why, and what to train instead.
        """
        super().__init__()
        self.network = network = _check_network(model)
        self.features, self.objective = Features(model), model.objective
        self.front_end = front_end = self.features.front_end
        self.pool: int = network.pool
        self.layers = len(network.convolutions)
        side = int(network.convolutions[0].padding[0])  # type: ignore[index]
        self.together: int = self.pool**self.layers
        """P: frames that become one step. Step s depends on frames ``P s - A`` to ``P s + P - 1 + A``."""
        self.edges = [side * sum(self.pool**each for each in range(layer)) for layer in range(self.layers + 1)]
        """Frames on both sides that so many convolutions look at besides, the last of them A."""
        self.around, self.kept_frames = self.edges[-1], 2 * self.edges[-1] + self.together
        # From t * hop on so many samples make frame t final; the reflection at the beginning needs those before it.
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
        """Shapes of the state by name; ``"batch"`` is any number."""

    def start(self, batch: int) -> tuple[Tensor, ...]:
        """Return the state before the first call."""
        sizes = ([batch if size == "batch" else int(size) for size in shape] for shape in self.shapes.values())
        heard, *others = map(torch.zeros, sizes)
        return heard.long(), *others

    def forward(
        self, samples: Tensor, heard: Tensor, tail: Tensor, frames: Tensor, hidden: Tensor, total: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the answers for all that was heard, and the next state; see :data:`STATES`."""
        before, after = heard[0], heard[0] + samples.shape[1]
        first_frame, final_frame = self._final_frames(before), self._final_frames(after)
        first_step, final_step = self._final_steps(first_frame), self._final_steps(final_frame)
        lengths = [self._frames(after)]
        """Frames of a recording that ends here, before each convolution and after the last; an item too short is one frame."""
        for _ in range(self.layers):
            lengths.append((lengths[-1] // self.pool).clamp_min(1))
        count = (samples.shape[1] + self.needed - 1) // self.front_end.hop + 1
        steps = (count + self.around + self.together - 1) // self.together
        sounds = torch.cat([tail, samples], 1)
        known = torch.cat([frames, self._new_frames(sounds, first_frame + torch.arange(count), before, after)], 1)
        begin = first_step * self.together - self.around
        wanted = begin + torch.arange(steps * self.together + 2 * self.around)
        x = _within(known, wanted - first_frame + self.kept_frames)
        x = torch.where(_inside(wanted, lengths[0]), x, 0.0)
        for layer, convolution in enumerate(self.network.convolutions, start=1):
            maps = F.conv1d(x.transpose(1, 2), convolution.weight, convolution.bias).relu().unsqueeze(2)  # type: ignore[arg-type]
            # Pooling over two dimensions, as in network.py: torch.export takes the frames of max_pool1d for a constant.
            x = F.max_pool2d(maps, (1, self.pool)).squeeze(2).transpose(1, 2)
            if layer < self.layers:  # what the next convolution sees beyond the ends is 0, not the convolution of zeros
                begin = first_step * self.pool ** (self.layers - layer) - self.edges[self.layers - layer]
                x = torch.where(_inside(begin + torch.arange(x.shape[1]), lengths[layer]), x, 0.0)
        outputs = self.network.gru(x, hidden)[0]
        numbers = torch.arange(steps)[None, :, None]
        shown = total + torch.where(numbers < lengths[-1] - first_step, outputs, 0.0).sum(1)
        final = final_step - first_step
        answers = self.objective.answer(self.network.output(shown / lengths[-1]))
        states = torch.cat([hidden.transpose(0, 1), outputs], 1)
        return (
            answers,
            after.reshape(1),
            _within(sounds, samples.shape[1] + torch.arange(self.kept_samples)),
            _within(known, final_frame - first_frame + torch.arange(self.kept_frames)),
            _within(states, final.reshape(1)).transpose(0, 1),
            total + torch.where(numbers < final, outputs, 0.0).sum(1),
        )

    def _frames(self, samples: Tensor) -> Tensor:
        """Return the number of frames of a recording."""
        past = samples if self.front_end.centred else (samples - len(self.front_end.window)).clamp_min(0)
        return past // self.front_end.hop + 1

    def _final_frames(self, samples: Tensor) -> Tensor:
        """Return how many frames no later sample can change."""
        hop = self.front_end.hop
        return (samples - self.needed + hop).clamp_min(0) // hop

    def _final_steps(self, frames: Tensor) -> Tensor:
        """Return how many steps of the GRU no later frame can change."""
        steps: Tensor = (frames - self.around).clamp_min(0) // self.together
        return steps

    def _new_frames(self, sounds: Tensor, numbers: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Return the features of frames of the recording that ends now: float32 [batch, frames, bands].

        Args:
            sounds: float32 [batch, samples], the samples from ``before - kept_samples`` to ``after``.
            numbers: int64 [frames], of the frames.
            before: samples heard before.
            after: samples heard now.
        """
        front_end = self.front_end
        places = front_end.places(front_end.positions(numbers), after.clamp_min(front_end.shortest) - 1)
        windows = _within(sounds, (places - before + self.kept_samples).flatten())
        windows = windows.reshape(sounds.shape[0], *places.shape)
        logarithms = front_end.logarithms(torch.where(places < after, windows, 0.0))
        return self.features.normalised(logarithms)


def _within(x: Tensor, places: Tensor) -> Tensor:
    """Return entries of dimension 1; places outside are moved to the ends."""
    return x.index_select(1, places.clamp(0, x.shape[1] - 1))


def _inside(numbers: Tensor, length: Tensor) -> Tensor:
    """Return which frames a recording of so many has: bool [1, frames, 1]."""
    return ((numbers >= 0) & (numbers < length))[None, :, None]


def _check_network(model: RunModel) -> CRNN:
    """Return the network of a model that can be heard piece by piece.

    Raises:
        InputError: it cannot be.
    """
    network, features, pipeline = model.network, read_settings(model), model.view.pipeline
    what = f"--streaming: model {model.name!r} ({model.spec.architecture})"
    if not isinstance(network, CRNN) or model.objective.answers not in ("class", "set"):
        raise InputError(
            f"{what} cannot be heard piece by piece: only CRNNs that classify can, such as crnn_tiny, crnn_lite and crnn_mid; take "
            f"--input wave"
        )
    if network.gru.bidirectional:
        raise InputError(
            f"{what} has a GRU that begins at the end of a recording; train one with bidirectional: false, such as crnn_lite, or "
            f"take --input wave"
        )
    if model.view.test_segments is not None or pipeline.cut is not None:
        raise InputError(
            f"{what} is asked about segments or crops of a recording; train it without data.segment and random_crop, or take "
            f"--input wave"
        )
    late = pipeline.late is not None and pipeline.late.z_score
    if features.normalise == "clip" or late:
        raise InputError(
            f"{what} was trained on features that are normalised over the whole clip (data.features.normalise: clip), which is not "
            f"known before its end; train it with normalise: part, group, client or none, or take --input wave"
        )
    if isinstance(features, FeatureSettings) and features.wave == "unit_norm":
        raise InputError(
            f"{what} was trained on samples divided by the loudness of the whole clip (data.features.wave: unit_norm), which is "
            f"not known before its end; train it with wave: as_is, or take --input wave"
        )
    return network


def unbounded(model: RunModel) -> RunModel:
    """Return the model as it is asked about recordings that are neither cut nor filled, whatever the run's settings say."""
    names, features = ("seconds", "least_seconds", "frames"), model.view.features
    free = {each: None for each in names if each in type(features).model_fields}
    return replace(model, view=replace(model.view, features=features.model_copy(update=free)), length=None)


class Stream:
    """A model heard piece by piece, by ONNX Runtime."""

    def __init__(self, session: Any, batch: int = 1) -> None:
        """Begin to listen.

        Args:
            session: of the graph.
            batch: streams that are heard at the same time, in step.
        """
        self._session = session
        _, *state = session.get_inputs()
        kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
        sizes = {each.name: [batch if size == "batch" else size for size in each.shape] for each in state}
        self._state = {each.name: np.zeros(sizes[each.name], kinds[each.type]) for each in state}

    def hear(self, samples: np.ndarray) -> np.ndarray:
        """Return the answers float32 [batch, answers] for all that was heard, with these samples float32 [batch, samples]."""
        found: np.ndarray
        found, *state = self._session.run(None, {"samples": samples, **self._state})
        self._state = dict(zip(self._state, state, strict=True))
        return found


def stream_graph(model: RunModel) -> bytes:
    """Return the ONNX model from ``samples`` and the state to the answers and the next state.

    Raises:
        InputError: see :class:`Streaming`.
    """
    module = Streaming(model)
    given = dict(zip(("samples", *STATES), (torch.randn(2, 1_000), *module.start(2)), strict=True))
    sizes = [{n: size for n, size in enumerate(shape) if size == "batch"} for shape in module.shapes.values()]
    outputs = [model.output_names[-1], *(f"next_{name}" for name in STATES)]
    return trace(replace_modules(module).eval(), given, [{0: "batch", 1: "samples"}, *sizes], outputs)


def largest_difference(hear: Callable[[np.ndarray], np.ndarray], model: RunModel) -> float:
    """Return the largest difference of an answer to that of the network for what was heard until then.

    Args:
        hear: from two streams' next samples to the answers.
        model: of the run.

    Raises:
        InputError: the difference is larger than 1e-4.
    """
    front_end, settings = FrontEnd(unbounded(model)), read_settings(model)
    rate, window, worst = settings.sample_rate, settings.window, 0.0
    waves, piece = make_sounds(round(_SECONDS * rate), rate), round(_PIECE * rate)
    for end in range(piece, waves.shape[1] + 1, piece):
        found = hear(waves[:, end - piece : end])
        if end >= window and (end % (5 * piece) == 0 or end <= 3 * piece):
            expected = predict_waves(front_end, waves[:, :end], rate)
            if expected is not None:
                worst = max(worst, compare(found, expected, model, f"after {end / rate:.2f} s of a stream"))
    return worst
