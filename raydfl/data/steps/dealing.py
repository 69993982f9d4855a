"""Partitions: rules for dealing clips to clients.

- ``group``: natural clients. Each speaker, actor or device is a client, or several with ``shards``.
- ``dirichlet``: skewed labels. Each label's clips are dealt in proportions drawn from Dirichlet(alpha) over the clients. With
  ``column: recording``, whole recordings are dealt in place of clips. With ``balance``, a client at its even share gets no more
  clips, as in FedAudio (Zhang et al., ICASSP 2023) and NIID-Bench (Li et al., ICDE 2022).
- ``quantity``: skewed sizes with equal label distributions. Sizes follow Dirichlet(alpha) over the clients, or FedSTAR's rule
  with ``spread`` sigma: every client starts with int(m - v) clips, where m is the mean and v = int(sigma m). The remaining clips
  go one by one to random clients below int(m + v).
- ``classes``: every client has ``classes`` labels, or with ``variance`` a random number of at least 1 around it (FedSTAR's
  rule). A label's clips are dealt evenly to its clients.
- ``iid``: clips are shuffled and dealt evenly.
- ``table``: a file lists the clients' clips (raydfl.data.steps.user_tables). Clients may share clips.

Every random partition terminates: it repeats a draw below ``minimum`` a fixed number of times, then raises an error with the best
result.
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
"""Approximate number of random values before a partition counts as impossible: some seconds, or many draws of small data."""

_USES = {
    "group": ({"column", "shards", "smaller"}, set()),
    "dirichlet": ({"column", "balance"}, {"clients", "alpha"}),
    "quantity": ({"alpha", "spread"}, {"clients"}),
    "classes": ({"variance"}, {"clients", "classes"}),
    "iid": (set(), {"clients"}),
    "table": ({"file"}, set()),
}
"""Optional and required fields of each partition. All accept ``minimum``."""


class PartitionSettings(Settings):
    """The partition: the assignment of training clips to clients."""

    by: Literal["group", "dirichlet", "quantity", "classes", "iid", "table"] = Field(
        "group",
        description="group: a client for each value of a column. dirichlet: skewed labels. quantity: skewed sizes. classes: a "
        "few labels for each client. iid: evenly. table: a file lists the clients.",
    )
    column: str | None = Field(
        None,
        description="group: column with the client of each clip; null: group. dirichlet: deal all clips with the same value of "
        "this column (recording) together; null: deal single clips.",
    )
    shards: int = Field(1, ge=1, description="group: split each group evenly into this number of clients.")
    smaller: Literal["stop", "drop"] = Field(
        "stop", description="group: stop at clients with fewer clips than minimum, or drop these clients."
    )
    clients: int | None = Field(
        None, ge=1, description="Number of clients. Required by dirichlet, quantity, classes and iid."
    )
    alpha: float | None = Field(
        None,
        gt=0,
        description="dirichlet, quantity: concentration. Small values are skewed (0.1), large ones even (100).",
    )
    balance: bool = Field(
        True, description="dirichlet: a client at its even share of clips gets no clips of the remaining labels."
    )
    spread: float | None = Field(
        None,
        ge=0,
        le=1,
        description="quantity: sizes between (1 - spread) and (1 + spread) times the mean. 0: equal sizes.",
    )
    classes: int | None = Field(None, ge=1, description="classes: number of labels of each client.")
    variance: float = Field(
        0.0,
        ge=0,
        description="classes: variance of each client's number of labels (normal distribution, rounded down). 0: all equal.",
    )
    file: Path | None = Field(
        None,
        description="table: Parquet, Arrow or CSV file with a row for each client. Columns: first (row of its first clip in the "
        "list of clips), clips (their number) and optionally client (its id).",
    )
    minimum: int = Field(
        1,
        ge=1,
        description="Smallest number of clips (or values of dirichlet's column) of a client, including its local validation.",
    )

    @model_validator(mode="after")
    def _check_fields(self) -> PartitionSettings:
        may, must = _USES[self.by]
        absent = sorted(name for name in must if getattr(self, name) is None)
        if absent:
            raise ValueError(f"by: {self.by} needs {' and '.join(absent)}")
        for name, field in type(self).model_fields.items():
            if name not in may | must | {"by", "minimum"} and getattr(self, name) != field.default:
                raise ValueError(f"{name} has no effect with by: {self.by}. Remove it")
        if self.by == "quantity" and (self.alpha is None) == (self.spread is None):
            raise ValueError("by: quantity needs either alpha or spread")
        return self


class Owners(NamedTuple):
    """The owners of a set of clips."""

    ids: Sequence[str]
    """Ids of the clients in their order."""
    owner: np.ndarray
    """int64 [clips]: position of the owner, -1 for none."""
    groups: Sequence[str] = ()
    """Names of the groups of a partition by group."""
    group: np.ndarray | None = None
    """int [clients]: position of each client's group; ``None`` for partitions without groups."""


