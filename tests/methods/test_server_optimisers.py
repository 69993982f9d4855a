"""Server optimisers against PyTorch's and against the papers' formulas in float64, over several rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydfl.core.types import Client, State, Update
from raydfl.methods._server_optimiser import ServerOptimiser
from raydfl.methods.fedadagrad import FedAdagrad
from raydfl.methods.fedadam import FedAdam
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedavgm import FedAvgM
from raydfl.methods.fedopt import FedOpt
from raydfl.methods.fedyogi import FedYogi

CLIENTS = [Client("a", 0, 10), Client("b", 1, 30)]
RNG = np.random.default_rng
ROUNDS = 6
ALL: list[ServerOptimiser] = [FedAdam(), FedYogi(), FedAdagrad(), FedAvgM(), FedOpt()]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def simulate_rounds(
    method: ServerOptimiser, seed: int = 5, **weights: float
) -> tuple[list[State], list[list[np.ndarray]]]:
    """Return the states before and after each round, and the biases of its clients, drawn around the server's bias."""
    state = method.init(CLIENTS, [{"model": make_network()}], RNG(0))
    states, biases = [state], []
    rng = RNG(seed)
    for _ in range(ROUNDS):
        now = state.tensors["global"]["model/bias"].numpy()
        # Use changes of very different sizes, so that the second moment rises and falls.
        client_biases = [now + rng.normal(size=now.shape) * 10.0 ** rng.uniform(-3, 0) for _ in CLIENTS]
        client_biases = [value.astype(np.float32) for value in client_biases]
        state, _ = method.aggregate(state, iter(make_updates(client_biases)), RNG(0))
        states.append(state)
        biases.append(client_biases)
    return states, biases


def make_updates(biases: list[np.ndarray]) -> list[Update]:
    return [
        Update({"model/bias": torch.from_numpy(bias)}, float(client.num_examples), client_id=client.id)
        for client, bias in zip(CLIENTS, biases, strict=True)
    ]


def step_adam(w: np.ndarray, delta: np.ndarray, kept: dict[str, Any]) -> np.ndarray:
    kept["m"] = 0.8 * kept.get("m", 0.0) + 0.2 * delta
    kept["v"] = 0.95 * kept.get("v", 0.01**2) + 0.05 * delta**2
    return w + 0.05 * kept["m"] / (np.sqrt(kept["v"]) + 0.01)


def step_yogi(w: np.ndarray, delta: np.ndarray, kept: dict[str, Any]) -> np.ndarray:
    v = kept.get("v", np.full_like(w, 0.01**2))
    kept["m"] = 0.8 * kept.get("m", 0.0) + 0.2 * delta
    kept["v"] = np.array([x - 0.05 * d**2 if x > d**2 else x + 0.05 * d**2 for x, d in zip(v, delta, strict=True)])
    return w + 0.05 * kept["m"] / (np.sqrt(kept["v"]) + 0.01)


def step_adagrad(w: np.ndarray, delta: np.ndarray, kept: dict[str, Any]) -> np.ndarray:
    kept["m"] = 0.3 * kept.get("m", 0.0) + 0.7 * delta
    kept["v"] = kept.get("v", 0.01**2) + delta**2
    return w + 0.05 * kept["m"] / (np.sqrt(kept["v"]) + 0.01)


def step_momentum(w: np.ndarray, delta: np.ndarray, kept: dict[str, Any]) -> np.ndarray:
    kept["velocity"] = 0.7 * kept.get("velocity", 0.0) + delta
    return w + 0.4 * kept["velocity"]


FORMULAS: list[tuple[ServerOptimiser, Callable[..., np.ndarray]]] = [
    (FedAdam(server_lr=0.05, beta1=0.8, beta2=0.95, tau=0.01), step_adam),
    (FedYogi(server_lr=0.05, beta1=0.8, beta2=0.95, tau=0.01), step_yogi),
    (FedAdagrad(server_lr=0.05, beta1=0.3, tau=0.01), step_adagrad),
    (FedAvgM(server_lr=0.4, momentum=0.7), step_momentum),
]


@pytest.mark.parametrize(("method", "formula"), FORMULAS, ids=lambda value: type(value).__name__)
def test_several_rounds_follow_the_papers_formulas(method: ServerOptimiser, formula: Callable[..., np.ndarray]) -> None:
    states, biases = simulate_rounds(method)
    w = states[0].tensors["global"]["model/bias"].numpy().astype(np.float64)
    moments: dict[str, Any] = {}
    for state, pair in zip(states[1:], biases, strict=True):
        delta = (10.0 * pair[0] + 30.0 * pair[1]) / 40.0 - w
        w = formula(w, delta, moments)
        np.testing.assert_allclose(state.tensors["global"]["model/bias"].numpy(), w, rtol=1e-4, atol=1e-6)
        for name, value in moments.items():
            bias = state.tensors["moments"][f"{name}/model/bias"].numpy()
            np.testing.assert_allclose(bias, value, rtol=1e-3, atol=1e-7)


def test_yogis_second_moment_rises_falls_and_stays_positive() -> None:
    states, _ = simulate_rounds(FedYogi(beta2=0.5), seed=1)
    v = np.stack([state.tensors["moments"]["v/model/bias"].numpy() for state in states])
    steps = np.diff(v, axis=0)
    assert (steps > 0).any()
    assert (steps < 0).any()
    assert (v > 0).all()


