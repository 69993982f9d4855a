"""Proposals for a first run: a split and a partition that fit the clips, and settings of a similar run."""

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
    describe_sizes,
    find_dataset,
    list_clips,
)
from raydfl.engine import Config, apply_values, make_config

_WIDTH = 110
_LEAST_GROUPS = 3
"""Smallest number of groups for holding out whole groups."""
_FOLDS = ("fold", "session")
"""Columns with the publisher's cross-validation folds."""
_OFFICIAL = {"test": {"by": "split"}}
_OWNER = re.compile(
    r"(?:speaker|spk|talker|singer|actor|subject|participant|patient|person|user|client|owner|device)(?:_?id|_?name)?",
    re.IGNORECASE,
)
"""Names of columns with the owners of clips."""
_NORMAL, _ANOMALOUS = re.compile("normal", re.IGNORECASE), re.compile("abnormal|anomal", re.IGNORECASE)
"""Prefixes of the names of normal and anomalous conditions."""
_NORMAL_SHARES = (0.25, 0.5)
"""Fractions of a machine's normal clips to hold out for its test set."""
_SHARES = (0.2, 0.3, 0.5)
_CLIPS_EACH = 20
"""Training clips of each client if clips have no owners. ``_CLIENTS`` limits the number of clients."""
_CLIENTS = (2, 50)


@dataclass(frozen=True, slots=True)
class Start:
    """A reference run with its settings and its result."""

    what: str
    clients: int
    clips: int
    """Training clips of a client, approximately."""
    cohort: int
    """Clients per round."""
    local_epochs: int
    batch_size: int
    lr: float
    """Learning rate of Adam."""
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
        "10 of 21 test clips of 7 classes, too few for a conclusion",
    ),
    Start("Speech Commands' test set, 106 speakers", 106, 3, 21, 2, 4, 0.003, 40, "45 % of 12 classes, still rising"),
)
"""Measured runs of FedAvg with its default network and Adam. docs/data.md has the commands."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings that fit the list of clips."""

    settings: Mapping[str, Any]
    """Values by setting, such as ``data.split``."""
    sizes: np.ndarray
    """Clips of each client outside its test set, int64 [clients]."""
    tested: int
    """Clips in the test sets of the server and the clients."""
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class Conditions:
    """The column that marks normal and anomalous clips."""

    column: str
    anomalous: list[str]
    objective: Mapping[str, Any]
    """New value of the setting ``objective``. Empty if the configured objective stays."""


