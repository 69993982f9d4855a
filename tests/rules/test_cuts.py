"""Cut updates, compared with sums written out element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.errors import RaydflError
from raydfl.core.types import Update
from raydfl.rules import RULES, UniformMean, WeightedMean, fill_cuts

SHAPES = {"net/a.weight": (4, 3, 2), "net/a.bias": (4,), "net/b.weight": (2, 4)}
SERVER = {"global": {name: torch.full(shape, 10.0 + len(shape)) for name, shape in SHAPES.items()}}


def draw_updates(rng: np.random.Generator) -> list[Update]:
    """Draw updates with slices of three tensors or whole tensors, any order of indices and any kind of weight."""
    updates = []
    for number in range(rng.integers(1, 6)):
        tensors: dict[str, Tensor] = {}
        cuts: dict[str, Cut] = {}
        named: dict[str, Any] = {}
        for name, whole in SHAPES.items():
            shape = whole
            if rng.random() < 0.6:
                indices = [
                    None if rng.random() < 0.4 else rng.permutation(size)[: rng.integers(1, size + 1)] for size in whole
                ]
                cuts[name], shape = Cut(indices), Cut(indices).shape(whole)
            tensors[name] = torch.from_numpy(rng.normal(size=shape)).float()
            broad = [rng.choice([1, size]) for size in shape]
            weights = rng.choice([0.0, *rng.uniform(0.001, 1000, 5)], size=broad)
            named[name] = float(weights.flat[0]) if rng.random() < 0.3 else torch.from_numpy(weights)
        weight = named if rng.random() < 0.6 else float(rng.uniform(0.001, 1000))
        updates.append(Update(tensors, weight, client_id=f"c{number}", cuts=cuts))
    return updates


def mean_by_element(updates: list[Update], *, uniform: bool = False) -> dict[str, np.ndarray]:
    """Compute the mean of the updates in loops over the elements of the slices."""
    result = {name: tensor.numpy().copy() for name, tensor in SERVER["global"].items()}
    for name, whole in SHAPES.items():
        total, count = np.zeros(whole), np.zeros(whole)
        for update in updates:
            value = update.tensors[name]
            indices = update.cuts[name].indices if name in update.cuts else [None] * value.ndim
            weight = update.weight[name] if isinstance(update.weight, dict) else update.weight
            elements = torch.as_tensor(weight, dtype=torch.float64).broadcast_to(value.shape)
            for index in np.ndindex(*value.shape):
                target = tuple(i if k is None else int(k[i]) for i, k in zip(index, indices, strict=True))
                element_weight = float(elements[index] > 0) if uniform else float(elements[index])
                total[target] += element_weight * float(value[index])
                count[target] += element_weight
        for index in np.ndindex(*whole):
            if count[index] > 0:
                result[name][index] = total[index] / count[index]
    return result


@pytest.mark.usefixtures("sums")
def test_means_add_slices_at_their_position() -> None:
    for seed in range(15):
        updates = draw_updates(np.random.default_rng(seed))
        for rule, uniform in ((WeightedMean(), False), (UniformMean(), True)):
            result = rule(iter(updates), SERVER).tensors["global"]
            for name, expected in mean_by_element(updates, uniform=uniform).items():
                np.testing.assert_array_equal(result[name].numpy(), expected)


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("kept", [range(40), range(10, 60), [*range(30), *range(50, 80)], range(0, 80, 3)])
def test_runs_of_columns_of_any_length_are_added_and_weighted(kept: Sequence[int]) -> None:
    rng, cut = np.random.default_rng(0), Cut([[1, 2], list(kept), None])
    sent = [rng.normal(size=(2, len(kept), 2)).astype(np.float32) for _ in range(3)]
    updates = [Update({"w": torch.from_numpy(v)}, 1.0 + i, cuts={"w": cut}) for i, v in enumerate(sent)]
    server = torch.full((3, 80, 2), 7.0)
    expected = server.clone()
    mean = sum((1.0 + i) * v.astype(np.float64) for i, v in enumerate(sent)) / 6
    expected.numpy()[np.ix_([1, 2], list(kept))] = mean
    assert torch.equal(WeightedMean()(iter(updates), {"global": {"w": server}}).tensors["global"]["w"], expected)


@pytest.mark.usefixtures("sums")
def test_an_empty_cut_changes_nothing() -> None:
    empty = Update({"net/a.weight": torch.zeros(4, 0, 2)}, 3.0, cuts={"net/a.weight": Cut([None, [], None])})
    for rest in ([], [Update({"net/a.weight": torch.ones(SHAPES["net/a.weight"])}, 2.0)]):
        result, expected = (
            WeightedMean()(iter(updates), SERVER).tensors["global"] for updates in ([empty, *rest], rest)
        )
        assert torch.equal(result["net/a.weight"], expected["net/a.weight"])


def expand_by_hand(update: Update) -> Update:
    """Expand an update to whole tensors, with the server's values and weight 0 outside the cuts."""
    tensors, weights = {}, {}
    for name, value in update.tensors.items():
        tensors[name], weights[name] = SERVER["global"][name].clone(), torch.zeros(SHAPES[name], dtype=torch.float64)
        indices = update.cuts[name].indices if name in update.cuts else [None] * value.ndim
        place = torch.meshgrid(
            *(
                torch.arange(size) if k is None else torch.as_tensor(np.array(k))
                for k, size in zip(indices, SHAPES[name], strict=True)
            ),
            indexing="ij",
        )
        tensors[name][place], weights[name][place] = value, float(update.weight)  # type: ignore[arg-type]
    return Update(tensors, weights, client_id=update.client_id)


