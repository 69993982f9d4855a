"""FedKAD: its loss, client updates, class means of the server, private networks, and rejected configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import differ
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl import testing
from raydfl.core.errors import ConfigError
from raydfl.core.types import Client, ModelSpec, Ratio, State, Update
from raydfl.data.examples import ClientData, Examples
from raydfl.data.features.cache import FeatureStore
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.methods import Method
from raydfl.methods._prototypes import COUNTS, MEANS, _projection
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedkad import FedKAD
from raydfl.models.crnn import CRNN
from raydfl.models.dense import MeanMLP
from raydfl.rules import CollectingRule, Group
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, train_federation
from raydfl.training.settings import OptimiserSettings, TrainSettings
from raydfl.training.step import Step

Tiny = Callable[..., Config]
CLASSES, BANDS, FRAMES, WIDTH, SIZE = 4, 3, 8, 5, 6
RNG = np.random.default_rng


def make_examples(labels: list[int], seed: int = 0) -> Examples:
    count = len(labels)
    frames = RNG(seed).normal(size=(count * FRAMES, BANDS)).astype(np.float32)
    offsets = np.arange(count + 1) * FRAMES
    counts = np.full(count, FRAMES, np.int32)
    store = FeatureStore(Path("memory"), frames, offsets, counts, FRAMES, {})
    return testing.make_examples(np.array(labels, np.int64), store, offsets[:-1], counts, FRAMES)


def network(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return MeanMLP(BANDS, CLASSES, hidden=width)


def client() -> Client:
    specs = (ModelSpec("model", "mlp", BANDS, CLASSES),)
    return Client("anna", 0, 7, specs)


LABELS = [0, 0, 1, 3, 3, 3, 0]  # class 2 has no examples


def make_step(method: Method, model: nn.Module, state: State | None = None, labels: list[int] = LABELS) -> Step:
    state = state or method.init([client()], [{"model": model}], RNG(0))
    data = make_examples(labels)
    step = Step(
        client=client(),
        models={"model": copy.deepcopy(model)},
        received={"global": {name: value.clone() for name, value in state.tensors["global"].items()}},
        data=ClientData({"train": data}, data.take(np.zeros(0, np.int64)), data.take(np.zeros(0, np.int64))),
        state={},
        rng=RNG(0),
        device=torch.device("cpu"),
        training=TrainSettings(batch_size=4, optimiser=OptimiserSettings(lr=0.1)),
        phase="train",
        round_index=0,
        shared=method.shared,
    )
    step.load("global")
    return step


def make_state(counts: list[float], size: int = SIZE) -> State:
    """Return a state with means of all classes with a count above 0."""
    means = torch.randn(CLASSES, size, generator=torch.Generator().manual_seed(9))
    return State(0, {"global": {MEANS: means, COUNTS: torch.tensor(counts)}})


def get_batch(step: Step) -> Any:
    return step.data.train.batch(np.arange(len(step.data.train)))


@pytest.mark.parametrize("width", [WIDTH, SIZE])
def test_the_loss_and_its_gradient_follow_the_formulas(width: int) -> None:
    method, state = FedKAD(lam=0.7, size=SIZE), make_state([2.0, 1.0, 3.0, 0.0])
    step = make_step(method, network(width), state)
    model, batch = step.models["model"], get_batch(step)
    projection = torch.eye(SIZE) if width == SIZE else _projection(width, SIZE, torch.device("cpu"))
    x = batch.x.mean(dim=1)

    def literal(parameters: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, label in enumerate(LABELS):
            f = (parameters["hidden.weight"] @ x[i].double() + parameters["hidden.bias"]).clamp_min(0)
            z = parameters["output.weight"] @ f + parameters["output.bias"]
            total = total - (z[label] - z.exp().sum().log())
            if label != 3:  # class 3 has no mean
                total = (
                    total
                    + 0.7 * (f @ projection.double() - state.tensors["global"][MEANS][label].double()).square().sum()
                )
        return total / len(LABELS)

    precise = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    expected = literal(precise)
    expected.backward()
    value = method.loss(step, batch)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, precise[name].grad.float(), rtol=1e-4, atol=1e-6)


def test_without_class_means_clients_train_as_in_fedavg() -> None:
    """Compare with FedAvg bit for bit: without class means, and with lam 0 (purely local training)."""
    plain = FedAvg().local(make_step(FedAvg(), network()))
    for method, state in ((FedKAD(size=SIZE), None), (FedKAD(lam=0.0, size=SIZE), make_state([1.0] * CLASSES))):
        step = make_step(method, network(), state)
        update = method.local(step)
        for name, value in plain.tensors.items():
            assert torch.equal(step.floating_state()[name], value)
        assert update.metrics["loss"] == plain.metrics["loss"]
    with_means = make_step(FedKAD(size=SIZE), network(), make_state([1.0] * CLASSES))
    FedKAD(size=SIZE).local(with_means)
    assert not torch.equal(with_means.floating_state()["model/hidden.weight"], plain.tensors["model/hidden.weight"])


def test_a_client_sends_only_the_means_of_its_classes() -> None:
    method, state = FedKAD(size=SIZE), make_state([0.0, 0.0, 5.0, 0.0])
    step = make_step(method, network(), state)
    update = method.local(step)
    assert {name: tuple(value.shape) for name, value in update.tensors.items()} == {
        MEANS: (CLASSES, SIZE),
        COUNTS: (CLASSES,),
    }
    assert update.tensors[COUNTS].tolist() == [3.0, 1.0, 0.0, 3.0]
    model = step.models["model"]  # as trained
    x = get_batch(step).x.mean(dim=1).double()
    features = (x @ model.hidden.weight.double().T + model.hidden.bias.double()).clamp_min(0)
    mapped = features @ _projection(WIDTH, SIZE, torch.device("cpu")).double()
    for label in (0, 1, 3):
        class_mean = mapped[[i for i, given_label in enumerate(LABELS) if given_label == label]].mean(dim=0)
        torch.testing.assert_close(update.tensors[MEANS][label].double(), class_mean, rtol=1e-5, atol=1e-6)
    # The client returns the means of its missing classes unchanged.
    assert torch.equal(update.tensors[MEANS][2], state.tensors["global"][MEANS][2])


def test_class_means_are_computed_without_dropout() -> None:
    torch.manual_seed(0)
    model = CRNN(BANDS, CLASSES, filters=(4,), hidden=3, dropout=0.5)
    method = FedKAD(size=SIZE)
    step = make_step(method, model)
    update = method.local(step)
    network = step.models["model"].eval()
    features = network.embed(get_batch(step).x)  # Two directions of 3 units already have the common size.
    torch.testing.assert_close(update.tensors[MEANS][1], features[2].detach(), rtol=1e-5, atol=1e-6)


def test_a_client_without_examples_leaves_the_state_unchanged() -> None:
    method, state = FedKAD(size=SIZE), make_state([1.0, 2.0, 0.0, 1.0])
    update = method.local(make_step(method, network(), state, labels=[]))
    assert torch.equal(update.tensors[MEANS], state.tensors["global"][MEANS])
    new, _ = method.aggregate(state, iter([update]), RNG(0))
    assert all(torch.equal(new.tensors["global"][name], state.tensors["global"][name]) for name in (MEANS, COUNTS))


@pytest.mark.parametrize("rule", [None, "uniform_mean"])
def test_the_server_takes_the_mean_of_each_class_over_its_holders(rule: str | None) -> None:
    rng = RNG(4)
    counts = np.array([[3.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 2.0], [8.0, 5.0, 0.0, 0.0]])
    means = rng.normal(size=(3, CLASSES, SIZE))
    state = make_state([1.0, 0.0, 4.0, 1.0])
    updates = [
        Update(
            {MEANS: torch.from_numpy(k).float(), COUNTS: torch.from_numpy(n).float()}, float(n.sum()), client_id=str(i)
        )
        for i, (k, n) in enumerate(zip(means, counts, strict=True))
    ]
    new, _ = FedKAD(size=SIZE, rule=rule).aggregate(state, iter(updates), RNG(0))
    weights = counts if rule is None else np.sign(counts)
    for label in (0, 1, 3):
        expected = sum(n[label] * k[label] for n, k in zip(weights, means, strict=True)) / weights[:, label].sum()
        np.testing.assert_allclose(new.tensors["global"][MEANS][label].numpy(), expected, rtol=1e-5)
    # No client has class 2, so its mean and its count stay.
    assert torch.equal(new.tensors["global"][MEANS][2], state.tensors["global"][MEANS][2])
    np.testing.assert_allclose(new.tensors["global"][COUNTS].numpy(), [4.0, 3.0, 4.0, 2.0])


@dataclass(frozen=True)
class PlainMedian(CollectingRule):
    """A user's rule without weights."""

    def combine(self, group: Group) -> np.ndarray:
        return np.median(group.matrix(), axis=0)


