"""Methods on a network with a single parameter and the loss (v - x)^2 / 2, where each step can be checked by hand.

A step with learning rate 1/2 moves v halfway to x.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import known
from torch import Tensor, nn

from raydfl.core.cuts import Cut
from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, Client, State, Update
from raydfl.engine.config import Config
from raydfl.methods import Method
from raydfl.methods._prototypes import COUNTS, MEANS
from raydfl.methods.fedala import FedALA
from raydfl.methods.fedbn import FedBN
from raydfl.methods.feddc import FedDC
from raydfl.methods.feddyn import FedDyn
from raydfl.methods.fednova import FedNova
from raydfl.methods.fedproto import FedProto
from raydfl.methods.fedrep import FedRep
from raydfl.methods.heterofl import HeteroFL
from raydfl.methods.perfedavg import PerFedAvg
from raydfl.methods.pfedme import PFedMe
from raydfl.objectives import Classify
from raydfl.testing import make_batch, train_federation
from raydfl.training import Step, TrainSettings
from raydfl.training.settings import OptimiserSettings

Tiny = Callable[..., Config]


class Number(nn.Module):
    """Network with the sum of its parameters as output."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("v",):
            self.register_parameter(name, nn.Parameter(torch.zeros(())))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return sum(self.parameters()) + torch.zeros_like(x)


@dataclasses.dataclass(frozen=True)
class Halves(Classify):
    """The mean of (v - x)^2 / 2."""

    def loss(self, step: Step, model: str, batch: Batch) -> Tensor:
        return batch.mean((step.models[model](batch.x) - batch.x).square() / 2)


class Data:
    """A batch for each list of numbers."""

    def __init__(self, batches: Sequence[Sequence[float]]) -> None:
        self._batches = [make_batch(torch.tensor(x), torch.zeros(len(x), dtype=torch.long)) for x in batches]

    def __len__(self) -> int:
        return sum(len(batch.y) for batch in self._batches)

    def batches(self, *_: Any) -> Iterator[Batch]:
        return iter(self._batches)


@dataclasses.dataclass
class OneClient:
    train: Data


CLIENT = Client("anna", 0, 1)


def make_initial_state(method: Method, network: Callable[[], nn.Module] = Number) -> State:
    """Return the initial state of a federation of two clients."""
    object.__setattr__(method, "objective", Halves())
    networks = {name: network() for name in method.models}
    return method.init([CLIENT, CLIENT], [networks], np.random.default_rng(0))


def train(
    method: Method,
    state: State,
    *batches: Sequence[float],
    after: Step | None = None,
    network: Callable[[], nn.Module] = Number,
) -> tuple[Update, Step]:
    """Let a client train with rate 1/2 on batches of numbers, after an earlier participation."""
    step = Step(
        client=CLIENT,
        models={name: network() for name in method.models} if after is None else after.models,
        received={"global": dict(state.tensors["global"])},
        data=OneClient(Data(batches)),  # type: ignore[arg-type]
        state={} if after is None else after.state,
        rng=np.random.default_rng(0),
        device=torch.device("cpu"),
        training=TrainSettings(optimiser=OptimiserSettings(lr=0.5)),
        phase="train",
        round_index=state.round_index,
        options={"mean_examples": 1.0},
        shared=method.shared,
    )
    step.load("global")
    update = method.local(step)
    return dataclasses.replace(update, tensors={name: value.clone() for name, value in update.tensors.items()}), step


def aggregate(method: Method, state: State, *updates: Update) -> State:
    new, _ = method.aggregate(state, updates, np.random.default_rng(0))
    return dataclasses.replace(new, round_index=state.round_index + 1)


def get_value(tensors: Any, name: str = "model/v") -> float:
    return float(tensors[name])


def test_feddyn() -> None:
    """Check w = 0 and x = 4: w_k = 2 with the gradient g_k = -2. Half of the clients trained, so w = 2 + 2 / 2 = 3."""
    method = FedDyn(alpha=1.0)
    first = make_initial_state(method)
    update, step = train(method, first, [4.0])
    second = aggregate(method, first, update)
    assert (get_value(update.tensors), get_value(second.tensors["global"])) == (2.0, 3.0)
    # From 3 the gradient is (3 - 4) - g_k = 1.
    update, _ = train(method, second, [4.0], after=step)
    assert get_value(update.tensors) == 2.5


def test_feddc() -> None:
    """Check w = 0 and x = 4: w_i = 2, the drift is 2, and 4 is sent. Half of the clients trained, so g = -4 / 2."""
    method = FedDC(alpha=1.0)
    first = make_initial_state(method)
    update, step = train(method, first, [4.0])
    second = aggregate(method, first, update)
    assert (get_value(update.tensors), get_value(second.tensors["global"], "control/model/v")) == (4.0, -2.0)
    # From 4: (4 - 4) + (4 - (4 - 2)) + (-2 + 4) = 4, so w_i = 2, the drift is 2 - 2 = 0, and 2 is sent.
    update, _ = train(method, second, [4.0], after=step)
    assert get_value(update.tensors) == 2.0


def test_fednova() -> None:
    """Check 1 step to 2 and 3 steps to 4, 6 and 7: tau_eff = 2, w = 2 (2 / 1 + 7 / 3) / 2 = 13 / 3."""
    method = FedNova()
    state = make_initial_state(method)
    one, three = train(method, state, [4.0])[0], train(method, state, [8.0], [8.0], [8.0])[0]
    assert (get_value(one.tensors), get_value(three.tensors)) == (2.0, pytest.approx(7 / 3))
    assert get_value(aggregate(method, state, one, three).tensors["global"]) == pytest.approx(13 / 3)
    # A client without steps returns the received model.
    assert get_value(aggregate(method, state, train(method, state)[0]).tensors["global"]) == 0.0


