"""Proposals for the data at hand: a split and a partition that fit the list of clips, and settings of a run of ours."""

from __future__ import annotations

import itertools
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raydfl.core.errors import InputError
from raydfl.core.yaml import to_yaml
from raydfl.data import Division, divide, list_clips, sizes_text
from raydfl.engine import Config, make_config

_WIDTH = 110
_LEAST_GROUPS = 3
"""Groups from which on they can be clients, one of them or more held out."""
_FOLDS = ("fold", "session")
"""Columns by which publishers cross-validate."""
_OFFICIAL = {"by": "split"}
_SHARES = (0.2, 0.3, 0.5)
_CLIPS_EACH = 20
"""Training clips of a client where nobody owns the clips, and the numbers of such clients."""
_CLIENTS = (2, 50)


@dataclass(frozen=True, slots=True)
class Start:
    """One of our own runs, with what it learned."""

    what: str
    clients: int
    clips: int
    """Training clips of a client, about."""
    cohort: int
    """Clients a round."""
    local_epochs: int
    batch_size: int
    lr: float
    """Adam's learning rate."""
    rounds: int
    result: str


STARTS = (
    Start("FSDD, six speakers", 6, 450, 6, 1, 16, 0.003, 8, "81 % of 10 classes after 8 rounds, still rising"),
    Start("FSDD, six speakers' clips dealt to 60", 60, 45, 12, 1, 16, 0.003, 150, "93 % of 10 classes"),
    Start("spoken words, 32 speakers", 32, 40, 15, 2, 16, 0.003, 20, "86 % of 10 classes"),
    Start(
        "EmoDB's sample, six speakers",
        6,
        11,
        6,
        2,
        4,
        0.003,
        15,
        "10 of 21 test clips of 7 classes, too few to say more",
    ),
    Start("Speech Commands' test set, 106 speakers", 106, 3, 21, 2, 4, 0.003, 40, "45 % of 12 classes, still rising"),
)
"""FedAvg, its default network, Adam. Each has been run, none is a guess: docs/data.md has the commands."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings that have been tried on the list of clips."""

    data: Mapping[str, Any]
    """Keys of ``data`` with their values."""
    train: Mapping[str, Any]
    """Keys of ``train`` with their values."""
    division: Division
    reasons: Sequence[str]