def test_an_unweighted_rule_keeps_the_means_of_rare_classes() -> None:
    state = make_state([2.0, 0.0, 2.0, 2.0])
    class_counts = torch.tensor([[4.0, 4.0, 0.0, 4.0], [6.0, 0.0, 0.0, 6.0], [8.0, 0.0, 0.0, 0.0]])
    means_before = state.tensors["global"][MEANS]
    updates = [
        Update({MEANS: torch.where(n[:, None] > 0, 1.0 + i, means_before), COUNTS: n}, 1.0, client_id=str(i))
        for i, n in enumerate(class_counts)
    ]
    new, _ = FedKAD(size=SIZE, rule=f"{__file__}:PlainMedian").aggregate(state, iter(updates), RNG(0))
    means, counts = new.tensors["global"][MEANS], new.tensors["global"][COUNTS]
    assert torch.equal(means[0], torch.full((SIZE,), 2.0))
    assert torch.equal(means[1:3], means_before[1:3])
    assert counts.tolist() == [6.0, 0.0, 2.0, 4.0]


def test_negative_counts_of_a_client_count_as_zero() -> None:
    state = make_state([0.0] * CLASSES)
    update = Update({MEANS: torch.ones(CLASSES, SIZE), COUNTS: torch.tensor([-5.0, 1.0, 0.0, 0.0])}, 1.0, client_id="a")
    new, _ = FedKAD(size=SIZE).aggregate(state, iter([update]), RNG(0))
    assert new.tensors["global"][COUNTS].tolist() == [0.0, 1.0, 0.0, 0.0]


