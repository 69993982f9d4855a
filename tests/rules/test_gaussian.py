"""Rule gaussian. Oracles: the bound on the influence of a client, and the uniform mean without clipping and noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydfl.core.cuts import Cut
from raydfl.core.errors import ConfigError, RaydflError
from raydfl.core.types import Update
from raydfl.rules import AdaptiveClip, Gaussian, UniformMean, find_rule

SHAPES = {"net/a.weight": (4, 3), "net/a.bias": (4,)}


def draw_state(rng: np.random.Generator, scale: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    tensors = {
        name: torch.from_numpy((scale * rng.normal(size=shape)).astype(np.float32)) for name, shape in SHAPES.items()
    }
    return {"global": tensors, "moments": {"net/a.bias": torch.ones(4)}}


def draw_update(rng: np.random.Generator, server: Any, number: int) -> Update:
    """Draw an update of random size: whole, cut, masked, or without some tensors."""
    size, kind = 10 ** rng.uniform(-4, 4), rng.integers(4)
    tensors = {
        name: tensor + torch.from_numpy((size * rng.normal(size=tensor.shape)).astype(np.float32))
        for name, tensor in server["global"].items()
    }
    weight: Any = float(rng.integers(1, 100))
    if kind == 1:
        del tensors["net/a.bias"]
    if kind == 2:
        weight = {name: torch.from_numpy(rng.integers(0, 2, tensor.shape)).float() for name, tensor in tensors.items()}
    if kind == 3:
        rows = np.array([0, 2])
        cuts = {name: Cut([rows] + [None] * (len(shape) - 1)) for name, shape in SHAPES.items()}
        return Update({n: t[rows].contiguous() for n, t in tensors.items()}, weight, client_id=f"c{number}", cuts=cuts)
    return Update(tensors, weight, client_id=f"c{number}")


def aggregate(rule: Gaussian, updates: Sequence[Update], server: Any, cohort: int) -> np.ndarray:
    """Return the noisy sum without noise, divided by the cohort: float64 [elements]."""
    summed = rule.sum_privately(updates, server, cohort, 0.0, np.zeros).update
    return np.concatenate([np.ravel(summed.tensors[name]) for name in SHAPES]) / cohort


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(-3, 3))
def test_a_client_moves_the_result_by_at_most_the_clipping_norm(seed: int, clients: int, exponent: float) -> None:
    """Leaving a client out moves the mean by clip / cohort at most, and replacing it by 2 clip / cohort at most."""
    rng, clip = np.random.default_rng(seed), 10**exponent
    server, cohort = draw_state(rng, 10 ** rng.uniform(-2, 3)), int(rng.integers(1, 8))
    updates = [draw_update(rng, server, number) for number in range(clients)]
    other, place = draw_update(rng, server, clients), int(rng.integers(clients))
    rule = Gaussian(clip=clip, noise=0.0)
    all_of_them = aggregate(rule, updates, server, cohort)
    without = aggregate(rule, updates[:place] + updates[place + 1 :], server, cohort)
    replaced = aggregate(rule, [*updates[:place], other, *updates[place + 1 :]], server, cohort)
    # float64 rounds sums of numbers up to 1e3 to about 1e-12
    assert np.linalg.norm(all_of_them - without) <= clip / cohort * (1 + 1e-9) + 1e-11
    assert np.linalg.norm(all_of_them - replaced) <= 2 * clip / cohort * (1 + 1e-9) + 1e-11


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(-3, 3))
def test_a_client_moves_each_tensor_by_at_most_its_own_norm(seed: int, clients: int, exponent: float) -> None:
    """With 12 and 4 elements the bounds are clip (12/16)^(1/2) and clip (4/16)^(1/2). Together they are clip."""
    rng, clip = np.random.default_rng(seed), 10**exponent
    server, place = draw_state(rng, 10 ** rng.uniform(-2, 3)), int(rng.integers(clients))
    updates = [draw_update(rng, server, number) for number in range(clients)]
    rule = Gaussian(clip=clip, noise=0.0, groups="tensors")
    absent = updates[:place] + updates[place + 1 :]
    for others, factor in ((absent, 1), ([*absent, draw_update(rng, server, place)], 2)):  # left out, or replaced
        change = aggregate(rule, updates, server, 1) - aggregate(rule, others, server, 1)
        for part, share in ((change[:12], 12 / 16), (change[12:], 4 / 16), (change, 1)):
            assert np.linalg.norm(part) <= factor * clip * np.sqrt(share) * (1 + 1e-9) + 1e-11


def test_tensors_are_clipped_by_their_shares() -> None:
    """Of 4 elements with clip 2, a tensor of 3 elements has the clip 3^(1/2) and a tensor of 1 element has the clip 1."""
    server = {"global": {"net/w": torch.zeros(3), "net/b": torch.zeros(1)}}
    update = Update({"net/w": torch.tensor([0.0, 1.0, 0.0]), "net/b": torch.tensor([5.0])}, 7.0, client_id="a")
    summed = Gaussian(clip=2.0, noise=0.0, groups="tensors").sum_privately([update], server, 1, 0.0, np.zeros)
    assert summed.update.tensors["net/w"].tolist() == [0, 1, 0]
    assert summed.update.tensors["net/b"].tolist() == [1]
    assert summed.metrics["gaussian/clipped"].value == 0.5


def test_the_bound_is_reached() -> None:
    server = {"global": {"net/w": torch.zeros(3)}}
    update = Update({"net/w": torch.tensor([3.0, 0.0, 4.0])}, 7.0, client_id="a")
    summed = Gaussian(clip=2.0, noise=0.0).sum_privately([update], server, 4, 0.0, np.zeros)
    mean = summed.update.tensors["net/w"].numpy() / 4
    np.testing.assert_allclose(mean, [0.3, 0, 0.4], rtol=1e-15)
    assert {name: metric.value for name, metric in summed.metrics.items()} == {
        "gaussian/clipped": 1.0,
        "gaussian/norm": 5.0,
    }


@pytest.mark.parametrize("clip", [np.inf, 1e6])
def test_without_clipping_and_noise_it_equals_the_uniform_mean_to_the_bit(clip: float) -> None:
    rng = np.random.default_rng(1)
    server = draw_state(rng)
    updates = [
        Update(draw_state(rng)["global"], float(rng.integers(1, 9)), client_id=f"c{number}") for number in range(7)
    ]
    rule = Gaussian(clip=clip, noise=0.0)
    summed = rule.sum_privately(iter(updates), server, 7, 0.0, np.zeros).update
    result, expected = rule([summed], server).tensors, UniformMean()(iter(updates), server).tensors
    for key, tensors in expected.items():
        assert all(torch.equal(tensor, result[key][name]) for name, tensor in tensors.items())


def test_a_missing_client_counts_as_one_without_a_change() -> None:
    server = {"global": {"net/w": torch.tensor([10.0, 20.0])}}
    update = Update({"net/w": torch.tensor([11.0, 20.0])}, 1.0, client_id="a")
    rule = Gaussian(clip=5.0, noise=0.0)
    for updates, expected in (([], [10.0, 20.0]), ([update], [10.25, 20.0]), ([update] * 8, [12.0, 20.0])):
        summed = rule.sum_privately(updates, server, 4, 0.0, np.zeros).update
        assert rule([summed], server).tensors["global"]["net/w"].tolist() == expected


def test_every_tensor_receives_noise_of_the_stated_deviation() -> None:
    rng = np.random.default_rng(1)
    server = {"global": {"net/w": torch.zeros(200_000), "net/b": torch.zeros(100)}}
    rule, draw = Gaussian(clip=0.5, noise=3.0), lambda size: rng.normal(size=size)
    summed = rule.sum_privately([], server, 6, 3.0, draw).update
    result = rule([summed], server).tensors["global"]
    assert result["net/w"].std().item() == pytest.approx(3.0 * 0.5 / 6, rel=0.01)
    assert result["net/b"].abs().min() > 0


def _sum_adaptively(norms: Sequence[float], clip: AdaptiveClip, now: float, cohort: int) -> float:
    """Return the clip after a round without noise."""
    server = {"global": {"net/w": torch.zeros(1)}}
    updates = [Update({"net/w": torch.tensor([norm])}, 1.0, client_id=f"c{index}") for index, norm in enumerate(norms)]
    return Gaussian(clip=clip, noise=0.0).sum_privately(updates, server, cohort, 0.0, np.zeros, now).clip


def test_the_adaptive_clip_by_hand() -> None:
    """One of three norms is within 2, so the clip grows by exp(-(1/3 - 1/2)) = 1.1814. A missing client counts as a half."""
    assert _sum_adaptively([1.0, 3.0, 5.0], AdaptiveClip(start=9.0, rate=1.0), 2.0, 3) == pytest.approx(
        2.3627, abs=1e-4
    )
    assert _sum_adaptively([], AdaptiveClip(start=9.0, rate=1.0), 2.0, 3) == 2.0


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_adaptive_clip_approaches_the_quantile_of_the_norms(quantile: float) -> None:
    norms, clip = np.random.default_rng(0).lognormal(size=101), 0.1
    for _ in range(100):
        clip = _sum_adaptively(norms.tolist(), AdaptiveClip(start=1.0, quantile=quantile), clip, 101)
    assert np.mean(norms <= clip) == pytest.approx(quantile, abs=0.02)


def test_sum_and_count_together_reveal_as_much_as_the_noise_multiplier() -> None:
    """A client moves the sum by clip, and the count by 1/2. In units of the noise, its vector has length 1 / noise."""
    rule = Gaussian(clip=AdaptiveClip(start=1.0), noise=1.3)
    of_sum, of_count = rule.split_noise(1.3, cohort=40)
    assert of_count == 2.0
    assert np.hypot(1 / of_sum, 0.5 / of_count) == pytest.approx(1 / 1.3)
    assert Gaussian(noise=1.3).split_noise(1.3, 40) == (1.3, 0.0)
    with pytest.raises(ConfigError, match=r"clip.noise: 0.5 is at most half of the noise multiplier 1.3.* above 0.65"):
        rule.split_noise(1.3, cohort=10)


def test_single_updates_and_other_keys_are_rejected() -> None:
    server = {"global": {"net/w": torch.zeros(2)}}
    with pytest.raises(RaydflError, match="adds its noise in a run"):
        Gaussian()([Update({"net/w": torch.zeros(2)}, 1.0)], server)
    with pytest.raises(RaydflError, match="'anna' updates 'local', but gaussian protects 'global' only"):
        Gaussian().sum_privately([Update({}, 1.0, key="local", client_id="anna")], server, 1, 0.0, np.zeros)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0}, "clip.*greater than 0"),
        ({"noise": -1}, "noise.*greater than or equal to 0"),
        ({"clip": {"start": 0}}, "clip.*start.*greater than 0"),
        ({"clip": {"start": 1, "quantile": 1}}, "quantile.*less than 1"),
        ({"epsilon": 0}, "epsilon.*greater than 0"),
        ({"noise": 0, "epsilon": 8}, r"noise \(0\) and epsilon \(8\) are both set"),
        ({"clip": float("inf"), "noise": 1}, "clip is .inf, so no noise can hide a client"),
        ({"clip": {"start": 1}, "noise": 1, "bands": 2}, "bands=2 needs a constant clip"),
        ({"clip": {"start": 1}, "noise": 1, "groups": "tensors"}, "groups=tensors needs a constant clip"),
        ({"noise": 1, "bands": 0}, "bands.*greater than or equal to 1"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_rule({"name": "gaussian", **options}, UniformMean())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"experts": {}}, "adds noise to the state's entry 'global', but this method has experts"),
        ({"global": {"net/n.running_var": torch.ones(2)}}, "variance 'net/n.running_var' .* may become negative"),
    ],
)
def test_states_that_cannot_bear_noise_are_rejected(tensors: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gaussian(noise=1.0).check(tensors)
