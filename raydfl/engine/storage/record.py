"""The record of a run: rows of (round, phase, client, split, metric, value, count, note) in Parquet files.

``rows/`` in a run directory holds one file per commit, named by the last round in it (``00000012.parquet``), and merged
files named by the first and last file that they replace (``00000001-00000100.parquet``). A file appears whole or not at
all, and a file whose name lies within the range of another one is its leftover and is not read: so a crash at any
moment loses no row and doubles none.

Before the footer of a file stands a checksum of all else in it, which other readers of Parquet pass over.
"""

from __future__ import annotations

import itertools
import operator
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydfl.core.errors import RunDirectoryError, first_line
from raydfl.core.files import RESUME, remove_parts, write_atomically, writing
from raydfl.core.metrics import pool, spread, summarise
from raydfl.core.types import Metrics, Ratio

SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("phase", pa.string()),
        ("client", pa.string()),
        ("split", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("count", pa.float64()),
        ("array", pa.list_(pa.float64())),
        ("shape", pa.list_(pa.int32())),
        ("note", pa.string()),
    ]
)
_SEAL = b"raydfl crc32"
"""Bytes before a file's checksum."""
_SEALED = {"raydfl.sealed": ""}
"""Metadata of a file that must have a checksum; older ones have none."""
_PLAIN = [name for name in SCHEMA.names if name not in ("array", "shape")]
_MERGE_ROWS = 1_000_000  # rows held in memory while files are merged, and of a row group of the merged file


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One number of the record, or one array (a confusion matrix)."""

    round: int
    """Rounds completed when it was measured; 0: before training."""
    phase: str
    """The method's name for the stage: ``"train"``, ``"evaluate"``, or a stage's name."""
    client: str
    """Empty: the server's, or pooled over the clients."""
    split: str
    """The data behind it: ``"train"``, ``"validation"`` and ``"client_test"`` (a client's own hold-outs), ``"test"`` (the common
    test data), ``"server_validation"``; or ``"server"``, for what the server counts (bytes, seconds, clients left out)."""
    metric: str
    """``"loss"``, ``"plugin/accuracy"``, ``"lpa/pruned/plugin/gru"``, ``"bytes_up"``, ``"seconds/fit"`` ..."""
    value: float
    """``total / count``, so the total is ``value * count``. NaN for an array."""
    count: float
    """Examples, or things, behind the value. For an array its sum."""
    array: np.ndarray | None = None
    """float64, any shape; ``None`` for a number."""
    note: str | None = None
    """In words what the number cannot say: why a client failed. ``None``: nothing."""


def rows_from_metrics(round_index: int, phase: str, client: str, split: str, metrics: Metrics) -> list[MetricRow]:
    """Return a row for every ratio; arrays for the server only (``client=""``): a client's add up to the pooled one."""
    rows = []
    for name, value in metrics.items():
        if isinstance(value, Ratio):
            rows.append(MetricRow(round_index, phase, client, split, name, value.value, value.count))
        elif isinstance(value, np.ndarray) and not client:
            array = np.asarray(value, np.float64)
            rows.append(MetricRow(round_index, phase, client, split, name, float("nan"), float(array.sum()), array))
    return rows


def rows_from_clients(round_index: int, phase: str, split: str, clients: Mapping[str, Metrics]) -> list[MetricRow]:
    """Return all rows of one measurement over clients: each client's, the pooled ones, and how the clients differ.

    Args:
        round_index: rounds completed.
        phase: of the method.
        split: the data that the metrics are of.
        clients: metrics by client id. They are added up in the order given, so give them in client order.
    """
    rows = []
    for client, metrics in clients.items():
        rows += rows_from_metrics(round_index, phase, client, split, summarise(metrics))
    pooled = pool(clients.values())
    everything = {**pooled, **summarise(pooled), **spread(clients.values())}
    return rows + rows_from_metrics(round_index, phase, "", split, everything)


def scores(rows: Iterable[MetricRow]) -> dict[str, float]:
    """Return the pooled numbers of evaluations, ``"test plugin/accuracy" -> 0.81``; of several rounds the last one's."""
    return {
        f"{row.split} {row.metric}": row.value
        for row in rows
        if row.phase == "evaluate" and not row.client and row.array is None
    }


def to_table(rows: Iterable[MetricRow]) -> pa.Table:
    """Return the rows as an Arrow table with :data:`SCHEMA`."""
    rows = list(rows)
    columns: dict[str, list[Any]] = {name: list(map(operator.attrgetter(name), rows)) for name in _PLAIN}
    columns["array"] = [None if row.array is None else row.array.ravel() for row in rows]
    columns["shape"] = [None if row.array is None else list(row.array.shape) for row in rows]
    return pa.table(columns, schema=SCHEMA)


def to_rows(table: pa.Table) -> list[MetricRow]:
    """Return the rows of a table that :func:`read_rows` returned."""
    rows = []
    for item in table.to_pylist():
        shape = item.pop("shape")
        if item["array"] is not None:
            item["array"] = np.array(item["array"], np.float64).reshape(shape)
        rows.append(MetricRow(**item))
    return rows