def deal_clips(tables: Assignment, settings: PartitionSettings, rng: np.random.Generator) -> Owners:
    """Deal clips to clients by any partition except ``table``.

    Raises:
        DataError: clips without a group, or too few clips for the minimum.
    """
    if settings.by == "group":
        return _deal_groups(tables, settings, rng)
    clients = cast(int, settings.clients)  # validated by PartitionSettings
    labels = tables.codes(tables.strata)
    if settings.by == "dirichlet":
        owner = _deal_skewed_labels(tables, labels, settings, clients, rng)
    else:
        _check_total(len(labels), "clips", clients, settings.minimum)
        if settings.by == "quantity":
            owner = _deal_skewed_sizes(len(labels), settings, clients, rng)
        elif settings.by == "classes":
            owner = _deal_few_labels(labels, settings, clients, rng)
        else:
            owner = rng.permutation(np.arange(len(labels)) % clients)
    digits = len(str(clients - 1))
    return Owners([f"client-{number:0{digits}d}" for number in range(clients)], owner)


def _encode_column(tables: Assignment, column: str) -> tuple[list[str], np.ndarray]:
    """Return the values of a column in natural order, and the position of each clip's value: int64 [clips]."""
    encoded = tables.column(column, "data.partition").cast(pa.string()).dictionary_encode()
    if encoded.null_count:
        clips = tables.clips.column("clip").filter(encoded.is_null()).to_pylist()
        hint = "Fill the column, remove these clips"
        if column == "group" and len(clips) < len(encoded):
            hint += ", deal them to the groups with data.ungrouped=deal, leave their labels out with data.leave_out"
        raise DataError(
            f"data.partition: {len(clips)} of {len(encoded)} training clips have no {column!r}, so no client: "
            f"{', '.join(clips[:5])}{' ...' if len(clips) > 5 else ''}. {hint}, or choose another data.partition, for example "
            f"{suggest_dirichlet(len(encoded))}"
        )
    values = encoded.dictionary.to_pylist()
    names = natural_order(values)
    position = {name: number for number, name in enumerate(names)}
    return names, np.array([position[name] for name in values], np.int64)[to_numbers(encoded)]


