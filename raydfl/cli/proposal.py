"""Proposals for a first run: a split and a partition that fit the clips, and rounds by passes over the clips."""

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

from raydfl.cli.owners import ANOMALOUS, LEAST_GROUPS, NORMAL, propose_owners, propose_ungrouped
from raydfl.core.errors import DataError, InputError
from raydfl.core.yaml import to_yaml
from raydfl.data import (
    Assignment,
    assign_clips,
    describe_sizes,
    list_clips,
)
from raydfl.engine import Config, apply_values, make_config

_WIDTH = 110
_FOLDS = ("fold", "session")
"""Columns with the publisher's cross-validation folds."""
_OFFICIAL = {"test": {"by": "split"}}
_NORMAL_SHARES = (0.25, 0.5)
"""Fractions of a machine's normal clips to hold out for its test set."""
_SHARES = (0.2, 0.3, 0.5)
_CLIPS_EACH = 20
"""Training clips of each client if clips have no owners. ``_CLIENTS`` limits the number of clients."""
_CLIENTS = (2, 50)
_PASSES = 50
"""Passes over the training clips of a first run (docs/data.md#recommended-settings)."""
_LR = 0.003
"""Learning rate of Adam."""
_SMALL_COHORT = 10
"""Smallest cohort, if there are as many clients. Otherwise the cohort is a fifth of the clients."""
_FEW_CLIPS = 40
"""Clients with fewer clips train two epochs per round in batches of 4."""


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
        yield f"next: add clips, then repeat: {format_command('data info', given)}"
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
    yield " \\\n    ".join([f"  {format_command('run', given)}", *overrides])


def format_command(command: str, given: Sequence[str]) -> str:
    """Return a command of raydfl with the user's arguments, quoted for a shell."""
    return f"raydfl {command} {' '.join(map(shlex.quote, given))}"


def find_proposal(config: Config) -> Proposal | None:
    """Return a split and a partition that fit the clips, or ``None`` if nothing fits."""
    values = config.model_dump(mode="json")

    def configure(settings: Mapping[str, Any]) -> Config:
        return make_config(apply_values(values, settings), "the proposal")

    settings: dict[str, Any] = {}
    reasons: list[str] = []
    manifest, classes = list_clips(config.data, config.run.seed)
    for choose in (propose_owners, propose_ungrouped):
        chosen, why = choose(config.data, manifest)
        settings, reasons = settings | chosen, [*reasons, *filter(None, [why])]
        if chosen:
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
    tests = [*(_suggest_tests(manifest) if conditions is None else _suggest_machine_tests(manifest, conditions))]
    for kept, strict, (test, why_test), (partition, why_partition) in itertools.product(
        [configured, {}] if configured else [{}],
        (True, False),
        tests,
        _suggest_partitions(manifest, skewed=conditions is None),
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


def _conditions(config: Config, manifest: pa.Table) -> Conditions | None:
    """Find normal and anomalous clips by the objective or by the names of labels."""
    objective = config.components.method.objective
    detects, named = objective.answers == "score", getattr(objective, "normal", ())
    if detects and named:
        labels = manifest.column("label").drop_null().unique().to_pylist()
        return Conditions("label", [label for label in labels if label not in named], {})
    for column in ("label", "condition"):
        values = manifest.column(column).drop_null().unique().to_pylist() if column in manifest.column_names else []
        normal, anomalous = ([v for v in values if kind.match(str(v))] for kind in (NORMAL, ANOMALOUS))
        if not normal or not anomalous or len(normal) + len(anomalous) < len(values):
            continue
        if column == "label" and detects and hasattr(objective, "normal"):
            return Conditions(column, anomalous, {**(config.objective or {}), "normal": normal})
        if column == "label" and objective.answers == "class":
            name = "compact" if config.data.features.kind == "image" else "reconstruct"
            return Conditions(column, anomalous, {"name": name, "normal": normal})
        return Conditions(column, anomalous, {})
    return None


def _suggest_machine_tests(manifest: pa.Table, conditions: Conditions) -> Iterator[tuple[dict[str, Any], str]]:
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


def _suggest_tests(manifest: pa.Table) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield candidate test sets of the server, best first, with reasons."""
    for test, why in _list_candidate_tests(manifest):
        yield {"test": test}, why


def _list_candidate_tests(manifest: pa.Table) -> Iterator[tuple[dict[str, Any] | None, str]]:
    if "test" in manifest.column("split").to_pylist():
        yield {"by": "split"}, "the data set has an official split"
    groups = manifest.column("group")
    count = len(groups.drop_null().unique())
    if not groups.null_count and count >= LEAST_GROUPS:
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


def _suggest_partitions(manifest: pa.Table, skewed: bool) -> Iterator[tuple[dict[str, Any], str]]:
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
    """Return training settings for about 50 passes over the training clips.

    Args:
        clients: the number of clients.
        clips: the median number of clips of a client.
    """
    cohort = min(clients, max(_SMALL_COHORT, round(clients / 5)))
    local_epochs, batch_size = (2, 4) if clips < _FEW_CLIPS else (1, 16)
    rounds = math.ceil(_PASSES * clients / (cohort * local_epochs))
    train = {
        "rounds": rounds,
        "cohort": cohort,
        "local_epochs": local_epochs,
        "batch_size": batch_size,
        "optimiser": {"name": "adam", "lr": _LR},
    }
    return train, (
        f"{rounds} rounds of {cohort} of {clients} clients make about {_PASSES} passes over the training clips. "
        f"The settings are not tuned to these clips"
    )
