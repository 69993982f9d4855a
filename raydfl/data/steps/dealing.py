"""Kinds of partition: how clips are dealt to owners.

- ``group``: the natural one: a speaker, an actor, a device is a client, or several (``shards``).
- ``dirichlet``: each label's clips are dealt in proportions drawn from Dirichlet(alpha) over the clients; with ``column:
  recording`` whole recordings are dealt and not clips. ``balance`` gives nothing more to a client that holds its even share
  already, which is how FedAudio (Zhang et al., ICASSP 2023) and NIID-Bench (Li et al., ICDE 2022) draw it.
- ``quantity``: labels alike, sizes not: Dirichlet(alpha) over the clients, or with ``spread`` sigma FedSTAR's rule: everyone
  starts with int(m - v) clips, m the mean and v = int(sigma m), and the others go one by one to random clients with less than
  int(m + v).
- ``classes``: every client has ``classes`` labels, or with ``variance`` a number drawn about it, FedSTAR's rule; a label's clips
  are dealt evenly to those who have it, and everyone has one at least.
- ``iid``: shuffled and dealt evenly.
- ``table``: a file says it, with a row for each client (raydfl.data.steps.client_file); clients may share clips.

All of them end: a draw that leaves a client below ``minimum`` is repeated a fixed number of times, then it is an error with
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from raydfl.core.errors import DataError
from raydfl.core.settings import Settings
from raydfl.data.client_ids import to_numbers
from raydfl.data.steps.listing import Assignment, natural_order
from raydfl.data.steps.suggestions import suggest_dirichlet

_WORK = 30_000_000
"""Numbers drawn, about, before a random partition counts as impossible: some seconds, for small data many draws."""

_USES = {
    "group": ({"column", "shards", "smaller"}, set()),
    "dirichlet": ({"column", "balance"}, {"clients", "alpha"}),
    "quantity": ({"alpha", "spread"}, {"clients"}),
    "classes": ({"variance"}, {"clients", "classes"}),
    "iid": (set(), {"clients"}),
    "table": ({"file"}, set()),
}
"""By kind of partition: the fields that it may and those that it must be given, besides ``minimum``."""


class PartitionSettings(Settings):
    """The partition: how training clips are dealt to clients."""

    by: Literal["group", "dirichlet", "quantity", "classes", "iid", "table"] = Field(
        "group",
        description="group: a client for each value of a column; dirichlet: skewed labels; quantity: skewed sizes; classes: a "
        "few labels for each client; iid: evenly; table: as a file says.",
    )
    column: str | None = Field(
        None,
        description="group: the column whose values are the clients, null: group. dirichlet: deal the values of this column "
        "(recording) whole; null: deal clips.",
    )
    shards: int = Field(1, ge=1, description="group: clients into which each group's clips are dealt evenly.")
    smaller: Literal["stop", "drop"] = Field(
        "stop", description="group: stop at clients with fewer clips than minimum, or leave them out."
    )
    clients: int | None = Field(
        None, ge=1, description="Number of clients (all but group and table, which count them)."
    )
    alpha: float | None = Field(
        None, gt=0, description="dirichlet, quantity: concentration; small is skewed (0.1), large is even (100)."
    )
    balance: bool = Field(
        True, description="dirichlet: clients that hold their even share get nothing of the labels still to be dealt."
    )
    spread: float | None = Field(
        None, ge=0, le=1, description="quantity: sizes between (1 - spread) and (1 + spread) times the mean. 0 to 1."
    )
    classes: int | None = Field(None, ge=1, description="classes: labels of each client.")
    variance: float = Field(
        0.0, ge=0, description="classes: variance of their number, drawn from a normal distribution and rounded down."
    )
    file: Path | None = Field(
        None,
        description="table: a Parquet, Arrow or CSV file with a row for each client: first, the row of the list of clips at "
        "which its clips begin, clips, how many it has, and if known client, its id.",
    )
    minimum: int = Field(
        1,
        ge=1,
        description="Clips (or values of dirichlet's column) that every client must get, its own validation included.",
    )

    @model_validator(mode="after")
    def _fields_belong(self) -> PartitionSettings:
        may, must = _USES[self.by]
        absent = sorted(name for name in must if getattr(self, name) is None)
        if absent:
            raise ValueError(f"by: {self.by} needs {' and '.join(absent)}")
        for name, field in type(self).model_fields.items():
            if name not in may | must | {"by", "minimum"} and getattr(self, name) != field.default:
                raise ValueError(f"{name} means nothing with by: {self.by}")
        if self.by == "quantity" and (self.alpha is None) == (self.spread is None):
            raise ValueError("by: quantity needs either alpha or spread")
        return self


class Owners(NamedTuple):
    """The owners of some clips."""

    ids: Sequence[str]
    """Ids of the clients in their order."""
    owner: np.ndarray
    """int64 [clips]: position of the owner, -1 for none."""
    groups: Sequence[str] = ()
    """Names of the groups of which clients were made."""
    group: np.ndarray | None = None
    """int [clients]: position of the group; None: clients are not made of groups."""


def deal_clips(tables: Assignment, settings: PartitionSettings, rng: np.random.Generator) -> Owners:
    """Deal clips to clients, by any kind of partition but ``table``."""
    if settings.by == "group":
        return _by_group(tables, settings, rng)
    clients = cast(int, settings.clients)  # the settings have seen to it that each kind has what it needs
    labels = tables.codes("label")
    if settings.by == "dirichlet":
        owner = _dirichlet(tables, labels, settings, clients, rng)
    else:
        _check_total(len(labels), "clips", clients, settings.minimum)
        if settings.by == "quantity":
            owner = _quantity(len(labels), settings, clients, rng)
        elif settings.by == "classes":
            owner = _classes(labels, settings, clients, rng)
        else:
            owner = rng.permutation(np.arange(len(labels)) % clients)
    digits = len(str(clients - 1))
    return Owners([f"client-{number:0{digits}d}" for number in range(clients)], owner)


def _values(tables: Assignment, column: str) -> tuple[list[str], np.ndarray]:
    """Return the values of a column in natural order, and the position of each clip's value: int64 [clips]."""
    encoded = tables.column(column, "data.partition").cast(pa.string()).dictionary_encode()
    if encoded.null_count:
        clips = tables.clips.column("clip").filter(encoded.is_null()).to_pylist()
        hint = "fill the column, remove them"
        if column == "group" and len(clips) < len(encoded):
            hint += ", deal them out with data.ungrouped=deal, leave their labels out with data.leave_out"
        raise DataError(
            f"{len(clips)} of {len(encoded)} training clips have no {column!r}, so no client to go to: {', '.join(clips[:5])}"
            f"{' ...' if len(clips) > 5 else ''}; {hint}, or choose another data.partition, for example "
            f"{suggest_dirichlet(len(encoded))}"
        )
    found = encoded.dictionary.to_pylist()
    names = natural_order(found)
    position = {name: number for number, name in enumerate(names)}
    return names, np.array([position[name] for name in found], np.int64)[to_numbers(encoded)]


