"""Discovery rule: how the server finds the groups of clients. A subclass in a file of its own is a rule; its fields are options."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core import registry
from raydfl.core.clustering import match
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.part_names import plain_name
from raydfl.core.settings import StrictTypes
from raydfl.core.types import Client, Ratio, State, Tensors, Update
from raydfl.engine.groups._membership import Membership
from raydfl.methods import Method
from raydfl.training import Step

_WHERE = "train.groups"


@dataclasses.dataclass(frozen=True)
class Sent:
    """A client's first update of a round, and what the client was sent."""

    update: Update
    received: Tensors
    """The entry that the update changes, as the client received it."""
    group: str
    """The client's group before the round; for a rule whose clients choose, the chosen one."""

    def names(self) -> list[str]:
        """Return the names of the update's tensors that are new values of received ones."""
        return [name for name in self.update.tensors if name in self.received]

    def change(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return how far the client moved tensors, float64 by plain names; 0 where it received no slice of one."""
        found = {}
        for name in names:
            before = self.received[name].double()
            after = self.update.tensors[name].double()
            cut = self.update.cuts.get(name)
            if cut is not None:
                whole = before.numpy(force=True).copy()
                whole[cut.place(whole.shape)] = after.numpy(force=True)
                after = torch.from_numpy(whole)
            found[plain_name(name)] = after - before
        return found


@dataclasses.dataclass(frozen=True)
class Division:
    """The result of a round's discovery."""

    members: Membership
    """After the round."""
    metrics: Mapping[str, Ratio] = dataclasses.field(default_factory=dict)
    kept: Tensors = dataclasses.field(default_factory=dict)
    """Tensors that the server keeps for the next discovery."""


@dataclass(frozen=True, kw_only=True)
class GroupRule(StrictTypes, ABC):
    """Base of discovery rules."""

    choosing: ClassVar[bool] = False
    """Whether clients receive the models of all groups, and :meth:`choose` is asked."""

    @property
    def column(self) -> str:
        """The column of the clients' profile with which the groups are compared."""
        return "part"

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject clients or tensors that the rule cannot group, with a ConfigError.

        Args:
            clients: the population, or one part's.
            tensors: names of the tensors that clients send new values of.
        """

    def begin(self, state: State, parameters: Collection[str], rng: np.random.Generator) -> dict[str, State]:
        """Return the states of the groups that exist before the first round; by default none does.

        Args:
            state: of the method.
            parameters: names of the models' parameters.
            rng: of the method's ``init``.
        """
        return {}

    def choose(self, step: Step, entries: Mapping[str, Mapping[str, Tensors]], method: Method) -> str:
        """Return the group that a client takes, with that group's models loaded; by default the client's own.

        Args:
            step: of the client.
            entries: the received entries by group and by the method's keys; the client's own group first.
            method: without groups.
        """
        return next(iter(entries))

    @abstractmethod
    def divide(self, book: Membership, sent: Iterable[Sent], kept: Tensors) -> Division:
        """Find the groups of a round's clients.

        Args:
            book: the membership before the round.
            sent: first updates, in client order, to be read once.
            kept: the last division's.
        """


@dataclass(frozen=True, kw_only=True)
class DiscoveryRule(GroupRule, ABC):
    """Base of rules that find groups without the clients' profiles, which serve to measure them."""

    truth: Annotated[
        str, Field(description="name in the clients' profile with which the groups are compared; it decides nothing")
    ] = "part"

    @property
    def column(self) -> str:
        """The column with which groups are compared."""
        return self.truth

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject a server that has no model."""
        if not tensors:
            raise ConfigError(
                f"train.groups: {type(self).__name__.lower()} finds groups by the server's models, but this method shares none "
                f"under 'global'; take train.groups=known, or another method"
            )


def name_clusters(book: Membership, clients: Sequence[str], labels: Sequence[int]) -> Membership:
    """Return the membership after some clients were clustered; a cluster keeps the name that most of its members had.

    Args:
        book: before.
        clients: ids.
        labels: the cluster of each.
    """
    own = book.groups()
    names, following = match(labels, [own[client] for client in clients]), book.following
    for label in dict.fromkeys(labels):
        if label not in names:
            names[label], following = f"task{following}", following + 1
    return book.move({client: names[label] for client, label in zip(clients, labels, strict=True)}, following)


def find_group_rule(setting: str | Mapping[str, Any]) -> GroupRule | None:
    """Return the rule that ``train.groups`` names; ``None``: one model for all.

    Raises:
        ConfigError: there is no such rule, or an option is unknown or out of range.
    """
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if name == "none" and not options:
        return None
    known = [*registry.names("raydfl.engine.groups"), "none"]
    if name not in known[:-1]:
        raise ConfigError(
            f"{_WHERE}: {setting!r:.80}; write {', '.join(known)}, or {{name: hdbscan, min_cluster_size: 3}}; "
            f"{nearest(str(name), known)}"
        )
    cls = registry.find("raydfl.engine.groups", name, GroupRule, "rule of train.groups")  # type: ignore[type-abstract]
    return registry.build(cls, options, _WHERE)
