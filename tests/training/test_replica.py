"""Networks shared by successive clients: a client's start depends only on received and stored tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.tensors import FlatTensors, OwnTensors
from raydfl.models.crnn import CRNN
from raydfl.training import replica as built_module
from raydfl.training.replica import Replica


class Normalised(nn.Module):
    """Network with floating buffers, a counter, a scalar and a buffer outside its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.table = torch.ones(2)
        self.notes = {"deep": [0]}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight


def make_networks() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {"plugin": CRNN(4, 3, (5,), hidden=6), "local": Normalised()}


def make_tied_networks() -> dict[str, nn.Module]:
    torch.manual_seed(4)
    return {"plugin": Tied(), "local": Normalised()}


def make_double_networks() -> dict[str, nn.Module]:
    torch.manual_seed(5)
    return {"plugin": nn.Linear(3, 4).double(), "local": nn.Linear(2, 2)}


def read_state(models: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{n}/{k}": v.clone() for n, m in models.items() for k, v in m.state_dict().items()}


def is_shared(name: str) -> bool:
    return name.startswith("plugin/")


def make_random_like(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in tensors.items()}


@pytest.mark.parametrize("make", [make_networks, make_tied_networks, make_double_networks])
def test_each_tensor_is_loaded_from_its_source(make: Callable[[], dict[str, nn.Module]]) -> None:
    """Shared tensors come from the first key with their name, private tensors from the client, and the rest from initial values."""
    fresh, models = read_state(make()), make()
    replica = Replica(models)
    floating = {name: value for name, value in fresh.items() if value.is_floating_point()}
    names = [name for name in floating if is_shared(name)]
    first = make_random_like({name: floating[name] for name in [*names[::2], "local/unknown"] if name in floating}, 1)
    second = make_random_like({name: floating[name] for name in reversed(names[:-1])}, 2)
    private = [name for name in floating if not is_shared(name)]
    private_values = make_random_like({name: floating[name] for name in private[1:]}, 3)
    broadcast = {"a": FlatTensors.from_tensors(first), "b": FlatTensors.from_tensors(second)}
    for _ in range(2):  # The second pass uses the recorded plan.
        spoil(models)
        replica.start(broadcast, private_values, is_shared)
        for name, value in read_state(models).items():
            expected = fresh[name]
            if name in private_values:
                expected = private_values[name]
            for source in (second, first):
                if name in source and not (make is make_tied_networks and name == "plugin/one.weight"):
                    expected = source[name]
            if make is make_tied_networks and "weight" in name and "plugin" in name:
                continue  # Two names share a tensor, so the last loaded value counts.
            torch.testing.assert_close(value, expected.to(value.dtype), rtol=0, atol=0, msg=name)


@torch.no_grad()
def spoil(models: dict[str, nn.Module]) -> None:
    for model in models.values():
        for value in (*model.state_dict().values(), *model.buffers()):
            value.add_(7)
        if isinstance(model, Normalised):
            model.table.add_(7)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            parameter.requires_grad_(False)
        model.eval()


@pytest.mark.parametrize("make", [make_networks, make_tied_networks])
def test_a_replica_starts_without_traces_of_the_last_client(make: Callable[[], dict[str, nn.Module]]) -> None:
    models = make()
    fresh = read_state(models)
    replica = Replica(models)
    for parameter in models["plugin"].parameters():
        parameter.requires_grad_(False)  # Simulate a user's code after the build.
    spoil(models)
    replica.start({}, {}, is_shared)
    for name, value in read_state(models).items():
        assert torch.equal(value, fresh[name]), name
    assert torch.equal(models["local"].hidden, torch.ones(2))  # type: ignore[arg-type]
    assert torch.equal(models["local"].table, torch.ones(2))  # type: ignore[arg-type]
    for model in models.values():
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        assert all(module.training for module in model.modules())


def test_a_frozen_parameter_is_frozen_at_every_start() -> None:
    models = make_networks()
    models["local"].scale.requires_grad_(False)  # type: ignore[union-attr, operator]
    replica = Replica(models)
    models["local"].scale.requires_grad_(True)  # type: ignore[union-attr, operator]
    replica.start({}, {}, is_shared)
    assert not models["local"].scale.requires_grad  # type: ignore[union-attr]


def test_replicas_compute_and_train_like_plain_networks() -> None:
    plain, models = make_networks(), make_networks()
    Replica(models)
    x = torch.randn(3, 8, 4)
    for trained in (plain, models):
        optimiser = torch.optim.SGD(trained["plugin"].parameters(), lr=0.1)
        trained["plugin"].eval()(x).square().sum().backward()
        optimiser.step()
    for expected, parameter in zip(plain["plugin"].parameters(), models["plugin"].parameters(), strict=True):
        assert torch.equal(expected, parameter)


def do_nothing(*_: object) -> None:
    """Do nothing: only the presence of a hook counts."""


def find_linear(models: dict[str, nn.Module]) -> nn.Linear:
    return next(layer for layer in models["local"].modules() if isinstance(layer, nn.Linear))


CHANGES: dict[str, Callable[[nn.Linear, dict[str, nn.Module]], object]] = {
    "layer": lambda layer, models: models["local"].layers.__setitem__(0, nn.Linear(3, 4)),  # type: ignore[union-attr, operator]
    "parameter": lambda layer, models: setattr(layer, "weight", nn.Parameter(layer.weight.clone())),
    "memory": lambda layer, models: setattr(layer.weight, "data", layer.weight.data.clone()),
    "shape": lambda layer, models: setattr(layer.weight, "data", layer.weight.data.view(-1)),
    "buffer": lambda layer, models: setattr(models["local"].layers[1], "running_mean", torch.zeros(4)),  # type: ignore[index, union-attr, arg-type]
    "added": lambda layer, models: layer.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "removed": lambda layer, models: setattr(layer, "bias", None),
    "child": lambda layer, models: layer.add_module("more", nn.Identity()),
    "entry": lambda layer, models: models.update(plugin=nn.Linear(3, 3)),
    "more entries": lambda layer, models: models.update(more=nn.Linear(3, 3)),
    "an entry less": lambda layer, models: models.pop("plugin"),
    "class": lambda layer, models: setattr(layer, "__class__", nn.Identity),
    "attribute": lambda layer, models: setattr(models["local"], "factor", 2.0),
    "entry of an attribute": lambda layer, models: models["local"].notes["deep"].append(1),  # type: ignore[index, union-attr, operator]
    "method": lambda layer, models: setattr(layer, "forward", do_nothing),
    "attribute of a parameter": lambda layer, models: setattr(layer.weight, "importance", 2.0),
    "forward hook": lambda layer, models: layer.register_forward_hook(do_nothing),
    "forward pre-hook": lambda layer, models: layer.register_forward_pre_hook(do_nothing),
    "backward hook": lambda layer, models: layer.register_full_backward_hook(do_nothing),
    "backward pre-hook": lambda layer, models: layer.register_full_backward_pre_hook(do_nothing),
    "state-dict hook": lambda layer, models: layer.register_state_dict_post_hook(do_nothing),
    "state-dict pre-hook": lambda layer, models: layer.register_state_dict_pre_hook(do_nothing),
    "load hook": lambda layer, models: layer.register_load_state_dict_post_hook(do_nothing),
    "parameter's hook": lambda layer, models: layer.weight.register_hook(do_nothing),
    "hook after accumulation": lambda layer, models: layer.weight.register_post_accumulate_grad_hook(do_nothing),
}


@pytest.mark.parametrize("change", ["nothing", *CHANGES])
@pytest.mark.parametrize("make", [make_networks, make_tied_networks])
def test_any_change_of_a_network_is_detected(change: str, make: Callable[[], dict[str, nn.Module]]) -> None:
    models = make()
    replica = Replica(models)
    replica.start({}, {}, is_shared)
    assert replica.intact
    CHANGES.get(change, lambda *_: None)(find_linear(models), models)
    assert replica.intact == (change == "nothing")


def test_ordinary_training_leaves_a_replica_intact() -> None:
    """A trained and evaluated network needs no new build."""
    models = make_networks()
    replica = Replica(models)
    x = torch.randn(3, 8, 4)
    for _ in range(2):
        replica.start({}, {}, is_shared)
        models["plugin"](x).square().sum().backward()
        torch.optim.SGD(models["plugin"].parameters(), lr=0.1).step()
        models["local"].layers(torch.randn(5, 3))  # type: ignore[union-attr, operator]
        models["plugin"].eval()
        torch.func.functional_call(models["plugin"], {k: v + 1 for k, v in models["plugin"].named_parameters()}, (x,))
        models["plugin"].requires_grad_(False)
        assert replica.intact


@pytest.mark.parametrize("make", [make_networks, make_tied_networks])
def test_a_tensor_with_a_different_shape_is_rejected(make: Callable[[], dict[str, nn.Module]]) -> None:
    """Check larger tensors, equal numbers of elements and broadcastable shapes, both received and stored."""
    models = make()
    replica = Replica(models)
    names = [name for name, value in read_state(models).items() if value.is_floating_point() and value.dim() == 2]
    for name in (next(filter(is_shared, names)), next(name for name in names if not is_shared(name))):
        rows, columns = read_state(models)[name].shape
        for shape in ((2 * rows, columns), (rows * columns, 1), (1, columns), (1,)):
            wrong = {name: torch.ones(shape)}
            received, private = ({"global": FlatTensors.from_tensors(wrong)}, {}) if is_shared(name) else ({}, wrong)
            with pytest.raises(ConfigError) as error:
                replica.start(received, private, is_shared, "client 'a', round 3")
            model, _, tensor = name.partition("/")
            for part in ("client 'a', round 3", repr(model), repr(tensor), str(list(shape)), str([rows, columns])):
                assert part in str(error.value)


def test_floating_tensors_share_one_vector_where_possible() -> None:
    """Flattening then copies one vector, with the bits of many copies."""
    for make, possible in ((make_networks, True), (make_tied_networks, False), (make_double_networks, False)):
        models = make()
        tensors = {name: value for name, value in read_state(models).items() if value.is_floating_point()}
        replica = Replica(models)
        live = {f"{n}/{k}": v for n, m in models.items() for k, v in m.state_dict().items() if v.is_floating_point()}
        assert (replica._vector is not None) == possible
        flat = FlatTensors.from_tensors(live)
        assert flat.vector.tobytes() == FlatTensors.from_tensors(tensors).vector.tobytes()
        live[next(iter(live))].zero_()
        assert flat.vector.tobytes() == FlatTensors.from_tensors(tensors).vector.tobytes()  # flat is a copy
        assert isinstance(built_module._Vector.from_models(models), built_module._Vector) == possible


def test_own_tensors_are_copied_on_access() -> None:
    flat = FlatTensors.from_tensors({"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7.0)})
    flat.vector.flags.writeable = False
    copies = OwnTensors(flat, torch.device("cpu"))
    assert list(copies) == ["a", "b"]
    assert len(copies) == 2
    assert "a" in copies
    assert "c" not in copies
    assert torch.equal(copies["a"], flat["a"])
    assert copies["b"].shape == ()
    copies["a"].zero_()
    assert copies["a"] is copies["a"]
    assert not copies["a"].any()
    assert torch.equal(flat["a"], torch.arange(6.0).view(2, 3))
    with pytest.raises(KeyError, match="c"):
        copies["c"]


@pytest.mark.parametrize(
    "kind", ["neighbours", "swapped", "gap", "overlap", "strided", "integers", "storages", "empty"]
)
def test_flattening_handles_any_memory_layout(kind: str) -> None:
    """The vector is the concatenation of the tensors for every memory layout."""
    block = torch.randn(40)
    tensors = {
        "neighbours": [block[3:9].view(2, 3), block[9:10].view(()), block[10:30]],
        "swapped": [block[9:12], block[3:9]],
        "gap": [block[3:9], block[10:12]],
        "overlap": [block[3:9], block[8:12]],
        "strided": [block[0:6].view(2, 3).t(), block[6:9]],
        "integers": [block[0:6].to(torch.int32), block[6:9]],
        "storages": [block[0:6], copy.deepcopy(block)[6:9]],
        "empty": [block[0:6], block[6:6], block[6:9]],
    }[kind]
    flat = FlatTensors.from_tensors({str(i): tensor for i, tensor in enumerate(tensors)})
    assert np.array_equal(flat.vector, np.concatenate([tensor.float().numpy().ravel() for tensor in tensors]))
    block.zero_()
    assert flat.vector.any()
