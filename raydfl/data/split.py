"""The split of clips: held out for the server's test, for its validation, or trained on by clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BeforeValidator, Field, model_validator

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.core.settings import Settings
from raydfl.data.partition import without_groups

_NO_CHOICE = ("clip", "path", "label", "split", "seconds")
"""Columns by which nobody would hold out."""
_USUAL = 0.2
"""Share of the values or clips that is held out in a message's examples."""
_WAYS = 3
"""Such examples that it gives."""


class HoldOutSettings(Settings):
    """The server's test set: clips with certain values in a column, a share of the column's values, or a share of the clips."""

    by: Annotated[
        str,
        Field(
            description="A column of the manifest: split (the official one), group (whole speakers), fold, session ...; or clip: "
            "single clips, the same share of every label."
        ),
    ] = "split"
    values: Annotated[
        tuple[str | int | float, ...] | None,
        Field(min_length=1, description="Clips with one of these values in the column are the test set, [1] of folds."),
    ] = None
    fraction: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="Share of the column's values (or of the clips) that is drawn for the test set, 0 to 1.",
        ),
    ] = None

    @model_validator(mode="after")
    def _one_way(self) -> HoldOutSettings:
        if self.by != "split" or self.fraction is not None:
            _check_one_way(self)
        return self


class ClientHoldOutSettings(Settings):
    """A hold-out of each client, of its own clips; or of the server, of all clips that are left."""

    by: Annotated[
        str,
        Field(description="clip: single clips; or a column of the manifest: split, condition, session, recording ..."),
    ] = "clip"
    values: Annotated[
        tuple[str | int | float, ...] | None,
        Field(min_length=1, description="Clips with one of these values in the column are held out."),
    ] = None
    fraction: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="Share of the clips (each client's), or of the column's values, that is drawn, 0 to 1.",
        ),
    ] = None
    stratify: Annotated[bool, Field(description="clip: the same share of every label that there is, each rounded.")] = (
        False
    )
    others: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="With values: share of each client's other clips that is held out besides, 0 to 1. null: none is.",
        ),
    ] = None

    @model_validator(mode="after")
    def _one_way(self) -> ClientHoldOutSettings:
        _check_one_way(self)
        if self.others is not None and self.values is None:
            raise ValueError("others, a share of the clips with other values, goes with values")
        if self.by != "clip" and self.stratify:
            raise ValueError(f"stratify goes with by: clip, not with by: {self.by}")
        return self


def _check_one_way(settings: HoldOutSettings | ClientHoldOutSettings) -> None:
    """Refuse a hold-out that is not chosen in exactly one way."""
    if (settings.values is None) == (settings.fraction is None):
        raise ValueError(f"by: {settings.by} needs either values or fraction")
    if settings.by == "clip" and settings.values is not None:
        raise ValueError("by: clip needs fraction, not values")


class PublishedSettings(Settings):
    """The leaking protocol of published work on machines: clips that are trained on are tested on too."""

    column: Annotated[str, Field(description="Column of the manifest that says which clips are normal.")] = "condition"
    normal: Annotated[
        tuple[str | int | float, ...], Field(min_length=1, description="Its values that mean normal.")
    ] = ("normal",)
    anomalies: Annotated[
        float,
        Field(
            ge=0,
            description="Anomalous clips of a group that are trained on, as a share of its normal ones, rounded; at most all.",
        ),
    ] = 0.2