def test_fedrep() -> None:
    """Check body 0, head 0 and x = 4: the head moves to 2, then the body to 1; the head stays."""
    method, network = FedRep(personal=("model/head",), head_epochs=1), lambda: Number("body", "head")
    update, step = train(method, make_initial_state(method, network), [4.0], network=network)
    assert {name: float(value) for name, value in update.tensors.items()} == {"model/body": 1.0}
    assert get_value(step.floating_state(), "model/head") == 2.0


def test_fedbn() -> None:
    """Body and norm move from 0 to 2. The client sends only the body."""
    method, network = FedBN(), lambda: Number("body", "norm")
    update, step = train(method, make_initial_state(method, network), [4.0], network=network)
    assert {name: float(value) for name, value in update.tensors.items()} == {"model/body": 2.0}
    assert get_value(step.floating_state(), "model/norm") == 2.0


def test_fedbn_rejects_normalisation_layers_outside_its_setting() -> None:
    for network, layers in (
        (Number, ("norm",)),
        (lambda: nn.Sequential(nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1)), ("norm", "0.")),
    ):
        with pytest.raises(ConfigError, match=r"method\.layers: no word of"):
            make_initial_state(FedBN(layers=layers), network)


def test_pfedme() -> None:
    """Theta moves from 0 to 2 for x = 4, and w follows by 1/2 (2 - 0) = 1. The server moves halfway."""
    method = PFedMe(lam=1.0, personal_steps=1, beta=0.5)
    state = make_initial_state(method)
    update, step = train(method, state, [4.0])
    assert (get_value(step.floating_state(), "personal/v"), get_value(update.tensors)) == (2.0, 1.0)
    assert get_value(aggregate(method, state, update).tensors["global"]) == 0.5


def test_perfedavg() -> None:
    """Check v = 0 + 1/2 (4 - 0) = 2, where the gradient for x = 8 is -6. So w = 0 + 3, and then 3 + 1/2 (8 - 3.5)."""
    method = PerFedAvg(alpha=0.5)
    assert get_value(train(method, make_initial_state(method), [4.0, 8.0])[0].tensors) == 3.0
    assert get_value(train(method, make_initial_state(method), [4.0, 8.0], [4.0, 8.0])[0].tensors) == 5.25


def test_fedala() -> None:
    """The loss for x = 2 is least halfway from 0 to 4: the gradient for W is (4 - 2) 4 = 8, so W = 1 - 8 / 16."""
    method = FedALA(layers=("model/v",), eta=1 / 16, start_epochs=1)
    first = make_initial_state(method)
    update, step = train(method, first, [0.0])
    assert get_value(update.tensors) == 0.0
    second = dataclasses.replace(first, tensors={"global": {"model/v": torch.tensor(4.0)}})
    update, step = train(method, second, [2.0], after=step)
    assert (get_value(step.floating_state(), "weights/v"), get_value(update.tensors)) == (0.5, 2.0)
    # Later the weight is clipped to 0, so the client starts from its last model, 2.
    update, _ = train(
        method, dataclasses.replace(first, tensors={"global": {"model/v": torch.tensor(9.0)}}), [-9.0], after=step
    )
    assert get_value(update.tensors) == 2.0 + (-9 - 2) / 2


def test_fedproto() -> None:
    """Check features (1, 3) and the class mean (0, 1): lam times (1 + 4) / 2 on top of the cross-entropy log 2."""

    class Identity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(2, 2)
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)

        def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
            return x

    method, batch = FedProto(lam=2.0), make_batch(torch.tensor([[1.0, 3.0]]), torch.tensor([0]))
    _, step = train(FedNova(), make_initial_state(FedNova()))
    step.models = {"model": Identity()}
    step.received = {"global": {MEANS: torch.tensor([[0.0, 1.0], [9.0, 9.0]]), COUNTS: torch.tensor([1.0, 0.0])}}
    assert method.loss(step, batch).item() == pytest.approx(math.log(2) + 5)
    unknown = dataclasses.replace(batch, y=torch.tensor([1]))
    assert method.loss(step, unknown).item() == pytest.approx(math.log(2))


def test_heterofl() -> None:
    """A client with 2 of 4 channels sends 1, and a client with all channels sends 3: the mean is (2, 2, 3, 3)."""
    method = HeteroFL()
    state = State(5, {"global": {"model/v": torch.zeros(4)}})
    first = method.chosen(state, CLIENT, "v", 4, 2)
    narrow = Update({"model/v": torch.ones(2)}, 1.0, client_id="a", cuts={"model/v": Cut([first])})
    wide = Update({"model/v": torch.full((4,), 3.0)}, 1.0, client_id="b")
    assert aggregate(method, state, narrow, wide).tensors["global"]["model/v"].tolist() == [2.0, 2.0, 3.0, 3.0]


def test_feddc_equals_fedapta_without_pruning_and_groups(tiny: Tiny) -> None:
    common = ["train.rounds=2", "evaluate.every=9", "method.rule=uniform_mean"]
    a = known(tiny(*common, method="feddc"))
    b = train_federation(tiny(*common, "method.ratio=0.0", "method.tasks=none", "run.name=b", method="fedapta"))
    names = [name for name in a if name.startswith("server global ")]
    for name in names:
        feddc, fedapta = (np.frombuffer(tensors[name], np.float32) for tensors in (a, b))
        np.testing.assert_allclose(feddc, fedapta, rtol=1e-4, atol=1e-6)
