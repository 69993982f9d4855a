"""Methods outside raydfl that test the override points."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.tensors import Layout
from raydfl.core.types import Batch, Client, Metrics, State, Task, Update
from raydfl.data.examples import Examples
from raydfl.methods import Method
from raydfl.methods.fedavgm import FedAvgM
from raydfl.methods.fedmlac import FedMLAC
from raydfl.rules import Selection
from raydfl.rules.lpa import LayerwisePruning
from raydfl.training._fit import fit, predict
from raydfl.training.step import Step


@dataclass(frozen=True, kw_only=True)
class SeveralGlobals(Method):
    """Several global models. Each client trains the model with the smallest loss on its data (as in IFCA)."""

    number: Annotated[int, Field(ge=1)] = 2

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(f"model-{i}" for i in range(self.number))

    def init(
        self, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]], rng: np.random.Generator
    ) -> State:
        first = super().init(clients, models, rng).tensors["global"]
        groups = {
            key: {n: t + 0.1 * torch.from_numpy(rng.normal(size=t.shape)).float() for n, t in first.items()}
            for key in self.keys
        }
        return State(0, groups)

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        return [dataclasses.replace(task, receive=self.keys) for task in super().plan(state, clients, rng, cohort)]

    def pick(self, step: Step, examples: Examples) -> str:
        losses = {}
        for key in self.keys:
            step.load(key)
            losses[key] = float(F.cross_entropy(predict(step, "model", examples), torch.from_numpy(examples.labels)))
        best = min(losses, key=lambda key: (losses[key], key))
        step.load(best)
        return best

    def local(self, step: Step) -> Update:
        key = self.pick(step, step.data.train)
        return step.update(fit(step, self.loss), key=key)

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        return [Task(client.id, phase="evaluate", receive=self.keys) for client in clients]

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        if len(step.received) > 1:
            self.pick(step, step.data.train)
        return super().evaluate(step, examples, batch_size)


@dataclass(frozen=True, kw_only=True)
class TwoPhases(Method):
    """FedAvg, then distillation of its frozen result into a fresh student."""

    switch: Annotated[int, Field(ge=1)] = 2

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        second = state.round_index >= self.switch
        # Only half of the clients take part in the second phase.
        pool = [c for c in clients if c.index % 2 == 0] if second else list(clients)
        chosen = np.sort(rng.choice(len(pool), size=min(cohort, len(pool)), replace=False))
        receive = ("global", "teacher") if second else ("global",)
        return [Task(pool[int(i)].id, phase="distil" if second else "train", receive=receive) for i in chosen]

    def loss(self, step: Step, batch: Batch) -> Tensor:
        if step.phase == "train":
            return super().loss(step, batch)
        student = step.forward("model", batch)
        own = {n.partition("/")[2]: t for n, t in step.received["teacher"].items()}
        with torch.no_grad():
            teacher = torch.func.functional_call(step.models["model"], own, (batch.x, batch.lengths))
        kl = F.kl_div(F.log_softmax(student, 1), F.log_softmax(teacher, 1), reduction="none", log_target=True).sum(1)
        return super().loss(step, batch) + batch.mean(kl)

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        new, report = super().aggregate(state, updates, rng)
        if state.round_index + 1 == self.switch:
            teacher = dict(new.tensors["global"])
            student = {n: torch.from_numpy(0.1 * rng.normal(size=t.shape)).float() for n, t in teacher.items()}
            new = dataclasses.replace(new, tensors={"global": student, "teacher": teacher}, extra={"phase": "distil"})
        return new, report


@dataclass(frozen=True, kw_only=True)
class Vandal(Method):
    """Overwrite received tensors before training. The next client must not be affected."""

    def local(self, step: Step) -> Update:
        update = super().local(step)
        sent = {name: value.clone() for name, value in update.tensors.items()}
        for tensors in step.received.values():
            for value in tensors.values():
                value.fill_(1e9)
        return dataclasses.replace(update, tensors=sent)


@dataclass(frozen=True, kw_only=True)
class Diverging(Method):
    """Return NaN from selected clients."""

    bad: tuple[str, ...] = ()

    def local(self, step: Step) -> Update:
        update = super().local(step)
        if step.client.id not in self.bad:
            return update
        return dataclasses.replace(update, tensors={n: t * float("nan") for n, t in update.tensors.items()})


@dataclass(frozen=True, kw_only=True)
class Twins(Method):
    """Start with equal tensors under two keys, and count in an ``extra`` that JSON converts."""

    def init(
        self, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]], rng: np.random.Generator
    ) -> State:
        first = super().init(clients, models, rng).tensors["global"]
        return State(0, {"global": first, "start": first}, {"rounds": {1: ("first",)}})

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        new, report = super().aggregate(state, updates, rng)
        for tensor in new.tensors["start"].values():
            tensor += len(state.extra["rounds"])
        done = state.extra["rounds"]
        return dataclasses.replace(new, extra={"rounds": {**done, len(done) + 1: (repr(done),)}}), report


@dataclass(frozen=True, kw_only=True)
class Forgetful(Method):
    """Read a missing entry of the state."""

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        return super().aggregate(state.extra["no such entry"], updates, rng)


@dataclass(frozen=True, kw_only=True)
class Failing(Method):
    """Raise an error for one client in one round."""

    client: str = ""
    round: int = 2

    def local(self, step: Step) -> Update:
        if step.client.id == self.client and step.round_index + 1 == self.round:
            raise ZeroDivisionError("a method's own mistake")
        return super().local(step)


@dataclass(frozen=True, kw_only=True)
class Leaking(Method):
    """Send a private tensor."""

    def shared(self, name: str) -> bool:
        return not name.startswith("model/output")

    def local(self, step: Step) -> Update:
        return step.update(fit(step, self.loss), tensors=step.floating_state())


@dataclass(frozen=True, kw_only=True)
class Summing(Method):
    """Add several tensors of the client state to the loss, in the order of the state. The order affects the last bits."""

    def loss(self, step: Step, batch: Batch) -> Tensor:
        value = super().loss(step, batch)
        for tensor in step.state.values():
            value = value + value * tensor
        return value

    def local(self, step: Step) -> Update:
        update = super().local(step)
        step.state.update(
            {f"kept/{name}": torch.tensor(size) for name, size in zip("badc", (0.1, 0.3, 0.7, 0.9), strict=True)}
        )
        return update


@dataclass(frozen=True, kw_only=True)
class Untidy(Method):
    """Leave changes in the networks after training."""

    how: str = "entry"

    def local(self, step: Step) -> Update:
        update = super().local(step)
        update = dataclasses.replace(update, tensors={name: value.clone() for name, value in update.tensors.items()})
        model = cast(Any, step.models["model"])
        if self.how == "entry":
            step.models["model"] = copy.deepcopy(model)
        elif self.how == "layer":
            model.output = copy.deepcopy(model.output)
        elif self.how == "frozen":
            model.output.requires_grad_(False)
        elif self.how == "hook":
            model.output.register_forward_hook(lambda *given: given[-1] * 2)
        elif self.how == "gradient hook":
            model.output.weight.register_hook(lambda gradient: gradient * 2)
        elif self.how == "buffer":
            del model.output.bias
            model.output.register_buffer("bias", torch.ones(model.output.out_features))
        elif self.how == "more entries":
            step.models["more"] = nn.Linear(2, 2)
        return dataclasses.replace(
            update, tensors={name: value.clone() for name, value in update.tensors.items() if name.startswith("model/")}
        )


@dataclass(frozen=True, kw_only=True)
class NearTheReceived(Method):
    """Cross-entropy, with the received model and the client's previous model as teachers."""

    def loss(self, step: Step, batch: Batch) -> Tensor:
        value = super().loss(step, batch)
        student = F.log_softmax(step.forward("model", batch), dim=1)
        teachers = [step.received["global"]]
        own = {name: step.state[f"previous/{name}"] for name in step.parameters() if f"previous/{name}" in step.state}
        for tensors in [*teachers, *([own] if own else [])]:
            with torch.no_grad():
                teacher = F.softmax(step.forward("model", batch, tensors=tensors), dim=1)
            value = value - batch.mean((teacher * student).sum(dim=1))
        return value

    def local(self, step: Step) -> Update:
        metrics = fit(step, self.loss)
        step.state.update({f"previous/{name}": t.detach().clone() for name, t in step.parameters().items()})
        return step.update(metrics)


