"""What cannot be computed together is computed one client after another, to the bit, and the step says why."""

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
class With(Method):
    """A method whose loss is made by a function of the client's step."""

    make: Any = None

    def local(self, step: Step) -> Update:
        return step.update(fit(step, self.make(step)))


def entropy(step: Step, batch: Batch) -> Tensor:
    return batch.mean(F.cross_entropy(step.forward("model", batch), batch.y, reduction="none"))


def mlp() -> dict[str, nn.Module]:
    return {"model": MeanMLP(BANDS, CLASSES)}


def compare(method: Method, networks: Callable[[], dict[str, nn.Module]] = mlp) -> list[Step]:
    alone, joint = make_steps(method, networks), make_steps(method, networks)
    found = jointly(method, joint)
    for a, b in zip(found, looped(method, alone), strict=True):
        assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in b.tensors)
        assert a.metrics == b.metrics
    for a, b in zip(joint, alone, strict=True):
        assert a.rng.bit_generator.state == b.rng.bit_generator.state
        assert a.state.keys() == b.state.keys()
        assert a.execution.together == 1
    return joint


def branches(step: Step, batch: Batch) -> Tensor:
    value = entropy(step, batch)
    return value * 2 if value > 1 else value


def reads_item(step: Step, batch: Batch) -> Tensor:
    value = entropy(step, batch)
    return value / value.item()


def reads_client(step: Step, batch: Batch) -> Tensor:
    return entropy(step, batch) * (1 + step.client.index)


def reads_data(step: Step, batch: Batch) -> Tensor:
    return entropy(step, batch) * len(step.data.train)


def reads_generator(step: Step, batch: Batch) -> Tensor:
    return entropy(step, batch) * float(step.rng.random())


def writes_state(step: Step, batch: Batch) -> Tensor:
    value = entropy(step, batch)
    step.state["last"] = value.detach()
    return value


def writes_into_state(step: Step, batch: Batch) -> Tensor:
    step.state["count"].add_(1)
    return entropy(step, batch) * step.state["count"]


def ignores_weight(step: Step, batch: Batch) -> Tensor:
    return F.cross_entropy(step.forward("model", batch), batch.y)


def divides_by_the_batch(step: Step, batch: Batch) -> Tensor:
    values = F.cross_entropy(step.forward("model", batch), batch.y, reduction="none")
    return (values if batch.weight is None else values * batch.weight).sum() / len(batch.y)


def mixes_examples(step: Step, batch: Batch) -> Tensor:
    logits = step.forward("model", batch)
    return batch.mean(F.cross_entropy(logits - logits.mean(dim=0), batch.y, reduction="none"))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (branches, "data-dependent control flow"),
        (reads_item, "item"),
        (reads_client, "the loss reads step.client"),
        (reads_data, "the loss reads step.data"),
        (reads_generator, "the loss reads step.rng"),
        (writes_state, "does not support item assignment"),
        (ignores_weight, "padding changes the loss: it does not respect batch.weight"),
        (divides_by_the_batch, "padding changes the loss"),
        (mixes_examples, "padding changes the loss"),
    ],
)
def test_losses_that_break_a_rule(loss: Loss, reason: str) -> None:
    for _ in range(2):  # found out the first time, remembered the second
        steps = compare(With(make=lambda step: loss))
        assert all(reason in step.execution.looped_because for step in steps), steps[0].execution.looped_because


class Replacing(nn.Module):
    """Counts by putting a new tensor into its buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(BANDS, CLASSES)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        self.calls = self.calls + 1
        return self.output(x.mean(dim=1))


class Recurrent(nn.Module):
    """PyTorch's own GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(BANDS, 4, batch_first=True)
        self.output = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.gru(x)[0].mean(dim=1))


class Remembering(nn.Module):
    """Keeps what it computed last, for a method to look at."""

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
def test_models_that_cannot_be_vectorised(network: Callable[[], nn.Module], reason: str) -> None:
    if network.__name__ == "<lambda>":  # a last batch of one example cannot be normalised, alone or together
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


def capturing_a_tensor(step: Step) -> Loss:
    scale = torch.tensor(1.0 + step.client.index)
    return lambda step, batch: entropy(step, batch) * scale


def capturing_a_number(step: Step) -> Loss:
    scale = 1.0 + step.client.index
    return lambda step, batch: entropy(step, batch) * scale


def default_argument(step: Step) -> Loss:
    def loss(step: Step, batch: Batch, scale: float = float(step.client.index + 1)) -> Tensor:
        return entropy(step, batch) * scale

    return loss


