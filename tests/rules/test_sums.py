"""Sums over clients' vectors, compared with float64 or exact fractions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from raydfl.core import ops
from raydfl.core.ops import sums as rows
from raydfl.core.ops.sums import ClientVectors
from raydfl.core.types import Update
from raydfl.rules import LayerwisePruning, WeightedMean

pytestmark = pytest.mark.usefixtures("sums")
needs_compiled = pytest.mark.skipif(not rows.sums_are_compiled(), reason="the operators in C++ are not compiled here")


def draw_vectors(count: int, elements: int, seed: int = 0, mean: float = 0.0) -> list[np.ndarray]:
    """Draw read-only vectors, as the object store returns them."""
    generator = np.random.default_rng(seed)
    drawn = [generator.normal(mean, 1 + row % 5, elements).astype(np.float32) for row in range(count)]
    for vector in drawn:
        vector.flags.writeable = False
    return drawn


def add_by_hand(total: np.ndarray, parts: list[np.ndarray], weights: list[float]) -> np.ndarray:
    for part, weight in zip(parts, weights, strict=True):
        total = total + weight * part.astype(np.float64)
    return total


def distances_by_hand(parts: list[np.ndarray]) -> np.ndarray:
    wide = np.stack(parts).astype(np.longdouble)
    return ((wide - wide.mean(axis=0)) ** 2).sum(axis=1).astype(np.float64)


@given(
    count=st.integers(1, 11),
    elements=st.sampled_from([0, 1, 7, 8, 9, 100, 4095, 4097, 9001]),
    start=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
    backwards=st.booleans(),
)
def test_sums_add_one_product_after_another(count: int, elements: int, start: int, seed: int, backwards: bool) -> None:
    generator = np.random.default_rng(seed)
    all_vectors = draw_vectors(count, elements + start + 3, seed)
    chosen = [row for row in range(count) if generator.random() < 0.8][:: -1 if backwards else 1]
    weights = generator.uniform(0, 50, len(chosen)).tolist()
    before = generator.normal(size=elements)
    total = before.copy()
    ClientVectors(all_vectors).add_to(total, weights, chosen, start)
    expected = add_by_hand(before, [all_vectors[row][start : start + elements] for row in chosen], weights)
    np.testing.assert_array_equal(total, expected)


def test_one_call_and_several_calls_add_long_vectors_to_the_same_bits() -> None:
    vectors, weights = draw_vectors(9, 100_003), [0.1 * row + 0.3 for row in range(9)]
    expected = add_by_hand(np.zeros(100_003), vectors, weights)
    at_once, in_turns = np.zeros(100_003), np.zeros(100_003)
    ClientVectors(vectors).add_to(at_once, weights)
    for vector, weight in zip(vectors, weights, strict=True):
        ClientVectors([vector]).add_to(in_turns, [weight])
    np.testing.assert_array_equal(at_once, expected)
    np.testing.assert_array_equal(in_turns, expected)


@pytest.mark.parametrize(("count", "elements"), [(2, 1), (3, 7), (5, 4099), (12, 70_001), (300, 513)])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_deviations_equal_distances_to_the_mean(count: int, elements: int, mean: float) -> None:
    vectors = draw_vectors(count, elements, mean=mean)
    np.testing.assert_allclose(
        ClientVectors(vectors).compute_squared_deviations([(0, elements)]), distances_by_hand(vectors), rtol=1e-5
    )


def test_deviations_include_exactly_the_elements_of_all_parts() -> None:
    vectors = draw_vectors(6, 90_000)
    parts = [(3, 11), (11, 11), (70, 50_001), (89_999, 90_000)]
    expected = distances_by_hand([np.concatenate([vector[start:stop] for start, stop in parts]) for vector in vectors])
    np.testing.assert_allclose(ClientVectors(vectors).compute_squared_deviations(parts), expected, rtol=1e-5)
    np.testing.assert_array_equal(ClientVectors(vectors).compute_squared_deviations([]), np.zeros(6))


def test_close_vectors_far_from_zero_keep_their_order() -> None:
    """Differences of squared norms would round away these distances."""
    generator = np.random.default_rng(2)
    vectors = [(1000 + 0.01 * (1 + row) * generator.normal(size=3000)).astype(np.float32) for row in range(20)]
    deviations, expected = ClientVectors(vectors).compute_squared_deviations([(0, 3000)]), distances_by_hand(vectors)
    assert np.argsort(deviations).tolist() == np.argsort(expected).tolist()
    np.testing.assert_allclose(deviations, expected, rtol=1e-2)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_deviations_may_exceed_the_square_range_of_float32(scale: float) -> None:
    vectors = [(vector * np.float32(scale)).astype(np.float32) for vector in draw_vectors(5, 1000)]
    np.testing.assert_allclose(
        ClientVectors(vectors).compute_squared_deviations([(0, 1000)]), distances_by_hand(vectors), rtol=1e-6
    )


def test_equal_vectors_have_equal_deviations() -> None:
    vectors = draw_vectors(4, 10_007)
    deviations = ClientVectors([vectors[0], vectors[1], vectors[0], vectors[2], vectors[1]]).compute_squared_deviations(
        [(0, 10_007)]
    )
    assert deviations[0] == deviations[2]
    assert deviations[1] == deviations[4]


@needs_compiled
def test_compiled_deviations_equal_exact_fractions(sums: str) -> None:
    if sums == "numpy":
        pytest.skip("NumPy's are rounded to float32 on the way")
    vectors = draw_vectors(7, 61, mean=5.0)
    exact = [[Fraction(float(value)) for value in vector] for vector in vectors]
    mean = [sum(column) / 7 for column in zip(*exact, strict=True)]
    expected = [float(sum((value - middle) ** 2 for value, middle in zip(row, mean, strict=True))) for row in exact]
    np.testing.assert_allclose(ClientVectors(vectors).compute_squared_deviations([(0, 61)]), expected, rtol=1e-14)


@pytest.mark.parametrize("count", [3, 200])
def test_an_approximate_sum_stays_within_its_error_bound(count: int) -> None:
    vectors, chosen = draw_vectors(count, 30_000, mean=1.0), list(range(0, count, 2))
    weights = np.random.default_rng(1).uniform(size=len(chosen)) / count
    parts = [(5, 20_001), (29_000, 30_000)]
    result = ClientVectors(vectors).approximate_sum(weights, chosen, parts)
    cut = [np.concatenate([vectors[row][start:stop] for start, stop in parts]).astype(np.float64) for row in chosen]
    magnitudes = weights @ np.abs(cut)
    assert result.dtype == np.float32
    assert np.all(np.abs(result - weights @ np.stack(cut)) <= 1.2e-7 * len(chosen) * magnitudes)


def test_vectors_are_never_modified() -> None:
    vectors = draw_vectors(5, 1000)
    before = [vector.copy() for vector in vectors]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client_vectors = ClientVectors(vectors)
        client_vectors.add_to(np.zeros(1000), [1.0] * 5)
        client_vectors.compute_squared_deviations([(0, 1000)])
        client_vectors.approximate_sum(np.full(5, 0.1), range(5), [(0, 1000)])
    for vector, copy in zip(vectors, before, strict=True):
        np.testing.assert_array_equal(vector, copy)


def test_the_number_of_threads_does_not_change_the_bits() -> None:
    vectors = draw_vectors(30, 60_000)

    def results(threads: int) -> list[np.ndarray]:
        total = np.zeros(60_000)
        with threadpool_limits(limits=threads):
            updates = [Update({"w": torch.tensor(vector)}, 0.1 + index / 7) for index, vector in enumerate(vectors)]
            ClientVectors(vectors).add_to(total, [0.1] * 30)
            return [total, LayerwisePruning()(updates, {}).tensors["global"]["w"].numpy()]

    for one, two in zip(results(1), results(2), strict=True):
        np.testing.assert_array_equal(one, two)


@needs_compiled
def test_compiled_and_numpy_rules_agree() -> None:
    """Means agree to the bit. Pruning excludes the same clients, but rounds its means differently."""
    updates = [
        Update({"a.w": torch.tensor(vector[:700]).view(7, 100), "b.w": torch.tensor(vector[700:])}, 1.0 + row % 3)
        for row, vector in enumerate(draw_vectors(25, 5000, mean=2.0))
    ]

    def results() -> list[dict[str, torch.Tensor]]:
        return [rule(updates, {}).tensors["global"] for rule in (WeightedMean(), LayerwisePruning(vl=0.2, vh=0.2))]

    with ops.use("auto"):
        mean, pruned = results()
    with ops.use("torch"):
        mean_again, pruned_again = results()
    for name, tensor in mean.items():
        assert torch.equal(tensor, mean_again[name])
        torch.testing.assert_close(pruned[name], pruned_again[name], rtol=1e-6, atol=1e-6)


@needs_compiled
def test_operators_built_from_older_sources_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with ops.use("auto"):
        assert rows.sums_are_compiled()
        monkeypatch.setattr(rows, "_has_sums", lambda: False)
        assert not rows.sums_are_compiled()
        total = np.ones(2)
        ClientVectors([np.array([1.0, 2.0], np.float32)]).add_to(total, [2.0])
    assert total.tolist() == [3.0, 5.0]


ROW, TOTAL = torch.zeros(5), torch.zeros(4, dtype=torch.float64)
KEPT, ONE = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)


@needs_compiled
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda found: found.add_weighted(TOTAL, [ROW], [1.0], 2), "float32 vector of at least 6 elements"),
        (lambda found: found.add_weighted(TOTAL, [ROW.double()], [1.0], 0), "contiguous float32 vector"),
        (lambda found: found.add_weighted(TOTAL, [torch.zeros(10)[::2]], [1.0], 0), "contiguous float32 vector"),
        (lambda found: found.add_weighted(TOTAL.float(), [ROW], [1.0], 0), "contiguous float64 vector"),
        (lambda found: found.add_weighted(TOTAL, [ROW], [1.0, 2.0], 0), "1 rows need as many weights"),
        (lambda found: found.add_weighted(TOTAL, [ROW], [1.0], -1), "start"),
        (lambda found: found.add_slices(TOTAL, 3, [ROW], [KEPT], [ONE], [KEPT], [1]), "has no 3 rows"),
        (lambda found: found.add_slices(TOTAL, 2, [ROW], [KEPT + 2], [ONE], [KEPT], [1]), "row or column 2"),
        (lambda found: found.add_slices(TOTAL, 2, [ROW], [KEPT], [ONE], [KEPT - 1], [1]), "row or column -1"),
        (lambda found: found.add_slices(TOTAL, 2, [ROW], [KEPT], [ONE], [KEPT], [1]), "float32 vector of 1 elements"),
        (
            lambda found: found.add_slices(TOTAL, 2, [], [KEPT], [TOTAL], [KEPT], [1]),
            "one float64 weight, or one for each",
        ),
        (lambda found: found.add_slices(TOTAL, 2, [], [KEPT], [ONE], [KEPT], [3]), "no columns of 3"),
        (lambda found: found.add_slices(TOTAL, 2, [], [KEPT], [ONE], [], [1]), "each slice needs"),
        (lambda found: found.add_elements(TOTAL, ONE, [ROW], [TOTAL]), "cannot be counted in 1"),
        (lambda found: found.add_elements(TOTAL, TOTAL, [ROW], [ROW, ROW]), "as many weights"),
        (lambda found: found.add_elements(TOTAL, TOTAL, [ROW], [KEPT]), "float32 or float64"),
        (lambda found: found.add_elements(TOTAL, TOTAL, [ROW], [ONE]), "at least 4 elements"),
        (lambda found: found.squared_deviations([ROW], [0], [6]), "at least 6 elements"),
        (lambda found: found.squared_deviations([ROW], [0, 1], [6]), "as many starts as stops"),
        (lambda found: found.squared_deviations([ROW], [-1], [2]), "a part"),
        (lambda found: found.squared_deviations([ROW], [3], [2]), "a part"),
    ],
)
def test_the_operators_reject_ranges_outside_the_vectors(call: Callable[[object], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.raydfl)
