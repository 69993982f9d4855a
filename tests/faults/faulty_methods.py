"""Methods with failures of one client, and counterparts without this client in the round."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl import Method
from raydfl.core.cuts import Cut
from raydfl.core.types import Batch, Client, Metrics, Ratio, State, Task, Update
from raydfl.data.examples import Examples
from raydfl.methods.fedadam import FedAdam
from raydfl.methods.fedmlac import FedMLAC
from raydfl.training._fit import fit
from raydfl.training.optimiser import Optimiser
from raydfl.training.randomness import derive_step_seed, fit_seed, use_step_seed
from raydfl.training.step import Step


def happen(what: str) -> None:
    """Raise, end the process or block."""

    if what == "value":
        raise ValueError("a client's own\nmistake")
    if what == "steer":
        raise ValueError("\x1b]0;owned\x07\r\n\x9b2J\u202e \udcff")
    if what == "memory":
        raise MemoryError("no more")
    if what == "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
    if what == "generator":
        raise GeneratorExit("closed")
    if what == "leave":
        sys.exit("left")
    if what == "exit":
        os._exit(1)
    if what == "hang":
        time.sleep(3600)


@dataclass(frozen=True, kw_only=True)
class Fails(Method):
    """FedAvg with the failure ``what`` of ``client`` in round ``round``, before or after training."""

    client: str = "s2"
    round: int = 2
    what: str = "value"
    after: bool = False

    def fate(self, step: Step) -> None:
        if step.client.id == self.client and step.round_index + 1 == self.round:
            happen(self.what)

    def local(self, step: Step) -> Update:
        if not self.after:
            self.fate(step)
        update = super().local(step)
        self.fate(step)
        return update


@dataclass(frozen=True, kw_only=True)
class FailsAtServer(Method):
    """FedAvg with the failure ``what`` in round ``round`` in the method's ``call``."""

    call: str = "aggregate"
    round: int = 2
    what: str = "value"

    def _fate(self, call: str, round_number: int) -> None:
        if (call, round_number) == (self.call, self.round):
            happen(self.what)

    def init(self, clients, models, rng):  # type: ignore[no-untyped-def]
        self._fate("init", self.round)
        return super().init(clients, models, rng)

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        self._fate("plan", state.round_index + 1)
        return super().plan(state, clients, rng, cohort)

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        self._fate("plan_evaluation", state.round_index)
        return super().plan_evaluation(state, clients)

    def aggregate(self, state, updates, rng):  # type: ignore[no-untyped-def]
        self._fate("aggregate", state.round_index + 1)
        return super().aggregate(state, updates, rng)


@dataclass(frozen=True, kw_only=True)
class Absent(Method):
    """FedAvg without ``client`` in round ``round``."""

    client: str = "s2"
    round: int = 2

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        tasks = super().plan(state, clients, rng, cohort)
        return [t for t in tasks if not (t.client_id == self.client and state.round_index + 1 == self.round)]


@dataclass(frozen=True, kw_only=True)
class FailsPrivately(FedMLAC):
    """Method with private client state that fails like Fails, after a change of the state."""

    client: str = "s2"
    round: int = 2

    def local(self, step: Step) -> Update:
        update = super().local(step)
        if step.client.id == self.client and step.round_index + 1 == self.round:
            happen("value")
        return update


@dataclass(frozen=True, kw_only=True)
class AbsentPrivately(FedMLAC):
    """Counterpart of FailsPrivately without ``client`` in round ``round``."""

    client: str = "s2"
    round: int = 2

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        tasks = super().plan(state, clients, rng, cohort)
        return [t for t in tasks if not (t.client_id == self.client and state.round_index + 1 == self.round)]


@dataclass(frozen=True, kw_only=True)
class CannotEvaluate(Method):
    """FedAvg that raises in the evaluation of a client, or of the server's model (``client=""``)."""

    client: str = "s2"

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        if step.client.id == self.client:
            happen("value")
        return super().evaluate(step, examples, batch_size)


@dataclass(frozen=True, kw_only=True)
class FirstBatches(Method):
    """FedAvg with a custom loop over the first ``steps`` batches of the round."""

    steps: int = 2

    def local(self, step: Step) -> Update:
        parameters = {"model": step.parameters("model").values()}
        optimiser = Optimiser(
            {name: [*tensors] for name, tensors in parameters.items()}, step.training.optimiser, step.round_index
        )
        total, count = 0.0, 0
        step.models["model"].train()
        seed = torch.tensor(fit_seed(step))
        rounds = range(step.training.local_epochs)
        batches = [b for _ in rounds for b in step.data.train.batches(step.training.batch_size, step.rng, step.device)]
        for number, batch in enumerate(batches[: self.steps]):
            optimiser.clear_gradients()
            with use_step_seed(derive_step_seed(seed, number)):
                loss = self.loss(step, batch)
            loss.backward()
            optimiser.advance()
            total, count = total + float(loss.detach()) * len(batch.y), count + len(batch.y)
        return step.update({"loss": Ratio(total, count)})


@dataclass(frozen=True, kw_only=True)
class Twice(Method):
    """FedAvg that trains in two calls of fit."""

    def local(self, step: Step) -> Update:
        first = fit(step, self.loss, epochs=1)
        second = fit(step, self.loss, epochs=1)
        return step.update({"first": first["steps"], "second": second["steps"], "loss": first["loss"]})


@dataclass(frozen=True, kw_only=True)
class SlowBatches(Method):
    """FedAvg with slow batches of ``client``."""

    client: str = "s2"
    seconds: float = 0.2

    def loss(self, step: Step, batch: Batch) -> Tensor:
        if step.client.id == self.client:
            time.sleep(self.seconds)
        return super().loss(step, batch)


