"""Division: the clips that a data set has, and those of each client and of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError
from raydfl.core.progress import Progress
from raydfl.core.seeds import generator
from raydfl.data.listing import deal_ungrouped, kept_labels
from raydfl.data.partition import Partition, natural_order, partition_clips
from raydfl.data.partition_table import partition_by_table
from raydfl.data.pools import NO_LABEL, TRAIN, UNLABELLED, choose_pools, deal_pools
from raydfl.data.remote import fetch_recordings
from raydfl.data.settings import DataSettings
from raydfl.data.split import (
    ClientHoldOutSettings,
    Split,
    SplitSettings,
    as_published,
    hold_out,
    hold_out_of_each,
    split_clips,
    with_values,
)

TRAINING, VALIDATION, CLIENT_TEST = 0, 1, 2
"""The uses that a client has for a clip."""


@dataclass(frozen=True)
class Division:
    """The clips of each client and of the server. Clips are numbered as in the manifest."""

    labels: np.ndarray
    """int64 [clips of the manifest]."""
    split: Split
    partition: Partition
    role: np.ndarray
    """int64, one for each of the partition's rows: :data:`TRAINING`, :data:`VALIDATION` or :data:`CLIENT_TEST`."""
    pool: np.ndarray
    """int64, one for each of the partition's rows: number of its pool; 0 for what is not for training."""
    pools: tuple[str, ...]
    """Names of the pools."""


def list_clips(
    data: DataSettings, seed: int, progress: Progress | None = None, complete: bool = True
) -> tuple[pa.Table, list[str]]:
    """List the configured data set: its manifest and the names of its classes; no clip is opened.

    What is behind a URI is copied first.

    Args:
        seed: the run's: it decides to whom ``data.ungrouped: deal`` deals.
        complete: whether these are all clips of the federation, so that a label to be left out must be among theirs.

    Raises:
        ConfigError: options that the data set does not take.
        DataError: recordings that are not there, or a list that cannot be used.
    """
    for uri in data.uris.values():
        fetch_recordings(uri, data.cache, progress)
    manifest = data.source.open().manifest()
    labels = natural_order(manifest.column("label").unique().drop_null().to_pylist())
    if not labels:
        raise DataError("no clip has a label, so nothing says what the classes are")
    if data.leave_out:
        labels = kept_labels(labels, data.leave_out if complete else set(data.leave_out) & set(labels))
        manifest = manifest.filter(pc.is_in(manifest.column("label"), pa.array([*labels, None])))
    if data.ungrouped == "deal" and manifest.column("group").null_count:
        manifest = deal_ungrouped(manifest, seed)
    return manifest, labels


def divide(
    manifest: pa.Table,
    classes: Sequence[str],
    data: DataSettings,
    seed: int,
    complete: bool = True,
    usable: np.ndarray | None = None,
) -> Division:
    """Divide the clips among the clients.

    Args:
        complete: whether these are all clips of the federation, so that a class without clips is a mistake.
        usable: the clips that can be read, rows of the manifest (int64, ascending); ``None``: all.

    Raises:
        DataError: a split or partition that the recordings do not allow.
    """
    usable = np.arange(manifest.num_rows) if usable is None else usable
    position: dict[str | None, int] = {None: NO_LABEL} | {name: number for number, name in enumerate(classes)}
    labels = np.array([position[label] for label in manifest.column("label").to_pylist()], np.int64)
    table = manifest if len(usable) == manifest.num_rows else manifest.take(pa.array(usable))
    split = split_clips(table, data.split, seed)
    own = labels[usable]
    apart, train = _held_out_by_value(table, split.train, own, data, seed)
    pools = choose_pools(table, train, own, classes, data.pools, data.unlabelled, seed)
    if data.partition.by == "table":  # whose rows are those of the whole list
        columns = {own.column: f"data.profile.{name}" for name, own in data.profile.items() if own.column is not None}
        partition = partition_by_table(manifest.num_rows, usable[split.train], data.partition, columns)
        pool = np.zeros(len(partition.rows), np.int64)
    elif [*pools] == [TRAIN] and not apart:
        partition = partition_clips(table, split.train, own, data.partition, seed)
        pool = np.zeros(len(partition.rows), np.int64)
    else:
        parts = {name: settings.partition for name, settings in data.pools.items()}
        if data.unlabelled is not None:
            parts[UNLABELLED] = data.unlabelled.partition
        dealt = {**pools, **{_PURPOSES[role]: rows for role, rows in apart.items()}}
        partition, pool = deal_pools(table, dealt, own, data.partition, parts, seed)
    role = np.array([TRAINING] * len(pools) + [*apart], np.int64)[pool]
    pool = np.where(role == TRAINING, pool, 0)
    known = [
        rows[own[rows] != NO_LABEL] for rows in (split.validation, split.test)
    ]  # nothing can be measured on the others
    split = Split(usable[split.train], usable[known[0]], usable[known[1]])
    if partition.table is None:
        partition = dataclasses.replace(partition, rows=usable[partition.rows])
    if complete and data.unseen == "stop" and data.label_sets is None:
        _check_classes(classes, labels, usable, split, partition)
    drawn = {kind: how for kind, how in _hold_outs(data.split).items() if how and (not _by_value(how) or how.others)}
    labelled = [number for number, name in enumerate(pools) if name != UNLABELLED]  # the others can measure nothing
    if apart:
        _check_training(partition, role)
    for client_id, start, stop in (
        zip(partition.ids, partition.offsets, partition.offsets[1:], strict=False) if drawn else ()
    ):
        for kind, how in drawn.items():
            rng = generator(seed, 0, client_id, f"local {_PURPOSES[kind]}")
            for number in labelled:
                mine = start + np.flatnonzero((role[start:stop] == TRAINING) & (pool[start:stop] == number))
                role[mine[_drawn(how, labels[partition.rows[mine]], rng)]] = kind
    pool = np.where(role == TRAINING, pool, 0)
    return Division(labels, split, partition, role, pool, tuple(pools))


