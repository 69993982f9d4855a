"""Known groups: a profile column gives each client's group. The result is an upper bound for discovery rules.

For a client k:

    group(k) = profile_k[by]

After the first round, all clients are in their groups, including those outside the cohort.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, cast

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import OURS
from raydfl.core.types import Client, Tensors
from raydfl.engine.groups._membership import Membership
from raydfl.engine.groups._rule import ClientUpdate, Division, GroupRule


@dataclass(frozen=True, kw_only=True)
class Known(GroupRule):
    """Groups by a profile column."""

    by: Annotated[str, Field(description="Profile column of the group. part: the part of data.parts."), OURS] = "part"

    @property
    def column(self) -> str:
        """Profile column of the groups."""
        return self.by

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject an unknown column, and a group without training clients."""
        if any(self.by not in client.profile for client in clients):
            raise ConfigError(
                f"train.groups.by: the clients' profiles have no column {self.by!r}. {nearest(self.by, clients[0].profile)} Add it "
                f"with data.profile, or use 'part' with data.parts"
            )
        groups = dict.fromkeys(str(client.profile[self.by]) for client in clients)
        taking_part = {str(client.profile[self.by]) for client in clients if client.chance > 0}
        for group in groups:
            if group not in taking_part:
                raise ConfigError(
                    f"train.groups.by: no client of group {group!r} takes part in training, so its model would never be trained. "
                    f"Change train.clients, or remove the group's data"
                )

    def divide(self, membership: Membership, updates: Iterable[ClientUpdate], kept: Tensors) -> Division:
        """Assign every client to the group in its profile, also outside the cohort."""
        truth = cast(Sequence[str], membership.truth)
        groups = {client: f"task_{kind}" for client, kind in zip(membership.clients, truth, strict=True)}
        return Division(membership.move(groups, membership.following))
