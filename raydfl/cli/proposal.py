"""Proposals for the data at hand: a split and a partition that fit the list of clips, and settings of a run of ours."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raydfl.core.errors import DataError, InputError
from raydfl.core.options import options_of
from raydfl.core.yaml import to_yaml
from raydfl.data import (
    Assignment,
    DataSettings,
    assign_clips,
    find_dataset,
    list_clips,
    sizes_text,
)
from raydfl.engine import Config, apply_values, make_config

_WIDTH = 110
_LEAST_GROUPS = 3
"""Groups from which on they can be clients, one of them or more held out."""
_FOLDS = ("fold", "session")
"""Columns by which publishers cross-validate."""
_OFFICIAL = {"test": {"by": "split"}}
_OWNER = re.compile(
    r"(?:speaker|spk|talker|singer|actor|subject|participant|patient|person|user|client|owner|device)(?:_?id|_?name)?",
    re.IGNORECASE,
)
"""Names of columns that name the owners of clips."""
_NORMAL, _ANOMALOUS = re.compile("normal", re.IGNORECASE), re.compile("abnormal|anomal", re.IGNORECASE)
"""Beginnings of the names of machines' conditions."""
_NORMAL_SHARES = (0.25, 0.5)
"""Shares of a machine's normal clips in its test set."""
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

    settings: Mapping[str, Any]
    """Values by setting, such as ``data.split``."""
    sizes: np.ndarray
    """Clips of each client without its test set, int64 [clients]."""
    tested: int
    """Clips in the test sets of server and clients."""
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class Conditions:
    """The column that marks normal and anomalous clips."""

    column: str
    anomalous: list[str]
    objective: Mapping[str, Any]
    """The setting ``objective`` by its name; empty if the configured objective stays."""


