"""Kaldi's filter bank. Oracle: Kaldi's formulas in NumPy, frame by frame."""

from __future__ import annotations

import numpy as np
import torch
from torchaudio.compliance.kaldi import fbank

from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.kaldi import KaldiFeatures


def compute_filter_bank(wave: np.ndarray, bands: int = 128, rate: int = 16_000) -> np.ndarray:
    wave = wave.astype(np.float64) - wave.mean()
    mel = 1127 * np.log(1 + np.arange(256) * rate / 512 / 700)
    edges = np.linspace(1127 * np.log(1 + 20 / 700), 1127 * np.log(1 + rate / 2 / 700), bands + 2)[:, None]
    triangles = np.minimum(
        (mel - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - mel) / (edges[2:] - edges[1:-1])
    )
    rows = []
    for start in range(0, len(wave) - 400 + 1, 160):
        frame = wave[start : start + 400] - wave[start : start + 400].mean()
        frame = frame - 0.97 * np.r_[frame[0], frame[:-1]]
        power = np.abs(np.fft.rfft(frame * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)), 512)) ** 2
        rows.append(np.log(np.maximum(triangles.clip(0) @ power[:256], np.finfo(np.float32).eps)))
    return np.array(rows)


def test_the_filter_bank_matches_kaldi_with_the_scaling_of_ssast() -> None:
    rng = np.random.default_rng(0)
    wave = (0.1 * rng.standard_normal(8000) + 0.2).astype(np.float32)
    settings = KaldiFeatures(kind="kaldi", seconds=0.4, frames=50)
    features = FeatureExtractor(settings)(wave, 16_000)
    expected = compute_filter_bank(wave[:6400])
    assert len(expected) == 38
    np.testing.assert_allclose(features[:38], (expected + 4.2677393) / (2 * 4.5689974), atol=2e-3)
    np.testing.assert_allclose(features[38:], 4.2677393 / (2 * 4.5689974), rtol=1e-6)
    short = FeatureExtractor(KaldiFeatures(kind="kaldi", mean=0.0, deviation=0.5))(wave[:100], 16_000)
    np.testing.assert_allclose(
        short, compute_filter_bank(np.r_[wave[:100] - wave[:100].mean(), np.zeros(300)]), atol=2e-3
    )


def test_features_are_bit_identical_to_torchaudio() -> None:
    """Cache keys do not identify the implementation, so its results must never change."""
    settings = KaldiFeatures(kind="kaldi", mean=0.0, deviation=0.5)
    wave = (0.1 * np.random.default_rng(1).standard_normal(8000)).astype(np.float32)
    bank = fbank(torch.from_numpy(wave - wave.mean()).unsqueeze(0), **settings.arguments)
    np.testing.assert_array_equal(FeatureExtractor(settings)(wave, 16_000), bank.numpy())
