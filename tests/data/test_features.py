from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torchaudio
from pydantic import ValidationError

from raydfl.core.errors import DataError
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.wave import EPSILON

FEDAUDIO: dict[str, Any] = {"sample_rate": 16000, "window_ms": 64, "fft": 1024, "hop_ms": 10, "bands": 128}


def make_noise(samples: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal((samples, channels))).astype(np.float32)


def compute_log_mel(wave: np.ndarray, rate: int, fft: int, window: int, hop: int, bands: int) -> np.ndarray:
    """Compute the log-mel spectrogram from its definition, in float64 and without torchaudio."""
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    left = (fft - window) // 2
    taper = np.pad(hann, (left, fft - window - left))
    padded = np.pad(wave.astype(np.float64), fft // 2, mode="reflect")
    frames = np.stack([padded[i * hop : i * hop + fft] * taper for i in range(1 + len(wave) // hop)])
    power = np.abs(np.fft.rfft(frames)) ** 2
    mel = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    hertz = np.linspace(0, rate / 2, fft // 2 + 1)
    rising = (hertz[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz[:, None]) / (edges[2:] - edges[1:-1])
    weights = np.maximum(0, np.minimum(rising, falling))
    return 10 * np.log10(np.maximum(power @ weights, 1e-10))


@pytest.mark.parametrize(
    "options",
    [
        FEDAUDIO,
        {"sample_rate": 8000, "bands": 40, "window_ms": 25},
        {"bands": 23, "window_ms": 32, "hop_ms": 16, "fft": 2048},
    ],
)
def test_log_mel_matches_an_independent_calculation(options: dict[str, Any]) -> None:
    settings = FeatureSettings(**options, normalise="none")
    wave = make_noise(settings.sample_rate)[:, 0]
    expected = compute_log_mel(
        wave, settings.sample_rate, settings.points, settings.window, settings.hop, settings.bands
    )
    actual = FeatureExtractor(settings)(wave, settings.sample_rate)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=2e-3)


SLANEY_HZ = {0.0: 0.0, 500.0: 7.5, 1000.0: 15.0, 6400.0: 42.0}
"""Points of the mel scale of Slaney's Auditory Toolbox: 27 steps for a factor of 6.4 above 1000 Hz."""


def compute_front_end(wave: np.ndarray, settings: FeatureSettings) -> np.ndarray:
    """Compute the features from the definition of each option, in float64 and with the Fourier transform of NumPy."""
    wave = wave.astype(np.float64)
    window, fft, hop = settings.window, settings.points, settings.hop
    if settings.wave == "unit_norm":
        wave = wave / np.linalg.norm(wave)
    hann = np.sin(np.pi * np.arange(window) / window) ** 2
    if settings.centred:
        left = (fft - window) // 2
        padded = np.pad(wave, fft // 2, mode="reflect")
        frames = [padded[t * hop + left : t * hop + left + window] * hann for t in range(1 + len(wave) // hop)]
    else:
        frames = [wave[start : start + window] * hann for start in range(0, len(wave) - window + 1, hop)]
    magnitude = np.array([np.abs(np.fft.rfft(frame, fft)) for frame in frames])
    hz = np.linspace(0, settings.sample_rate / 2, 400_001)
    if settings.mel == "slaney":
        mel = np.where(hz < 1000, hz * 15 / 1000, 15 + 27 * np.log(np.maximum(hz, 1) / 1000) / np.log(6.4))
        np.testing.assert_allclose(np.interp([*SLANEY_HZ], hz, mel), [*SLANEY_HZ.values()], atol=1e-9)
    else:
        mel = 1127 * np.log1p(hz / 700)
    ends = np.interp([settings.low_hz, settings.highest_hz], hz, mel)
    edges = np.interp(np.linspace(*ends, settings.bands + 2), mel, hz)
    bins = np.arange(fft // 2 + 1) * settings.sample_rate / fft
    weights = np.stack([np.interp(bins, edges[b : b + 3], [0, 1, 0]) for b in range(settings.bands)], axis=1)
    sums = (magnitude if settings.spectrum == "magnitude" else magnitude**2) @ weights
    floor = settings.floor or (1e-5 if settings.spectrum == "magnitude" else 1e-10)
    sums = np.maximum(sums, floor)
    if settings.scale == "log":
        return np.log(sums)
    return (20 if settings.spectrum == "magnitude" else 10) * np.log10(sums)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spectrum": "magnitude"},
        {"scale": "log"},
        {"scale": "log", "spectrum": "magnitude", "floor": 0.5},
        {"centred": False},
        {"centred": False, "fft": 1000, "window_ms": 31.7},
        {"wave": "unit_norm"},
        {"mel": "slaney", "high_hz": 7000},
        {
            "centred": False,
            "fft": 1024,
            "low_hz": 60,
            "high_hz": 7800,
            "wave": "unit_norm",
            "spectrum": "magnitude",
            "scale": "log",
            "floor": 1e-5,
        },
    ],
)
def test_each_option_of_the_front_end_matches_its_definition(options: dict[str, Any]) -> None:
    settings = FeatureSettings(**options, normalise="none")
    wave = make_noise(15_690, seed=3)[:, 0]
    expected = compute_front_end(wave, settings)
    actual = FeatureExtractor(settings)(wave, 16_000)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=5e-3)
    if options:
        plain = FeatureExtractor(FeatureSettings(normalise="none"))(wave, 16_000)
        assert plain.shape != actual.shape or np.abs(plain - actual).max() > 0.1


@pytest.mark.parametrize("samples", [100, 15_690])
@pytest.mark.parametrize("options", [{}, {"window_ms": 64, "bands": 128}, {"scale": "log", "spectrum": "magnitude"}])
def test_features_are_bit_identical_to_torchaudio(options: dict[str, Any], samples: int) -> None:
    """Cache keys do not identify the implementation, so its results must never change."""
    settings, wave = FeatureSettings(**options, normalise="none"), torch.from_numpy(make_noise(samples, seed=3)[:, 0])
    power = 2.0 if settings.spectrum == "power" else 1.0
    sizes = {
        "n_fft": settings.points,
        "win_length": settings.window,
        "hop_length": settings.hop,
        "n_mels": settings.bands,
    }
    bands = torchaudio.transforms.MelSpectrogram(settings.sample_rate, **sizes, power=power)
    sums = bands(torch.nn.functional.pad(wave, (0, max(0, settings.points // 2 + 1 - samples))))
    logarithms = 10 * sums.clamp_min(1e-10).log10() if settings.scale == "db" else sums.clamp_min(1e-5).log()
    actual = FeatureExtractor(settings)(wave.numpy(), settings.sample_rate)
    np.testing.assert_array_equal(actual, logarithms.T[: len(actual)].numpy())


def test_a_short_clip_is_centred_in_silence() -> None:
    """In FedSTAR's front end, 1 s of samples gives 98 frames, and a crop has 96 of them."""
    options = {"centred": False, "fft": 1024, "wave": "unit_norm", "spectrum": "magnitude", "scale": "log"}
    settings = FeatureSettings(**options, normalise="none", least_seconds=1.0)
    short = make_noise(7_001, seed=3)[:, 0]
    features = FeatureExtractor(settings)(short, 16_000)
    assert features.shape == (98, 64)
    np.testing.assert_allclose(features, compute_front_end(np.pad(short, (4499, 4500)), settings), atol=5e-3)
    with pytest.raises(ValidationError, match="least_seconds 1.0 is longer than seconds 0.5"):
        FeatureSettings(least_seconds=1.0, seconds=0.5)


@pytest.mark.parametrize(("trim_db", "kept"), [(None, (0, 15)), (25.0, (3, 9)), (35.0, (3, 13)), (45.0, (1, 13))])
def test_silence_at_both_ends_is_trimmed_by_its_level(trim_db: float | None, kept: tuple[int, int]) -> None:
    """Oracle: blocks of 20 ms with constant powers of 0, -30 and -40 dB, and the features of the remaining blocks alone.

    Blocks 3 to 8 are loud, except for the pause in block 5. Blocks 9 to 12 have -30 dB, and blocks 1 and 2 have -40 dB.
    """
    decibels = np.full(15, -np.inf)
    decibels[1:3], decibels[3:9], decibels[5], decibels[9:13] = -40, 0, -np.inf, -30
    signs = np.random.default_rng(4).choice([-0.5, 0.5], (15, 320))
    wave = (signs * 10 ** (decibels / 20)[:, None]).astype(np.float32).ravel()[: 15 * 320 - 100]
    settings = FeatureSettings(bands=20, normalise="none", trim_db=trim_db)
    expected = FeatureExtractor(FeatureSettings(bands=20, normalise="none"))(
        wave[kept[0] * 320 : kept[1] * 320], 16_000
    )
    np.testing.assert_array_equal(FeatureExtractor(settings)(wave, 16_000), expected)


def test_a_silent_clip_is_not_trimmed() -> None:
    silence = np.zeros(1000, np.float32)
    plain, trimmed = (FeatureExtractor(FeatureSettings(bands=20, trim_db=trim_db)) for trim_db in (None, 40.0))
    np.testing.assert_array_equal(trimmed(silence, 16_000), plain(silence, 16_000))


def test_uncentred_frames_are_within_the_clip() -> None:
    fedstar = FeatureSettings(fft=1024, seconds=15_690 / 16_000, centred=False)
    assert fedstar.frames == 96
    extractor = FeatureExtractor(FeatureSettings(fft=1024, centred=False, normalise="none"))
    for samples, frames in ((1, 1), (399, 1), (400, 1), (559, 1), (560, 2), (16_000, 98)):
        assert extractor(make_noise(samples), 16_000).shape == (frames, 64)


def test_keys_of_earlier_versions_are_unchanged() -> None:
    old = {
        "kind": "logmel",
        "sample_rate": 16000,
        "bands": 64,
        "window_ms": 25.0,
        "hop_ms": 10.0,
        "fft": 512,
        "low_hz": 0.0,
        "high_hz": 8000.0,
        "seconds": None,
        "channel": "first",
        "normalise": "clip",
        "dtype": "float32",
    }
    assert FeatureSettings().key() == FeatureSettings(floor=1e-10).key() == old
    keys = [
        FeatureSettings.model_validate({name: value}).key()
        for name, value in {
            "wave": "unit_norm",
            "centred": False,
            "spectrum": "magnitude",
            "mel": "slaney",
            "scale": "log",
            "floor": 1e-6,
        }.items()
    ]
    assert len({str(key) for key in keys}) == 6
    assert old not in keys


def test_the_fedaudio_protocol_matches_the_torchaudio_pipeline() -> None:
    wave = make_noise(16000)
    mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=1024, win_length=1024, hop_length=160, n_mels=128)
    decibels = torchaudio.transforms.AmplitudeToDB()(mel(torch.from_numpy(wave[:, 0]))).numpy().T
    expected = (decibels - decibels.mean(axis=0)) / (decibels.std(axis=0) + 1e-5)
    actual = FeatureExtractor(FeatureSettings(**FEDAUDIO))(wave, 16000)
    assert actual.shape == (101, 128)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_normalised_bands_have_zero_mean_and_unit_deviation() -> None:
    features = FeatureExtractor(FeatureSettings())(make_noise(12345), 16000)
    np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(features.std(axis=0), 1, atol=1e-4)
    silent = FeatureExtractor(FeatureSettings())(np.zeros((8000, 1), np.float32), 16000)
    assert EPSILON > 0
    assert not silent.any()


@pytest.mark.parametrize("samples", [1, 79, 80, 255, 256, 257, 8000, 8079])
def test_each_started_hop_gives_a_frame(samples: int) -> None:
    settings = FeatureSettings(sample_rate=8000)
    features = FeatureExtractor(settings)(make_noise(samples), 8000)
    assert features.shape == (1 + samples // 80, 64)
    assert np.isfinite(features).all()


def test_one_second_has_101_frames_and_longer_clips_are_cut() -> None:
    settings = FeatureSettings(seconds=1.0)
    assert settings.frames == 101
    extractor, wave = FeatureExtractor(settings), make_noise(40000)
    np.testing.assert_array_equal(extractor(wave, 16000), extractor(wave[:16000], 16000))
    assert extractor(wave[:8000], 16000).shape == (51, 64)  # the cache pads after normalisation


def test_no_filter_of_torchaudio_is_empty() -> None:
    combinations = 0
    for rate in (8000, 16000, 44100):
        for bands in (20, 64, 128, 200):
            for window_ms in (10.0, 25.0, 64.0):
                settings = FeatureSettings(sample_rate=rate, bands=bands, window_ms=window_ms)
                filters = make_filters(settings, settings.points)
                assert (filters.max(dim=0).values > 0).all(), (rate, bands, window_ms)
                shorter = settings.points // 2
                if shorter >= settings.window:  # half the points must be too few
                    assert not (make_filters(settings, shorter).max(dim=0).values > 0).all()
                    with pytest.raises(ValidationError, match="mel bands are empty with fft"):
                        FeatureSettings(sample_rate=rate, bands=bands, window_ms=window_ms, fft=shorter)
                combinations += 1
    assert combinations == 36


def make_filters(settings: FeatureSettings, points: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchaudio warns of empty bands, the subject of this test
        filters: torch.Tensor = torchaudio.functional.melscale_fbanks(
            points // 2 + 1, settings.low_hz, settings.highest_hz, settings.bands, settings.sample_rate
        )
    return filters


@pytest.mark.parametrize("rate", [11025, 22050, 44100, 48000, 11127])
def test_resampled_tones_keep_their_pitch_and_amplitude(rate: int) -> None:
    seconds = np.arange(rate) / rate
    tone = np.sin(2 * np.pi * 440 * seconds).astype(np.float32)
    wave = FeatureExtractor(FeatureSettings()).wave(tone, rate)
    assert abs(len(wave) - 16000) <= 1
    expected = np.sin(2 * np.pi * 440 * np.arange(len(wave)) / 16000)
    np.testing.assert_allclose(wave[500:-500], expected[500:-500], atol=0.01)


def test_channels_are_selected_or_averaged() -> None:
    wave = make_noise(8000, channels=2)
    first = FeatureExtractor(FeatureSettings(sample_rate=8000))
    mean = FeatureExtractor(FeatureSettings(sample_rate=8000, channel="mean"))
    np.testing.assert_array_equal(first.wave(wave, 8000), wave[:, 0])
    np.testing.assert_allclose(mean.wave(wave, 8000), wave.mean(axis=1))


@pytest.mark.parametrize(
    ("wave", "rate", "message"),
    [
        (np.zeros((0, 1)), 8000, "no samples"),
        (np.array([[0.0], [np.nan], [np.inf]]), 8000, "2 of the clip's 3 samples are NaN or infinite"),
        (np.zeros((5, 1)), 0, "sample rate is 0 Hz"),
        (np.zeros((5, 1, 1)), 8000, "shape"),
        (np.zeros((50, 1)), 2_000_000_000, "too high for sample_rate 16000"),
    ],
)
def test_unusable_clips_are_rejected(wave: np.ndarray, rate: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FeatureExtractor(FeatureSettings())(wave, rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fft": 200}, "fft 200 is shorter than the window of 400 samples"),
        ({"high_hz": 9000}, "high_hz 9000.0, and high_hz at most half the sample rate, 8000.0"),
        ({"low_hz": 5000, "high_hz": 4000}, "low_hz 5000.0 must be below high_hz 4000.0"),
        ({"hop_ms": 0.01}, "At least 2 and 1 are necessary"),
        ({"bands": 0}, "greater than or equal to 1"),
        ({"kind": "mfcc"}, "logmel"),
    ],
)
def test_contradictory_settings_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FeatureSettings(**options)
