"""Layer-wise pruning aggregation, compared with a loop over equations 10 to 14."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from raydfl.core.types import Update
from raydfl.rules import LayerwisePruning, WeightedMean

pytestmark = pytest.mark.usefixtures("sums")
LAYERS = {"net/a": ("net/a.weight", "net/a.bias"), "net/gru": ("net/gru.weight_l0",), "free": ("free",)}
SHAPES = {"net/a.weight": (3, 4), "net/a.bias": (3,), "net/gru.weight_l0": (2, 2, 2), "free": (5,)}


def lpa_by_hand(
    updates: Sequence[Update], vl: float, vh: float, layers: Sequence[Sequence[str]]
) -> tuple[dict[str, np.ndarray], dict[str, float], list[int]]:
    """Compute the new tensors, each layer's smallest relative gap between deviations, and the number of kept clients."""
    result: dict[str, np.ndarray] = {}
    gaps: dict[str, float] = {}
    numbers: list[int] = []
    for names in layers:
        vectors = [np.concatenate([update.tensors[n].double().numpy().ravel() for n in names]) for update in updates]
        mean = np.zeros_like(vectors[0])
        for vector in vectors:
            mean = mean + vector / len(vectors)
        deviations = [math.sqrt(sum((v - m) ** 2 for v, m in zip(vector, mean, strict=True))) for vector in vectors]
        order = sorted(range(len(vectors)), key=lambda client: (deviations[client], client))
        ranked = [deviations[client] for client in order]
        gaps[names[0]] = min((b - a for a, b in pairwise(ranked)), default=1.0) / (max(ranked) or 1.0)
        low, high = math.floor(vl * len(vectors) + 1e-9), math.floor(vh * len(vectors) + 1e-9)
        selected = order[low : len(order) - high]
        if low + high >= len(order):
            selected = [order[(len(order) - 1) // 2]]
        if len(order) == 1:
            selected = order
        numbers.append(len(selected))
        for name in names:
            total = sum(float(updates[c].weight) * updates[c].tensors[name].double().numpy() for c in selected)
            result[name] = total / sum(float(updates[c].weight) for c in selected)
    return result, gaps, numbers


def random_updates(clients: int, seed: int) -> list[Update]:
    generator = np.random.default_rng(seed)
    return [
        Update(
            {n: torch.from_numpy(generator.normal(3, 1 + client % 3, s).astype(np.float32)) for n, s in SHAPES.items()},
            float(generator.integers(1, 50)),
            client_id=f"c{client}",
        )
        for client in range(clients)
    ]


@given(
    clients=st.integers(1, 14),
    seed=st.integers(0, 2**32 - 1),
    vl=st.floats(0, 0.99),
    vh=st.floats(0, 0.99),
    by=st.sampled_from(["module", "tensor"]),
)
def test_pruning_equals_the_algorithm_by_hand(clients: int, seed: int, vl: float, vh: float, by: str) -> None:
    updates = random_updates(clients, seed)
    layers = list(LAYERS.values()) if by == "module" else [(name,) for name in SHAPES]
    expected, gaps, numbers = lpa_by_hand(updates, vl, vh, layers)
    assume(clients == 1 or min(gaps.values()) > 1e-5)  # below this gap, rounding may change the selection
    result = LayerwisePruning(vl=vl, vh=vh, by=by)(updates, {})  # type: ignore[arg-type]
    for name, values in expected.items():
        np.testing.assert_allclose(result.tensors["global"][name].numpy(), values, rtol=1e-6, atol=1e-6)
    report = {name.removeprefix("lpa/pruned/"): (r.total, r.count) for name, r in result.report.items()}
    names = list(LAYERS) if by == "module" else list(SHAPES)
    assert report == {layer: (clients - kept, clients) for layer, kept in zip(names, numbers, strict=True)}


def test_long_layers_equal_the_algorithm_in_matrix_form() -> None:
    """The layer has more elements than a block, and its deviations are small compared with the mean."""
    generator = np.random.default_rng(7)
    scale = 1 + np.arange(20)[:, None] % 7 + np.arange(20)[:, None] / 100
    matrix = (30 + 0.01 * scale * generator.normal(size=(20, 100_003))).astype(np.float32)
    weights = generator.integers(1, 99, 20).astype(float)
    wide = matrix.astype(np.float64)
    order = np.argsort(np.linalg.norm(wide - wide.mean(axis=0), axis=1))
    selected = order[4:17]
    expected = weights[selected] @ wide[selected] / weights[selected].sum()
    updates = [Update({"m.x": torch.from_numpy(row)}, float(w)) for row, w in zip(matrix, weights, strict=True)]
    result = LayerwisePruning(vl=0.2, vh=0.15)(updates, {}).tensors["global"]["m.x"].numpy()
    np.testing.assert_allclose(result, expected, rtol=5e-7)


@given(clients=st.integers(2, 12), seed=st.integers(0, 2**32 - 1), order=st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(clients: int, seed: int, order: object) -> None:
    updates = random_updates(clients, seed)
    _, gaps, _ = lpa_by_hand(updates, 0.25, 0.25, list(LAYERS.values()))
    assume(min(gaps.values()) > 1e-5)
    rule = LayerwisePruning(vl=0.25, vh=0.25)
    shuffled = list(updates)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    result, shuffled_result = rule(updates, {}), rule(shuffled, {})
    for name, values in result.tensors["global"].items():
        torch.testing.assert_close(shuffled_result.tensors["global"][name], values)
    assert result.report == shuffled_result.report


@pytest.mark.parametrize(("clients", "share"), [(20, 0.0), (9, 0.1), (1, 0.9)])
def test_pruning_no_client_equals_the_weighted_mean_to_the_bit(clients: int, share: float) -> None:
    updates = random_updates(clients, 5)
    mean = WeightedMean()(updates, {}).tensors["global"]
    result = LayerwisePruning(vl=share, vh=share)(updates, {})
    assert all(torch.equal(mean[name], result.tensors["global"][name]) for name in mean)
    assert all(ratio.total == 0 and ratio.count == clients for ratio in result.report.values())


@pytest.mark.parametrize("option", [{"vl": 0.2}, {"vh": 0.2}])
def test_each_share_moves_the_result(option: dict[str, float]) -> None:
    updates = random_updates(10, 5)
    neutral = LayerwisePruning(vl=0, vh=0)(updates, {}).tensors["global"]["net/a.weight"]
    assert not torch.equal(
        neutral, LayerwisePruning(**({"vl": 0, "vh": 0} | option))(updates, {}).tensors["global"]["net/a.weight"]
    )  # type: ignore[arg-type]


def find_kept(values: Sequence[float], **options: float) -> list[int]:
    """Find the kept clients of a model with a single parameter, from the mean under weights of 2**client."""
    marked = [Update({"m.x": torch.tensor([value])}, 2.0**client) for client, value in enumerate(values)]
    mean = Fraction(LayerwisePruning(**options)(marked, {}).tensors["global"]["m.x"].double().item())  # type: ignore[arg-type]
    fitting = []
    for subset in range(1, 2 ** len(values)):
        members = [client for client in range(len(values)) if subset >> client & 1]
        total = sum(Fraction(values[client]) * 2**client for client in members) / sum(2**client for client in members)
        if abs(total - mean) < Fraction(1, 10**6) * max(1, abs(mean)):
            fitting.append(members)
    assert len(fitting) == 1, f"{mean} is the mean of {fitting} of {values}"
    return fitting[0]


def test_the_smallest_and_the_largest_deviations_are_excluded() -> None:
    values = [-10.0, 0.5, 1.0, 2.0, 9.5]  # mean 0.6: deviations 10.6, 0.1, 0.4, 1.4, 8.9
    assert find_kept(values, vl=0.2, vh=0.0) == [0, 2, 3, 4]
    assert find_kept(values, vl=0.0, vh=0.2) == [1, 2, 3, 4]
    assert find_kept(values, vl=0.2, vh=0.4) == [2, 3]


def test_ties_follow_the_client_order() -> None:
    values = [3.0, -3.0, 1.0, -1.0]  # mean 0: deviations 3, 3, 1, 1
    assert find_kept(values, vl=0.25, vh=0.25) == [0, 3]
    equal = [Update({"x": torch.tensor([2.5, 1.0])}, {"x": 2.0**client}) for client in range(6)]
    result = LayerwisePruning(vl=0.2, vh=0.2)(equal, {})
    assert result.tensors["global"]["x"].tolist() == [2.5, 1.0]
    assert result.report["lpa/pruned/x"].total == 2


def test_if_no_client_remains_the_median_deviation_stays() -> None:
    values = [-10.0, 0.5, 1.0, 2.0, 9.5]  # ascending deviation: clients 1, 2, 3, 4, 0
    assert find_kept(values, vl=0.6, vh=0.6) == [3]
    assert find_kept(values, vl=0.4, vh=0.6) == [3]
    assert find_kept(values[:2], vl=0.5, vh=0.5) == [0]  # of two, equally far from their mean, the lower middle


@pytest.mark.parametrize(
    ("share", "clients", "pruned"), [(0.29, 100, 29), (0.1, 9, 0), (0.1, 10, 1), (0.2, 5, 1), (0.57, 100, 57)]
)
def test_shares_are_rounded_down_as_decimal_numbers(share: float, clients: int, pruned: int) -> None:
    updates = [Update({"m.x": torch.tensor([float(client**2)])}, 1.0) for client in range(clients)]
    ratio = LayerwisePruning(vl=share, vh=0)(updates, {}).report["lpa/pruned/m"]
    assert (ratio.total, ratio.count) == (pruned, clients)


def test_layers_choose_their_clients_independently() -> None:
    first, second = [0.0, 1.0, 2.0, 3.0, 100.0], [100.0, 3.0, 2.0, 1.0, 0.0]
    updates = [
        Update({"a.w": torch.tensor([x]), "b.w": torch.tensor([y])}, 1.0) for x, y in zip(first, second, strict=True)
    ]
    tensors = LayerwisePruning(vl=0, vh=0.2)(updates, {}).tensors["global"]
    assert tensors["a.w"].item() == tensors["b.w"].item() == 1.5


def test_a_module_is_pruned_as_one_layer_and_tensors_separately() -> None:
    # The weight is off at client 0, the bias, less so, at client 1.
    updates = [
        Update({"m.weight": torch.tensor([w]), "m.bias": torch.tensor([b])}, 1.0)
        for w, b in [(50.0, 1.0), (1.0, 20.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]
    ]
    module = LayerwisePruning(vl=0, vh=0.2)(updates, {}).tensors["global"]
    assert (module["m.weight"].item(), module["m.bias"].item()) == (2.5, 7.25)  # without client 0
    tensor = LayerwisePruning(vl=0, vh=0.2, by="tensor")(updates, {}).tensors["global"]
    assert (tensor["m.weight"].item(), tensor["m.bias"].item()) == (2.5, 2.5)  # without client 0; without client 1


@pytest.mark.parametrize("scale", [1e25, 1e37, 1e-25])
def test_values_beyond_the_square_range_of_float32_are_still_sorted(scale: float) -> None:
    values = [scale * value for value in (-3.0, -0.25, 0.0, 0.75, 2.0)]  # mean -0.1: ascending 2, 1, 3, 4 or 0
    updates = [Update({"x": torch.tensor([value], dtype=torch.float32)}, 1.0) for value in values]
    result = LayerwisePruning(vl=0.2, vh=0.2)(updates, {}).tensors["global"]["x"].item()
    assert result == pytest.approx(scale * (-0.25 + 0.75 + 2.0) / 3, rel=1e-6)


def test_masks_weight_the_kept_clients_by_element() -> None:
    current = {"global": {"m.x": torch.tensor([70.0, 80.0, 90.0])}}
    updates = [
        Update({"m.x": torch.tensor([1.0, 1.0, 1.0])}, {"m.x": torch.tensor([1.0, 1.0, 0.0])}),
        Update({"m.x": torch.tensor([2.0, 2.0, 2.0])}, {"m.x": torch.tensor([3.0, 0.0, 0.0])}),
        Update({"m.x": torch.tensor([99.0, 99.0, 99.0])}, {"m.x": torch.tensor([1.0, 1.0, 1.0])}),
    ]
    result = LayerwisePruning(vl=0, vh=0.34)(updates, current).tensors["global"]["m.x"]
    assert result.tolist() == [1.75, 1.0, 90.0]


def test_partial_models_prune_among_the_clients_with_the_layer() -> None:
    updates = [
        Update(
            {"a.w": torch.tensor([float(client)])} | ({"b.w": torch.tensor([float(client**2)])} if client < 5 else {}),
            1.0,
        )
        for client in range(10)
    ]
    result = LayerwisePruning(vl=0, vh=0.2)(updates, {})
    assert result.tensors["global"]["b.w"].item() == (0 + 1 + 4 + 9) / 4
    assert result.report["lpa/pruned/b"].total == 1
    assert result.report["lpa/pruned/a"].total == 2
