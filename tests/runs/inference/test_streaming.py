"""Streaming modules and graphs. Oracle: the network's prediction in PyTorch for the complete recording."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hearing import make_untrained_model

from raydfl.core.errors import InputError

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="the packages of the extra onnx are not installed",
)

PART: dict[str, Any] = {"sample_rate": 8000, "bands": 16, "window_ms": 25, "hop_ms": 10, "normalise": "part"}
ONE_WAY: dict[str, Any] = {"filters": [6, 5], "hidden": 7, "bidirectional": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two": (PART, ONE_WAY),
    "three": ({**PART, "centred": False, "fft": 512}, {**ONE_WAY, "filters": [6, 5, 4], "pool": 3}),
    "unpooled": ({**PART, "hop_ms": 20, "window_ms": 20, "seconds": 0.1}, {**ONE_WAY, "kernel": 7, "pool": 1}),
    "kaldi": ({"kind": "kaldi", "sample_rate": 16_000, "bands": 24, "frames": 64}, {**ONE_WAY, "kernel": 5}),
}
TOKENS = {"transcribe": (PART, ONE_WAY), "events": ({**PART, "centred": False}, {**ONE_WAY, "kernel": 5})}


UNEVEN = (3.0, 71.0, 1.25, 33.0)


@pytest.mark.parametrize("by", ["PyTorch", pytest.param("ONNX Runtime", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("case", "pieces_ms"),
    [("two", (20,)), ("two", (80,)), ("three", UNEVEN), ("unpooled", UNEVEN), ("kaldi", (80,))],
    ids=["two-20ms", "two-80ms", "three-uneven", "unpooled-uneven", "kaldi-80ms"],
)
def test_streaming_agrees_with_the_complete_recording(case: str, pieces_ms: tuple[float, ...], by: str) -> None:
    from raydfl.runs.inference.network import open_session
    from raydfl.runs.inference.recordings import FrontEnd
    from raydfl.runs.inference.streaming import Stream, Streaming, build_stream_graph, remove_limits
    from raydfl.runs.inference.wave import make_sounds

    features, options = CASES[case]
    model = make_untrained_model("crnn", options=options, features=features)
    rate = features["sample_rate"]
    waves, front_end = make_sounds(round(0.45 * rate), rate), FrontEnd(remove_limits(model))
    if by == "PyTorch":
        module = Streaming(model)
        state, end = module.start(len(waves)), 0
    else:
        stream, end = Stream(open_session(build_stream_graph(model), 1), len(waves)), 0
    for number, piece in enumerate(itertools.cycle(pieces_ms)):
        begin, end = end, min(end + round(piece * rate / 1000), waves.shape[1])
        if by == "PyTorch":
            with torch.no_grad():
                answer, *state = module(torch.from_numpy(waves[:, begin:end]), *state)
            actual = answer.numpy()
        else:
            actual = stream.process(waves[:, begin:end])
        if (number < 3 or number % 4 == 0 or end == waves.shape[1]) and end > 0.025 * rate:
            expected = np.stack([front_end.answer_to(wave[:end], rate) for wave in waves])
            np.testing.assert_allclose(actual, expected, atol=1e-5)
        if end == waves.shape[1]:
            break
    assert np.ptp(actual) > 0.05


@pytest.mark.parametrize("by", ["PyTorch", pytest.param("ONNX Runtime", marks=pytest.mark.slow)])
@pytest.mark.parametrize("objective", TOKENS)
def test_streamed_tokens_agree_with_the_complete_recording(objective: str, by: str) -> None:
    """Final tokens, followed by the rest of the last call, are those of the recording so far. Final tokens never change."""
    from raydfl.runs.inference.network import open_session
    from raydfl.runs.inference.recordings import FrontEnd
    from raydfl.runs.inference.streaming import Stream, Streaming, build_stream_graph, remove_limits
    from raydfl.runs.inference.wave import make_sounds

    features, options = TOKENS[objective]
    model = make_untrained_model("crnn", options=options, features=features, objective=objective)
    waves, front_end, module = make_sounds(6000, 8000), FrontEnd(remove_limits(model)), Streaming(model)
    stream = Stream(open_session(build_stream_graph(model), 1), 2) if by == "ONNX Runtime" else None
    state, final, end = module.start(2), np.zeros((2, 0, 3), np.float32), 0
    for piece in itertools.cycle((160, 777, 3, 1600)):
        begin, end = end, min(end + piece, waves.shape[1])
        if stream is None:
            with torch.no_grad():
                answers, count, *state = module(torch.from_numpy(waves[:, begin:end]), *state)
            tokens = np.concatenate([final, answers.numpy()], axis=1)
            final = tokens[:, : final.shape[1] + int(count)]
        else:
            tokens = stream.process(waves[:, begin:end])
        if end > 400:
            expected = np.stack([front_end.answer_to(wave[:end], 8000) for wave in waves])
            size = min(tokens.shape[1], expected.shape[1])
            np.testing.assert_allclose(tokens[:, :size], expected[:, :size], atol=1e-5)
            fill = model.objective.fill(torch.zeros(1, 1, 3)).numpy()
            assert (tokens[:, size:] == fill).all()
            assert (expected[:, size:] == fill).all()
        if end == waves.shape[1]:
            break
    assert np.ptp(expected[:, :size, 1]) > 0.05
    assert size > 15
    assert stream is not None or size - 3 <= final.shape[1] < size


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("linear", {}, "Use a CRNN, such as crnn_tiny"),
        ("crnn_base", {}, "needs the end of a recording. Train with bidirectional: false"),
        ("crnn_tiny", {"features": {**PART, "normalise": "clip"}}, "over the whole clip .*normalise: part, group"),
        ("crnn_tiny", {"features": {**PART, "wave": "unit_norm"}}, "divided by the loudness of the whole clip"),
        ("crnn_tiny", {"segment": {"frames": 20, "stride": 10}}, "reads segments or crops"),
        (
            "crnn_tiny",
            {"features": {"kind": "speech_embedding"}},
            "speech_embedding\\), which needs the whole recording",
        ),
    ],
)
def test_unsupported_streams_are_rejected(architecture: str, changes: dict[str, Any], message: str) -> None:
    from raydfl.runs.inference.streaming import Streaming

    with pytest.raises(InputError, match=message):
        Streaming(make_untrained_model(architecture, **{"features": PART, **changes}))
