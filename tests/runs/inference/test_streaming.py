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


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("linear", {}, "Use a CRNN classifier"),
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
