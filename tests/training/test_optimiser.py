"""The training loop's optimiser against torch.optim, and plain SGD against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydfl.training.optimiser import Optimiser
from raydfl.training.settings import OptimiserSettings

SETTINGS: list[dict[str, Any]] = [
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd", "weight_decay": 0.1},
    {"name": "sgd", "weight_decay": 0.1, "momentum": 0.5, "models": {"b": 0.3}, "decay": 0.9},
    {"name": "adam", "weight_decay": 0.1},
    {"name": "adam", "betas": (0.5, 0.8), "eps": 0.1},
    {"name": "adamw", "models": {"a": 0.01}, "weight_decay": 0.3},
]


def make_torch_optimiser(
    parameters: dict[str, list[torch.Tensor]], settings: OptimiserSettings, round_index: int
) -> torch.optim.Optimizer:
    groups = [
        {"params": tensors, "lr": settings.models.get(name, settings.lr) * settings.decay**round_index}
        for name, tensors in parameters.items()
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, weight_decay=settings.weight_decay)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_equal_torchs_optimisers(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    starts = {"a": [torch.randn(3, 4), torch.randn(())], "b": [torch.randn(5), torch.randn(0)]}
    gradients = [[torch.randn_like(t) for ts in starts.values() for t in ts] for _ in range(4)]
    ends = []
    for make in (make_torch_optimiser, Optimiser):
        parameters = {name: [t.clone().requires_grad_() for t in tensors] for name, tensors in starts.items()}
        optimiser = make(parameters, OptimiserSettings(**{"lr": 0.1, **settings}), round_index=3)
        every = [p for ps in parameters.values() for p in ps]
        for number, values in enumerate(gradients):
            for index, (parameter, value) in enumerate(zip(every, values, strict=True)):
                parameter.grad = (
                    None if number == 1 and index == 0 else value.clone()
                )  # one parameter has no gradient in this step
            optimiser.advance() if isinstance(optimiser, Optimiser) else optimiser.step()
            assert all(p.grad is None or torch.equal(p.grad, value) for p, value in zip(every, values, strict=True))
        ends.append(every)
    for one, reference in zip(*ends, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-6, atol=1e-7)


def test_plain_sgd_equals_its_formula_to_the_bit() -> None:
    parameter, gradient = torch.randn(100), torch.randn(100)
    leaf = parameter.clone().requires_grad_()
    leaf.grad = gradient
    Optimiser({"a": [leaf]}, OptimiserSettings(lr=0.25), round_index=0).advance()
    assert torch.equal(leaf, parameter - 0.25 * gradient)  # multiplying by 1/4 is exact


def test_steps_without_gradients_leave_parameters_unchanged() -> None:
    leaf = torch.ones(3, requires_grad=True)
    Optimiser({"a": [leaf]}, OptimiserSettings(lr=0.25, momentum=0.9), round_index=0).advance()
    assert torch.equal(leaf, torch.ones(3))
