"""Spoken digits by a near and a far microphone, on small files of FSDD's layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from scipy.signal import fftconvolve

from raydfl.core.errors import ConfigError
from raydfl.core.registry import build
from raydfl.data.features.digests import iterate_rows
from raydfl.data.sets.near_and_far import NearAndFar
from raydfl.engine.config import Config
from raydfl.testing import assert_same_bits, train_federation

RATE = 8000
DIGITS, TAKES = (3, 7), 6


def write(folder: Path, wave: Callable[[int, int], np.ndarray]) -> Path:
    """Write a recording for each digit and take, as floats without rounding."""
    (folder / "recordings").mkdir(parents=True)
    for digit in DIGITS:
        for take in range(TAKES):
            file = folder / f"recordings/{digit}_anna_{take}.wav"
            soundfile.write(file, wave(digit, take), RATE, subtype="FLOAT")
    return folder


def make_noise(digit: int, take: int) -> np.ndarray:
    return 0.01 * np.random.default_rng([digit, take]).standard_normal(RATE)


def make_impulse(digit: int, take: int) -> np.ndarray:
    return 0.01 * np.eye(1, 10)[0]


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    return write(tmp_path / "noise", make_noise)


@pytest.fixture
def impulses(tmp_path: Path) -> Path:
    return write(tmp_path / "impulses", make_impulse)


def read(root: Path, view: str, **options: Any) -> list[np.ndarray]:
    """Read a view of all recordings: float32 [samples] each."""
    dataset = NearAndFar(root=root, **options)
    waves = [dataset.read({**row, "path": row[view]}) for row in iterate_rows(dataset.manifest())]
    assert {rate for _, rate in waves} == {RATE}
    return [samples[:, 0] for samples, _ in waves]


def measure_t60(response: np.ndarray) -> float:
    """Measure the reverberation time by Schroeder's integration, from -5 to -25 dB."""
    energy = np.cumsum(response[::-1].astype(np.float64) ** 2)[::-1]
    level = 10 * np.log10(energy[energy > 0] / energy[0])
    first, last = np.flatnonzero(level < -5)[0], np.flatnonzero(level < -25)[0]
    slope = np.polyfit(np.arange(first, last) / RATE, level[first:last], 1)[0]
    return float(-60 / slope)


@pytest.mark.parametrize("t60", [0.2, 0.5, 1.5])
def test_the_reverberation_time_is_that_of_the_option(impulses: Path, t60: float) -> None:
    """Oracle: Schroeder's backward integration of the response to an impulse."""
    responses = read(impulses, "far", t60=t60, snr_db=None)
    times = [measure_t60(response[1:]) for response in responses]
    assert np.mean(times) == pytest.approx(t60, rel=0.04)
    assert np.ptp(times) > 0, "each clip has its own room"


@pytest.mark.parametrize("drr_db", [-10.0, 0.0, 6.0])
def test_direct_and_reverberant_energy_have_the_ratio_of_the_option(impulses: Path, drr_db: float) -> None:
    for response in read(impulses, "far", t60=0.3, drr_db=drr_db, snr_db=None):
        energy = response.astype(np.float64) ** 2
        assert 10 * np.log10(energy[0] / energy[1:].sum()) == pytest.approx(drr_db, abs=1e-4)


@pytest.mark.parametrize("snr_db", [-5.0, 20.0])
def test_the_noise_has_the_ratio_of_the_option(noise: Path, snr_db: float) -> None:
    for clean, noisy in zip(read(noise, "far", snr_db=None), read(noise, "far", snr_db=snr_db), strict=True):
        ratio = 10 * np.log10(np.mean(clean**2) / np.mean((noisy - clean) ** 2))
        assert ratio == pytest.approx(snr_db, abs=0.3)


def test_the_far_view_is_the_near_view_in_its_room(noise: Path, impulses: Path) -> None:
    """Oracle: convolution by SciPy's Fourier transform with the measured response of the clip's room."""
    options = {"t60": 0.4, "drr_db": -3.0, "snr_db": None}
    for near, far, response in zip(
        read(noise, "near"), read(noise, "far", **options), read(impulses, "far", **options), strict=True
    ):
        expected = fftconvolve(near, response[: 1 + round(0.4 * RATE)] / 0.01)
        np.testing.assert_allclose(far, expected, atol=1e-6)