@dataclass(frozen=True, kw_only=True)
class CannotMeasureAt(Method):
    """FedAvg that raises in the evaluation of the server's model of round ``round``."""

    round: int = 3

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        if step.round_index == self.round:
            happen("value")
        return super().evaluate(step, examples, batch_size)


@dataclass(frozen=True, kw_only=True)
class Nonsense(Method):
    """FedAvg where ``client`` sends ``what`` in round ``round``. Clients report extra metrics."""

    client: str = "s2"
    round: int = 2
    what: str = "shape"
    addition: str = ""

    @property
    def additions(self) -> tuple[str, ...]:
        return (self.addition,) if self.addition else ()

    def local(self, step: Step) -> Update:
        update = super().local(step)
        metrics = {**update.metrics, "seen": np.ones(3), "share": Ratio(1, 2)}
        update = dataclasses.replace(update, metrics=metrics)
        guilty = step.client.id == self.client and step.round_index + 1 == self.round
        return SENT[self.what](update) if guilty else update

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        measured = super().evaluate(step, examples, batch_size)
        if self.what == "evaluation" and step.client.id == self.client:
            return {**measured, "model/confusion": np.ones((2, 2))}
        return measured


@dataclass(frozen=True, kw_only=True)
class NonsenseToAdam(FedAdam):
    """Nonsense with Adam at the server."""

    client: str = "s2"
    round: int = 2
    what: str = "huge"

    def local(self, step: Step) -> Update:
        update = super().local(step)
        guilty = step.client.id == self.client and step.round_index + 1 == self.round
        return SENT[self.what](update) if guilty else update


def _tensors(update: Update, **changes: Any) -> Update:
    return dataclasses.replace(update, tensors={**update.tensors, **changes})


def _metrics(update: Update, **changes: Any) -> Update:
    return dataclasses.replace(update, metrics={**update.metrics, **changes})


def _replace_first(value: Any) -> Callable[[Update], Update]:
    """Replace the first tensor by a value, keeping the names."""

    def change_update(update: Update) -> Update:
        weights: dict[str, Any] = dict.fromkeys(update.tensors, 1.0)
        first = next(iter(weights))
        weights[first] = value(update.tensors[first]) if callable(value) else value
        return dataclasses.replace(update, weight=weights)

    return change_update


def _first(change: Callable[[Tensor], Any]) -> Callable[[Update], Update]:
    """Apply a change to the first tensor."""

    def change_update(update: Update) -> Update:
        name = next(iter(update.tensors))
        return _tensors(update, **{name: change(update.tensors[name])})

    return change_update


def _cut(kept: list[Any]) -> Callable[[Update], Update]:
    """Mark the first tensor with two or more dimensions as cut."""

    def change_update(update: Update) -> Update:
        name = next(name for name, tensor in update.tensors.items() if tensor.ndim >= 2)
        return dataclasses.replace(update, cuts={name: Cut([*kept, *[None] * (update.tensors[name].ndim - 2)])})

    return change_update


SENT: dict[str, Callable[[Update], Any]] = {
    "nothing": lambda update: update,
    "no update": lambda update: None,
    "shape": _first(lambda tensor: tensor[..., :-1]),
    "broadcast": _first(lambda tensor: tensor.sum()),
    "array": _first(lambda tensor: tensor.detach().numpy()),
    "complex": _first(lambda tensor: tensor * 1j),
    "name": lambda update: _tensors(update, **{"model/more": torch.ones(2)}),
    "key": lambda update: dataclasses.replace(update, key="mine"),
    "key of no kind": lambda update: dataclasses.replace(update, key=["global"]),
    "weight nan": lambda update: dataclasses.replace(update, weight=float("nan")),
    "weight negative": lambda update: dataclasses.replace(update, weight=-1.0),
    "weight boundless": lambda update: dataclasses.replace(update, weight=1e300),
    "weight word": lambda update: dataclasses.replace(update, weight="much"),
    "weight of tensor": _replace_first(float("inf")),
    "weight missing": lambda update: dataclasses.replace(update, weight={}),
    "weight of elements": _replace_first(lambda tensor: -torch.ones_like(tensor)),
    "weight of others": _replace_first(lambda tensor: torch.ones(7)),
    "cut outside": _cut([[0, 99], None]),
    "cut twice": _cut([[1, 1], None]),
    "cut of others": _cut([[0], None]),
    "cut word": lambda update: dataclasses.replace(update, cuts={next(iter(update.tensors)): "half"}),
    "metric kind": lambda update: _metrics(update, share=np.ones(2)),
    "metric shape": lambda update: _metrics(update, seen=np.ones(4)),
    "metric number": lambda update: _metrics(update, share=0.5),
    "metric text": lambda update: _metrics(update, share=Ratio("a", 1)),  # type: ignore[arg-type]
    "metric objects": lambda update: _metrics(update, seen=np.array([None, "a", 1])),
    "metric confusion": lambda update: _metrics(update, **{"model/confusion": np.ones(3)}),
    "metrics": lambda update: dataclasses.replace(update, metrics=[1.0]),
    "metrics without end": lambda update: _metrics(update, **{f"m{i}": Ratio(1, 2) for i in range(10_000)}),
    "huge": _first(lambda tensor: torch.full_like(tensor, 3e38)),
    "addition": lambda update: _tensors(update, **{"own/counts": torch.ones(2)}),
    "other key": lambda update: dataclasses.replace(update, key="mine"),
}
"""What is sent in place of an honest update."""
