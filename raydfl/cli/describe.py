"""Text descriptions of data sets and of their clips and clients in a configuration. Only headers of recordings are read."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raydfl.cli.explain import explain_class
from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.core.options import options_of
from raydfl.data import (
    STEPS,
    Assignment,
    DataSettings,
    PartitionSettings,
    Poisoner,
    TableSettings,
    assign_clips,
    audio_seconds,
    describe_sizes,
    find_dataset,
    list_clips,
    natural_order,
    read_remarks,
    split_events,
    split_sequences,
)

_WIDTH = 110
_LABEL = 18
_MOST_NAMES = 60
"""Largest number of classes or groups to list by name."""
_MOST_ROWS = 20
"""Largest number of table rows to print."""
_SAMPLED = 200
"""Largest number of files whose headers are read for their lengths."""
_BALANCE = ((1.5, "even"), (3, "slightly uneven"), (10, "uneven"), (float("inf"), "very uneven"))
"""Words for the largest class divided by the smallest, by their limits."""
_HIDDEN = ("path", "seconds", "by_id")
"""Table columns to omit."""
_NO_BREAK = "\u00a0"
"""No-break space, at which textwrap breaks no line."""
_STANDARD = ("clip", "path", "label", "group", "split", "seconds")


def describe_dataset(name: str) -> list[str]:
    """Describe a data set's layout, licence, content and options without opening it.

    Args:
        name: a built-in data set, or ``my_file.py:Class``.

    Raises:
        ConfigError: the name is unknown. The message suggests the nearest one.
    """
    cls = find_dataset(name)
    card = cls.card
    lines = [f"{name}: {card.title}"]
    classes = "as in the recordings" if card.classes is None else f"{card.classes} by default"
    facts = {"layout": card.layout, "licence": card.licence, "source": card.url, "classes": classes}
    for label, text in facts.items():
        lines += _format_entry(label, text) if text else []
    lines += ["", *explain_class(cls).splitlines()]
    lines += ["", "Options in the group `data` of a configuration:"]
    for option in options_of(cls):
        default = "(required)" if option.required else f"= {json.dumps(option.default)}"
        lines += textwrap.wrap(
            f"{option.name} {default}: {option.meaning}", _WIDTH, initial_indent="  ", subsequent_indent="      "
        )
    required = "".join(f", {option.name}: PATH" for option in options_of(cls) if option.required)
    return [*lines, "", f"next: raydfl data info jobs/tiny.yaml data='{{name: {name}{required}}}'"]


def describe_data(data: DataSettings, seed: int, labels_needed: bool = True) -> Iterator[str]:
    """Describe the recordings and clients of a configuration from the list of clips and from headers of files.

    Args:
        data: the data settings.
        seed: seed of the run, which determines split and partition.
        labels_needed: whether every class needs training clips.

    Raises:
        DataError: the recordings are missing. After the lines about the recordings: the split or the partition is impossible.
    """
    manifest, classes = list_clips(data, seed)
    dataset = data.source.open()
    yield f"{data.name}: {dataset.card.title}"
    root = getattr(dataset, "root", None)
    if root is not None:
        yield from _format_entry("root", str(root))
    yield from _format_entry("clips", f"{manifest.num_rows:,}")
    yield from _format_entry("length", _describe_length(manifest))
    yield from _describe_labels(manifest, classes, data)
    without = manifest.column("label").null_count
    if without:
        yield from _format_entry("without a label", f"{without:,} clips")
    yield from _format_entry(*_describe_groups(manifest))
    if "condition" in manifest.column_names:
        yield from _format_entry("conditions", _conditions(manifest))
    yield from _format_entry(
        "official split", _format_counts(manifest, "split", ("train", "validation", "test")) or "none"
    )
    extra = [name for name in manifest.column_names if name not in _STANDARD]
    if extra:
        yield from _format_entry("other columns", ", ".join(extra))
    yield from read_remarks(manifest)
    tables = assign_clips(manifest, classes, data, seed, labels_needed, last="hold_out")
    yield ""
    if data.sites:
        yield f"Without the sites ({', '.join(data.sites)}), which divide their own clips:"
    else:
        yield "With this configuration:"
    yield from _format_entry(f"clients ({len(tables.ids):,})", _describe_clients(tables, data.partition))
    if len(tables.pools) > 1:
        pool = tables.codes("pool")
        yield from _format_entry(
            "pools", ", ".join(f"{name} ({(pool == n).sum():,})" for n, name in enumerate(tables.pools))
        )
    yield from _format_entry("test set", _count_server(tables, "test"))
    if tables.has_role("server_validation").any():
        yield from _format_entry("server validation", _count_server(tables, "server_validation"))
    left_out = manifest.num_rows - len(np.unique(tables.codes("clip")))
    if left_out:
        yield from _format_entry("left out", f"{left_out:,} clips")
    yield ""
    yield "To find unreadable clips: raydfl data prepare FILE"


def describe_step(data: DataSettings, seed: int, step: str, attack: Poisoner | None) -> Iterator[str]:
    """Describe the tables of clips and clients after a preparation step.

    Args:
        step: one of ``STEPS``.
        attack: the attack of the configuration.

    Raises:
        ConfigError: the step is unknown.
        DataError: the step or an earlier step does not fit the clips.
    """
    if step not in STEPS:
        raise ConfigError(f"--step {step}: unknown step. {nearest(step, STEPS)}")
    if step == "list":
        data = data.model_copy(update={"leave_out": (), "ungrouped": "keep", "tables": TableSettings()})
    manifest, classes = list_clips(data, seed)
    tables = assign_clips(manifest, classes, data, seed, False, attack=attack, last=step)
    for name, table in (("clips", tables.clips), ("clients", tables.clients)):
        if table.num_rows:
            yield f"{name} after step {step}, {table.num_rows:,} rows"
            yield from _format_table(table)
    yield from tables.messages


def _format_table(table: pa.RecordBatch) -> Iterator[str]:
    """Yield the first rows of a table as aligned text."""
    shown = table.slice(0, _MOST_ROWS)
    columns = {name: shown.column(name).to_pylist() for name in table.schema.names if name not in _HIDDEN}
    texts = [[name, *("" if value is None else str(value) for value in values)] for name, values in columns.items()]
    widths = [max(map(len, column)) for column in texts]
    for row in zip(*texts, strict=True):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if table.num_rows > _MOST_ROWS:
        yield f"... and {table.num_rows - _MOST_ROWS:,} more"


def _format_entry(label: str, text: str) -> list[str]:
    """Format ``label    text``, wrapped in a column beside the label."""
    start, other = f"  {label:<{_LABEL}}", " " * (_LABEL + 2)
    lines = textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=other, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _describe_labels(manifest: pa.Table, classes: Sequence[str], data: DataSettings) -> Iterator[str]:
    """Describe the classes and their balance, or the transcripts and their units."""
    if data.events is not None:
        names, events = split_events(classes)
        yield from _format_entry(f"classes ({len(names):,})", ", ".join(names))
        rows = dict(zip(classes, events, strict=True))
        listed = np.stack([rows[label] for label in manifest.column("label").to_pylist()])
        present = listed[:, :, 2] >= 0
        timed = present & np.isfinite(listed[:, :, 0])
        clips = f"{timed.any(axis=1).sum():,} of {present.any(axis=1).sum():,} clips with events"
        yield from _format_entry("events", f"{timed.sum():,} with times, in {clips}")
        return
    if data.label_sequences is None:
        yield from _format_entry(f"classes ({len(classes):,})", _format_counts(manifest, "label", classes))
        yield from _format_entry("balance", _describe_balance(manifest))
        return
    units, _ = split_sequences(classes, data.label_sequences)
    shown = [repr(unit).replace(" ", _NO_BREAK) for unit in units[:_MOST_NAMES]]
    yield from _format_entry("transcripts", f"{len(classes):,} different")
    more = ", ..." if len(units) > len(shown) else ""
    yield from _format_entry(f"{data.label_sequences.units} ({len(units):,})", ", ".join(shown) + more)


def _describe_length(manifest: pa.Table) -> str:
    seconds = manifest.column("seconds").drop_null().to_numpy()
    if not len(seconds):
        return _sample_length(manifest)
    known = "" if len(seconds) == manifest.num_rows else f", known for {len(seconds):,} clips"
    total = f"{seconds.sum() / 3600:.1f} h" if seconds.sum() >= 3600 else f"{seconds.sum() / 60:.1f} min"
    if seconds.min() == seconds.max():
        return f"{seconds.min():.2f} s each, {total} in all{known}"
    return f"{seconds.min():.2f} to {seconds.max():.2f} s, median {np.median(seconds):.2f} s, {total} in all{known}"


def _sample_length(manifest: pa.Table) -> str:
    """Describe the lengths of evenly spaced clips, from the headers of their files."""
    unknown = "unknown; raydfl data prepare reads it from the clips"
    if {"start", "stop"} & {*manifest.column_names}:
        return unknown
    paths = [path for path in manifest.column("path").to_pylist() if path is not None]
    chosen: Any = np.unique(np.linspace(0, len(paths) - 1, _SAMPLED).astype(int)) if paths else []
    seconds = []
    for index in chosen:
        with contextlib.suppress(DataError):  # archives, URIs, images and videos have no such header
            seconds.append(audio_seconds(paths[index]))
    if not seconds:
        return unknown
    spread = f"{min(seconds):.2f} to {max(seconds):.2f} s, median {np.median(seconds):.2f} s"
    return f"{spread}, in a sample of {len(seconds):,} clips"


def _describe_balance(manifest: pa.Table) -> str:
    """Compare the largest with the smallest class."""
    counts = _count_values(manifest, "label")
    if len(counts) < 2:
        return "a single class" if counts else "no clip has a label"
    largest, smallest = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    ratio = counts[largest] / counts[smallest]
    word = next(word for limit, word in _BALANCE if ratio <= limit)
    share = counts[largest] / sum(counts.values())
    if ratio == 1:
        return (
            f"{word}: each class has {counts[largest]:,} clips; a constant answer is right for {share:.0%} of the clips"
        )
    return (
        f"{word}: {largest} has {counts[largest]:,} clips, {smallest} has {counts[smallest]:,}; "
        f"always answering {largest!r} is right for {share:.0%} of the clips"
    )


def _count_values(manifest: pa.Table, column: str) -> Mapping[str, int]:
    """Count the clips of each value of a column, ignoring nulls."""
    pairs = manifest.column(column).drop_null().value_counts().to_pylist()
    return {pair["values"]: pair["counts"] for pair in pairs}


def _format_counts(manifest: pa.Table, column: str, order: Sequence[str]) -> str:
    """Format ``yes (300), no (295)``, or a summary of the counts if there are many values."""
    occurrences = _count_values(manifest, column)
    if len(occurrences) <= _MOST_NAMES:
        shown = (f"{name} ({occurrences[name]:,})" for name in order if name in occurrences)
        return ", ".join(text.replace(" ", _NO_BREAK) for text in shown)
    return describe_sizes(np.array(list(occurrences.values())))


def _describe_groups(manifest: pa.Table) -> tuple[str, str]:
    """Return label and text of the line about groups."""
    occurrences = _count_values(manifest, "group")
    if not occurrences:
        return "groups (0)", "the clips have no known owners"
    without = manifest.column("group").null_count
    text = _format_counts(manifest, "group", natural_order(list(occurrences)))
    return f"groups ({len(occurrences):,})", text + (f"; {without:,} clips have no group" if without else "")


def _conditions(manifest: pa.Table) -> str:
    """Format ``fan_00: 60 normal, 20 anomaly; fan_01: ...``, or totals if the groups are many or absent."""
    table = manifest.select(["group", "condition"])
    if not 0 < len(_count_values(manifest, "group")) <= _MOST_NAMES:
        return _format_counts(manifest, "condition", natural_order(list(_count_values(manifest, "condition"))))
    counts: dict[str, list[str]] = {}
    for row in table.group_by(["group", "condition"]).aggregate([([], "count_all")]).to_pylist():
        counts.setdefault(str(row["group"]), []).append(f"{row['count_all']:,} {row['condition']}")
    texts = (f"{name}: {', '.join(sorted(counts[name], key=_condition_order))}" for name in natural_order(list(counts)))
    return "; ".join(text.replace(" ", _NO_BREAK) for text in texts)


def _condition_order(count: str) -> tuple[bool, str]:
    """Return the sort key of a condition's count. Normal clips come first."""
    name = count.partition(" ")[2]
    return name != "normal", name


def _describe_clients(tables: Assignment, settings: PartitionSettings) -> str:
    sizes = tables.sizes()
    how = f"by {settings.column or 'group'}" if settings.by == "group" else settings.by
    how += f", {settings.shards} shards each" if settings.shards > 1 else ""
    own = ""
    for role, name in (("validation", "validation"), ("client_test", "tests")):
        held_out = tables.has_role(role).sum()
        own += f"; {held_out:,} of them for the clients' own {name}" if held_out else ""
    return f"{how}: {describe_sizes(sizes)}, {sizes.sum():,} in all{own}"


def _count_server(tables: Assignment, role: str) -> str:
    """Count the server's clips with a role, and their classes."""
    labels = tables.codes("label")[tables.has_role(role)]
    if not len(labels):
        return "none"
    kind = "classes" if tables.strata == "label" else "labels"
    return f"{len(labels):,} clips of {len(np.unique(labels))} of the {len(tables.classes)} {kind}"