def test_without_reverberation_and_noise_both_views_are_equal(noise: Path) -> None:
    for near, far in zip(read(noise, "near"), read(noise, "far", t60=0.0, snr_db=None), strict=True):
        assert np.array_equal(near, far)


def test_loud_sound_is_attenuated_and_not_clipped(tmp_path: Path) -> None:
    loud = write(tmp_path / "loud", lambda digit, take: 99 * make_noise(digit, take))
    soft = write(tmp_path / "soft", make_noise)
    for high, low in zip(read(loud, "far"), read(soft, "far"), strict=True):
        assert np.abs(high).max() == pytest.approx(1)
        np.testing.assert_allclose(high, low / np.abs(low).max(), atol=1e-5)


def test_rooms_and_noise_depend_on_seed_and_clip_alone(noise: Path) -> None:
    first, again, other = read(noise, "far"), read(noise, "far"), read(noise, "far", seed=1)
    assert all(map(np.array_equal, first, again))
    assert not any(map(np.array_equal, first, other))
    np.testing.assert_allclose(first[0][:4], GOLDEN, rtol=1e-5)


GOLDEN = [0.0179813318, -0.0265774205, 0.0056389356, -0.0027214214]


def test_keys_of_the_feature_cache_follow_the_samples(noise: Path) -> None:
    def list_parts(view: str, **options: Any) -> list[str | None]:
        dataset = NearAndFar(root=noise, **options)
        return [dataset.part({**row, "path": row[view]}) for row in iterate_rows(dataset.manifest())]

    changes: tuple[dict[str, Any], ...] = ({}, {"t60": 0.4}, {"drr_db": 1.0}, {"snr_db": None}, {"seed": 1})
    parts = [part for options in changes for part in list_parts("far", **options)]
    assert len(set(parts)) == len(parts)
    assert {part for options in changes for part in list_parts("near", **options)} == {None}


@pytest.mark.parametrize("option", [{"t60": 3.1}, {"t60": -0.1}, {"drr_db": 61}, {"snr_db": 101}, {"first": "middle"}])
def test_options_out_of_range_are_rejected(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"data.{next(iter(option))}"):
        build(NearAndFar, {"root": "x", **option}, "data")


def make_settings(noise: Path, first: str, other: str, **options: Any) -> list[str]:
    """Return overrides with the networks ``one`` of the first view and ``two`` of the additional view ``other``."""
    features = "{sample_rate: 8000, bands: 8, seconds: 0.3}"
    network = "name: crnn_tiny, hidden: 4, filters: [4]"
    data = f"{{name: near_and_far, root: {noise}, test_takes: 2, first: {first}, features: {features}, "
    data += f"views: {{other: {{column: {other}, features: {features}}}}}, partition: {{by: iid, clients: 4}}}}"
    return [
        f"models={{one: {{{network}}}, two: {{{network}, view: other}}}}",
        f"data={data}",
        *(f"data.{name}={value}" for name, value in options.items()),
        "train.rounds=4",
        "train.cohort=1.0",
        f"run.name={first}-{options['t60']}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["modality_mirror", "multifl", "unifl", "harmony"])
def test_methods_of_several_views_hear_the_far_microphone(
    tiny: Callable[..., Config], noise: Path, method: str
) -> None:
    """Half of the clients have only the far microphone."""
    bits = [
        train_federation(
            tiny(f"method={method}", *make_settings(noise, "far", "near", missing="{other: 0.5}", t60=t60))
        )
        for t60 in (0.2, 1.0)
    ]
    # UniFL's clients with both views never train the output layer of a single view.
    names = [name for name in bits[0] if name.startswith("server ") and " one/" in name and "output" not in name]
    assert names
    assert all(bits[0][name] != bits[1][name] for name in names)


def test_an_exchange_of_equal_views_keeps_every_bit(tiny: Callable[..., Config], noise: Path) -> None:
    silent = {"t60": 0, "snr_db": "null"}
    near, far = (
        train_federation(tiny("method=multifl", *make_settings(noise, first, other, **silent)))
        for first, other in (("near", "far"), ("far", "near"))
    )
    assert_same_bits(near, far)
