"""Each transform against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.settings import FIRST_VIEW
from raydfl.data.examples import Examples
from raydfl.data.features.cache import FeatureStore
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.transforms import Pipeline, make_transforms
from raydfl.testing import make_examples

RATE, BANDS, FRAMES = 8000, 12, 30
PLAIN = {"sample_rate": RATE, "bands": BANDS, "hop_ms": 10, "normalise": "none"}
SEED = 5


def make_pipeline(*transforms: dict[str, Any], **features: Any) -> Pipeline:
    """Make a pipeline with its tables, as in a population."""
    settings = FeatureSettings(**{**PLAIN, **features})
    pipeline = make_transforms(transforms, settings, "data.transforms")
    return pipeline.add_tables(pipeline.make_tables(settings, SEED, "t/"), "t/")


def make_decibel_examples(
    pipeline: Pipeline, counts: tuple[int, ...] = (FRAMES,) * 40, unpadded: int | None = None
) -> Examples:
    """Make clips of random decibels between -60 and 0."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    frames = np.random.default_rng(0).uniform(-60, 0, (int(offsets[-1]), BANDS)).astype(np.float32)
    lengths = np.array(counts if unpadded is None else [unpadded] * len(counts), np.int32)
    if unpadded is not None:
        for start, count in zip(offsets, counts, strict=False):
            frames[start + unpadded : start + count] = 0
    length = counts[0] if len(set(counts)) == 1 else None
    if length is not None and pipeline.cut is not None:
        length = min(length, pipeline.cut)
    store = FeatureStore(Path("memory"), frames, offsets, lengths, None, {})
    return make_examples(np.zeros(len(counts), np.int64), store, offsets[:-1], np.array(counts), length, pipeline)


