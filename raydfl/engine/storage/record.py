"""Metrics table of a run: rows of (round, phase, client, split, metric, value, count, note) in Parquet files.

``rows/`` in a run directory holds one file per commit, named after its last round (``00000012.parquet``), and merged files,
named after their first and last round (``00000001-00000100.parquet``). Files are written atomically. Readers skip a file
within the range of a merged file, so a crash at any moment neither loses nor duplicates a row.

Each file has a checksum before its footer. Other Parquet readers ignore it.
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

from raydfl.core.errors import RunDirectoryError, first_line, translate_failures
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
"""Marker in front of a file's checksum."""
_SEALED = {"raydfl.sealed": ""}
"""Metadata of files with a checksum. Files of older versions have neither."""
_PLAIN = [name for name in SCHEMA.names if name not in ("array", "shape")]
_MERGE_ROWS = 1_000_000  # rows of a row group in a merged file, which limits memory during a merge


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A row of the metrics table: a value, or an array such as a confusion matrix."""

    round: int
    """Completed rounds at the time of measurement; 0: before training."""
    phase: str
    """``"train"``, ``"evaluate"``, or the name of a method's phase."""
    client: str
    """Client id; empty: measured by the server, or pooled over clients."""
    split: str
    """Data split: ``"train"``, ``"validation"`` and ``"client_test"`` (a client's held-out clips), ``"test"`` (the server's test
    data), ``"server_validation"``, or ``"server"`` for counters of the server (bytes, seconds, dropped clients)."""
    metric: str
    """``"loss"``, ``"plugin/accuracy"``, ``"lpa/pruned/plugin/gru"``, ``"bytes_up"``, ``"seconds/fit"`` ..."""
    value: float
    """``total / count``; NaN for an array."""
    count: float
    """Number of examples behind the value; for an array, its sum."""
    array: np.ndarray | None = None
    """float64, any shape; ``None`` for a value."""
    note: str | None = None
    """Explanation of the value, such as the reason of a client's failure."""


def rows_from_metrics(round_index: int, phase: str, client: str, split: str, metrics: Metrics) -> list[MetricRow]:
    """Convert metrics to rows. Arrays are kept only for the server (``client=""``), because clients' arrays sum to its array."""
    rows = []
    for name, value in metrics.items():
        if isinstance(value, Ratio):
            rows.append(MetricRow(round_index, phase, client, split, name, value.value, value.count))
        elif isinstance(value, np.ndarray) and not client:
            array = np.asarray(value, np.float64)
            rows.append(MetricRow(round_index, phase, client, split, name, float("nan"), float(array.sum()), array))
    return rows


def rows_from_clients(round_index: int, phase: str, split: str, clients: Mapping[str, Metrics]) -> list[MetricRow]:
    """Convert a measurement over clients to rows: each client's metrics, pooled metrics and the spread over clients.

    Args:
        round_index: Completed rounds.
        phase: Phase of the method.
        split: Data split of the metrics.
        clients: Metrics by client id, in client order. The order determines the last bits of the sums.
    """
    rows, summaries = [], {client: summarise(metrics) for client, metrics in clients.items()}
    for client, summary in summaries.items():
        rows += rows_from_metrics(round_index, phase, client, split, summary)
    pooled = pool(clients.values())
    everything = {**pooled, **summarise(pooled), **spread(summaries.values())}
    return rows + rows_from_metrics(round_index, phase, "", split, everything)


def scores(rows: Iterable[MetricRow]) -> dict[str, float]:
    """Return the pooled scores of the last evaluation, such as ``"test plugin/accuracy" -> 0.81``."""
    return {
        f"{row.split} {row.metric}": row.value
        for row in rows
        if row.phase == "evaluate" and not row.client and row.array is None
    }


def to_table(rows: Iterable[MetricRow]) -> pa.Table:
    """Convert rows to an Arrow table with :data:`SCHEMA`."""
    rows = list(rows)
    columns: dict[str, list[Any]] = {name: list(map(operator.attrgetter(name), rows)) for name in _PLAIN}
    columns["array"] = [None if row.array is None else row.array.ravel() for row in rows]
    columns["shape"] = [None if row.array is None else list(row.array.shape) for row in rows]
    return pa.table(columns, schema=SCHEMA)


def to_rows(table: pa.Table) -> list[MetricRow]:
    """Convert a table of :func:`read_rows` to rows."""
    rows = []
    for item in table.to_pylist():
        shape = item.pop("shape")
        if item["array"] is not None:
            item["array"] = np.array(item["array"], np.float64).reshape(shape)
        rows.append(MetricRow(**item))
    return rows


def rows_path(run_dir: Path, last_round: int) -> Path:
    """Return the file of a commit's rows."""
    return run_dir / "rows" / f"{last_round:08d}.parquet"


