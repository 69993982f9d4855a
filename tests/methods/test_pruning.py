"""Pruning by masks: ratios of layers, and masks of filters and hidden units."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from raydfl.core.types import ModelSpec
from raydfl.methods._pruning import (
    PrunableLayer,
    Solver,
    allocate_ratio,
    find_prunable_layers,
    make_masks,
    spread_masks,
)
from raydfl.models import build_model

WEIGHTS = [36_864, 73_728, 147_456, 8_192, 294_912, 589_824]


def make_network(architecture: str, inputs: int | tuple[int, int, int] = 16, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelSpec("model", architecture, inputs, 4, tuple(sorted(options.items()))))


@pytest.mark.parametrize("solver", ["ramp", "uniform", "trust-constr"])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.4, 0.6, 0.8, 0.97])
def test_ratios_of_layers_meet_the_budget(solver: Solver, ratio: float) -> None:
    importances = [0.3, 0.1, 0.5, 0.5, 0.05, 0.2]
    ratios = allocate_ratio(WEIGHTS, importances, ratio, solver)
    assert float(ratios @ WEIGHTS) == pytest.approx(ratio * sum(WEIGHTS), rel=1e-6, abs=1e-6)
    assert ((ratios >= 0) & (ratios < 1)).all()
    by_importance = ratios[np.argsort(-np.array(importances), kind="stable")]
    assert (np.diff(by_importance) >= 0).all()  # the least important layer loses the largest share
    if 0 < ratio <= 0.8:
        assert (len(set(ratios.round(6))) > 3) is (solver != "uniform")


def test_a_ramp_of_equal_layers_is_linear() -> None:
    ratios = allocate_ratio([100] * 5, [5, 4, 3, 2, 1], 0.4, "ramp")
    np.testing.assert_allclose(ratios, [0.2, 0.3, 0.4, 0.5, 0.6], atol=1e-9)


def test_prunable_layers_of_each_network() -> None:
    """Normalisation and last layers are not prunable."""

    def count_units(model: nn.Module, *kinds: str) -> dict[str, int]:
        return {layer.name: layer.units for layer in find_prunable_layers({"model": model}, (), kinds)}  # type: ignore[arg-type]

    base = make_network("crnn_base")
    assert count_units(base, "convolution") == {"model/convolutions.0": 64, "model/convolutions.1": 64}
    assert count_units(base, "recurrent") == {"model/gru_l0": 128, "model/gru_l0_reverse": 128}
    assert count_units(make_network("cnn_small", (1, 16, 16)), "convolution", "linear") == {
        "model/convolutions.0": 8,
        "model/convolutions.1": 16,
        "model/hidden": 64,
    }
    split = count_units(make_network("split_cnn", filters=(4, 8)), "convolution", "recurrent")
    assert list(split) == [f"model/blocks.{n}.{layer}" for n in (0, 1) for layer in ("time", "frequency", "mix")]
    assert count_units(make_network("linear"), "convolution", "recurrent", "linear") == {}
    base.convolutions[0].requires_grad_(False)
    assert "model/convolutions.0" not in count_units(base, "convolution")
    assert not find_prunable_layers({"model": make_network("mlp")}, {"model/hidden.weight"}, ("linear",))


def test_masks_prune_the_smallest_filters_and_set_them_to_zero() -> None:
    """Masked units of convolutions and GRUs give exactly 0. Removing them and their readers keeps the function."""
    model = make_network("crnn", filters=(6, 8), hidden=10, dropout=0.0).eval()
    layers = find_prunable_layers({"model": model}, (), ("convolution", "recurrent"))
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    masks = make_masks(layers, tensors, 0.4, "uniform")
    assert {name: int((mask == 0).sum()) for name, mask in masks.items()} == {
        "model/convolutions.0": 2,
        "model/convolutions.1": 3,
        "model/gru_l0": 4,
        "model/gru_l0_reverse": 4,
    }
    norms = np.abs(tensors["model/convolutions.0.weight"].numpy()).sum(axis=(1, 2))
    assert set(np.flatnonzero(masks["model/convolutions.0"].numpy() == 0)) == set(np.argsort(norms)[:2])
    gates = np.abs(tensors["model/gru.weight_hh_l0"].numpy()).reshape(3, 10, -1).sum(axis=(0, 2))
    gates += np.abs(tensors["model/gru.weight_ih_l0"].numpy()).reshape(3, 10, -1).sum(axis=(0, 2))
    assert set(np.flatnonzero(masks["model/gru_l0"].numpy() == 0)) == set(np.argsort(gates)[:4])
    with torch.no_grad():
        for name, mask in spread_masks(layers, masks, tensors).items():
            tensors[name].mul_(mask)  # the hidden state of the network
        x = torch.randn(2, 12, 16)
        embedded = model.embed(x)
        forwards, backwards = masks["model/gru_l0"], masks["model/gru_l0_reverse"]
        assert torch.equal(embedded == 0, (torch.cat([forwards, backwards]) == 0).expand(2, -1))
        model.output.weight[:, torch.cat([forwards, backwards]) == 0] = 100.0  # inputs of the next layer
        model.convolutions[1].weight[:, masks["model/convolutions.0"] == 0] = 100.0
        assert torch.equal(model.embed(x), embedded)


def test_one_filter_is_always_kept_and_halves_round_up() -> None:
    layer = PrunableLayer("model/conv", 3, {"model/conv.weight": 1})
    tensors = {"model/conv.weight": torch.tensor([[3.0], [-1.0], [2.0]])}
    assert make_masks([layer], tensors, 0.99)["model/conv"].tolist() == [1.0, 0.0, 0.0]
    assert make_masks([layer], tensors, 0.5)["model/conv"].tolist() == [1.0, 0.0, 0.0]  # 1.5 filters
    assert make_masks([layer], tensors, 0.16)["model/conv"].tolist() == [1.0, 1.0, 1.0]


def test_importance_by_sum_prefers_large_layers() -> None:
    small, large = PrunableLayer("a", 10, {"a.weight": 1}), PrunableLayer("b", 10, {"b.weight": 1})
    tensors = {"a.weight": torch.full((10, 2), 0.5), "b.weight": torch.full((10, 200), 0.1)}
    pruned = {
        importance: {
            k: int((m == 0).sum()) for k, m in make_masks([small, large], tensors, 0.3, "ramp", importance).items()
        }  # type: ignore[arg-type]
        for importance in ("mean", "sum")
    }
    assert pruned["mean"]["a"] < pruned["mean"]["b"]
    assert pruned["sum"]["a"] > pruned["sum"]["b"]
