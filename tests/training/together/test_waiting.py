"""What a GPU waits for: values that the CPU reads back, and the number of operations. Both are seen without a GPU.

A tensor that is fetched whole (``.cpu()``) is not: on a CPU that is no operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from several_clients import BANDS, CLASSES, jointly, make_steps
from test_law_8 import AT_CLIENTS, networks
from test_stacked import on_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raydfl.core.ops import _torch
from raydfl.core.ops._backend import use
from raydfl.methods._method import Method
from raydfl.methods.fedavg import FedAvg
from raydfl.models.crnn import CRNN
from raydfl.training.step import Step
from raydfl.training.together import executor as vectorised

READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "allclose", "unique", "_unique2"}
"""Operations whose result the CPU has to know to go on. (``item``, ``bool(tensor)`` and masks as indices end in them.)"""
FREE = {"detach", "alias", "lift_fresh", "empty", "new_empty", "empty_like", "empty_strided"}
"""Operations without work for a GPU, besides views."""


class Operations(TorchDispatchMode):
    """Counts the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if not function.is_view and name not in FREE:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))

    @property
    def reads(self) -> set[str]:
        return READS & set(self.counts)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """PyTorch's operations, features on the device; what the steps of training do is counted."""
    seen = Operations()

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with seen:
                return original(*arguments)

        return run

    monkeypatch.setattr(vectorised, "StackedBatches", lambda examples, plans, *_: on_device(examples, plans))
    monkeypatch.setattr(vectorised, "_run_steps", watched(vectorised._run_steps))
    return seen


@pytest.mark.parametrize(
    "lengths", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fixed", "lengths"]
)  # with lengths there are more operations
@pytest.mark.parametrize(
    ("method", "optimiser"),
    [
        (FedAvg(), {}),
        (FedAvg(), {"name": "adam", "lr": 0.01}),
        *((m, {"momentum": 0.9, "clip_norm": 0.5}) for methods in AT_CLIENTS.values() for m in methods),
    ],
    ids=repr,
)
def test_nothing_is_read_back_between_a_fits_first_step_and_its_last(
    method: Method, optimiser: dict[str, Any], lengths: bool, as_on_a_gpu: Operations
) -> None:
    steps = make_steps(method, networks(method, "bidirectional"), sizes=(6, 4), optimiser=optimiser, lengths=lengths)
    with use("torch"):
        jointly(method, steps)
    assert steps[0].execution.together == len(steps), steps[0].execution.looped_because
    assert as_on_a_gpu.counts["baddbmm"] > 0
    assert not as_on_a_gpu.reads


class Reading(FedAvg):
    """Looks at its loss."""

    def loss(self, step: Step, batch: Any) -> Tensor:
        value = super().loss(step, batch)
        self.seen = float(value.detach())
        return value


def test_what_is_read_back_is_seen(as_on_a_gpu: Operations) -> None:
    """The test above can fail: a read that is mapped is refused by PyTorch, any other is counted."""
    steps = make_steps(Reading(), lambda: {"model": CRNN(BANDS, CLASSES, filters=(4,), hidden=3)})
    jointly(Reading(), steps)
    assert steps[0].execution.together == 1
    with as_on_a_gpu:
        float(torch.ones(()))
    assert as_on_a_gpu.reads == {"_local_scalar_dense"}


def operations_of_a_fit(seen: Operations, clients: int, network: Callable[[], nn.Module]) -> int:
    method = FedAvg()
    with use("torch"):
        jointly(method, make_steps(method, lambda: {"model": network()}, sizes=(4,) * clients, epochs=1))  # tried here
        seen.counts.clear()
        jointly(method, make_steps(method, lambda: {"model": network()}, sizes=(4,) * clients, epochs=1))
    return seen.counts.total()


def test_more_clients_are_not_more_operations(as_on_a_gpu: Operations) -> None:
    def network() -> nn.Module:
        return CRNN(BANDS, CLASSES, filters=(4,), hidden=3, dropout=0.1)

    few, many = (operations_of_a_fit(as_on_a_gpu, clients, network) for clients in (2, 9))
    assert few == many > 0


@pytest.mark.parametrize("lengths", [False, True], ids=["fixed", "lengths"])
def test_a_frame_of_a_gru_is_six_operations_and_three_on_the_way_back(lengths: bool) -> None:
    """Whatever the directions: they are computed together. (With lengths one more, which silences what is not there.)"""
    counts: list[tuple[int, int]] = []
    for frames in (5, 6):
        x = torch.randn(3, 4, frames, 2)
        weights = [torch.randn(3, *shape) for shape in ((9, 2), (9, 3), (9,), (9,)) * 2]
        own = torch.full((3, 4), frames) if lengths else None
        with Operations() as forward:
            y, gates = _torch.gru_forward(x, own, weights)
        with Operations() as backward:
            _torch.gru_backward(torch.randn_like(y), y, gates, x, own, weights, True)
        counts.append((forward.counts.total(), backward.counts.total()))
    assert np.subtract(counts[1], counts[0]).tolist() == [6 + lengths, 3]
