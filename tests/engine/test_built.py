"""Networks that serve one client after another: what the next client finds depends on what was sent and kept alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raydfl import built as built_module
from raydfl.built import Built
from raydfl.models.crnn import CRNN
from raydfl.tensors import FlatTensors, OwnTensors


class Normalised(nn.Module):
    """Floating buffers, a counter, a scalar and a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


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
    networks = Built(models)
    floating = {name: value for name, value in fresh.items() if value.is_floating_point()}
    names = [name for name in floating if shared(name)]
    first = random_like({name: floating[name] for name in [*names[::2], "local/unknown"] if name in floating}, 1)
    second = random_like({name: floating[name] for name in reversed(names[:-1])}, 2)
    private = [name for name in floating if not shared(name)]
    kept = random_like({name: floating[name] for name in private[1:]}, 3)
    received = {"a": FlatTensors.of(first), "b": FlatTensors.of(second)}
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
        for value in model.state_dict().values():
            value.add_(7)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            parameter.requires_grad_(False)
        model.eval()


def test_nothing_of_the_last_client_is_left() -> None:
    models = networks()
    fresh = state(models)
    built = Built(models)
    for parameter in models["plugin"].output.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)  # after it was built: somebody's code
    spoil(models)
    built.start({}, {}, shared)
    for name, value in state(models).items():
        assert torch.equal(value, fresh[name]), name
    for model in models.values():
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        assert all(module.training for module in model.modules())


def test_a_frozen_parameter_is_frozen_again() -> None:
    models = networks()
    models["local"].scale.requires_grad_(False)  # type: ignore[union-attr, operator]
    built = Built(models)
    models["local"].scale.requires_grad_(True)  # type: ignore[union-attr, operator]
    built.start({}, {}, shared)
    assert not models["local"].scale.requires_grad  # type: ignore[union-attr]


def test_they_compute_and_train_as_before() -> None:
    plain, models = networks(), networks()
    Built(models)
    x = torch.randn(3, 8, 4)
    for each in (plain, models):
        optimiser = torch.optim.SGD(each["plugin"].parameters(), lr=0.1)
        each["plugin"].eval()(x).square().sum().backward()
        optimiser.step()
    for one, other in zip(plain["plugin"].parameters(), models["plugin"].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("what", ["nothing", "layer", "parameter", "memory", "buffer", "added", "removed", "child"])
def test_whatever_is_replaced_is_noticed(what: str) -> None:
    models = networks()
    built = Built(models)
    linear: nn.Linear = models["local"].layers[0]  # type: ignore[index, union-attr, assignment]
    assert built.whole
    if what == "layer":
        models["local"].layers[0] = nn.Linear(3, 4)  # type: ignore[index, union-attr, operator]
    elif what == "parameter":
        linear.weight = nn.Parameter(linear.weight.clone())
    elif what == "memory":
        linear.weight.data = linear.weight.data.clone()
    elif what == "buffer":
        models["local"].layers[1].running_mean = torch.zeros(4)  # type: ignore[index, union-attr]
    elif what == "added":
        linear.register_parameter("more", nn.Parameter(torch.zeros(1)))
    elif what == "removed":
        linear.bias = None  # type: ignore[assignment]
    elif what == "child":
        linear.add_module("more", nn.Identity())
    assert built.whole == (what == "nothing")


def test_where_it_is_possible_they_lie_in_one_vector() -> None:
    """What is sent is then one copy, to the bit what many copies give."""
    for make, possible in ((networks, True), (tied, False), (double, False)):
        models = make()
        sent = {name: value for name, value in state(models).items() if value.is_floating_point()}
        built = Built(models)
        live = {f"{n}/{k}": v for n, m in models.items() for k, v in m.state_dict().items() if v.is_floating_point()}
        assert (built._vector is not None) == possible
        flat = FlatTensors.of(live)
        assert flat.vector.tobytes() == FlatTensors.of(sent).vector.tobytes()
        live[next(iter(live))].zero_()
        assert flat.vector.tobytes() == FlatTensors.of(sent).vector.tobytes()  # a copy
        assert isinstance(built_module._Vector.of(models), built_module._Vector) == possible


def test_own_tensors_are_a_copy_made_when_needed() -> None:
    sent = FlatTensors.of({"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7.0)})
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
    flat = FlatTensors.of({str(i): tensor for i, tensor in enumerate(tensors)})
    assert np.array_equal(flat.vector, np.concatenate([tensor.float().numpy().ravel() for tensor in tensors]))
    block.zero_()
    assert flat.vector.any()