def _deal_groups(tables: Assignment, settings: PartitionSettings, rng: np.random.Generator) -> Owners:
    column, shards = settings.column or "group", settings.shards
    names, group = _encode_column(tables, column)
    # Shuffled, then dealt in turn within each group.
    shuffled = rng.permutation(len(group))
    order = shuffled[np.argsort(group[shuffled], kind="stable")]
    sizes = np.bincount(group, minlength=len(names))
    turn = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    owner = np.empty(len(group), np.int64)
    owner[order] = group[order] * shards + turn % shards
    counts = np.bincount(owner, minlength=len(names) * shards)
    sufficient = counts >= settings.minimum
    if not sufficient.all():
        least = int(counts.argmin())
        problem = (
            f"data.partition: {int((~sufficient).sum())} of {len(counts)} clients (by {column!r}, {shards} shards each) get fewer "
            f"than minimum {settings.minimum} training clips; client {_format_shard(names, least, shards)!r} gets {counts[least]}"
        )
        if settings.smaller == "stop":
            raise DataError(
                f"{problem}. Lower minimum or shards, or drop these clients with data.partition.smaller=drop"
            )
        if not sufficient.any():
            raise DataError(f"{problem}. data.partition.smaller=drop leaves no client; lower minimum or shards")
    clients = np.flatnonzero(sufficient)
    ids = [_format_shard(names, int(client), shards) for client in clients]
    return Owners(ids, np.where(sufficient, np.cumsum(sufficient) - 1, -1)[owner], names, clients // shards)


def _format_shard(names: Sequence[str], client: int, shards: int) -> str:
    return names[client] if shards == 1 else f"{names[client // shards]}/{client % shards}"


def _check_total(units: int, what: str, clients: int, minimum: int) -> None:
    if units < clients * minimum:
        raise DataError(
            f"data.partition: {units} {what} cannot give {clients} clients {minimum} each ({clients * minimum} needed). "
            f"Set at most {units // minimum} clients or a smaller minimum"
        )


def _draw_until_sufficient(
    minimum: int, clients: int, draw: Callable[[], np.ndarray], work: int, what: str, hint: str
) -> np.ndarray:
    """Draw owners until every client has ``minimum`` clips.

    Args:
        work: number of random values of a draw.
        what: the options of the draw, for the message.
        hint: the remedy in the message.
    """
    draws = int(np.clip(_WORK // work, 50, 20_000))
    best = 0
    for _ in range(draws):
        owner = draw()
        least = int(np.bincount(owner, minlength=clients).min())
        if least >= minimum:
            return owner
        best = max(best, least)
    raise DataError(
        f"data.partition: none of {draws} draws {what} gave all {clients} clients the minimum of {minimum}; the best draw gave "
        f"every client {best} ({len(owner) / clients:.1f} on average). {hint}"
    )


def _split_by_proportions(count: int, proportions: np.ndarray) -> np.ndarray:
    """Split ``count`` clips by proportions with the sum 1; return their owners, ascending: int64 [count]."""
    # Without 1e-9, a sum of 0.999... would give the last clip to a client with proportion 0.
    cuts = np.floor(np.cumsum(proportions)[:-1] * count + 1e-9).astype(np.int64)
    owners: np.ndarray = np.repeat(np.arange(len(proportions)), np.diff(cuts, prepend=0, append=count))
    return owners


def _deal_skewed_labels(
    tables: Assignment, labels: np.ndarray, settings: PartitionSettings, clients: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw the owners by Dirichlet proportions for each label: int64 [clips]."""
    what, unit_of = "clips", np.arange(len(labels))
    if settings.column is not None:
        names, unit_of = _encode_column(tables, settings.column)
        what = f"values of column {settings.column!r}"
        labels = _find_main_labels(unit_of, labels, len(names))
    units = len(labels)
    _check_total(units, what, clients, settings.minimum)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    concentration = np.full(clients, cast(float, settings.alpha))

    def draw() -> np.ndarray:
        owner = np.empty(units, np.int64)
        sizes = np.zeros(clients, np.int64)
        for group in members:
            proportions = rng.dirichlet(concentration)
            if settings.balance:
                below = sizes < units / clients
                proportions = proportions * below
                if not proportions.sum() > 0:  # a small alpha may put all weight on clients at their even share
                    proportions[rng.choice(np.flatnonzero(below))] = 1.0
            owner[rng.permutation(group)] = _split_by_proportions(len(group), proportions / proportions.sum())
            sizes += np.bincount(owner[group], minlength=clients)
        return owner

    hint = "Raise alpha, take fewer clients, or lower minimum" + ("" if settings.balance else ", or set balance: true")
    owner = _draw_until_sufficient(
        settings.minimum, clients, draw, units + clients * len(members), f"with alpha {settings.alpha}", hint
    )
    return owner[unit_of]


def _find_main_labels(unit_of: np.ndarray, labels: np.ndarray, units: int) -> np.ndarray:
    """Return the most frequent label of each unit's clips, the smallest in a tie: int64 [units]."""
    counts = np.zeros((units, int(labels.max()) + 1), np.int64)
    np.add.at(counts, (unit_of, labels), 1)
    result: np.ndarray = counts.argmax(axis=1)
    return result


def _deal_skewed_sizes(count: int, settings: PartitionSettings, clients: int, rng: np.random.Generator) -> np.ndarray:
    if settings.spread is None:
        concentration = np.full(clients, cast(float, settings.alpha))
        owner = _draw_until_sufficient(
            settings.minimum,
            clients,
            lambda: _split_by_proportions(count, rng.dirichlet(concentration)),
            count + clients,
            f"with alpha {settings.alpha}",
            "Raise alpha, take fewer clients, or lower minimum",
        )
    else:
        sizes = _draw_sizes(count, clients, settings.spread, rng)
        if sizes.min() < settings.minimum:
            raise DataError(
                f"data.partition: with spread {settings.spread} the smallest client has {sizes.min()} clips ({count / clients:.1f} "
                f"on average), fewer than minimum {settings.minimum}. Lower spread, minimum or clients"
            )
        owner = np.repeat(np.arange(clients), sizes)
    return rng.permutation(owner)


def _compute_bounds(count: int, clients: int, spread: float) -> tuple[int, int]:
    mean = count / clients
    deviation = int(spread * mean + 1e-9)
    # Bounds below the rounded-up mean would leave clips without a client.
    return int(mean - deviation), max(int(mean + deviation), -(-count // clients))


def _draw_sizes(count: int, clients: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Draw sizes by FedSTAR's rule: int64 [clients]."""
    least, most = _compute_bounds(count, clients, spread)
    sizes = np.full(clients, least, np.int64)
    while (left := count - int(sizes.sum())) > 0:
        # Equal to single draws: clips above a client's bound are drawn again.
        candidates = np.flatnonzero(sizes < most)
        gains = np.bincount(candidates[rng.integers(len(candidates), size=left)], minlength=clients)
        sizes = np.minimum(sizes + gains, most)
    return sizes


def _deal_few_labels(
    labels: np.ndarray, settings: PartitionSettings, clients: int, rng: np.random.Generator
) -> np.ndarray:
    per_client = cast(int, settings.classes)
    present = np.unique(labels)
    if per_client > len(present):
        raise DataError(
            f"data.partition.classes {per_client} is more than the {len(present)} labels of the training clips. Lower it"
        )
    if clients * per_client < len(present):
        raise DataError(
            f"data.partition: {clients} clients with {per_client} classes each cannot hold all {len(present)} labels. Set at least "
            f"{-(-len(present) // per_client)} clients or {-(-len(present) // clients)} classes"
        )
    members = [np.flatnonzero(labels == label) for label in present]

    def draw() -> np.ndarray:
        numbers = np.full(clients, per_client)
        if settings.variance:
            values = rng.normal(per_client, settings.variance**0.5, clients).astype(np.int64)
            numbers = np.clip(values, 1, len(present))
        has = _draw_holders(len(present), numbers, rng)
        owner = np.empty(len(labels), np.int64)
        for number, group in enumerate(members):
            holders = rng.permutation(np.flatnonzero(has[:, number]))
            owner[rng.permutation(group)] = holders[np.arange(len(group)) % len(holders)]
        return owner

    hint = "Take fewer clients or classes, or lower minimum"
    return _draw_until_sufficient(
        settings.minimum, clients, draw, len(labels) + 10 * clients, f"with {per_client} classes each", hint
    )


def _draw_holders(classes: int, numbers: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the classes of every client, with at least one client for every class: bool [clients, classes].

    Args:
        numbers: int [clients], each client's number of classes.
    """
    clients = len(numbers)
    has = np.zeros((clients, classes), bool)
    # Clients first take turns at the classes, so that none is lost; then each draws its remaining classes.
    has[np.resize(rng.permutation(clients), classes), rng.permutation(classes)] = True
    for row, number in zip(has, numbers.tolist(), strict=True):
        remaining = rng.permutation(np.flatnonzero(~row))
        row[remaining[: max(number - int(row.sum()), 0)]] = True
    return has
