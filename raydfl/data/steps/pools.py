"""Pools: training clips get a pool, a named set that is dealt to the clients by itself.

Without pools a client has its training clips and nothing else. With them, the first pool is what a method trains on unless it
makes a plan of its own (:class:`raydfl.training.plan.Plan`); a method for it draws from all by name. Two settings make pools:

- ``data.unlabelled`` hides the labels of most clips: pools ``labelled`` and ``unlabelled``. Clips without a label in the manifest
  are in the second, too.
- ``data.pools`` chooses clips by the values of a column: ``{normal: {column: condition, values: [normal]}, ...}``.
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
"""The column with the true label of an example whose label is hidden (else -1): to measure with, never to learn from."""
_MOST_POOLS = 128  # positions of pools are int8


class UnlabelledSettings(Settings):
    """Hidden labels: pools ``labelled`` and ``unlabelled``."""

    keep: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of each label's training clips that keep their label, rounded down. 0 to 1.",
    )
    keep_clips: int | None = Field(
        None, ge=1, description="Training clips of each label that keep it, in place of keep."
    )
    use: float = Field(
        1.0, ge=0, le=1, description="Share of the other clips that are used, without their labels. 0 to 1."
    )
    partition: PartitionSettings | None = Field(
        None, description="How clips without labels are dealt to clients. null: by data.partition, like the others."
    )

    @model_validator(mode="after")
    def _one_way(self) -> UnlabelledSettings:
        if self.keep is not None and self.keep_clips is not None:
            raise ValueError("give either keep (a share) or keep_clips (a number for each label)")
        return self


class PoolSettings(Settings):
    """Training clips with certain values in a column."""

    column: str = Field(description="A column of the manifest: label, condition, domain ...")
    values: tuple[str | int | float, ...] = Field(
        min_length=1, description="Clips with one of these values are in the pool."
    )
    partition: PartitionSettings | None = Field(
        None, description="How the pool is dealt to clients. null: by data.partition."
    )


def check_pool_names(names: Iterable[str], views: Container[str], where: str) -> None:
    """Refuse names of pools that cannot be used.

    Args:
        views: names of ``data.views``.
        where: the setting that names the pools.

    Raises:
        ConfigError: naming the pool.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_\-]+", name):  # it is in names of the population's arrays
            raise ConfigError(f"{where}: the name {name!r} may hold letters, digits, _ and - only")
        if name in views:
            raise ConfigError(f"data.views: {name!r} is the name of a pool already; give the view another name")


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
        DataError: no training clip, too many pools, a column or value that is not there, a pool without clips, a clip in two
            pools, a label of which no clip keeps it, or clips without a label where nothing says what to do with them.
    """
    without, train = tables.codes("label") < 0, tables.has_role("train")
    rows = np.flatnonzero(train)
    if not len(rows):
        raise DataError(
            "no clip has the role train, so clients learn nothing; give clips that role in data.tables.clips, or choose "
            "data.split differently"
        )
    if "pool" in tables.clips.schema.names:
        for name, given in (("pools", bool(pools)), ("unlabelled", unlabelled is not None)):
            if given:
                raise ConfigError(
                    f"data.{name}: the column 'pool' of data.tables.clips names the pool of every training clip. Remove "
                    f"data.{name} or the column"
                )
        found = {name: np.flatnonzero(tables.codes("pool")[rows] == n) for n, name in enumerate(tables.pools)}
        if not any(len(chosen) for name, chosen in found.items() if name != UNLABELLED):
            raise DataError(
                f"data.tables.clips: no training clip is in a pool other than {UNLABELLED!r}; put clips with labels into another"
            )
    elif unlabelled is not None:
        found = _hide_labels(tables.codes("label")[rows], tables.classes, unlabelled, seed)
    elif pools:
        found = _select_by_column(tables.select(rows), pools)
    else:
        found = {TRAIN: np.arange(len(rows))}
    if UNLABELLED not in found and without.any():
        first = tables.clips.column("clip")[int(without.argmax())]
        raise DataError(
            f"{without.sum()} of {len(without)} clips have no label, the first {first}; label "
            f"them, leave them out of the manifest, or train on them as they are with data.unlabelled='{{}}'"
        )
    if len(found) > _MOST_POOLS:
        raise DataError(
            f"data.pools, data.tables.clips: there are {len(found)} pools, at most {_MOST_POOLS} are possible; take fewer"
        )
    pool = np.full(len(train), -1, np.int8)
    for number, chosen in enumerate(found.values()):
        pool[rows[chosen]] = number
    if unlabelled is None and (idle := int((pool[rows] < 0).sum())):
        tables = tables.with_message(f"{idle} training clips are in no pool, so nobody trains on them")
    return tables.set_clips(pool=encode(pool, [*found])).select(np.where(train, pool >= 0, ~without))


def _select_by_column(tables: Assignment, pools: Mapping[str, PoolSettings]) -> dict[str, np.ndarray]:
    """Return the clips of each pool: int64 rows of these clips, ascending, by the pool's name."""
    found: dict[str, np.ndarray] = {}
    for name, settings in pools.items():
        texts = tables.texts(settings.column, f"data.pools.{name}").astype(str)
        there = sorted(set(texts.tolist()))
        for value in settings.values:
            if str(value) not in there:
                raise DataError(
                    f"data.pools.{name}: no training clip has {str(value)!r} in column {settings.column!r}; "
                    f"{nearest(str(value), there)}"
                )
        chosen = np.flatnonzero(np.isin(texts, [str(value) for value in settings.values]))
        for other, taken in found.items():
            both = np.intersect1d(chosen, taken)
            if len(both):
                clip = tables.clips.column("clip")[int(both[0])]
                raise DataError(
                    f"data.pools: {len(both)} clips are both in {other!r} and in {name!r}, the first {clip}"
                )
        found[name] = chosen
    return found


def _hide_labels(
    labels: np.ndarray, classes: Sequence[str], settings: UnlabelledSettings, seed: int
) -> dict[str, np.ndarray]:
    """Draw the clips that keep their labels, and those that are used without: int64 rows of the training clips, ascending."""
    rng = generator(seed, 0, "", "unlabelled")
    kept = np.zeros(len(labels), bool)
    for number, name in enumerate(classes):
        members = np.flatnonzero(labels == number)
        count = len(members)
        if settings.keep is not None:
            count = int(settings.keep * count + 1e-9)
        elif settings.keep_clips is not None:
            count = min(settings.keep_clips, count)
        if len(members) and not count:
            raise DataError(
                f"data.unlabelled: keep {settings.keep} of {len(members)} training clips of label {name!r} is none; keep at least "
                f"{1 / len(members):.2g}, or keep_clips=1 of each label"
            )
        kept[rng.permutation(members)[:count]] = True
    if not kept.any():
        raise DataError("data.unlabelled: no training clip has a label, so nothing says what the classes are")
    others = rng.permutation(np.flatnonzero(~kept))
    used = np.sort(others[: int(settings.use * len(others) + 1e-9)])
    if settings.use and not len(used) and settings.keep != 1:  # a share of 1 was asked for
        raise DataError(
            f"data.unlabelled: the pool unlabelled is empty at every client: {len(others)} of {len(labels)} training clips are "
            f"without a label, and data.unlabelled.use={settings.use:g} of them is none; hide labels with keep or keep_clips"
        )
    return {LABELLED: np.flatnonzero(kept), UNLABELLED: used}