def write_rows(path: Path, rows: Iterable[MetricRow]) -> None:
    """Write rows atomically and durably, replacing an existing file.

    Raises:
        ResourcesError: The disk is full.
        RunDirectoryError: The folder is not writable.
    """
    _write(path, [to_table(rows)], "snappy")  # takes half of zstd's time, and a merge recompresses the rows soon


def _write(path: Path, tables: Iterable[pa.Table], compression: str = "zstd") -> None:
    """Write tables as row groups: to a temporary file first, then to the final name."""
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
    """Insert a checksum between the data and the footer of a Parquet file."""
    # Readers locate the data from the beginning of a file and the footer from its end.
    with path.open("r+b") as file:
        at = _find_footer(file)
        checksum = _compute_checksum(file, [(0, at), (at, file.seek(0, os.SEEK_END))])
        file.seek(at)
        footer = file.read()
        file.seek(at)
        file.write(_SEAL + checksum.to_bytes(4, "little") + footer)


def _check_seal(path: Path) -> None:
    """Verify a file's checksum, if it has one.

    Raises:
        ValueError: The checksum does not match, or the file is no Parquet file.
    """
    with path.open("rb") as file:
        at = _find_footer(file)
        seal = at - len(_SEAL) - 4
        if seal < 0:
            return
        file.seek(seal)
        sealed = file.read(len(_SEAL) + 4)
        if not sealed.startswith(_SEAL):
            if any(key.encode() in file.read() for key in _SEALED):
                raise ValueError("it has lost its checksum")
            return
        if _compute_checksum(file, [(0, seal), (at, file.seek(0, os.SEEK_END))]) != int.from_bytes(
            sealed[-4:], "little"
        ):
            raise ValueError("its checksum does not match its content")


def _find_footer(file: IO[bytes]) -> int:
    """Return the offset of a Parquet file's footer. The last 8 bytes hold its length and the marker ``PAR1``."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    tail = file.read()
    at = end - 8 - int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or at < 4:
        raise ValueError("it does not end like a Parquet file")
    return at


def _compute_checksum(file: IO[bytes], parts: Sequence[tuple[int, int]]) -> int:
    """Compute the crc32 of byte ranges ``(first, stop)`` of a file."""
    checksum = 0
    for first, stop in parts:
        file.seek(first)
        left = stop - first
        while block := file.read(min(1 << 20, left)):
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
    return checksum


@dataclass(frozen=True, slots=True)
class _RowsFile:
    path: Path
    first: int
    last: int

    @property
    def merged(self) -> bool:
        return "-" in self.path.stem

    def is_superseded_by(self, other: _RowsFile) -> bool:
        return self != other and other.merged and other.first <= self.first and self.last <= other.last


def _list_all_files(run_dir: Path) -> list[_RowsFile]:
    """List all files of rows by first round, including superseded files. Ignores foreign names."""
    files = []
    for path in (run_dir / "rows").glob("*.parquet"):
        match = re.fullmatch(r"(\d{8,})(?:-(\d{8,}))?", path.stem)
        if match:
            files.append(_RowsFile(path, int(match[1]), int(match[2] or match[1])))
    return sorted(files, key=lambda file: (file.first, file.last))


def _files(run_dir: Path) -> list[_RowsFile]:
    """List the files of the metrics table, without superseded files."""
    files = _list_all_files(run_dir)
    return [file for file in files if not any(file.is_superseded_by(other) for other in files)]


def _read(file: _RowsFile, columns: Sequence[str], where: pc.Expression | None) -> pa.Table:
    def make_error(reason: str) -> RunDirectoryError:
        return RunDirectoryError(
            f"{file.path} is not a readable Parquet file ({first_line(reason)}). Restore it from a copy or move it away. "
            f"Without it, reports lack its rounds, and nothing else changes"
        )

    with translate_failures(make_error):
        _check_seal(file.path)
        # The schema fills columns that older versions did not write with null.
        return pq.read_table(file.path, columns=list(columns), filters=where, partitioning=None, schema=SCHEMA)


def _make_filter(file: _RowsFile, until_round: int | None, where: pc.Expression | None) -> pc.Expression | None:
    """Combine ``where`` with a filter of rounds, for a merged file that extends beyond ``until_round``."""
    if until_round is None or file.last <= until_round:
        return where
    early = pc.field("round") <= until_round
    return early if where is None else where & early


def read_rows(
    run_dir: str | Path,
    until_round: int | None = None,
    *,
    where: pc.Expression | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Read the metrics table of a run, ordered by round. Safe during the run; empty before the first commit.

    Args:
        run_dir: The run's folder.
        until_round: Last committed round. Later files are not read.
        where: Filter of rows, such as ``pc.field("client") == ""``. It is applied during reading, so that the rows of thousands of
            clients need not fit into memory.
        columns: Columns of :data:`SCHEMA`; ``None``: all.

    Raises:
        RunDirectoryError: A file is damaged.
    """
    names = list(columns or SCHEMA.names)
    empty = pa.schema([SCHEMA.field(name) for name in names]).empty_table()
    for _ in range(3):
        files = [
            file
            for file in _files(Path(run_dir))
            if until_round is None or file.last <= until_round or (file.merged and file.first <= until_round)
        ]
        try:
            tables = [_read(file, names, _make_filter(file, until_round, where)) for file in files]
            return pa.concat_tables([empty, *tables])
        except RunDirectoryError:
            if all(file.path.exists() for file in files):  # else the run has merged a file since the folder was listed
                raise
    raise RunDirectoryError(
        f"{Path(run_dir) / 'rows'} changes faster than it can be read. Try again when the run has ended"
    )