def test_networks_are_averaged_by_examples_and_class_means_by_counts() -> None:
    method = FedKAD(size=SIZE, weights=True)
    state = method.init([client()], [{"model": network()}], RNG(0))
    rng, updates = RNG(2), []
    for i, n in enumerate((2.0, 6.0)):
        tensors = {k: torch.from_numpy(rng.normal(size=v.shape)).float() for k, v in state.tensors["global"].items()}
        updates.append(Update({**tensors, COUNTS: torch.full((CLASSES,), 1.0 + i)}, n, client_id=str(i)))
    new, _ = method.aggregate(state, iter(updates), RNG(0))
    assert {name.partition("/")[0] for name in new.tensors["global"]} == {"model", "prototypes"}
    for name, value in new.tensors["global"].items():
        a, b = (update.tensors[name].double() for update in updates)
        expected = {MEANS: (a + 2 * b) / 3, COUNTS: (a + b) / 2}.get(name, (2 * a + 6 * b) / 8)
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "size"), [(256, 64), (32, 64)])
def test_the_projection_is_fixed_and_has_singular_values_of_1(width: int, size: int) -> None:
    p = _projection(width, size, torch.device("cpu"))
    _projection.cache_clear()
    assert torch.equal(p, _projection(width, size, torch.device("cpu")))
    assert p.shape == (width, size)
    np.testing.assert_allclose(np.linalg.svd(p.double().numpy(), compute_uv=False), 1.0, atol=1e-6)


def test_the_nearest_class_mean_is_evaluated_among_known_classes() -> None:
    method = FedKAD(size=SIZE)
    state = make_state([1.0, 0.0, 1.0, 1.0])
    step = make_step(method, network(), state)
    examples = make_examples([0, 1, 2, 3, 0, 1, 2, 3], seed=5)
    metrics = method.evaluate(step, examples, 3)
    assert {name for name in metrics if name.startswith("prototypes/")} == {
        "prototypes/accuracy",
        "prototypes/confusion",
    }
    x = torch.from_numpy(examples.first_view.store.frames.reshape(8, FRAMES, BANDS)).mean(dim=1)
    features = step.models["model"].hidden(x).relu() @ _projection(WIDTH, SIZE, torch.device("cpu"))
    confusion = np.zeros((CLASSES, CLASSES), np.int64)
    for feature, label in zip(features, examples.labels, strict=True):
        distances = {c: float((feature.detach() - state.tensors["global"][MEANS][c]).square().sum()) for c in (0, 2, 3)}
        confusion[label, min(distances, key=distances.__getitem__)] += 1
    assert np.array_equal(metrics["prototypes/confusion"], confusion)
    assert metrics["prototypes/accuracy"] == Ratio(float(np.trace(confusion)), 8)
    before = method.evaluate(make_step(method, network(), make_state([0.0] * CLASSES)), examples, 3)
    assert not any(name.startswith("prototypes/") for name in before)


