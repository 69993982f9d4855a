"""Unbatchable losses and networks train one client after another, with equal bits, and the step gives the reason."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import extra_methods
import pytest
import torch
import torch.nn.functional as F
from several_clients import BANDS, CLASSES, jointly, looped, make_steps
from torch import Tensor, nn

from raydfl.core.types import Batch, Update
from raydfl.methods._method import Method
from raydfl.methods.fedavg import FedAvg
from raydfl.models.dense import MeanMLP
from raydfl.training._fit import fit
from raydfl.training.step import Step
from raydfl.training.together import lockstep as together
from raydfl.training.together.stack import StackedClients

Loss = Callable[[Step, Batch], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithLoss(Method):
    """Method with a loss made by a function of the client's step."""

    make: Any = None

    def local(self, step: Step) -> Update:
        return step.update(fit(step, self.make(step)))


def compute_loss(step: Step, batch: Batch) -> Tensor:
    return batch.mean(F.cross_entropy(step.forward("model", batch), batch.y, reduction="none"))


def mlp() -> dict[str, nn.Module]:
    return {"model": MeanMLP(BANDS, CLASSES)}


def compare(method: Method, networks: Callable[[], dict[str, nn.Module]] = mlp) -> list[Step]:
    alone, joint = make_steps(method, networks), make_steps(method, networks)
    updates = jointly(method, joint)
    for a, b in zip(updates, looped(method, alone), strict=True):
        assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in b.tensors)
        assert a.metrics == b.metrics
    for a, b in zip(joint, alone, strict=True):
        assert a.rng.bit_generator.state == b.rng.bit_generator.state
        assert a.state.keys() == b.state.keys()
        assert a.execution.together == 1
    return joint


def branch_on_loss(step: Step, batch: Batch) -> Tensor:
    value = compute_loss(step, batch)
    return value * 2 if value > 1 else value


def read_item(step: Step, batch: Batch) -> Tensor:
    value = compute_loss(step, batch)
    return value / value.item()


def read_client(step: Step, batch: Batch) -> Tensor:
    return compute_loss(step, batch) * (1 + step.client.index)


def read_data(step: Step, batch: Batch) -> Tensor:
    return compute_loss(step, batch) * len(step.data.train)


def read_generator(step: Step, batch: Batch) -> Tensor:
    return compute_loss(step, batch) * float(step.rng.random())


def write_state(step: Step, batch: Batch) -> Tensor:
    value = compute_loss(step, batch)
    step.state["last"] = value.detach()
    return value


def write_into_state(step: Step, batch: Batch) -> Tensor:
    step.state["count"].add_(1)
    return compute_loss(step, batch) * step.state["count"]


def ignore_weight(step: Step, batch: Batch) -> Tensor:
    return F.cross_entropy(step.forward("model", batch), batch.y)


def divide_by_batch_size(step: Step, batch: Batch) -> Tensor:
    values = F.cross_entropy(step.forward("model", batch), batch.y, reduction="none")
    return (values if batch.weight is None else values * batch.weight).sum() / len(batch.y)


def mix_examples(step: Step, batch: Batch) -> Tensor:
    logits = step.forward("model", batch)
    return batch.mean(F.cross_entropy(logits - logits.mean(dim=0), batch.y, reduction="none"))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (branch_on_loss, "data-dependent control flow"),
        (read_item, "item"),
        (read_client, "the loss reads step.client"),
        (read_data, "the loss reads step.data"),
        (read_generator, "the loss reads step.rng"),
        (write_state, "does not support item assignment"),
        (ignore_weight, "padding changes the loss: it does not respect batch.weight"),
        (divide_by_batch_size, "padding changes the loss"),
        (mix_examples, "padding changes the loss"),
    ],
)
def test_unbatchable_losses_train_unbatched_with_a_reason(loss: Loss, reason: str) -> None:
    for _ in range(2):  # detected in the first training, cached for the second
        steps = compare(WithLoss(make=lambda step: loss))
        assert all(reason in step.execution.looped_because for step in steps), steps[0].execution.looped_because


