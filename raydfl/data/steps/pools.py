"""Pools: named sets of training clips, each dealt to the clients separately.

By default all training clips are in a single pool. With several, a method trains on the first pool unless it makes its own plan
(:class:`raydfl.training.plan.Plan`), which draws from pools by name. Two settings make pools:

- ``data.unlabelled`` hides the labels of most clips: pools ``labelled`` and ``unlabelled``. Clips without a label in the manifest
  are in the second pool, too.
- ``data.pools`` selects clips by the values of a column: ``{normal: {column: condition, values: [normal]}, ...}``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np
from pydantic import Field, model_validator

from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.core.seeds import generator
from raydfl.core.settings import Settings
from raydfl.data.steps.dealing import PartitionSettings
from raydfl.data.steps.listing import LABELLED, TRAIN, UNLABELLED, Assignment
from raydfl.data.tables import encode

HIDDEN_LABEL = "hidden_label"
"""Batch column with the true class of an example with a hidden label, else -1. For metrics only, never for training."""
_MOST_POOLS = 128  # positions of pools are int8


class UnlabelledSettings(Settings):
    """Hidden labels: pools ``labelled`` and ``unlabelled``."""

    keep: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Fraction of each label's training clips with a visible label, rounded down. 1 hides none.",
    )
    keep_clips: int | None = Field(
        None, ge=1, description="Number of training clips of each label with a visible label, in place of keep."
    )
    use: float = Field(
        1.0, ge=0, le=1, description="Fraction of the clips with hidden labels to use, without their labels. 0: none."
    )
    partition: PartitionSettings | None = Field(
        None, description="Partition of the unlabelled clips. null: data.partition, as for labelled clips."
    )

    @model_validator(mode="after")
    def _check_one_way(self) -> UnlabelledSettings:
        if self.keep is not None and self.keep_clips is not None:
            raise ValueError("give either keep (a fraction) or keep_clips (a number for each label)")
        return self


class PoolSettings(Settings):
    """Training clips with certain values in a column."""

    column: str = Field(description="A column of the manifest: label, condition, domain ...")
    values: tuple[str | int | float, ...] = Field(
        min_length=1, description="Values of the column for clips in the pool."
    )
    partition: PartitionSettings | None = Field(None, description="Partition of the pool. null: data.partition.")


def check_pool_names(names: Iterable[str], views: Container[str], where: str) -> None:
    """Check that the names of pools are valid and differ from the names of views.

    Args:
        views: names of ``data.views``.
        where: the setting with the names of the pools.

    Raises:
        ConfigError: a name is invalid or taken.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_\-]+", name):  # names of the population's arrays contain it
            raise ConfigError(
                f"{where}: the name {name!r} is invalid. Use only letters, digits, underscores (_) and hyphens (-)"
            )
        if name in views:
            raise ConfigError(f"data.views: a pool has the name {name!r} already. Give the view another name")


