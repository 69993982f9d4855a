"""Split: clips get roles, to be trained on or held out. ``hold_out`` draws the clips that each client holds out of its own."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeGuard, cast

import numpy as np
import pyarrow as pa
from pydantic import BeforeValidator, Field, model_validator

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.core.settings import Settings
from raydfl.data.steps.listing import UNLABELLED, Assignment
from raydfl.data.steps.suggestions import enough_of_each_label, suggest_split
from raydfl.data.tables import ROLES, encode


class HoldOutSettings(Settings):
    """The server's test set: clips with certain values in a column, a share of the column's values, or a share of the clips."""

    by: str = Field(
        "split",
        description="A column of the manifest: split (the official one), group (whole speakers), fold, session ...; or clip: "
        "single clips, the same share of every label.",
    )
    values: tuple[str | int | float, ...] | None = Field(
        None, min_length=1, description="Clips with one of these values in the column are held out, [1] of folds."
    )
    fraction: float | None = Field(
        None, gt=0, lt=1, description="Share of the column's values, or of the clips, that is drawn. 0 to 1."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Refuse a hold-out that is not chosen in exactly one way."""
        if self.by != "split" or self.fraction is not None:
            self._check_one_way()

    def _check_one_way(self) -> None:
        if (self.values is None) == (self.fraction is None):
            raise ValueError(f"by: {self.by} needs either values or fraction")
        if self.by == "clip" and self.values is not None:
            raise ValueError("by: clip needs fraction, not values")


class ClientHoldOutSettings(HoldOutSettings):
    """A hold-out of each client, of its own clips; or of the server, of all clips that are left."""

    by: str = Field(
        "clip", description="clip: single clips; or a column of the manifest: split, condition, session, recording ..."
    )
    stratify: bool = Field(False, description="clip: the same share of every label that there is, each rounded.")
    others: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="With values: share of each client's other clips that is held out besides, 0 to 1. null: none is.",
    )

    def _check(self) -> None:
        self._check_one_way()
        if self.others is not None and self.values is None:
            raise ValueError("others, a share of the clips with other values, goes with values")
        if self.by != "clip" and self.stratify:
            raise ValueError(f"stratify goes with by: clip, not with by: {self.by}")


class PublishedSettings(Settings):
    """The leaking protocol of published work on machines: clips that are trained on are tested on too."""

    column: str = Field("condition", description="Column of the manifest that says which clips are normal.")
    normal: tuple[str | int | float, ...] = Field(("normal",), min_length=1, description="Its values that mean normal.")
    anomalies: float = Field(
        0.2,
        ge=0,
        description="Anomalous clips of a group that are trained on, as a share of its normal ones, rounded; at most all.",
    )


class SplitSettings(Settings):
    """The split: what is held out, and where."""

    test: HoldOutSettings | None = Field(
        HoldOutSettings(), description="The server's test set. null: none, the clients train on everything."
    )
    official_validation: Literal["train", "validation", "drop"] = Field(
        "train",
        description="Clips of the official validation split: train (clients train on them), validation (the server measures on "
        "them, to choose a round or a setting), drop.",
    )
    client_test: ClientHoldOutSettings | None = Field(
        None, description="What every client holds out for a test set of its own. null: none has one."
    )
    server_validation: ClientHoldOutSettings | None = Field(
        None, description="What the server holds out besides, of the clips that are left. null: nothing."
    )
    validation: Annotated[float, Field(ge=0, lt=1)] | ClientHoldOutSettings = Field(
        0.0,
        description="Share of every client's clips that it holds out for its own validation, rounded, 0 to 1; one clip at "
        "least stays in training. Or a group like client_test.",
    )
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


