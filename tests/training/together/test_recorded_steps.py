"""Law: what is done from a recording has the bits of what the loss's code does, and only code that is declared pure is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import stop_after
from several_clients import BANDS, CLASSES, Networks, make_steps
from test_law_8 import AT_CLIENTS, FAMILIES, METHODS, Heads, Tied, combined, networks
from torch import Tensor, nn

from raydfl.core import registry
from raydfl.core.types import Batch, Update
from raydfl.engine.config import Config
from raydfl.methods._method import Method
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedkad import FedKAD
from raydfl.methods.fedprox import FedProx
from raydfl.models.crnn import CRNN
from raydfl.models.dense import MeanLinear
from raydfl.models.shufflenet_v2 import ShuffleNetV2
from raydfl.testing import assert_same_bits as same_bytes
from raydfl.testing import train_federation
from raydfl.training import _fit as fit_module
from raydfl.training import tape
from raydfl.training._fit import fit
from raydfl.training.step import Step

EXTRA = Path(__file__).parents[2] / "extra_methods.py"

_recordings: list[dict[Hashable, dict[Hashable, tape.Recording]]] = []
"""Of every network in a test."""


@pytest.fixture(autouse=True)
def recorded_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def noted(step: Step, *given: Any) -> tape.Compute:
        if step.execution.recordings is not None and all(
            step.execution.recordings is not known for known in _recordings
        ):
            _recordings.append(step.execution.recordings)
        return tape.recorded(step, *given)

    monkeypatch.setattr(tape, "FIRST", 1)
    monkeypatch.setattr(fit_module, "recorded", noted)
    yield
    _recordings.clear()


def known() -> list[tape.Recording]:
    return [one for kinds in _recordings for shapes in kinds.values() for one in shapes.values()]


def kinds() -> int:
    return sum(map(len, _recordings))


def taped() -> int:
    """Computations that have a tape; each was used."""
    return sum(one.tape is not None and one.played > 0 for one in known())


def refused() -> int:
    return sum(one.tried and one.tape is None for one in known())


def rounds(
    method: Method,
    build: Networks,
    tape: bool,
    number: int = 4,
    change: Callable[[Step], object] | None = None,
    **of: Any,
) -> list[Any]:
    """Everything that several rounds of all clients leave behind, one client after another, as one worker does them."""
    left: list[Any] = []
    recordings: dict[Hashable, dict[Hashable, Any]] = {}
    for index in range(number):
        steps = make_steps(method, build, round_index=index, **of)
        for step in steps:
            step.training = step.training.model_copy(update={"tape": tape})
            step.execution.recordings = recordings if type(method).pure else None
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


def test_every_built_in_method_is_declared_and_nobody_inherits_it() -> None:
    built_in = [type(method) for methods in METHODS.values() for method in methods]
    assert all(method.pure for method in built_in)

    class Silent(FedAvg):
        pass

    class Declared(Silent):
        pure: ClassVar[bool] = True

    class Below(Declared):
        pass

    assert (Method.pure, Silent.pure, Declared.pure, Below.pure) == (False, False, True, False)


@pytest.mark.parametrize(
    ("method", "family", "lengths"),
    [
        pytest.param(method, family, lengths, id=place, marks=marks)
        for methods in AT_CLIENTS.values()
        for method in methods
        for family, lengths, place, marks in combined(repr(method), first=type(method) is FedAvg)
    ],
)
def test_every_method_and_family(method: Method, lengths: bool, family: str) -> None:
    # Of fixed length there are batches of 4 and of 1 (of 1 and more frames, with lengths: those of some shapes come too seldom).
    assert_same_bits(method, networks(method, family), lengths=lengths, sizes=(8, 5, 4), number=3 if lengths else 2)
    if isinstance(method, FedKAD):  # maps features of another size by a matrix that is not in its step
        assert (taped(), refused() > 0) == (0, True)
        return
    assert taped() >= (1 if lengths else 2)
    assert refused() == 0


def test_fedkad_with_features_of_the_size_of_its_class_means() -> None:
    method = FedKAD(size=BANDS)
    assert_same_bits(method, networks(method, "linear"))
    assert taped() > 0


def test_torchvisions_layers_are_declared() -> None:
    few: dict[str, Any] = {"sizes": (4, 4), "number": 2, "epochs": 1}
    assert_same_bits(FedAvg(), lambda: {"model": ShuffleNetV2(BANDS, CLASSES)}, **few)
    assert taped() == 1


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

    pure: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.crnn = CRNN(BANDS, 4, filters=(4,), hidden=3, dropout=0.4)
        self.norm = nn.BatchNorm1d(4)
        self.output = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        logits: Tensor = self.output(F.dropout(self.norm(self.crnn(x, lengths)), 0.3, self.training))
        return logits


class PureTied(Tied):
    pure: ClassVar[bool] = True


class PureHeads(Heads):
    pure: ClassVar[bool] = True


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("network", [Normalised, PureTied])
def test_buffers_random_masks_and_tied_weights(network: Callable[[], nn.Module], precision: str) -> None:
    def short(step: Step) -> None:
        step.training = step.training.model_copy(update={"precision": precision})

    # Without batches of one example, which batch normalisation refuses.
    assert_same_bits(FedAvg(), lambda: {"model": network()}, sizes=(8, 4, 6), change=short)
    assert taped() == 2


def test_two_fits_frozen_layers_and_state() -> None:
    assert_same_bits(PureHeads(), lambda: {"a": FAMILIES["mlp"](), "b": FAMILIES["mlp"]()}, optimiser={"lr": 1e-3})
    assert kinds() == 2
    assert taped() > 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(Method):
    """A method whose loss is cross-entropy times what a function makes of the step, and its own objects."""

    pure: ClassVar[bool] = True
    factor: Any
    held: Any = None

    def loss(self, step: Step, batch: Batch) -> Tensor:
        value: Tensor = super().loss(step, batch) * self.factor(self, step, batch)
        return value


_weights = torch.ones(CLASSES)


def remembers(method: Odd, step: Step, batch: Batch) -> Tensor:
    """The mean label that this client has seen."""
    seen = step.state.get("seen", torch.zeros(()))
    step.state["seen"] = seen + batch.y.float().mean()
    return 1 + step.state["seen"]


def in_place(method: Odd, step: Step, batch: Batch) -> Tensor:
    step.state["seen"].add_(batch.y.float().mean())
    return 1 + step.state["seen"]


BROKEN: dict[str, tuple[Callable[[Odd, Step, Batch], Any], Any]] = {
    "the round": (lambda m, s, b: 1.0 + s.round_index, None),
    "the client": (lambda m, s, b: 1.0 + s.client.index, None),
    "the data": (lambda m, s, b: 1 / len(s.data.train), None),
    "the client's generator": (lambda m, s, b: 1.0 + s.rng.uniform(), None),
    "settings of the training": (lambda m, s, b: 1.0 + s.training.batch_size, None),
    "a value": (lambda m, s, b: float(b.y.float().mean()) + 1, None),
    "a branch": (lambda m, s, b: 2.0 if b.y[0] == 0 else 1.0, None),
    "a tensor from elsewhere": (lambda m, s, b: _weights[b.y].mean(), None),
    "a new state": (remembers, None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_runs_by_code(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """What shows when it is recorded: the loss goes on by its code, and a line of the log says why."""
    factor, held = BROKEN[name]
    with caplog.at_level("INFO", logger="raydfl"):
        assert_same_bits(Odd(factor=factor, held=held), networks(FedAvg()))
    assert taped() == 0
    if name != "a new state":  # each fit begins with another
        assert refused() > 0
        assert "Odd.loss runs by its code in every step" in caplog.text


_seen: list[int] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """A user's FedAvg whose loss counts its calls, and says nothing about itself."""

    def loss(self, step: Step, batch: Batch) -> Tensor:
        _seen.append(len(batch.y))
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


