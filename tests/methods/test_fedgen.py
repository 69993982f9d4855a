"""FedGen's generator and the training of server and clients with it, against PyTorch's modules and loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import final_state
from several_clients import BANDS, CLASSES, make_steps
from torch import Tensor, nn

from raydfl import read_rows
from raydfl.core.types import Client, State, Update
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.methods._generator import FIRST, MODULE, MOMENTS, SECOND, VECTOR, Generator, ServerGenerator, similarity
from raydfl.methods.fedgen import COUNTS, FedGen, _draw_classes, _Heads
from raydfl.models.dense import MeanMLP
from raydfl.rules import UniformMean
from raydfl.testing import start_server
from raydfl.training.optimiser import Optimiser
from raydfl.training.settings import OptimiserSettings

Tiny = Callable[..., Config]
SIZES = Generator(noise=4, hidden=6, width=5, classes=CLASSES)


class Reference(nn.Module):
    """The generator as in the paper's code."""

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        tensors = SIZES.tensors(vector)
        self.first = nn.Linear(SIZES.noise + SIZES.classes, SIZES.hidden)
        self.norm = nn.BatchNorm1d(SIZES.hidden)
        self.last = nn.Linear(SIZES.hidden, SIZES.width)
        with torch.no_grad():
            self.first.weight.copy_(torch.cat([tensors["of_noise"], tensors["of_label"].T], dim=1))
            for tensor, name in [
                (self.first.bias, "bias"),
                (self.norm.weight, "scale"),
                (self.norm.bias, "shift"),
                (self.norm.running_mean, "mean"),
                (self.norm.running_var, "variance"),
                (self.last.weight, "output"),
                (self.last.bias, "output_bias"),
            ]:
                tensor.copy_(tensors[name])

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        inputs = torch.cat([noise, F.one_hot(labels, SIZES.classes).to(noise.dtype)], dim=1)
        return self.last(self.norm(self.first(inputs)).relu())  # type: ignore[no-any-return]


def make_adam(parameters: list[Tensor], lr: float, weight_decay: float) -> Optimiser:
    """Return the fused operation of torch.optim.Adam without its slow import."""
    return Optimiser({"": parameters}, OptimiserSettings(name="adam", lr=lr, weight_decay=weight_decay), 0)


