"""FoolsGold, compared with the paper's algorithm, and its histories."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from rule_cases import call, get_vector, make_row_updates

from raydfl.core.errors import RaydflError
from raydfl.core.types import Update
from raydfl.rules import WeightedMean
from raydfl.rules.foolsgold import MEMORY, FoolsGold, compute_trust

pytestmark = pytest.mark.usefixtures("sums")


def naive_trust(histories: np.ndarray, confidence: float) -> list[float]:
    """Compute algorithm 1 in loops over clients."""
    clients = range(len(histories))
    cosine = [[0.0 for _ in clients] for _ in clients]
    for i in clients:
        for j in clients:
            if i != j:
                product = float(histories[i] @ histories[j])
                cosine[i][j] = max(0.0, product / (math.hypot(*histories[i]) * math.hypot(*histories[j])))
    v = [max(row) for row in cosine]
    alpha = []
    for i in clients:
        pardoned = [cosine[i][j] * v[i] / v[j] if v[j] > v[i] else cosine[i][j] for j in clients if j != i]
        alpha.append(1 - max(pardoned))
    largest = max(alpha)
    result = []
    for value in (value_of_client / largest for value_of_client in alpha):
        logit = math.inf if value == 1 else confidence * (math.log(value / (1 - value)) + 0.5)
        result.append(min(1.0, max(0.0, logit)))
    return result


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("confidence", [0.5, 1.0, 3.0])
def test_trust_follows_the_paper(seed: int, confidence: float) -> None:
    generator = np.random.default_rng(seed)
    histories = generator.normal(size=(9, 6))
    histories[3:5] = histories[2] + 0.3 * generator.normal(size=(2, 6))
    trust = compute_trust(histories, confidence)
    np.testing.assert_allclose(trust, naive_trust(histories, confidence), rtol=1e-9, atol=1e-12)
    assert 0 < trust.max() <= 1


def test_trust_in_edge_cases() -> None:
    assert compute_trust(np.ones((1, 3)), 1.0).tolist() == [1.0]
    assert compute_trust(np.ones((2, 3)), 1.0).tolist() == [0.0, 0.0]
    assert compute_trust(np.eye(3), 1.0).tolist() == [1.0, 1.0, 1.0]
    assert compute_trust(np.array([[1.0, 0], [0, 0]]), 1.0).tolist() == [
        1.0,
        1.0,
    ]  # a client without changes resembles no client
    assert compute_trust(np.array([[1.0, 0], [-1, 0]]), 1.0).tolist() == [1.0, 1.0]


def test_sybils_are_excluded_and_dissimilar_clients_give_the_weighted_mean_to_the_bit() -> None:
    directions = np.eye(6, 40, dtype=np.float32)
    weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    result = call(FoolsGold(), directions, weights, np.zeros(40))
    np.testing.assert_array_equal(get_vector(result), get_vector(call(WeightedMean(), directions, weights)))
    sybils = directions.copy()
    sybils[4] = sybils[5]
    result = call(FoolsGold(), sybils, weights, np.zeros(40))
    assert result.influence is not None
    assert result.influence.tolist() == [1, 1, 1, 1, 0, 0]
    np.testing.assert_array_equal(get_vector(result), get_vector(call(WeightedMean(), sybils[:4], weights[:4])))


def test_with_identical_clients_the_server_keeps_its_model() -> None:
    result = call(FoolsGold(), np.ones((4, 5)), None, np.full(5, 7.0))
    assert get_vector(result).tolist() == [7.0] * 5
    assert result.metrics()["rule/left_out"].value == 1  # type: ignore[union-attr]


def test_histories_are_the_sums_of_the_changes_of_the_last_module_by_client() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {
        "global": {"net/a.weight": torch.zeros(3), "net/out.weight": torch.zeros(2, 2), "net/out.bias": torch.zeros(2)}
    }
    expected: dict[str, np.ndarray] = {}
    for cohort in (("anna", "ben"), ("ben", "carl"), ("anna", "carl")):
        server = {name: tensor.clone() for name, tensor in tensors["global"].items()}
        updates = [
            Update({n: torch.randn(t.shape, generator=generator) for n, t in server.items()}, 1.0, client_id=client)
            for client in cohort
        ]
        for update in updates:
            change = torch.cat([(update.tensors[n] - server[n]).flatten() for n in ("net/out.weight", "net/out.bias")])
            expected[update.client_id] = expected.get(update.client_id, np.zeros(6, np.float32)) + change.numpy()
        result = FoolsGold()(updates, tensors)
        tensors = dict(result.tensors)
        histories = np.stack([expected[client] for client in cohort]).astype(float)
        np.testing.assert_allclose(result.influence, compute_trust(histories, 1.0), atol=1e-6)
    assert set(tensors) == {"global", MEMORY + "global"}
    assert {name: value.numpy().tolist() for name, value in tensors[MEMORY + "global"].items()} == {
        name: value.tolist() for name, value in expected.items()
    }


def test_options_choose_the_features_and_the_sharpness() -> None:
    server = {"global": {"net/a.w": torch.zeros(4), "net/b.w": torch.zeros(4)}}
    generator = torch.Generator().manual_seed(3)
    updates = [
        Update({n: torch.randn(4, generator=generator) for n in server["global"]}, 1.0, client_id=str(i))
        for i in range(4)
    ]
    influences = {
        repr(rule): rule(updates, server).influence.tolist()  # type: ignore[union-attr]
        for rule in (FoolsGold(), FoolsGold(features="net/a"), FoolsGold(features="net/"), FoolsGold(confidence=0.3))
    }
    assert len({tuple(values) for values in influences.values()}) == 4
    assert FoolsGold(features="net/b")(updates, server).influence.tolist() == influences[repr(FoolsGold())]  # type: ignore[union-attr]
    memory = FoolsGold(features="net/")(updates, server).tensors[MEMORY + "global"]
    assert memory["0"].shape == (8,)


def test_masked_elements_count_as_unchanged_and_clients_without_weight_are_not_stored() -> None:
    updates = make_row_updates(np.array([[1.0, 9.0, 2.0], [5.0, 1.0, 1.0], [3.0, 3.0, 3.0]]))
    mask = {"net/w": torch.tensor([1.0, 0.0, 1.0])}
    updates = [
        Update(update.tensors, weight, client_id=update.client_id)
        for update, weight in zip(updates, [mask, 2.0, 0.0], strict=True)
    ]
    result = FoolsGold()(updates, {})
    memory = {name: value.tolist() for name, value in result.tensors[MEMORY + "global"].items()}
    assert memory == {"c000": [1.0, 0.0, 2.0], "c001": [5.0, 1.0, 1.0]}


def test_updates_that_cannot_be_compared_are_rejected() -> None:
    one = Update({"a.w": torch.ones(2), "b.w": torch.ones(2)}, 1.0, client_id="anna")
    other = Update({"a.w": torch.ones(2)}, 1.0, client_id="ben")
    with pytest.raises(RaydflError, match=r"compares clients by b\.w, but client 'ben' did not send.*a\.w"):
        FoolsGold()([one, other], {})
    with pytest.raises(RaydflError, match=r"by c/, but client 'anna' did not send .*one of a\.w, b\.w"):
        FoolsGold(features="c/")([one, other], {})
    with pytest.raises(RaydflError, match="two updates come from client 'anna'. Give each"):
        FoolsGold()([one, one], {})