def rows_path(run_dir: Path, last_round: int) -> Path:
    """Return the file for the rows of the commit that ends with ``last_round``."""
    return run_dir / "rows" / f"{last_round:08d}.parquet"


def write_rows(path: Path, rows: Iterable[MetricRow]) -> None:
    """Write rows so that the file is there whole or not at all, also after a power cut; an existing file is replaced.

    Raises:
        ResourcesError: the disk is full.
        RunDirectoryError: the folder cannot be written to.
    """
    _write(path, [to_table(rows)], "snappy")  # half of zstd's time, and not for long: the files are merged


def _write(path: Path, tables: Iterable[pa.Table], compression: str = "zstd") -> None:
    """Write one row group a table: to a temporary name, to the disk, then to its name."""
    needed = 0

    def write(temporary: Path) -> None:
        nonlocal needed
        with (
            temporary.open("wb") as file,
            pq.ParquetWriter(file, SCHEMA.with_metadata(_SEALED), compression=compression) as writer,
        ):
            for table in tables:
                needed += table.nbytes
                writer.write_table(table.replace_schema_metadata(_SEALED))
        _seal(temporary)

    try:
        write_atomically(path, write)
    except OSError as error:
        with writing(path.parent, needed, f"the rows in {path.name}", RESUME):
            raise error from None


def _seal(path: Path) -> None:
    """Put a checksum between the data of a Parquet file, which are found from its beginning, and the footer, found from its end."""
    with path.open("r+b") as file:
        at = _footer(file)
        checksum = _checksum(file, [(0, at), (at, file.seek(0, os.SEEK_END))])
        file.seek(at)
        footer = file.read()
        file.seek(at)
        file.write(_SEAL + checksum.to_bytes(4, "little") + footer)


def _check_seal(path: Path) -> None:
    """Compare a file with its checksum; one of an older version has none.

    Raises:
        ValueError: they differ, or it is no Parquet file.
    """
    with path.open("rb") as file:
        at = _footer(file)
        seal = at - len(_SEAL) - 4
        if seal < 0:
            return
        file.seek(seal)
        found = file.read(len(_SEAL) + 4)
        if not found.startswith(_SEAL):
            if any(key.encode() in file.read() for key in _SEALED):
                raise ValueError("it has lost its checksum")
            return
        if _checksum(file, [(0, seal), (at, file.seek(0, os.SEEK_END))]) != int.from_bytes(found[-4:], "little"):
            raise ValueError("its checksum does not fit its content")


def _footer(file: IO[bytes]) -> int:
    """Return where the footer of a Parquet file begins: 4 bytes before the last 4 say how long it is."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    tail = file.read()
    at = end - 8 - int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or at < 4:
        raise ValueError("it does not end like one")
    return at


def _checksum(file: IO[bytes], parts: Sequence[tuple[int, int]]) -> int:
    """Return the crc32 of some ranges of a file."""
    checksum = 0
    for first, stop in parts:
        file.seek(first)
        left = stop - first
        while block := file.read(min(1 << 20, left)):
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
    return checksum


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    first: int
    last: int

    @property
    def merged(self) -> bool:
        return "-" in self.path.stem

    def within(self, other: _File) -> bool:
        return self != other and other.merged and other.first <= self.first and self.last <= other.last


def _all_files(run_dir: Path) -> list[_File]:
    """Every rows file by its first round, leftovers included; other names are none of ours."""
    files = []
    for path in (run_dir / "rows").glob("*.parquet"):
        match = re.fullmatch(r"(\d{8,})(?:-(\d{8,}))?", path.stem)
        if match:
            files.append(_File(path, int(match[1]), int(match[2] or match[1])))
    return sorted(files, key=lambda file: (file.first, file.last))


def _files(run_dir: Path) -> list[_File]:
    """Return the files that hold the record: leftovers of a merge left out."""
    files = _all_files(run_dir)
    return [file for file in files if not any(file.within(other) for other in files)]


def _read(file: _File, columns: Sequence[str], where: pc.Expression | None) -> pa.Table:
    try:
        _check_seal(file.path)
        # With the schema, a column that older versions did not write is null.
        return pq.read_table(file.path, columns=list(columns), filters=where, partitioning=None, schema=SCHEMA)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RunDirectoryError(
            f"{file.path} is not a readable Parquet file ({first_line(error)}); restore it from a copy, or move it away: "
            f"the rows of its rounds are then missing from reports, and nothing else"
        ) from error


def _where(file: _File, until_round: int | None, where: pc.Expression | None) -> pc.Expression | None:
    """``where``, and of a merged file that goes on beyond ``until_round`` only the rows up to there."""
    if until_round is None or file.last <= until_round:
        return where
    early = pc.field("round") <= until_round
    return early if where is None else where & early


def read_rows(
    run_dir: Path,
    until_round: int | None = None,
    *,
    where: pc.Expression | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return the record of a run, by rising rounds; empty when nothing is recorded yet. Safe while the run goes on.

    Args:
        run_dir: the run's folder.
        until_round: the last committed round: files of later commits are not read.
        where: keep only these rows, ``pc.field("client") == ""`` for instance; applied while reading, so that the rows
            of thousands of clients need not fit into memory.
        columns: of :data:`SCHEMA`; ``None``: all.

    Raises:
        RunDirectoryError: a file is damaged.
    """
    names = list(columns or SCHEMA.names)
    empty = pa.schema([SCHEMA.field(name) for name in names]).empty_table()
    for _ in range(3):
        try:
            tables = [
                _read(file, names, _where(file, until_round, where))
                for file in _files(run_dir)
                if until_round is None or file.last <= until_round or (file.merged and file.first <= until_round)
            ]
            return pa.concat_tables([empty, *tables])
        except FileNotFoundError:  # merged by the running run since the folder was listed
            continue
    raise RunDirectoryError(f"{run_dir / 'rows'} changes faster than it can be read; try again when the run has ended")


