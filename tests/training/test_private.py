"""Training with ``train.optimiser.private``. Oracles: a loop over examples, training without noise on equal batches, the bound on
the influence of an example, and the distribution of the noise."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import WIDTH, needs_transformers, write_encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from several_clients import BANDS, CLASSES, make_examples, make_steps
from torch import Tensor, nn

from raydfl import testing
from raydfl.core.errors import ConfigError
from raydfl.core.noise_key import NoiseKey
from raydfl.core.types import Batch, ModelSpec, Ratio
from raydfl.data.examples import ClientData, Examples
from raydfl.data.features.cache import FeatureStore
from raydfl.methods._method import Method
from raydfl.methods.ditto import Ditto
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedlc import FedLC
from raydfl.methods.fedntd import FedNTD
from raydfl.methods.fedprox import FedProx
from raydfl.methods.fedrep import FedRep
from raydfl.methods.fedstar import FedSTAR
from raydfl.models import build_model
from raydfl.models.crnn import CRNN
from raydfl.models.dense import MeanLinear
from raydfl.models.split_cnn import SplitCNN
from raydfl.training import Step, find_fixed_tensors, fit
from raydfl.training.call import FitCall
from raydfl.training.private import ExampleGradients, check_networks, compute_example_gradients
from raydfl.training.settings import OptimiserSettings, TrainSettings
from raydfl.training.withheld import PrivateTask, WithheldData

Networks = Callable[[], dict[str, nn.Module]]
KEY = NoiseKey(bytes(32))


def make_linear() -> dict[str, nn.Module]:
    return {"model": MeanLinear(BANDS, CLASSES)}


def make_private_step(
    method: Method,
    networks: Networks = make_linear,
    private: dict[str, Any] | None = None,
    *,
    examples: Examples | None = None,
    key: NoiseKey = KEY,
    outside: bool = True,
    **fields: Any,
) -> Step:
    """Make the step of a client with 16 examples, in expected batches of 4 examples."""
    optimiser = {"private": private or {"clip": 1.0, "noise": 1.0}, **fields.pop("optimiser", {})}
    step = make_steps(method, networks, sizes=(16,), optimiser=optimiser, **fields)[0]
    clips = step.data.train if examples is None else examples
    step.execution.private, step.data = (
        PrivateTask(key, ClientData({"train": clips}, clips, clips), outside),
        WithheldData(),
    )  # type: ignore[assignment]
    return step


def make_tokens(count: int) -> Examples:
    """Make the cached tokens of an encoder, of different lengths."""
    rng = np.random.default_rng(0)
    counts = rng.integers(3, 9, count)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    frames = rng.normal(size=(int(offsets[-1]), WIDTH)).astype(np.float32)
    store = FeatureStore(Path("memory"), frames, offsets, counts.astype(np.int32), None, {})
    return testing.make_examples(rng.integers(0, CLASSES, count), store, offsets[:-1], counts, None)


def make_hubert(folder: Path) -> dict[str, nn.Module]:
    path = folder / "hubert"
    if not path.exists():
        config = write_encoder(path, "hubert") / "config.json"
        values = json.loads(config.read_text())  # without dropout, so that the loop computes the same function
        config.write_text(json.dumps({name: 0.0 if "dropout" in name else value for name, value in values.items()}))
    options = (("after", 2), ("folder", str(path)), ("train", 1))
    return {"model": build_model(ModelSpec("model", "pretrained", WIDTH, CLASSES, options))}


def make_crnn() -> dict[str, nn.Module]:
    return {"model": CRNN(BANDS, CLASSES, filters=(4,), hidden=5, bidirectional=False, dropout=0.0)}


CASES: dict[str, tuple[Method, Callable[[Path], dict[str, nn.Module]], bool]] = {
    "crnn": (FedAvg(), lambda folder: make_crnn(), True),
    "cnn": (FedAvg(), lambda folder: {"model": SplitCNN(BANDS, CLASSES, filters=(4,), groups=2, dropout=0.0)}, False),
    "hubert": (FedAvg(), make_hubert, True),
    "fedprox": (FedProx(mu=1.0), lambda folder: make_crnn(), False),
    "fedntd": (FedNTD(beta=1.0, tau=2.0), lambda folder: make_crnn(), False),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_transformers if n == "hubert" else ()) for n in CASES])
def test_the_gradients_of_examples_equal_a_loop(name: str, tmp_path: Path) -> None:
    """The loop computes each example as its own batch, without padding."""
    method, networks, lengths = CASES[name]
    examples = make_tokens(7) if name == "hubert" else make_examples(7, 3, lengths)
    step = make_private_step(method, lambda: networks(tmp_path), examples=examples)
    with torch.no_grad():  # the global model differs, or the regularisation has no gradient
        for parameter in step.models["model"].parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    step.models["model"].train()
    parameters = {key: value for key, value in step.parameters().items() if value.requires_grad}
    call = FitCall(step, [method.loss], ["model"], 1, None, {})
    index = np.arange(7)
    found = compute_example_gradients(call, examples.batch(index), torch.zeros(7, dtype=torch.int64), parameters)
    assert step.execution.looped_because == ""
    for row in index:
        loss = method.loss(step, examples.batch(index[row : row + 1]))
        assert isinstance(loss, Tensor)
        expected = torch.autograd.grad(loss, [*parameters.values()])
        largest = max(float(gradient.abs().max()) for gradient in expected)
        assert largest > 0
        for gradient, key in zip(expected, parameters, strict=True):
            torch.testing.assert_close(found.gradients[key][row], gradient, rtol=0, atol=1e-6 * largest)


class PlainCNN(nn.Module):
    """A network of layers that Opacus supports."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.output = nn.Conv1d(BANDS, 6, 3), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        logits: Tensor = self.output(self.convolution(x.transpose(1, 2)).relu().mean(dim=2))
        return logits