def propose(config: Config, given: Sequence[str]) -> Iterator[str]:
    """Lines that say what to begin with and why, to be copied into a file or to the command line; no clip is read.

    Args:
        config: the configuration at hand; its split and partition need not fit.
        given: how the user named it: the file, then the overrides.

    Raises:
        InputError: the recordings are not there.
    """
    found = find(config)
    yield ""
    if found is None:
        yield "No split and partition were found that fit these clips: too few of a class, or of all."
        return
    values = {f"data.{key}": value for key, value in found.data.items()}
    values |= {f"train.{key}": value for key, value in found.train.items()}
    overrides = [f"{key}={to_yaml(value)}" for key, value in values.items()]
    division = found.division
    sizes = np.diff(division.partition.offsets)
    yield (
        f"To begin with: {len(sizes):,} clients, {sizes_text(sizes)}; {len(division.split.test):,} test clips. Tried on this "
        f"list."
    )
    for reason in found.reasons:
        yield from textwrap.wrap(reason, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    yield f"Beside what is in {given[0]}:"
    for group in ("data", "train"):
        yield f"  {group}:"
        yield from (f"    {key}: {to_yaml(value)}" for key, value in getattr(found, group).items())
    yield "Or on the command line:"
    yield " \\\n    ".join(["  raydfl run " + " ".join(map(shlex.quote, given)), *map(shlex.quote, overrides)])


def find(config: Config) -> Proposal | None:
    """Return a split and a partition that fit the clips, as a run would divide them; ``None``: nothing does."""
    values = config.model_dump(mode="json")
    ungrouped, reasons = _ungrouped(config)
    data = {"ungrouped": ungrouped} if ungrouped != config.data.ungrouped else {}
    settings = config.data.model_copy(update=data)
    manifest, classes = list_clips(settings, config.run.seed)
    for strict, (test, why_test), (partition, why_partition) in itertools.product(
        (True, False), _tests(manifest), _partitions(manifest)
    ):
        tried = {**data, "split": {**values["data"]["split"], "test": test}, "partition": partition}
        try:
            whole = make_config({**values, "data": {**values["data"], **tried}}, "the proposal")
            division = divide(manifest, classes, whole.data, config.run.seed, config.labels_needed)
            there = np.unique(division.labels[division.split.test])
            if strict and len(there) < len(classes) and test != _OFFICIAL:
                continue
            sizes = np.diff(division.partition.offsets)
            if len(sizes) < 2:
                continue
            train, why_train = _train(len(sizes), float(np.median(sizes)))
            tuned = {**values, "data": {**values["data"], **tried}, "train": {**values["train"], **train}}
            make_config(tuned, "the proposal").train.cohort_size(len(sizes))
        except InputError:
            continue
        shown = {**data, "split": {"test": test}, "partition": partition}
        return Proposal(shown, train, division, [*reasons, why_test, why_partition, why_train])
    return None


def _ungrouped(config: Config) -> tuple[str, list[str]]:
    """Propose what to do with clips that have no group, and why."""
    if config.data.ungrouped == "deal":
        return "deal", []
    manifest, _ = list_clips(config.data, config.run.seed)
    group = manifest.column("group")
    known = len(group.drop_null().unique())
    if not group.null_count or known < _LEAST_GROUPS or group.null_count > manifest.num_rows / 2:
        return "keep", []
    labels = manifest.filter(group.is_null()).column("label").unique().to_pylist()
    return "deal", [
        f"{group.null_count:,} clips ({', '.join(labels[:5])}) have no group: they are dealt out to the {known:,} groups"
    ]


def _tests(manifest: pa.Table) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Test sets to try, the best first, with what speaks for each."""
    if "test" in manifest.column("split").to_pylist():
        yield _OFFICIAL, "the set has an official split"
    groups = manifest.column("group")
    count = len(groups.drop_null().unique())
    if not groups.null_count and count >= _LEAST_GROUPS:
        for share in _SHARES:
            yield (
                {"by": "group", "fraction": share},
                f"whole groups are held out, {share:.0%} of {count:,}: the test says what somebody new would get",
            )
    for column in _FOLDS:
        values = manifest.column(column).unique().to_pylist() if column in manifest.column_names else []
        if len(values) > 1 and None not in values:
            last = max(values)
            yield (
                {"by": column, "values": [last]},
                f"the set has folds for cross-validation: {column} {last} of {len(values)} is held out",
            )
    if "recording" in manifest.column_names and not manifest.column("recording").null_count:
        for share in _SHARES:
            yield (
                {"by": "recording", "fraction": share},
                f"whole recordings are held out, {share:.0%}, so that no part of one is trained on",
            )
    for share in _SHARES:
        yield {"by": "clip", "fraction": share}, f"{share:.0%} of every label's clips are held out"
    yield None, "nothing can be held out: too few clips of some label; find more before you trust a number"


def _partitions(manifest: pa.Table) -> Iterator[tuple[dict[str, Any], str]]:
    """Partitions to try, the best first, with what speaks for each."""
    groups = manifest.column("group")
    if not groups.null_count and len(groups.unique()) > 1:
        yield {"by": "group"}, "every group is a client"
    most = int(np.clip(manifest.num_rows // _CLIPS_EACH, *_CLIENTS))
    why = "nobody owns the clips" if groups.null_count == len(groups) else "not by group"
    for clients in sorted({most, max(2, most // 2), 2}, reverse=True):
        dirichlet = {"by": "dirichlet", "clients": clients, "alpha": 0.5, "minimum": 2}
        yield dirichlet, f"{why}: labels are dealt skewed to {clients} clients; alpha 100 deals them evenly"
        yield {"by": "iid", "clients": clients}, f"{why}: clips are dealt evenly to {clients} clients"


def _train(clients: int, clips: float) -> tuple[dict[str, Any], str]:
    """Settings of the run of ours that is the most like so many clients of so many clips, and what came of it."""
    start = min(STARTS, key=lambda run: abs(math.log(run.clips / clips)) + abs(math.log(run.clients / clients)) / 2)
    cohort = min(clients, max(round(clients * start.cohort / start.clients), 5))
    train = {
        "rounds": start.rounds,
        "cohort": cohort,
        "local_epochs": start.local_epochs,
        "batch_size": start.batch_size,
        "optimiser": {"name": "adam", "lr": start.lr},
    }
    return train, (
        f"settings of the run of ours that is most like it, not tuned to these clips: {start.what}, {start.clients} clients of "
        f"{start.clips} clips, {start.cohort} a round, {start.rounds} rounds: {start.result}"
    )
