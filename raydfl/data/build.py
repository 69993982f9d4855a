"""The way to a population: clips are listed, steps assign them to clients, and their features are prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.progress import Progress
from raydfl.core.users_code import naming_failures
from raydfl.data.assembly import Assembler
from raydfl.data.features.cache import prepare
from raydfl.data.features.extraction import RunChunks
from raydfl.data.manifest import remarks_of
from raydfl.data.part import Part
from raydfl.data.population import Population
from raydfl.data.remote import fetch_recordings
from raydfl.data.settings import DataSettings, with_part
from raydfl.data.steps.corrupt import corrupt, remove_views
from raydfl.data.steps.leave_out import deal_ungrouped, leave_out_labels
from raydfl.data.steps.listing import UNLABELLED, Assignment, add_batch_column, make_assignment, natural_order
from raydfl.data.steps.partition import check_classes, partition_clips
from raydfl.data.steps.poison import Poisoner, poison
from raydfl.data.steps.pools import assign_pools, check_pool_names
from raydfl.data.steps.profile import add_profiles
from raydfl.data.steps.split import hold_out, split_clips
from raydfl.data.steps.user_tables import add_clip_columns, keep_named_clips, match_clients, share_clips

Step = Callable[[Assignment], Assignment]
STEPS = ("list", "leave_out", "split", "pools", "partition", "hold_out", "profile", "corrupt", "poison")
"""Names of the steps in their order."""


def list_clips(
    data: DataSettings, seed: int, progress: Progress | None = None, complete: bool = True
) -> tuple[pa.Table, list[str]]:
    """List the configured data set: its manifest and the names of its classes; no clip is opened.

    Recordings behind a URI are copied first.

    Args:
        seed: the run's: it draws the groups of ``data.ungrouped: deal``.
        complete: whether these are all clips of the federation, so that a label to be left out must be among theirs.

    Raises:
        ConfigError: options that the data set does not take.
        DataError: recordings that are not there, or a list that cannot be used.
    """
    for uri in data.uris.values():
        fetch_recordings(uri, data.cache, progress)
    manifest = data.source.open().manifest()
    if manifest.column("label").null_count == manifest.num_rows:
        raise DataError("no clip has a label, so nothing says what the classes are")
    if data.tables.clips is not None:
        manifest = keep_named_clips(manifest, data.tables.clips)
    if data.leave_out:
        manifest = leave_out_labels(manifest, data.leave_out, complete)
    if data.ungrouped == "deal" and manifest.column("group").null_count:
        manifest = deal_ungrouped(manifest, seed)
    return manifest, natural_order(manifest.column("label").unique().drop_null().to_pylist())


def make_steps(data: DataSettings, seed: int, attack: Poisoner | None = None) -> dict[str, Step]:
    """Return the steps from the list of clips to the clients, by name and in their order."""
    own = {name: settings.partition for name, settings in data.pools.items()}
    if data.unlabelled is not None:
        own[UNLABELLED] = data.unlabelled.partition
    columns = {own.column: f"data.profile.{name}" for name, own in data.profile.items() if own.column is not None}

    def partition(tables: Assignment) -> Assignment:
        file, how = data.tables.clients, data.partition
        if how.by == "table":
            named = "data.partition.file" if how.file else "data.tables.clients"
            return share_clips(tables, cast(Path, how.file or file), named, how.minimum, columns)
        tables = partition_clips(tables, how, own, seed)
        return tables if file is None else match_clients(tables, file, columns)

    steps: dict[str, Step] = {
        "split": lambda tables: split_clips(tables, data.split, seed),
        "pools": lambda tables: assign_pools(tables, data.pools, data.unlabelled, seed),
        "partition": partition,
        "hold_out": lambda tables: hold_out(tables, data.split, seed),
        "profile": lambda tables: add_profiles(tables, data.profile),
        "corrupt": lambda tables: remove_views(corrupt(tables, data.corrupt, seed), data.missing, seed),
    }
    if attack is not None:
        steps["poison"] = lambda tables: poison(tables, attack, seed)
    return steps


def assign_clips(
    manifest: pa.Table,
    classes: Sequence[str],
    data: DataSettings,
    seed: int,
    learnt: bool = True,
    readable: np.ndarray | None = None,
    attack: Poisoner | None = None,
    last: str | None = None,
) -> Assignment:
    """Assign the clips of a list to clients and server.

    Args:
        learnt: whether each class has to be learnt, so that one without training clips is a mistake.
        readable: bool [clips of the list]; ``None``: all can be read.
        last: name of the last step to do; ``None``: all.

    Raises:
        DataError: a step does not fit the clips.
    """
    listed = functools.reduce(add_batch_column, data.columns, make_assignment(manifest, classes))
    if last in ("list", "leave_out"):
        return listed
    tables = usable = listed if readable is None else listed.select(readable)
    if data.tables.clips is not None:
        tables = add_clip_columns(tables, data.tables.clips)
        if "pool" in tables.clips.schema.names:
            check_pool_names(tables.pools, data.views, "data.tables.clips: column 'pool'")
    steps = make_steps(data, seed, attack)
    if "role" in tables.clips.schema.names:
        steps["split"] = steps["hold_out"] = lambda tables: tables
    for name, step in steps.items():
        tables = step(tables)
        if name == "partition" and learnt and data.unseen == "stop" and data.label_sets is None:
            check_classes(tables, listed, usable)
        if name == last:
            break
    return tables


def build_population(
    data: DataSettings,
    seed: int,
    progress: Progress | None = None,
    run_chunks: RunChunks | None = None,
    attack: Poisoner | None = None,
    classes: Sequence[str] | None = None,
    labels_needed: bool = True,
) -> Population:
    """List the clips, assign them, and make sure that their features are in the cache.

    Args:
        data: the configuration.
        seed: the run's: it decides the split, the partition, the local hold-outs and the corruption.
        progress: shown while features are made.
        run_chunks: executes chunks of that work, on a cluster for example; local processes when ``None``.
        attack: what attackers do to their recordings and labels, if there are any.
        classes: of the whole federation, where these clips are a part of it and need not show them all.
        labels_needed: whether each class has to be learnt, so that one without training clips is a mistake.

    Raises:
        ConfigError: options that the data set does not take, or an attack that does not fit the data.
        DataError: recordings that cannot be used, or a split or partition that they do not allow.
        ResourcesError: no room for the features.
    """
    parts = {}
    for name, own in data.each.items():
        try:
            parts[name] = _build_part(own, seed, progress, run_chunks, attack, classes, labels_needed)
        except (ConfigError, DataError) as error:
            raise with_part(error, name) from error
    return Population(parts).use(data)


def _build_part(
    data: DataSettings,
    seed: int,
    progress: Progress | None,
    run_chunks: RunChunks | None,
    attack: Poisoner | None,
    classes: Sequence[str] | None,
    labels_needed: bool,
) -> Part:
    """Build one data set of the federation, see :func:`build_population`."""
    complete = classes is None
    manifest, own = list_clips(data, seed, progress, complete)
    classes = own if classes is None else classes
    if attack is not None:
        with naming_failures(attack, "check", kind="attack"):
            attack.check(classes, data.features)
    assign = functools.partial(
        assign_clips,
        manifest,
        classes,
        data,
        seed,
        complete and labels_needed,
        attack=attack if data.partition.by != "table" else None,
    )
    tables = assign()  # before the long work: what cannot be done fails now
    if attack is not None:
        with naming_failures(attack, "candidates", kind="attack"):
            attack.candidates(tables.ids, seed)
    prepared = functools.partial(prepare, data.source, cache=data.cache, progress=progress, run_chunks=run_chunks)
    store = prepared(manifest, data.first_view.stored_features, unreadable=data.unreadable)
    messages = remarks_of(manifest)
    if data.split.as_published is not None:
        messages.append(
            "data.split.as_published: clips that are trained on are tested on too, so scores say how well clips are known, not "
            "how well a failing machine is heard"
        )
    clips, failures, found = manifest.column("clip"), dict(store.failures), None
    while found is None:
        if failures:
            if len(failures) == len(clips):
                first = min(failures)
                raise DataError(f"none of {len(clips)} clips can be read, the first {clips[first]}: {failures[first]}")
            tables = assign(readable=~np.isin(np.arange(len(clips)), list(failures)))
        assembler = Assembler(manifest, tables, data, seed, prepared, complete)
        found = assembler.find_features(store, None if attack is None else attack.alteration())
        if assembler.failures:  # Others may be dealt to the clients then.
            failures, found = failures | assembler.failures, None
    skipped = [(clips[index].as_py(), reason) for index, reason in sorted(failures.items())]
    if skipped:
        messages.append(
            f"{len(skipped)} of {len(clips)} clips cannot be read and are left out, the first {skipped[0][0]}"
        )
    return assembler.part(found, skipped, messages)
