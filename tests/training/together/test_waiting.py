"""Waiting on a GPU: values read back by the CPU, and the number of operations, counted without a GPU.

Tensors fetched whole (``.cpu()``) are not counted, because a CPU performs no operation for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from several_clients import BANDS, CLASSES, jointly, make_steps
from test_law_8 import AT_CLIENTS, make_builder
from test_stacked import stack_on_device
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
"""Operations with a result needed by the CPU. (``item``, ``bool(tensor)`` and masks as indices call them.)"""
FREE = {"detach", "alias", "lift_fresh", "empty", "new_empty", "empty_like", "empty_strided"}
"""Operations without work for a GPU, in addition to views."""


class Operations(TorchDispatchMode):
    """Count the operations inside the context."""

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
def gpu_operations(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """Use PyTorch's operations with features on the device, and count the operations of training steps."""
    operations = Operations()

    def count(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with operations:
                return original(*arguments)

        return run

    monkeypatch.setattr(
        vectorised, "StackedBatches", lambda examples, plans, *_, **__: stack_on_device(examples, plans)
    )
    monkeypatch.setattr(vectorised, "_run_steps", count(vectorised._run_steps))
    return operations


@pytest.mark.parametrize(
    "lengths", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fixed", "lengths"]
)  # Lengths add operations.
@pytest.mark.parametrize(
    ("method", "optimiser"),
    [
        (FedAvg(), {}),
        (FedAvg(), {"name": "adam", "lr": 0.01}),
        *((m, {"momentum": 0.9, "clip_norm": 0.5}) for methods in AT_CLIENTS.values() for m in methods),
    ],
    ids=repr,
)
def test_fits_read_nothing_back_between_their_first_and_last_step(
    method: Method, optimiser: dict[str, Any], lengths: bool, gpu_operations: Operations
) -> None:
    steps = make_steps(
        method, make_builder(method, "bidirectional"), sizes=(6, 4), optimiser=optimiser, lengths=lengths
    )
    with use("torch"):
        jointly(method, steps)
    assert steps[0].execution.together == len(steps), steps[0].execution.looped_because
    assert gpu_operations.counts["baddbmm"] > 0
    assert not gpu_operations.reads


class Reading(FedAvg):
    """Method with a loss read by the CPU."""

    def loss(self, step: Step, batch: Any) -> Tensor:
        value = super().loss(step, batch)
        self.seen = float(value.detach())
        return value


def test_reads_are_detected(gpu_operations: Operations) -> None:
    """PyTorch rejects a batched read, and every unbatched read is counted."""
    steps = make_steps(Reading(), lambda: {"model": CRNN(BANDS, CLASSES, filters=(4,), hidden=3)})
    jointly(Reading(), steps)
    assert steps[0].execution.together == 1
    with gpu_operations:
        float(torch.ones(()))
    assert gpu_operations.reads == {"_local_scalar_dense"}


def count_operations(operations: Operations, clients: int, network: Callable[[], nn.Module]) -> int:
    method = FedAvg()
    with use("torch"):
        jointly(
            method, make_steps(method, lambda: {"model": network()}, sizes=(4,) * clients, epochs=1)
        )  # The first training includes the trial.
        operations.counts.clear()
        jointly(method, make_steps(method, lambda: {"model": network()}, sizes=(4,) * clients, epochs=1))
    return operations.counts.total()


def test_the_number_of_clients_does_not_change_the_number_of_operations(gpu_operations: Operations) -> None:
    def make_network() -> nn.Module:
        return CRNN(BANDS, CLASSES, filters=(4,), hidden=3, dropout=0.1)

    few, many = (count_operations(gpu_operations, clients, make_network) for clients in (2, 9))
    assert few == many > 0


@pytest.mark.parametrize("lengths", [False, True], ids=["fixed", "lengths"])
def test_a_frame_of_a_gru_takes_six_operations_forward_and_three_backward(lengths: bool) -> None:
    """Any number of directions is computed at once. Lengths add one operation to mask padding."""
    counts: list[tuple[int, int]] = []
    for frames in (5, 6):
        x = torch.randn(3, 4, frames, 2)
        weights = [torch.randn(3, *shape) for shape in ((9, 2), (9, 3), (9,), (9,)) * 2]
        lengths_or_none = torch.full((3, 4), frames) if lengths else None
        with Operations() as forward:
            y, gates = _torch.gru_forward(x, lengths_or_none, weights)
        with Operations() as backward:
            _torch.gru_backward(torch.randn_like(y), y, gates, x, lengths_or_none, weights, True)
        counts.append((forward.counts.total(), backward.counts.total()))
    assert np.subtract(counts[1], counts[0]).tolist() == [6 + lengths, 3]