def make_examples(count: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(CLASSES, (count,), generator=generator), torch.rand(count, 4, generator=generator)


def make_vector() -> Tensor:
    """Return a generator with random scales and running means."""
    result = SIZES.initial(np.random.default_rng(1))
    return result + 0.1 * torch.rand(result.shape, generator=torch.Generator().manual_seed(5))


def test_the_generator_equals_the_papers_code() -> None:
    labels, noise = make_examples()
    reference = Reference(make_vector())
    expected = reference(labels, noise)
    features, running = SIZES.features(make_vector(), labels, noise, training=True)
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(running, torch.cat([reference.norm.running_mean, reference.norm.running_var]))
    after = torch.cat([make_vector()[: SIZES.trained], running])
    torch.testing.assert_close(SIZES.features(after, labels, noise)[0], reference.eval()(labels, noise))


def test_a_new_generator_is_initialised_like_pytorch_layers() -> None:
    many = Generator(noise=30, hidden=200, width=90, classes=10)
    tensors = many.tensors(many.initial(np.random.default_rng(0)))
    for name, fan_in in (("of_noise", 40), ("of_label", 40), ("bias", 40), ("output", 200), ("output_bias", 200)):
        limit = 1 / np.sqrt(fan_in)
        assert tensors[name].abs().max() <= limit
        assert tensors[name].std() == pytest.approx(limit / np.sqrt(3), rel=0.15)
    assert (tensors["scale"].unique(), tensors["mean"].unique(), tensors["variance"].unique()) == (1, 0, 1)


def test_the_generators_optimiser_equals_pytorchs_adam() -> None:
    target = torch.linspace(-1, 1, 7, dtype=torch.float64)
    leaf = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    reference = make_adam([leaf], lr=0.03, weight_decay=0.2)
    moments = {FIRST: torch.zeros(7), SECOND: torch.zeros(7)}
    tensors = {MODULE: {VECTOR: torch.zeros(8, dtype=torch.float64)}, MOMENTS: moments}
    module = ServerGenerator(State(0, tensors, {"generator_steps": 0}), VECTOR)
    for number in range(1, 6):
        end = torch.tensor([float(number)], dtype=torch.float64)
        module.train(lambda own, end=end: ((own[:7] - target).square().sum(), end), 0.03, 0.2)
        reference.clear_gradients()
        (leaf - target).square().sum().backward()
        reference.advance()
    torch.testing.assert_close(module.vector[:7], leaf.detach())
    assert module.vector[7] == 5


def test_similarity_and_weighted_losses_of_the_heads_follow_the_paper() -> None:
    labels, noise = make_examples()
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(9, 5, generator=generator)
    pairs = [
        float((noise[i] - noise[j]).square().mean() * (features[i] - features[j]).abs().mean())
        for i in range(9)
        for j in range(9)
    ]
    assert similarity(noise, features).item() == pytest.approx(np.exp(-np.mean(pairs)), rel=1e-5)
    counts = torch.tensor([[3.0, 0.0, 1.0], [1.0, 5.0, 0.0]])  # clients, classes
    heads = _Heads(torch.randn(2, 3, 5, generator=generator), torch.randn(2, 3, generator=generator), counts)
    expected = 0.0
    for z, y in zip(features, labels, strict=True):
        for k in range(2):
            logits = heads.weight[k] @ z + heads.bias[k]
            expected -= float(counts[k, y] / counts[:, y].sum() * logits.log_softmax(0)[y]) / 9
    assert heads.loss(features, labels).item() == pytest.approx(expected, rel=1e-5)


def test_labels_are_drawn_uniformly_from_known_classes() -> None:
    torch.manual_seed(0)
    counts = torch.bincount(_draw_classes(torch.tensor([False, True, False, True, False]), 4000), minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    assert counts[1] == pytest.approx(2000, abs=150)


@pytest.mark.parametrize(("alpha", "beta"), [(3.0, 0.0), (0.0, 2.0), (3.0, 2.0)])
def test_clients_learn_from_generated_features(alpha: float, beta: float) -> None:
    method = FedGen(alpha=alpha, beta=beta, decay=0.5, generated=6, noise=4, hidden=6)
    build = lambda: {"model": MeanMLP(BANDS, CLASSES, hidden=5)}  # noqa: E731
    state = method.init([Client("a", 0, 1)], [build()], np.random.default_rng(0))
    tensors = {
        "global": {**state.tensors["global"], COUNTS: torch.tensor([4.0, 0.0, 2.0])},
        MODULE: {VECTOR: make_vector()},
    }
    step = make_steps(method, build, initial=State(2, tensors))[0]
    batch, network = next(step.data.train.batches(5, None)), step.models["model"]
    step.state["fedgen/weights"] = method._weights(step)
    generator = Reference(make_vector()).eval()
    torch.manual_seed(3)
    loss = method.loss_with_generator(step, batch)
    torch.manual_seed(3)
    logits = network(batch.x)
    expected = F.cross_entropy(logits, batch.y)
    if alpha:
        labels = torch.where(torch.rand(6) < 0.5, 0, 2)
        z = generator(labels, torch.rand(24).view(6, 4))
        # 6 generated features for batches of 4, in the third round.
        expected = expected + 6 / 4 * alpha / 4 * F.cross_entropy(network.output(z), labels)
    if beta:
        p = network.output(generator(batch.y, torch.rand(20).view(5, 4))).softmax(dim=1).detach()
        expected = expected + beta / 4 * F.kl_div(logits.log_softmax(dim=1), p, reduction="batchmean")
    torch.testing.assert_close(loss, expected)
    weights = list(network.parameters())
    for gradient, expected_gradient in zip(
        *(torch.autograd.grad(value, weights) for value in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_weights_do_not_decay_to_zero() -> None:
    method = FedGen(alpha=1.0, beta=0.5, decay=0.1, generated=8)
    step = make_steps(method, lambda: {"model": MeanMLP(BANDS, CLASSES)})[0]
    step.round_index = 9
    assert method._weights(step).tolist() == pytest.approx([2e-4, 1e-4])


def test_the_server_trains_the_generator_with_last_layers_and_aggregates_only_networks() -> None:
    method = FedGen(noise=4, hidden=6, server_steps=3, server_batch=8, rule="uniform_mean")
    network = MeanMLP(BANDS, CLASSES, hidden=5)
    state = method.init([Client("a", 0, 1)], [{"model": network}], np.random.default_rng(0))
    counts_before = torch.tensor([0.0, 7.0, 0.0])
    state = dataclasses.replace(
        state, tensors={**state.tensors, "global": {**state.tensors["global"], COUNTS: counts_before}}
    )
    generator = torch.Generator().manual_seed(1)
    updates = [
        Update(
            {
                **{f"model/{n}": torch.randn(t.shape, generator=generator) for n, t in network.state_dict().items()},
                COUNTS: torch.tensor(counts),
            },
            1.0,
        )
        for counts in ([4.0, 0.0, 0.0], [1.0, 0.0, 3.0])
    ]
    new, report = method.aggregate(state, iter(updates), np.random.default_rng(4))
    assert new.tensors["global"][COUNTS].tolist() == [5.0, 7.0, 3.0]  # no client of the cohort has class 1
    plain = UniformMean()(iter(updates), state.tensors, np.random.default_rng(4)).tensors["global"]
    for name in ("model/hidden.weight", "model/output.bias"):
        assert torch.equal(new.tensors["global"][name], plain[name])

    # The same training with PyTorch's modules.
    reference = Reference(state.tensors[MODULE][VECTOR])
    optimiser = make_adam([*reference.parameters()], lr=3e-4, weight_decay=0.01)
    rng = np.random.default_rng(4)
    shares = torch.tensor([[4 / 5, 0.0, 0.0], [1 / 5, 0.0, 1.0]])
    losses = []
    for _ in range(3):
        labels = torch.from_numpy(rng.choice([0, 2], 8))
        noise = torch.from_numpy(rng.random((8, 4), np.float32))
        z = reference(labels, noise)
        loss = torch.zeros(())
        for update, share in zip(updates, shares, strict=True):
            logits = z @ update.tensors["model/output.weight"].T + update.tensors["model/output.bias"]
            loss = loss + (share[labels] * F.cross_entropy(logits, labels, reduction="none")).mean()
        optimiser.clear_gradients()
        (loss + similarity(noise, z)).backward()
        optimiser.advance()
        losses.append(loss.item())
    expected, tensors = reference.state_dict(), SIZES.tensors(new.tensors[MODULE][VECTOR])
    for name, key in (("norm.running_var", "variance"), ("last.weight", "output"), ("norm.weight", "scale")):
        torch.testing.assert_close(tensors[key], expected[name], rtol=1e-4, atol=1e-6)
    assert report["generator/loss"].value == pytest.approx(np.mean(losses), rel=1e-4)  # type: ignore[union-attr]
    assert new.tensors[MOMENTS][FIRST].abs().max() > 0
    assert new.extra == {"generator_steps": 3}


def test_the_generator_is_broadcast_after_the_first_round_and_its_bytes_are_counted(tiny: Tiny) -> None:
    no_evaluation = ["evaluate.server=false", "evaluate.clients=none"]
    config = tiny("train.rounds=2", "train.cohort=1.0", *no_evaluation, method="fedgen")
    server = start_server(config)
    for _ in range(2):
        server.round()
    server.finish()
    server.close()
    folder = next(Path(config.run.dir).iterdir())
    tensors = final_state(folder).tensors
    counts, generator = tensors["global"][COUNTS], tensors[MODULE][VECTOR]
    assert counts.tolist() == Population.load(folder / "population").label_counts().sum(axis=0).tolist()
    assert tensors[MOMENTS][SECOND].numel() == len(generator) - 16
    bytes_of_models = 6 * 4 * sum(tensor.numel() for tensor in tensors["global"].values())
    traffic = {
        (row["metric"], row["round"]): row["value"] for row in read_rows(folder).to_pylist() if not row["client"]
    }
    assert traffic["bytes_up", 1] == traffic["bytes_up", 2] == bytes_of_models
    assert (traffic["bytes_down", 1], traffic["bytes_down", 2]) == (
        bytes_of_models,
        bytes_of_models + 6 * 4 * len(generator),
    )
