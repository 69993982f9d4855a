"""CFL: a group is split in two when its mean change is small but single clients' changes are large.

F. Sattler, K.-R. Mueller, W. Samek, Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy
Constraints, IEEE Transactions on Neural Networks and Learning Systems, 2020, algorithms 1 and 3. With D_i the change of client i
of group c, n_i its weight, and ``a_ij = <D_i, D_j> / (||D_i|| ||D_j||)``:

    split c if  || sum_i n_i D_i / sum_i n_i || < eps_mean   and   max_i ||D_i|| > eps_max
    (c1, c2) = argmin over bipartitions of  a_cross = max over i in c1, j in c2 of a_ij
    keep the split if  sqrt((1 - a_cross) / 2) > gamma

Single linkage computes the bipartition: it merges the most similar clients until two groups are left.

Differences from the paper: the paper trains all clients in every round. Here only the round's clients of a group are split.
Absent members stay with the larger half, which keeps the group's name. A client without a group joins the group with the most
similar mean change. The defaults of eps_mean and eps_max are those of the authors' code, which uses complete linkage.
``tasks/mean_norm`` and ``tasks/max_norm`` record both norms, averaged over groups: choose ``eps_mean`` and ``eps_max`` by them.
``tasks/splits`` counts the splits of a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.clustering import distances
from raydfl.core.errors import ConfigError
from raydfl.core.options import OURS, RELEASE
from raydfl.core.types import Client, Ratio, Tensors
from raydfl.engine.groups._membership import Membership
from raydfl.engine.groups._rule import ClientUpdate, DiscoveryRule, Division, name_clusters

_Change = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Cfl(DiscoveryRule):
    """Groups by recursive bipartition, starting with a single group."""

    eps_mean: Annotated[
        float,
        Field(ge=0, description="Norm of a group's mean change below which the group may be split. 0: never."),
        RELEASE,
    ] = 0.4
    eps_max: Annotated[
        float, Field(ge=0, description="Norm that the largest change of a client must exceed for a split."), RELEASE
    ] = 1.6
    gamma: Annotated[
        float,
        Field(ge=0, le=1, description="Smallest separation of the halves, sqrt((1 - a_cross) / 2). 0: any."),
        OURS,
    ] = 0.0
    min_size: Annotated[int, Field(ge=1, description="Smallest number of clients in each half."), OURS] = 1

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject fewer clients than two halves need, and a server without a model."""
        if len(clients) < 2 * self.min_size and "part" not in clients[0].profile:
            raise ConfigError(
                f"train.groups.min_size is {self.min_size}, but {len(clients)} clients cannot be split into two halves of this "
                f"size. Lower it"
            )
        super().check(clients, tensors)

    def divide(self, membership: Membership, updates: Iterable[ClientUpdate], kept: Tensors) -> Division:
        """Split each group whose norms meet the criteria."""
        own = membership.groups()
        changes: dict[str, _Change] = {}
        weights: dict[str, float] = {}
        for message in updates:
            client, weight = message.update.client_id, message.update.weight
            changes[client] = message.change(message.names())
            weights[client] = float(weight) if isinstance(weight, (int, float)) else 1.0
        groups: dict[str, list[str]] = {}
        for client in changes:
            groups.setdefault(own[client], []).append(client)
        if len(groups) > 1 and "" in groups:
            self._place(groups, changes, weights)
        labels: dict[str, int] = {}
        splits, means, largest, following = 0, 0.0, 0.0, 0
        for clients in groups.values():
            mean, most = (
                _compute_norm(_average_changes(clients, changes, weights)),
                max(_compute_norm(changes[client]) for client in clients),
            )
            means, largest = means + mean, largest + most
            halves = [clients]
            if mean < self.eps_mean and most > self.eps_max:
                halves = self.split([changes[client] for client in clients], clients)
                splits += len(halves) - 1
            for half in halves:
                labels |= dict.fromkeys(half, following)
                following += 1
        clients = [client for client in membership.clients if client in labels]
        members = name_clusters(membership, clients, [labels[client] for client in clients])
        count = max(1, len(groups))
        return Division(
            members,
            {
                "tasks/clusters": Ratio(following, 1),
                "tasks/splits": Ratio(splits, 1),
                "tasks/mean_norm": Ratio(means, count),
                "tasks/max_norm": Ratio(largest, count),
            },
        )

    def split(self, changes: Sequence[_Change], clients: list[str]) -> list[list[str]]:
        """Split clients into the two halves with the smallest similarity between them.

        Args:
            changes: Change of each client.
            clients: Ids of the clients.

        Returns:
            Two halves, or all clients in one list if a half is too small or the halves are too similar.
        """
        from scipy.cluster.hierarchy import cut_tree, linkage
        from scipy.spatial.distance import squareform

        if len(clients) < 2 * self.min_size or len(clients) < 2:
            return [clients]
        tree = linkage(squareform(distances(changes, "cosine"), checks=False), "single")
        sides = cut_tree(tree, 2)[:, 0]
        halves = [[client for client, own in zip(clients, sides, strict=True) if own == side] for side in (0, 1)]
        separation = math.sqrt(max(0.0, float(tree[-1, 2])) / 2)
        return halves if min(map(len, halves)) >= self.min_size and separation > self.gamma else [clients]

    @staticmethod
    def _place(groups: dict[str, list[str]], changes: Mapping[str, _Change], weights: Mapping[str, float]) -> None:
        """Move clients without a group to the group of the round with the most similar mean change, in place."""
        new = groups.pop("")
        means = {group: _average_changes(clients, changes, weights) for group, clients in groups.items()}
        for client in new:
            row = distances([changes[client], *means.values()], "cosine")[0, 1:]
            groups[[*means][int(np.argmin(row))]].append(client)


def _average_changes(
    clients: Iterable[str], changes: Mapping[str, _Change], weights: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return the weighted mean of changes. Each tensor is averaged over the clients with the same shape."""
    sums: dict[str, Tensor] = {}
    totals: dict[str, float] = {}
    for client in clients:
        for name, value in changes[client].items():
            # A layer may have different shapes in different parts of the data.
            same_shape = name not in sums or sums[name].shape == value.shape
            key = name if same_shape else f"{name} {tuple(value.shape)}"
            sums[key] = sums[key] + weights[client] * value if key in sums else weights[client] * value
            totals[key] = totals.get(key, 0.0) + weights[client]
    return {key: value / max(totals[key], 1e-12) for key, value in sums.items()}


def _compute_norm(change: _Change) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in change.values()))