def unrecorded(recorded: Iterable[int], until_round: int) -> str:
    """Say which of the rounds 1 to ``until_round`` are not among those of the record, ``2, 5 to 9``; empty: all are.

    The server records something in every round.
    """
    missing = np.array(sorted(set(range(1, until_round + 1)).difference(recorded)))
    spans = np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else []
    return ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def compact(run_dir: Path, gather: int | None = None) -> Path | None:
    """Merge small files into one. A crash at any moment leaves every row readable exactly once.

    Only for committed rounds: call :func:`discard_rows` first when a run is resumed.

    Args:
        run_dir: the run's folder.
        gather: merge the files of single commits, and only when there are that many; ``None``: merge everything (at a
            run's end).

    Returns:
        The new file; ``None`` when there was nothing to merge.
    """
    files = _files(run_dir)
    if gather is not None:
        files = list(itertools.takewhile(lambda file: not file.merged, reversed(files)))[::-1]
    merged: Path | None = None
    if len(files) >= max(2, gather or 0):
        merged = run_dir / "rows" / f"{files[0].first:08d}-{files[-1].last:08d}.parquet"
        _write(merged, _row_groups(files))
    everything = _all_files(run_dir)
    for file in everything:  # those just merged, and what a crash left of an earlier merge
        if any(file.within(other) for other in everything):
            file.path.unlink(missing_ok=True)
    return merged


def _row_groups(files: Iterable[_File], where: pc.Expression | None = None) -> Iterator[pa.Table]:
    """Yield the rows of the files in tables of some ``_MERGE_ROWS``."""
    waiting: list[pa.Table] = []
    for file in files:
        waiting.append(_read(file, SCHEMA.names, where))
        if sum(table.num_rows for table in waiting) >= _MERGE_ROWS:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def discard_rows(run_dir: Path, after_round: int) -> None:
    """Remove what was recorded of rounds after ``after_round``, which a run that resumes from there will do again.

    Also removes unfinished temporary files of an earlier process.
    """
    for file in _all_files(run_dir):
        if file.last <= after_round:
            continue
        if file.first <= after_round:  # a merged file: keep its beginning, which counts once the whole is gone
            shorter = file.path.with_name(f"{file.first:08d}-{after_round:08d}.parquet")
            _write(shorter, _row_groups([file], pc.field("round") <= after_round))
        file.path.unlink()
    remove_parts(run_dir / "rows")


def influences(run_dir: Path, until_round: int | None = None) -> dict[int, dict[str, float]]:
    """Return what the rule left of each client's update, 0 (left out) to 1 (as in a plain mean), by round and client id.

    A round records one array in the order of its updates; whose they are is said by the clients' own rows of that round.

    Args:
        run_dir: the run's folder.
        until_round: the last committed round: see :func:`raydfl.engine.storage.record.read_rows`.

    Returns:
        Empty where the rule does not judge clients as a whole (the means, the median, the trimmed mean).

    Raises:
        RunDirectoryError: a file of the record is damaged, or clients' rows are missing.
    """
    recorded = read_rows(
        run_dir, until_round, where=pc.field("metric") == "rule/influences", columns=("round", "array")
    ).to_pylist()
    clients: dict[int, dict[str, None]] = {}
    trained = (pc.field("split") == "train") & (pc.field("phase") == "train") & (pc.field("client") != "")
    if recorded:
        for row in read_rows(run_dir, until_round, where=trained, columns=("round", "client")).to_pylist():
            clients.setdefault(row["round"], {})[row["client"]] = None
    found: dict[int, dict[str, float]] = {}
    for row in recorded:
        ids = list(clients.get(row["round"], ()))
        if len(ids) != len(row["array"]):
            raise RunDirectoryError(
                f"{run_dir}: round {row['round']} has influences of {len(row['array'])} updates, but rows of {len(ids)} clients; "
                f"the method has to return metrics for each client, or the record is not whole"
            )
        found[row["round"]] = dict(zip(ids, row["array"], strict=True))
    return found
