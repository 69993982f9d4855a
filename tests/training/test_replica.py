"""Networks that serve one client after another: what the next client finds depends on what was sent and kept alone."""

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
    """Floating buffers, a counter, a scalar and a buffer that is not in the state dict."""

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


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {"plugin": CRNN(4, 3, (5,), hidden=6), "local": Normalised()}


def tied() -> dict[str, nn.Module]:
    torch.manual_seed(4)
    return {"plugin": Tied(), "local": Normalised()}


def double() -> dict[str, nn.Module]:
    torch.manual_seed(5)
    return {"plugin": nn.Linear(3, 4).double(), "local": nn.Linear(2, 2)}


def state(models: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{n}/{k}": v.clone() for n, m in models.items() for k, v in m.state_dict().items()}


def shared(name: str) -> bool:
    return name.startswith("plugin/")


def random_like(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in tensors.items()}


@pytest.mark.parametrize("make", [networks, tied, double])
def test_each_tensor_comes_from_where_it_belongs(make: Callable[[], dict[str, nn.Module]]) -> None:
    """The first key that has a shared tensor, what the client kept for a private one, else the initial value."""
    fresh, models = state(make()), make()
    networks = Replica(models)
    floating = {name: value for name, value in fresh.items() if value.is_floating_point()}
    names = [name for name in floating if shared(name)]
    first = random_like({name: floating[name] for name in [*names[::2], "local/unknown"] if name in floating}, 1)
    second = random_like({name: floating[name] for name in reversed(names[:-1])}, 2)
    private = [name for name in floating if not shared(name)]
    kept = random_like({name: floating[name] for name in private[1:]}, 3)
    received = {"a": FlatTensors.from_tensors(first), "b": FlatTensors.from_tensors(second)}
    for _ in range(2):  # the second time from a plan that is remembered
        spoil(models)
        networks.start(received, kept, shared)
        for name, value in state(models).items():
            expected = fresh[name]
            if name in kept:
                expected = kept[name]
            for sent in (second, first):
                if name in sent and not (make is tied and name == "plugin/one.weight"):
                    expected = sent[name]
            if make is tied and "weight" in name and "plugin" in name:
                continue  # one tensor under two names: the last one loaded counts
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


@pytest.mark.parametrize("make", [networks, tied])
def test_nothing_of_the_last_client_is_left(make: Callable[[], dict[str, nn.Module]]) -> None:
    models = make()
    fresh = state(models)
    built = Replica(models)
    for parameter in models["plugin"].parameters():
        parameter.requires_grad_(False)  # after it was built: somebody's code
    spoil(models)
    built.start({}, {}, shared)
    for name, value in state(models).items():
        assert torch.equal(value, fresh[name]), name
    assert torch.equal(models["local"].hidden, torch.ones(2))  # type: ignore[arg-type]
    assert torch.equal(models["local"].table, torch.ones(2))  # type: ignore[arg-type]
    for model in models.values():
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        assert all(module.training for module in model.modules())


def test_a_frozen_parameter_is_frozen_again() -> None:
    models = networks()
    models["local"].scale.requires_grad_(False)  # type: ignore[union-attr, operator]
    built = Replica(models)
    models["local"].scale.requires_grad_(True)  # type: ignore[union-attr, operator]
    built.start({}, {}, shared)
    assert not models["local"].scale.requires_grad  # type: ignore[union-attr]


def test_they_compute_and_train_as_before() -> None:
    plain, models = networks(), networks()
    Replica(models)
    x = torch.randn(3, 8, 4)
    for each in (plain, models):
        optimiser = torch.optim.SGD(each["plugin"].parameters(), lr=0.1)
        each["plugin"].eval()(x).square().sum().backward()
        optimiser.step()
    for one, other in zip(plain["plugin"].parameters(), models["plugin"].parameters(), strict=True):
        assert torch.equal(one, other)


def hook(*_: object) -> None:
    """Does nothing; what counts is that it is there."""


def linear(models: dict[str, nn.Module]) -> nn.Linear:
    return next(layer for layer in models["local"].modules() if isinstance(layer, nn.Linear))


LEFT_BEHIND: dict[str, Callable[[nn.Linear, dict[str, nn.Module]], object]] = {
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
    "method": lambda layer, models: setattr(layer, "forward", hook),
    "attribute of a parameter": lambda layer, models: setattr(layer.weight, "importance", 2.0),
    "forward hook": lambda layer, models: layer.register_forward_hook(hook),
    "forward pre-hook": lambda layer, models: layer.register_forward_pre_hook(hook),
    "backward hook": lambda layer, models: layer.register_full_backward_hook(hook),
    "backward pre-hook": lambda layer, models: layer.register_full_backward_pre_hook(hook),
    "state-dict hook": lambda layer, models: layer.register_state_dict_post_hook(hook),
    "state-dict pre-hook": lambda layer, models: layer.register_state_dict_pre_hook(hook),
    "load hook": lambda layer, models: layer.register_load_state_dict_post_hook(hook),
    "parameter's hook": lambda layer, models: layer.weight.register_hook(hook),
    "hook after accumulation": lambda layer, models: layer.weight.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("what", ["nothing", *LEFT_BEHIND])
@pytest.mark.parametrize("make", [networks, tied])
def test_whatever_is_left_in_a_network_is_noticed(what: str, make: Callable[[], dict[str, nn.Module]]) -> None:
    models = make()
    built = Replica(models)
    built.start({}, {}, shared)
    assert built.intact
    LEFT_BEHIND.get(what, lambda *_: None)(linear(models), models)
    assert built.intact == (what == "nothing")


def test_ordinary_work_leaves_nothing() -> None:
    """A network that somebody has trained and measured is not built again."""
    models = networks()
    built = Replica(models)
    x = torch.randn(3, 8, 4)
    for _ in range(2):
        built.start({}, {}, shared)
        models["plugin"](x).square().sum().backward()
        torch.optim.SGD(models["plugin"].parameters(), lr=0.1).step()
        models["local"].layers(torch.randn(5, 3))  # type: ignore[union-attr, operator]
        models["plugin"].eval()
        torch.func.functional_call(models["plugin"], {k: v + 1 for k, v in models["plugin"].named_parameters()}, (x,))
        models["plugin"].requires_grad_(False)
        assert built.intact


@pytest.mark.parametrize("make", [networks, tied])
def test_a_tensor_of_another_shape_is_refused(make: Callable[[], dict[str, nn.Module]]) -> None:
    """Never cut to fit: not a larger one, not one of as many elements, not one number for many; sent or kept."""
    models = make()
    built = Replica(models)
    names = [name for name, value in state(models).items() if value.is_floating_point() and value.dim() == 2]
    for name in (next(filter(shared, names)), next(name for name in names if not shared(name))):
        rows, columns = state(models)[name].shape
        for other in ((2 * rows, columns), (rows * columns, 1), (1, columns), (1,)):
            wrong = {name: torch.ones(other)}
            sent, kept = ({"global": FlatTensors.from_tensors(wrong)}, {}) if shared(name) else ({}, wrong)
            with pytest.raises(ConfigError) as error:
                built.start(sent, kept, shared, "client 'a', round 3")
            model, _, tensor = name.partition("/")
            for part in ("client 'a', round 3", repr(model), repr(tensor), str(list(other)), str([rows, columns])):
                assert part in str(error.value)


def test_where_it_is_possible_they_lie_in_one_vector() -> None:
    """What is sent is then one copy, to the bit what many copies give."""
    for make, possible in ((networks, True), (tied, False), (double, False)):
        models = make()
        sent = {name: value for name, value in state(models).items() if value.is_floating_point()}
        built = Replica(models)
        live = {f"{n}/{k}": v for n, m in models.items() for k, v in m.state_dict().items() if v.is_floating_point()}
        assert (built._vector is not None) == possible
        flat = FlatTensors.from_tensors(live)
        assert flat.vector.tobytes() == FlatTensors.from_tensors(sent).vector.tobytes()
        live[next(iter(live))].zero_()
        assert flat.vector.tobytes() == FlatTensors.from_tensors(sent).vector.tobytes()  # a copy
        assert isinstance(built_module._Vector.from_models(models), built_module._Vector) == possible


def test_own_tensors_are_a_copy_made_when_needed() -> None:
    sent = FlatTensors.from_tensors({"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7.0)})
    sent.vector.flags.writeable = False
    own = OwnTensors(sent, torch.device("cpu"))
    assert list(own) == ["a", "b"]
    assert len(own) == 2
    assert "a" in own
    assert "c" not in own
    assert torch.equal(own["a"], sent["a"])
    assert own["b"].shape == ()
    own["a"].zero_()
    assert own["a"] is own["a"]
    assert not own["a"].any()
    assert torch.equal(sent["a"], torch.arange(6.0).view(2, 3))
    with pytest.raises(KeyError, match="c"):
        own["c"]


@pytest.mark.parametrize(
    "kind", ["neighbours", "swapped", "gap", "overlap", "strided", "integers", "storages", "empty"]
)
def test_flattening_looks_at_where_tensors_lie(kind: str) -> None:
    """Whatever way it takes, the vector is the concatenation of the tensors."""
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
