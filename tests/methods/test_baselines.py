"""Losses of baseline methods against independent computations in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from several_clients import BANDS, CLASSES, make_steps
from torch import Tensor, nn

from raydfl import run
from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, ModelSpec
from raydfl.engine import build_models
from raydfl.engine.config import Config
from raydfl.methods import Method
from raydfl.methods.ditto import Ditto
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedlc import FedLC
from raydfl.methods.fedntd import FedNTD
from raydfl.methods.moon import Moon, add_projection
from raydfl.models.dense import MeanMLP
from raydfl.training.step import Step

Tiny = Callable[..., Config]


def mlp(dropout: bool = False) -> nn.Module:
    network = MeanMLP(BANDS, CLASSES, hidden=7)
    if dropout:
        network.hidden = nn.Sequential(network.hidden, nn.Dropout(0.5))
    return network


def make_first_step(method: Method, build: Callable[[], dict[str, nn.Module]]) -> tuple[Step, Batch]:
    """Return a client's step, with a model changed from the received model, and a batch of the client."""
    step = make_steps(method, build)[0]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in step.floating_state().values():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.4)
    return step, next(step.data.train.batches(5, None))


def compute_mlp(tensors: dict[str, np.ndarray], x: np.ndarray, output: str = "output") -> tuple[np.ndarray, np.ndarray]:
    """Compute features and logits of the network in float64."""
    hidden = np.maximum(x.mean(axis=1) @ tensors["hidden.weight"].T + tensors["hidden.bias"], 0)
    return hidden, hidden @ tensors[f"{output}.weight"].T + tensors[f"{output}.bias"]


def to_arrays(tensors: dict[str, Tensor], prefix: str = "model/") -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): t.detach().double().numpy() for n, t in tensors.items() if n.startswith(prefix)}


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (0.3, 3.0)])
def test_fedntd_distils_the_received_models_not_true_classes(beta: float, tau: float) -> None:
    step, batch = make_first_step(FedNTD(), lambda: {"model": mlp()})
    x, y = batch.x.double().numpy(), batch.y.numpy()
    _, local_logits = compute_mlp(to_arrays(step.floating_state()), x)
    _, received_logits = compute_mlp(to_arrays(dict(step.received["global"])), x)
    expected = 0.0
    for z, teacher, label in zip(local_logits, received_logits, y, strict=True):
        other_classes = [c for c in range(CLASSES) if c != label]
        log_p, log_q = (log_softmax(logits[other_classes] / tau) for logits in (teacher, z))
        expected += -log_softmax(z)[label] + beta * tau**2 * (np.exp(log_p) * (log_p - log_q)).sum()
    assert FedNTD(beta=beta, tau=tau).loss(step, batch).item() == pytest.approx(expected / len(y), rel=1e-5)


def test_a_teacher_is_in_evaluation_mode_and_receives_no_gradient() -> None:
    """Dropout changes the student's outputs but not the teacher's. The network's modes are restored."""
    step, batch = make_first_step(FedNTD(), lambda: {"model": mlp(dropout=True)})
    network = step.models["model"].train()
    network.output.eval()
    with step.teacher("model", step.received["global"]) as use_teacher:
        assert use_teacher is network
        first, second = step.forward("model", batch), step.forward("model", batch)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert not torch.equal(step.forward("model", batch), step.forward("model", batch))
    assert [layer.training for layer in (network, network.hidden[1], network.output)] == [True, True, False]


@pytest.mark.parametrize("denominator", ["all", "others"])
def test_fedlc_shifts_logits_by_the_clients_own_counts(denominator: str) -> None:
    method = FedLC(tau=0.7, denominator=denominator)  # type: ignore[arg-type]
    step, batch = make_first_step(method, lambda: {"model": mlp()})
    labels = np.array([0] * 16 + [2] * 81)  # class 1 has no examples
    step.state["shift"] = method.shift(labels, CLASSES)
    assert step.state["shift"].tolist() == pytest.approx([0.7 / 2, 0.7 * 100, 0.7 / 3])
    _, z = compute_mlp(to_arrays(step.floating_state()), batch.x.double().numpy())
    z = z - np.array([0.7 / 2, 70.0, 0.7 / 3])
    expected = 0.0
    for row, label in zip(z, batch.y.numpy(), strict=True):
        against = [c for c in range(CLASSES) if denominator == "all" or c != label]
        expected += math.log(np.exp(row[against]).sum()) - row[label]
    assert method.loss(step, batch).item() == pytest.approx(expected / len(z), rel=1e-5)


def test_fedlc_evaluates_unshifted_logits() -> None:
    method = FedLC(tau=5.0)
    step, _ = make_first_step(method, lambda: {"model": mlp()})
    metrics = method.evaluate(step, step.data.train, 4)
    method.local(step)
    assert "shift" not in step.state
    step, _ = make_first_step(FedAvg(), lambda: {"model": mlp()})
    assert metrics["model/loss"] == FedAvg().evaluate(step, step.data.train, 4)["model/loss"]


