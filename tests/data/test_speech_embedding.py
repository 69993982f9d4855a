"""Google's speech embedding. Oracle: the class AudioFeatures of the package openwakeword."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from commands import Raydfl, write_config

from raydfl.core.errors import ConfigError
from raydfl.data.features import speech_embedding
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.speech_embedding import SpeechEmbeddingFeatures, find_networks
from raydfl.engine.config import Config

is_installed = importlib.util.find_spec("openwakeword") is not None
needs_package = pytest.mark.skipif(not is_installed, reason="not installed: pip install 'raydfl[embedding]'")
SETTINGS = SpeechEmbeddingFeatures(kind="speech_embedding")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear the cache of found files."""
    find_networks.cache_clear()
    yield
    find_networks.cache_clear()


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize("samples", [1, 1_279, 8_000, 16_000, 40_001])
def test_frames_equal_openwakeword(samples: int) -> None:
    wave = np.random.default_rng(samples).integers(-9_000, 9_000, samples).astype(np.int16)
    from openwakeword.utils import AudioFeatures

    with warnings.catch_warnings(action="ignore"):
        reference = AudioFeatures(ncpu=1)._get_embeddings(np.pad(wave, 6_400)).reshape(-1, 96)
    features = FeatureExtractor(SETTINGS)(wave.astype(np.float32) / 32_767, 16_000)
    assert features.dtype == np.float32
    assert features.shape == reference.shape
    np.testing.assert_allclose(features, (reference - 7.5) / 16, atol=2e-3)


def test_windows_of_760_ms_begin_every_80_ms() -> None:
    mel = np.arange(93.0)[:, None].repeat(32, 1)
    windows = speech_embedding.cut_windows(mel)
    assert windows.shape == (3, 76, 32, 1)
    assert windows.dtype == np.float32
    np.testing.assert_array_equal(windows[:, 0, 0, 0], [0, 8, 16])
    np.testing.assert_array_equal(windows[:, -1, 5, 0], [75, 83, 91])


@pytest.mark.usefixtures("fresh")
def test_a_missing_package_and_other_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs the package openwakeword\. Install it: pip install 'raydfl\[embedding\]'"
    ):
        find_networks()
    folder = tmp_path / "resources" / "models"
    folder.mkdir(parents=True)
    (folder / "melspectrogram.onnx").write_bytes(b"another network")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    )
    with pytest.raises(
        ConfigError, match=r"melspectrogram.onnx is missing or differs from the file of openwakeword 0.1 to 0.4"
    ):
        find_networks()


@pytest.mark.slow
@needs_package
def test_a_run_trains_a_head_and_predicts_recordings(
    raydfl: Raydfl, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    features = "data.features={kind: speech_embedding, seconds: 1.0}"
    file = write_config(tiny(features, "models.model=linear", "train.rounds=1", method="fedavg"), tmp_path)
    assert raydfl("run", file).code == 0
    soundfile.write(tmp_path / "noise.wav", np.random.default_rng(0).normal(0, 0.1, 8_000), 8_000)
    shown = raydfl("predict", tmp_path / "runs" / "tiny", tmp_path / "noise.wav")
    assert shown.code == 0, shown.err
    assert "noise.wav" in shown.out
    raydfl("export", tmp_path / "runs" / "tiny", "--streaming").refuses("does not support streaming")