class Replacing(nn.Module):
    """Network with a counter: each pass replaces its buffer by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(BANDS, CLASSES)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        self.calls = self.calls + 1
        return self.output(x.mean(dim=1))


class Recurrent(nn.Module):
    """Network with PyTorch's own GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(BANDS, 4, batch_first=True)
        self.output = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.gru(x)[0].mean(dim=1))


class Remembering(nn.Module):
    """Network with a record of its last output for the method."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(BANDS, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        self.mean = x.mean(dim=1)
        return self.output(self.mean)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Remembering, "stores a value in its forward(), in its attribute 'mean'"),
        (lambda: extra_methods.WithBuffers(BANDS, CLASSES), "batch normalisation"),
        (Replacing, "a model replaces a buffer"),
        (Recurrent, "aten::gru"),
    ],
)
def test_unbatchable_models_train_unbatched_with_a_reason(network: Callable[[], nn.Module], reason: str) -> None:
    if (
        network.__name__ == "<lambda>"
    ):  # A last batch of one example cannot be normalised, neither batched nor unbatched.
        method = FedAvg()
        alone, joint = (make_steps(method, lambda: {"model": network()}, sizes=(8, 6)) for _ in range(2))
        looped(method, alone), jointly(method, joint)
        assert torch.equal(
            alone[1].models["model"].normalise.running_mean, joint[1].models["model"].normalise.running_mean
        )
        assert int(joint[0].models["model"].normalise.num_batches_tracked) == 4
    else:
        joint = compare(FedAvg(), lambda: {"model": network()})
    assert all(reason in step.execution.looped_because for step in joint), joint[0].execution.looped_because


def capture_tensor(step: Step) -> Loss:
    scale = torch.tensor(1.0 + step.client.index)
    return lambda step, batch: compute_loss(step, batch) * scale


def capture_number(step: Step) -> Loss:
    scale = 1.0 + step.client.index
    return lambda step, batch: compute_loss(step, batch) * scale


def make_default_argument(step: Step) -> Loss:
    def loss(step: Step, batch: Batch, scale: float = float(step.client.index + 1)) -> Tensor:
        return compute_loss(step, batch) * scale

    return loss


def capture_step(outer: Step) -> Loss:
    return lambda step, batch: compute_loss(outer, batch)


def scale_loss(scale: float, step: Step, batch: Batch) -> Tensor:
    return compute_loss(step, batch) * scale


@pytest.mark.parametrize(
    "make",
    [
        capture_tensor,
        capture_number,
        make_default_argument,
        capture_step,
        lambda step: functools.partial(scale_loss, 1.0 + step.client.index),
    ],
)
def test_losses_that_capture_client_values_are_not_batched(make: Callable[[Step], Loss]) -> None:
    steps = compare(WithLoss(make=make))
    assert all("captured values that differ" in step.execution.looped_because for step in steps)


def test_losses_with_equal_captures_are_batched() -> None:
    common = torch.tensor(2.0)

    def make(step: Step) -> Loss:
        number, names = 3.0, ["model"]

        def recurse(depth: int) -> int:
            return depth if depth == 0 else recurse(depth - 1)

        def loss(step: Step, batch: Batch) -> Tensor:
            return compute_loss(step, batch) * common * number * (len(names) + recurse(2))

        return functools.partial(loss)

    steps = make_steps(WithLoss(), mlp)
    jointly(WithLoss(make=make), steps)
    assert [step.execution.together for step in steps] == [4] * 4, steps[0].execution.looped_because


def test_a_hook_on_one_clients_model_affects_only_this_client() -> None:
    def train(method: Method, in_lockstep: bool) -> list[Step]:
        steps = make_steps(FedAvg(), mlp)
        steps[1].models["model"].output.register_forward_hook(lambda module, inputs, output: output * 2)
        (jointly if in_lockstep else looped)(FedAvg(), steps)
        return steps

    joint, unbatched = train(FedAvg(), True), train(FedAvg(), False)
    assert [step.execution.together for step in joint] == [3, 1, 3, 3]
    for a, b in zip(joint, unbatched, strict=True):
        for name, value in a.floating_state().items():
            torch.testing.assert_close(value, b.floating_state()[name], rtol=1e-4, atol=1e-5)


def test_clients_are_batched_by_attributes_of_their_model() -> None:
    steps = make_steps(FedAvg(), mlp)
    for index, step in enumerate(steps):
        step.models["model"].output.slope = index % 2
    jointly(FedAvg(), steps)
    assert [step.execution.together for step in steps] == [2] * 4


def test_clients_with_different_state_do_not_disable_later_batching() -> None:
    def loss(step: Step, batch: Batch) -> Tensor:
        extra = step.state["extra"].sum() if "extra" in step.state else 0.0
        return compute_loss(step, batch) + extra

    message = "not all clients have step.state['extra']"
    for holders, reason in ((2, message), (4, ""), (0, ""), (2, message), (4, "")):
        steps = make_steps(FedAvg(), mlp)
        for step in steps[:holders]:
            step.state["extra"] = torch.ones(2)
        jointly(WithLoss(make=lambda step: loss), steps)
        assert [step.execution.looped_because for step in steps] == [reason] * 4
        assert steps[0].execution.together == (1 if reason else 4)
    steps = make_steps(FedAvg(), mlp)
    for index, step in enumerate(steps):
        step.state["extra"] = torch.ones(index)
    jointly(WithLoss(make=lambda step: loss), steps)
    assert steps[0].execution.looped_because == "step.state['extra'] differs between clients in shape or type"


def test_clients_are_batched_by_received_entries_and_options() -> None:
    steps = make_steps(FedAvg(), mlp)
    for index, step in enumerate(steps):
        step.received = {f"cluster {index % 2}": step.received["global"]}
    jointly(FedAvg(), steps)
    assert [step.execution.together for step in steps] == [2] * 4
    steps[0].options = {"mask": [1, 2]}
    jointly(FedAvg(), steps)
    assert [step.execution.together for step in steps] == [1, 2, 1, 2]


def test_a_non_scalar_loss_is_rejected_as_in_a_loop() -> None:
    def loss(step: Step, batch: Batch) -> Tensor:
        return F.cross_entropy(step.forward("model", batch), batch.y, reduction="none")

    steps = make_steps(FedAvg(), mlp, sizes=(4, 8))
    errors = together.run_in_lockstep([lambda s=s: WithLoss(make=lambda step: loss).local(s) for s in steps])
    assert all("grad can be implicitly created only for scalar outputs" in str(error) for error in errors)
    assert "the loss is not a scalar but (4,)" in steps[0].execution.looped_because


def test_a_failure_during_batched_training_leaves_results_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, alone = make_steps(FedAvg(), mlp), make_steps(FedAvg(), mlp)
    calls = 0
    compute = StackedClients.compute

    def fail_once(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("in the middle")
        return compute(*arguments)

    monkeypatch.setattr(StackedClients, "compute", fail_once)
    updates = jointly(FedAvg(), steps)
    assert steps[0].execution.looped_because == "RuntimeError: in the middle"
    for a, b in zip(updates, looped(FedAvg(), alone), strict=True):
        assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in b.tensors)
    jointly(FedAvg(), again := make_steps(FedAvg(), mlp))
    assert again[0].execution.together == 4, "an error in the middle of training must not mark the loss as unbatchable"


def test_clients_train_unbatched_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*arguments: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(StackedClients, "compute", run_out_of_memory)
        steps = compare(FedAvg())
    assert steps[0].execution.looped_because == "not enough memory for so many clients at once: no room"
    jointly(FedAvg(), again := make_steps(FedAvg(), mlp))
    assert again[0].execution.together == 4


def test_a_failing_client_does_not_stop_its_group() -> None:
    class OddError(Exception):
        pass

    def train_client(step: Step) -> Update:
        update = FedAvg().local(step)
        if step.client.index == 1:
            raise OddError("its own")
        return update

    steps = make_steps(FedAvg(), mlp)
    outcomes = together.run_in_lockstep([lambda s=s: train_client(s) for s in steps])
    assert isinstance(outcomes[1], OddError)
    assert sum(isinstance(update, Update) for update in outcomes) == 3


def test_a_loss_that_writes_into_its_state_is_never_batched() -> None:
    """Neither the trial nor a batched computation changes a client's state."""
    for _ in range(2):
        both = []
        for run in (jointly, looped):
            steps = make_steps(FedAvg(), mlp)
            for step in steps:
                step.state["count"] = torch.zeros(())
            run(WithLoss(make=lambda step: write_into_state), steps)
            both.append(steps)
        for joint, alone in zip(*both, strict=True):
            assert joint.execution.together == 1
            assert torch.equal(joint.state["count"], alone.state["count"])
            for name, value in joint.floating_state().items():
                assert torch.equal(value, alone.floating_state()[name])