@pytest.mark.parametrize("projection", [None, 4])
def test_moon_contrasts_the_received_model_with_the_previous_model(projection: int | None) -> None:
    method = Moon(mu=2.5, temperature=0.3, projection=projection)

    def build() -> dict[str, nn.Module]:
        network = mlp()
        if projection:
            add_projection(network, projection)
        return {"model": network}

    step, batch = make_first_step(method, build)
    generator = torch.Generator().manual_seed(8)
    previous = {n: torch.randn(v.shape, generator=generator) for n, v in step.floating_state().items()}
    step.state.update({f"previous/{n}": v for n, v in previous.items()})
    x = batch.x.double().numpy()

    def compute_outputs(tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Compute z and the logits."""
        if projection is None:
            return compute_mlp(tensors, x)
        z, _ = compute_mlp(tensors, x, "output.project.0")
        for layer in ("output.project.0", "output.project.2", "output.classify"):
            before, z = z, z @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"]
            z = np.maximum(z, 0) if layer == "output.project.0" else z
        return before, z

    z, logits = compute_outputs(to_arrays(step.floating_state()))
    references = [compute_outputs(to_arrays(dict(tensors)))[0] for tensors in (step.received["global"], previous)]
    near, far = (
        np.exp((z * o).sum(1) / np.linalg.norm(z, axis=1) / np.linalg.norm(o, axis=1) / 0.3) for o in references
    )
    cross_entropy = -log_softmax(logits)[np.arange(len(z)), batch.y.numpy()]
    expected = (cross_entropy - 2.5 * np.log(near / (near + far))).mean()
    assert method.loss(step, batch).item() == pytest.approx(expected, rel=1e-4)


def test_moon_starts_from_the_received_model_and_keeps_the_trained_model() -> None:
    method = Moon(mu=3.0, projection=None)
    step, batch = make_first_step(method, lambda: {"model": mlp()})
    plain = FedAvg().loss(step, batch).item()
    step.state.update({f"previous/{n}": v for n, v in step.received["global"].items()})
    assert method.loss(step, batch).item() == pytest.approx(plain + 3.0 * math.log(2), rel=1e-6)
    update = method.local(step)
    assert {n: v.tolist() for n, v in update.tensors.items()} == {
        n.removeprefix("previous/"): v.tolist() for n, v in step.state.items()
    }


def test_moons_head_keeps_the_initial_body_and_rejects_unsuitable_networks() -> None:
    spec = ModelSpec("model", "mlp", BANDS, CLASSES)
    bodies = []
    for method in (FedAvg(), Moon(projection=5)):
        torch.manual_seed(4)
        bodies.append(method.build([spec])["model"].hidden.weight)
    assert torch.equal(*bodies)
    network = Moon(projection=5).build([spec])["model"]
    assert network(torch.zeros(2, 6, BANDS)).shape == (2, CLASSES)
    assert network.output.classify.weight.shape == (CLASSES, 5)
    with pytest.raises(ConfigError, match="moon needs the features .* Linear has no 'embed'"):
        add_projection(nn.Linear(2, 2), 4)
    with pytest.raises(ConfigError, match="moon needs a linear last layer, but MeanMLP.output is a _ProjectionHead"):
        add_projection(network, 4)


def test_dittos_personal_model_is_trained_after_the_global_model_and_near_the_received_model() -> None:
    """Repeat both trainings by hand: plain gradient descent on the client's batches in the order of its random generator."""
    method = Ditto(lam=0.6, personal_epochs=1)

    def build() -> dict[str, nn.Module]:
        torch.manual_seed(0)
        return {"model": mlp(), "personal": mlp()}

    step, reference = (make_steps(method, build)[1] for _ in range(2))
    update = method.local(step)
    received = {n.removeprefix("model/"): v.double() for n, v in step.received["global"].items()}
    for name, epochs, lam in (("model", 2, 0.0), ("personal", 1, 0.6)):
        network = reference.models[name].double()
        for _ in range(epochs):
            for batch in reference.data.train.batches(4, reference.rng):
                loss = F.cross_entropy(network(batch.x.double()), batch.y)
                for key, parameter in network.named_parameters():
                    loss = loss + lam / 2 * (parameter - received[key]).square().sum()
                gradients = torch.autograd.grad(loss, list(network.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient
        for key, parameter in network.named_parameters():
            torch.testing.assert_close(
                step.floating_state()[f"{name}/{key}"].double(), parameter.detach(), rtol=1e-4, atol=1e-5
            )
    assert set(update.tensors) == {f"model/{key}" for key in received}


def test_a_copied_model_has_the_architecture_and_initial_weights_of_the_original(tiny: Tiny) -> None:
    """Compare with the initial weights of FedAvg's model, also where the objective adds tensors."""
    objective = "objective={name: contrast, frames: 12, size: 8}"
    ditto, fedavg = (tiny(objective, method=name) for name in ("ditto", "fedavg"))
    assert ditto.components.models["personal"] == ditto.components.models["model"] == fedavg.components.models["model"]
    specs = [ModelSpec(name, "mlp", BANDS, CLASSES, outputs=8) for name in ("model", "personal")]
    networks, plain = (build_models(c.components.method, specs[:n], 1) for c, n in ((ditto, 2), (fedavg, 1)))
    assert [*networks] == ["model", "personal"]
    for name, value in plain["model"].state_dict().items():
        for model in networks.values():
            assert torch.equal(model.state_dict()[name], value), name
    assert networks["personal"].output.weight.data_ptr() != networks["model"].output.weight.data_ptr()
    assert tiny("models.personal={name: crnn_tiny, hidden: 8, filters: [4]}", method="ditto").digest()
    with pytest.raises(
        ConfigError,
        match="models.personal is 'mlp', but it must have the architecture of models.model .* Remove models.personal",
    ):
        tiny("models.personal=mlp", method="ditto")


def test_both_models_of_ditto_are_evaluated(tiny: Tiny) -> None:
    scores = run(tiny("train.rounds=1", method="ditto")).scores
    assert {"test model/accuracy", "validation model/accuracy", "validation personal/accuracy"} <= set(scores)
    assert any(name.startswith("test personal/accuracy") for name in scores)