@pytest.mark.parametrize("options", [{}, {"server_lr": 0.03, "beta1": 0.5, "beta2": 0.7, "eps": 0.1}], ids=str)
def test_fedopt_equals_torchs_adam_on_the_negative_mean_change(options: dict[str, float]) -> None:
    method = FedOpt(**options)
    states, biases = simulate_rounds(method)
    bias = nn.Parameter(states[0].tensors["global"]["model/bias"].clone())
    reference = torch.optim.Adam(
        [bias], lr=method.server_lr, betas=(method.beta1, method.beta2), eps=method.eps, foreach=False
    )
    for state, pair in zip(states[1:], biases, strict=True):
        bias.grad = bias.detach() - torch.from_numpy(np.mean(pair, axis=0, dtype=np.float64).astype(np.float32))
        reference.step()
        torch.testing.assert_close(state.tensors["global"]["model/bias"], bias.detach(), rtol=1e-5, atol=1e-6)
    assert states[-1].extra["server_steps"] == ROUNDS
    assert not torch.equal(states[-1].tensors["global"]["model/bias"], states[0].tensors["global"]["model/bias"])


def test_fedopts_first_step_has_the_size_of_the_learning_rate() -> None:
    """Check the closed form: with bias-corrected moments, the first step m / sqrt(v) is the sign of the change."""
    states, biases = simulate_rounds(FedOpt(server_lr=0.02))
    before = states[0].tensors["global"]["model/bias"].numpy()
    step = states[1].tensors["global"]["model/bias"].numpy() - before
    np.testing.assert_allclose(step, 0.02 * np.sign(np.mean(biases[0], axis=0) - before), rtol=1e-3)


def test_momentum_0_equals_fedavg_to_the_bit() -> None:
    neutral, plain = FedAvgM(momentum=0.0, server_lr=1.0), FedAvg()
    state = neutral.init(CLIENTS, [{"model": make_network()}], RNG(0))
    rng = RNG(3)
    for _ in range(ROUNDS):
        biases = [rng.normal(size=2).astype(np.float32) * 10.0 ** rng.integers(-9, 9) for _ in CLIENTS]
        expected, _ = plain.aggregate(state, iter(make_updates(biases)), RNG(0))
        state, _ = neutral.aggregate(state, iter(make_updates(biases)), RNG(0))
        assert torch.equal(state.tensors["global"]["model/bias"], expected.tensors["global"]["model/bias"])


@pytest.mark.parametrize("method", ALL, ids=lambda method: type(method).__name__)
def test_buffers_are_averaged(method: ServerOptimiser) -> None:
    state = method.init(CLIENTS, [{"model": nn.Sequential(nn.BatchNorm1d(2))}], RNG(0))
    names = set(method.moments())
    assert {key.partition("/")[0] for key in state.tensors["moments"]} == names
    assert {key.partition("/")[2] for key in state.tensors["moments"]} == {"model/0.weight", "model/0.bias"}
    assert "model/0.num_batches_tracked" not in state.tensors["global"]  # counters are not sent
    tensors = {name: torch.full_like(value, 7.0) for name, value in state.tensors["global"].items()}
    new, _ = method.aggregate(state, iter([Update(tensors, 1.0, client_id="a")]), RNG(0))
    assert torch.equal(new.tensors["global"]["model/0.running_mean"], torch.full((2,), 7.0))


class Tied(nn.Module):
    """Network with two layers of a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("method", ALL, ids=lambda method: type(method).__name__)
def test_both_names_of_a_tied_weight_stay_equal(method: ServerOptimiser) -> None:
    """Check both names: a client loads them in turn, so the second name would win if their values differed."""
    state = method.init(CLIENTS, [{"model": Tied()}], RNG(0))
    tensors = {name: value + 0.5 for name, value in state.tensors["global"].items()}
    for _ in range(2):
        state, _ = method.aggregate(state, iter([Update(tensors, 1.0, client_id="a")]), RNG(0))
        assert torch.equal(
            state.tensors["global"]["model/first.weight"], state.tensors["global"]["model/second.weight"]
        )


@pytest.mark.parametrize("method", ALL, ids=lambda method: type(method).__name__)
def test_a_round_without_updates_leaves_the_state_unchanged(method: ServerOptimiser) -> None:
    """Momentum has no effect, and Adam's step count stays."""
    states, _ = simulate_rounds(method)
    after, report = method.aggregate(states[-1], iter(()), RNG(0))
    assert report == {}
    assert after.extra == states[-1].extra
    for key, tensors in states[-1].tensors.items():
        assert all(torch.equal(after.tensors[key][name], value) for name, value in tensors.items())


@pytest.mark.parametrize("method", ALL, ids=lambda method: type(method).__name__)
def test_rounds_without_a_part_leave_its_tensors_unchanged(method: ServerOptimiser) -> None:
    """Train part a in every round and part b in every second round."""
    alone = method.init(CLIENTS, [{"model": make_network()}], RNG(0))
    tensors = {
        key: {f"{n}@{part}": t for n, t in group.items() for part in "ab"} for key, group in alone.tensors.items()
    }
    both, rng = dataclasses.replace(alone, tensors=tensors), RNG(5)
    for number in range(4):
        bias = torch.from_numpy(rng.normal(size=2).astype(np.float32))
        parts = "ab" if number % 2 else "a"
        both, _ = method.aggregate(both, iter([Update({f"model/bias@{part}": bias}, 1.0) for part in parts]), RNG(0))
        if "b" in parts:
            alone, _ = method.aggregate(alone, iter([Update({"model/bias": bias}, 1.0)]), RNG(0))
        assert torch.equal(both.tensors["global"]["model/bias@b"], alone.tensors["global"]["model/bias"])


def test_a_state_without_a_step_count_is_resumed() -> None:
    states, biases = simulate_rounds(FedAdam())
    old = dataclasses.replace(states[2], extra={})
    new, _ = FedAdam().aggregate(old, iter(make_updates(biases[2])), RNG(0))
    assert torch.equal(new.tensors["global"]["model/bias"], states[3].tensors["global"]["model/bias"])