class Frozen(nn.Module):
    """Network with its first layers always in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(BANDS, 6), nn.Dropout(0.5))
        self.output = nn.Linear(6, CLASSES)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.encoder(x.mean(dim=1)))


def test_layers_in_evaluation_mode_stay_in_it_when_batched() -> None:
    joint, alone = (make_steps(FedAvg(), lambda: {"model": Frozen()}) for _ in range(2))
    jointly(FedAvg(), joint)
    looped(FedAvg(), alone)
    assert [step.execution.together for step in joint] == [4] * 4, joint[0].execution.looped_because
    for a, b in zip(joint, alone, strict=True):
        for name, value in a.floating_state().items():
            torch.testing.assert_close(value, b.floating_state()[name], rtol=1e-4, atol=1e-5)


def test_private_attributes_of_a_model_prevent_batching() -> None:
    steps = make_steps(FedAvg(), mlp)
    for step in steps:
        step.models["model"]._scale = torch.tensor(1.0 + step.client.index)
    jointly(FedAvg(), steps)
    assert [step.execution.together for step in steps] == [1] * 4


def test_zero_epochs_do_not_disable_later_batching() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Lazy(Method):
        epochs: int = 0

        def local(self, step: Step) -> Update:
            return step.update(fit(step, compute_loss, epochs=self.epochs))

    for epochs, together_ in ((0, 1), (1, 4), (0, 1)):
        steps = make_steps(FedAvg(), mlp)
        jointly(Lazy(epochs=epochs), steps)
        assert [step.execution.together for step in steps] == [together_] * 4, steps[0].execution.looped_because


def test_the_verdict_on_a_loss_covers_its_captured_values() -> None:
    """The verdict on a wrapped valid loss does not apply to an invalid loss in the same wrapper."""

    def wrap(inner: Loss) -> Loss:
        return lambda step, batch: 2 * inner(step, batch)

    jointly(WithLoss(make=lambda step: wrap(compute_loss)), good := make_steps(FedAvg(), mlp))
    assert good[0].execution.together == 4

    def unweighted(step: Step, batch: Batch) -> Tensor:
        return F.cross_entropy(step.forward("model", batch), batch.y)  # padding has weight

    steps = compare(WithLoss(make=lambda step: wrap(unweighted)))
    assert "padding changes the loss" in steps[0].execution.looped_because

    def switch(padding: bool) -> Loss:
        return lambda step, batch: unweighted(step, batch) if padding else compute_loss(step, batch)

    jointly(WithLoss(make=lambda step: switch(False)), good := make_steps(FedAvg(), mlp))
    assert good[0].execution.together == 4
    assert "padding changes the loss" in compare(WithLoss(make=lambda step: switch(True)))[0].execution.looped_because
