"""Descriptions of a data set, and of what a configuration makes of it, in lines of text; no recording is opened."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import options_of
from raydfl.data import (
    STEPS,
    Assignment,
    DataSettings,
    PartitionSettings,
    Poisoner,
    TableSettings,
    assign_clips,
    find_dataset,
    list_clips,
    natural_order,
    remarks_of,
    sizes_text,
)

_WIDTH = 110
_LABEL = 18
_MOST_NAMES = 60
"""Classes and groups that are listed one by one."""
_MOST_ROWS = 20
"""Rows of a table that are written."""
_HIDDEN = ("path", "seconds", "by_id")
"""Columns of tables that are not written."""
_KEPT = "\u00a0"
"""A space at which no line is broken."""
_STANDARD = ("clip", "path", "label", "group", "split", "seconds")


def describe_dataset(name: str) -> list[str]:
    """Describe a data set without opening it: what it is, its layout and licence, its options.

    Args:
        name: a built-in set, or ``my_file.py:Class``.

    Raises:
        ConfigError: there is none; the nearest name is given.
    """
    cls = find_dataset(name)
    card = cls.card
    lines = [f"{name}: {card.title}"]
    classes = "as many as the recordings have" if card.classes is None else f"{card.classes} by default"
    facts = {"layout": card.layout, "licence": card.licence, "source": card.url, "classes": classes}
    for label, text in facts.items():
        lines += _entry(label, text) if text else []
    lines += ["", "options, in the group data of a configuration:"]
    for option in options_of(cls):
        default = "(required)" if option.required else f"= {json.dumps(option.default)}"
        lines += textwrap.wrap(
            f"{option.name} {default}: {option.meaning}", _WIDTH, initial_indent="  ", subsequent_indent="      "
        )
    required = "".join(f", {option.name}: ..." for option in options_of(cls) if option.required)
    return [*lines, "", f"for instance: data: {{name: {name}{required}}}"]


def describe_data(data: DataSettings, seed: int, labels_needed: bool = True) -> Iterator[str]:
    """Describe the configured recordings and which client gets which, from their list alone: no clip is read.

    Args:
        data: the configuration.
        seed: the run's: it decides split and partition.
        labels_needed: whether each class has to be learnt, so that one without training clips is a mistake.

    Raises:
        DataError: the recordings are not there; or, after the lines about them, the split or the partition cannot be had.
    """
    manifest, classes = list_clips(data, seed)
    dataset = data.source.open()
    yield f"{data.name}: {dataset.card.title}"
    root = getattr(dataset, "root", None)
    if root is not None:
        yield from _entry("root", str(root))
    yield from _entry("clips", f"{manifest.num_rows:,}")
    yield from _entry("length", _length(manifest))
    yield from _entry(f"classes ({len(classes):,})", _counts(manifest, "label", classes))
    without = manifest.column("label").null_count
    if without:
        yield from _entry("without a label", f"{without:,} clips")
    yield from _entry(*_groups(manifest))
    if "condition" in manifest.column_names:
        yield from _entry("conditions", _conditions(manifest))
    yield from _entry("official split", _counts(manifest, "split", ("train", "validation", "test")) or "none")
    extra = [name for name in manifest.column_names if name not in _STANDARD]
    if extra:
        yield from _entry("other columns", ", ".join(extra))
    yield from remarks_of(manifest)
    tables = assign_clips(manifest, classes, data, seed, labels_needed, last="hold_out")
    yield ""
    if data.sites:
        yield f"Without its sites; each of them ({', '.join(data.sites)}) divides clips of its own:"
    else:
        yield "With this configuration:"
    yield from _entry(f"clients ({len(tables.ids):,})", _clients(tables, data.partition))
    if len(tables.pools) > 1:
        pool = tables.codes("pool")
        yield from _entry("pools", ", ".join(f"{name} ({(pool == n).sum():,})" for n, name in enumerate(tables.pools)))
    yield from _entry("test set", _count_server(tables, "test"))
    if tables.has_role("server_validation").any():
        yield from _entry("server validation", _count_server(tables, "server_validation"))
    left_out = manifest.num_rows - len(np.unique(tables.codes("clip")))
    if left_out:
        yield from _entry("left out", f"{left_out:,} clips")
    yield ""
    yield "Clips that cannot be read are found by: raydfl data prepare FILE"


def describe_step(data: DataSettings, seed: int, step: str, attack: Poisoner | None) -> Iterator[str]:
    """Describe the tables of clips and clients after a step.

    Args:
        step: one of ``STEPS``.
        attack: the attack of the configuration.

    Raises:
        ConfigError: there is no such step.
        DataError: the step, or one before it, does not fit the clips.
    """
    if step not in STEPS:
        raise ConfigError(f"--step {step}: there is no such step; {nearest(step, STEPS)}")
    if step == "list":
        data = data.model_copy(update={"leave_out": (), "ungrouped": "keep", "tables": TableSettings()})
    manifest, classes = list_clips(data, seed)
    tables = assign_clips(manifest, classes, data, seed, False, attack=attack, last=step)
    for name, table in (("clips", tables.clips), ("clients", tables.clients)):
        if table.num_rows:
            yield f"{name} after the step {step}, {table.num_rows:,} rows"
            yield from _draw_table(table)
    yield from tables.messages


def _draw_table(table: pa.RecordBatch) -> Iterator[str]:
    """Write the first rows of a table as text."""
    shown = table.slice(0, _MOST_ROWS)
    columns = {name: shown.column(name).to_pylist() for name in table.schema.names if name not in _HIDDEN}
    texts = [[name, *("" if value is None else str(value) for value in values)] for name, values in columns.items()]
    widths = [max(map(len, column)) for column in texts]
    for row in zip(*texts, strict=True):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if table.num_rows > _MOST_ROWS:
        yield f"... and {table.num_rows - _MOST_ROWS:,} more"


def _entry(label: str, text: str) -> list[str]:
    """``label    text``, the text wrapped beside its label."""
    start, other = f"  {label:<{_LABEL}}", " " * (_LABEL + 2)
    lines = textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=other, break_on_hyphens=False)
    return [line.replace(_KEPT, " ") for line in lines]


def _length(manifest: pa.Table) -> str:
    seconds = manifest.column("seconds").drop_null().to_numpy()
    if not len(seconds):
        return "not in the list; raydfl data prepare reads it"
    of = "" if len(seconds) == manifest.num_rows else f", known of {len(seconds):,} clips"
    total = f"{seconds.sum() / 3600:.1f} h" if seconds.sum() >= 3600 else f"{seconds.sum() / 60:.1f} min"
    if seconds.min() == seconds.max():
        return f"{seconds.min():.2f} s each, {total} in all{of}"
    return f"{seconds.min():.2f} to {seconds.max():.2f} s, median {np.median(seconds):.2f} s, {total} in all{of}"


def _occurrences(manifest: pa.Table, column: str) -> Mapping[str, int]:
    """Count how often each value of a column occurs; clips without one do not count."""
    pairs = manifest.column(column).drop_null().value_counts().to_pylist()
    return {pair["values"]: pair["counts"] for pair in pairs}


def _counts(manifest: pa.Table, column: str, order: Sequence[str]) -> str:
    """``yes (300), no (295)``; of many values only how much they differ."""
    occurrences = _occurrences(manifest, column)
    if len(occurrences) <= _MOST_NAMES:
        shown = (f"{name} ({occurrences[name]:,})" for name in order if name in occurrences)
        return ", ".join(text.replace(" ", _KEPT) for text in shown)
    return sizes_text(np.array(list(occurrences.values())))


def _groups(manifest: pa.Table) -> tuple[str, str]:
    """Label and text of the line about groups."""
    occurrences = _occurrences(manifest, "group")
    if not occurrences:
        return "groups (0)", "the list does not say whose clips they are"
    without = manifest.column("group").null_count
    text = _counts(manifest, "group", natural_order(list(occurrences)))
    return f"groups ({len(occurrences):,})", text + (f"; {without:,} clips have no group" if without else "")


def _conditions(manifest: pa.Table) -> str:
    """``fan_00: 60 normal, 20 anomaly; fan_01: ...``; of many groups, or of none, only all clips."""
    table = manifest.select(["group", "condition"])
    if not 0 < len(_occurrences(manifest, "group")) <= _MOST_NAMES:
        return _counts(manifest, "condition", natural_order(list(_occurrences(manifest, "condition"))))
    counted: dict[str, list[str]] = {}
    for row in table.group_by(["group", "condition"]).aggregate([([], "count_all")]).to_pylist():
        counted.setdefault(str(row["group"]), []).append(f"{row['count_all']:,} {row['condition']}")
    of_groups = (f"{name}: {', '.join(sorted(counted[name], key=_condition))}" for name in natural_order(list(counted)))
    return "; ".join(text.replace(" ", _KEPT) for text in of_groups)


def _condition(count: str) -> tuple[bool, str]:
    """Sort key: normal clips first."""
    name = count.partition(" ")[2]
    return name != "normal", name


def _clients(tables: Assignment, settings: PartitionSettings) -> str:
    sizes = tables.sizes()
    how = f"by {settings.column or 'group'}" if settings.by == "group" else settings.by
    how += f", {settings.shards} shards each" if settings.shards > 1 else ""
    own = ""
    for role, name in (("validation", "validation"), ("client_test", "tests")):
        held_out = tables.has_role(role).sum()
        own += f"; {held_out:,} of them for the clients' own {name}" if held_out else ""
    return f"{how}: {sizes_text(sizes)}, {sizes.sum():,} in all{own}"


def _count_server(tables: Assignment, role: str) -> str:
    """Count the server's clips of a role, and their classes."""
    labels = tables.codes("label")[tables.has_role(role)]
    if not len(labels):
        return "none"
    return f"{len(labels):,} clips of {len(np.unique(labels))} of the {len(tables.classes)} classes"