def make_updates() -> list[Update]:
    rng = np.random.default_rng(3)
    updates = []
    for number in range(7):
        rows, columns = (np.sort(rng.choice(size, size - 1, replace=False)) for size in (4, 3))
        cuts = {
            "net/a.weight": Cut([rows, columns, None]),
            "net/a.bias": Cut([rows]),
            "net/b.weight": Cut([None, rows]),
        }
        tensors = {
            name: torch.from_numpy(10 + rng.normal(size=cuts[name].shape(shape)).astype(np.float32))
            for name, shape in SHAPES.items()
        }
        updates.append(Update(tensors, float(number + 1), client_id=f"c{number}", cuts=cuts))
    return updates


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"gaussian"}))
def test_every_rule_gives_elements_outside_a_cut_no_weight(name: str) -> None:
    rule, updates = RULES[name](), make_updates()
    result = rule(iter(updates), SERVER, np.random.default_rng(1)).tensors
    expected = rule(map(expand_by_hand, updates), SERVER, np.random.default_rng(1)).tensors
    for key, tensors in expected.items():
        assert all(torch.equal(tensor, result[key][name]) for name, tensor in tensors.items())


def test_a_cut_of_all_indices_equals_no_cut_to_the_bit() -> None:
    plain = [fill_cuts(update, SERVER["global"]) for update in make_updates()]
    plain = [Update(update.tensors, 0.1 * number, client_id=update.client_id) for number, update in enumerate(plain)]
    cuts = {name: Cut([np.arange(size) for size in shape]) for name, shape in SHAPES.items()}
    cut = [Update(u.tensors, u.weight, cuts=cuts if number % 2 else {}) for number, u in enumerate(plain)]
    result, expected = (WeightedMean()(iter(updates), SERVER).tensors["global"] for updates in (cut, plain))
    assert all(torch.equal(expected[name], result[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (Cut([[0, 4]]), "selects index 4 of dimension 0, but its size is 4"),
        (Cut([[0, -1]]), "selects index -1 of dimension 0"),
        (Cut([[1, 1]]), "selects an index of dimension 0 twice"),
        (Cut([[0, 1], None]), r"has 2 dimensions, the tensor has the shape \(4,\)"),
        (Cut([[0, 1, 2]]), r"the tensor has the shape \(2,\), but the cut has \(3,\)"),
    ],
)
def test_rules_reject_a_cut_that_does_not_fit(cut: Cut, message: str) -> None:
    update = Update({"net/a.bias": torch.ones(2)}, 1.0, client_id="anna", cuts={"net/a.bias": cut})
    for rule in (WeightedMean(), RULES["median"]()):
        with pytest.raises(RaydflError, match=f"client 'anna': the cut of 'net/a.bias' does not fit: .*{message}"):
            rule([update], SERVER)


def test_a_cut_needs_integer_indices() -> None:
    for wrong in ([0.5], [[0, 1]], ["a"]):
        with pytest.raises(ValueError, match="a list of integers for each dimension"):
            Cut([wrong])