class SplitSettings(Settings):
    """The split: what is held out, and where."""

    test: Annotated[
        HoldOutSettings | None, Field(description="The server's test set. null: none, the clients train on everything.")
    ] = HoldOutSettings()
    official_validation: Annotated[
        Literal["train", "validation", "drop"],
        Field(
            description="Clips of the official validation split: train (clients train on them), validation (the server measures on "
            "them, to choose a round or a setting), drop."
        ),
    ] = "train"
    client_test: Annotated[
        ClientHoldOutSettings | None,
        Field(description="What every client holds out for a test set of its own. null: none has one."),
    ] = None
    server_validation: Annotated[
        ClientHoldOutSettings | None,
        Field(description="What the server holds out besides, of the clips that are left. null: nothing."),
    ] = None
    validation: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | ClientHoldOutSettings,
        Field(
            description="Share of every client's clips that it holds out for its own validation, rounded, 0 to 1; one clip at "
            "least stays in training. Or a group like client_test.",
        ),
    ] = 0.0
    as_published: Annotated[
        PublishedSettings | None,
        BeforeValidator(lambda value: {True: {}, False: None}.get(value, value) if isinstance(value, bool) else value),
        Field(
            description="Train on all normal clips and some anomalous ones, and have each client test on all its clips, as "
            "published work on machines did: so one sees what leaks there. true, or a group. null: no."
        ),
    ] = None

    @model_validator(mode="after")
    def _consistent(self) -> SplitSettings:
        if self.server_validation is not None and self.server_validation.others is not None:
            raise ValueError("server_validation.others: a share of each client's clips goes with what clients hold out")
        if self.as_published is not None and (self.test is not None or self.client_test is not None):
            raise ValueError(
                "as_published has each client test on all its clips: set test to null, and client_test too"
            )
        return self

    @property
    def tested_by_clients(self) -> bool:
        """True where clients have test sets of their own."""
        return self.client_test is not None or self.as_published is not None


@dataclass(frozen=True)
class Split:
    """Row numbers of a manifest, each ascending int64."""

    train: np.ndarray
    validation: np.ndarray
    """The server's."""
    test: np.ndarray


def split_clips(manifest: pa.Table, settings: SplitSettings, seed: int) -> Split:
    """Divide the clips of a manifest between clients and server.

    Args:
        manifest: columns ``clip``, ``label``, ``split`` (train, validation, test, or null everywhere) and the one that the
            settings name.
        seed: the run's.

    Raises:
        DataError: an unknown column, a value that no clip has, clips without a value, or nothing left to train or test on.
    """
    official = _column(manifest, "split")
    held_out = np.zeros(manifest.num_rows, bool) if settings.test is None else _held_out(manifest, settings.test, seed)
    validation = (official == "validation") & ~held_out
    train = ~held_out
    if settings.official_validation != "train":
        train &= ~validation
    kept = validation.copy() if settings.official_validation == "validation" else np.zeros_like(validation)
    if settings.server_validation is not None:
        chosen = _chosen_for_server(manifest, np.flatnonzero(train), settings.server_validation, seed)
        kept[chosen], train[chosen] = True, False
    split = Split(np.flatnonzero(train), np.flatnonzero(kept), np.flatnonzero(held_out))
    if not len(split.train):
        raise DataError(
            f"no clips are left to train on: {len(split.test)} of {manifest.num_rows} are the test set and "
            f"{int(validation.sum())} the official validation set; {_another_way(manifest)}"
        )
    return split


def _chosen_for_server(manifest: pa.Table, rows: np.ndarray, settings: ClientHoldOutSettings, seed: int) -> np.ndarray:
    """Return those of the clips ``rows`` that the server holds out for its validation."""
    where = "data.split.server_validation"
    rng, fraction = generator(seed, 0, "", where), settings.fraction or 0.0
    if settings.by == "clip":  # nothing could be measured on clips without a label
        rows = rows[[label is not None for label in _column(manifest, "label")[rows]]]
    if settings.by != "clip":
        chosen = with_values(manifest, rows, settings, seed, where)
    elif settings.stratify:
        labels = np.array([str(label) for label in _column(manifest, "label")[rows]])
        chosen = hold_out_of_each(np.unique(labels, return_inverse=True)[1], fraction, rng)
    else:
        chosen = hold_out(len(rows), fraction, rng)
    found: np.ndarray = rows[chosen]
    return found


