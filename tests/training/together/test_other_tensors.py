"""step.forward(..., tensors=) equals a network loaded with the tensors, also in recorded and batched steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from extra_methods import NearTheReceived
from several_clients import BANDS, CLASSES, both, make_steps
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.methods import Method
from raydfl.models.crnn import CRNN
from raydfl.models.dense import MeanMLP


class Recurrent(nn.Module):
    """Network with PyTorch's recurrent layer and its list of parameters, and a tied layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(BANDS, BANDS, batch_first=True)
        self.one = nn.Linear(BANDS, BANDS)
        self.two = self.one
        self.norm = nn.BatchNorm1d(BANDS)
        self.output = nn.Linear(BANDS, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.two(self.norm(self.one(self.gru(x)[0].mean(dim=1)))))  # type: ignore[no-any-return]


def mlp() -> dict[str, nn.Module]:
    return {"model": MeanMLP(BANDS, CLASSES)}


def crnn() -> dict[str, nn.Module]:
    return {"model": CRNN(BANDS, CLASSES, filters=(4,), hidden=5, dropout=0.0)}


@pytest.mark.parametrize("make", [mlp, crnn, lambda: {"model": Recurrent()}])
def test_forward_with_tensors_equals_a_network_with_these_tensors(make: Callable[[], dict[str, nn.Module]]) -> None:
    step = make_steps(Method(), make)[0]
    reference = copy.deepcopy(step.models["model"])
    with torch.no_grad():
        for tensor in reference.parameters():
            tensor.add_(torch.randn_like(tensor))
    for model in (reference, step.models["model"]):
        model.eval()
    batch = next(step.data.train.batches(4, None))
    before = step.forward("model", batch)
    tensors = {f"model/{name}": value.detach().clone() for name, value in reference.state_dict().items()}
    assert torch.equal(step.forward("model", batch, tensors=tensors), reference(batch.x, batch.lengths))
    assert torch.equal(step.forward("model", batch), before)  # the step's own tensors are restored
    part = {"model/output.bias": tensors["model/output.bias"], "teacher/output.bias": torch.zeros(99)}
    assert torch.allclose(
        step.forward("model", batch, tensors=part),
        before + tensors["model/output.bias"] - step.models["model"].output.bias,
    )


def test_gradients_reach_the_given_tensors() -> None:
    step = make_steps(Method(), mlp)[0]
    bias = torch.zeros(CLASSES, requires_grad=True)
    step.forward("model", next(step.data.train.batches(4, None)), tensors={"model/output.bias": bias}).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((CLASSES,), 4.0))
    assert step.models["model"].output.bias.grad is None


def test_unsuitable_tensors_are_rejected() -> None:
    step = make_steps(Method(), mlp)[0]
    batch = next(step.data.train.batches(4, None))
    with pytest.raises(ConfigError, match=r"no tensor belongs to this model. Its names start with 'model/'"):
        step.forward("model", batch, tensors={"output.bias": torch.zeros(CLASSES)})
    with pytest.raises(ConfigError, match=r"'output.bias' of model 'model' has shape \[99\]"):
        step.forward("model", batch, tensors={"model/output.bias": torch.zeros(99)})


@pytest.mark.parametrize("family", [mlp, crnn])
@pytest.mark.parametrize("old", [False, True])
def test_batched_training_equals_unbatched_training(family: Callable[[], dict[str, nn.Module]], old: bool) -> None:
    states = None
    if old:
        names = make_steps(Method(), family)[0].parameters()
        draw = torch.Generator().manual_seed(4)
        states = [{f"previous/{n}": torch.randn(p.shape, generator=draw) for n, p in names.items()} for _ in range(9)]
    both(NearTheReceived(), family, states=states)