def capturing_the_step(outer: Step) -> Loss:
    return lambda step, batch: entropy(outer, batch)


def scaled(scale: float, step: Step, batch: Batch) -> Tensor:
    return entropy(step, batch) * scale


@pytest.mark.parametrize(
    "make",
    [
        capturing_a_tensor,
        capturing_a_number,
        default_argument,
        capturing_the_step,
        lambda step: functools.partial(scaled, 1.0 + step.client.index),
    ],
)
def test_losses_that_capture_something_of_their_client_are_not_mixed(make: Callable[[Step], Loss]) -> None:
    steps = compare(With(make=make))
    assert all("captured values that differ" in step.execution.looped_because for step in steps)


def test_losses_that_capture_the_same_are_computed_together() -> None:
    shared = torch.tensor(2.0)

    def make(step: Step) -> Loss:
        number, names = 3.0, ["model"]

        def again(depth: int) -> int:
            return depth if depth == 0 else again(depth - 1)

        def loss(step: Step, batch: Batch) -> Tensor:
            return entropy(step, batch) * shared * number * (len(names) + again(2))

        return functools.partial(loss)

    steps = make_steps(With(), mlp)
    jointly(With(make=make), steps)
    assert [step.execution.together for step in steps] == [4] * 4, steps[0].execution.looped_because


def test_a_hook_on_one_clients_model_acts_on_that_client_alone() -> None:
    def local(method: Method, hooked: bool) -> list[Step]:
        steps = make_steps(FedAvg(), mlp)
        steps[1].models["model"].output.register_forward_hook(lambda module, inputs, output: output * 2)
        (jointly if hooked else looped)(FedAvg(), steps)
        return steps

    one, other = local(FedAvg(), True), local(FedAvg(), False)
    assert [step.execution.together for step in one] == [3, 1, 3, 3]
    for a, b in zip(one, other, strict=True):
        for name, value in a.floating_state().items():
            torch.testing.assert_close(value, b.floating_state()[name], rtol=1e-4, atol=1e-5)


def test_a_plain_attribute_of_a_model_keeps_clients_apart() -> None:
    steps = make_steps(FedAvg(), mlp)
    for index, step in enumerate(steps):
        step.models["model"].output.slope = index % 2
    jointly(FedAvg(), steps)
    assert [step.execution.together for step in steps] == [2] * 4


def test_clients_that_hold_different_tensors_do_not_spoil_it_for_others() -> None:
    def loss(step: Step, batch: Batch) -> Tensor:
        extra = step.state["extra"].sum() if "extra" in step.state else 0.0
        return entropy(step, batch) + extra

    unlike = "not all clients have step.state['extra']"
    for having, reason in ((2, unlike), (4, ""), (0, ""), (2, unlike), (4, "")):
        steps = make_steps(FedAvg(), mlp)
        for step in steps[:having]:
            step.state["extra"] = torch.ones(2)
        jointly(With(make=lambda step: loss), steps)
        assert [step.execution.looped_because for step in steps] == [reason] * 4
        assert steps[0].execution.together == (1 if reason else 4)
    steps = make_steps(FedAvg(), mlp)
    for index, step in enumerate(steps):
        step.state["extra"] = torch.ones(index)
    jointly(With(make=lambda step: loss), steps)
    assert steps[0].execution.looped_because == "step.state['extra'] differs between clients in shape or type"


def test_clients_that_received_different_entries_are_not_mixed() -> None:
    steps = make_steps(FedAvg(), mlp)
    for index, step in enumerate(steps):
        step.received = {f"cluster {index % 2}": step.received["global"]}
    jointly(FedAvg(), steps)
    assert [step.execution.together for step in steps] == [2] * 4
    steps[0].options = {"mask": [1, 2]}
    jointly(FedAvg(), steps)
    assert [step.execution.together for step in steps] == [1, 2, 1, 2]


def test_a_loss_that_is_no_scalar_is_refused_as_in_a_loop() -> None:
    def loss(step: Step, batch: Batch) -> Tensor:
        return F.cross_entropy(step.forward("model", batch), batch.y, reduction="none")

    steps = make_steps(FedAvg(), mlp, sizes=(4, 8))
    found = together.run_in_lockstep([lambda s=s: With(make=lambda step: loss).local(s) for s in steps])
    assert all("grad can be implicitly created only for scalar outputs" in str(error) for error in found)
    assert "the loss is not a scalar but (4,)" in steps[0].execution.looped_because