def split_clips(tables: Assignment, settings: SplitSettings, seed: int) -> Assignment:
    """Add the column ``role``: trained on, or held out by the server or by a client because of a column's value.

    Raises:
        DataError: an unknown column, a value that no clip has, clips without a value, or nothing left to train or test on.
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
            f"no clips are left to train on: {test.sum()} of {len(role)} are the test set and "
            f"{validation.sum()} the official validation set; {suggest_split(tables)}"
        )
    if settings.as_published is not None:  # clients test on all their clips: these have two rows
        rows = np.flatnonzero(role == 0)
        role[rows[~as_published(tables.select(rows), settings.as_published, seed)]] = -1
        tables = tables.select(np.concatenate([np.arange(len(role)), rows]))
        role = np.concatenate([role, np.full(len(rows), ROLES.index("client_test"), np.int8)])
    for name, how in _hold_outs(settings).items():
        if _is_by_value(how):
            rows = np.flatnonzero(role == 0)
            role[rows[with_values(tables.select(rows), how, seed, f"data.split.{name}")]] = ROLES.index(name)
    return tables.set_clips(role=encode(role, ROLES)).select(role >= 0)


def hold_out(tables: Assignment, settings: SplitSettings, seed: int) -> Assignment:
    """Draw the clips that each client holds out, of every pool whose clips have labels."""
    draws = {name: how for name, how in _hold_outs(settings).items() if how and (not _is_by_value(how) or how.others)}
    if not draws:
        return tables
    role, pool, label, client = (tables.codes(name).copy() for name in ("role", "pool", "label", "client"))
    ids = tables.ids
    bounds = np.searchsorted(client[client >= 0], np.arange(len(ids) + 1))
    labelled = [number for number, name in enumerate(tables.pools) if name != UNLABELLED]  # the others measure nothing
    for client_id, first, stop in zip(ids, bounds[:-1], bounds[1:], strict=True):
        for name, how in draws.items():
            rng = generator(seed, 0, client_id, f"local {PURPOSES[name]}")
            for number in labelled:
                mine = first + np.flatnonzero((role[first:stop] == 0) & (pool[first:stop] == number))
                role[mine[_draw(how, label[mine], rng)]] = ROLES.index(name)
    pool = np.where(role == 0, pool, -1).astype(np.int8)
    return tables.set_clips(role=encode(role, ROLES), pool=encode(pool, tables.pools))


PURPOSES = {"client_test": "test", "validation": "validation"}
"""What clients hold out, by role, in the order in which it is taken, with the names of the draws."""
_HoldOut = float | ClientHoldOutSettings | None


def _hold_outs(settings: SplitSettings) -> dict[str, _HoldOut]:
    return {"client_test": settings.client_test, "validation": settings.validation}


def _is_by_value(how: _HoldOut) -> TypeGuard[ClientHoldOutSettings]:
    return isinstance(how, ClientHoldOutSettings) and how.by != "clip"


def _draw(how: _HoldOut, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw which of a client's clips it holds out: bool [clips]."""
    if not isinstance(how, ClientHoldOutSettings):
        return draw_share(len(labels), how or 0.0, rng)
    if how.stratify:
        return draw_share_of_each(labels, how.fraction or 0.0, rng)
    return draw_share(len(labels), (how.others if _is_by_value(how) else how.fraction) or 0.0, rng)


def _choose_validation(tables: Assignment, rows: np.ndarray, settings: ClientHoldOutSettings, seed: int) -> np.ndarray:
    """Return those of the clips ``rows`` that the server holds out for its validation."""
    where = "data.split.server_validation"
    rng, fraction = generator(seed, 0, "", where), settings.fraction or 0.0
    if settings.by != "clip":
        chosen = with_values(tables.select(rows), settings, seed, where)
    else:
        labels = tables.texts("label", where)
        rows = rows[labels[rows] != None]  # noqa: E711 - nothing could be measured on clips without a label
        if settings.stratify:
            chosen = draw_share_of_each(np.unique(labels[rows].astype(str), return_inverse=True)[1], fraction, rng)
        else:
            chosen = draw_share(len(rows), fraction, rng)
    found: np.ndarray = rows[chosen]
    return found


