"""Learning rates and kept moments of individual clients: torch.optim's values, equal when batched, and resumed to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from extra_methods import OwnRates
from helpers import differ, known, stop_after
from pydantic.dataclasses import dataclass
from several_clients import BANDS, CLASSES, both, close, jointly, looped, make_steps
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import Update
from raydfl.engine.config import Config
from raydfl.methods import Method
from raydfl.models.dense import MeanMLP
from raydfl.runs._run import resume
from raydfl.testing import assert_same_bits, read_tensors, train_federation
from raydfl.training._fit import fit
from raydfl.training.optimiser import Optimiser
from raydfl.training.settings import OptimiserSettings
from raydfl.training.step import Step

Tiny = Callable[..., Config]
OPTIMISERS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1},
    # With its usual eps, Adam turns the rounding of a gradient near 0 into a whole step.
    {"name": "adam", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
    {"name": "adamw", "lr": 0.01, "weight_decay": 0.3, "eps": 1e-3, "clip_norm": 0.05},
]


@dataclass(frozen=True, kw_only=True)
class TwoFits(Method):
    """Method with two fits in each participation. The second continues with the moments of the first."""

    def local(self, step: Step) -> Update:
        fit(step, self.loss)
        return step.update(fit(step, self.loss))


def mlp() -> dict[str, nn.Module]:
    return {"model": MeanMLP(BANDS, CLASSES)}


class Scalars(nn.Module):
    """Network with a parameter without dimensions, and a parameter at the top level."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.output = nn.Linear(BANDS, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(x.mean(dim=1)) * self.scale  # type: ignore[no-any-return]


def make_scalars() -> dict[str, nn.Module]:
    return {"model": Scalars()}


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("named", [False, True])
def test_batched_clients_with_individual_rates_equal_unbatched_clients(optimiser: dict[str, Any], named: bool) -> None:
    both(OwnRates(named=named), mlp, optimiser=optimiser, round_index=2)


def test_a_rate_given_to_fit_equals_the_same_configured_rate() -> None:
    plain, with_rate = make_steps(Method(), mlp), make_steps(Method(), mlp)
    expected, updates = looped(Method(), plain), looped(OwnRates(rates=(0.1,)), with_rate)
    assert all(
        torch.equal(a.tensors[n], b.tensors[n]) for a, b in zip(expected, updates, strict=True) for n in a.tensors
    )
    at_rate_0 = make_steps(Method(), mlp)
    before = [{n: t.clone() for n, t in step.floating_state().items()} for step in at_rate_0]
    for update, values in zip(looped(OwnRates(rates=(0.0,)), at_rate_0), before, strict=True):
        assert all(torch.equal(update.tensors[name], values[name]) for name in values)
    half = looped(OwnRates(rates=(0.05,)), make_steps(Method(), mlp))
    configured = looped(Method(), make_steps(Method(), mlp, optimiser={"lr": 0.05}))
    assert all(
        torch.equal(a.tensors[n], b.tensors[n]) for a, b in zip(half, configured, strict=True) for n in a.tensors
    )


@pytest.mark.parametrize(
    ("lr", "message"),
    [
        (-0.1, "not negative"),
        (float("nan"), "finite and not negative"),
        ({"modle": 0.1}, "no model 'modle' is trained here. Did you mean 'model'"),
        ("fast", "finite and not negative"),
    ],
)
def test_invalid_rates_are_rejected(lr: Any, message: str) -> None:
    step = make_steps(Method(), mlp)[0]
    with pytest.raises(ConfigError, match=message):
        fit(step, Method().loss, lr=lr)


