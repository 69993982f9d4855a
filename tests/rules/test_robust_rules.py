"""Robust rules, each compared with the paper's formula or with an independent implementation."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import call, draw_honest_clients, find_influential_clients, get_vector, make_row_updates

from raydfl.core.errors import ConfigError, RaydflError
from raydfl.core.types import Ratio, Update
from raydfl.rules import RULES, Rule, UniformMean, WeightedMean, find_rule
from raydfl.rules.bulyan import Bulyan
from raydfl.rules.centred_clipping import CentredClipping
from raydfl.rules.dnc import DnC, outlier_scores
from raydfl.rules.geometric_median import GeometricMedian
from raydfl.rules.krum import Krum
from raydfl.rules.median import Median
from raydfl.rules.multi_krum import MultiKrum
from raydfl.rules.norm_clipping import NormClipping
from raydfl.rules.trimmed_mean import TrimmedMean

pytestmark = pytest.mark.usefixtures("sums")
ROBUST = [
    RULES[name]() for name in RULES if name not in ("weighted_mean", "uniform_mean", "product_mean", "lpa", "gaussian")
]
SIZES = [1, 2, 3, 4, 7, 10, 23]


def naive_krum_scores(matrix: np.ndarray, byzantine: int) -> list[float]:
    """Compute section 4 of the paper in loops over clients."""
    scores = []
    for index, row in enumerate(matrix):
        distances = sorted(
            float(((row.astype(float) - matrix[other]) ** 2).sum()) for other in range(len(matrix)) if other != index
        )
        scores.append(sum(distances[: max(1, len(matrix) - byzantine - 2)]))
    return scores


# Coordinate by coordinate


@pytest.mark.parametrize("clients", SIZES)
def test_the_median_equals_numpy(clients: int) -> None:
    matrix = draw_honest_clients(clients, 5000)
    np.testing.assert_array_equal(get_vector(call(Median(), matrix)), np.median(matrix, axis=0))


@pytest.mark.parametrize("clients", SIZES)
@pytest.mark.parametrize("trim", [0.0, 0.1, 0.29, 0.49])
def test_the_trimmed_mean_equals_scipy(clients: int, trim: float) -> None:
    matrix = draw_honest_clients(clients, 3000)
    expected = scipy.stats.trim_mean(matrix.astype(float), trim + 1e-9, axis=0)
    np.testing.assert_allclose(get_vector(call(TrimmedMean(trim=trim), matrix)), expected, rtol=2e-7)


def test_shares_are_read_as_decimal_numbers() -> None:
    matrix = np.zeros((100, 1))
    matrix[:29] = 1000.0
    assert get_vector(call(TrimmedMean(trim=0.29), matrix)).tolist() == [0.0]
    assert call(Krum(byzantine=0.29), matrix).report["krum/byzantine"] == Ratio(29, 100)


def test_the_median_and_the_trimmed_mean_ignore_masked_elements() -> None:
    matrix = draw_honest_clients(9, 40)
    generator = np.random.default_rng(1)
    masks = (generator.random((9, 40)) < 0.6).astype(np.float32)
    masks[:, 0] = 0  # no client
    masks[:, 1], masks[0, 1] = 0, 1  # a single client
    weights = [{"net/w": torch.from_numpy(mask * 7)} for mask in masks]
    server = np.full(40, 3.0)
    median = get_vector(call(Median(), matrix, weights, server))
    trimmed = get_vector(call(TrimmedMean(trim=0.3), matrix, weights, server))
    for element in range(40):
        values = matrix[masks[:, element] > 0, element]
        if len(values):
            np.testing.assert_allclose(median[element], np.median(values), rtol=1e-6)
            np.testing.assert_allclose(trimmed[element], scipy.stats.trim_mean(values, 0.3), rtol=1e-6)
    assert median[0] == trimmed[0] == 3.0
    assert median[1] == trimmed[1] == matrix[0, 1]


# Krum, Multi-Krum and Bulyan


@pytest.mark.parametrize("clients", SIZES)
@pytest.mark.parametrize("byzantine", [0.0, 0.2, 0.4])
def test_krum_and_multi_krum_follow_the_paper(clients: int, byzantine: float) -> None:
    matrix = draw_honest_clients(clients, 300, seed=clients)
    f = max(0, min(int(byzantine * clients + 1e-9), (clients - 3) // 2))
    scores = naive_krum_scores(matrix, f)
    one = call(Krum(byzantine=byzantine), matrix)
    assert find_influential_clients(one) == [int(np.argmin(scores))]
    np.testing.assert_array_equal(get_vector(one), matrix[np.argmin(scores)])
    assert one.report == {"krum/byzantine": Ratio(f, clients)}
    several = call(MultiKrum(byzantine=byzantine), matrix)
    expected = sorted(np.argsort(scores, kind="stable")[: clients - f])
    assert find_influential_clients(several) == expected
    np.testing.assert_allclose(get_vector(several), matrix[expected].mean(axis=0, dtype=float), rtol=1e-6)
    half = call(MultiKrum(byzantine=byzantine, keep=0.5), matrix)
    assert find_influential_clients(half) == sorted(np.argsort(scores, kind="stable")[: max(1, clients // 2)])


@pytest.mark.parametrize(("clients", "byzantine"), [(7, 0.2), (11, 0.2), (15, 0.2), (23, 0.3)])
def test_bulyan_follows_both_stages_of_the_paper(clients: int, byzantine: float) -> None:
    matrix = draw_honest_clients(clients, 200, seed=clients)
    f = min(int(byzantine * clients), (clients - 3) // 4)
    assert f > 0
    remaining, chosen = list(range(clients)), []
    for _ in range(clients - 2 * f):
        best = remaining[int(np.argmin(naive_krum_scores(matrix[remaining], f)))]
        chosen.append(best)
        remaining.remove(best)
    expected = []
    for values in matrix[chosen].T.astype(float):
        nearest = np.argsort(np.abs(values - np.median(values)), kind="stable")
        expected.append(values[nearest[: len(chosen) - 2 * f]].mean())
    result = call(Bulyan(byzantine=byzantine), matrix)
    assert find_influential_clients(result) == sorted(chosen)
    np.testing.assert_allclose(get_vector(result), expected, rtol=1e-6)
    assert result.report == {"bulyan/byzantine": Ratio(f, clients)}


def test_few_clients_reduce_the_expected_number_of_attackers() -> None:
    for clients, krum, bulyan in ((1, 0, 0), (4, 0, 0), (5, 1, 0), (7, 2, 1), (11, 4, 2)):
        matrix = draw_honest_clients(clients, 10)
        assert call(Krum(byzantine=0.4), matrix).report["krum/byzantine"] == Ratio(krum, clients)
        assert call(Bulyan(byzantine=0.4), matrix).report["bulyan/byzantine"] == Ratio(bulyan, clients)
    np.testing.assert_array_equal(
        get_vector(call(Bulyan(), draw_honest_clients(6, 10))),
        get_vector(call(UniformMean(), draw_honest_clients(6, 10))),
    )


# Geometric median and clipping


def test_the_geometric_median_equals_the_minimum_of_scipy() -> None:
    matrix, weights = draw_honest_clients(9, 6), [1.0, 2.0, 3.0, 1.0, 5.0, 2.0, 1.0, 1.0, 4.0]

    def cost(point: np.ndarray) -> float:
        return float(np.dot(weights, np.linalg.norm(matrix.astype(float) - point, axis=1)))

    def slope(point: np.ndarray) -> np.ndarray:
        away = point - matrix.astype(float)
        return np.asarray(np.asarray(weights) @ (away / np.linalg.norm(away, axis=1, keepdims=True)))

    best = scipy.optimize.minimize(cost, matrix.mean(axis=0), jac=slope, method="BFGS", options={"gtol": 1e-10})
    result = get_vector(call(GeometricMedian(iterations=200), matrix, weights))
    np.testing.assert_allclose(result, best.x, atol=2e-5)
    assert cost(result) <= best.fun * (1 + 1e-6)
    assert np.abs(result - get_vector(call(GeometricMedian(iterations=200), matrix))).max() > 1e-3  # weights count


@pytest.mark.parametrize("server", [None, 5.0])
def test_each_step_of_the_geometric_median_follows_the_paper(server: float | None) -> None:
    matrix, weights = draw_honest_clients(6, 40).astype(float), np.array([1.0, 2, 3, 4, 5, 6])
    first = np.zeros(40) if server is None else np.full(40, server)
    lengths = np.linalg.norm(matrix - first, axis=1)
    clipped = [(row - first) * min(1, np.median(lengths) / far) for row, far in zip(matrix, lengths, strict=True)]
    point = first + weights @ clipped / weights.sum()
    for _ in range(3):
        share = weights / np.maximum(0.05, np.linalg.norm(matrix - point, axis=1))
        point = share @ matrix / share.sum()
    start = None if server is None else np.full(40, server)
    result = call(GeometricMedian(iterations=3, smoothing=0.05), matrix, weights.tolist(), start)
    np.testing.assert_allclose(get_vector(result), point, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.influence, share / weights / (share / weights).max(), rtol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("riders", [1, 3])
def test_free_riders_do_not_keep_the_geometric_median_at_the_server_model(riders: int, noise: float) -> None:
    matrix = draw_honest_clients(15, 500) + 0.2
    matrix[:riders] = noise * draw_honest_clients(riders, 500, seed=7)

    def slope(point: np.ndarray) -> float:
        away = point - matrix.astype(float)
        return float(np.linalg.norm((away / np.linalg.norm(away, axis=1, keepdims=True)).sum(axis=0)))

    result = get_vector(call(GeometricMedian(), matrix))
    assert slope(result) < 0.1  # 0 at the minimum
    assert np.linalg.norm(result - matrix[riders:].mean(axis=0)) < 0.5 * np.linalg.norm(matrix[riders:].mean(axis=0))


def test_the_geometric_median_is_where_most_clients_agree() -> None:
    matrix = draw_honest_clients(5, 20)
    matrix[:3] = 0.5
    np.testing.assert_allclose(get_vector(call(GeometricMedian(iterations=50), matrix)), matrix[0], atol=1e-5)
    matrix[:3] = 0.0
    np.testing.assert_allclose(get_vector(call(GeometricMedian(), matrix)), matrix[0], atol=1e-5)  # where the server is


@pytest.mark.parametrize("radius", [0.5, 2.0, None])
@pytest.mark.parametrize("iterations", [1, 3])
def test_centred_clipping_follows_the_paper(radius: float | None, iterations: int) -> None:
    matrix, server = draw_honest_clients(8, 50).astype(float), np.full(50, 0.2)
    matrix[5] *= 40
    v = np.float32(server).astype(float)
    for _ in range(iterations):
        lengths = np.array([math.dist(row, v) for row in np.float32(matrix)])
        tau = np.median(lengths) if radius is None else radius
        v = v + sum((row - v) * min(1, tau / far) for row, far in zip(np.float32(matrix), lengths, strict=True)) / 8
    result = call(CentredClipping(radius=radius, iterations=iterations), matrix, [1.0, 9.0] * 4, server)
    np.testing.assert_allclose(get_vector(result), v, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.influence, np.minimum(1, tau / lengths), rtol=1e-5)
    assert result.report["centred_clipping/radius"].value == pytest.approx(tau, rel=1e-5)
    assert result.report["centred_clipping/clipped"] == Ratio((lengths > tau * (1 + 1e-6)).sum(), 8)


@pytest.mark.parametrize("norm", [1.0, 7.0, None])
def test_norm_clipping_follows_the_paper(norm: float | None) -> None:
    matrix, server, weights = draw_honest_clients(8, 50), np.full(50, 0.2, np.float32), np.arange(1.0, 9)
    matrix[5] *= 40
    lengths = np.array([math.dist(row, server) for row in matrix])
    limit = np.median(lengths) if norm is None else norm
    clipped = [(row - server.astype(float)) / max(1, far / limit) for row, far in zip(matrix, lengths, strict=True)]
    result = call(NormClipping(norm=norm), matrix, weights.tolist(), server)
    np.testing.assert_allclose(get_vector(result), server + weights @ clipped / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(result.influence, np.minimum(1, limit / lengths), rtol=1e-5)
    assert result.report["norm_clipping/clipped"] == Ratio((lengths > limit * (1 + 1e-6)).sum(), 8)
    assert result.report["norm_clipping/norm"].value == pytest.approx(lengths.mean(), rel=1e-5)


def test_norm_clipping_with_a_constant_norm_streams_the_updates() -> None:
    """The number of stored updates does not depend on the number of clients."""
    alive: set[int] = set()

    class Tracked(np.ndarray):
        def __del__(self) -> None:
            alive.discard(id(self))

    most = 0

    def stream() -> Iterable[Update]:
        nonlocal most
        for index in range(50):
            row = np.full(100, float(index), np.float32).view(Tracked)
            alive.add(id(row))
            update = Update({"w": torch.from_numpy(row)}, 1.0, client_id=str(index))
            del row
            yield update
            del update
            most = max(most, len(alive))

    NormClipping(norm=1.0)(stream(), {})
    assert most <= 6


def test_norm_clipping_measures_all_tensors_of_a_key_except_masked_elements() -> None:
    server = {"global": {"a.w": torch.tensor([1.0, 1.0]), "b.w": torch.tensor([0.0])}}
    both = Update(
        {"a.w": torch.tensor([4.0, 9.0]), "b.w": torch.tensor([4.0])}, {"a.w": torch.tensor([1.0, 0.0]), "b.w": 1.0}
    )
    result = NormClipping(norm=2.5)([both], server)  # (3, -, 4): length 5
    assert result.tensors["global"]["a.w"].tolist() == [2.5, 1.0]
    assert result.tensors["global"]["b.w"].tolist() == [2.0]
    assert result.influence is not None
    assert result.influence.tolist() == [0.5]


# DnC


def test_outlier_scores_equal_projections_on_the_singular_vector_of_numpy() -> None:
    sample = draw_honest_clients(12, 80).astype(float)
    centred = sample - sample.mean(axis=0)
    direction = np.linalg.svd(centred, full_matrices=False)[2][0]
    np.testing.assert_allclose(outlier_scores(sample), (centred @ direction) ** 2, rtol=1e-9)


def test_dnc_on_all_elements_follows_the_paper() -> None:
    matrix = draw_honest_clients(20, 60)
    matrix[[3, 8, 11, 17]] += np.linspace(1, 2, 60, dtype=np.float32)
    matrix[[3, 8]] *= 1.1
    scores = outlier_scores(matrix.astype(float))
    for times, left_out in ((1.0, 4), (0.5, 2), (2.0, 8)):
        result = call(DnC(filter=times), matrix)
        expected = sorted(np.argsort(scores, kind="stable")[: 20 - left_out])
        assert find_influential_clients(result) == expected
        np.testing.assert_allclose(get_vector(result), matrix[expected].mean(axis=0, dtype=float), rtol=1e-6)
        assert result.report == {"dnc/byzantine": Ratio(4, 20)}
    assert not {3, 8, 11, 17} & set(find_influential_clients(call(DnC(), matrix)))


def test_dnc_draws_elements_from_its_generator_and_keeps_clients_good_in_every_iteration() -> None:
    matrix = draw_honest_clients(20, 60)
    generator = np.random.default_rng(5)
    good = set(range(20))
    for _ in range(4):
        drawn = np.sort(generator.choice(60, 7, replace=False, shuffle=False))
        good &= set(np.argsort(outlier_scores(matrix[:, drawn].astype(float)))[:16].tolist())
    rule = DnC(sample=7, iterations=4)
    assert find_influential_clients(call(rule, matrix)) == sorted(good)
    selections = [
        find_influential_clients(rule(make_row_updates(matrix), {}, np.random.default_rng(seed))) for seed in range(6)
    ]
    assert len({tuple(selection) for selection in selections}) > 1
    with pytest.raises(RaydflError, match="draws random numbers: call it as rule"):
        rule(make_row_updates(matrix), {})


def test_dnc_always_keeps_a_client() -> None:
    matrix = np.random.default_rng(0).normal(size=(10, 400)).astype(np.float32)
    assert len(find_influential_clients(call(DnC(byzantine=0.4, filter=2, sample=3, iterations=20), matrix))) == 1
    assert find_influential_clients(call(DnC(byzantine=0.4, filter=9), matrix[:3])) != []
    assert find_influential_clients(call(DnC(), matrix[:1])) == [0]


# Masks


@pytest.mark.parametrize("rule", [Krum(), MultiKrum(), Bulyan(), DnC(), CentredClipping()])
def test_distances_replace_masked_elements_by_the_values_of_the_server(rule: Rule) -> None:
    matrix, server = draw_honest_clients(12, 40), draw_honest_clients(1, 40, seed=9)[0]
    masks = np.random.default_rng(3).random((12, 40)) < 0.7
    masks[:, 0] = False
    weights = [{"net/w": torch.from_numpy(mask * 2.0)} for mask in masks]
    result = call(rule, np.where(masks, matrix, 1e9), weights, server)  # masked values are arbitrary
    filled = call(rule, np.where(masks, matrix, server), None, server)
    assert result.influence is not None
    np.testing.assert_allclose(result.influence, filled.influence, rtol=1e-6)
    assert get_vector(result)[0] == server[0]
    if isinstance(rule, Krum):
        (one,) = find_influential_clients(result)
        np.testing.assert_array_equal(get_vector(result), np.where(masks[one], matrix[one], server))
    if isinstance(rule, MultiKrum | DnC):
        influential = find_influential_clients(result)
        counts = masks[influential].sum(axis=0)
        sums = np.where(masks, matrix, 0)[influential].sum(axis=0, dtype=float)
        expected = np.where(counts > 0, sums / np.maximum(counts, 1), server)
        np.testing.assert_allclose(get_vector(result), expected, rtol=1e-5)


def test_the_geometric_median_weights_masked_elements_separately() -> None:
    matrix, server = draw_honest_clients(12, 40).astype(float), draw_honest_clients(1, 40, seed=9)[0].astype(float)
    weights = np.random.default_rng(3).integers(0, 3, size=(12, 40)).astype(float)
    point = server
    for _ in range(3):
        far = np.linalg.norm(np.where(weights > 0, matrix, server) - point, axis=1, keepdims=True)
        point = (weights / far * matrix).sum(axis=0) / (weights / far).sum(axis=0)
    given = [{"net/w": torch.from_numpy(row)} for row in weights]
    result = get_vector(call(GeometricMedian(iterations=3), matrix, given, server))
    np.testing.assert_allclose(result, point, rtol=1e-5, atol=1e-6)


# Laws of all robust rules


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: type(rule).__name__)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), clients=st.sampled_from([15, 16, 17]))
def test_the_order_of_the_clients_does_not_matter(rule: Rule, seed: int, clients: int) -> None:
    # With this many clients, Krum and Bulyan use at least two neighbours. With one neighbour, the two nearest clients tie.
    matrix = draw_honest_clients(clients, 50, seed)
    order = np.random.default_rng(seed).permutation(clients)
    updates = make_row_updates(matrix, np.arange(1.0, clients + 1).tolist())
    first = rule(updates, {}, np.random.default_rng(1))
    second = rule([updates[index] for index in order], {}, np.random.default_rng(1))
    np.testing.assert_allclose(get_vector(second), get_vector(first), rtol=1e-4, atol=1e-5)
    if first.influence is not None and second.influence is not None:
        np.testing.assert_allclose(second.influence, first.influence[order], atol=1e-4)


TOLERANT = [
    Median(),
    TrimmedMean(trim=0.2),
    Krum(),
    MultiKrum(),
    Bulyan(),
    GeometricMedian(iterations=8),
    DnC(),
    CentredClipping(),
    NormClipping(),
]


@pytest.mark.parametrize("rule", TOLERANT, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("distance", [10.0, 1e6, 1e25])
@pytest.mark.parametrize("together", [True, False])
def test_distant_outliers_do_not_move_the_result_away_from_the_honest_clients(
    rule: Rule, distance: float, together: bool
) -> None:
    good, bad = draw_honest_clients(20, 400)[:16], [2, 7, 12, 19]
    directions = np.ones((4, 400)) if together else np.random.default_rng(1).normal(size=(4, 400))
    matrix = np.empty((20, 400), np.float32)
    matrix[[index for index in range(20) if index not in bad]] = good
    matrix[bad] = distance * directions
    centre = good.mean(axis=0, dtype=float)
    server = centre + 0.05
    result = call(rule, matrix, None, server)
    furthest = max(math.dist(row, centre) for row in good)
    assert math.dist(get_vector(result), centre) <= furthest
    if not isinstance(rule, Bulyan):  # Bulyan may select outliers, but bounds their effect
        assert result.influence is None or not np.any(result.influence[bad] > 0.8)
    assert math.dist(get_vector(call(WeightedMean(), matrix)), centre) > 10 * furthest


@pytest.mark.parametrize("rule", [Krum(), MultiKrum(), Bulyan(byzantine=0.2), GeometricMedian(), CentredClipping()])
def test_a_large_common_offset_does_not_change_the_selection(rule: Rule) -> None:
    """float32 has steps of 1/2048 near 4096, so small differences must survive rounding."""
    matrix = np.round(draw_honest_clients(15, 500) * 256).astype(np.float32) / 256
    near = call(rule, matrix, None, np.zeros(500))
    far = call(rule, matrix + 4096, None, np.full(500, 4096.0))
    np.testing.assert_allclose(far.influence, near.influence, atol=1e-3)
    np.testing.assert_allclose(get_vector(far) - 4096, get_vector(near), atol=1e-3)


NEUTRAL: list[tuple[Rule, Rule]] = [
    (TrimmedMean(trim=0), UniformMean()),
    (MultiKrum(keep=1), UniformMean()),
    (MultiKrum(byzantine=0), UniformMean()),
    (Bulyan(byzantine=0), UniformMean()),
    (DnC(byzantine=0), UniformMean()),
    (DnC(filter=0), UniformMean()),
    (CentredClipping(radius=math.inf), UniformMean()),
    (CentredClipping(radius=math.inf, iterations=3), UniformMean()),
    (NormClipping(norm=math.inf), WeightedMean()),
    (GeometricMedian(smoothing=1e20), WeightedMean()),
]


@pytest.mark.parametrize(("rule", "simpler"), NEUTRAL, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("masked", [False, True])
def test_neutral_options_equal_the_simpler_rule_to_the_bit(rule: Rule, simpler: Rule, masked: bool) -> None:
    matrix, server = draw_honest_clients(11, 300), np.ones(300)
    generator = np.random.default_rng(2)
    weights = [float(index % 4) for index in range(11)]
    if masked:
        masks = generator.random((11, 300)) < 0.7
        weights = [{"net/w": torch.from_numpy(mask * 3.0)} for mask in masks]
    ours, theirs = (get_vector(call(variant, matrix, weights, server)) for variant in (rule, simpler))
    if isinstance(rule, TrimmedMean):  # which adds values in sorted order
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    else:
        np.testing.assert_array_equal(ours, theirs)


MOVING: list[tuple[Rule, Rule]] = [
    (TrimmedMean(trim=0.1), TrimmedMean(trim=0.3)),
    (Krum(byzantine=0.0), Krum(byzantine=0.45)),
    (MultiKrum(byzantine=0.1), MultiKrum(byzantine=0.3)),
    (MultiKrum(), MultiKrum(keep=0.3)),
    (Bulyan(byzantine=0.1), Bulyan(byzantine=0.2)),
    (GeometricMedian(iterations=1), GeometricMedian(iterations=3)),
    (GeometricMedian(), GeometricMedian(smoothing=30.0)),
    (CentredClipping(radius=1.0), CentredClipping(radius=2.0)),
    (CentredClipping(), CentredClipping(iterations=2)),
    (NormClipping(norm=1.0), NormClipping(norm=2.0)),
    (DnC(byzantine=0.1), DnC(byzantine=0.3)),
    (DnC(iterations=1, sample=5), DnC(iterations=9, sample=5)),
    (DnC(sample=5), DnC(sample=50)),
    (DnC(filter=1.0), DnC(filter=2.0)),
]


@pytest.mark.parametrize(("one", "other"), MOVING, ids=repr)
def test_every_option_changes_the_result(one: Rule, other: Rule) -> None:
    results = []
    for seed in range(5):  # Krum's choice may be the same by chance
        matrix = np.random.default_rng(seed).standard_t(2, size=(20, 8)).astype(np.float32)
        results.append(np.array_equal(get_vector(call(one, matrix)), get_vector(call(other, matrix))))
    assert not all(results)


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: type(rule).__name__)
def test_clients_of_weight_0_are_ignored(rule: Rule) -> None:
    matrix = draw_honest_clients(9, 30)
    matrix[[1, 5]] = 1e9
    weights = [0.0 if index in (1, 5) else 2.0 for index in range(9)]
    alone = [index for index in range(9) if index not in (1, 5)]
    server = np.zeros(30)
    if isinstance(rule, NormClipping):
        rule = NormClipping(norm=1.0)  # a constant, because the median includes clients of weight 0
    got, expected = call(rule, matrix, weights, server), call(rule, matrix[alone], None, server)
    np.testing.assert_allclose(get_vector(got), get_vector(expected), rtol=1e-6)


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: type(rule).__name__)
def test_partial_models_and_keys_are_combined_separately(rule: Rule) -> None:
    audio, video = draw_honest_clients(8, 30), draw_honest_clients(8, 12, seed=3)
    updates = [
        Update(
            {"b/w": torch.from_numpy(audio[i])} | ({"a/w": torch.from_numpy(video[i])} if i % 2 else {}),
            1.0,
            key="one" if i < 6 else "two",
            client_id=f"c{i}",
        )
        for i in range(8)
    ]
    if type(rule).__name__ == "FoolsGold":
        rule = RULES["foolsgold"](features="b/")  # type: ignore[call-arg]
    result = rule(updates, {}, np.random.default_rng(1))
    generator = np.random.default_rng(1)  # groups come in this order
    if isinstance(rule, NormClipping) or type(rule).__name__ == "FoolsGold":
        assert result.tensors["one"]["a/w"].shape == (12,)
        return
    for key, name, rows in (("one", "b/w", audio[:6]), ("one", "a/w", video[1:6:2]), ("two", "b/w", audio[6:])):
        apart = rule(make_row_updates(rows), {}, generator).tensors["global"]["net/w"]
        assert torch.equal(result.tensors[key][name], apart), (key, name)


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: type(rule).__name__)
def test_influence_is_from_0_to_1_and_summarised_in_the_metrics(rule: Rule) -> None:
    result = call(rule, draw_honest_clients(10, 30), None, np.zeros(30))
    if result.influence is None:
        assert isinstance(rule, Median | TrimmedMean)
        assert result.metrics() == {}
        return
    assert result.influence.shape == (10,)
    assert np.all((result.influence >= 0) & (result.influence <= 1))
    metrics = result.metrics()
    assert metrics["rule/left_out"] == Ratio(int((result.influence == 0).sum()), 10)
    assert metrics["rule/influence"] == Ratio(result.influence.sum(), 10)
    assert metrics["rule/influences"] is result.influence


def test_lpa_reports_the_fraction_of_elements_of_each_client() -> None:
    rows = [{"a.w": [float(i), 0, 0], "b.w": [float(-((i - 3) ** 2))]} for i in range(5)]
    updates = [
        Update({n: torch.tensor(v) for n, v in row.items()}, 1.0, client_id=str(i)) for i, row in enumerate(rows)
    ]
    result = find_rule({"name": "lpa", "vl": 0.0, "vh": 0.2}, WeightedMean())(updates, {})
    assert result.influence is not None
    # a: deviations 2 1 0 1 2, the later of the two farthest goes; b: -9 -4 -1 0 -1, the first goes
    assert result.influence.tolist() == [0.75, 1.0, 1.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "trimmed_mean", "trim": 0.5}, "rule.trim: Input should be less than 0.5"),
        ({"name": "krum", "byzantine": 0.5}, "rule.byzantine: Input should be less than 0.5"),
        ({"name": "krum", "byzantin": 0.1}, "unknown key 'byzantin' for Krum. Did you mean 'byzantine'"),
        ({"name": "multi_krum", "keep": 0}, "rule.keep: Input should be greater than 0"),
        ({"name": "norm_clipping", "norm": -1}, "rule.norm: Input should be greater than 0"),
        ({"name": "centered_clipping"}, "unknown rule 'centered_clipping'. Did you mean 'centred_clipping'"),
        ({"name": "dnc", "iterations": 0}, "rule.iterations: Input should be greater than or equal to 1"),
        ({"name": "geometric_median", "smoothing": math.inf}, "rule.smoothing: .*finite"),
    ],
)
def test_invalid_options_are_rejected(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_rule(setting, WeightedMean())
