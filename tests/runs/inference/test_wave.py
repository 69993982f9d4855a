"""Graphs that take samples. Oracle: ``raydfl predict``'s own way from samples to the answer, in PyTorch."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hearing import CLASSES, untrained
from torch import Tensor

from raydfl.core.errors import InputError
from raydfl.objectives import Objective
from raydfl.runs.inference.model import RunModel

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="the packages of the extra onnx are not installed",
)

WIDE = {"sample_rate": 16_000, "bands": 64, "fft": 1024, "low_hz": 60, "high_hz": 7800}
FRONT_ENDS: dict[str, dict[str, Any]] = {
    "clip": {},
    "cut": {"features": {"sample_rate": 8000, "bands": 30, "seconds": 0.3, "mel": "slaney", "spectrum": "magnitude"}},
    "odd": {"features": {"sample_rate": 11_025, "bands": 24, "window_ms": 31.7, "hop_ms": 7.3, "dtype": "float16"}},
    "fedstar": {
        "average": "logits",
        "features": {
            **WIDE,
            "centred": False,
            "wave": "unit_norm",
            "spectrum": "magnitude",
            "scale": "log",
            "normalise": "none",
            "least_seconds": 0.5,
        },
        "transforms": [{"name": "random_crop", "size": 30, "test": "segments"}],
    },
    "kaldi": {"features": {"kind": "kaldi", "sample_rate": 16_000, "bands": 32}},
    "ssast": {"features": {"kind": "kaldi", "sample_rate": 16_000, "bands": 32, "seconds": 0.9, "frames": 64}},
    "segments": {"segment": {"frames": 20, "stride": 10, "keep_last": False}},
    "late": {
        "features": {"sample_rate": 8000, "bands": 16, "seconds": 0.8},
        "transforms": [{"name": "random_crop", "size": 20, "test": "segments"}, "noise"],
    },
    "centre": {"features": {"sample_rate": 8000, "bands": 16}, "transforms": [{"name": "random_crop", "size": 20}]},
    "part": {"features": {"sample_rate": 8000, "bands": 16, "normalise": "part"}},
}


def linear(model: RunModel) -> Any:
    """The network ``linear`` as a graph from features, written by hand: the exporter takes seconds."""
    from raydfl.runs.inference.graph import Graph
    from raydfl.runs.inference.nodes import Nodes
    from raydfl.runs.inference.wave import takes_lengths

    nodes, output = Nodes(), model.network.output
    x = nodes.input("x", ["batch", "frames", model.spec.inputs])
    frames = x.size(1)
    if takes_lengths(model):
        lengths = nodes.input("lengths", ["batch"], 7).with_axes(1)
        mask = (nodes.places(frames).with_axes(0) < lengths).as_type(1)
        mean = (x * mask.with_axes(2)).sum(1, keep=False) / lengths.as_type(1)
    else:
        mean = x.sum(1, keep=False) / frames.as_type(1)
    weight, bias = (tensor.detach().numpy() for tensor in (output.weight, output.bias))
    logits = nodes("Gemm", mean, weight, bias, transB=1)
    nodes.output("logits", logits, ["batch", len(CLASSES)])
    nodes.output("probabilities", nodes("Softmax", logits), ["batch", len(CLASSES)])
    return Graph(nodes.model(), None, takes_lengths(model), 0.0)


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_the_answer_is_that_of_predict(name: str) -> None:
    from raydfl.runs.inference.recordings import FrontEnd
    from raydfl.runs.inference.wave import of_waves, session_of, sounds

    model = untrained("linear", **FRONT_ENDS[name])
    session, front_end = session_of(of_waves(model, linear(model)), 1), FrontEnd(model)
    rate = model.view.stored_features.sample_rate
    for seconds in (0.003, 0.243, 0.35, 1.0):
        waves = sounds(round(seconds * rate), rate)
        found = session.run(["probabilities"], {"samples": waves})[0]
        expected = np.stack([front_end.answer_to(wave, rate) for wave in waves])
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.ptp(expected) > 0.05  # of answers that tell recordings from others


def test_silence_is_what_it_is_to_predict() -> None:
    from raydfl.runs.inference.recordings import FrontEnd
    from raydfl.runs.inference.wave import of_waves, session_of

    model = untrained("linear")
    silence = np.zeros((1, 2000), np.float32)
    found = session_of(of_waves(model, linear(model)), 1).run(["probabilities"], {"samples": silence})[0]
    np.testing.assert_allclose(found[0], FrontEnd(model).answer_to(silence[0], 8000), atol=1e-6)


def test_a_front_end_that_disagrees_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from raydfl.runs.inference import spectrum
    from raydfl.runs.inference.wave import checked, of_waves

    model = untrained("linear", **FRONT_ENDS["kaldi"])
    assert checked(of_waves(model, linear(model)), model) < 1e-5
    monkeypatch.setattr(spectrum, "_PRE_EMPHASIS", 0.9)  # the mistake to be found
    with pytest.raises(
        InputError, match=r"model 'm' \(linear\) answers otherwise than raydfl predict, by .*nothing was"
    ):
        checked(of_waves(model, linear(model)), model)


@dataclass(frozen=True, kw_only=True)
class Loudest(Objective):
    """An objective that takes the largest output of any segment."""

    answers = "class"

    def answer_of_clip(self, outputs: Tensor) -> Tensor:
        return outputs.amax(dim=0)


def test_what_cannot_be_in_the_graph_is_refused() -> None:
    from raydfl.runs.inference.wave import check_front_end

    of_group = untrained("linear", features={"sample_rate": 8000, "bands": 16, "normalise": "group"})
    with pytest.raises(InputError, match=r"does not know the statistics of its training clips .*normalise: group"):
        check_front_end(of_group)
    with pytest.raises(InputError, match="Loudest answers for a recording in a way of its own"):
        check_front_end(dataclasses.replace(untrained("linear"), objective=Loudest()))
    own = {"kind": "model", "model": "mine.py:Mine", "bands": 16}
    with pytest.raises(InputError, match="of the kind model, which raydfl does not compute of samples itself"):
        check_front_end(untrained("linear", features=own))
    assert torch.is_tensor(of_group.network.output.weight)