def draw_share(count: int, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Draw which of a client's ``count`` clips are its validation: bool [count], round(fraction * count) of them, never all."""
    chosen = np.zeros(count, bool)
    number = min(count - 1, _rounded(fraction * count))
    chosen[rng.permutation(count)[:number]] = True
    return chosen


def draw_share_of_each(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
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


def with_values(tables: Assignment, settings: ClientHoldOutSettings, seed: int, where: str) -> np.ndarray:
    """Return which clips are held out because of their value in a column: bool [clips].

    Args:
        tables: with the clips to choose from.
        where: the place of the settings, for messages.

    Raises:
        DataError: there is no such column or value, or no other clip is left.
    """
    values = tables.texts(settings.by, where)
    present = sorted({value for value in values if value is not None})
    if settings.fraction is None:
        wanted = _check_values(settings, present, f"{where}: no clip that is left", "")
    else:
        number = max(1, _rounded(settings.fraction * len(present)))
        order = generator(seed, 0, "", where).permutation(len(present))
        wanted = [present[index] for index in order[:number]]
    chosen = np.array([value in wanted for value in values], bool)
    if chosen.all():
        raise DataError(f"{where}: by: {settings.by} holds out all {len(values)} clips and leaves none to train on")
    return chosen


def _check_values(settings: HoldOutSettings, present: list[str], what: str, remedy: str) -> list[str]:
    """Return the values to be held out, each of which some clip must have."""
    wanted = ["test"] if settings.values is None else [*map(str, settings.values)]
    for value in wanted:
        if value not in present:
            hint = nearest(value, present) if present else "the column is empty"
            raise DataError(f"{what} has {value!r} in column {settings.by!r} ({hint}){remedy}")
    return wanted


def as_published(tables: Assignment, settings: PublishedSettings, seed: int) -> np.ndarray:
    """Draw what is trained on by the leaking protocol: bool [clips], all normal clips and some anomalous ones of each group.

    Raises:
        DataError: there is no such column, or no clip is normal, or none is anomalous.
    """
    where = "data.split.as_published"
    values, groups = (tables.texts(name, where).astype(str) for name in (settings.column, "group"))
    chosen: np.ndarray = np.isin(values, [str(value) for value in settings.normal])
    if chosen.all() or not chosen.any():
        raise DataError(
            f"{where}: {'all' if chosen.all() else 'none'} of {len(values)} clips are normal, that is "
            f"{', '.join(map(str, settings.normal))} in column {settings.column!r}, and both kinds are needed; the values there "
            f"are {', '.join(sorted(set(values.tolist())))}"
        )
    for group in sorted(set(groups.tolist())):
        normal, strange = (np.flatnonzero((groups == group) & which) for which in (chosen, ~chosen))
        number = min(len(strange), _rounded(settings.anomalies * len(normal)))
        rng = generator(seed, 0, group, where)
        chosen[rng.permutation(strange)[:number]] = True
    return chosen


def _rounded(value: float) -> int:
    return int(np.floor(value + 0.5))  # halves up, unlike round()


def _choose_test(tables: Assignment, settings: HoldOutSettings, seed: int) -> np.ndarray:
    """Return which clips are the server's test set: bool [clips]."""
    rng, where = generator(seed, 0, "", "split test"), "data.split.test"
    if settings.by == "clip":
        return _share_of_each_label(tables.texts("label", where), cast(float, settings.fraction), rng)
    values = tables.texts(settings.by, where)
    present = sorted({value for value in values if value is not None})
    if settings.fraction is None:
        wanted = _check_values(settings, present, "no clip", f"; {suggest_split(tables)}")
    else:
        missing = tables.clips.column("clip").filter(pa.array(values == None)).to_pylist()  # noqa: E711
        if missing:
            raise DataError(
                f"{len(missing)} clips have no {settings.by!r} by which to hold them out: {', '.join(missing[:5])}"
                f"{' ...' if len(missing) > 5 else ''}; fill the column, or {suggest_split(tables)}"
            )
        number = max(1, _rounded(settings.fraction * len(present)))
        if number >= len(present):
            raise DataError(
                f"{where}.fraction {settings.fraction} of {len(present)} values of column {settings.by!r} leaves none to "
                f"train on; {suggest_split(tables)}"
            )
        wanted = [present[index] for index in rng.permutation(len(present))[:number]]
    return np.array([value in wanted for value in values], bool)


def _share_of_each_label(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    chosen = np.zeros(len(labels), bool)
    for label in sorted({label for label in labels if label is not None}):
        members = np.flatnonzero(labels == label)
        number = min(len(members) - 1, _rounded(fraction * len(members)))
        chosen[rng.permutation(members)[:number]] = True
    if not chosen.any():
        enough = enough_of_each_label(labels)
        remedy = (
            "no label has more than one clip; hold out whole values of a column, or nothing with data.split.test=null"
            if enough is None
            else f"of each label its share is taken, rounded: set data.split.test.fraction={enough:g} or more"
        )
        raise DataError(
            f"data.split.test.fraction {fraction} of {len(labels)} clips of {len(set(labels))} labels is no clip: {remedy}"
        )
    return chosen
