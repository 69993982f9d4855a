"""Partition: clips get owners, the clients."""

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
    tables: Assignment, settings: PartitionSettings, own: Mapping[str, PartitionSettings | None], seed: int
) -> Assignment:
    """Add the column ``client``, make the table of clients, and sort the clips by client and pool.

    Each pool, and the clips that clients hold out by value, is dealt by itself. Owners in a user's table of clips stay.

    Args:
        settings: ``data.partition``.
        own: partitions of pools by name.
        seed: the run's.

    Raises:
        DataError: clips without a group, a minimum that cannot be met, with the numbers, or a client that would hold out all.
    """
    deals = _split_by_deal(tables)
    if "client" in tables.clips.schema.names:
        owners = _take_owners(tables)
        reason = "data.tables.clips names no client for them"
    else:
        owners = _deal_all(tables, deals, settings, own, seed)
        reason = f"theirs would have fewer than {settings.minimum} clips"
    ids, client = owners.ids, owners.owner.astype(np.int32)
    counts = np.bincount(client[client >= 0], minlength=len(ids))
    if counts.min() < settings.minimum:
        least = int(counts.argmin())
        raise DataError(
            f"data.partition: client {ids[least]!r} gets {counts[least]} training clips in all pools together, fewer than "
            f"data.partition.minimum {settings.minimum}; take fewer clients or a smaller minimum"
        )
    trained = np.bincount(client[tables.has_role("train") & (client >= 0)], minlength=len(ids))
    if trained.min() == 0:
        least = int(trained.argmin())
        raise DataError(
            f"client {ids[least]!r} would hold out all its {counts[least]} clips and have none to "
            f"train on; choose data.split.client_test, data.split.validation or data.partition differently"
        )
    index = ClientIds.from_strings(ids)
    columns = index.columns() | ({} if owners.group is None else {"group": encode(owners.group, owners.groups)})
    deal = np.full(len(client), len(deals))
    for number, rows in enumerate(deals.values()):
        deal[rows] = number
    order = np.lexsort((deal, np.where(client < 0, len(ids), client)))
    kept = (client >= 0) | tables.has_role("server_validation", "test")
    tables = replace(tables, clients=pa.record_batch(columns)).set_clips(client=encode(client, index.column))
    if not kept.all():
        tables = tables.with_message(f"{(~kept).sum()} training clips belong to no client: {reason}")
    return tables.select(order[kept[order]])


def _split_by_deal(tables: Assignment) -> dict[str, np.ndarray]:
    """Return the clips that are dealt together, by the names of the draws: the pools, then what clients hold out by value."""
    pool = tables.codes("pool")
    held_out = {purpose: np.flatnonzero(tables.has_role(role)) for role, purpose in PURPOSES.items()}
    return {name: np.flatnonzero(pool == place) for place, name in enumerate(tables.pools)} | {
        purpose: rows for purpose, rows in held_out.items() if len(rows)
    }


def _deal_all(
    tables: Assignment,
    deals: Mapping[str, np.ndarray],
    settings: PartitionSettings,
    own: Mapping[str, PartitionSettings | None],
    seed: int,
) -> Owners:
    """Deal all clips of clients."""
    alone, found = [*deals] == [TRAIN], []
    for number, (name, rows) in enumerate(deals.items()):
        how = own.get(name) or settings
        if not alone:
            how = how.model_copy(update={"minimum": 0})  # all deals together must reach it
        if len(rows):
            rng = generator(seed, 0, "" if number == 0 else name, "partition")
            found.append((rows, deal_clips(tables.select(rows), how, rng)))
    names = [each.ids for _, each in found]
    ids = names[0] if alone else natural_order(list(dict.fromkeys(itertools.chain(*names))))  # mostly in order already
    place = {name: number for number, name in enumerate(ids)}
    groups = natural_order(list({name for _, each in found for name in each.groups}))
    number_of = {name: number for number, name in enumerate(groups)}
    owner, group = np.full(tables.clips.num_rows, -1), np.full(len(ids), -1)
    for rows, each in found:
        places = np.array([place[name] for name in each.ids])
        owner[rows] = np.where(each.owner < 0, -1, places[each.owner])
        if each.group is not None:
            group[places] = np.array([number_of[name] for name in each.groups])[each.group]
    return Owners(ids, owner, groups, group.astype(np.int32) if groups else None)


def _take_owners(tables: Assignment) -> Owners:
    """Return the owners in the user's table of clips."""
    names = tables.clips.column("client").to_pylist()
    owned = tables.has_role("train", "validation", "client_test")
    ids = natural_order(list({name for name, mine in zip(names, owned, strict=True) if mine and name is not None}))
    if not ids:
        raise DataError("data.tables.clips: no training clip has a client; name the client of each")
    place = {name: number for number, name in enumerate(ids)}
    owner = [place.get(name, -1) if mine else -1 for name, mine in zip(names, owned, strict=True)]
    return Owners(ids, np.array(owner))


def check_classes(tables: Assignment, listed: Assignment, readable: Assignment) -> None:
    """Refuse a class that no client could learn.

    Args:
        listed: all clips of the list.
        readable: those that can be read.
    """

    def count(of: Assignment, *roles: str) -> np.ndarray:
        labels = of.codes("label")
        return np.bincount(labels[(labels >= 0) & (of.has_role(*roles) if roles else True)], minlength=len(of.classes))

    for number in np.flatnonzero(count(tables, "train", "validation", "client_test") == 0).tolist():
        raise DataError(
            f"no client has a clip of label {tables.classes[number]!r}: of its {count(listed)[number]} clips "
            f"{count(readable)[number]} can be read, {count(tables, 'test')[number]} are in the test set and "
            f"{count(tables, 'server_validation')[number]} in the server's validation set; choose data.split or "
            "data.partition differently, or leave the label out of the data"
        )