class CountingBelow(PureTied):
    """A subclass of a network that is declared says nothing by that."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        _seen.append(len(x))
        return super().forward(x, lengths)


@pytest.mark.parametrize(
    ("method", "build"),
    [
        (Counting(), networks(FedAvg())),
        (FedAvg(), lambda: {"model": CountingNetwork()}),
        (FedAvg(), lambda: {"model": CountingBelow()}),
    ],
    ids=["loss", "network", "subclass"],
)
def test_a_loss_that_counts_its_calls_counts_them_all(method: Method, build: Networks) -> None:
    """Neither one call more, where it could have been recorded, nor fewer after it."""
    _seen.clear()
    rounds(method, build, False)
    by_code = len(_seen)
    rounds(method, build, True)
    assert len(_seen) == 2 * by_code > 0
    assert not known()


def test_a_state_that_is_changed_in_place() -> None:
    def start(step: Step) -> None:
        step.state["seen"] = torch.zeros(())

    assert_same_bits(Odd(factor=in_place), networks(FedAvg()), change=start)
    assert taped() > 0


class Widening(nn.Module):
    """A layer with a number that a method may set; a buffer of truth values."""

    pure: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(CLASSES, dtype=torch.bool))
        self.inner = MeanLinear(BANDS, CLASSES)
        self.width = 1.0

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        logits: Tensor = self.inner(x, lengths) * self.width * self.mask
        return logits


def test_attributes_of_layers() -> None:
    """Each value has a tape of its own."""

    def widen(step: Step) -> None:
        step.models["model"].width = 1.0 + step.client.index % 2  # type: ignore[assignment]

    assert_same_bits(FedAvg(), lambda: {"model": Widening()}, change=widen)
    assert kinds() == 2
    assert taped() > 2


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

    assert_same_bits(FedAvg(), lambda: {"model": PureTied()}, change=tie)
    assert taped() > 2


def test_what_a_loss_captured_is_part_of_it() -> None:
    """Another number is another computation, a function of the same code and numbers is the same."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Scheduled(Method):
        pure: ClassVar[bool] = True

        def local(self, step: Step) -> Update:
            weight = 1.0 + step.round_index % 2

            def loss(step: Step, batch: Batch) -> Tensor:
                return self.loss(step, batch) * weight

            return step.update(fit(step, loss))

    assert_same_bits(Scheduled(), networks(FedAvg()), number=6)
    assert kinds() == 2
    assert taped() > 2