def test_clipped_sums_equal_those_of_opacus() -> None:
    """Opacus adds 1e-6 to each norm."""
    import opacus  # takes seconds

    step = make_private_step(FedAvg(), lambda: {"model": PlainCNN()}, examples=make_examples(9, 3, False))
    examples, network = step.execution.private.data.train, copy.deepcopy(step.models["model"])  # type: ignore[union-attr]
    batch, call = examples.batch(np.arange(9)), FitCall(step, [FedAvg().loss], ["model"], 1, None, {})
    found = compute_example_gradients(call, batch, torch.zeros(9, dtype=torch.int64), step.parameters())
    clip = float(np.median([torch.stack([g[row].norm() for g in found.gradients.values()]).norm() for row in range(9)]))
    wrapped = opacus.GradSampleModule(network, loss_reduction="sum")
    optimiser = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        expected_batch_size=9,
        loss_reduction="sum",
    )
    nn.functional.cross_entropy(wrapped(batch.x), batch.y, reduction="sum").backward()
    optimiser.clip_and_accumulate()
    sums = found.sum_clipped(clip)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(sums[f"model/{name}"].float(), parameter.summed_grad, rtol=0, atol=1e-6)


def test_a_loss_without_a_batched_form_is_computed_example_by_example() -> None:
    def read_loss(step: Step, batch: Batch) -> Tensor:
        value = batch.cross_entropy(step.forward("model", batch))
        return value if value.item() > -1 else -value

    steps = [make_private_step(FedAvg()) for _ in range(2)]
    fit(steps[0], FedAvg().loss)
    fit(steps[1], read_loss)
    assert "item" in steps[1].execution.looped_because
    for one, other in zip(*(step.parameters().values() for step in steps), strict=True):
        torch.testing.assert_close(one, other)


def test_without_noise_and_clipping_a_training_equals_steps_on_the_same_batches() -> None:
    """The oracle is PyTorch's SGD with momentum, and the sum over a batch divided by the expected 4 examples."""
    method = FedProx(mu=0.5)
    step = make_private_step(method, make_crnn, {"clip": math.inf, "noise": 0.0}, optimiser={"momentum": 0.9})
    plain, examples = copy.deepcopy(step.models["model"]).train(), step.execution.private.data.train  # type: ignore[union-attr]
    reference = make_private_step(method, lambda: {"model": plain})
    reference.models = {"model": plain}
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    metrics = fit(step, method.loss)
    drawn = 0
    for number in range(8):  # 2 epochs of 16 examples
        rng = KEY.generator(number, "batch")
        rng.integers(2**62)
        index = np.flatnonzero(rng.random(16) < 4 / 16)
        drawn += len(index)
        optimiser.zero_grad()
        if len(index):
            (method.loss(reference, examples.batch(index)) * len(index) / 4).backward()  # type: ignore[operator]
            optimiser.step()
    assert metrics["steps"] == Ratio(8, 1)
    loss = metrics["loss"]
    assert isinstance(loss, Ratio)
    assert loss.count == drawn
    for one, other in zip(step.models["model"].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.floats(width=32)),
    st.floats(-3, 3),
)
def test_an_example_moves_the_clipped_sum_by_at_most_the_clip(values: np.ndarray, exponent: float) -> None:
    """For gradients of any size, also infinite."""
    clip, half = 10**exponent, values.shape[1] // 2

    def add(rows: np.ndarray) -> np.ndarray:
        gradients = {"a": torch.from_numpy(rows[:, :half]), "b": torch.from_numpy(rows[:, half:])}
        sums = ExampleGradients(torch.zeros(len(rows)), gradients, {}).sum_clipped(clip)
        return np.concatenate([sums["a"].numpy(), sums["b"].numpy()])

    whole = add(values)
    for row in range(len(values)):
        assert np.linalg.norm(whole - add(np.delete(values, row, 0))) <= clip * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_an_example_moves_a_step_of_a_network_by_at_most_the_clip(seed: int, place: int) -> None:
    rng = np.random.default_rng(seed)
    clip, examples = float(10 ** rng.uniform(-3, 1)), make_examples(7, seed % 1000, lengths=True)
    step = make_private_step(FedAvg(), make_crnn, examples=examples)
    parameters = step.parameters()
    call = FitCall(step, [FedAvg().loss], ["model"], 1, None, {})
    sums = []
    for index in (np.arange(7), np.delete(np.arange(7), place)):
        seeds = torch.zeros(len(index), dtype=torch.int64)
        gradients = compute_example_gradients(call, examples.batch(index), seeds, parameters).sum_clipped(clip)
        sums.append(torch.cat([gradient.flatten() for gradient in gradients.values()]))
    assert float((sums[0] - sums[1]).norm()) <= clip * (1 + 1e-5)


