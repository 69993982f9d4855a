"""Mean of products of low-rank factors. Oracle: the dense mean of products, truncated by NumPy's SVD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.errors import ConfigError, RaydflError
from raydfl.core.types import Update
from raydfl.rules import RULES, Aggregate, WeightedMean
from raydfl.testing import start_server

A, B, HEAD = "model/q_proj.lora_A.default.weight", "model/q_proj.lora_B.default.weight", "model/output.weight"
OUTPUTS, INPUTS = 7, 5


def make_update(a: Any, b: Any, weight: float = 1.0, **more: Any) -> Update:
    tensors = {A: torch.as_tensor(a, dtype=torch.float32), B: torch.as_tensor(b, dtype=torch.float32)}
    return Update({**tensors, **more}, weight)


def draw_updates(ranks: Sequence[int], seed: int = 0) -> list[Update]:
    rng = np.random.default_rng(seed)
    return [
        make_update(
            rng.normal(size=(rank, INPUTS)),
            rng.normal(size=(OUTPUTS, rank)),
            float(rng.integers(1, 20)),
            **{HEAD: torch.from_numpy(rng.normal(size=(2, 3))).float()},
        )
        for rank in ranks
    ]


def make_server(rank: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(rank, INPUTS, generator=generator), torch.randn(OUTPUTS, rank, generator=generator)
    return {"global": {A: a, B: b, HEAD: torch.zeros(2, 3)}}


def multiply(result: Aggregate) -> np.ndarray:
    tensors = result.tensors["global"]
    return (tensors[B].double() @ tensors[A].double()).numpy()


def compute_dense_mean(updates: Sequence[Update]) -> np.ndarray:
    weights = np.array([update.weight for update in updates])
    products = [(update.tensors[B].double() @ update.tensors[A].double()).numpy() for update in updates]
    return np.tensordot(weights / weights.sum(), products, 1)


def test_three_numbers_by_hand() -> None:
    """The mean of diag(3, 0) and diag(0, 1) is diag(1.5, 0.5). Rank 1 keeps 1.5 and loses 0.5 / sqrt(2.5)."""
    updates = [make_update([[3.0, 0.0]], [[1.0], [0.0]]), make_update([[0.0, 1.0]], [[0.0], [1.0]])]
    server = {"global": {A: torch.zeros(1, 2), B: torch.zeros(2, 1)}}
    result = RULES["product_mean"]()(updates, server)
    np.testing.assert_allclose(multiply(result), [[1.5, 0.0], [0.0, 0.0]], atol=1e-6)
    assert result.report["product_mean/lost"].value == pytest.approx(0.5 / 2.5**0.5)


@pytest.mark.parametrize(("ranks", "rank"), [([2, 2], 2), ([1, 2, 4], 3), ([2, 2, 2, 2, 2], 4), ([3], 2), ([5, 5], 5)])
def test_the_product_equals_the_truncated_dense_mean(ranks: list[int], rank: int) -> None:
    updates = draw_updates(ranks)
    u, s, v = np.linalg.svd(compute_dense_mean(updates), full_matrices=False)
    result = RULES["product_mean"]()(iter(updates), make_server(rank))
    np.testing.assert_allclose(multiply(result), u[:, :rank] * s[:rank] @ v[:rank], rtol=1e-5, atol=1e-5)
    lost = np.sqrt((s[rank:] ** 2).sum() / (s**2).sum())
    assert result.report["product_mean/lost"].value == pytest.approx(lost, abs=1e-6)
    a, b = result.tensors["global"][A], result.tensors["global"][B]
    assert (a.shape, b.shape) == ((rank, INPUTS), (OUTPUTS, rank))
    norms = b.norm(dim=0)
    assert bool((norms[:-1] >= norms[1:] - 1e-6).all()), "the first components are the largest"
    torch.testing.assert_close(a @ a.T, torch.eye(rank))


@pytest.mark.parametrize("rank", [3, 5])
def test_the_mean_is_exact_if_the_ranks_fit(rank: int) -> None:
    updates, server = draw_updates([1, 2]), make_server(rank)
    result = RULES["product_mean"]()(updates, server)
    np.testing.assert_allclose(multiply(result), compute_dense_mean(updates), rtol=1e-5, atol=1e-5)
    assert result.report["product_mean/lost"].value < 1e-6
    tensors = result.tensors["global"]
    assert torch.equal(tensors[A][3:], server["global"][A][3:])  # the remaining rows can still train
    assert not tensors[B][:, 3:].any()


def test_equal_a_gives_the_weighted_mean_of_b() -> None:
    updates = draw_updates([3, 3, 3])
    updates = [make_update(updates[0].tensors[A], update.tensors[B], float(update.weight)) for update in updates]  # type: ignore[arg-type]
    mean = WeightedMean()(updates, make_server(3)).tensors["global"][B]
    result = RULES["product_mean"]()(updates, make_server(3))
    np.testing.assert_allclose(multiply(result), (mean @ updates[0].tensors[A]).numpy(), rtol=1e-5, atol=1e-5)


def test_all_other_tensors_have_the_bits_of_the_weighted_mean() -> None:
    updates = draw_updates([2, 2, 2])
    result, mean = (
        rule(updates, make_server(2)).tensors["global"] for rule in (RULES["product_mean"](), WeightedMean())
    )
    assert list(result) == list(mean)
    assert torch.equal(result[HEAD], mean[HEAD])


def test_slices_of_a_cut_network_are_products_of_a_smaller_rank() -> None:
    updates, server = draw_updates([1, 2]), make_server(4)
    rows = ([3], [0, 2])
    cut = [
        Update(u.tensors, u.weight, cuts={A: Cut([kept, None]), B: Cut([None, kept])})
        for u, kept in zip(updates, rows, strict=True)
    ]
    result, expected = (RULES["product_mean"]()(sent, server).tensors["global"] for sent in (cut, updates))
    assert all(torch.equal(result[name], expected[name]) for name in (A, B, HEAD))


def test_clients_without_weight_do_not_count() -> None:
    updates, server = draw_updates([2, 2]), make_server(2)
    silent = Update(updates[1].tensors, 0.0)
    result, expected = (
        RULES["product_mean"]()(sent, server).tensors["global"] for sent in ([updates[0], silent], updates[:1])
    )
    assert all(torch.equal(result[name], expected[name]) for name in (A, B, HEAD))
    unchanged = RULES["product_mean"]()([silent], server).tensors["global"]
    assert torch.equal(unchanged[A], server["global"][A])


@pytest.mark.parametrize(
    "update",
    [
        make_update(np.zeros((2, INPUTS)), np.zeros((OUTPUTS, 3))),
        make_update(np.zeros((2, INPUTS + 1)), np.zeros((OUTPUTS, 2))),
        Update({A: torch.zeros(2, INPUTS), B: torch.zeros(OUTPUTS, 2)}, {A: 1.0, B: 2.0}),
    ],
)
def test_factors_that_do_not_fit_are_rejected(update: Update) -> None:
    with pytest.raises(RaydflError, match="product_mean needs equal ranks"):
        RULES["product_mean"]()([update], make_server(2))


def test_a_run_without_pairs_is_rejected_before_the_first_round(tiny: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"method\.rule: product_mean needs adapters .* or choose weighted_mean"):
        start_server(tiny("method.rule=product_mean"))


@pytest.mark.parametrize("method", ["scaffold", "fednova", "feddc", "feddyn", "fedadam", "fedavgm", "fedopt"])
def test_methods_that_combine_rounds_are_rejected(tiny: Callable[..., Any], method: str) -> None:
    message = (
        f"method.rule: rule ProductMean needs tensors of one round, but method '{method}' combines those of several"
    )
    with pytest.raises(ConfigError, match=message):
        tiny("method.rule=product_mean", method=method)