def hold_out(count: int, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Draw which of a client's ``count`` clips are its validation: bool [count], round(fraction * count) of them, never all."""
    chosen = np.zeros(count, bool)
    number = min(count - 1, _rounded(fraction * count))
    chosen[rng.permutation(count)[:number]] = True
    return chosen


def hold_out_of_each(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Draw which of a client's clips it holds out, the same share of every label: bool [clips].

    Of each label round(fraction * count), halves up; one clip at least is left.

    Args:
        labels: int [clips].
        fraction: the share.
        rng: draws.
    """
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        chosen[rng.permutation(members)[: _rounded(fraction * len(members))]] = True
    if len(labels) and chosen.all():
        chosen[0] = False
    return chosen


def with_values(
    manifest: pa.Table, rows: np.ndarray, settings: ClientHoldOutSettings, seed: int, where: str
) -> np.ndarray:
    """Return which clips are held out because of their value in a column: bool [rows].

    Args:
        manifest: of all clips.
        rows: int64: those to choose from.
        settings: with a column.
        seed: the run's: it draws the values where a share of them is wanted.
        where: the settings' place, for messages.

    Raises:
        DataError: there is no such column or value, or no other clip is left.
    """
    there = manifest.take(pa.array(rows))
    values = np.array([None if value is None else str(value) for value in _column(there, settings.by)], dtype=object)
    present = sorted({value for value in values if value is not None})
    if settings.fraction is None:
        wanted = ("test",) if settings.values is None else tuple(map(str, settings.values))
        for value in wanted:
            if value not in present:
                hint = nearest(value, present) if present else "the column is empty"
                raise DataError(f"{where}: no clip that is left has {value!r} in column {settings.by!r} ({hint})")
    else:
        number = max(1, _rounded(settings.fraction * len(present)))
        order = generator(seed, 0, "", where).permutation(len(present))
        wanted = tuple(present[index] for index in order[:number])
    chosen: np.ndarray = np.isin(values.astype(str), wanted) & np.array([value is not None for value in values], bool)
    if chosen.all():
        raise DataError(f"{where}: by: {settings.by} holds out all {len(rows)} clips and leaves none to train on")
    return chosen


def as_published(manifest: pa.Table, rows: np.ndarray, settings: PublishedSettings, seed: int) -> np.ndarray:
    """Draw what is trained on by the leaking protocol: bool [rows], all normal clips and some anomalous ones of each group.

    Args:
        manifest: of all clips.
        rows: int64: those to choose from.
        settings: which clips are normal, and how many of the others are taken.
        seed: the run's.

    Raises:
        DataError: there is no such column, or no clip is normal, or none is anomalous.
    """
    there = manifest.take(pa.array(rows))
    values = np.array([str(value) for value in _column(there, settings.column)])
    chosen: np.ndarray = np.isin(values, [str(value) for value in settings.normal])
    if chosen.all() or not chosen.any():
        raise DataError(
            f"data.split.as_published: {'all' if chosen.all() else 'none'} of {len(rows)} clips are normal, that is "
            f"{', '.join(map(str, settings.normal))} in column {settings.column!r}, and both kinds are needed; the values there "
            f"are {', '.join(sorted(set(values.tolist())))}"
        )
    groups = np.array([str(group) for group in _column(there, "group")])
    for group in sorted(set(groups.tolist())):
        normal, strange = (np.flatnonzero((groups == group) & which) for which in (chosen, ~chosen))
        number = min(len(strange), _rounded(settings.anomalies * len(normal)))
        rng = generator(seed, 0, group, "data.split.as_published")
        chosen[rng.permutation(strange)[:number]] = True
    return chosen


def _rounded(value: float) -> int:
    return int(np.floor(value + 0.5))  # halves up, unlike round()


def _column(manifest: pa.Table, name: str) -> np.ndarray:
    """Object [clips]: the column's values, ``None`` where there is none."""
    if name not in manifest.column_names:
        raise DataError(f"the manifest has no column {name!r}; {nearest(name, manifest.column_names)}")
    values: np.ndarray = np.array(manifest.column(name).to_pylist(), dtype=object)
    return values


def _held_out(manifest: pa.Table, settings: HoldOutSettings, seed: int) -> np.ndarray:
    """Bool [clips]: the test set."""
    rng = generator(seed, 0, "", "split test")
    if settings.by == "clip":
        return _share_of_each_label(_column(manifest, "label"), cast(float, settings.fraction), rng)
    column = _column(manifest, settings.by)
    named = np.array([None if value is None else str(value) for value in column], dtype=object)
    present = sorted({value for value in named if value is not None})
    if settings.fraction is None:
        wanted = ("test",) if settings.values is None else tuple(map(str, settings.values))
        for value in wanted:
            if value not in present:
                hint = nearest(value, present) if present else "the column is empty"
                raise DataError(f"no clip has {value!r} in column {settings.by!r} ({hint}); {_another_way(manifest)}")
    else:
        missing = manifest.column("clip").filter(pa.array([value is None for value in named])).to_pylist()
        if missing:
            raise DataError(
                f"{len(missing)} clips have no {settings.by!r} by which to hold them out: {', '.join(missing[:5])}"
                f"{' ...' if len(missing) > 5 else ''}; fill the column, or {_another_way(manifest)}"
            )
        number = max(1, _rounded(settings.fraction * len(present)))
        if number >= len(present):
            raise DataError(
                f"data.split.test.fraction {settings.fraction} of {len(present)} values of column {settings.by!r} leaves none to "
                f"train on; {_another_way(manifest)}"
            )
        wanted = tuple(present[index] for index in rng.permutation(len(present))[:number])
    chosen: np.ndarray = np.isin(named.astype(str), wanted) & np.array([value is not None for value in named], bool)
    return chosen


def _share_of_each_label(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    chosen = np.zeros(len(labels), bool)
    for label in sorted({label for label in labels if label is not None}):
        members = np.flatnonzero(labels == label)
        number = min(len(members) - 1, _rounded(fraction * len(members)))
        chosen[rng.permutation(members)[:number]] = True
    if not chosen.any():
        enough = _enough_of_each_label(labels)
        remedy = (
            "no label has more than one clip; hold out whole values of a column, or nothing with data.split.test=null"
            if enough is None
            else f"of each label its share is taken, rounded: set data.split.test.fraction={enough:g} or more"
        )
        raise DataError(
            f"data.split.test.fraction {fraction} of {len(labels)} clips of {len(set(labels))} labels is no clip: {remedy}"
        )
    return chosen


def _enough_of_each_label(labels: np.ndarray) -> float | None:
    """Return a share of which every label with at least two clips gives one; ``None`` when there is no such label."""
    known = labels[[label is not None for label in labels]]
    counts = np.unique(known.astype(str), return_counts=True)[1]
    several = counts[counts > 1]
    return float(np.ceil(1000 * 0.5 / several.min()) / 1000) if len(several) else None


def _leaves_every_label(manifest: pa.Table, column: str) -> bool:
    """Return whether any usual share of a column's values can be held out so that clips of every label are left."""
    values = manifest.column(column)
    if values.null_count:
        return False
    number = max(1, _rounded(_USUAL * len(values.unique())))
    of_labels = manifest.select(["label", column]).group_by("label").aggregate([(column, "count_distinct")])
    return bool(pc.min(of_labels.column(f"{column}_count_distinct")).as_py() > number)


def _another_way(manifest: pa.Table) -> str:
    """Suggest what else data.split.test could be with these clips, and data.partition where nobody owns them."""
    columns = [name for name in manifest.column_names if name not in _NO_CHOICE]
    ways = [f"{{by: {name}, fraction: {_USUAL}}}" for name in columns if _leaves_every_label(manifest, name)]
    enough = _enough_of_each_label(_column(manifest, "label"))
    if enough is not None:
        ways.insert(1, f"{{by: clip, fraction: {max(_USUAL, enough):g}}}")
    said = "choose data.split.test differently"
    if ways:
        said += ", for example " + " or ".join(f"data.split.test='{way}'" for way in ways[:_WAYS])
    if "group" not in columns or manifest.column("group").null_count:
        other = without_groups(manifest.num_rows)
        said += f". The clips have no groups to be clients: choose data.partition too, for example {other}"
    return said