_PURPOSES = {VALIDATION: "validation", CLIENT_TEST: "test"}


def _hold_outs(settings: SplitSettings) -> dict[int, float | ClientHoldOutSettings | None]:
    """Return what clients hold out, by role, in the order in which it is taken."""
    return {CLIENT_TEST: settings.client_test, VALIDATION: settings.validation}


def _by_value(setting: float | ClientHoldOutSettings | None) -> TypeGuard[ClientHoldOutSettings]:
    return isinstance(setting, ClientHoldOutSettings) and setting.by != "clip"


def _held_out_by_value(
    table: pa.Table, train: np.ndarray, labels: np.ndarray, data: DataSettings, seed: int
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Return the clips that clients hold out because of a column's values, by role, and those that are left to train on."""
    found: dict[int, np.ndarray] = {}
    names = {CLIENT_TEST: "client_test", VALIDATION: "validation"}
    if data.split.as_published is not None:  # who tests on all its clips
        found[CLIENT_TEST] = train[labels[train] != NO_LABEL]
        train = train[as_published(table, train, data.split.as_published, seed)]
    for role, setting in _hold_outs(data.split).items():
        if _by_value(setting):
            chosen = with_values(table, train, setting, seed, f"data.split.{names[role]}")
            held_out = train[chosen]
            found[role], train = held_out[labels[held_out] != NO_LABEL], train[~chosen]
    return found, train


def _drawn(setting: float | ClientHoldOutSettings | None, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw which of a client's clips it holds out: bool [clips]."""
    if isinstance(setting, ClientHoldOutSettings) and setting.stratify:
        return hold_out_of_each(labels, setting.fraction or 0.0, rng)
    if not isinstance(setting, ClientHoldOutSettings):
        return hold_out(len(labels), setting or 0.0, rng)
    fraction = setting.others if _by_value(setting) else setting.fraction
    return hold_out(len(labels), fraction or 0.0, rng)


def _check_training(partition: Partition, role: np.ndarray) -> None:
    """Refuse a client that would hold out all its clips."""
    trained = np.add.reduceat(role == TRAINING, partition.offsets[:-1], dtype=np.int64)
    if trained.min() == 0:
        client = int(trained.argmin())
        raise DataError(
            f"client {partition.ids[client]!r} would hold out all its {np.diff(partition.offsets)[client]} clips and have none to "
            f"train on; choose data.split.client_test, data.split.validation or data.partition differently"
        )


def _check_classes(
    classes: Sequence[str], labels: np.ndarray, usable: np.ndarray, split: Split, partition: Partition
) -> None:
    """Refuse a class that no client could learn."""

    def count(rows: np.ndarray) -> np.ndarray:
        return np.bincount(labels[rows][labels[rows] >= 0], minlength=len(classes))

    for number in np.flatnonzero(count(partition.rows) == 0):
        raise DataError(
            f"no client has a clip of label {classes[int(number)]!r}: of its {np.sum(labels == number)} clips "
            f"{count(usable)[number]} can be read, {count(split.test)[number]} are in the test set and "
            f"{count(split.validation)[number]} in the server's validation set; choose data.split or data.partition "
            "differently, or leave the label out of the data"
        )
