"""IFCA: clients receive the models of all groups, choose the model with the smallest loss on their data, and train it.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran, An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, algorithm 1 with
model averaging. With F_i the loss of client i on its training data, and theta_1 ... theta_k the groups' models:

    j_i     = argmin_j F_i(theta_j)
    theta_j = the method's aggregation of the clients with j_i = j         FedAvg: sum_i n_i theta_i / sum_i n_i

Differences from the paper: F_i is the sum of the losses of all evaluated models, in evaluation mode. The paper draws each initial
model at random. Here the first group has the run's initial model, which may come from a file. Further groups add noise of
``spread`` standard deviations of each parameter tensor. The method plans a client's task with the group of its last choice.

Received bytes grow with the number of groups. A group without clients in a round keeps its model. ``tasks/moved`` is the fraction
of the round's clients that changed their group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError
from raydfl.core.options import OURS
from raydfl.core.types import Client, Ratio, State, Tensors
from raydfl.engine.groups._membership import GLOBAL, PREFIX, Membership
from raydfl.engine.groups._rule import ClientUpdate, DiscoveryRule, Division
from raydfl.methods import Method
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class Ifca(DiscoveryRule):
    """Groups by the clients' choice among all groups' models."""

    choosing: ClassVar[bool] = True

    groups: Annotated[int, Field(ge=2, description="Number of groups."), OURS] = 2
    spread: Annotated[
        float,
        Field(
            gt=0,
            description="Noise on the initial models of all groups except the first, in standard deviations of each tensor.",
        ),
        OURS,
    ] = 1.0

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject more groups than clients, and a server without a model."""
        if len(clients) < self.groups and "part" not in clients[0].profile:
            raise ConfigError(
                f"train.groups.groups is {self.groups}, but the population has {len(clients)} clients. Lower the number of groups"
            )
        super().check(clients, tensors)

    def begin(self, state: State, parameters: Collection[str], rng: np.random.Generator) -> dict[str, State]:
        """Create the initial state of each group."""
        states = {}
        for number in range(1, self.groups + 1):
            entry = dict(state.tensors[GLOBAL])
            for name, value in entry.items() if number > 1 else ():
                if name in parameters and value.numel() > 1:  # the deviation of a single value is 0
                    noise = torch.from_numpy(rng.standard_normal(tuple(value.shape))).to(value.dtype)
                    entry[name] = value + self.spread * value.std(correction=0) * noise
            states[f"{PREFIX}{number}"] = dataclasses.replace(state, tensors={**state.tensors, GLOBAL: entry})
        return states

    def choose(self, step: Step, entries: Mapping[str, Mapping[str, Tensors]], method: Method) -> str:
        """Choose the group whose models have the smallest loss on the client's training data. The first group wins a tie."""
        losses = {}
        for group, received in entries.items():
            own = dataclasses.replace(step, received=received, state=dict(step.state))
            for key in reversed([*received]):  # reversed, so that the first entry with a tensor is loaded last and wins
                own.load(key)
            measured = method.evaluate(own, step.data.train, step.training.batch_size) if len(step.data.train) else {}
            losses[group] = sum(
                value.value for name, value in measured.items() if name.endswith("/loss") and isinstance(value, Ratio)
            )
        chosen = min(losses, key=losses.__getitem__)
        step.received = entries[chosen]
        for key in reversed([*entries[chosen]]):
            step.load(key)
        return chosen

    def divide(self, membership: Membership, updates: Iterable[ClientUpdate], kept: Tensors) -> Division:
        """Move each client to its chosen group."""
        own = membership.groups()
        chosen = {message.update.client_id: message.group for message in updates}
        moved = sum(own[client] != group for client, group in chosen.items())
        return Division(
            membership.move(chosen, self.groups + 1),
            {
                "tasks/clusters": Ratio(len(set(chosen.values())), 1),
                "tasks/moved": Ratio(moved, max(1, len(chosen))),
            },
        )
