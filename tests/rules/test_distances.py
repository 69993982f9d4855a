"""Distances between clients' vectors and sorted values, compared with float64."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from threadpoolctl import threadpool_limits

from raydfl.core.ops import sums as rows
from raydfl.core.ops.sums import ClientVectors

pytestmark = pytest.mark.usefixtures("sums")


def draw_cohort(count: int, elements: int, offset: float = 0.0, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (offset + generator.normal(size=(count, elements))).astype(np.float32)


def distances_by_hand(matrix: np.ndarray) -> np.ndarray:
    return cdist(matrix.astype(float), matrix.astype(float), "sqeuclidean")


@pytest.mark.parametrize(("count", "elements"), [(1, 5), (2, 1), (7, 1000), (30, 70_000)])
def test_distances_between_vectors_and_to_a_point(count: int, elements: int) -> None:
    matrix = draw_cohort(count, elements)
    squares = ClientVectors(list(matrix)).pairwise()
    np.testing.assert_allclose(squares, distances_by_hand(matrix), rtol=1e-5)
    assert np.array_equal(squares, squares.T)
    assert not np.diagonal(squares).any()
    point = draw_cohort(1, elements, seed=1)[0]
    distances = ClientVectors(list(matrix)).compute_squared_distances(point)
    np.testing.assert_allclose(distances, ((matrix.astype(float) - point) ** 2).sum(axis=1), rtol=1e-5)


def test_several_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = draw_cohort(9, 5000)
    whole = ClientVectors(list(matrix)).pairwise()
    monkeypatch.setattr(rows, "_BLOCK", 9 * 70)
    monkeypatch.setattr(rows, "STRIP", 130)
    monkeypatch.setattr(rows, "_SORTED", 9 * 33)
    np.testing.assert_allclose(ClientVectors(list(matrix)).pairwise(), whole, rtol=1e-5)
    exact = ((matrix.astype(float) - 1) ** 2).sum(axis=1)
    np.testing.assert_allclose(
        ClientVectors(list(matrix)).compute_squared_distances(np.ones(5000, np.float32)), exact, rtol=1e-6
    )
    parts = [block.copy() for _, _, block in ClientVectors(list(matrix)).iter_sorted(range(9))]
    assert len(parts) > 100
    np.testing.assert_array_equal(np.concatenate(parts).T, np.sort(matrix, axis=0))


@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_a_common_offset_does_not_reduce_precision(offset: float) -> None:
    """Products of vectors around 1e6 would round away distances of some thousands."""
    matrix = draw_cohort(12, 3000, offset)
    np.testing.assert_allclose(ClientVectors(list(matrix)).pairwise(), distances_by_hand(matrix), rtol=1e-5)


@pytest.mark.parametrize("distance", [1e3, 1e6, 1e12])
def test_distant_vectors_do_not_reduce_the_precision_of_small_distances(distance: float) -> None:
    matrix = draw_cohort(12, 3000)
    matrix[[0, 4, 5, 9]] += np.float32(distance)  # the uniform mean is far from all vectors
    close = [index for index in range(12) if index not in (0, 4, 5, 9)]
    distances, expected = ClientVectors(list(matrix)).pairwise(), distances_by_hand(matrix)
    np.testing.assert_allclose(distances[np.ix_(close, close)], expected[np.ix_(close, close)], rtol=1e-5)
    np.testing.assert_allclose(distances[0, close], expected[0, close], rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e25, 1e38])
def test_distances_may_exceed_the_square_range_of_float32(scale: float) -> None:
    matrix = (np.clip(draw_cohort(5, 2000), -3, 3) * np.float32(scale)).astype(np.float32)
    np.testing.assert_allclose(ClientVectors(list(matrix)).pairwise(), distances_by_hand(matrix), rtol=1e-5)
    far = ClientVectors(list(matrix)).compute_squared_distances(np.zeros(2000, np.float32))
    np.testing.assert_allclose(far, (matrix.astype(float) ** 2).sum(axis=1), rtol=1e-5)


def test_equal_vectors_have_distance_zero() -> None:
    assert not ClientVectors([np.full(3000, 0.1, np.float32)] * 4).pairwise().any()


def test_empty_vectors_have_distance_zero() -> None:
    nothing = ClientVectors([np.empty(0, np.float32)] * 3)
    assert not nothing.pairwise().any()
    assert list(nothing.iter_sorted(range(3))) == []


def test_values_are_sorted_over_the_chosen_clients() -> None:
    matrix = draw_cohort(8, 100)
    ((begin, end, block),) = ClientVectors(list(matrix)).iter_sorted([6, 1, 3])
    assert (begin, end) == (0, 100)
    np.testing.assert_array_equal(block, np.sort(matrix[[6, 1, 3]], axis=0).T)


def test_equal_thread_limits_give_equal_bits() -> None:
    """Rules limit matrix products to a single thread and rely on reproducible bits."""
    matrix = draw_cohort(40, 30_000)
    with threadpool_limits(limits=1, user_api="blas"):
        first, second = (ClientVectors(list(matrix)).pairwise() for _ in range(2))
    np.testing.assert_array_equal(first, second)
