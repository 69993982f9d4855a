"""A CRNN as an ONNX graph that hears a recording piece by piece, of any number of samples each, and answers after every piece.

The answer is always that for all that was heard so far, taken as a whole recording: as ``raydfl predict`` gives it. Between two
calls the graph's state says what was heard:

- ``heard``, int64 [1]: how many samples;
- ``tail``, float32 [batch, samples]: the last of them, which frames to come look at;
- ``frames``, float32 [batch, frames, bands]: the last frames of features, which convolutions to come look at;
- ``hidden``, float32 [1, batch, units]: the GRU after the last of its steps that nothing to come can change;
- ``total``, float32 [batch, units]: the sum of what the GRU gave up to there.

Each call computes from there to the end of what was heard; the part of it that later samples could change is computed again in
the next call. At the ends the whole recording's rules hold: reflection, zeros before and after each convolution, and poolings that
leave out a rest.

Limits: the answer needs no frame of the future, so a GRU in one direction and no normalisation over the whole clip. A stream is
neither cut nor filled, whatever ``seconds``, ``least_seconds`` or ``frames`` say. With Kaldi's features the answer to less than a
window (25 ms) is not predict's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto
from torch import Tensor

from raydfl.core.errors import InputError
from raydfl.data.features import FeatureSettings
from raydfl.models import CRNN
from raydfl.objectives import Objective
from raydfl.runs.inference.graph import TOLERANCE
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.network import stacked_gates
from raydfl.runs.inference.nodes import Nodes, Value
from raydfl.runs.inference.recordings import FrontEnd
from raydfl.runs.inference.spectrum import Spectrum, settings_of, spectrum_of
from raydfl.runs.inference.wave import answer_name, answers_to, session_of, sounds

STATES = ("heard", "tail", "frames", "hidden", "total")
"""Inputs of the graph besides ``samples``. They begin as zeros; in the next call they are the outputs ``next_heard`` ..."""
_SECONDS, _PIECE = 0.83, 0.02


def of_streams(model: RunModel) -> bytes:
    """Return the ONNX model from ``samples`` float32 [batch, samples] and the state to the answer and the next state.

    Raises:
        InputError: the model cannot be heard piece by piece; the message says why, and what to train instead.
    """
    network, objective = _streamed(model)
    spectrum, nodes = spectrum_of(model), Nodes()
    samples = nodes.input("samples", ["batch", "samples"])
    sizes = state_shapes(model)
    kinds = dict.fromkeys(STATES, TensorProto.FLOAT) | {"heard": TensorProto.INT64}
    state = {name: nodes.input(name, sizes[name], kinds[name]) for name in STATES}
    heard = _Heard(spectrum, network, nodes("Squeeze", state["heard"]), samples.size(1))
    features, state["tail"], state["frames"] = heard.features(state["tail"], samples, state["frames"])
    steps = _convolved(network, heard, features)
    outputs, hidden = _recurrence(network, steps, state["hidden"])
    number = nodes.places(heard.steps_computed).with_axes(0, 2)  # [1, steps, 1]
    final, shown = heard.final_steps - heard.first_step, heard.steps - heard.first_step
    mean = (state["total"] + _up_to(outputs, number, shown)) / heard.steps.as_type(TensorProto.FLOAT)
    state["total"] = state["total"] + _up_to(outputs, number, final)
    state["hidden"] = hidden.take(nodes.listed(final), 0)
    state["heard"] = nodes.listed(heard.samples)
    logits = nodes("Gemm", mean, _array(network.output.weight), _array(network.output.bias), transB=1)
    answer = nodes("Softmax", logits) if objective.answers == "class" else nodes("Sigmoid", logits)
    nodes.output(answer_name(objective), answer, ["batch", len(model.classes)])
    for name in STATES:
        nodes.output(f"next_{name}", state[name], sizes[name], kinds[name])
    return nodes.model()


def state_shapes(model: RunModel) -> dict[str, list[int | str]]:
    """Return the shapes of the state by name; ``"batch"`` stands for any number."""
    network, _ = _streamed(model)
    spectrum, units = spectrum_of(model), network.gru.hidden_size
    frames, bands = _Reach(network).frames_kept, model.view.stored_features.bands
    return {
        "heard": [1],
        "tail": ["batch", _kept_samples(spectrum)],
        "frames": ["batch", frames, bands],
        "hidden": [1, "batch", units],
        "total": ["batch", units],
    }


def _streamed(model: RunModel) -> tuple[CRNN, Objective]:
    """Return network and objective of a model that can be heard piece by piece.

    Raises:
        InputError: it cannot be.
    """
    network, features, pipeline = model.network, settings_of(model), model.view.pipeline
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
    return network, model.objective


def unbounded(model: RunModel) -> RunModel:
    """Return the model as it is asked about recordings that are neither cut nor filled, whatever the run's settings say."""
    names, features = ("seconds", "least_seconds", "frames"), model.view.features
    free = {each: None for each in names if each in type(features).model_fields}
    return replace(model, view=replace(model.view, features=features.model_copy(update=free)), length=None)