def test_a_failure_in_the_middle_leaves_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, alone = make_steps(FedAvg(), mlp), make_steps(FedAvg(), mlp)
    calls = 0
    compute = StackedClients.compute

    def failing(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("in the middle")
        return compute(*arguments)

    monkeypatch.setattr(StackedClients, "compute", failing)
    found = jointly(FedAvg(), steps)
    assert steps[0].execution.looped_because == "RuntimeError: in the middle"
    for a, b in zip(found, looped(FedAvg(), alone), strict=True):
        assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in b.tensors)
    jointly(FedAvg(), again := make_steps(FedAvg(), mlp))
    assert again[0].execution.together == 4, "what went wrong once in the middle is no property of the loss"


def test_too_little_memory_means_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(StackedClients, "compute", full)
        steps = compare(FedAvg())
    assert steps[0].execution.looped_because == "not enough memory for so many clients at once: no room"
    jointly(FedAvg(), again := make_steps(FedAvg(), mlp))
    assert again[0].execution.together == 4


def test_a_client_that_fails_fails_alone() -> None:
    class OddError(Exception):
        pass

    def client(step: Step) -> Update:
        update = FedAvg().local(step)
        if step.client.index == 1:
            raise OddError("its own")
        return update

    steps = make_steps(FedAvg(), mlp)
    found = together.run_in_lockstep([lambda s=s: client(s) for s in steps])
    assert isinstance(found[1], OddError)
    assert sum(isinstance(update, Update) for update in found) == 3


def test_a_loss_that_writes_into_its_state_is_computed_apart_from_the_start() -> None:
    """Neither the trial nor a batched computation may reach what a client holds."""
    for _ in range(2):
        both = []
        for run in (jointly, looped):
            steps = make_steps(FedAvg(), mlp)
            for step in steps:
                step.state["count"] = torch.zeros(())
            run(With(make=lambda step: writes_into_state), steps)
            both.append(steps)
        for joint, alone in zip(*both, strict=True):
            assert joint.execution.together == 1
            assert torch.equal(joint.state["count"], alone.state["count"])
            for name, value in joint.floating_state().items():
                assert torch.equal(value, alone.floating_state()[name])


class Frozen(nn.Module):
    """Its first layers stay as in evaluation, whatever train() is told."""

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


def test_layers_that_stay_in_evaluation_do_so_from_the_first_fit_on() -> None:
    joint, alone = (make_steps(FedAvg(), lambda: {"model": Frozen()}) for _ in range(2))
    jointly(FedAvg(), joint)
    looped(FedAvg(), alone)
    assert [step.execution.together for step in joint] == [4] * 4, joint[0].execution.looped_because
    for a, b in zip(joint, alone, strict=True):
        for name, value in a.floating_state().items():
            torch.testing.assert_close(value, b.floating_state()[name], rtol=1e-4, atol=1e-5)


def test_a_private_attribute_of_a_model_keeps_clients_apart() -> None:
    steps = make_steps(FedAvg(), mlp)
    for step in steps:
        step.models["model"]._scale = torch.tensor(1.0 + step.client.index)
    jointly(FedAvg(), steps)
    assert [step.execution.together for step in steps] == [1] * 4


def test_no_epochs_are_no_training_and_spoil_nothing() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Lazy(Method):
        epochs: int = 0

        def local(self, step: Step) -> Update:
            return step.update(fit(step, entropy, epochs=self.epochs))

    for epochs, together_ in ((0, 1), (1, 4), (0, 1)):
        steps = make_steps(FedAvg(), mlp)
        jointly(Lazy(epochs=epochs), steps)
        assert [step.execution.together for step in steps] == [together_] * 4, steps[0].execution.looped_because


def test_what_a_loss_captured_is_part_of_what_was_found_out_about_it() -> None:
    """A wrapper of a loss that keeps the rules says nothing about the same wrapper of one that breaks them."""

    def wrapped(inner: Loss) -> Loss:
        return lambda step, batch: 2 * inner(step, batch)

    jointly(With(make=lambda step: wrapped(entropy)), good := make_steps(FedAvg(), mlp))
    assert good[0].execution.together == 4

    def unweighted(step: Step, batch: Batch) -> Tensor:
        return F.cross_entropy(step.forward("model", batch), batch.y)  # padding would count

    steps = compare(With(make=lambda step: wrapped(unweighted)))
    assert "padding changes the loss" in steps[0].execution.looped_because

    def switched(padding: bool) -> Loss:
        return lambda step, batch: unweighted(step, batch) if padding else entropy(step, batch)

    jointly(With(make=lambda step: switched(False)), good := make_steps(FedAvg(), mlp))
    assert good[0].execution.together == 4
    assert "padding changes the loss" in compare(With(make=lambda step: switched(True)))[0].execution.looped_because