def propose(config: Config, given: Sequence[str], problem: DataError | None = None) -> Iterator[str]:
    """Yield proposed settings, their reasons and a command as lines of text. No clip is read.

    Args:
        config: the configuration. Its split and partition need not fit the clips.
        given: the user's arguments: the file, then the overrides.
        problem: the error of the configured split or partition, if any.

    Raises:
        InputError: the recordings are missing.
        DataError: ``problem``, if no proposal solves it.
    """
    proposal = find_proposal(config)
    yield ""
    if proposal is None:
        yield "No split and partition fit these clips: there are too few clips, or too few clips of a class."
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
        f"Proposal: {len(proposal.sizes):,} clients, {describe_sizes(proposal.sizes)}; {proposal.tested:,} test clips. "
        f"It fits these clips."
    )
    for reason in proposal.reasons:
        yield from textwrap.wrap(reason, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    yield f"Add to {given[0]}:"
    previous = None
    for path, value in proposal.settings.items():
        group, _, key = path.rpartition(".")
        if group and group != previous:
            yield f"  {group}:"
        yield f"{'    ' if group else '  '}{key}: {to_yaml(value)}"
        previous = group
    yield "next: copy these lines, or set them on the command line:"
    overrides = [shlex.quote(f"{path}={to_yaml(value)}") for path, value in proposal.settings.items()]
    yield " \\\n    ".join(["  raydfl run " + " ".join(map(shlex.quote, given)), *overrides])


def find_proposal(config: Config) -> Proposal | None:
    """Return a split and a partition that fit the clips, or ``None`` if nothing fits."""
    values = config.model_dump(mode="json")

    def configure(settings: Mapping[str, Any]) -> Config:
        return make_config(apply_values(values, settings), "the proposal")

    settings: dict[str, Any] = {}
    reasons: list[str] = []
    manifest, classes = list_clips(config.data, config.run.seed)
    for choose in (_propose_owner, _propose_ungrouped):
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
            reasons.append(f"{config.method['name']} needs labelled classes, fedavg does not")
    replaced = {"test", "as_published"} | ({"client_test", "official_validation"} if conditions is not None else set())
    configured = config.data.split.model_dump(mode="json", exclude_defaults=True, exclude=replaced)
    tests = [*(_tests(manifest) if conditions is None else _tests_of_machines(manifest, conditions))]
    for kept, strict, (test, why_test), (partition, why_partition) in itertools.product(
        [configured, {}] if configured else [{}], (True, False), tests, _partitions(manifest, skewed=conditions is None)
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
                tested_classes = np.unique(tables.codes("label")[tables.has_role("test")])
                fits = not strict or len(tested_classes) == len(classes) or test == _OFFICIAL
            if not fits:
                continue
            train, why_train = _train(len(sizes), float(np.median(sizes)))
            tried |= {f"train.{key}": value for key, value in train.items()}
            configure(tried).train.cohort_size(len(sizes))
        except InputError:
            continue
        tested = int(tables.has_role("test", "client_test").sum())
        left_out = (
            ["the configured keys of data.split do not fit these clips and are omitted"] if kept != configured else []
        )
        return Proposal(tried, sizes, tested, [*reasons, *left_out, why_test, why_partition, why_train])
    return None


def _propose_owner(data: DataSettings, manifest: pa.Table) -> tuple[dict[str, Any], str]:
    """Propose the column with the owners of clips, if no clip has a group."""
    options = [option.name for option in options_of(find_dataset(data.name))]
    if "group_column" not in options or manifest.column("group").null_count < manifest.num_rows:
        return {}, ""
    for column in manifest.column_names:
        owners = len(manifest.column(column).drop_null().unique()) if _OWNER.fullmatch(column) else 0
        if 1 < owners < manifest.num_rows:
            return {"data.group_column": column}, (
                f"column {column} has {owners:,} owners of clips, which become the groups (data.group_column)"
            )
    return {}, ""


def _propose_ungrouped(data: DataSettings, manifest: pa.Table) -> tuple[dict[str, Any], str]:
    """Propose a treatment of clips without a group, with the reason."""
    group = manifest.column("group")
    known = len(group.drop_null().unique())
    if not group.null_count or known < _LEAST_GROUPS or group.null_count > manifest.num_rows / 2:
        return {}, ""
    labels = manifest.filter(group.is_null()).column("label").unique().to_pylist()
    return {"data.ungrouped": "deal"}, (
        f"{group.null_count:,} clips ({', '.join(map(str, labels[:5]))}) have no group; the {known:,} groups get them"
    )


def _conditions(config: Config, manifest: pa.Table) -> Conditions | None:
    """Find normal and anomalous clips by the objective or by the names of labels."""
    objective = config.components.method.objective
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
    """Yield candidate test sets of clients, best first. All keep anomalous clips out of training."""
    names = ", ".join(map(str, conditions.anomalous[:3])) + (" ..." if len(conditions.anomalous) > 3 else "")
    why = f"column {conditions.column} marks anomalous clips ({names}): clients test on them and train only on normal clips"
    classify = "To classify normal and anomalous clips instead, keep your objective and set data.split yourself"
    official = manifest.column("split").unique().to_pylist()
    if "test" in official:
        rest = {"official_validation": "drop"} if "validation" in official else {}
        yield (
            {"test": None, "client_test": {"by": "split", "values": ["test"]}, **rest},
            f"{why}, by the official split. {classify}",
        )
    for share in _NORMAL_SHARES:
        held_out = {"by": conditions.column, "values": conditions.anomalous, "others": share}
        yield (
            {"test": None, "client_test": held_out},
            f"{why}; {share:.0%} of the normal clips are in the tests too. {classify}",
        )


def _suits_machines(tables: Assignment, conditions: Conditions, strict: bool) -> bool:
    """Return whether clients train only on normal clips, and test on normal and anomalous clips.

    Args:
        tables: the assignment of clips.
        conditions: the column that marks anomalous clips.
        strict: whether every client needs both kinds in its test, instead of any client.
    """
    strange = np.isin(tables.texts(conditions.column, "data").astype(str), conditions.anomalous)
    both = np.all([tables.select(mine).sizes("client_test") > 0 for mine in (strange, ~strange)], axis=0)
    trained = not (tables.has_role("train") & strange).any() and (tables.sizes("train") > 1).all()
    return bool(trained and (both.all() if strict else both.any()))


def _tests(manifest: pa.Table) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield candidate test sets of the server, best first, with reasons."""
    for test, why in _candidate_tests(manifest):
        yield {"test": test}, why


def _candidate_tests(manifest: pa.Table) -> Iterator[tuple[dict[str, Any] | None, str]]:
    if "test" in manifest.column("split").to_pylist():
        yield {"by": "split"}, "the data set has an official split"
    groups = manifest.column("group")
    count = len(groups.drop_null().unique())
    if not groups.null_count and count >= _LEAST_GROUPS:
        for share in _SHARES:
            yield (
                {"by": "group", "fraction": share},
                f"whole groups are held out, {share:.0%} of {count:,}: the test measures accuracy for new users",
            )
    for column in _FOLDS:
        values = manifest.column(column).unique().to_pylist() if column in manifest.column_names else []
        if len(values) > 1 and None not in values:
            last = max(values)
            yield (
                {"by": column, "values": [last]},
                f"the data set has cross-validation folds: {column} {last} of {len(values)} is held out",
            )
    if "recording" in manifest.column_names and not manifest.column("recording").null_count:
        for share in _SHARES:
            yield (
                {"by": "recording", "fraction": share},
                f"whole recordings are held out, {share:.0%}, so no test recording has clips in training",
            )
    for share in _SHARES:
        yield {"by": "clip", "fraction": share}, f"{share:.0%} of every label's clips are held out"
    yield None, "no test set: a label has too few clips. Collect more before you trust a result"


def _partitions(manifest: pa.Table, skewed: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield candidate partitions, best first, with reasons.

    Args:
        manifest: the list of clips.
        skewed: whether to include partitions with skewed labels.
    """
    groups = manifest.column("group")
    if not groups.null_count and len(groups.unique()) > 1:
        yield {"by": "group"}, "every group becomes a client"
    most = int(np.clip(manifest.num_rows // _CLIPS_EACH, *_CLIENTS))
    why = "the clips have no owners" if groups.null_count == len(groups) else "the groups are not used"
    for clients in sorted({most, max(2, most // 2), 2}, reverse=True):
        dirichlet = {"by": "dirichlet", "clients": clients, "alpha": 0.5, "minimum": 2}
        if skewed:
            yield dirichlet, f"{why}: {clients} clients get skewed labels; alpha 100 makes them even"
        yield {"by": "iid", "clients": clients}, f"{why}: {clients} clients get clips evenly"


def _train(clients: int, clips: float) -> tuple[dict[str, Any], str]:
    """Return the training settings of the reference run with the most similar sizes, with its result."""
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
        f"settings of the most similar reference run, not tuned to these clips: {start.what}, {start.clients} clients with "
        f"{start.clips} clips, {start.cohort} per round, {start.rounds} rounds: {start.result}"
    )
