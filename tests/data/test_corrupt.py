from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import signal, stats

from raydfl.core.errors import DataError
from raydfl.data import draw_clients
from raydfl.data.noise import ClipNoise, add_noise, seed_noise
from raydfl.data.steps.corrupt import (
    CorruptSettings,
    LabelErrorSettings,
    NoiseSettings,
    Share,
    draw_labels,
    draw_transition_matrix,
)

IDS = [f"c{i}" for i in range(50)]


@pytest.mark.parametrize("snr_db", [-5.0, 0.0, 10.0, 30.0])
def test_noise_is_white_and_has_the_chosen_power(snr_db: float) -> None:
    wave = (0.3 * np.sin(np.arange(100_000) * 0.05)).astype(np.float32)
    noise = add_noise(wave, snr_db, 1).astype(np.float64) - wave
    measured = 10 * np.log10(np.mean(wave.astype(float) ** 2) / np.mean(noise**2))
    assert measured == pytest.approx(snr_db, abs=0.05)  # 3 standard errors of a variance of 100,000 normal values
    assert stats.kstest(noise / noise.std(), "norm").pvalue > 0.01
    _, density = signal.welch(noise, nperseg=512)
    assert density[1:-1].std() / density.mean() < 0.15


def test_noise_at_100_db_is_inaudible_and_silence_stays_silent() -> None:
    wave = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    np.testing.assert_allclose(add_noise(wave, 100.0, 1), wave, atol=1e-4)
    assert not add_noise(np.zeros(10, np.float32), 10.0, 1).any()


def test_each_clip_has_its_own_noise() -> None:
    noise = seed_noise(["a", "b", "c"], 10.0, seed=1)
    assert len(set(noise.seeds)) == 3
    assert noise == seed_noise(["a", "b", "c"], 10.0, seed=1)
    assert noise.part(1, 3) == ClipNoise(10.0, seed_noise(["b", "c"], 10.0, 1).seeds)
    assert noise.seeds != seed_noise(["a", "b", "c"], 10.0, seed=2).seeds


@pytest.mark.parametrize(("classes", "rate"), [(2, 0.3), (4, 0.5), (10, 0.1), (35, 0.5), (35, 1.0), (3, 0.0)])
def test_transition_matrices_have_the_chosen_rate_and_sparsity(classes: int, rate: float) -> None:
    repaired = 0
    for seed in range(30):
        matrix = draw_transition_matrix(classes, rate, np.random.default_rng(seed))
        np.testing.assert_allclose(matrix.sum(axis=1), 1)
        np.testing.assert_allclose(np.diag(matrix), 1 - rate)
        if rate == 0:
            np.testing.assert_array_equal(matrix, np.eye(classes))
            continue
        off = matrix[~np.eye(classes, dtype=bool)].reshape(classes, classes - 1)
        for row in off:  # the remaining cells share the rate evenly
            np.testing.assert_allclose(row[row > 0], rate / (row > 0).sum())
        zeros, expected = int((off == 0).sum()), int(np.floor(0.4 * off.size + 0.5))
        assert zeros <= expected
        repaired += expected - zeros
        if classes == 35:
            assert zeros == expected
    assert (repaired > 0) == (rate > 0 and classes in (2, 4))  # with few classes, empty rows get a cell back


def test_label_errors_follow_the_rate_and_the_matrix() -> None:
    labels = np.repeat(np.arange(10), 5000)
    wrong = draw_labels(labels, 10, 0.5, 1, "anna")
    assert (wrong != labels).mean() == pytest.approx(0.5, abs=0.01)
    table = np.zeros((10, 10))
    np.add.at(table, (labels, wrong), 1)
    assert (table == 0).sum() == 36  # 40 % of 90, the sparsity of the matrix
    for row, label in zip(table, range(10), strict=True):
        others = np.delete(row, label)
        assert stats.chisquare(others[others > 0]).pvalue > 0.001
    np.testing.assert_array_equal(wrong, draw_labels(labels, 10, 0.5, 1, "anna"))
    for seed, client in ((2, "anna"), (1, "berta")):  # each client has its own matrix
        other = np.zeros((10, 10))
        np.add.at(other, (labels, draw_labels(labels, 10, 0.5, seed, client)), 1)
        assert ((other == 0) != (table == 0)).any()
    np.testing.assert_array_equal(draw_labels(labels, 10, 0.0, 1, "anna"), labels)
    assert not (draw_labels(labels, 10, 1.0, 1, "anna") == labels).any()


def choose(share: Share, seed: int = 1) -> np.ndarray:
    return draw_clients(IDS, share, np.random.default_rng(seed), "data.corrupt", "corrupted")


def test_clients_are_chosen_by_share_count_or_name() -> None:
    assert choose(0.2).sum() == 10
    assert choose(0.05).sum() == 3  # halves are rounded up
    assert choose(1).sum() == 1
    assert choose(1.0).all()
    assert not choose(0).any()
    assert np.flatnonzero(choose(("c7", "c3"))).tolist() == [3, 7]
    assert (choose(0.5) != choose(0.5, 2)).any()


def test_impossible_corruption_is_rejected() -> None:
    with pytest.raises(DataError, match="51 clients are to be corrupted, but the federation has 50"):
        choose(51)
    with pytest.raises(DataError, match="unknown client 'c77'. Did you mean 'c7'"):
        choose(("c77",))
    with pytest.raises(DataError, match="needs at least 2 classes, but the data have 1"):
        draw_transition_matrix(1, 0.1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": {"snr_db": float("nan")}}, "finite"),
        ({"noise": {"snr_db": 5, "clients": 1.5}}, "between 0.0 and 1.0"),
        ({"labels": {"rate": 0.1, "clients": -1}}, "at least 0"),
        ({"labels": {"rate": 1.1}}, "less than or equal to 1"),
    ],
)
def test_settings_out_of_range_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorruptSettings(**options)


def test_counts_and_shares_keep_their_types() -> None:
    for value, kind in ((1, int), (1.0, float), (0.2, float), (["a", "b"], tuple)):
        for settings in (NoiseSettings(snr_db=1, clients=value), LabelErrorSettings(rate=0.1, clients=value)):
            assert type(settings.clients) is kind
            again = type(settings).model_validate_json(settings.model_dump_json())
            assert again == settings
            assert type(again.clients) is kind