def _by_group(tables: Assignment, settings: PartitionSettings, rng: np.random.Generator) -> Owners:
    column, shards = settings.column or "group", settings.shards
    names, group = _values(tables, column)
    # Shuffled, then dealt in turn within each group.
    shuffled = rng.permutation(len(group))
    order = shuffled[np.argsort(group[shuffled], kind="stable")]
    sizes = np.bincount(group, minlength=len(names))
    turn = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    owner = np.empty(len(group), np.int64)
    owner[order] = group[order] * shards + turn % shards
    counts = np.bincount(owner, minlength=len(names) * shards)
    kept = counts >= settings.minimum
    if not kept.all():
        least = int(counts.argmin())
        few = (
            f"{int((~kept).sum())} of {len(counts)} clients (by {column!r}, {shards} shards each) get fewer than "
            f"data.partition.minimum {settings.minimum} training clips; the fewest, {counts[least]}, has "
            f"{_shard_id(names, least, shards)!r}"
        )
        if settings.smaller == "stop":
            raise DataError(
                f"{few}. Lower minimum, take fewer shards, or leave them out with data.partition.smaller=drop"
            )
        if not kept.any():
            raise DataError(f"{few}. With data.partition.smaller=drop no client is left")
    clients = np.flatnonzero(kept)
    ids = [_shard_id(names, int(client), shards) for client in clients]
    return Owners(ids, np.where(kept, np.cumsum(kept) - 1, -1)[owner], names, clients // shards)


def _shard_id(names: Sequence[str], client: int, shards: int) -> str:
    return names[client] if shards == 1 else f"{names[client // shards]}/{client % shards}"


def _check_total(units: int, what: str, clients: int, minimum: int) -> None:
    if units < clients * minimum:
        raise DataError(
            f"data.partition: {units} {what} cannot give {clients} clients {minimum} each ({clients * minimum} needed); "
            f"take at most {units // minimum} clients or a smaller minimum"
        )


def _until_all_have(
    minimum: int, clients: int, draw: Callable[[], np.ndarray], work: int, what: str, hint: str
) -> np.ndarray:
    """Draw owners until everyone has ``minimum``; ``work`` is the size of a draw."""
    draws = int(np.clip(_WORK // work, 50, 20_000))
    best = 0
    for _ in range(draws):
        owner = draw()
        least = int(np.bincount(owner, minlength=clients).min())
        if least >= minimum:
            return owner
        best = max(best, least)
    raise DataError(
        f"data.partition: in {draws} draws {what} at least one of {clients} clients always had fewer than minimum {minimum}; "
        f"the best draw gave everyone {best} ({len(owner) / clients:.1f} on average). {hint}"
    )


def _dealt(count: int, proportions: np.ndarray) -> np.ndarray:
    """Return int64 [count], ascending: owners of ``count`` things dealt in these proportions (they add up to 1)."""
    # The small number keeps a sum of 0.999... from giving the last thing to someone with proportion 0.
    cuts = np.floor(np.cumsum(proportions)[:-1] * count + 1e-9).astype(np.int64)
    owners: np.ndarray = np.repeat(np.arange(len(proportions)), np.diff(cuts, prepend=0, append=count))
    return owners


def _dirichlet(
    tables: Assignment, labels: np.ndarray, settings: PartitionSettings, clients: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw the owners: int64 [clips]."""
    what, unit_of = "clips", np.arange(len(labels))
    if settings.column is not None:
        names, unit_of = _values(tables, settings.column)
        what = f"values of column {settings.column!r}"
        labels = _most_frequent(unit_of, labels, len(names))
    units = len(labels)
    _check_total(units, what, clients, settings.minimum)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    concentration = np.full(clients, cast(float, settings.alpha))

    def draw() -> np.ndarray:
        owner = np.empty(units, np.int64)
        held = np.zeros(clients, np.int64)
        for group in members:
            proportions = rng.dirichlet(concentration)
            if settings.balance:
                open_ = held < units / clients
                proportions = proportions * open_
                if not proportions.sum() > 0:  # alpha so small that all the weight fell on clients that have enough
                    proportions[rng.choice(np.flatnonzero(open_))] = 1.0
            owner[rng.permutation(group)] = _dealt(len(group), proportions / proportions.sum())
            held += np.bincount(owner[group], minlength=clients)
        return owner

    hint = "Raise alpha, take fewer clients, or lower minimum" + ("" if settings.balance else ", or set balance: true")
    owner = _until_all_have(
        settings.minimum, clients, draw, units + clients * len(members), f"with alpha {settings.alpha}", hint
    )
    return owner[unit_of]


def _most_frequent(unit_of: np.ndarray, labels: np.ndarray, units: int) -> np.ndarray:
    """Return int64 [units]: the label that most of a unit's clips have, the smallest of several."""
    counts = np.zeros((units, int(labels.max()) + 1), np.int64)
    np.add.at(counts, (unit_of, labels), 1)
    result: np.ndarray = counts.argmax(axis=1)
    return result


def _quantity(count: int, settings: PartitionSettings, clients: int, rng: np.random.Generator) -> np.ndarray:
    if settings.spread is None:
        concentration = np.full(clients, cast(float, settings.alpha))
        owner = _until_all_have(
            settings.minimum,
            clients,
            lambda: _dealt(count, rng.dirichlet(concentration)),
            count + clients,
            f"with alpha {settings.alpha}",
            "Raise alpha, take fewer clients, or lower minimum",
        )
    else:
        sizes = _spread_sizes(count, clients, settings.spread, rng)
        if sizes.min() < settings.minimum:
            raise DataError(
                f"data.partition: with spread {settings.spread} the smallest client has {sizes.min()} clips ({count / clients:.1f} "
                f"on average), fewer than minimum {settings.minimum}; lower spread or minimum, or take fewer clients"
            )
        owner = np.repeat(np.arange(clients), sizes)
    return rng.permutation(owner)


def _least_and_most(count: int, clients: int, spread: float) -> tuple[int, int]:
    mean = count / clients
    beyond = int(spread * mean + 1e-9)
    # At least the rounded-up mean, or there would be clips that nobody may take.
    return int(mean - beyond), max(int(mean + beyond), -(-count // clients))


def _spread_sizes(count: int, clients: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Return int64 [clients]: sizes by FedSTAR's rule."""
    least, most = _least_and_most(count, clients, spread)
    sizes = np.full(clients, least, np.int64)
    while (left := count - int(sizes.sum())) > 0:
        # One at a time to a random client that is not full; those drawn after they became full are drawn again.
        open_ = np.flatnonzero(sizes < most)
        drawn = np.bincount(open_[rng.integers(len(open_), size=left)], minlength=clients)
        sizes = np.minimum(sizes + drawn, most)
    return sizes


def _classes(labels: np.ndarray, settings: PartitionSettings, clients: int, rng: np.random.Generator) -> np.ndarray:
    wanted = cast(int, settings.classes)
    present = np.unique(labels)
    if wanted > len(present):
        raise DataError(f"data.partition.classes {wanted} is more than the {len(present)} labels of the training clips")
    if clients * wanted < len(present):
        raise DataError(
            f"data.partition: {clients} clients with {wanted} classes each cannot hold all {len(present)} labels; take at least "
            f"{-(-len(present) // wanted)} clients or {-(-len(present) // clients)} classes"
        )
    members = [np.flatnonzero(labels == label) for label in present]

    def draw() -> np.ndarray:
        numbers = np.full(clients, wanted)
        if settings.variance:
            drawn = rng.normal(wanted, settings.variance**0.5, clients).astype(np.int64)
            numbers = np.clip(drawn, 1, len(present))
        has = _class_holders(len(present), numbers, rng)
        owner = np.empty(len(labels), np.int64)
        for number, group in enumerate(members):
            holders = rng.permutation(np.flatnonzero(has[:, number]))
            owner[rng.permutation(group)] = holders[np.arange(len(group)) % len(holders)]
        return owner

    hint = "Take fewer clients or classes, or lower minimum"
    return _until_all_have(
        settings.minimum, clients, draw, len(labels) + 10 * clients, f"with {wanted} classes each", hint
    )


def _class_holders(classes: int, wanted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Bool [clients, classes]: so many classes for every client (int [clients]), at least one client for every class."""
    clients = len(wanted)
    has = np.zeros((clients, classes), bool)
    # Each class to one client first, all clients taking turns; then everyone fills up at random.
    has[np.resize(rng.permutation(clients), classes), rng.permutation(classes)] = True
    for mine, number in zip(has, wanted.tolist(), strict=True):
        others = rng.permutation(np.flatnonzero(~mine))
        mine[others[: max(number - int(mine.sum()), 0)]] = True
    return has
