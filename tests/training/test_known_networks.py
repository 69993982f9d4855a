"""What networks are made of, found out once: the same as looked at each time, and only where no user's code works with them."""

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


class Own(nn.Module):
    """A user's layer: its module is none of raydfl's or PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)


class Told(nn.Linear):
    """One of PyTorch's by its module, with a tensor that only its state dict knows."""

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}further"] = torch.zeros(1)


Told.__module__ = "torch.nn"


def test_they_are_what_pytorch_says() -> None:
    models: dict[str, nn.Module] = {
        "a": CRNN(4, 3, (5,), hidden=6),
        "b": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    }
    found = Networks.from_models(models, frozenset({"b/0.bias"}))
    assert found is not None
    for name, model in models.items():
        assert found.parameters[name] == {f"{name}/{key}": value for key, value in model.named_parameters()}
        state = model.state_dict(keep_vars=True)
        expected = [f"{name}/{key}" for key, value in state.items() if value.is_floating_point()]
        assert list(found.floating[name]) == [key for key in expected if key != "b/0.bias"]
        assert all(value is state[key.partition("/")[2]] for key, value in found.floating[name].items())
    assert list(found.layers) == [layer for model in models.values() for layer in model.modules()]


@pytest.mark.parametrize("make", [Own, lambda: nn.Sequential(Own()), lambda: Told(2, 2)])
def test_networks_that_have_to_be_looked_at(make: Callable[[], nn.Module]) -> None:
    assert Networks.from_models({"model": make()}, frozenset()) is None
    assert Replica({"model": make()}, users_code=False).networks is None
    assert Replica({"model": nn.Linear(2, 2)}).networks is None


@pytest.mark.parametrize("method", ["fedprox", "fedbabu", "moon", "hermes"])
def test_a_run_is_the_same_to_the_bit_without(tiny: Callable[..., Config], method: str) -> None:
    """Frozen parts, teachers, masks, private state."""
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