def test_options_of_the_task() -> None:
    def option(step: Step) -> None:
        step.options = {"weight": 1.0 + step.client.index % 2}

    assert_same_bits(Odd(factor=lambda m, s, b: s.options["weight"]), networks(FedAvg()), change=option)
    assert kinds() == 2
    assert taped() > 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class InBfloat16(Method):
    """Trains inside of an autocast of its own, but not in the first rounds."""

    pure: ClassVar[bool] = True

    def local(self, step: Step) -> Update:
        with torch.autocast("cpu", torch.bfloat16, enabled=step.round_index > 3):
            return super().local(step)


class StaysAsItIs(nn.Module):
    """Random masks unless somebody says otherwise: fit() does not change whether it trains."""

    pure: ClassVar[bool] = True

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
    _recordings.clear()

    def evaluating(step: Step) -> None:
        step.models["model"].training = step.client.index % 2 == 0

    assert_same_bits(FedAvg(), lambda: {"model": StaysAsItIs()}, change=evaluating)
    assert kinds() == 2
    assert taped() > 2


def test_a_failure_leaves_the_client_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while a tape is made, the client ends as if nobody had tried."""

    def broken(computation: Callable[[], Any], _: Any) -> Any:
        computation()
        raise MemoryError("no room")

    monkeypatch.setattr(tape, "record", broken)
    assert_same_bits(FedAvg(), lambda: {"model": Normalised()}, sizes=(8, 4, 6))
    assert (taped(), refused() > 0) == (0, True)


def test_a_tape_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tape.record

    def rounding(computation: Callable[[], Any], origins: Any) -> Any:
        found = real(computation, origins)
        run = found.run
        found.run = lambda *given: tuple(None if t is None else t * (1 + 1e-6) for t in run(*given))
        return found

    monkeypatch.setattr(tape, "record", rounding)
    assert_same_bits(FedAvg(), networks(FedAvg()))
    assert taped() == 0


def test_large_networks_and_states_run_by_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(step: Step) -> None:
        step.state["many"] = torch.zeros(10)

    model = networks(FedAvg())()["model"]
    monkeypatch.setattr(tape, "LARGEST", sum(tensor.numel() for tensor in model.state_dict().values()) + 9)
    rounds(FedAvg(), networks(FedAvg()), True, number=1, change=start)
    assert not known()
    rounds(FedAvg(), networks(FedAvg()), True, number=1)
    assert known()


def test_kinds_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is another in each round: each is a kind of its own, and a network remembers the last few."""
    monkeypatch.setattr(tape, "_MOST", 3)

    def option(step: Step) -> None:
        step.options = {"weight": 1.0 + step.round_index}

    assert_same_bits(Odd(factor=lambda m, s, b: s.options["weight"]), networks(FedAvg()), number=5, change=option)
    assert kinds() == 2


