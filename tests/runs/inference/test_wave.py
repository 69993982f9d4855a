"""Modules and graphs with samples as input. Oracle: the code of ``raydfl predict`` in PyTorch."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hearing import make_untrained_model
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
    "transcribe": {"architecture": "crnn_tiny", "objective": "transcribe"},
    "events": {
        "architecture": "crnn_tiny",
        "objective": "events",
        "features": {"sample_rate": 8000, "bands": 16, "seconds": 0.8},
    },
}


def make_module(model: RunModel) -> Callable[[np.ndarray], np.ndarray]:
    """Return the exported module in PyTorch, because an export takes seconds."""
    from raydfl.runs.inference.wave import Answer

    def network(x: Tensor, lengths: Tensor | None) -> Tensor:
        outputs = model.network(x, lengths)
        return outputs if model.objective.averages_logits() else model.objective.answer(outputs)

    module = Answer(model, network)

    def answer(samples: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(samples)).numpy()

    return answer


@pytest.mark.parametrize("by", ["PyTorch", pytest.param("ONNX Runtime", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_the_module_agrees_with_predict(name: str, by: str) -> None:
    from raydfl.runs.inference.network import open_session, to_onnx
    from raydfl.runs.inference.recordings import FrontEnd
    from raydfl.runs.inference.wave import build_answer_graph, make_sounds, takes_lengths

    model = make_untrained_model(**{"architecture": "linear", **FRONT_ENDS[name]})
    answer, front_end = make_module(model), FrontEnd(model)
    if by == "ONNX Runtime":
        session = open_session(build_answer_graph(model, to_onnx(model, takes_lengths(model))), 1)

        def answer(samples: np.ndarray) -> np.ndarray:
            (found,) = session.run([model.output_names[-1]], {"samples": samples})
            return found

    rate = model.view.stored_features.sample_rate
    for seconds in (0.003, 0.243, 0.35, 1.0):
        waves = make_sounds(round(seconds * rate), rate)
        expected = np.stack([front_end.answer_to(wave, rate) for wave in waves])
        joined = model.objective.join(
            [torch.from_numpy(answer(waves)), torch.from_numpy(expected)]
        )  # numbers of tokens may differ
        np.testing.assert_allclose(*np.split(joined.numpy(), 2), atol=2e-5)
    assert np.ptp(expected) > 0.05  # of predictions that differ between recordings


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("openwakeword") is None, reason="the extra embedding is not installed")
@pytest.mark.parametrize("seconds", [None, 0.5])
def test_the_graph_contains_the_speech_embedding(seconds: float | None) -> None:
    """A loud recording in the batch must not change a quiet one."""
    from raydfl.runs.inference.network import open_session, to_onnx
    from raydfl.runs.inference.recordings import FrontEnd
    from raydfl.runs.inference.wave import build_answer_graph, make_sounds, takes_lengths

    model = make_untrained_model("linear", features={"kind": "speech_embedding", "seconds": seconds})
    session = open_session(build_answer_graph(model, to_onnx(model, takes_lengths(model))), 1)
    front_end = FrontEnd(model)
    for length in (48, 3_888, 16_000):
        waves = make_sounds(length, 16_000) * np.array([[1.0], [0.01]], np.float32)
        expected = np.stack([front_end.answer_to(wave, 16_000) for wave in waves])
        np.testing.assert_allclose(session.run(None, {"samples": waves})[0], expected, atol=2e-5)
    assert np.ptp(expected) > 0.05


def test_silence_agrees_with_predict() -> None:
    from raydfl.runs.inference.recordings import FrontEnd

    model = make_untrained_model("linear")
    silence = np.zeros((1, 2000), np.float32)
    np.testing.assert_allclose(make_module(model)(silence)[0], FrontEnd(model).answer_to(silence[0], 8000), atol=1e-6)


def test_a_wrong_front_end_is_not_written() -> None:
    from raydfl.runs.inference.wave import measure_difference

    model = make_untrained_model("linear", **FRONT_ENDS["kaldi"])
    answer = make_module(model)
    assert measure_difference(answer, model) < 1e-5
    with pytest.raises(InputError, match=r"model 'm' \(linear\) differs from raydfl predict by .*nothing was"):
        measure_difference(lambda samples: answer(0.9 * samples + 0.01 * samples**2), model)


@dataclass(frozen=True, kw_only=True)
class Loudest(Objective):
    """An objective with the largest output of all segments as its result."""

    make_module = "class"

    def answer_of_clip(self, outputs: Tensor) -> Tensor:
        return outputs.amax(dim=0)


def test_unsupported_settings_of_a_graph_are_rejected() -> None:
    of_group = make_untrained_model("linear", features={"sample_rate": 8000, "bands": 16, "normalise": "group"})
    with pytest.raises(InputError, match=r"the statistics of the training clips of .* are unknown .*normalise: group"):
        make_module(of_group)
    with pytest.raises(InputError, match="Loudest combines the segments of a recording in Python"):
        make_module(dataclasses.replace(make_untrained_model("linear"), objective=Loudest()))
    with pytest.raises(InputError, match="Events combines the segments of a recording in Python"):
        make_module(make_untrained_model("crnn_tiny", objective="events", segment={"frames": 20, "stride": 10}))
    trimmed = {"sample_rate": 8000, "bands": 16, "trim_db": 40}
    with pytest.raises(InputError, match=r"without silence at both ends \(data.features.trim_db\)"):
        make_module(make_untrained_model("linear", features=trimmed))
    own = {"kind": "model", "model": "mine.py:Mine", "bands": 16}
    with pytest.raises(InputError, match="raydfl does not compute features of the kind model"):
        make_module(make_untrained_model("linear", features=own))
