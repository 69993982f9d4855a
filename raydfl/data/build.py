"""Preparation of a population: list the clips, assign them to clients in steps, and compute their features."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.progress import ProgressReporter
from raydfl.core.users_code import naming_failures
from raydfl.data.assembly import Assembler
from raydfl.data.features.cache import prepare
from raydfl.data.features.extraction import RunChunks
from raydfl.data.manifest import read_remarks
from raydfl.data.part import Part
from raydfl.data.population import Population
from raydfl.data.remote import fetch_recordings
from raydfl.data.settings import DataSettings, qualify_error
from raydfl.data.steps.canaries import add_canaries
from raydfl.data.steps.corrupt import corrupt, remove_views
from raydfl.data.steps.events import contains_classes, label_events, split_events
from raydfl.data.steps.label_sequences import contains_units, find_rarest_units, split_sequences
from raydfl.data.steps.leave_out import deal_ungrouped, leave_out_labels, replace_labels
from raydfl.data.steps.listing import (
    MAIN_UNIT,
    UNLABELLED,
    Assignment,
    add_batch_column,
    make_assignment,
    natural_order,
)
from raydfl.data.steps.partition import check_classes, partition_clips
from raydfl.data.steps.poison import Poisoner, poison
from raydfl.data.steps.pools import assign_pools, check_pool_names
from raydfl.data.steps.profile import add_profiles
from raydfl.data.steps.split import hold_out, split_clips
from raydfl.data.steps.user_tables import add_clip_columns, keep_named_clips, match_clients, share_clips
from raydfl.data.tables import encode
from raydfl.data.trials import TRIALS, read_trials

Step = Callable[[Assignment], Assignment]
STEPS = ("list", "leave_out", "split", "pools", "partition", "hold_out", "profile", "corrupt", "poison")
"""Names of the steps in order."""


def list_clips(
    data: DataSettings, seed: int, progress: ProgressReporter | None = None, complete: bool = True
) -> tuple[pa.Table, list[str]]:
    """List the clips and classes of the configured data set, without opening clips.

    Recordings at a URI are copied first.

    Args:
        data: the configuration.
        seed: seed of the run. It draws the groups of ``data.ungrouped: deal``.
        progress: shows the copying of recordings.
        complete: whether the list contains all clips of the federation. Unknown labels in ``data.leave_out`` are errors then.

    Returns:
        The manifest, and the names of the classes.

    Raises:
        ConfigError: an option of the data set is invalid.
        DataError: the recordings are missing, or their list is invalid.
    """
    for uri in data.uris.values():
        fetch_recordings(uri, data.cache, progress)
    manifest = data.source.list_clips()
    if data.events is not None:
        manifest = label_events(manifest, data.events)
    if manifest.column("label").null_count == manifest.num_rows:
        raise DataError("no clip has a label, so the classes are unknown. Add labels to the recordings")
    if data.tables.clips is not None:
        manifest = keep_named_clips(manifest, data.tables.clips)
    if data.leave_out:
        manifest = leave_out_labels(manifest, data.leave_out, complete)
    if data.label_from is not None:
        manifest = replace_labels(manifest, data.label_from)
    if data.ungrouped == "deal" and manifest.column("group").null_count:
        manifest = deal_ungrouped(manifest, seed)
    return manifest, natural_order(manifest.column("label").unique().drop_null().to_pylist())


def make_steps(data: DataSettings, seed: int, attack: Poisoner | None = None) -> dict[str, Step]:
    """Return the steps from the list of clips to the clients by name, in order."""
    pools = {name: settings.partition for name, settings in data.pools.items()}
    if data.unlabelled is not None:
        pools[UNLABELLED] = data.unlabelled.partition
    columns = {entry.column: f"data.profile.{name}" for name, entry in data.profile.items() if entry.column is not None}

    def partition(tables: Assignment) -> Assignment:
        file, how = data.tables.clients, data.partition
        if how.by == "table":
            where = "data.partition.file" if how.file else "data.tables.clients"
            return share_clips(tables, cast(Path, how.file or file), where, how.minimum, columns)
        tables = partition_clips(tables, how, pools, seed)
        return tables if file is None else match_clients(tables, file, columns)

    def corrupt_clips(tables: Assignment) -> Assignment:
        tables = corrupt(tables, data.corrupt, seed, data.label_sequences)
        return remove_views(add_canaries(tables, data.corrupt.canaries, seed), data.missing, seed)

    steps: dict[str, Step] = {
        "split": lambda tables: split_clips(tables, data.split, seed),
        "pools": lambda tables: assign_pools(tables, data.pools, data.unlabelled, seed),
        "partition": partition,
        "hold_out": lambda tables: hold_out(tables, data.split, seed),
        "profile": lambda tables: add_profiles(tables, data.profile),
        "corrupt": corrupt_clips,
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
    """Assign clips to clients and server.

    Args:
        manifest: the clips.
        classes: names of the classes.
        data: the configuration.
        seed: seed of the run.
        learnt: whether a class without training clips is an error.
        readable: bool [clips], mask of readable clips; ``None``: all clips.
        attack: changes of attackers to recordings and labels.
        last: name of the last step; ``None``: all steps.

    Raises:
        DataError: the settings of a step do not suit the clips.
    """
    listed = functools.reduce(add_batch_column, data.columns, make_assignment(manifest, classes))
    if data.label_sequences is not None:
        units, sequences = split_sequences(classes, data.label_sequences)
        members = contains_units(sequences, len(units))
    elif data.events is not None:
        units, events = split_events(classes)
        members = contains_classes(events, len(units))
    if data.label_sequences is not None or data.events is not None:
        listed = listed.set_clips(**{MAIN_UNIT: encode(find_rarest_units(listed.codes("label"), members), units)})
    if last in ("list", "leave_out"):
        return listed
    tables = usable = listed if readable is None else listed.select(readable)
    if data.tables.clips is not None:
        tables = add_clip_columns(tables, data.tables.clips)
        if "pool" in tables.clips.schema.names:
            check_pool_names(tables.pools, data.views, "data.tables.clips: column 'pool'")
    steps = make_steps(data, seed, attack)
    if "role" in tables.clips.schema.names:
        steps["split"] = steps["hold_out"] = lambda tables: tables  # the user's table has assigned the roles
    for name, step in steps.items():
        tables = step(tables)
        by_class = all(form is None for form in (data.label_sets, data.label_sequences, data.events))
        if name == "partition" and learnt and data.unseen == "stop" and by_class:
            check_classes(tables, listed, usable)
        if name == last:
            break
    return tables


def build_population(
    data: DataSettings,
    seed: int,
    progress: ProgressReporter | None = None,
    run_chunks: RunChunks | None = None,
    attack: Poisoner | None = None,
    classes: Sequence[str] | None = None,
    labels_needed: bool = True,
) -> Population:
    """List the clips, assign them to clients, and compute missing features in the cache.

    Args:
        data: the configuration.
        seed: seed of the run. It determines the split, the partition, the held-out sets and the corruption.
        progress: shows the computation of features.
        run_chunks: executor of the computation, such as a cluster; ``None``: local processes.
        attack: changes of attackers to recordings and labels.
        classes: classes of the federation, if the clips are only a part of it; ``None``: the classes of the clips.
        labels_needed: whether a class without training clips is an error.

    Raises:
        ConfigError: an option of the data set is invalid, or the attack does not support the data.
        DataError: the recordings are invalid, or too few for the split or partition.
        ResourcesError: the disk is too small for the features.
    """
    parts = {}
    for name, settings in data.each.items():
        try:
            parts[name] = _build_part(settings, seed, progress, run_chunks, attack, classes, labels_needed)
        except (ConfigError, DataError) as error:
            raise qualify_error(error, name) from error
    return Population(parts).use(data)


def _build_part(
    data: DataSettings,
    seed: int,
    progress: ProgressReporter | None,
    run_chunks: RunChunks | None,
    attack: Poisoner | None,
    classes: Sequence[str] | None,
    labels_needed: bool,
) -> Part:
    """Build a data set of the federation (:func:`build_population`)."""
    complete = classes is None
    manifest, listed = list_clips(data, seed, progress, complete)
    classes = listed if classes is None else classes
    trials = None if data.trials is None else read_trials(data.trials, manifest.column("clip").to_pylist())
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
        # A table of clients may share clips, but poisoning changes the clips of a single owner.
        attack=attack if data.partition.by != "table" else None,
    )
    tables = assign()  # before the features, so that invalid settings fail early
    if attack is not None:
        with naming_failures(attack, "candidates", kind="attack"):
            attack.candidates(tables.ids, seed)
    prepare_features = functools.partial(
        prepare, data.source, cache=data.cache, progress=progress, run_chunks=run_chunks
    )
    store = prepare_features(manifest, data.first_view.stored_features, unreadable=data.unreadable)
    messages = read_remarks(manifest)
    if data.split.as_published is not None:
        messages.append(
            "data.split.as_published: training clips are also test clips. Scores measure memorisation of clips, not anomaly "
            "detection"
        )
    # Noise, alteration and channels depend on the assignment, and reveal further unreadable clips. Repeat until all are readable.
    clips, failures, features = manifest.column("clip"), dict(store.failures), None
    while features is None:
        if failures:
            if len(failures) == len(clips):
                first = min(failures)
                raise DataError(
                    f"none of {len(clips)} clips is readable. The first is {clips[first]}: {failures[first]}"
                )
            tables = assign(readable=~np.isin(np.arange(len(clips)), list(failures)))
        assembler = Assembler(manifest, tables, data, seed, prepare_features, complete)
        features = assembler.find_features(store, None if attack is None else attack.alteration())
        if assembler.failures:
            failures, features = failures | assembler.failures, None
    skipped = [(clips[index].as_py(), reason) for index, reason in sorted(failures.items())]
    if skipped:
        messages.append(
            f"{len(skipped)} of {len(clips)} clips cannot be read and are left out, the first {skipped[0][0]}"
        )
    part = assembler.build_part(features, skipped, messages)
    if trials is not None:
        part.tables.arrays[TRIALS] = trials
    return part