@dataclass(frozen=True, kw_only=True)
class OwnRates(Method):
    """A different learning rate for each client."""

    rates: tuple[float, ...] = (0.1, 0.05, 0.2, 0.0)
    named: bool = False

    def local(self, step: Step) -> Update:
        rate = self.rates[step.client.index % len(self.rates)]
        return step.update(fit(step, self.loss, lr={"model": rate} if self.named else rate))


class WithBuffers(nn.Module):
    """A network with batch normalisation: floating buffers and an integer counter."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.normalise = nn.BatchNorm1d(inputs)
        self.output = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.normalise(x.mean(dim=1)))


@dataclass(frozen=True, kw_only=True)
class Quadratic(FedAvgM):
    """Three steps of gradient descent on |w - c|^2 / 2 with c = 0.1 (1 + number of the client). Training is a closed form."""

    def local(self, step: Step) -> Update:
        update = super().local(step)
        target = 0.1 * (1 + int(step.client.id.lstrip("s")))
        tensors = {name: value.clone() for name, value in step.received["global"].items()}
        for _ in range(3):
            tensors = {name: value - 0.2 * (value - target) for name, value in tensors.items()}
        return dataclasses.replace(update, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Slow(FedMLAC):
    """FedMLAC with slow clients, so that tests can interrupt a round."""

    seconds: float = 0.3

    def local(self, step: Step) -> Update:
        time.sleep(self.seconds)
        return super().local(step)


@dataclass(frozen=True, kw_only=True)
class KilledLPA(LayerwisePruning):
    """LPA that kills the process of the server once, between the two passes over the updates."""

    associative: ClassVar[bool] = True

    mark: Annotated[str, Field(description="File that exists after the kill.")]

    def select(self, measured: Mapping[str, np.ndarray], layouts: Mapping[str, Layout]) -> Selection:
        if not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().select(measured, layouts)
