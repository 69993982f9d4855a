"""Methods in which something happens to one client, each with its counterpart in which that client is not in the round at all."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl import Method
from raydfl.data.examples import Examples
from raydfl.methods.fedmlac import FedMLAC
from raydfl.randomness import fit_seed, seed_of_step, step_randomness
from raydfl.step import Step
from raydfl.train import fit, make_optimiser
from raydfl.types import Batch, Client, Metrics, Ratio, State, Task, Update


def happen(what: str) -> None:
    """Raise, die or hang."""
    if what == "value":
        raise ValueError("a client's own\nmistake")
    if what == "steer":
        raise ValueError("\x1b]0;owned\x07\r\n\x9b2J\u202e \udcff")
    if what == "memory":
        raise MemoryError("no more")
    if what == "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
    if what == "exit":
        os._exit(1)
    if what == "hang":
        time.sleep(3600)


@dataclass(frozen=True, kw_only=True)
class Fails(Method):
    """``what`` happens to ``client`` in round ``round``, before or after it has trained."""

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
class Absent(Method):
    """Plans as ever, but without ``client`` in round ``round``."""

    client: str = "s2"
    round: int = 2

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        tasks = super().plan(state, clients, rng, cohort)
        return [t for t in tasks if not (t.client_id == self.client and state.round_index + 1 == self.round)]


@dataclass(frozen=True, kw_only=True)
class FailsPrivately(FedMLAC):
    """As Fails, in a method whose clients keep something, after it has been changed."""

    client: str = "s2"
    round: int = 2

    def local(self, step: Step) -> Update:
        update = super().local(step)
        if step.client.id == self.client and step.round_index + 1 == self.round:
            happen("value")
        return update


@dataclass(frozen=True, kw_only=True)
class AbsentPrivately(FedMLAC):
    """As Absent."""

    client: str = "s2"
    round: int = 2

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        tasks = super().plan(state, clients, rng, cohort)
        return [t for t in tasks if not (t.client_id == self.client and state.round_index + 1 == self.round)]


@dataclass(frozen=True, kw_only=True)
class CannotEvaluate(Method):
    """Raises when a client, or the server's model (``client=""``), is measured."""

    client: str = "s2"

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        if step.client.id == self.client:
            happen("value")
        return super().evaluate(step, examples, batch_size)


@dataclass(frozen=True, kw_only=True)
class FirstBatches(Method):
    """FedAvg by a loop of its own, over the first ``steps`` batches of the round only."""

    steps: int = 2

    def local(self, step: Step) -> Update:
        optimiser = make_optimiser(step)
        total, count = 0.0, 0
        step.models["model"].train()
        seed = torch.tensor(fit_seed(step))
        rounds = range(step.training.local_epochs)
        batches = [b for _ in rounds for b in step.data.train.batches(step.training.batch_size, step.rng, step.device)]
        for number, batch in enumerate(batches[: self.steps]):
            optimiser.zero_grad()
            with step_randomness(seed_of_step(seed, number)):
                loss = self.loss(step, batch)
            loss.backward()
            optimiser.step()
            total, count = total + float(loss.detach()) * len(batch.y), count + len(batch.y)
        return step.update({"loss": Ratio(total, count)})


@dataclass(frozen=True, kw_only=True)
class Twice(Method):
    """Trains in two calls of fit."""

    def local(self, step: Step) -> Update:
        first = fit(step, self.loss, epochs=1)
        second = fit(step, self.loss, epochs=1)
        return step.update({"first": first["steps"], "second": second["steps"], "loss": first["loss"]})


@dataclass(frozen=True, kw_only=True)
class SlowBatches(Method):
    """``client`` takes its time over each batch."""

    client: str = "s2"
    seconds: float = 0.2

    def loss(self, step: Step, batch: Batch) -> Tensor:
        if step.client.id == self.client:
            time.sleep(self.seconds)
        return super().loss(step, batch)
