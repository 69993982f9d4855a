"""Structure of networks, recorded once: it equals a fresh inspection, and is used only without a user's code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import known
from torch import nn

from raydfl.engine.config import Config
from raydfl.models.crnn import CRNN
from raydfl.testing import assert_same_bits, read_tensors, start_server
from raydfl.training.networks import Networks
from raydfl.training.replica import Replica


class UsersLayer(nn.Module):
    """A layer of a user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)


class WithExtraEntry(nn.Linear):
    """A layer with PyTorch's module name and an additional entry of its state dict."""

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}further"] = torch.zeros(1)


WithExtraEntry.__module__ = "torch.nn"


def test_recorded_structures_equal_pytorchs() -> None:
    models: dict[str, nn.Module] = {
        "a": CRNN(4, 3, (5,), hidden=6),
        "b": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    }
    networks = Networks.from_models(models, frozenset({"b/0.bias"}))
    assert networks is not None
    for name, model in models.items():
        assert networks.parameters[name] == {f"{name}/{key}": value for key, value in model.named_parameters()}
        state = model.state_dict(keep_vars=True)
        expected = [f"{name}/{key}" for key, value in state.items() if value.is_floating_point()]
        assert list(networks.floating[name]) == [key for key in expected if key != "b/0.bias"]
        assert all(value is state[key.partition("/")[2]] for key, value in networks.floating[name].items())
    assert list(networks.layers) == [layer for model in models.values() for layer in model.modules()]


@pytest.mark.parametrize("make", [UsersLayer, lambda: nn.Sequential(UsersLayer()), lambda: WithExtraEntry(2, 2)])
def test_networks_of_users_are_not_recorded(make: Callable[[], nn.Module]) -> None:
    assert Networks.from_models({"model": make()}, frozenset()) is None
    assert Replica({"model": make()}, users_code=False).networks is None
    assert Replica({"model": nn.Linear(2, 2)}).networks is None


@pytest.mark.parametrize("method", ["fedprox", "fedbabu", "moon", "hermes"])
def test_recorded_structures_leave_the_bits_of_a_run_unchanged(tiny: Callable[..., Config], method: str) -> None:
    """Run without the recorded structure, with frozen layers, teachers, masks and private state."""
    config = tiny(method=method)
    server = start_server(config)
    server._federation.pool.workers[""].networks._users_code = True  # type: ignore[attr-defined]
    while server.round_index < config.train.rounds:
        server.round()
    replicas = server._federation.pool.workers[""].networks.replicas.values()  # type: ignore[attr-defined]
    assert replicas
    assert all(replica.networks is None for replica in replicas)
    server.close()
    assert_same_bits(read_tensors(Path(config.run.dir) / "tiny"), known(tiny(method=method)))
