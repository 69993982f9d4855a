"""Law: what is done from a tape has the bits of what the loss's code does; what is not always the same is never taped."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import finish, stop_after
from helpers import same as same_bytes
from several_clients import BANDS, CLASSES, Networks, make_steps
from test_law_8 import FAMILIES, METHODS, Heads, Tied, networks
from torch import Tensor, nn

from raydfl.core.types import Batch, Update
from raydfl.engine.config import Config
from raydfl.methods._method import Method
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedkad import FedKAD
from raydfl.methods.fedprox import FedProx
from raydfl.models.crnn import CRNN
from raydfl.models.dense import MeanLinear
from raydfl.training import gradients
from raydfl.training.fit import fit
from raydfl.training.step import Step
from raydfl.training.together.signature import VaryingError, constants

EXTRA = Path(__file__).parents[2] / "extra_methods.py"


@pytest.fixture(autouse=True)
def recorded_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gradients, "FIRST", 1)
    gradients.forget()
    yield
    gradients.forget()


def known() -> list[gradients._Known]:
    return [one for those in gradients._known.values() for one in those.values()]


def taped() -> int:
    """Computations that have a tape."""
    return sum(one.tape is not None for one in known())


def rounds(
    method: Method,
    build: Networks,
    tape: bool,
    number: int = 4,
    change: Callable[[Step], object] | None = None,
    **of: Any,
) -> list[Any]:
    """Everything that several rounds of all clients leave behind, one client after another."""
    left: list[Any] = []
    for index in range(number):
        steps = make_steps(method, build, round_index=index, **of)
        for step in steps:
            step.training = step.training.model_copy(update={"tape": tape})
            if change is not None:
                change(step)
            torch.manual_seed(index)
            update = method.local(step)
            left += [dict(update.tensors), dict(update.metrics), step.floating_state(), dict(step.state)]
            left += [{"": buffer} for model in step.models.values() for buffer in model.buffers()]
            left += [step.rng.bit_generator.state, {"": torch.get_rng_state()}, step.clock.steps]
    return left


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def assert_same_bits(method: Method, build: Networks, **settings: Any) -> None:
    by_code = rounds(method, build, False, **settings)
    assert not known()
    by_tape = rounds(method, build, True, **settings)
    assert len(by_code) == len(by_tape)
    assert all(same(a, b) for a, b in zip(by_code, by_tape, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [False, True], ids=["fixed", "lengths"])
@pytest.mark.parametrize("method", [m for methods in METHODS.values() for m in methods], ids=repr)
def test_every_method_and_family(method: Method, lengths: bool, family: str) -> None:
    # Of fixed length there are batches of 4 and of 1 (of 1 and more frames, with lengths: those of some shapes come too seldom).
    assert_same_bits(method, networks(method, family), lengths=lengths, sizes=(8, 5, 4))
    if isinstance(method, FedKAD):  # maps features of another size by a matrix that is not in its step
        assert taped() == 0
        return
    assert taped() >= (1 if lengths else 2)
    assert not any(one.refused for one in known())


def test_fedkad_with_features_of_the_size_of_its_class_means() -> None:
    method = FedKAD(size=BANDS)
    assert_same_bits(method, networks(method, "linear"))
    assert taped() > 0


@pytest.mark.parametrize(
    "optimiser",
    [
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "clip_norm": 0.05},
        {"name": "adam", "lr": 0.01, "weight_decay": 0.1},
        {"name": "adamw", "lr": 0.01, "clip_norm": 0.05},
        {"lr": 0.3, "decay": 0.5},
    ],
    ids=str,
)
def test_every_optimiser(optimiser: dict[str, Any]) -> None:
    """What optimisers and clipping do to gradients in place reaches nobody else."""
    assert_same_bits(FedProx(mu=0.5), networks(FedProx(), "crnn"), optimiser=optimiser)
    assert taped() > 0


class Normalised(nn.Module):
    """Buffers that change in every step, a random mask of PyTorch's, and one of raydfl's."""

    def __init__(self) -> None:
        super().__init__()
        self.crnn = CRNN(BANDS, 4, filters=(4,), hidden=3, dropout=0.4)
        self.norm = nn.BatchNorm1d(4)
        self.output = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        logits: Tensor = self.output(F.dropout(self.norm(self.crnn(x, lengths)), 0.3, self.training))
        return logits


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("network", [Normalised, Tied])
def test_buffers_random_masks_and_tied_weights(network: Callable[[], nn.Module], precision: str) -> None:
    def short(step: Step) -> None:
        step.training = step.training.model_copy(update={"precision": precision})

    # Without batches of one example, which batch normalisation refuses.
    assert_same_bits(FedAvg(), lambda: {"model": network()}, sizes=(8, 4, 6), change=short)
    assert taped() == 2


def test_two_fits_frozen_layers_and_state() -> None:
    assert_same_bits(Heads(), lambda: {"a": FAMILIES["mlp"](), "b": FAMILIES["mlp"]()}, optimiser={"lr": 1e-3})
    assert len(gradients._known) == 2
    assert taped() > 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(Method):
    """A method whose loss is cross-entropy times what a function makes of the step, and its own objects."""

    factor: Any
    held: Any = None

    def loss(self, step: Step, batch: Batch) -> Tensor:
        value: Tensor = super().loss(step, batch) * self.factor(self, step, batch)
        return value


_counted = [0]
_weights = torch.ones(CLASSES)


def counting(*_: Any) -> float:
    _counted[0] += 1
    return 1 + 0.01 * (_counted[0] % 5)


class Settable:
    value = 0.5


def remembers(method: Odd, step: Step, batch: Batch) -> Tensor:
    """The mean label that this client has seen."""
    seen = step.state.get("seen", torch.zeros(()))
    step.state["seen"] = seen + batch.y.float().mean()
    return 1 + step.state["seen"]


def in_place(method: Odd, step: Step, batch: Batch) -> Tensor:
    step.state["seen"].add_(batch.y.float().mean())
    return 1 + step.state["seen"]


NEVER: dict[str, tuple[Callable[[Odd, Step, Batch], Any], Any]] = {
    "the round": (lambda m, s, b: 1.0 + s.round_index, None),
    "the client": (lambda m, s, b: 1.0 + s.client.index, None),
    "the data": (lambda m, s, b: 1 / len(s.data.train), None),
    "the client's generator": (lambda m, s, b: 1.0 + s.rng.uniform(), None),
    "settings of the training": (lambda m, s, b: 1.0 + s.training.batch_size, None),
    "a count of its own": (counting, None),
    "a value": (lambda m, s, b: float(b.y.float().mean()) + 1, None),
    "a branch": (lambda m, s, b: 2.0 if b.y[0] == 0 else 1.0, None),
    "a tensor from elsewhere": (lambda m, s, b: _weights[b.y].mean(), None),
    "an object that can change": (lambda m, s, b: m.held.value, Settable()),
    "a captured tensor": (lambda m, s, b: 1.0, torch.ones(())),
    "a new state": (remembers, None),
    "a field of the step": (lambda m, s, b: setattr(s, "apart", "so") or 1.0, None),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_is_not_always_the_same_runs_by_code(name: str) -> None:
    factor, held = NEVER[name]
    _counted[0] = 0
    by_code = rounds(Odd(factor=factor, held=held), networks(FedAvg()), False)
    _counted[0] = 0
    by_tape = rounds(Odd(factor=factor, held=held), networks(FedAvg()), True)
    assert taped() == 0
    if name != "a count of its own":  # to record it, the loss is called once more
        assert all(same(a, b) for a, b in zip(by_code, by_tape, strict=True))


_seen: list[int] = []
_number = {"calls": 0}


class Noted:
    seen: ClassVar[dict[int, int]] = {}


def _note(batch: Batch) -> None:
    _seen.append(len(batch.y))


def in_a_list(batch: Batch) -> None:
    _seen.append(len(batch.y))


def through_a_function(batch: Batch) -> None:
    _note(batch)


def in_a_number(batch: Batch) -> None:
    _number["calls"] += 1


def in_a_class(batch: Batch) -> None:
    Noted.seen[len(Noted.seen)] = len(batch.y)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Method):
    """FedAvg whose loss counts its calls somewhere outside of the step."""

    how: Any
    calls: ClassVar[list[int]] = []

    def loss(self, step: Step, batch: Batch) -> Tensor:
        if self.how is None:
            self.calls.append(1)
        else:
            self.how(batch)
        return super().loss(step, batch)


class CountingNetwork(nn.Module):
    """Its forward counts, not the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MeanLinear(BANDS, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        _seen.append(len(x))
        logits: Tensor = self.inner(x, lengths)
        return logits


COUNTERS: dict[str, tuple[Callable[[Batch], None] | None, Callable[[], int]]] = {
    "a list": (in_a_list, lambda: len(_seen)),
    "a function's list": (through_a_function, lambda: len(_seen)),
    "a number": (in_a_number, lambda: _number["calls"]),
    "a class's dict": (in_a_class, lambda: len(Noted.seen)),
    "a list of the method's class": (None, lambda: len(Counting.calls)),
}


@pytest.mark.parametrize("name", [*COUNTERS, "a captured list"])
def test_a_loss_that_counts_its_calls_counts_them_all(name: str) -> None:
    """In each round as many as there are steps: neither one more, where it could have been recorded, nor fewer after it."""
    captured: list[Batch] = []
    how, count = COUNTERS.get(name, (captured.append, lambda: len(captured)))
    method, counts = Counting(how=how), []
    for index in range(5):
        before = count()
        for step in make_steps(method, networks(FedAvg()), round_index=index):
            method.local(step)
        counts.append(count() - before)
    assert counts == [counts[0]] * 5
    assert taped() == 0


def test_a_network_that_counts_its_calls_counts_them_all() -> None:
    counts = []
    for index in range(5):
        before = len(_seen)
        for step in make_steps(FedAvg(), lambda: {"model": CountingNetwork()}, round_index=index):
            FedAvg().local(step)
        counts.append(len(_seen) - before)
    assert counts == [counts[0]] * 5
    assert taped() == 0


def test_a_loss_that_names_constants_is_recorded() -> None:
    """What cannot change unseen is no reason to run the code: numbers, tables of them, functions, other classes."""
    assert_same_bits(Weighted(), networks(FedAvg()))
    assert taped() > 0
    assert not any(one.refused for one in known())


_TABLE = {"weight": [0.5, 1.5]}


def _weight(number: int) -> float:
    return _TABLE["weight"][number]


class Weighted(FedAvg):
    number: ClassVar[int] = 1

    def loss(self, step: Step, batch: Batch) -> Tensor:
        return super().loss(step, batch) * self.weight()

    def weight(self) -> float:
        return _weight(type(self).number) + math.log(2)


def test_a_state_that_is_changed_in_place() -> None:
    def start(step: Step) -> None:
        step.state["seen"] = torch.zeros(())

    assert_same_bits(Odd(factor=in_place), networks(FedAvg()), change=start)
    assert taped() > 0


def renews(method: Odd, step: Step, batch: Batch) -> Tensor:
    """Replaces the state, or an attribute of the model, at small batches, for which no tape can be made."""
    if len(batch.y) < 4:
        if method.held == "state":
            step.state["seen"] = step.state["seen"] + batch.y.float().mean()
        else:
            step.models["model"].width = 1.5  # type: ignore[assignment]
    return 1 + step.state["seen"]


@pytest.mark.parametrize("what", ["state", "attribute"])
def test_what_changes_between_taped_steps(what: str) -> None:
    def start(step: Step) -> None:
        step.state["seen"] = torch.zeros(())

    assert_same_bits(
        Odd(factor=renews, held=what), lambda: {"model": Widening()}, change=start, sizes=(5, 9, 6), number=5
    )
    assert taped() > 0
    assert any(one.refused for one in known())


class Widening(nn.Module):
    """A layer with a number that a method may set, and one that counts; a buffer of truth values."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(CLASSES, dtype=torch.bool))
        self.inner = MeanLinear(BANDS, CLASSES)
        self.width = 1.0
        self.counts = counts

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if self.counts:
            self.width += 0.5
        logits: Tensor = self.inner(x, lengths) * self.width * self.mask
        return logits


def test_attributes_of_layers() -> None:
    """Each value has a tape of its own; what changes while it computes has none."""

    def widen(step: Step) -> None:
        step.models["model"].width = 1.0 + step.client.index % 2  # type: ignore[assignment]

    assert_same_bits(FedAvg(), lambda: {"model": Widening()}, change=widen)
    assert {one.tape.code.count("2.0") > 0 for one in known() if one.tape is not None} == {True, False}
    gradients.forget()
    assert_same_bits(FedAvg(), lambda: {"model": Widening(counts=True)})
    assert taped() == 0


@pytest.mark.parametrize("where", ["layer", "parameter", "gradient"])
def test_hooks(where: str) -> None:
    def hook(step: Step) -> None:
        layer, scale = step.models["model"].output, 1.0 + step.client.index  # type: ignore[union-attr]
        if where == "layer":
            layer.register_forward_hook(lambda *given: given[-1] * scale)  # type: ignore[union-attr, operator]
        elif where == "parameter":
            layer.weight.register_hook(lambda gradient: gradient * scale)  # type: ignore[union-attr, operator]
        else:
            layer.weight.register_post_accumulate_grad_hook(lambda p: _scale(p, scale))  # type: ignore[union-attr, operator]

    assert_same_bits(FedAvg(), networks(FedAvg()), change=hook)
    assert not known()


def _scale(parameter: Tensor, factor: float) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(factor)


def test_other_clients_other_tensors() -> None:
    """A tape is used where the tensors that it reads have the form that they had; elsewhere the loss's code runs."""

    def pulled(method: Odd, step: Step, batch: Batch) -> Tensor:
        return step.state["target"].square().mean() + step.received["global"]["model/output.bias"].square().mean()

    def targets(step: Step) -> None:
        step.state["target"] = torch.full((1 + step.client.index % 2,), 2.0 + step.client.index)

    assert_same_bits(Odd(factor=pulled), networks(FedAvg()), change=targets)
    assert taped() > 0


def test_tied_at_some_clients_only() -> None:
    def tie(step: Step) -> None:
        if step.client.index % 2:
            step.models["model"].second.weight = step.models["model"].first.weight  # type: ignore[union-attr]
        else:
            step.models["model"].second.weight = nn.Parameter(torch.eye(BANDS))  # type: ignore[union-attr]

    assert_same_bits(FedAvg(), lambda: {"model": Tied()}, change=tie)
    assert taped() > 2


def test_what_a_loss_captured_is_part_of_it() -> None:
    """Another number is another computation, a function of the same code and numbers is the same."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Scheduled(Method):
        def local(self, step: Step) -> Update:
            weight = 1.0 + step.round_index % 2

            def loss(step: Step, batch: Batch) -> Tensor:
                return self.loss(step, batch) * weight

            return step.update(fit(step, loss))

    assert_same_bits(Scheduled(), networks(FedAvg()), number=6)
    assert len(gradients._known) == 2
    assert taped() > 2


def test_options_of_the_task() -> None:
    def option(step: Step) -> None:
        step.options = {"weight": 1.0 + step.client.index % 2}

    assert_same_bits(Odd(factor=lambda m, s, b: s.options["weight"]), networks(FedAvg()), change=option)
    assert len(gradients._known) == 2
    assert taped() > 2


def test_what_differs_in_another_round_is_seen_there() -> None:
    """A number that no look at the step shows: the second recording tells that it has changed."""
    season = {"factor": 1.0}

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Seasonal(Method):
        def loss(self, step: Step, batch: Batch) -> Tensor:
            return super().loss(step, batch) * _season(season)

    def turn(step: Step) -> None:
        season["factor"] = 1.0 + 0.5 * step.round_index

    assert_same_bits(Seasonal(), networks(FedAvg()), change=turn)
    assert taped() == 0


def _season(season: dict[str, float]) -> float:
    return season["factor"]


def test_another_tensor_for_the_same_operations() -> None:
    """Which tensors are read is part of what has to be the same."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Either(Method):
        def loss(self, step: Step, batch: Batch) -> Tensor:
            return super().loss(step, batch) * step.state[_name()].mean()

    def turn(step: Step) -> None:
        step.state.update(a=torch.tensor([2.0]), b=torch.tensor([3.0]))
        _current[0] = "ab"[step.round_index % 2]

    assert_same_bits(Either(), networks(FedAvg()), change=turn)
    assert taped() == 0


_current = ["a"]


def _name() -> str:
    return _current[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InBfloat16(Method):
    """Trains inside of an autocast of its own, but not in the first rounds."""

    def local(self, step: Step) -> Update:
        with torch.autocast("cpu", torch.bfloat16, enabled=step.round_index > 3):
            return super().local(step)


class StaysAsItIs(nn.Module):
    """Random masks unless somebody says otherwise: fit() does not change whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MeanLinear(BANDS, CLASSES)

    def train(self, mode: bool = True) -> StaysAsItIs:
        return self

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        logits: Tensor = F.dropout(self.inner(x, lengths), 0.5, self.training)
        return logits


def test_what_surrounds_a_fit() -> None:
    """PyTorch's own settings and whether a layer trains are part of what has to be the same."""
    assert_same_bits(InBfloat16(), networks(FedAvg(), "linear"), number=6)
    assert taped() > 0
    gradients.forget()

    def evaluating(step: Step) -> None:
        step.models["model"].training = step.client.index % 2 == 0

    assert_same_bits(FedAvg(), lambda: {"model": StaysAsItIs()}, change=evaluating)
    assert len(gradients._known) == 2
    assert taped() > 2


def test_never_from_less_than_two_rounds() -> None:
    """One in which it is seen, then two in which it is recorded."""
    for number, recorded in ((1, False), (2, True), (3, True)):
        gradients.forget()
        rounds(FedAvg(), networks(FedAvg()), True, number=number)
        assert any(one.recorded for one in known()) is recorded
        assert (taped() > 0) is (number == 3)


def test_a_failure_leaves_the_client_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while a tape is made, the client ends as if nobody had tried."""

    def broken(computation: Callable[[], Any], _: Any) -> Any:
        computation()
        raise MemoryError("no room")

    monkeypatch.setattr(gradients, "record", broken)
    assert_same_bits(FedAvg(), lambda: {"model": Normalised()}, sizes=(8, 4, 6))
    assert all(one.refused for one in known() if one.done > 1)


def test_a_tape_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gradients.record

    def rounding(computation: Callable[[], Any], origins: Any) -> Any:
        tape = real(computation, origins)
        run = tape.run
        tape.run = lambda *given: tuple(None if t is None else t * (1 + 1e-6) for t in run(*given))
        return tape

    monkeypatch.setattr(gradients, "record", rounding)
    assert_same_bits(FedAvg(), networks(FedAvg()))
    assert taped() == 0


def test_large_networks_and_states_run_by_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(step: Step) -> None:
        step.state["many"] = torch.zeros(10)

    model = networks(FedAvg())()["model"]
    monkeypatch.setattr(gradients, "LARGEST", sum(tensor.numel() for tensor in model.state_dict().values()) + 9)
    rounds(FedAvg(), networks(FedAvg()), True, number=1, change=start)
    assert not known()
    rounds(FedAvg(), networks(FedAvg()), True, number=1)
    assert known()


def test_kinds_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_KINDS", 3)
    for number in range(5):
        method = FedProx(mu=1.0 + number)
        rounds(method, networks(method), True, number=1)
    assert len(gradients._known) == 2


def test_clips_of_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many shapes a few are recorded, the nth when it has come (n - 1)² times more often; not all of them are even counted."""
    monkeypatch.setattr(gradients, "_SHAPES", 7)
    assert_same_bits(FedAvg(), networks(FedAvg(), "linear"), lengths=True, number=12)
    assert len(known()) == 7
    recorded = sorted(one.done for one in known() if one.recorded)
    assert 2 < len(recorded) < 7
    assert all(done > gradients.FIRST + place**2 for place, done in enumerate(recorded))


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedmlac"])
def test_whole_runs(method: str, tiny: Callable[..., Config]) -> None:
    """A run that is stopped and goes on with the other setting is the same run."""
    rounds = "train.rounds=10"
    by_code = finish(tiny("run.name=code", "train.tape=false", rounds, method=method))
    assert not known()
    by_tape = finish(tiny("run.name=tape", rounds, method=method))
    assert taped() > 0
    stop_after(tiny("run.name=both", "train.tape=false", rounds, method=method), 3)
    both = finish(tiny("run.name=both", rounds, method=method))
    same_bytes(by_code, by_tape)
    same_bytes(by_code, both)


@pytest.mark.parametrize("method", ["scaffold", f"{EXTRA}:Summing"])
def test_methods_that_keep_several_tensors_are_recorded(
    method: str, tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their state has one order, so that what a client does in later rounds is one kind of computation."""
    played: list[object] = []
    real = gradients.Gradients._from_tape
    monkeypatch.setattr(gradients.Gradients, "_from_tape", lambda *given: played.append(given[1]) or real(*given))
    finish(tiny("train.rounds=8", "train.cohort=1.0", method=method))
    assert len(played) > sum(one.done for one in known())
    assert not any(one.refused for one in known())


def made(factor: float) -> Callable[[float], float]:
    def function(x: float, power: float = 2.0) -> float:
        return function(x / 2, power) if x > 1 else float(factor * x**power)

    return function


def test_what_cannot_change_unseen() -> None:
    assert constants([1, "a", (True, None), {"k": 0.5}]) == constants([1, "a", (True, None), {"k": 0.5}])
    assert constants([1, "a", (True, None), {"k": 0.5}]) != constants([1, "a", (1, None), {"k": 0.5}])
    assert constants(made(1.0)) == constants(made(1.0)) != constants(made(2.0))
    assert constants(functools.partial(made, 1.0)) != constants(functools.partial(made, 2.0))
    assert constants(FedProx(mu=1.0).loss) == constants(FedProx(mu=1.0).loss) != constants(FedProx(mu=2.0).loss)
    for value in (torch.ones(1), object(), [set()], Settable().__init__, nn.ReLU(), {"a": [Settable()]}):
        with pytest.raises(VaryingError):
            constants(value)