class _Reach:
    """The frames that a step of the GRU depends on: ``P s - A`` to ``P s + P - 1 + A`` for step s."""

    def __init__(self, network: CRNN) -> None:
        self.pool: int = network.pool
        self.layers = len(network.convolutions)
        self.side = int(network.convolutions[0].padding[0])  # type: ignore[index]
        self.together = int(self.pool**self.layers)
        """P: frames that become one step."""
        self.around = self.side * sum(int(self.pool**layer) for layer in range(self.layers))
        """A: frames on both sides that convolutions look at besides."""
        self.frames_kept = 2 * self.around + self.together


def _kept_samples(spectrum: Spectrum) -> int:
    """Return how many samples frames to come can look back to."""
    return spectrum.before + _needed_samples(spectrum)


def _needed_samples(spectrum: Spectrum) -> int:
    """Return how many samples from ``t * hop`` on make frame t final; the reflection at the beginning needs those before it."""
    return max(spectrum.window - spectrum.before, spectrum.before + 1)


class _Heard:
    """The counts of a call, int64 [] each, and its frames."""

    def __init__(self, spectrum: Spectrum, network: CRNN, before: Value, new: Value) -> None:
        """Add the nodes for them.

        Args:
            spectrum: of the front end.
            network: whose steps they are.
            before: samples heard before this call.
            new: samples of it.
        """
        self.spectrum, self.reach = spectrum, _Reach(network)
        self.before, self.samples = before, before + new
        self.first_frame = self._final_frames(before)
        """The first that was not final before this call."""
        self.final_frames = self._final_frames(self.samples)
        self.frames = spectrum.frames(self.samples)
        """Frames of a recording that ends here."""
        self.first_step = self._final_steps(self.first_frame)
        """The first that was not final before this call."""
        self.final_steps = self._final_steps(self.final_frames)
        self.lengths = [self.frames]
        """Frames of a recording that ends here, before each convolution and after the last; an item too short is one frame."""
        for _ in range(self.reach.layers):
            self.lengths.append((self.lengths[-1] // self.reach.pool).at_least(1))
        self.steps = self.lengths[-1]
        # One too many where there is none: an array without a row is more than some runtimes take.
        self.frames_computed = (self.frames - self.first_frame).at_least(1)
        self.steps_computed = (self.steps - self.first_step).at_least(1)

    def _final_frames(self, samples: Value) -> Value:
        """Return how many frames no later sample can change."""
        past = samples - _needed_samples(self.spectrum)
        return ((past + self.spectrum.hop) // self.spectrum.hop).at_least(0)

    def _final_steps(self, frames: Value) -> Value:
        """Return how many steps of the GRU no later frame can change."""
        return ((frames - self.reach.around) // self.reach.together).at_least(0)

    def features(self, tail: Value, samples: Value, frames: Value) -> tuple[Value, Value, Value]:
        """Return the frames that the steps of this call depend on, and what is kept of samples and frames for the next call."""
        nodes, kept = samples.nodes, _kept_samples(self.spectrum)
        sounds = nodes.joined([tail, samples], 1)
        numbers = nodes.places(self.frames_computed) + self.first_frame
        places = self.spectrum.places(numbers, self.samples)
        there = places < self.samples
        buffered = _within(places - self.before + kept, sounds.size(1))
        windows = nodes.where(there, sounds.take(buffered, 1), 0.0)
        new = self.spectrum.stored(self.spectrum.features(windows))
        known = nodes.joined([frames, new], 1)  # from frame first_frame - frames_kept on
        # The steps begin at frame P s - A.
        start = self.first_step * self.reach.together - self.reach.around
        count = self.steps_computed * self.reach.together + 2 * self.reach.around
        wanted = nodes.places(count) + start
        shown = known.take(_within(wanted - self.first_frame + self.reach.frames_kept, known.size(1)), 1)
        inside = _inside(wanted, self.frames)
        last = sounds.take(nodes.places(kept) + samples.size(1), 1)
        return (
            nodes.where(inside, shown, 0.0),
            last,
            known.take(nodes.places(self.reach.frames_kept) + (self.final_frames - self.first_frame), 1),
        )


def _within(places: Value, size: Value) -> Value:
    """Return places of which those outside of an array are moved to its ends."""
    return places.at_least(0).at_most(size - 1)


def _inside(numbers: Value, length: Value) -> Value:
    """Return which frames there are in a recording of so many: bool [1, frames, 1]."""
    return ((numbers >= 0) & (numbers < length)).with_axes(0, 2)


def _convolved(network: CRNN, heard: _Heard, x: Value) -> Value:
    """Return what the GRU gets: float32 [batch, steps, filters], for the steps from ``heard.first_step`` on.

    Args:
        network: with its convolutions.
        heard: the counts.
        x: float32 [batch, frames, bands], frames outside of the recording 0.
    """
    nodes, reach = x.nodes, heard.reach
    for layer, convolution in enumerate(network.convolutions, start=1):
        weight, bias = _array(convolution.weight), _array(convolution.bias)  # type: ignore[arg-type]
        maps = nodes("Relu", nodes("Conv", nodes("Transpose", x, perm=[0, 2, 1]), weight, bias))
        if reach.pool > 1:
            maps = nodes("MaxPool", maps, kernel_shape=[reach.pool], strides=[reach.pool])
        x = nodes("Transpose", maps, perm=[0, 2, 1])
        if (
            layer < reach.layers
        ):  # what the next convolution sees beyond the ends is 0, and not the convolution of zeros
            later = reach.layers - layer
            begin = heard.first_step * reach.pool**later - reach.side * sum(reach.pool**each for each in range(later))
            numbers = nodes.places(x.size(1)) + begin
            x = nodes.where(_inside(numbers, heard.lengths[layer]), x, 0.0)
    return x


def _recurrence(network: CRNN, steps: Value, hidden: Value) -> tuple[Value, Value]:
    """Return the GRU's outputs float32 [batch, steps, units], and its states float32 [1 + steps, batch, units], the given first."""
    gru, nodes = network.gru, steps.nodes
    biases = np.concatenate([stacked_gates(gru, f"bias_{kind}_l0") for kind in ("ih", "hh")], axis=1)
    outputs = nodes(
        "GRU",
        nodes("Transpose", steps, perm=[1, 0, 2]),
        stacked_gates(gru, "weight_ih_l0").numpy(),
        stacked_gates(gru, "weight_hh_l0").numpy(),
        biases,
        None,
        hidden,
        hidden_size=gru.hidden_size,
        linear_before_reset=1,
    )  # [steps, 1, batch, units]
    of_steps = nodes("Squeeze", outputs, np.array([1]))
    return nodes("Transpose", of_steps, perm=[1, 0, 2]), nodes.joined([hidden, of_steps], 0)


def _up_to(outputs: Value, number: Value, count: Value) -> Value:
    """Return the sum of the first ``count`` outputs: float32 [batch, units]."""
    return outputs.nodes.where(number < count, outputs, 0.0).sum(1, keep=False)


def _array(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().numpy()
    return found


class Stream:
    """A model heard piece by piece, by ONNX Runtime."""

    def __init__(self, session: Any, batch: int = 1) -> None:
        """Begin to listen.

        Args:
            session: of the graph.
            batch: streams that are heard at the same time, in step.
        """
        self._session = session
        self._state = {
            given.name: np.zeros(
                [batch if size == "batch" else size for size in given.shape],
                np.int64 if given.name == "heard" else np.float32,
            )
            for given in session.get_inputs()
            if given.name in STATES
        }

    def hear(self, samples: np.ndarray) -> np.ndarray:
        """Return the answer float32 [batch, answers] for all that was heard, with these samples (float32 [batch, samples])."""
        answer, *state = self._session.run(None, {"samples": samples, **self._state})
        self._state = dict(zip(STATES, state, strict=True))
        found: np.ndarray = answer
        return found


def checked_stream(content: bytes, model: RunModel) -> float:
    """Return the largest difference of an answer to that of the network for what was heard until then.

    Raises:
        InputError: it is larger than 1e-4.
    """
    session, front_end = session_of(content), FrontEnd(unbounded(model))
    rate = settings_of(model).sample_rate
    waves = sounds(round(_SECONDS * rate), rate)
    stream, piece, window = Stream(session, len(waves)), round(_PIECE * rate), spectrum_of(model).window
    differences = []
    for end in range(piece, waves.shape[1] + 1, piece):
        found = stream.hear(waves[:, end - piece : end])
        if end >= window and (end % (5 * piece) == 0 or end <= 3 * piece):
            expected = answers_to(front_end, waves[:, :end], rate)
            if expected is not None:
                differences.append(np.abs(found - expected).max())
    worst = float(np.max(differences, initial=0.0))
    if not worst <= TOLERANCE:
        raise InputError(
            f"the streaming ONNX graph of model {model.name!r} ({model.spec.architecture}) answers otherwise than the network, by "
            f"{worst:.1e}; nothing was written: leave --streaming out"
        )
    return worst