def test_the_noise_has_the_stated_deviation_in_every_step() -> None:
    """A loss without gradient, learning rate 1, and 4 expected examples: each step moves by -N(0, (1.5 x 2 / 4)^2)."""

    def draw_step(key: NoiseKey) -> np.ndarray:
        step = make_private_step(
            FedAvg(),
            lambda: {"model": nn.Linear(100, 100)},
            {"clip": 2.0, "noise": 1.5},
            key=key,
            optimiser={"lr": 1.0},
            epochs=1,
        )
        before = torch.cat([parameter.detach().flatten() for parameter in step.models["model"].parameters()])
        moved: list[np.ndarray] = []

        def vanish(step: Step, batch: Batch) -> Tensor:
            return 0 * sum(parameter.sum() for parameter in step.models["model"].parameters())  # type: ignore[return-value]

        fit(step, vanish)
        after = torch.cat([parameter.detach().flatten() for parameter in step.models["model"].parameters()])
        moved.append((after - before).numpy())
        return moved[0]

    moves = np.concatenate([draw_step(NoiseKey(bytes([number] * 32))) for number in range(10)])
    # Four steps in an epoch. 101,000 numbers: the standard error of their deviation is 0.22 %.
    assert moves.std() == pytest.approx(2 * 1.5 * 2 / 4, rel=0.01)
    assert abs(moves.mean()) < 4 * moves.std() / math.sqrt(len(moves))
    first = draw_step(KEY)
    np.testing.assert_array_equal(first, draw_step(KEY))


def test_steps_draw_different_batches_and_different_noise() -> None:
    batches = [tuple(np.flatnonzero(KEY.generator(number, "batch").random(40) < 0.5)) for number in range(20)]
    assert len(set(batches)) == 20
    noise = np.array([KEY.normals(number, "noise", 10_000) for number in range(4)])
    assert np.abs(np.corrcoef(noise) - np.eye(4)).max() < 0.04


def test_metrics_are_returned_only_outside_the_guarantee() -> None:
    metrics = fit(make_private_step(FedAvg(), outside=False), FedAvg().loss)
    assert metrics == {"loss": Ratio(0.0, 0), "steps": Ratio(8, 1)}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Ditto(), r"trains more than once in a round"),
        (FedRep(head_epochs=2), r"trains more than once in a round"),
        (FedLC(), r"reads step.data.train, and noise protects only"),
        (FedSTAR(), r"reads step.data.pools"),
    ],
)
def test_methods_outside_the_guarantee_are_rejected(method: Method, message: str) -> None:
    names = ("model", "personal") if isinstance(method, Ditto) else ("model",)
    step = make_private_step(method, lambda: {name: MeanLinear(BANDS, CLASSES) for name in names})
    with pytest.raises(ConfigError, match=message):
        method.local(step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 3}, "trains 3 epochs, and the accounting knows train.local_epochs=2"),
        ({"batches": testing}, "composes its batches"),
    ],
)
def test_calls_of_fit_outside_the_accounting_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(make_private_step(FedAvg()), FedAvg().loss, **options)
    with pytest.raises(ConfigError, match="takes 2 optimiser steps with each batch"):
        fit(make_private_step(FedAvg()), FedAvg().loss, FedAvg().loss)


def test_layers_that_mix_examples_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"the layer '1' of models.model is a BatchNorm1d. It mixes examples"):
        check_networks({"model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))}, frozenset())
    with pytest.raises(ConfigError, match=r"InstanceNorm1d"):
        check_networks({"model": nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True))}, frozenset())
    frozen = nn.BatchNorm1d(2).requires_grad_(False)
    models = {"model": nn.Sequential(nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), frozen)}
    check_networks(models, find_fixed_tensors(models, ()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"private": {"clip": 0.0, "noise": 1.0}}, "private.clip"),
        ({"private": {"clip": math.nan, "noise": 1.0}}, "private.clip"),
        ({"private": {"clip": math.inf, "noise": 1.0}}, "no noise can hide a clip"),
        ({"private": {"noise": -1.0}}, "private.noise"),
        ({"private": {"clip": 1.0}}, "private.noise"),
        ({"private": {"noise": 1.0}, "clip_norm": 1.0}, "Remove clip_norm"),
    ],
)
def test_impossible_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        TrainSettings(optimiser=OptimiserSettings(**values))
