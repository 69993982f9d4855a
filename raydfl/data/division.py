"""Division: which clips a data set has, and which client or server has which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError
from raydfl.core.progress import Progress
from raydfl.core.seeds import generator
from raydfl.data.listing import deal_ungrouped, kept_labels
from raydfl.data.partition import Partition, natural_order, partition_clips
from raydfl.data.remote import fetch_recordings
from raydfl.data.settings import DataSettings
from raydfl.data.split import Split, hold_out, split_clips


@dataclass(frozen=True)
class Division:
    """Who has which clips. Clips are numbered as in the manifest."""

    labels: np.ndarray
    """int64 [clips of the manifest]."""
    split: Split
    partition: Partition
    held_out: np.ndarray
    """bool, one for each of the partition's rows: the client's own validation."""


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
    labels = natural_order(manifest.column("label").unique().to_pylist())
    if data.leave_out:
        labels = kept_labels(labels, data.leave_out if complete else set(data.leave_out) & set(labels))
        manifest = manifest.filter(pc.is_in(manifest.column("label"), pa.array(labels)))
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
    position = {name: number for number, name in enumerate(classes)}
    labels = np.array([position[label] for label in manifest.column("label").to_pylist()], np.int64)
    table = manifest if len(usable) == manifest.num_rows else manifest.take(pa.array(usable))
    split = split_clips(table, data.split, seed)
    partition = partition_clips(table, split.train, labels[usable], data.partition, seed)
    split = Split(usable[split.train], usable[split.validation], usable[split.test])
    partition = Partition(
        partition.ids, usable[partition.rows], partition.offsets, partition.groups, partition.group_of
    )
    if complete:
        _check_classes(classes, labels, usable, split, partition)
    held_out = np.zeros(len(partition.rows), bool)
    if data.split.validation:
        for client_id, start, stop in zip(partition.ids, partition.offsets, partition.offsets[1:], strict=False):
            rng = generator(seed, 0, client_id, "local validation")
            held_out[start:stop] = hold_out(int(stop - start), data.split.validation, rng)
    return Division(labels, split, partition, held_out)


def _check_classes(
    classes: Sequence[str], labels: np.ndarray, usable: np.ndarray, split: Split, partition: Partition
) -> None:
    """Refuses a class that no client could learn."""

    def count(rows: np.ndarray) -> np.ndarray:
        return np.bincount(labels[rows], minlength=len(classes))

    for number in np.flatnonzero(count(partition.rows) == 0):
        raise DataError(
            f"no client has a clip of label {classes[int(number)]!r}: of its {np.sum(labels == number)} clips "
            f"{count(usable)[number]} can be read, {count(split.test)[number]} are in the test set and "
            f"{count(split.validation)[number]} in the server's validation set; choose data.split or data.partition "
            "differently, or leave the label out of the data"
        )