def list_missing_rounds(recorded: Iterable[int], until_round: int) -> str:
    """List the rounds from 1 to ``until_round`` without rows, such as ``2, 5 to 9``; empty: none."""
    missing = np.array(sorted(set(range(1, until_round + 1)).difference(recorded)))
    spans = np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else []
    return ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def compact(run_dir: Path, gather: int | None = None) -> Path | None:
    """Merge small files into one. After a crash at any moment, every row is readable exactly once.

    Call it for committed rounds only: when a run is resumed, call :func:`discard_rows` first.

    Args:
        run_dir: The run's folder.
        gather: Merge only files of single commits, and only if there are at least this many. ``None``: merge all files (at the
            end of a run).

    Returns:
        The merged file, or ``None`` if there was nothing to merge.
    """
    files = _files(run_dir)
    if gather is not None:
        files = list(itertools.takewhile(lambda file: not file.merged, reversed(files)))[::-1]
    merged: Path | None = None
    if len(files) >= max(2, gather or 0):
        merged = run_dir / "rows" / f"{files[0].first:08d}-{files[-1].last:08d}.parquet"
        _write(merged, _read_row_groups(files))
    everything = _list_all_files(run_dir)
    for file in everything:  # includes leftovers of an earlier, interrupted merge
        if any(file.is_superseded_by(other) for other in everything):
            file.path.unlink(missing_ok=True)
    return merged


def _read_row_groups(files: Iterable[_RowsFile], where: pc.Expression | None = None) -> Iterator[pa.Table]:
    """Yield the rows of the files in tables of about ``_MERGE_ROWS`` rows."""
    waiting: list[pa.Table] = []
    for file in files:
        waiting.append(_read(file, SCHEMA.names, where))
        if sum(table.num_rows for table in waiting) >= _MERGE_ROWS:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def discard_rows(run_dir: Path, after_round: int) -> None:
    """Remove the rows of rounds after ``after_round``, because a resumed run repeats these rounds.

    Also removes unfinished temporary files of an earlier process.
    """
    for file in _list_all_files(run_dir):
        if file.last <= after_round:
            continue
        if (
            file.first <= after_round
        ):  # keep the beginning of a merged file; readers skip it until the merged file is gone
            shorter = file.path.with_name(f"{file.first:08d}-{after_round:08d}.parquet")
            _write(shorter, _read_row_groups([file], pc.field("round") <= after_round))
        file.path.unlink()
    remove_parts(run_dir / "rows")


def influences(run_dir: Path, until_round: int | None = None) -> dict[int, dict[str, float]]:
    """Read the influence of each client's update on the aggregate, from 0 (rejected) to 1 (as in a plain mean).

    A round stores one array in the order of its updates. The clients' own rows of the round identify the clients.

    Args:
        run_dir: The run's folder.
        until_round: Last committed round.

    Returns:
        Influences by round and client id. Empty for rules without an influence per client (means, median, trimmed mean).

    Raises:
        RunDirectoryError: A file is damaged, or clients' rows are missing.
    """
    recorded = read_rows(
        run_dir, until_round, where=pc.field("metric") == "rule/influences", columns=("round", "array")
    ).to_pylist()
    clients: dict[int, dict[str, None]] = {}
    trained = (pc.field("split") == "train") & (pc.field("phase") == "train") & (pc.field("client") != "")
    if recorded:
        for row in read_rows(run_dir, until_round, where=trained, columns=("round", "client")).to_pylist():
            clients.setdefault(row["round"], {})[row["client"]] = None
    by_round: dict[int, dict[str, float]] = {}
    for row in recorded:
        ids = list(clients.get(row["round"], ()))
        if len(ids) != len(row["array"]):
            raise RunDirectoryError(
                f"{run_dir}: round {row['round']} has influences of {len(row['array'])} updates, but rows of {len(ids)} clients. "
                f"The method must return metrics for each client, or the metrics table is incomplete"
            )
        by_round[row["round"]] = dict(zip(ids, row["array"], strict=True))
    return by_round