def propose(config: Config, given: Sequence[str], problem: DataError | None = None) -> Iterator[str]:
    """Yield lines with settings to copy into a file, the reasons, and the command of a run. No clip is read.

    Args:
        config: the configuration at hand; its split and partition need not fit.
        given: how the user named it: the file, then the overrides.
        problem: the reason why the configuration does not fit.

    Raises:
        InputError: the recordings are not there.
        DataError: ``problem``, if no proposal solves it.
    """
    found = find(config)
    yield ""
    if found is None:
        yield "No split and partition were found that fit these clips: too few of a class, or of all."
        if problem is not None:
            raise problem
        return
    if problem is not None:
        yield from textwrap.wrap(
            f"This configuration does not fit the clips: {problem}",
            _WIDTH,
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    yield (
        f"To begin with: {len(found.sizes):,} clients, {sizes_text(found.sizes)}; {found.tested:,} test clips. Tried on this "
        f"list."
    )
    for reason in found.reasons:
        yield from textwrap.wrap(reason, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    yield f"Beside what is in {given[0]}:"
    above = None
    for path, value in found.settings.items():
        group, _, key = path.rpartition(".")
        if group and group != above:
            yield f"  {group}:"
        yield f"{'    ' if group else '  '}{key}: {to_yaml(value)}"
        above = group
    yield "next: copy these lines, or set them on the command line:"
    overrides = [shlex.quote(f"{path}={to_yaml(value)}") for path, value in found.settings.items()]
    yield " \\\n    ".join(["  raydfl run " + " ".join(map(shlex.quote, given)), *overrides])


def find(config: Config) -> Proposal | None:
    """Return a split and a partition that fit the clips, as a run would divide them; ``None``: nothing does."""
    values = config.model_dump(mode="json")

    def configure(settings: Mapping[str, Any]) -> Config:
        return make_config(apply_values(values, settings), "the proposal")

    settings: dict[str, Any] = {}
    reasons: list[str] = []
    manifest, classes = list_clips(config.data, config.run.seed)
    for choose in (_owner, _ungrouped):
        chosen, why = choose(config.data, manifest)
        if chosen:
            settings, reasons = settings | chosen, [*reasons, why]
            manifest, classes = list_clips(configure(settings).data, config.run.seed)
    conditions = _conditions(config, manifest)
    objective: dict[str, Any] = {}
    if conditions is not None and conditions.objective:
        objective = {"objective": conditions.objective}
        try:
            configure(objective)
        except InputError:
            objective["method"] = "fedavg"
            reasons.append(f"{config.method['name']} needs classes to learn; fedavg does not")
    replaced = {"test", "as_published"} | ({"client_test", "official_validation"} if conditions is not None else set())
    own = config.data.split.model_dump(mode="json", exclude_defaults=True, exclude=replaced)
    tests = [*(_tests(manifest) if conditions is None else _tests_of_machines(manifest, conditions))]
    for kept, strict, (test, why_test), (partition, why_partition) in itertools.product(
        [own, {}] if own else [{}], (True, False), tests, _partitions(manifest, skewed=conditions is None)
    ):
        tried = {**settings, "data.split": {**kept, **test}, "data.partition": partition, **objective}
        try:
            whole = configure(tried)
            tables = assign_clips(manifest, classes, whole.data, config.run.seed, whole.labels_needed, last="hold_out")
            sizes = tables.sizes("train", "validation")
            if len(sizes) < 2:
                continue
            if conditions is not None:
                fits = _suits_machines(tables, conditions, strict)
            else:
                there = np.unique(tables.codes("label")[tables.has_role("test")])
                fits = not strict or len(there) == len(classes) or test == _OFFICIAL
            if not fits:
                continue
            train, why_train = _train(len(sizes), float(np.median(sizes)))
            tried |= {f"train.{key}": value for key, value in train.items()}
            configure(tried).train.cohort_size(len(sizes))
        except InputError:
            continue
        tested = int(tables.has_role("test", "client_test").sum())
        left_out = ["the other keys of data.split do not fit these clips: they are left out"] if kept != own else []
        return Proposal(tried, sizes, tested, [*reasons, *left_out, why_test, why_partition, why_train])
    return None


def _owner(data: DataSettings, manifest: pa.Table) -> tuple[dict[str, Any], str]:
    """Propose the column that names the owners of clips, if the list has no groups."""
    options = [option.name for option in options_of(find_dataset(data.name))]
    if "group_column" not in options or manifest.column("group").null_count < manifest.num_rows:
        return {}, ""
    for column in manifest.column_names:
        owners = len(manifest.column(column).drop_null().unique()) if _OWNER.fullmatch(column) else 0
        if 1 < owners < manifest.num_rows:
            return {"data.group_column": column}, (
                f"the column {column} names {owners:,} owners of clips: they become the groups (data.group_column)"
            )
    return {}, ""


def _ungrouped(data: DataSettings, manifest: pa.Table) -> tuple[dict[str, Any], str]:
    """Propose what to do with clips that have no group, and why."""
    group = manifest.column("group")
    known = len(group.drop_null().unique())
    if not group.null_count or known < _LEAST_GROUPS or group.null_count > manifest.num_rows / 2:
        return {}, ""
    labels = manifest.filter(group.is_null()).column("label").unique().to_pylist()
    return {"data.ungrouped": "deal"}, (
        f"{group.null_count:,} clips ({', '.join(map(str, labels[:5]))}) have no group: they are dealt out to the {known:,} groups"
    )


def _conditions(config: Config, manifest: pa.Table) -> Conditions | None:
    """Find the normal and the anomalous clips of machines, by the objective or by the names of labels."""
    objective = config.parts.method.objective
    detects, named = objective.answers == "score", getattr(objective, "normal", ())
    if detects and named:
        labels = manifest.column("label").drop_null().unique().to_pylist()
        return Conditions("label", [label for label in labels if label not in named], {})
    for column in ("label", "condition"):
        values = manifest.column(column).drop_null().unique().to_pylist() if column in manifest.column_names else []
        normal, anomalous = ([v for v in values if kind.match(str(v))] for kind in (_NORMAL, _ANOMALOUS))
        if not normal or not anomalous or len(normal) + len(anomalous) < len(values):
            continue
        if column == "label" and detects and hasattr(objective, "normal"):
            return Conditions(column, anomalous, {**(config.objective or {}), "normal": normal})
        if column == "label" and objective.answers == "class":
            name = "compact" if config.data.features.kind == "image" else "reconstruct"
            return Conditions(column, anomalous, {"name": name, "normal": normal})
        return Conditions(column, anomalous, {})
    return None


def _tests_of_machines(manifest: pa.Table, conditions: Conditions) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield test sets of clients to try, the best first. None leaves an anomalous clip in training."""
    names = ", ".join(map(str, conditions.anomalous[:3])) + (" ..." if len(conditions.anomalous) > 3 else "")
    why = f"the {conditions.column} says which clips are anomalous ({names}): clients test on them and train on the others alone"
    classify = "To classify normal and anomalous clips instead, keep your objective and choose data.split yourself"
    official = manifest.column("split").unique().to_pylist()
    if "test" in official:
        rest = {"official_validation": "drop"} if "validation" in official else {}
        yield (
            {"test": None, "client_test": {"by": "split", "values": ["test"]}, **rest},
            f"{why}, by the official split. {classify}",
        )
    for share in _NORMAL_SHARES:
        held_out = {"by": conditions.column, "values": conditions.anomalous, "others": share}
        yield {"test": None, "client_test": held_out}, f"{why}; {share:.0%} of these are tested on too. {classify}"


def _suits_machines(tables: Assignment, conditions: Conditions, strict: bool) -> bool:
    """Return whether clients train on normal clips alone, and test on both kinds.

    Args:
        strict: every client must have both kinds in its test; otherwise one client.
    """
    strange = np.isin(tables.texts(conditions.column, "data").astype(str), conditions.anomalous)
    both = np.all([tables.select(mine).sizes("client_test") > 0 for mine in (strange, ~strange)], axis=0)
    trained = not (tables.has_role("train") & strange).any() and (tables.sizes("train") > 1).all()
    return bool(trained and (both.all() if strict else both.any()))


def _tests(manifest: pa.Table) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield test sets of the server to try, the best first, and the reason for each."""
    for test, why in _held_out(manifest):
        yield {"test": test}, why


def _held_out(manifest: pa.Table) -> Iterator[tuple[dict[str, Any] | None, str]]:
    if "test" in manifest.column("split").to_pylist():
        yield {"by": "split"}, "the set has an official split"
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


def _partitions(manifest: pa.Table, skewed: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield partitions to try, the best first, and the reason for each.

    Args:
        skewed: also partitions with skewed labels.
    """
    groups = manifest.column("group")
    if not groups.null_count and len(groups.unique()) > 1:
        yield {"by": "group"}, "every group is a client"
    most = int(np.clip(manifest.num_rows // _CLIPS_EACH, *_CLIENTS))
    why = "nobody owns the clips" if groups.null_count == len(groups) else "not by group"
    for clients in sorted({most, max(2, most // 2), 2}, reverse=True):
        dirichlet = {"by": "dirichlet", "clients": clients, "alpha": 0.5, "minimum": 2}
        if skewed:
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