def test_clips_of_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many shapes a few are recorded, the nth when it has come (n - 1)² times more often; not all of them are even counted."""
    monkeypatch.setattr(tape, "_MOST", 7)
    assert_same_bits(FedAvg(), networks(FedAvg(), "linear"), lengths=True, number=12)
    assert len(known()) == 7
    recorded = sorted(one.by_code for one in known() if one.tried)
    assert 2 < len(recorded) < 7
    assert all(done > tape.FIRST + place**2 for place, done in enumerate(recorded))


@pytest.mark.parametrize(
    "method",
    [  # what each method computes is recorded above; these few lead through all of a worker that does it
        pytest.param(name, marks=[] if name in ("scaffold", "fedmlac", "fedstar", "harmony") else [pytest.mark.slow])
        for name in registry.names("raydfl.methods")
    ],
)
def test_every_built_in_method_keeps_its_word(method: str, tiny: Callable[..., Config]) -> None:
    """A whole run from recordings is the run by code, to the bit, and so is one that goes on with the other setting."""
    options = ["train.rounds=3", "evaluate.every=3", *(["method.size=8"] if method == "fedkad" else [])]
    by_code = train_federation(tiny("run.name=code", "train.tape=false", *options, method=method))
    assert not known()
    by_tape = train_federation(tiny("run.name=tape", *options, method=method))
    assert taped() > 0
    assert refused() == 0
    same_bytes(by_code, by_tape)
    if method in ("scaffold", "fedmlac"):
        stop_after(tiny("run.name=both", "train.tape=false", *options, method=method), 1)
        same_bytes(by_code, train_federation(tiny("run.name=both", *options, method=method)))


@pytest.mark.parametrize("method", ["scaffold", f"{EXTRA}:Summing"])
def test_methods_that_keep_several_tensors_are_recorded(method: str, tiny: Callable[..., Config]) -> None:
    """Their state has one order, so that what a client does in later rounds is one kind of computation."""
    train_federation(tiny("train.rounds=8", "train.cohort=1.0", method=method))
    assert sum(one.played for one in known()) > sum(one.by_code for one in known())
    assert refused() == 0


OWN = '''
from raydfl import fit
from raydfl.attacks._attack import Attack

class Own(Attack):
    """Trains on, with a loss that is not the method's."""

    def local(self, method, step):
        assert step.execution.recordings is None
        return step.update(fit(step, lambda step, batch: -method.loss(step, batch)))
'''


@pytest.mark.parametrize("own", [False, True])
def test_an_attacker_that_trains_in_its_own_way_runs_by_code(
    own: bool, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path / 'own.py'}:Own" if own else "sign_flip"
    train_federation(tiny("train.rounds=3", "train.cohort=1.0", f"attack.name={name}", "attack.clients=1.0"))
    assert (taped() > 0) is not own
