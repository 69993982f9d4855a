"""Known groups: a column of the clients' profile names each client's group. It is the upper bound of discovery.

For a client k:

    group(k) = profile_k[by]

From the first round on all clients are in their groups, also outside the cohort.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, cast

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.types import Client, Tensors
from raydfl.engine.groups._membership import Membership
from raydfl.engine.groups._rule import Division, GroupRule, Sent


@dataclass(frozen=True, kw_only=True)
class Known(GroupRule):
    """Groups by a column of the clients' profile."""

    by: Annotated[str, Field(description="name in the clients' profile; part: the part of data.parts")] = "part"

    @property
    def column(self) -> str:
        """The column that names the groups."""
        return self.by

    def check(self, clients: Sequence[Client], tensors: Sequence[str]) -> None:
        """Reject an unknown column, and a group without a client in training."""
        if any(self.by not in client.profile for client in clients):
            raise ConfigError(
                f"train.groups.by: clients have no {self.by!r} in their profile; {nearest(self.by, clients[0].profile)} Several "
                f"data sets are data.parts, whose name is 'part'; other names come from data.profile"
            )
        groups = dict.fromkeys(str(client.profile[self.by]) for client in clients)
        taking_part = {str(client.profile[self.by]) for client in clients if client.chance > 0}
        for group in groups:
            if group not in taking_part:
                raise ConfigError(
                    f"train.groups.by: no client of group {group!r} takes part in training, so its model would never be trained; "
                    f"change train.clients, or leave that data out"
                )

    def divide(self, book: Membership, sent: Iterable[Sent], kept: Tensors) -> Division:
        """Put every client, also outside the cohort, into the group that its profile names."""
        truth = cast(Sequence[str], book.truth)
        groups = {client: f"task_{kind}" for client, kind in zip(book.clients, truth, strict=True)}
        return Division(book.move(groups, book.following))
