"""Split: assign roles to clips (training, test, validation). ``hold_out`` draws each client's held-out clips."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeGuard, cast

import numpy as np
import pyarrow as pa
from pydantic import BeforeValidator, Field, model_validator

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.core.settings import Settings
from raydfl.data.steps.listing import UNLABELLED, Assignment
from raydfl.data.steps.suggestions import find_least_fraction, suggest_split
from raydfl.data.tables import ROLES, encode


class HoldOutSettings(Settings):
    """The server's test set: clips with certain values in a column, a fraction of these values, or a fraction of the clips."""

    by: str = Field(
        "split",
        description="Column of the manifest: split (the official split), group (whole speakers), fold, session ...; or clip: "
        "single clips, the same fraction of every label.",
    )
    values: tuple[str | int | float, ...] | None = Field(
        None,
        min_length=1,
        description="Hold out the clips with any of these values in the column, such as [1] of folds.",
    )
    fraction: float | None = Field(
        None, gt=0, lt=1, description="Fraction of the column's values, or of the clips, to draw."
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Require either values or a fraction."""
        if self.by != "split" or self.fraction is not None:
            self._check_one_way()

    def _check_one_way(self) -> None:
        if (self.values is None) == (self.fraction is None):
            raise ValueError(f"by: {self.by} needs either values or fraction")  # two ways could contradict each other
        if self.by == "clip" and self.values is not None:
            raise ValueError("by: clip needs fraction, not values")


class ClientHoldOutSettings(HoldOutSettings):
    """A held-out set drawn from each client's own clips, or the server's, drawn from all remaining clips."""

    by: str = Field(
        "clip", description="clip: single clips; or a column of the manifest: split, condition, session, recording ..."
    )
    stratify: bool = Field(False, description="clip: hold out the same fraction of every label, each count rounded.")
    others: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="With values: also hold out this fraction of each client's remaining clips. null: none.",
    )

    def _check(self) -> None:
        self._check_one_way()
        if self.others is not None and self.values is None:
            raise ValueError(
                "others is a fraction of the clips without the chosen values. Set values, or remove others"
            )
        if self.by != "clip" and self.stratify:
            raise ValueError(f"stratify has no effect with by: {self.by}. Set by: clip, or remove stratify")


class PublishedSettings(Settings):
    """The leaking protocol of published work on machine sounds: the test set includes training clips."""

    column: str = Field("condition", description="Column of the manifest with the condition of each clip.")
    normal: tuple[str | int | float, ...] = Field(
        ("normal",), min_length=1, description="Values of the column for normal clips."
    )
    anomalies: float = Field(
        0.2,
        ge=0,
        description="Number of anomalous training clips of a group, as a fraction of its normal clips, rounded. 0: none.",
    )


class SplitSettings(Settings):
    """The split: sets held out by the server and by the clients."""

    test: HoldOutSettings | None = Field(
        HoldOutSettings(), description="The server's test set. null: none, so that clients train on all clips."
    )
    official_validation: Literal["train", "validation", "drop"] = Field(
        "train",
        description="Clips of the official validation split. train: clients train on them. validation: the server measures on "
        "them, to choose a round or a setting. drop: leave them out.",
    )
    client_test: ClientHoldOutSettings | None = Field(
        None, description="Local test set of every client. null: no local test sets."
    )
    server_validation: ClientHoldOutSettings | None = Field(
        None, description="The server's validation set, held out of the clips outside the test set. null: none."
    )
    validation: Annotated[float, Field(ge=0, lt=1)] | ClientHoldOutSettings = Field(
        0.0,
        description="Fraction of each client's clips for its local validation, rounded. One clip always stays in training. "
        "Or a group of settings like client_test.",
    )
    as_published: Annotated[
        PublishedSettings | None,
        BeforeValidator(lambda value: {True: {}, False: None}.get(value, value) if isinstance(value, bool) else value),
        Field(
            description="Train on all normal and some anomalous clips, and test each client on all its clips, as in published "
            "work on machine sounds. Shows the effect of the leak. true, or a group of settings. null: off."
        ),
    ] = None

    @model_validator(mode="after")
    def _check_consistency(self) -> SplitSettings:
        if self.server_validation is not None and self.server_validation.others is not None:
            raise ValueError(
                "server_validation.others: only clients can hold out a fraction of each client's clips. Remove it"
            )
        if self.as_published is not None and (self.test is not None or self.client_test is not None):
            raise ValueError("as_published has each client test on all its clips. Set test and client_test to null")
        return self

    @property
    def tested_by_clients(self) -> bool:
        """True if clients have local test sets."""
        return self.client_test is not None or self.as_published is not None


def split_clips(tables: Assignment, settings: SplitSettings, seed: int) -> Assignment:
    """Add the column ``role``: the server's held-out sets, and the clients' sets chosen by the value of a column.

    All remaining clips are for training; ``hold_out`` later draws the clients' random held-out sets from them.

    Raises:
        DataError: an unknown column, a value without clips, clips without a value, or no clips left to train or test on.
    """
    official = tables.texts("split", "data.split")
    test = np.zeros(len(official), bool) if settings.test is None else _choose_test(tables, settings.test, seed)
    validation = (official == "validation") & ~test
    role = np.where(test, ROLES.index("test"), ROLES.index("train")).astype(np.int8)
    if settings.official_validation != "train":
        role[validation] = ROLES.index("server_validation") if settings.official_validation == "validation" else -1
    if settings.server_validation is not None:
        chosen = _choose_validation(tables, np.flatnonzero(role == 0), settings.server_validation, seed)
        role[chosen] = ROLES.index("server_validation")
    if not (role == 0).any():
        raise DataError(
            f"data.split: no clips are left to train on: {test.sum()} of {len(role)} are the test set and "
            f"{validation.sum()} the official validation set; {suggest_split(tables)}"
        )
    if settings.as_published is not None:  # clients test on all their clips, so a training clip gets a second row
        rows = np.flatnonzero(role == 0)
        role[rows[~draw_published(tables.select(rows), settings.as_published, seed)]] = -1
        tables = tables.select(np.concatenate([np.arange(len(role)), rows]))
        role = np.concatenate([role, np.full(len(rows), ROLES.index("client_test"), np.int8)])
    for name, held_out in _get_hold_outs(settings).items():
        if _is_by_value(held_out):
            rows = np.flatnonzero(role == 0)
            role[rows[select_values(tables.select(rows), held_out, seed, f"data.split.{name}")]] = ROLES.index(name)
    return tables.set_clips(role=encode(role, ROLES)).select(role >= 0)


def hold_out(tables: Assignment, settings: SplitSettings, seed: int) -> Assignment:
    """Draw each client's held-out clips from its labelled pools."""
    draws = {
        name: held_out
        for name, held_out in _get_hold_outs(settings).items()
        if held_out and (not _is_by_value(held_out) or held_out.others)
    }
    if not draws:
        return tables
    role, pool, label, client = (tables.codes(name).copy() for name in ("role", "pool", tables.strata, "client"))
    ids = tables.ids
    bounds = np.searchsorted(client[client >= 0], np.arange(len(ids) + 1))
    # No metric can be computed on unlabelled clips.
    labelled = [number for number, name in enumerate(tables.pools) if name != UNLABELLED]
    for client_id, first, stop in zip(ids, bounds[:-1], bounds[1:], strict=True):
        for name, held_out in draws.items():
            # A generator of its own makes a client's draw independent of the number and order of clients.
            rng = generator(seed, 0, client_id, f"local {PURPOSES[name]}")
            for number in labelled:
                rows = first + np.flatnonzero((role[first:stop] == 0) & (pool[first:stop] == number))
                role[rows[_draw(held_out, label[rows], rng)]] = ROLES.index(name)
    pool = np.where(role == 0, pool, -1).astype(np.int8)
    return tables.set_clips(role=encode(role, ROLES), pool=encode(pool, tables.pools))


PURPOSES = {"client_test": "test", "validation": "validation"}
"""Roles of the clients' held-out sets in drawing order, with the names that seed their draws."""
_HoldOut = float | ClientHoldOutSettings | None


def _get_hold_outs(settings: SplitSettings) -> dict[str, _HoldOut]:
    return {"client_test": settings.client_test, "validation": settings.validation}


def _is_by_value(settings: _HoldOut) -> TypeGuard[ClientHoldOutSettings]:
    return isinstance(settings, ClientHoldOutSettings) and settings.by != "clip"


def _draw(settings: _HoldOut, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a client's held-out clips: bool [clips]."""
    if not isinstance(settings, ClientHoldOutSettings):
        return draw_share(len(labels), settings or 0.0, rng)
    if settings.stratify:
        return draw_stratified(labels, settings.fraction or 0.0, rng)
    return draw_share(len(labels), (settings.others if _is_by_value(settings) else settings.fraction) or 0.0, rng)


def _choose_validation(tables: Assignment, rows: np.ndarray, settings: ClientHoldOutSettings, seed: int) -> np.ndarray:
    """Return the rows of the server's validation clips, chosen among ``rows``."""
    where = "data.split.server_validation"
    rng, fraction = generator(seed, 0, "", where), settings.fraction or 0.0
    if settings.by != "clip":
        chosen = select_values(tables.select(rows), settings, seed, where)
    else:
        labels = tables.texts("label", where)
        rows = rows[labels[rows] != None]  # noqa: E711 - no metric can be computed on unlabelled clips
        if settings.stratify:
            strata = tables.texts(tables.strata, where)[rows].astype(str)
            chosen = draw_stratified(np.unique(strata, return_inverse=True)[1], fraction, rng)
        else:
            chosen = draw_share(len(rows), fraction, rng)
    result: np.ndarray = rows[chosen]
    return result


def draw_share(count: int, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Draw round(fraction * count) of ``count`` clips, but never all: bool [count]."""
    chosen = np.zeros(count, bool)
    number = min(count - 1, _round_half_up(fraction * count))
    chosen[rng.permutation(count)[:number]] = True
    return chosen


def draw_stratified(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the same fraction of the clips of every label, but never all clips: bool [clips].

    Args:
        labels: int [clips].
        fraction: 0 to 1. Each label's number of clips is rounded, halves up.
        rng: random generator.
    """
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        chosen[rng.permutation(members)[: _round_half_up(fraction * len(members))]] = True
    if len(labels) and chosen.all():
        chosen[0] = False  # a client needs a clip to train on
    return chosen


def select_values(tables: Assignment, settings: ClientHoldOutSettings, seed: int, where: str) -> np.ndarray:
    """Select the clips to hold out by their value in a column: bool [clips].

    Args:
        tables: the clips to choose from.
        where: the place of the settings, for messages.

    Raises:
        DataError: the column or a value does not occur, or no clip is left to train on.
    """
    values = tables.texts(settings.by, where)
    present = sorted({value for value in values if value is not None})
    if settings.fraction is None:
        held_out = _check_values(settings, present, f"{where}: no remaining clip", "")
    else:
        number = max(1, _round_half_up(settings.fraction * len(present)))
        order = generator(seed, 0, "", where).permutation(len(present))
        held_out = [present[index] for index in order[:number]]
    chosen = np.array([value in held_out for value in values], bool)
    if chosen.all():
        raise DataError(
            f"{where}: by: {settings.by} holds out all {len(values)} clips and leaves none to train on. Choose fewer values"
        )
    return chosen


def _check_values(settings: HoldOutSettings, present: list[str], what: str, remedy: str) -> list[str]:
    """Return the configured values to hold out, after checking that each occurs.

    Args:
        what: the subject of the message, such as "no clip".
        remedy: the end of the message.
    """
    held_out = ["test"] if settings.values is None else [*map(str, settings.values)]
    for value in held_out:
        if value not in present:
            hint = nearest(value, present) if present else "The column is empty."
            raise DataError(f"{what} has {value!r} in column {settings.by!r}. {hint}{remedy}")
    return held_out


def draw_published(tables: Assignment, settings: PublishedSettings, seed: int) -> np.ndarray:
    """Draw the training clips of the leaking protocol: all normal and some anomalous clips of each group.

    Returns:
        bool [clips].

    Raises:
        DataError: the column is missing, or all clips or no clips are normal.
    """
    where = "data.split.as_published"
    values, groups = (tables.texts(name, where).astype(str) for name in (settings.column, "group"))
    chosen: np.ndarray = np.isin(values, [str(value) for value in settings.normal])
    if chosen.all() or not chosen.any():
        raise DataError(
            f"{where}: {'all' if chosen.all() else 'none'} of {len(values)} clips are normal "
            f"({', '.join(map(str, settings.normal))} in column {settings.column!r}), but normal and anomalous clips are needed. "
            f"The column's values are {', '.join(sorted(set(values.tolist())))}"
        )
    for group in sorted(set(groups.tolist())):
        normal, anomalous = (np.flatnonzero((groups == group) & mask) for mask in (chosen, ~chosen))
        number = min(len(anomalous), _round_half_up(settings.anomalies * len(normal)))
        rng = generator(seed, 0, group, where)
        chosen[rng.permutation(anomalous)[:number]] = True
    return chosen


def _round_half_up(value: float) -> int:
    return int(np.floor(value + 0.5))  # round() would round halves to the even neighbour


def _choose_test(tables: Assignment, settings: HoldOutSettings, seed: int) -> np.ndarray:
    """Choose the server's test set: bool [clips]."""
    rng, where = generator(seed, 0, "", "split test"), "data.split.test"
    if settings.by == "clip":
        return _draw_test_clips(tables.texts(tables.strata, where), cast(float, settings.fraction), rng)
    values = tables.texts(settings.by, where)
    present = sorted({value for value in values if value is not None})
    if settings.fraction is None:
        held_out = _check_values(settings, present, f"{where}: no clip", f" Or {suggest_split(tables)}")
    else:
        missing = tables.clips.column("clip").filter(pa.array(values == None)).to_pylist()  # noqa: E711
        if missing:
            raise DataError(
                f"{where}: {len(missing)} clips have no value in column {settings.by!r}: {', '.join(missing[:5])}"
                f"{' ...' if len(missing) > 5 else ''}; fill the column, or {suggest_split(tables)}"
            )
        number = max(1, _round_half_up(settings.fraction * len(present)))
        if number >= len(present):
            raise DataError(
                f"{where}.fraction {settings.fraction} of {len(present)} values of column {settings.by!r} leaves none to "
                f"train on; {suggest_split(tables)}"
            )
        held_out = [present[index] for index in rng.permutation(len(present))[:number]]
    return np.array([value in held_out for value in values], bool)


def _draw_test_clips(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    chosen = np.zeros(len(labels), bool)
    for label in sorted({label for label in labels if label is not None}):
        members = np.flatnonzero(labels == label)
        number = min(len(members) - 1, _round_half_up(fraction * len(members)))  # every label keeps a training clip
        chosen[rng.permutation(members)[:number]] = True
    if not chosen.any():
        least = find_least_fraction(labels)
        remedy = (
            "no label has more than one clip. Hold out whole values of a column, or nothing with data.split.test=null"
            if least is None
            else f"the fraction of each label is rounded. Set data.split.test.fraction={least:g} or more"
        )
        raise DataError(
            f"data.split.test.fraction {fraction} of {len(labels)} clips of {len(set(labels))} labels is no clip: {remedy}"
        )
    return chosen
