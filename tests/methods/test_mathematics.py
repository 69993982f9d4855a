"""Each method's formulas against closed forms and independent computations, for a single client and without the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, Client, Ratio, State, Update
from raydfl.engine.config import Config
from raydfl.methods import Method
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedmlac import FedMLAC
from raydfl.methods.fedper import FedPer
from raydfl.methods.fedprox import FedProx
from raydfl.methods.scaffold import Scaffold
from raydfl.testing import make_batch
from raydfl.training.optimiser import Optimiser
from raydfl.training.settings import OptimiserSettings, TrainSettings
from raydfl.training.step import Step

CLASSES, BANDS = 3, 4


class Flat(nn.Module):
    """Network with logits linear in the mean frame, small enough for formulas by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(BANDS, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(x.mean(dim=1))


class Data:
    """Substitute for a client's training examples, with fixed batches."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sum(len(batch.y) for batch in self._batches)

    def batches(self, batch_size: int, rng: Any, device: Any = "cpu") -> Iterator[Batch]:
        return iter(self._batches)


@dataclasses.dataclass
class OneClient:
    train: Data


def make_batches(count: int = 2, size: int = 5) -> list[Batch]:
    rng = torch.Generator().manual_seed(3)
    return [
        make_batch(torch.randn(size, 6, BANDS, generator=rng), torch.randint(CLASSES, (size,), generator=rng))
        for _ in range(count)
    ]


def make_models(*names: str, seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    return {name: Flat() for name in names}


def make_step(method: Method, models: dict[str, nn.Module], state: State | None = None, **optimiser: Any) -> Step:
    state = state or method.init([CLIENT], [models], np.random.default_rng(0))
    step = Step(
        client=CLIENT,
        models=models,
        received={"global": {n: t.clone() for n, t in state.tensors["global"].items()}},
        data=OneClient(Data(make_batches())),  # type: ignore[arg-type]
        state={},
        rng=np.random.default_rng(0),
        device=torch.device("cpu"),
        training=TrainSettings(optimiser=OptimiserSettings(**{"lr": 0.3, **optimiser})),
        phase="train",
        round_index=0,
        shared=method.shared,
    )
    step.load("global")
    return step


CLIENT = Client("anna", 0, 10)


def compute_gradients(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    values = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(model.named_parameters(), values, strict=True)
    }


def test_fedavg_trains_locally_with_plain_sgd() -> None:
    step = make_step(FedAvg(), make_models("model"))
    reference = Flat()
    reference.load_state_dict(step.models["model"].state_dict())
    losses = []
    for batch in make_batches():
        loss = F.cross_entropy(reference(batch.x), batch.y)
        reference.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.3 * parameter.grad
    update = FedAvg().local(step)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(update.tensors[f"model/{name}"], value)
    assert update.weight == 10
    loss = update.metrics["loss"]
    assert isinstance(loss, Ratio)
    assert loss.value == pytest.approx(np.mean(losses), rel=1e-6)
    assert update.metrics["steps"] == Ratio(2, 1)


@pytest.mark.parametrize(("squared", "mu"), [(True, 0.7), (False, 0.7), (False, 1.0), (True, 0.0), (False, 0.0)])
def test_fedproxs_gradient_follows_its_formula(squared: bool, mu: float) -> None:
    method = FedProx(mu=mu, squared=squared)
    step = make_step(method, make_models("model"))
    batch = make_batches()[0]
    model = step.models["model"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    plain = compute_gradients(FedAvg().loss(step, batch), model)
    proximal = compute_gradients(method.loss(step, batch), model)
    for name, parameter in model.named_parameters():
        away = parameter.detach() - step.received["global"][f"model/{name}"]
        expected = mu * away if squared else mu / 2 * away / away.norm()
        torch.testing.assert_close(proximal[name] - plain[name], expected, atol=1e-6, rtol=1e-4)


def test_unsquared_fedprox_has_a_finite_gradient_at_the_start_of_a_round() -> None:
    step = make_step(FedProx(mu=1.0, squared=False), make_models("model"))
    result = compute_gradients(FedProx(mu=1.0, squared=False).loss(step, make_batches()[0]), step.models["model"])
    assert all(bool(torch.isfinite(g).all()) for g in result.values())


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute sum_c p_c (log p_c - log q_c), averaged over the batch."""
    return (p * (p.log() - q.log())).sum(dim=1).mean()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("weight", [0.0, 0.8])
def test_fedmlacs_losses_follow_equations_8_and_9(temperature: float, weight: float) -> None:
    method = FedMLAC(alpha=0.3, temperature=temperature, form=weight)
    step = make_step(method, make_models("plugin", "local"))
    batch = make_batches()[0]
    local, plugin = step.models["local"](batch.x), step.models["plugin"](batch.x)
    p_k, p_g = (F.softmax(z / temperature, dim=1) for z in (local, plugin))
    square = temperature**2
    local_loss = 0.3 * F.cross_entropy(local, batch.y) + 0.7 * square * kl(p_g.detach(), p_k)
    plugin_loss = square * kl(p_k.detach(), p_g) + weight * F.cross_entropy(plugin, batch.y)
    total = method.loss(step, batch)
    torch.testing.assert_close(total, local_loss + plugin_loss)
    # Each model's gradient comes only from its own loss: the teacher side is a constant.
    for name, loss in (("local", local_loss), ("plugin", plugin_loss)):
        expected, gradient = compute_gradients(loss, step.models[name]), compute_gradients(total, step.models[name])
        for key in expected:
            torch.testing.assert_close(gradient[key], expected[key])


def test_sequential_fedmlac_trains_the_plugin_on_the_updated_local_model() -> None:
    results = {}
    for sequential in (False, True):
        method = FedMLAC(sequential=sequential)
        step = make_step(method, make_models("plugin", "local"))
        results[sequential] = method.local(step)
    method = FedMLAC()
    step = make_step(method, make_models("plugin", "local"))
    local, plugin = step.models["local"], step.models["plugin"]
    for batch in make_batches():  # By hand: train the local model first, then the plug-in with a fresh forward pass.
        for model, opponent, weight in ((local, plugin, 0.5), (plugin, local, 0.0)):
            logits, teacher = model(batch.x), F.softmax(opponent(batch.x), dim=1).detach()
            loss = weight * F.cross_entropy(logits, batch.y) + (1 - weight) * kl(teacher, F.softmax(logits, dim=1))
            gradient = compute_gradients(loss, model)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter -= 0.3 * gradient[name]
    for name, value in plugin.state_dict().items():
        torch.testing.assert_close(results[True].tensors[f"plugin/{name}"], value, atol=1e-6, rtol=1e-5)
    assert not torch.equal(
        results[True].tensors["plugin/output.weight"], results[False].tensors["plugin/output.weight"]
    )


def test_fedmlac_without_mutual_learning_trains_two_models_on_labels() -> None:
    method = FedMLAC(mutual=False)
    step = make_step(method, make_models("plugin", "local"))
    batch = make_batches()[0]
    expected = sum(F.cross_entropy(step.models[name](batch.x), batch.y) for name in ("plugin", "local"))
    torch.testing.assert_close(method.loss(step, batch), expected)


def test_each_form_of_fedmlac_is_a_weight_of_the_cross_entropy() -> None:
    batch = make_batches()[0]
    step = make_step(FedMLAC(), make_models("plugin", "local"))
    literal, supervised = FedMLAC(form="literal").loss(step, batch), FedMLAC(form="supervised").loss(step, batch)
    assert torch.equal(literal, FedMLAC(form=0).loss(step, batch))
    assert torch.equal(supervised, FedMLAC(form=1.0).loss(step, batch))
    assert literal < FedMLAC(form=0.3).loss(step, batch) < supervised


def test_fedmlac_warms_up_a_new_clients_local_model_once() -> None:
    method = FedMLAC(warm_epochs=3)
    step = make_step(method, make_models("plugin", "local"))
    update = method.local(step)
    # By hand: train only the local model for three passes, then do the paper's round.
    reference = make_step(FedMLAC(), make_models("plugin", "local"))
    local = reference.models["local"]
    for batch in make_batches() * 3:
        result = compute_gradients(F.cross_entropy(local(batch.x), batch.y), local)
        with torch.no_grad():
            for name, parameter in local.named_parameters():
                parameter -= 0.3 * result[name]
    expected = FedMLAC().local(reference)
    for name, value in expected.tensors.items():
        torch.testing.assert_close(update.tensors[name], value, atol=1e-6, rtol=1e-5)
    for name, value in reference.floating_state("local").items():
        torch.testing.assert_close(step.floating_state("local")[name], value, atol=1e-6, rtol=1e-5)
    # The client's second round is a normal round.
    plain = make_step(FedMLAC(), make_models("plugin", "local"))
    again = make_step(method, make_models("plugin", "local"))
    again.state.update(step.state)
    expected, found_again = FedMLAC().local(plain), method.local(again)
    assert all(torch.equal(found_again.tensors[name], value) for name, value in expected.tensors.items())


def test_fedmlac_sends_only_the_plugin() -> None:
    method = FedMLAC()
    step = make_step(method, make_models("plugin", "local"))
    update = method.local(step)
    assert set(update.tensors) == {"plugin/output.weight", "plugin/output.bias"}


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_scaffolds_control_variate_follows_option_two(momentum: float) -> None:
    method = Scaffold()
    models = make_models("model")
    state = method.init([CLIENT], [models], np.random.default_rng(0))
    c = {
        n: 0.05 * torch.randn(t.shape, generator=torch.Generator().manual_seed(2))
        for n, t in state.tensors["global"].items()
    }
    tensors = {n: c[n] if n.startswith("control/") else t for n, t in state.tensors["global"].items()}
    state = dataclasses.replace(state, tensors={"global": tensors})
    step = make_step(method, models, state, momentum=momentum)
    c_k = {name: torch.full_like(p, 0.02) for name, p in step.parameters().items()}
    step.state.update({f"control/{name}": value.clone() for name, value in c_k.items()})
    # By hand: y <- y - lr (grad - c_k + c), with heavy-ball momentum on the corrected gradient.
    y = Flat()
    y.load_state_dict(step.models["model"].state_dict())
    velocity = {name: torch.zeros_like(p) for name, p in y.named_parameters()}
    for batch in make_batches():
        gradient = compute_gradients(F.cross_entropy(y(batch.x), batch.y), y)
        with torch.no_grad():
            for name, parameter in y.named_parameters():
                full = f"model/{name}"
                velocity[name] = momentum * velocity[name] + gradient[name] - c_k[full] + c[f"control/{full}"]
                parameter -= 0.3 * velocity[name]
    update = method.local(step)
    # A constant gradient g moves K steps with momentum by lr g sum_{i=1..K} (1 - rho^i) / (1 - rho).
    effective = sum((1 - momentum**i) / (1 - momentum) for i in (1, 2))
    for name, value in y.state_dict().items():
        full = f"model/{name}"
        torch.testing.assert_close(update.tensors[full], value, atol=1e-6, rtol=1e-5)
        difference = (step.received["global"][full] - value) / (effective * 0.3)
        expected = c_k[full] - c[f"control/{full}"] + difference
        torch.testing.assert_close(step.state[f"control/{full}"], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(update.tensors[f"control/{full}"], expected - c_k[full], atol=1e-5, rtol=1e-4)


def test_scaffolds_server_moves_its_control_variate_by_the_cohorts_share() -> None:
    method = Scaffold(server_lr=0.5)
    models = make_models("model")
    state = method.init([CLIENT] * 8, [models], np.random.default_rng(0))
    before = state.tensors["global"]["model/output.bias"]
    updates = [
        Update({"model/output.bias": before + k, "control/model/output.bias": torch.full((CLASSES,), k)}, weight)
        for k, weight in ((1.0, 100.0), (3.0, 1e6))
    ]
    new, _ = method.aggregate(state, iter(updates), np.random.default_rng(0))
    torch.testing.assert_close(new.tensors["global"]["model/output.bias"], before + 0.5 * 2.0)  # mean change 2, uniform
    torch.testing.assert_close(new.tensors["global"]["control/model/output.bias"], torch.full((CLASSES,), 2 / 8 * 2.0))


def test_scaffold_rejects_adam(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"'scaffold' needs train.optimiser.name=sgd, but it is 'adam'"):
        tiny("train.optimiser.name=adam", method="scaffold")


def test_fedper_keeps_its_named_tensors_and_rejects_unknown_names() -> None:
    models: dict[str, nn.Module] = {"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))}
    method = FedPer(personal=("model/1",))
    state = method.init([CLIENT], [models], np.random.default_rng(0))
    assert set(state.tensors["global"]) == {"model/0.weight", "model/0.bias"}
    with pytest.raises(ConfigError, match=r"no tensor's name begins with 'model/head'\. Choose .* model/0, model/1"):
        FedPer(personal=("model/head",)).init([CLIENT], [models], np.random.default_rng(0))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"decay": 0.5, "lr": 0.4}, 0.1),
        ({"models": {"model": 0.07}}, 0.07),
    ],
)
def test_learning_rates_decay_and_may_differ_by_model(settings: dict[str, Any], expected: float) -> None:
    optimiser = Optimiser({"model": [torch.zeros(1)]}, OptimiserSettings(**settings), round_index=2)
    assert optimiser.param_groups[0]["lr"] == pytest.approx(expected)


def test_gradients_are_clipped_to_the_norm() -> None:
    step = make_step(FedAvg(), make_models("model"), clip_norm=1e-3, lr=1.0)
    before = {name: value.clone() for name, value in step.floating_state().items()}
    FedAvg().local(step)
    distance = math.sqrt(sum(float((value - before[n]).square().sum()) for n, value in step.floating_state().items()))
    assert 0 < distance <= 2 * 1e-3 * (1 + 1e-5)  # two steps of length at most 1e-3


def test_padding_examples_have_weight_0() -> None:
    values = torch.tensor([1.0, 5.0, 100.0])
    batch = make_batch(torch.zeros(3, 1, 1), torch.zeros(3, dtype=torch.int64), weight=torch.tensor([1.0, 1.0, 0.0]))
    assert float(batch.mean(values)) == 3.0
    assert float(dataclasses.replace(batch, weight=None).mean(values)) == pytest.approx(106 / 3)
