"""Base of rules that cluster the changes of the clients' last layers since the received model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import OURS, PAPER
from raydfl.core.part_names import plain_name
from raydfl.core.types import Client, Ratio, Tensors
from raydfl.engine.groups._membership import Membership
from raydfl.engine.groups._rule import ClientUpdate, DiscoveryRule, Division, name_clusters


def _list_layers(tensors: Iterable[str]) -> list[str]:
    """Return the names of the tensors' layers, in order."""
    return list(dict.fromkeys(plain_name(name).rpartition(".")[0] for name in tensors))


@dataclass(frozen=True, kw_only=True)
class LayerClusters(DiscoveryRule, ABC):
    """Groups by a clustering of the changes of the last layers."""

    layers: Annotated[
        int | tuple[str, ...],
        Field(description="Layers to compare: a number of last layers, or prefixes of tensors' names."),
        PAPER,
    ] = 1
    accumulate: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Decay factor of a client's accumulated changes when a new change is added. Above 0, clients outside the "
            "cohort are clustered too, by their earlier changes. 0: no accumulation.",
        ),
        OURS,
    ] = 0.0
    reference: Annotated[
        Literal["received", "common"],
        Field(
            description="Model from which changes are measured. received: the model that the client received, its group's. common: "
            "the mean of all groups' models, equal for all clients. Groups then stay as they are, even wrong groups of the first "
            "rounds."
        ),
        OURS,
    ] = "received"

    def __post_init__(self) -> None:
        """Reject an empty choice of layers."""
        if not self.layers or (isinstance(self.layers, int) and self.layers < 1):
            raise ConfigError(f"train.groups.layers is {self.layers!r}. Set it to a number of at least 1, or to names")

    def head(self, tensors: Iterable[str]) -> list[str]:
        """Select the names of the tensors to compare, in order.

        Args:
            tensors: Names of an update's tensors that the server has too.

        Raises:
            ConfigError: No tensor has a prefix in ``layers``.
        """
        names = list(tensors)
        if isinstance(self.layers, int):
            modules = _list_layers(names)[-self.layers :]
            return [name for name in names if plain_name(name).rpartition(".")[0] in modules]
        selected = [name for name in names if plain_name(name).startswith(self.layers)]
        if not selected:
            raise ConfigError(
                f"train.groups.layers: no tensor's name begins with {' or '.join(self.layers)}. {nearest(self.layers[0], names)}"
            )
        return selected

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject more layers than the clients share, and unknown names."""
        shared = len(_list_layers(tensors))
        if isinstance(self.layers, int) and self.layers > shared:
            raise ConfigError(
                f"train.groups.layers is {self.layers}, but the clients share only {shared} layers. Set it to at most {shared}"
            )
        self.head(tensors)

    @abstractmethod
    def labels(self, heads: Sequence[Mapping[str, Tensor]]) -> tuple[np.ndarray, int, bool]:
        """Cluster clients by their changes.

        Args:
            heads: Changes of the compared tensors by name, for each client.

        Returns:
            The cluster of each client, the number of noise clients, and whether all clients are in one group for lack of clusters.
        """

    def divide(self, membership: Membership, updates: Iterable[ClientUpdate], kept: Tensors) -> Division:
        """Cluster the clients of the round, and with ``accumulate`` also the clients of earlier rounds."""
        heads = _read_heads(kept, membership) if self.accumulate else {}
        for message in updates:
            change = message.change(self.head(message.names()), self.reference == "common")
            client = message.update.client_id
            earlier = heads.get(client)
            if earlier is not None and [*earlier] == [*change]:
                change = {name: value + self.accumulate * earlier[name] for name, value in change.items()}
            heads[client] = change
        clients = [client for client in membership.clients if client in heads]
        labels, noise, undivided = self.labels([heads[client] for client in clients])
        metrics = {
            "tasks/clusters": Ratio(len(set(labels.tolist())), 1),
            "tasks/noise": Ratio(noise, max(1, len(clients))),
            "tasks/undivided": Ratio(float(undivided), 1),
        }
        keep: dict[str, Tensor] = {}
        if self.accumulate:
            place = {client: number for number, client in enumerate(membership.clients)}
            keep = {f"{place[c]}/{name}": value.float() for c, head in heads.items() for name, value in head.items()}
        return Division(name_clusters(membership, clients, labels.tolist()), metrics, keep)


def _read_heads(kept: Tensors, membership: Membership) -> dict[str, dict[str, Tensor]]:
    """Return the accumulated changes of last layers by client."""
    heads: dict[str, dict[str, Tensor]] = {}
    for name, value in kept.items():
        number, _, tensor = name.partition("/")
        heads.setdefault(membership.clients[int(number)], {})[tensor] = value.double()
    return heads
