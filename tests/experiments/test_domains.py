"""Domains: their draws, their limits, and rejected domains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from raydfl.experiments.domains import Domain


def _make_domain(**kind: Any) -> Domain:
    return Domain.model_validate(kind)


CASES = [
    _make_domain(uniform=[0.1, 0.9]),
    _make_domain(loguniform=[0.001, 10.0]),
    _make_domain(quniform=[0.0, 1.0, 0.3]),
    _make_domain(randint=[2, 5]),
    _make_domain(choice=["a", "b", "c"]),
    _make_domain(choice=[[1, 2], [3]]),
]


@pytest.mark.parametrize("domain", CASES, ids=lambda domain: domain.kind)
def test_draws_are_within_the_limits_and_cover_the_domain(domain: Domain) -> None:
    rng = np.random.default_rng(0)
    values = [domain.draw(rng) for _ in range(500)]
    if domain.listed:
        assert all(value in domain.values for value in values)
        assert len({repr(value) for value in values}) == len(domain.values)
        return
    low, high = domain.ends()
    assert low <= min(values) <= max(values) <= high
    if domain.kind == "randint":
        assert set(values) == {2, 3, 4, 5}
    if domain.kind == "quniform":
        assert set(values) == {0.0, 0.3, 0.6, 0.9}
        assert high == 0.9  # no step reaches 1.0
    positions = [domain.position(value) for value in values]
    assert abs(np.mean(positions) - 0.5) < 0.06  # positions between the limits are uniform
    assert all(len(f"{value:.10g}".lstrip("0.").replace(".", "").replace("e-05", "")) <= 4 for value in values)


def test_a_logarithmic_range_is_uniform_in_the_logarithm() -> None:
    domain = _make_domain(loguniform=[0.01, 100.0])
    assert domain.position(1.0) == pytest.approx(0.5)
    rng = np.random.default_rng(0)
    below = np.mean([domain.draw(rng) < 1.0 for _ in range(2000)])
    assert 0.46 < below < 0.54


def test_values_beyond_the_limits_are_clipped() -> None:
    assert _make_domain(uniform=[0.1, 0.9]).clip(1.02) == 0.9
    assert _make_domain(randint=[1, 4]).clip(0) == 1
    assert _make_domain(quniform=[0.0, 1.0, 0.3]).clip(0.7) == 0.6
    assert _make_domain(choice=["a", "b"]).clip("b") == "b"


def test_ray_tunes_searchers_draw_from_the_same_ranges() -> None:
    from ray.tune.search.optuna import OptunaSearch

    space = {str(place): domain.to_tune() for place, domain in enumerate(CASES)}
    search = OptunaSearch(space, metric="score", mode="max", seed=1)
    for number in range(50):
        point = search.suggest(str(number))
        for name, domain in enumerate(CASES):
            value = point[str(name)]
            assert 0 <= domain.position(value) <= 1
            if domain.listed:
                assert value in domain.values
        search.on_trial_complete(str(number), {"score": 0.0})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({}, "exactly one of uniform, loguniform"),
        ({"uniform": [0, 1], "choice": [1]}, "this domain has uniform and choice"),
        ({"uniform": [1, 0]}, "the low end 1 must be below the high end 0"),
        ({"loguniform": [0, 1]}, "the low end must be above 0"),
        ({"quniform": [0, 1, 2]}, "the step must be above 0 and at most high - low"),
        ({"choice": [1, 2, 1]}, "a value is listed twice"),
    ],
)
def test_invalid_domains_are_rejected(kind: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Domain.model_validate(kind)
