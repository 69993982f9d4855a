"""HDBSCAN groups: the server clusters the changes of the clients' last layers, as FedAPTA does in step 7.

R. Campello, D. Moulavi, J. Sander, Density-Based Clustering Based on Hierarchical Density Estimates, PAKDD 2013. With D_i the
change of client i's last layers since the model that it was sent:

    d_ij = 1 - <D_i, D_j> / (||D_i|| ||D_j||)        groups = HDBSCAN(d)

A cohort of less than twice ``min_cluster_size`` is one group, and so is one in which all points are noise; ``tasks/undivided``
records it. Clients' profiles serve to measure (purity, adjusted Rand index), never to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.clustering import Distance, assign_noise, distances, hdbscan_labels
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.part_names import plain_name
from raydfl.core.types import Client, Ratio, Tensors
from raydfl.engine.groups._membership import Membership
from raydfl.engine.groups._rule import DiscoveryRule, Division, Sent, name_clusters


def _layers_of(tensors: Iterable[str]) -> list[str]:
    """Return the names of the layers that have these tensors, in their order."""
    return list(dict.fromkeys(plain_name(name).rpartition(".")[0] for name in tensors))


@dataclass(frozen=True, kw_only=True)
class Hdbscan(DiscoveryRule):
    """Groups by HDBSCAN on the changes of the last layers."""

    distance: Annotated[Distance, Field(description="between two updates; the paper: cosine")] = "cosine"
    layers: Annotated[
        int | tuple[str, ...],
        Field(description="how many of the last layers count; or the beginnings of their tensors' names"),
    ] = 1
    min_cluster_size: Annotated[int, Field(ge=2, description="clients of the smallest cluster")] = 5
    min_samples: Annotated[int, Field(ge=1, description="neighbours that make a client's surroundings dense")] = 2
    selection: Annotated[
        Literal["eom", "leaf"], Field(description="HDBSCAN's choice of clusters: excess of mass, or the smallest ones")
    ] = "eom"
    epsilon: Annotated[float, Field(ge=0, description="clusters that are nearer to each other are one; 0: none")] = 0.0
    single: Annotated[bool, Field(description="all clients may be found to be one cluster")] = False
    noise: Annotated[
        Literal["attach", "alone"],
        Field(description="clients in no cluster: attach them to the nearest one, or let each be a group of its own"),
    ] = "attach"
    threshold: Annotated[
        float, Field(ge=0, description="mean distance to a cluster from which on a client is not attached to it")
    ] = 1.0
    accumulate: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="what is kept of a client's earlier changes when a new one is added; above 0 clients outside the "
            "cohort are clustered too, by what they sent before",
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        """Refuse to look at no layer."""
        if not self.layers or (isinstance(self.layers, int) and self.layers < 1):
            raise ConfigError(f"train.groups.layers is {self.layers!r}; give a number from 1 on, or names")

    def head(self, tensors: Iterable[str]) -> list[str]:
        """Return the names of the tensors that are compared, of those of an update that the server has too, in their order.

        Raises:
            ConfigError: there are none.
        """
        names = list(tensors)
        if isinstance(self.layers, int):
            modules = _layers_of(names)[-self.layers :]
            return [name for name in names if plain_name(name).rpartition(".")[0] in modules]
        found = [name for name in names if plain_name(name).startswith(self.layers)]
        if not found:
            raise ConfigError(
                f"train.groups.layers: no tensor's name begins with {' or '.join(self.layers)}; {nearest(self.layers[0], names)}"
            )
        return found

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject a number of layers that the clients do not share, and names of none."""
        found = len(_layers_of(tensors))
        if isinstance(self.layers, int) and self.layers > found:
            raise ConfigError(
                f"train.groups.layers is {self.layers}, but the clients share {found} layers; take at most {found}"
            )
        self.head(tensors)

    def labels(self, heads: Sequence[Mapping[str, Tensor]]) -> tuple[np.ndarray, int, bool]:
        """Return the cluster of each client, how many of them were noise, and whether the clients were not divided at all."""
        if len(heads) < 2 * self.min_cluster_size:
            return np.zeros(len(heads), np.int64), 0, True
        matrix = distances(heads, self.distance)
        found = hdbscan_labels(
            matrix, self.min_cluster_size, self.min_samples, self.selection, self.epsilon, self.single
        )
        threshold = self.threshold if self.noise == "attach" else 0.0
        return assign_noise(found, matrix, threshold), int((found < 0).sum()), bool((found < 0).all())

    def divide(self, book: Membership, sent: Iterable[Sent], kept: Tensors) -> Division:
        """Cluster the clients of the round; with ``accumulate`` also the clients of earlier rounds."""
        heads = _kept_heads(kept, book) if self.accumulate else {}
        for each in sent:
            change = each.change(self.head(each.names()))
            client = each.update.client_id
            earlier = heads.get(client)
            if earlier is not None and [*earlier] == [*change]:
                change = {name: value + self.accumulate * earlier[name] for name, value in change.items()}
            heads[client] = change
        clients = [client for client in book.clients if client in heads]
        labels, noise, undivided = self.labels([heads[client] for client in clients])
        metrics = {
            "tasks/clusters": Ratio(len(set(labels.tolist())), 1),
            "tasks/noise": Ratio(noise, max(1, len(clients))),
            "tasks/undivided": Ratio(float(undivided), 1),
        }
        keep: dict[str, Tensor] = {}
        if self.accumulate:
            place = {client: number for number, client in enumerate(book.clients)}
            keep = {f"{place[c]}/{name}": value.float() for c, head in heads.items() for name, value in head.items()}
        return Division(name_clusters(book, clients, labels.tolist()), metrics, keep)


def _kept_heads(kept: Tensors, book: Membership) -> dict[str, dict[str, Tensor]]:
    """Return the changes of last layers that the server keeps, by client."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in kept.items():
        number, _, tensor = name.partition("/")
        found.setdefault(book.clients[int(number)], {})[tensor] = value.double()
    return found
