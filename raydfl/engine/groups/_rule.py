"""Base classes of group rules, which assign clients to groups. Each rule is a subclass in its own file; its fields are options."""

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
from raydfl.core.options import OURS
from raydfl.core.part_names import plain_name
from raydfl.core.settings import StrictTypes
from raydfl.core.types import Client, Ratio, State, Tensors, Update
from raydfl.engine.groups._membership import Membership
from raydfl.methods import Method
from raydfl.training import Step

_WHERE = "train.groups"


@dataclasses.dataclass(frozen=True)
class ClientUpdate:
    """A client's first update of a round, with the received tensors."""

    update: Update
    received: Tensors
    """Received values of the update's entry."""
    group: str
    """The client's group before the round, or the group of its choice (:attr:`GroupRule.choosing`)."""
    common: Tensors = dataclasses.field(default_factory=dict)
    """Values of the same entry without a group, equal for the clients of all groups."""

    def names(self) -> list[str]:
        """Return the names of the update's tensors that the client also received."""
        return [name for name in self.update.tensors if name in self.received]

    def change(self, names: Iterable[str], common: bool = False) -> dict[str, Tensor]:
        """Return the client's change of tensors, float64 by plain name. A client does not change values outside its cut.

        Args:
            names: Names of tensors.
            common: Whether to return the difference from :attr:`common` instead of the received values.
        """
        changes = {}
        for name in names:
            before = self.received[name].double()
            after = self.update.tensors[name].double()
            cut = self.update.cuts.get(name)
            if cut is not None:
                whole = before.numpy(force=True).copy()
                whole[cut.place(whole.shape)] = after.numpy(force=True)
                after = torch.from_numpy(whole)
            changes[plain_name(name)] = after - (self.common[name].double() if common else before)
        return changes


@dataclasses.dataclass(frozen=True)
class Division:
    """Assignment of clients to groups after a round."""

    members: Membership
    """Membership after the round."""
    metrics: Mapping[str, Ratio] = dataclasses.field(default_factory=dict)
    kept: Tensors = dataclasses.field(default_factory=dict)
    """Tensors that the server keeps for the next division."""


@dataclass(frozen=True, kw_only=True)
class GroupRule(StrictTypes, ABC):
    """Base class of rules that assign clients to groups."""

    choosing: ClassVar[bool] = False
    """Whether clients receive the models of all groups and select a group by :meth:`choose`."""

    @property
    def column(self) -> str:
        """Profile column with the true groups, for measurements."""
        return "part"

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject clients or tensors that the rule cannot group.

        Args:
            clients: Clients of the population or of a part.
            tensors: Names of the tensors for which clients send new values.

        Raises:
            ConfigError: The rule cannot group these clients. The default accepts all.
        """

    def begin(self, state: State, parameters: Collection[str], rng: np.random.Generator) -> dict[str, State]:
        """Create the states of groups that exist before the first round. The default creates none.

        Args:
            state: State of the method.
            parameters: Names of the models' parameters.
            rng: Generator of the method's ``init``.
        """
        return {}

    def choose(self, step: Step, entries: Mapping[str, Mapping[str, Tensors]], method: Method) -> str:
        """Choose a client's group on the client, and load the group's models. The default keeps the client's group.

        Args:
            step: Step of the client.
            entries: Received entries by group, then by the method's keys. The client's current group is the first.
            method: The method without groups.
        """
        return next(iter(entries))

    @abstractmethod
    def divide(self, membership: Membership, updates: Iterable[ClientUpdate], kept: Tensors) -> Division:
        """Assign a round's clients to groups.

        Args:
            membership: Membership before the round.
            updates: First update of each client in client order. It can be iterated only once.
            kept: Tensors that the last division kept.
        """


@dataclass(frozen=True, kw_only=True)
class DiscoveryRule(GroupRule, ABC):
    """Base of rules that discover groups. Clients' profiles only serve to measure the result."""

    truth: Annotated[
        str,
        Field(description="Profile column with the true groups. It affects only metrics (purity, Rand index)."),
        OURS,
    ] = "part"

    @property
    def column(self) -> str:
        """Profile column with the true groups, for measurements."""
        return self.truth

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject a server without a model."""
        if not tensors:
            raise ConfigError(
                f"train.groups: {type(self).__name__.lower()} finds groups by the models of the entry 'global', but this method "
                f"shares no model there. Set train.groups=known, or choose another method"
            )


def name_clusters(membership: Membership, clients: Sequence[str], labels: Sequence[int]) -> Membership:
    """Update the membership with clusters. Clusters are matched with earlier groups by their common members.

    Args:
        membership: Membership before the clustering.
        clients: Ids of the clustered clients.
        labels: Cluster of each client.
    """
    own = membership.groups()
    names, following = match(labels, [own[client] for client in clients]), membership.following
    for label in dict.fromkeys(labels):
        if label not in names:
            names[label], following = f"task{following}", following + 1
    return membership.move({client: names[label] for client, label in zip(clients, labels, strict=True)}, following)


def find_group_rule(setting: str | Mapping[str, Any]) -> GroupRule | None:
    """Build the rule of ``train.groups``; ``None``: one model for all clients.

    Raises:
        ConfigError: The rule or an option is unknown, or a value is out of range.
    """
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if name == "none" and not options:
        return None
    known = [*registry.names("raydfl.engine.groups"), "none"]
    if name not in known[:-1]:
        raise ConfigError(
            f"{_WHERE}: unknown rule {setting!r:.80}. Choose one of {', '.join(known)}, or write {{name: RULE, OPTION: VALUE}}. "
            f"{nearest(str(name), known)}"
        )
    cls = registry.find("raydfl.engine.groups", name, GroupRule, "rule of train.groups")  # type: ignore[type-abstract]
    return registry.build(cls, options, _WHERE)