def train_with_torch(step: Step, settings: Mapping[str, Any], rounds: int) -> dict[str, Tensor]:
    """Train the rounds with a single optimiser of torch.optim, over the batches drawn by fit."""
    model = step.models["model"].train()
    options = dict(settings)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.pop("name", "sgd")]
    clip = options.pop("clip_norm", None)
    optimiser = kind(model.parameters(), **{"lr": 0.1, **options})
    for _ in range(rounds):
        for _ in range(step.training.local_epochs):
            for index in step.data.train.order(step.training.batch_size, step.rng):
                batch = step.data.train.batch(index, step.device)
                optimiser.zero_grad()
                F.cross_entropy(model(batch.x, batch.lengths), batch.y).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimiser.step()
    return {f"model/{name}": value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_kept_moments_equal_one_continued_optimiser(optimiser: dict[str, Any]) -> None:
    with_moments = make_steps(Method(), mlp, optimiser={**optimiser, "keep": True})[1]
    afresh = make_steps(Method(), mlp, optimiser=optimiser)[1]
    for _ in range(3):
        fit(with_moments, Method().loss)
        fit(afresh, Method().loss)
    expected = train_with_torch(make_steps(Method(), mlp, optimiser=optimiser)[1], optimiser, 3)
    close({name: value.detach() for name, value in with_moments.parameters().items()}, expected)
    moments = {"adam": 3, "adamw": 3}.get(optimiser.get("name", ""), 1 if optimiser.get("momentum") else 0)
    assert len(with_moments.moments) == moments * len(expected)
    assert not afresh.moments
    if moments:
        assert any(
            not torch.allclose(afresh.parameters()[n].detach(), value, atol=1e-4) for n, value in expected.items()
        )


@pytest.mark.parametrize("optimiser", OPTIMISERS[1:], ids=str)
@pytest.mark.parametrize("network", [mlp, make_scalars])
def test_batched_clients_with_kept_moments_equal_unbatched_clients(
    optimiser: dict[str, Any], network: Callable[[], dict[str, nn.Module]]
) -> None:
    """Batch clients with different numbers of earlier participations, also none."""
    ready = make_steps(Method(), network, optimiser={**optimiser, "keep": True})
    for times, step in enumerate(ready):
        for _ in range(times):
            fit(step, Method().loss)
    runs = []
    for work in (looped, jointly):
        steps = make_steps(Method(), network, optimiser={**optimiser, "keep": True})
        for step, before in zip(steps, ready, strict=True):
            step.moments = {name: value.clone() for name, value in before.moments.items()}
        updates = work(TwoFits(), steps)
        runs.append((steps, updates))
    (alone, expected), (joint, joint_updates) = runs
    assert [step.execution.together for step in joint] == [len(joint)] * len(joint), joint[0].execution.looped_because
    for a, b, x, y in zip(alone, joint, expected, joint_updates, strict=True):
        close(dict(x.tensors), dict(y.tensors))
        close(a.moments, b.moments)
        assert a.moments


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_batched_adam_equals_fused_adam_of_each_client(name: str) -> None:
    settings = OptimiserSettings(name=name, lr=0.1, weight_decay=0.2)
    start = torch.randn(3, 5)
    batched = start.clone().requires_grad_()
    rates = torch.tensor([0.1, 0.3, 0.0])
    batched_optimiser = Optimiser({"a": [batched]}, settings, 0, {"a": rates})
    leaves = [start[i].clone().requires_grad_() for i in range(3)]
    optimisers = [
        Optimiser({"a": [leaf]}, settings, 0, {"a": rate}) for leaf, rate in zip(leaves, rates.tolist(), strict=True)
    ]
    for _ in range(4):
        batched.grad = torch.randn(3, 5)
        batched_optimiser.advance()
        for client, (leaf, optimiser) in enumerate(zip(leaves, optimisers, strict=True)):
            leaf.grad = batched.grad[client].clone()
            optimiser.advance()
    torch.testing.assert_close(batched.detach(), torch.stack([leaf.detach() for leaf in leaves]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "fedmlac"])
def test_kept_moments_resume_to_the_same_bits_and_are_private(tiny: Tiny, method: str) -> None:
    settings = ["train.optimiser.keep=true", "train.optimiser.name=adam", "train.optimiser.lr=0.01", "train.rounds=4"]
    reference = known(tiny(*settings, method=method))
    moments = [name for name in reference if " moments:" in name]
    assert moments
    assert all(name.startswith("client ") for name in moments)
    half = tiny(*settings, "run.name=half", method=method)
    stop_after(half, 2)
    assert_same_bits(reference, read_tensors(resume(Path(half.run.dir) / "half").run_dir))
    assert differ(reference, train_federation(tiny(*settings[1:], "run.name=afresh", method=method)))


def test_only_kept_moments_change_the_digest(tiny: Tiny) -> None:
    assert tiny("train.optimiser.keep=false").digest() == tiny().digest()
    assert tiny("train.optimiser.keep=true").digest() != tiny().digest()
