"""The NumPy front end and program in jobs/, compared with raydfl's features and predictions."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from used_runs import FEATURES, RATE, Finished, make_wave

from raydfl import classify, export_model
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.segment import SegmentSettings, segments
from raydfl.data.settings import DataSettings
from raydfl.runs.inference.front_end import describe_front_end

JOBS = Path(__file__).parents[3] / "jobs"


@pytest.fixture(scope="module")
def front_end() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documented_front_end", JOBS / "front_end.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe(features: FeatureSettings, segment: SegmentSettings | None = None) -> dict[str, Any]:
    return describe_front_end(DataSettings(name="spoken_words", features=features, segment=segment).first_view)


@pytest.mark.parametrize("seconds", [0.003, 0.2, 0.613])
@pytest.mark.parametrize(
    "features",
    [
        {**FEATURES, "normalise": "none"},
        {**FEATURES, "normalise": "none", "seconds": 0.3, "low_hz": 80, "high_hz": 3000, "channel": "mean"},
        {"sample_rate": 11_025, "bands": 24, "window_ms": 31.7, "hop_ms": 7.3, "fft": 1000, "normalise": "none"},
        {"sample_rate": 16_000, "bands": 128, "window_ms": 64, "fft": 1024, "hop_ms": 10, "normalise": "none"},
        {
            "sample_rate": 16_000,
            "bands": 64,
            "fft": 1024,
            "low_hz": 60,
            "high_hz": 7800,
            "centred": False,
            "wave": "unit_norm",
            "spectrum": "magnitude",
            "scale": "log",
            "normalise": "none",
            "least_seconds": 0.5,
        },
        {
            "sample_rate": 8000,
            "bands": 30,
            "mel": "slaney",
            "spectrum": "magnitude",
            "floor": 1e-3,
            "normalise": "none",
        },
        {**FEATURES, "normalise": "none", "trim_db": 6},
    ],
    ids=["plain", "cut", "odd", "fedaudio", "fedstar", "slaney", "trimmed"],
)
def test_the_printed_front_end_agrees_with_raydfl(
    front_end: ModuleType, features: dict[str, Any], seconds: float
) -> None:
    settings = FeatureSettings(**features)
    output = describe(settings)
    tone = np.stack([make_wave(1, "middle", 0, seconds), make_wave(2, "low", 0, seconds)], axis=1)
    extractor = FeatureExtractor(settings)
    mono = front_end.wave(tone, RATE, output)
    np.testing.assert_allclose(mono, extractor.wave(tone, RATE), atol=3e-6)
    actual, expected_rows = front_end.features(mono, output), extractor(tone, RATE)
    frames = settings.frames or len(expected_rows)
    assert actual.shape == (frames, settings.bands)
    # In decibels. Far below the maximum, raydfl's float32 values are dominated by rounding.
    difference = np.abs(actual[: len(expected_rows)] - expected_rows)
    assert difference[expected_rows > expected_rows.max() - 50].max() < 2e-3
    assert difference.max() < 0.05
    assert not actual[len(expected_rows) :].any()


@pytest.mark.parametrize("rate", [4000, 8000, 11_127, 16_000, 22_050, 44_100, 48_000])
def test_the_front_end_supports_all_rates(front_end: ModuleType, rate: int) -> None:
    settings = FeatureSettings(**FEATURES)
    noise = np.random.default_rng(rate).uniform(-1, 1, (rate // 5, 1)).astype(np.float32)
    expected = FeatureExtractor(settings).wave(noise, rate)
    actual = front_end.wave(noise, rate, describe(settings))
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=5e-5)


def test_the_front_end_normalises_and_handles_silence(front_end: ModuleType) -> None:
    settings = FeatureSettings(**FEATURES, seconds=0.4)
    extractor, output = FeatureExtractor(settings), describe(settings)
    tone = make_wave(0, "high", 1, 0.3)
    actual = front_end.features(tone, output)
    np.testing.assert_allclose(actual[:31], extractor(tone, RATE), atol=1e-3)
    assert not actual[31:].any()
    silence = np.zeros(RATE // 4, np.float32)
    np.testing.assert_array_equal(front_end.features(silence, output)[:26], extractor(silence, RATE))
    decibels = FeatureSettings(**FEATURES, normalise="none")
    np.testing.assert_allclose(front_end.features(silence, describe(decibels)), -100.0)


def test_the_front_end_normalises_by_group(front_end: ModuleType) -> None:
    settings = FeatureSettings(**FEATURES, normalise="group")
    statistics = np.random.default_rng(0).uniform(1, 20, (2, settings.bands))
    output = describe_front_end(DataSettings(name="spoken_words", features=settings).first_view, statistics)
    tone = make_wave(0, "high", 1, 0.3)
    decibels = FeatureExtractor(settings)(tone, RATE)
    expected = (decibels - statistics[0]) / (statistics[1] + output["normalise"]["epsilon"])
    np.testing.assert_allclose(front_end.features(tone, output), expected, atol=1e-2)


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("frames", [1, 29, 30, 31, 44, 45, 46, 60, 75, 200])
def test_the_front_end_cuts_segments(front_end: ModuleType, frames: int, keep_last: bool) -> None:
    settings = SegmentSettings(frames=30, stride=10, test_stride=15, keep_last=keep_last)
    _, starts, counts = segments(np.array([frames]), settings, settings.test_stride)
    output = describe(FeatureSettings(**FEATURES), settings)
    parts = front_end.segments(np.arange(frames), output)
    assert [(int(part[0]), len(part)) for part in parts] == list(zip(starts.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("test", ["centre", "segments"])
def test_the_front_end_normalises_after_a_crop(front_end: ModuleType, test: str) -> None:
    transforms = [{"name": "random_crop", "size": 20, "test": test}, {"name": "noise"}]
    data = DataSettings.model_validate(
        {"name": "spoken_words", "features": {**FEATURES, "seconds": 0.6}, "transforms": transforms}
    )
    output = describe_front_end(data.first_view)
    tone = make_wave(0, "high", 1, 0.35)
    parts = front_end.segments(front_end.features(tone, output), output)
    extractor = FeatureExtractor(data.first_view.stored_features)  # type: ignore[arg-type]
    matrix = np.zeros((61, data.features.bands), np.float32)
    matrix[:36] = extractor(tone, RATE)
    _, starts, counts = segments(np.array([61]), data.first_view.test_segments, None)
    starts, counts = data.first_view.pipeline.window(starts, counts)
    assert [len(part) for part in parts] == counts.tolist()
    assert len(parts) == (1 if test == "centre" else 3)
    for part, start, count in zip(parts, starts.tolist(), counts.tolist(), strict=True):
        sounding = torch.tensor([min(max(36 - start, 0), count)])
        expected = data.first_view.pipeline.apply(
            torch.from_numpy(matrix[None, start : start + count].copy()), sounding, None
        )
        np.testing.assert_allclose(part, expected[0].numpy(), atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mutual", "segmented", "averaging_logits"])
def test_the_printed_program_agrees_with_predict(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    run: Finished = request.getfixturevalue(name)
    program = JOBS / "classify.py"
    exported = export_model(run.folder, tmp_path / "model.onnx")
    soundfile.write(tmp_path / "click.wav", make_wave(0, "low", 0, 0.02), RATE)
    soundfile.write(tmp_path / "stereo.flac", np.stack([make_wave(3, "high", 5, 0.7)] * 2, axis=1), 22_050)
    files = [*run.test_files, tmp_path / "click.wav", tmp_path / "stereo.flac"]
    command = [sys.executable, str(program), str(exported.path), *map(str, files)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    expected = classify(run.folder, files)
    assert len(output) == len(expected)
    for line, prediction in zip(output, expected, strict=True):
        file, label, probability = line.rsplit(" ", 2)
        assert (file, label) == (str(prediction.file), prediction.label)
        assert float(probability) == pytest.approx(prediction.probability, abs=2e-4)
