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
from raydfl.data.steps.dealing import PartitionSettings, deal_clips
from raydfl.data.steps.listing import TRAIN, Assignment, natural_order
from raydfl.data.steps.split import PURPOSES
from raydfl.data.tables import encode


def partition_clips(
    tables: Assignment, settings: PartitionSettings, own: Mapping[str, PartitionSettings | None], seed: int
) -> Assignment:
    """Add the column ``client``, make the table of clients, and sort the clips by client and pool.

    Each pool, and the clips that clients hold out by value, is dealt by itself.

    Args:
        settings: ``data.partition``.
        own: partitions of pools by name.
        seed: the run's.

    Raises:
        DataError: clips without a group, a minimum that cannot be met, with the numbers, or a client that would hold out all.
    """
    pool = tables.codes("pool")
    deals = {
        name: (own.get(name) or settings, np.flatnonzero(pool == place)) for place, name in enumerate(tables.pools)
    }
    held_out = {purpose: np.flatnonzero(tables.has_role(role)) for role, purpose in PURPOSES.items()}
    deals |= {purpose: (settings, rows) for purpose, rows in held_out.items() if len(rows)}
    alone = [*deals] == [TRAIN]
    deal, owners = np.full(len(pool), len(deals)), []
    for number, (name, (kind, rows)) in enumerate(deals.items()):
        deal[rows] = number
        how = kind if alone else kind.model_copy(update={"minimum": 0})  # together they must reach it
        rng = generator(seed, 0, "" if number == 0 else name, "partition")
        if len(rows):
            owners.append((rows, deal_clips(tables.select(rows), how, rng)))
    names = [found.ids for _, found in owners]
    ids = names[0] if alone else natural_order(list(dict.fromkeys(itertools.chain(*names))))  # mostly in order already
    place = {name: number for number, name in enumerate(ids)}
    groups = {
        name: number
        for number, name in enumerate(natural_order(list({n for _, found in owners for n in found.groups})))
    }
    group = np.full(len(ids), -1, np.int32)
    client = np.full(len(pool), -1, np.int32)
    for rows, found in owners:
        places = np.array([place[name] for name in found.ids], np.int32)
        client[rows] = np.where(found.owner < 0, -1, places[found.owner])
        if found.group is not None:
            group[places] = np.array([groups[name] for name in found.groups], np.int32)[found.group]
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
    kept = (client >= 0) | tables.has_role("server_validation", "test")
    clients = ClientIds.from_strings(ids)
    columns = clients.columns() | ({"group": encode(group, [*groups])} if group.max() >= 0 else {})
    found_tables = tables.with_clips(
        client=pa.DictionaryArray.from_arrays(pa.array(client, mask=client < 0), clients.column)
    )
    order = np.lexsort((deal, np.where(client < 0, len(ids), client)))
    found_tables = replace(found_tables, clients=pa.record_batch(columns)).select(order[kept[order]])
    if kept.all():
        return found_tables
    return found_tables.with_message(
        f"{(~kept).sum()} training clips belong to no client: theirs would have fewer than {settings.minimum} clips"
    )


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