class Headless(nn.Module):
    """A user's network without embed()."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(x.mean(dim=1))


def test_networks_without_features_and_averages_of_different_networks_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"models.model: fedkad needs .* but Headless has no 'embed'. Add a method embed\(x"
    ):
        FedKAD().init([client()], [{"model": Headless(BANDS, CLASSES)}], RNG(0))
    # A deeper network has all tensors of a shallower network, so comparing shapes is not enough.
    several = [{"model": CRNN(BANDS, CLASSES, filters=(4,) * n, hidden=3)} for n in (1, 2)]
    with pytest.raises(
        ConfigError, match=r"method.weights: true .* models.model gives them 2. .* method.weights=false"
    ):
        FedKAD(weights=True).init([client()], several, RNG(0))
    state = FedKAD().init([client()], several, RNG(0))
    assert {name: tuple(value.shape) for name, value in state.tensors["global"].items()} == {
        MEANS: (CLASSES, 64),
        COUNTS: (CLASSES,),
    }


HETEROGENEOUS = "models.model=[{name: crnn_tiny, hidden: 8, filters: [4]}, {name: mlp, hidden: 5}]"


def test_different_networks_train_together_and_only_class_means_are_sent(tiny: Tiny) -> None:
    config = tiny(HETEROGENEOUS, "method.size=7", "train.cohort=1.0", "run.name=mixed", method="fedkad")
    outcome = run(config)
    state = final_state(outcome.run_dir)
    assert {name: tuple(t.shape) for name, t in state.tensors["global"].items()} == {MEANS: (3, 7), COUNTS: (3,)}
    rows = record.to_rows(record.read_rows(outcome.run_dir))
    traffic = {row.value for row in rows if row.metric in ("bytes_up", "bytes_down") and not row.client}
    assert traffic == {6 * 4 * (3 * 7 + 3)}  # six clients; a mean of seven values and a count for each class
    metrics = {(row.split, row.metric) for row in rows if row.client and row.phase == "evaluate"}
    for split in ("test", "validation"):
        assert {(split, "model/accuracy"), (split, "prototypes/accuracy")} <= metrics
    # Every client stores its own network.
    store, private = RunStore(outcome.run_dir), PrivateStore(outcome.run_dir / "private")
    private_states = [private.read(ref) for ref in store.load(store.latest() or "").private.values()]
    assert len(private_states) == 6
    assert len({tensors["model:model/output.weight"].numpy().tobytes() for tensors in private_states}) == 6
    assert len({tensors["model:model/output.weight"].shape for tensors in private_states}) == 2


def test_with_weights_there_is_a_global_model(tiny: Tiny) -> None:
    outcome = run(tiny("method.weights=true", "run.name=weights", method="fedkad"))
    assert {"test model/accuracy", "test prototypes/accuracy"} <= set(outcome.scores)
    # Without the distance term the method equals FedAvg bit for bit.
    a = train_federation(tiny("method.weights=true", "method.lam=0.0", "run.name=a", method="fedkad"))
    b = train_federation(tiny("run.name=b"))
    models = [name for name in b if name.startswith("server global model/")]
    assert_same_bits({name: a[name] for name in models}, {name: b[name] for name in models})
    c = train_federation(tiny("method.weights=true", "run.name=c", method="fedkad"))
    assert differ({name: c[name] for name in models}, {name: b[name] for name in models})


def test_invalid_networks_are_rejected_before_the_first_round(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="Headless has no 'embed'"):
        run(tiny(f"models.model={__file__}:Headless", "run.name=headless", method="fedkad"))
    with pytest.raises(ConfigError, match="one architecture"):
        run(tiny(HETEROGENEOUS, "method.weights=true", "run.name=several", method="fedkad"))