def transform_examples(data: Examples, number: int = 0) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return all examples unchanged, all examples transformed, and the drawn parameters."""
    index = np.arange(len(data))
    drawn = data.draw(index, 7, number)
    return data.batch(index).x.numpy(), data.batch(index, drawn=drawn).x.numpy(), drawn[FIRST_VIEW]


def to_power(decibels: np.ndarray) -> np.ndarray:
    return 10 ** (np.asarray(decibels, np.float64) / 10)


def test_each_batch_draws_new_crop_positions() -> None:
    data = make_decibel_examples(make_pipeline({"name": "random_crop", "size": 10}))
    middle, cut, drawn = transform_examples(data)
    places = drawn["crop"]
    assert cut.shape == (40, 10, BANDS)
    for row, (place, part) in enumerate(zip(places, cut, strict=True)):
        np.testing.assert_array_equal(part, data.first_view.store.clip(row)[place : place + 10])
        np.testing.assert_array_equal(middle[row], data.first_view.store.clip(row)[10:20])
    assert set(places) <= set(range(FRAMES - 10 + 1))
    assert len(set(places)) > 10
    assert places.tolist() != transform_examples(data, 1)[2]["crop"].tolist()


def test_crop_positions_are_uniform() -> None:
    data = make_decibel_examples(make_pipeline({"name": "random_crop", "size": 28}), (FRAMES,) * 600)
    counts = np.bincount(transform_examples(data)[2]["crop"], minlength=3)
    assert len(counts) == 3
    assert counts.min() > 150  # 200 are expected; 150 is more than four standard deviations below


def test_short_clips_are_not_cropped() -> None:
    data = make_decibel_examples(make_pipeline({"name": "random_crop", "size": 10}), (4, 30, 10))
    batch = data.batch(np.arange(3), drawn=data.draw(np.arange(3), 1, 0))
    assert batch.x.shape == (3, 10, BANDS)
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [4, 10, 10]
    np.testing.assert_array_equal(batch.x[0, :4].numpy(), data.first_view.store.clip(0))
    assert not batch.x[0, 4:].any()


def test_masks_fill_the_drawn_regions_with_the_mean() -> None:
    pipeline = make_pipeline({"name": "spec_augment", "frames": 6, "frame_masks": 2, "bands": 4, "band_masks": 1})
    before, after, drawn = transform_examples(make_decibel_examples(pipeline))
    assert drawn["0/lengths"].shape == (40, 2)
    assert (drawn["0/lengths"].min(), drawn["0/lengths"].max()) == (0, 6)
    assert (drawn["0/widths"].min(), drawn["0/widths"].max()) == (0, 4)
    for row in range(40):
        masked = np.zeros((FRAMES, BANDS), bool)
        for first, length in zip(drawn["0/firsts"][row], drawn["0/lengths"][row], strict=True):
            masked[first : first + length] = True
        for lowest, width in zip(drawn["0/lowest"][row], drawn["0/widths"][row], strict=True):
            masked[:, lowest : lowest + width] = True
        np.testing.assert_array_equal(after[row][~masked], before[row][~masked])
        np.testing.assert_allclose(after[row][masked], before[row].mean(), rtol=1e-5)


def test_masks_respect_their_share_and_the_padding() -> None:
    pipeline = make_pipeline(
        {"name": "spec_augment", "frames": 20, "frame_masks": 1, "share": 0.5, "bands": 12, "band_masks": 1}
    )
    data = make_decibel_examples(pipeline, unpadded=10)
    before, after, drawn = transform_examples(data)
    assert drawn["0/lengths"].max() == 5
    assert (drawn["0/firsts"] + drawn["0/lengths"]).max() == 10
    assert not after[:, 10:].any()
    assert not before[:, 10:].any()


def test_gain_adds_decibels() -> None:
    before, after, _ = transform_examples(
        make_decibel_examples(make_pipeline({"name": "gain", "db": [-3, 9]}), (FRAMES,) * 400)
    )
    gains = (after - before).mean(axis=(1, 2))
    np.testing.assert_allclose(after, before + gains[:, None, None], atol=1e-3)
    assert -3 <= gains.min() < -2.5
    assert 8.5 < gains.max() <= 9
    assert abs(gains.mean() - 3) < 0.6


def test_noise_has_the_drawn_ratio_and_the_spectrum_of_white_noise() -> None:
    pipeline = make_pipeline({"name": "noise", "snr_db": [5, 5]})
    before, after, _ = transform_examples(make_decibel_examples(pipeline, (FRAMES,) * 200))
    noise = to_power(after) - to_power(before)
    assert noise.min() > -1e-6
    ratio = to_power(before).sum(axis=(1, 2)) / noise.sum(axis=(1, 2))
    assert abs(10 * np.log10(ratio).mean() - 5) < 0.2
    # The power of white noise in each band, measured on a wave.
    extractor = FeatureExtractor(FeatureSettings(**PLAIN))
    white = to_power(extractor(np.random.default_rng(1).standard_normal(20 * RATE).astype(np.float32), RATE)).mean(
        axis=0
    )
    mean = noise.mean(axis=(0, 1))
    np.testing.assert_allclose(mean / mean.sum(), white / white.sum(), rtol=0.1)
    fluctuation = noise.std(axis=1).mean(axis=0) / mean
    assert fluctuation.min() > 0.2  # noise must vary over time


def test_noise_and_reverberation_of_bands_match_waves_on_average() -> None:
    """Oracle: features of a wave with added noise, and of a wave convolved with decaying noise, at the same levels."""
    rng = np.random.default_rng(2)
    seconds = 10
    wave = np.sin(2 * np.pi * 700 * np.arange(seconds * RATE) / RATE) * (np.arange(seconds * RATE) % 4000 < 800)
    noise = rng.standard_normal(len(wave)) * np.sqrt(np.mean(wave**2))  # 0 dB
    response = rng.standard_normal(RATE // 2) * 10 ** (-3 * np.arange(RATE // 2) / RATE / 0.5)
    room = np.convolve(wave, response / np.sqrt(np.sum(response**2)))[: len(wave)]
    extractor = FeatureExtractor(FeatureSettings(**PLAIN))
    stored = extractor(wave.astype(np.float32), RATE)
    for transform, mixed in (
        ({"name": "noise", "snr_db": [0, 0]}, wave + noise),
        ({"name": "reverberation", "seconds": [0.5, 0.5]}, room),
    ):
        data = make_decibel_examples(make_pipeline(transform), (len(stored),))
        data.first_view.store.frames[:] = stored
        _, after, _ = transform_examples(data)
        power = [
            to_power(x).sum(axis=1)[:1000].reshape(-1, 5).mean(axis=1)
            for x in (after[0], extractor(mixed.astype(np.float32), RATE))
        ]
        audible = power[1] > power[1].max() / 30
        error = 10 * np.log10(power[0] / power[1])[audible]
        assert abs(error.mean()) < 0.5, transform
        assert error.std() < 2, transform


def test_the_share_sets_the_number_of_noisy_examples() -> None:
    before, after, _ = transform_examples(
        make_decibel_examples(make_pipeline({"name": "noise", "share": 0.25, "snr_db": [0, 0]}), (FRAMES,) * 400)
    )
    noisy = np.abs(after - before).max(axis=(1, 2)) > 0.1
    assert 60 < noisy.sum() < 140
    np.testing.assert_allclose(after[~noisy], before[~noisy], atol=1e-3)


def test_recorded_noise_comes_from_the_folder(tmp_path: Path) -> None:
    time = np.arange(2 * RATE) / RATE
    soundfile.write(tmp_path / "hum.wav", 0.5 * np.sin(2 * np.pi * 1000 * time), RATE)
    pipeline = make_pipeline({"name": "noise", "snr_db": [0, 0], "folder": str(tmp_path)})
    before, after, _ = transform_examples(make_decibel_examples(pipeline))
    noise = (to_power(after) - to_power(before)).mean(axis=(0, 1))
    expected = to_power(FeatureExtractor(FeatureSettings(**PLAIN))(np.sin(2 * np.pi * 1000 * time), RATE)).mean(axis=0)
    np.testing.assert_allclose(noise / noise.sum(), expected / expected.sum(), atol=0.01)


def test_reverberation_spreads_power_over_later_frames() -> None:
    pipeline = make_pipeline({"name": "reverberation", "seconds": [0.1, 0.1]})
    data = make_decibel_examples(pipeline)
    data.first_view.store.frames[:] = -100  # silence except for a single frame per clip
    data.first_view.store.frames[5::FRAMES] = 0
    before, after, drawn = transform_examples(data)
    energy = drawn["0/energy"][0]
    assert abs(energy.sum() - 1) < 1e-6
    np.testing.assert_allclose(np.diff(10 * np.log10(energy)), -6, atol=1e-3)  # 60 dB in 0.1 s at 10 ms per frame
    np.testing.assert_allclose(to_power(after[0, :5]), to_power(before[0, :5]), atol=1e-9)
    np.testing.assert_allclose(to_power(after[0, 5:16, 3]), energy[:11], rtol=1e-3, atol=1e-8)


def test_impulse_responses_come_from_the_folder(tmp_path: Path) -> None:
    response = np.zeros(RATE // 2)
    response[[100, 100 + 240]] = 0.8, 0.4  # an echo 30 ms later: three frames
    soundfile.write(tmp_path / "room.wav", response, RATE, subtype="FLOAT")
    pipeline = make_pipeline({"name": "reverberation", "folder": str(tmp_path)})
    before, after, _ = transform_examples(make_decibel_examples(pipeline))
    expected = to_power(before) * 0.8
    expected[:, 3:] += to_power(before)[:, :-3] * 0.2
    np.testing.assert_allclose(to_power(after), expected, rtol=1e-3)


def test_zero_shares_only_normalise_the_features() -> None:
    pipeline = make_pipeline({"name": "reverberation", "share": 0}, {"name": "noise", "share": 0}, normalise="clip")
    data = make_decibel_examples(pipeline, unpadded=20)
    before, after, _ = transform_examples(data)
    clip = data.first_view.store.clip(3)[:20]
    expected = (clip - clip.mean(axis=0)) / (clip.std(axis=0) + 1e-5)
    np.testing.assert_allclose(before[3, :20], expected, atol=1e-4)
    np.testing.assert_allclose(after, before, atol=1e-3)
    assert not before[:, 20:].any()
    assert not after[:, 20:].any()


@pytest.mark.parametrize(
    ("scale", "spectrum"), [("db", "power"), ("log", "power"), ("db", "magnitude"), ("log", "magnitude")]
)
def test_gain_acts_on_power_for_each_front_end(scale: str, spectrum: str) -> None:
    """A gain of 20 dB multiplies the wave by ten, for all scales and spectra."""
    settings = FeatureSettings.model_validate({**PLAIN, "scale": scale, "spectrum": spectrum})
    wave = 0.01 * np.random.default_rng(0).standard_normal(RATE).astype(np.float32)
    extractor = FeatureExtractor(settings)
    quiet, loud = extractor(wave, RATE), extractor(10 * wave, RATE)
    pipeline = make_transforms([{"name": "gain", "db": [20, 20]}], settings, "t")
    x = torch.from_numpy(quiet)[None].clone()
    drawn = pipeline.draw((0, 0), np.array([len(quiet)]), BANDS)
    actual = pipeline.apply(x, torch.tensor([len(quiet)]), {n: torch.from_numpy(a) for n, a in drawn.items()})
    np.testing.assert_allclose(actual[0].numpy(), loud, atol=1e-3)


def test_shift_rotates_frames() -> None:
    data = make_decibel_examples(make_pipeline({"name": "shift", "frames": 4}), unpadded=20)
    before, after, drawn = transform_examples(data)
    assert (drawn["0/by"].min(), drawn["0/by"].max()) == (-4, 4)
    for row, shift in enumerate(drawn["0/by"]):
        np.testing.assert_array_equal(after[row, :20], np.roll(before[row, :20], shift, axis=0))


def test_cutout_zeros_a_square() -> None:
    data = make_decibel_examples(make_pipeline({"name": "cutout", "size": 4}))
    before, after, drawn = transform_examples(data)
    for row in range(40):
        top, left = drawn["0/row"][row] - 2, drawn["0/column"][row] - 2
        expected = before[row].copy()
        expected[max(top, 0) : top + 4, max(left, 0) : left + 4] = 0
        np.testing.assert_array_equal(after[row], expected)


ALL: list[dict[str, Any]] = [
    {"name": "random_crop", "size": 20},
    {"name": "gain"},
    {"name": "reverberation", "share": 0.5},
    {"name": "noise", "share": 0.5},
    {"name": "spec_augment", "frames": 5, "bands": 3},
    {"name": "shift", "frames": 3},
    {"name": "cutout", "size": 3},
]


def test_additional_leading_dimensions_do_not_change_the_result() -> None:
    data = make_decibel_examples(make_pipeline(*ALL), (FRAMES, 25, 20, 12)).first_view
    index = np.arange(4)
    drawn = data.draw(index, 3, 0)
    unbatched = data.batch(index, drawn=drawn)[0]
    starts, counts = data.window(index, drawn)
    stored = np.empty((4, 20, BANDS), np.float32)
    data.copy(starts, counts, stored)
    both = torch.from_numpy(np.stack([stored, stored]))
    tables = {name: torch.from_numpy(np.stack([array, array])) for name, array in drawn.items()}
    frames = torch.from_numpy(np.stack([data.count_valid_frames(starts, counts)] * 2))
    copies = data.pipeline.apply(both, frames, tables)
    for copy in copies:
        torch.testing.assert_close(copy, unbatched)


def test_an_example_does_not_depend_on_longer_examples_in_its_batch() -> None:
    data = make_decibel_examples(make_pipeline(*ALL[1:]), (12, 15, 40)).first_view
    drawn = data.draw(np.arange(3), 3, 0)
    full_batch, _ = data.batch(np.arange(3), drawn=drawn)
    partial_batch, _ = data.batch(np.arange(2), drawn={name: values[:2] for name, values in drawn.items()})
    torch.testing.assert_close(full_batch[:2, :15], partial_batch)


@pytest.mark.parametrize(
    ("transforms", "features", "message"),
    [
        ([{"name": "spec_augmnt"}], {}, "Did you mean 'spec_augment'"),
        ([{"size": 3}], {}, "a name is missing"),
        ([{"name": "noise", "snr": 3}], {}, "unknown key 'snr'.*snr_db"),
        ([{"name": "noise", "snr_db": ["loud", 3]}], {}, "snr_db"),
        ([{"name": "noise", "snr_db": [20, 0]}], {}, "the lower limit, 20, exceeds"),
        ([{"name": "reverberation", "seconds": [0.5, 3.5]}], {}, "must be in ascending order, from 0 to 3 s"),
        ([{"name": "reverberation", "seconds": [-1, 1]}], {}, "from 0 to 3 s"),
        ([{"name": "random_crop", "size": 200}], {"seconds": 1.0}, "at least 200 frames.*longest has 101"),
        ([{"name": "spec_augment", "frames": 200}], {"seconds": 1.0}, "at least 200 frames"),
        ([{"name": "spec_augment", "bands": 20}], {"seconds": 1.0}, "at least 20 bands.*has 12"),
        (
            [{"name": "random_crop", "size": 10}, {"name": "spec_augment"}],
            {"seconds": 1.0},
            "at least 20 frames.*has 10",
        ),
        ([{"name": "spec_augment"}, {"name": "noise"}], {}, "are in the wrong order"),
        ([{"name": "noise"}, {"name": "random_crop", "size": 3}], {}, "are in the wrong order"),
        ([{"name": "gain"}], {"normalise": "clip"}, "cancels every gain"),
        ([{"name": "noise"}], {"normalise": "group"}, "normalises the cached features"),
        ([{"name": "flip"}], {}, "of the kind image, not logmel"),
        ([{"name": "random_crop", "size": 3, "pad": 2}], {}, "pad is for images"),
    ],
)
def test_impossible_settings_are_rejected(
    transforms: list[dict[str, Any]], features: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_transforms(transforms, FeatureSettings(**{**PLAIN, **features}), "data.transforms")


@pytest.mark.parametrize("name", ["noise", "reverberation"])
def test_unusable_recordings_are_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        make_pipeline({"name": name, "folder": str(tmp_path / "none")})
    (tmp_path / "text.txt").write_text("no sound")
    with pytest.raises(DataError, match="no recording is in"):
        make_pipeline({"name": name, "folder": str(tmp_path)})
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"broken\.wav cannot be used"):
        make_pipeline({"name": name, "folder": str(tmp_path)})
