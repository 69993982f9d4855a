"""Class weights. Oracles: scikit-learn's balanced sample weights, and PyTorch's weighted cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from several_clients import BANDS, CLASSES, jointly, looped, make_steps
from sklearn.utils.class_weight import compute_class_weight, compute_sample_weight
from torch import nn

from raydfl.core.errors import ConfigError
from raydfl.engine.config import Config
from raydfl.methods.fedavg import FedAvg
from raydfl.models.dense import MeanMLP
from raydfl.training.plan import balance_classes
from raydfl.training.step import Step

Tiny = Callable[..., Config]


def mlp() -> dict[str, nn.Module]:
    return {"model": MeanMLP(BANDS, CLASSES)}


def make_weighted_steps(method: FedAvg, weights: str = "balanced", batch_size: int = 4) -> list[Step]:
    steps = make_steps(method, mlp, epochs=1)
    training = steps[0].training.model_copy(update={"class_weights": weights, "batch_size": batch_size})
    for step in steps:
        step.training = training
    return steps


def test_weights_are_those_of_scikit_learn() -> None:
    labels = np.random.default_rng(0).choice([0, 2, 5], 50, p=[0.8, 0.15, 0.05])
    np.testing.assert_allclose(balance_classes(labels), compute_sample_weight("balanced", labels), rtol=1e-6)
    np.testing.assert_array_equal(balance_classes(np.array([0, 0, 0, 1])), np.float32([2 / 3, 2 / 3, 2 / 3, 2]))
    np.testing.assert_array_equal(balance_classes(np.array([3, 3])), np.ones(2, np.float32))


def test_a_step_descends_the_weighted_cross_entropy() -> None:
    method = FedAvg()
    step = make_weighted_steps(method, batch_size=16)[1]  # 16 clips are a single batch
    network, data = make_weighted_steps(method)[1].models["model"], step.data.train
    batch = data.batch(np.arange(16))
    assert len(set(np.bincount(batch.y.numpy()))) > 1
    classes = np.unique(batch.y)
    weight = torch.zeros(CLASSES)
    weight[classes] = torch.tensor(compute_class_weight("balanced", classes=classes, y=batch.y.numpy())).float()
    F.cross_entropy(network(*batch.input_of(network)), batch.y, weight=weight).backward()
    method.local(step)
    for trained, parameter in zip(step.models["model"].parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(trained, parameter - 0.1 * parameter.grad)


def test_batched_clients_have_the_same_weights() -> None:
    method = FedAvg()
    joint = jointly(method, make_weighted_steps(method))
    plain = looped(method, make_weighted_steps(method, "none"))
    for batched, single, unweighted in zip(joint, looped(method, make_weighted_steps(method)), plain, strict=True):
        for name, tensor in single.tensors.items():
            torch.testing.assert_close(batched.tensors[name], tensor, atol=1e-5, rtol=1e-4)
        if batched.client_id != "c3":  # a single clip has the weight 1
            assert not all(torch.equal(unweighted.tensors[name], single.tensors[name]) for name in single.tensors)


def test_old_digests_are_kept_and_unsuitable_data_rejected(tiny: Tiny) -> None:
    assert tiny(method="fedavg").digest() == tiny("train.class_weights=none", method="fedavg").digest()
    assert tiny(method="fedavg").digest() != tiny("train.class_weights=balanced", method="fedavg").digest()
    with pytest.raises(ConfigError, match="train.class_weights=balanced needs objective=classify"):
        tiny("train.class_weights=balanced", "objective=multi_label", "data.label_sets={}", method="fedavg")
    with pytest.raises(ConfigError, match="data.pools and data.unlabelled have clips without labels"):
        tiny("train.class_weights=balanced", "data.unlabelled={keep: 0.5}", method="fedavg")