def assign_pools(
    tables: Assignment, pools: Mapping[str, PoolSettings], unlabelled: UnlabelledSettings | None, seed: int
) -> Assignment:
    """Add the column ``pool``, and leave out held-out clips without a label and training clips without a pool.

    Args:
        pools: ``data.pools``.
        unlabelled: ``data.unlabelled``.
        seed: the run's.

    Raises:
        ConfigError: both a user's table and the settings make pools.
        DataError: no training clips, too many pools, an unknown column or value, a pool without clips, a clip in two pools, a
            label without a visible clip, or unlabelled clips without a pool ``unlabelled``.
    """
    without_label, train = tables.codes("label") < 0, tables.has_role("train")
    rows = np.flatnonzero(train)
    if not len(rows):
        raise DataError(
            "no clip has the role train, so clients cannot learn. Give clips this role in data.tables.clips, or change data.split"
        )
    if "pool" in tables.clips.schema.names:
        for name, is_set in (("pools", bool(pools)), ("unlabelled", unlabelled is not None)):
            if is_set:
                raise ConfigError(
                    f"data.{name}: the column 'pool' of data.tables.clips names the pool of every training clip. Remove "
                    f"data.{name} or the column"
                )
        members = {name: np.flatnonzero(tables.codes("pool")[rows] == n) for n, name in enumerate(tables.pools)}
        if not any(len(chosen) for name, chosen in members.items() if name != UNLABELLED):
            raise DataError(
                f"data.tables.clips: all training clips are in the pool {UNLABELLED!r}. Move the clips with labels to another pool"
            )
    elif unlabelled is not None:
        members = _hide_labels(tables.codes("label")[rows], tables.classes, unlabelled, seed)
    elif pools:
        members = _select_by_column(tables.select(rows), pools)
    else:
        members = {TRAIN: np.arange(len(rows))}
    if UNLABELLED not in members and without_label.any():
        first = tables.clips.column("clip")[int(without_label.argmax())]
        raise DataError(
            f"{without_label.sum()} of {len(without_label)} clips have no label, the first {first}. Label them, remove them "
            f"from the manifest, or train on them without labels (data.unlabelled='{{}}')"
        )
    if len(members) > _MOST_POOLS:
        raise DataError(
            f"data.pools, data.tables.clips: {len(members)} pools are more than the maximum of {_MOST_POOLS}. Merge some"
        )
    pool = np.full(len(train), -1, np.int8)
    for number, chosen in enumerate(members.values()):
        pool[rows[chosen]] = number
    if unlabelled is None and (idle := int((pool[rows] < 0).sum())):
        tables = tables.add_message(f"{idle} training clips are in no pool, so no client trains on them")
    return tables.set_clips(pool=encode(pool, [*members])).select(np.where(train, pool >= 0, ~without_label))


def _select_by_column(tables: Assignment, pools: Mapping[str, PoolSettings]) -> dict[str, np.ndarray]:
    """Select the clips of each pool: int64 rows, ascending, by the pool's name."""
    members: dict[str, np.ndarray] = {}
    for name, settings in pools.items():
        texts = tables.texts(settings.column, f"data.pools.{name}").astype(str)
        present = sorted(set(texts.tolist()))
        for value in settings.values:
            if str(value) not in present:
                raise DataError(
                    f"data.pools.{name}: no training clip has {str(value)!r} in column {settings.column!r}. "
                    f"{nearest(str(value), present)}"
                )
        chosen = np.flatnonzero(np.isin(texts, [str(value) for value in settings.values]))
        for former, rows in members.items():
            both = np.intersect1d(chosen, rows)
            if len(both):
                clip = tables.clips.column("clip")[int(both[0])]
                raise DataError(
                    f"data.pools: {len(both)} clips are both in {former!r} and in {name!r}, the first {clip}. Change their values"
                )
        members[name] = chosen
    return members


def _hide_labels(
    labels: np.ndarray, classes: Sequence[str], settings: UnlabelledSettings, seed: int
) -> dict[str, np.ndarray]:
    """Draw the pools ``labelled`` and ``unlabelled``: int64 rows of the training clips, ascending."""
    rng = generator(seed, 0, "", "unlabelled")
    visible = np.zeros(len(labels), bool)
    for number, name in enumerate(classes):
        members = np.flatnonzero(labels == number)
        count = len(members)
        if settings.keep is not None:
            count = int(settings.keep * count + 1e-9)  # 0.29 of 100 is 28.999... in floating point
        elif settings.keep_clips is not None:
            count = min(settings.keep_clips, count)
        if len(members) and not count:
            raise DataError(
                f"data.unlabelled: keep {settings.keep} of {len(members)} training clips of label {name!r} is none. Set keep to at "
                f"least {1 / len(members):.2g}, or set keep_clips=1"
            )
        visible[rng.permutation(members)[:count]] = True
    if not visible.any():
        raise DataError("data.unlabelled: no training clip has a label, so the classes are unknown. Label some clips")
    hidden = rng.permutation(np.flatnonzero(~visible))
    used = np.sort(hidden[: int(settings.use * len(hidden) + 1e-9)])
    if settings.use and not len(used) and settings.keep != 1:  # keep=1 asks for an empty pool
        raise DataError(
            f"data.unlabelled: the pool unlabelled is empty at every client: {len(hidden)} of {len(labels)} training clips are "
            f"without a label, and data.unlabelled.use={settings.use:g} of them is none. Hide labels with keep or keep_clips"
        )
    return {LABELLED: np.flatnonzero(visible), UNLABELLED: used}
