"""Partition: assign an owner, a client, to every clip."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from raydfl.core.errors import DataError
from raydfl.core.seeds import generator
from raydfl.data.client_ids import ClientIds
from raydfl.data.steps.dealing import Owners, PartitionSettings, deal_clips
from raydfl.data.steps.listing import TRAIN, Assignment, natural_order
from raydfl.data.steps.split import PURPOSES
from raydfl.data.tables import encode


def partition_clips(
    tables: Assignment, settings: PartitionSettings, overrides: Mapping[str, PartitionSettings | None], seed: int
) -> Assignment:
    """Add the column ``client``, make the table of clients, and sort the clips by client and pool.

    Every pool is dealt separately, and so is every set that clients hold out by value. Owners in a user's table of clips stay.

    Args:
        settings: ``data.partition``.
        overrides: partitions of single pools, by name; ``None``: as in ``settings``.
        seed: the run's.

    Raises:
        DataError: clips without a group, an unattainable minimum, or a client without a training clip.
    """
    deals = _group_by_deal(tables)
    if "client" in tables.clips.schema.names:
        owners = _read_owners(tables)
        reason = "data.tables.clips names no client for them"
    else:
        owners = _deal_all(tables, deals, settings, overrides, seed)
        reason = f"their clients would have fewer than {settings.minimum} clips"
    ids, client = owners.ids, owners.owner.astype(np.int32)
    counts = np.bincount(client[client >= 0], minlength=len(ids))
    if counts.min() < settings.minimum:
        least = int(counts.argmin())
        raise DataError(
            f"data.partition: client {ids[least]!r} gets {counts[least]} training clips in all pools together, fewer than "
            f"data.partition.minimum {settings.minimum}. Set fewer clients or a smaller minimum"
        )
    trained = np.bincount(client[tables.has_role("train") & (client >= 0)], minlength=len(ids))
    if trained.min() == 0:
        least = int(trained.argmin())
        raise DataError(
            f"data.split: client {ids[least]!r} would hold out all its {counts[least]} clips and have none to train on. "
            f"Change data.split.client_test, data.split.validation or data.partition"
        )
    index = ClientIds.from_strings(ids)
    columns = index.columns() | ({} if owners.group is None else {"group": encode(owners.group, owners.groups)})
    deal = np.full(len(client), len(deals))
    for number, rows in enumerate(deals.values()):
        deal[rows] = number
    order = np.lexsort((deal, np.where(client < 0, len(ids), client)))  # the server's clips last
    used = (client >= 0) | tables.has_role("server_validation", "test")
    tables = replace(tables, clients=pa.record_batch(columns)).set_clips(client=encode(client, index.column))
    if not used.all():
        tables = tables.add_message(f"{(~used).sum()} training clips belong to no client: {reason}")
    return tables.select(order[used[order]])


def _group_by_deal(tables: Assignment) -> dict[str, np.ndarray]:
    """Group the clips by the deal that assigns them: the pools, then the sets held out by value. Keys seed the draws."""
    pool = tables.codes("pool")
    held_out = {purpose: np.flatnonzero(tables.has_role(role)) for role, purpose in PURPOSES.items()}
    return {name: np.flatnonzero(pool == number) for number, name in enumerate(tables.pools)} | {
        purpose: rows for purpose, rows in held_out.items() if len(rows)
    }


def _deal_all(
    tables: Assignment,
    deals: Mapping[str, np.ndarray],
    settings: PartitionSettings,
    overrides: Mapping[str, PartitionSettings | None],
    seed: int,
) -> Owners:
    """Carry out all deals and merge their owners."""
    single, parts = [*deals] == [TRAIN], []
    for number, (name, rows) in enumerate(deals.items()):
        partition = overrides.get(name) or settings
        if not single:
            partition = partition.model_copy(update={"minimum": 0})  # the sum of all deals must reach it
        if len(rows):
            rng = generator(seed, 0, "" if number == 0 else name, "partition")
            parts.append((rows, deal_clips(tables.select(rows), partition, rng)))
    names = [owners.ids for _, owners in parts]
    # dict.fromkeys keeps the order, so natural_order gets almost sorted names.
    ids = names[0] if single else natural_order(list(dict.fromkeys(itertools.chain(*names))))
    client_of = {name: number for number, name in enumerate(ids)}
    groups = natural_order(list({name for _, owners in parts for name in owners.groups}))
    group_of = {name: number for number, name in enumerate(groups)}
    owner, group = np.full(tables.clips.num_rows, -1), np.full(len(ids), -1)
    for rows, owners in parts:
        clients = np.array([client_of[name] for name in owners.ids])
        owner[rows] = np.where(owners.owner < 0, -1, clients[owners.owner])
        if owners.group is not None:
            group[clients] = np.array([group_of[name] for name in owners.groups])[owners.group]
    return Owners(ids, owner, groups, group.astype(np.int32) if groups else None)


def _read_owners(tables: Assignment) -> Owners:
    """Read the owners from the user's table of clips."""
    names = tables.clips.column("client").to_pylist()
    ownable = tables.has_role("train", "validation", "client_test")  # the server owns the clips of all other roles
    ids = natural_order(list({name for name, can in zip(names, ownable, strict=True) if can and name is not None}))
    if not ids:
        raise DataError("data.tables.clips: no training clip has a client. Fill its column client")
    client_of = {name: number for number, name in enumerate(ids)}
    owner = [client_of.get(name, -1) if can else -1 for name, can in zip(names, ownable, strict=True)]
    return Owners(ids, np.array(owner))


def check_classes(tables: Assignment, listed: Assignment, readable: Assignment) -> None:
    """Reject data with a class without clips at the clients.

    Args:
        tables: the clips after the step partition.
        listed: all clips of the list.
        readable: the readable clips of the list.

    Raises:
        DataError: naming the class, with the numbers of its clips.
    """

    def count(clips: Assignment, *roles: str) -> np.ndarray:
        labels = clips.codes("label")
        mask = (labels >= 0) & (clips.has_role(*roles) if roles else True)
        return np.bincount(labels[mask], minlength=len(clips.classes))

    for number in np.flatnonzero(count(tables, "train", "validation", "client_test") == 0).tolist():
        raise DataError(
            f"no client has a clip of label {tables.classes[number]!r}: of its {count(listed)[number]} clips "
            f"{count(readable)[number]} can be read, {count(tables, 'test')[number]} are in the test set and "
            f"{count(tables, 'server_validation')[number]} in the server's validation set. Change data.split or "
            "data.partition, leave the label out with data.leave_out, or use it in tests only (data.unseen=keep)"
        )
