"""Metrics table: rows are read as written, and no crash loses or duplicates a row."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from raydfl.core.errors import ResourcesError, RunDirectoryError
from raydfl.core.types import Ratio
from raydfl.engine.storage import record
from raydfl.engine.storage.record import (
    MetricRow,
    compact,
    discard_rows,
    list_missing_rounds,
    read_rows,
    rows_from_clients,
    rows_from_metrics,
    rows_path,
    to_rows,
    write_rows,
)


def make_rows(round_index: int, rows: int = 3) -> list[MetricRow]:
    return [MetricRow(round_index, "train", f"c{i}", "train", "loss", round_index + i / 10, 4.0) for i in range(rows)]


def write_rounds(folder: Path, rounds: range) -> None:
    for round_index in rounds:
        write_rows(rows_path(folder, round_index), make_rows(round_index))


def read_rounds(folder: Path, until: int | None = None) -> list[int]:
    return read_rows(folder, until)["round"].to_pylist()


def repeat_thrice(rounds: range) -> list[int]:
    return [r for r in rounds for _ in range(3)]


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "rows").iterdir())


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    matrix = np.arange(6.0).reshape(2, 3)
    rows = [
        MetricRow(0, "", "", "server", "bytes_up", 12.5, 1.0),
        MetricRow(3, "evaluate", "größe \U0001f600 'x'", "test", "plugin/accuracy", float("nan"), 0.0),
        MetricRow(3, "evaluate", "", "test", "plugin/confusion", float("nan"), 15.0, matrix),
        MetricRow(3, "evaluate", "", "test", "m/loss", float("inf"), 2.0),
    ]
    write_rows(rows_path(tmp_path, 3), rows)
    loaded = to_rows(read_rows(tmp_path))
    assert [row.metric for row in loaded] == [row.metric for row in rows]
    assert loaded[0] == rows[0]
    assert loaded[1].client == rows[1].client
    assert np.isnan(loaded[1].value)
    assert loaded[2].array is not None
    assert loaded[2].array.tolist() == matrix.tolist()
    assert loaded[3].value == float("inf")
    assert read_rows(tmp_path).schema.equals(record.SCHEMA)


def test_ratios_and_arrays_become_rows() -> None:
    metrics = {"loss": Ratio(6.0, 4), "confusion": np.array([[2, 1], [0, 1]])}
    loss, confusion = rows_from_metrics(5, "evaluate", "", "test", metrics)
    assert loss == MetricRow(5, "evaluate", "", "test", "loss", 1.5, 4)
    assert confusion.count == 4
    assert np.isnan(confusion.value)
    assert [row.metric for row in rows_from_metrics(5, "evaluate", "anna", "test", metrics)] == ["loss"]


def test_client_rows_include_the_pooled_value_and_the_spread() -> None:
    clients = {
        "a": {"m/accuracy": Ratio(9.0, 10), "m/confusion": np.array([[5, 1], [0, 4]])},
        "b": {"m/accuracy": Ratio(10.0, 40), "m/confusion": np.array([[5, 20], [10, 5]])},
    }
    rows = {(row.client, row.metric): row for row in rows_from_clients(2, "evaluate", "validation", clients)}
    assert rows["a", "m/accuracy"].value == 0.9
    assert rows["", "m/accuracy"].value == pytest.approx(19 / 50)
    assert rows["", "m/accuracy"].count == 50
    assert rows["", "m/accuracy_client_mean"].value == pytest.approx((0.9 + 0.25) / 2)
    assert rows["", "m/accuracy_worst_decile"].value == pytest.approx(0.25)
    pooled = rows["", "m/confusion"].array
    assert pooled is not None
    assert pooled.tolist() == [[10, 21], [10, 9]]
    assert ("a", "m/confusion") not in rows
    # the pooled macro-F1 comes from the pooled matrix, not from the mean over clients
    f1 = [2 * 10 / (31 + 20), 2 * 9 / (19 + 30)]
    assert rows["", "m/macro_f1"].value == pytest.approx(np.mean(f1))
    assert ("a", "m/macro_f1") in rows


def test_files_are_named_by_their_last_round_and_read_in_order(tmp_path: Path) -> None:
    write_rows(rows_path(tmp_path, 10), make_rows(9) + make_rows(10))
    write_rounds(tmp_path, range(2, 4))
    assert list_files(tmp_path) == ["00000002.parquet", "00000003.parquet", "00000010.parquet"]
    assert read_rounds(tmp_path) == repeat_thrice(range(2, 4)) + repeat_thrice(range(9, 11))


def test_rounds_after_the_limit_are_not_read(tmp_path: Path) -> None:
    write_rounds(tmp_path, range(1, 6))
    assert read_rounds(tmp_path, 3) == repeat_thrice(range(1, 4))
    assert read_rounds(tmp_path, 0) == []


def test_an_empty_folder_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path).num_rows == 0
    assert compact(tmp_path) is None


def test_reading_filters_rows_and_columns(tmp_path: Path) -> None:
    write_rounds(tmp_path, range(1, 3))
    table = read_rows(tmp_path, where=pc.field("client") == "c1", columns=("round", "value"))
    assert table.to_pydict() == {"round": [1, 2], "value": [1.1, 2.1]}


def test_writing_a_round_again_replaces_it(tmp_path: Path) -> None:
    for _ in range(2):
        write_rows(rows_path(tmp_path, 1), make_rows(1))
    assert read_rounds(tmp_path) == [1, 1, 1]
    assert list_files(tmp_path) == ["00000001.parquet"]


def test_compacting_keeps_every_row_in_order(tmp_path: Path) -> None:
    write_rounds(tmp_path, range(1, 8))
    before = read_rows(tmp_path)
    assert compact(tmp_path) == tmp_path / "rows" / "00000001-00000007.parquet"
    assert list_files(tmp_path) == ["00000001-00000007.parquet"]
    assert read_rows(tmp_path).equals(before)
    assert read_rounds(tmp_path, 4) == repeat_thrice(range(1, 5))
    assert compact(tmp_path) is None


def test_gathering_waits_for_enough_files_and_leaves_merged_ones(tmp_path: Path) -> None:
    write_rounds(tmp_path, range(1, 3))
    assert compact(tmp_path, gather=3) is None
    write_rounds(tmp_path, range(3, 4))
    assert compact(tmp_path, gather=3) is not None
    write_rounds(tmp_path, range(4, 7))
    compact(tmp_path, gather=3)
    assert list_files(tmp_path) == ["00000001-00000003.parquet", "00000004-00000006.parquet"]
    compact(tmp_path)
    assert list_files(tmp_path) == ["00000001-00000006.parquet"]
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 7))


def test_gathering_never_merges_around_a_merged_file(tmp_path: Path) -> None:
    write_rounds(tmp_path, range(3, 6))
    compact(tmp_path)
    write_rounds(tmp_path, range(1, 3))
    write_rounds(tmp_path, range(7, 9))
    compact(tmp_path, gather=2)
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 6)) + repeat_thrice(range(7, 9))


def test_merging_writes_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_MERGE_ROWS", 5)
    write_rounds(tmp_path, range(1, 6))
    merged = compact(tmp_path)
    assert merged is not None
    assert pq.ParquetFile(merged).num_row_groups == 3
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 6))


def crash_at_call(monkeypatch: pytest.MonkeyPatch, method: str, when: int) -> None:
    """Simulate a crash at the ``when``-th call of a Path method."""
    real: Callable[..., object] = getattr(Path, method)
    calls = 0

    def call_or_crash(self: Path, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == when:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, method, call_or_crash)


@pytest.mark.parametrize(("method", "when"), [("replace", 1), ("unlink", 1), ("unlink", 2), ("unlink", 5)])
def test_a_crash_while_compacting_loses_and_duplicates_nothing(tmp_path: Path, method: str, when: int) -> None:
    write_rounds(tmp_path, range(1, 3))
    compact(tmp_path)
    write_rounds(tmp_path, range(3, 7))
    with pytest.MonkeyPatch.context() as monkeypatch:
        crash_at_call(monkeypatch, method, when)
        with pytest.raises(KeyboardInterrupt):
            compact(tmp_path)
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 7))
    discard_rows(tmp_path, 6)
    write_rounds(tmp_path, range(7, 8))
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 8))
    compact(tmp_path)
    assert list_files(tmp_path) == ["00000001-00000007.parquet"]
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 8))


def test_the_next_call_removes_leftovers_of_a_merge(tmp_path: Path) -> None:
    write_rounds(tmp_path, range(1, 4))
    copy = (tmp_path / "rows" / "00000002.parquet").read_bytes()
    compact(tmp_path)
    (tmp_path / "rows" / "00000002.parquet").write_bytes(copy)
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 4))
    assert compact(tmp_path, gather=100) is None
    assert list_files(tmp_path) == ["00000001-00000003.parquet"]


def test_a_resumed_run_discards_uncommitted_rows(tmp_path: Path) -> None:
    """The resumed run may commit in different rounds, so that its file names differ."""
    write_rounds(tmp_path, range(1, 6))
    write_rows(rows_path(tmp_path, 10), make_rows(6) + make_rows(10))
    (tmp_path / "rows" / ".00000011.parquet.99.part").write_bytes(b"half")
    discard_rows(tmp_path, 5)
    write_rows(rows_path(tmp_path, 7), make_rows(6) + make_rows(7))
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 8))
    assert not [name for name in list_files(tmp_path) if name.endswith(".part")]


@pytest.mark.parametrize("when", [1, 2, 3])
def test_discarding_part_of_a_merged_file_survives_a_crash(tmp_path: Path, when: int) -> None:
    write_rounds(tmp_path, range(1, 6))
    compact(tmp_path)
    write_rounds(tmp_path, range(6, 8))
    with pytest.MonkeyPatch.context() as monkeypatch:
        crash_at_call(monkeypatch, "unlink", when)
        with pytest.raises(KeyboardInterrupt):
            discard_rows(tmp_path, 3)
    assert read_rounds(tmp_path, 3) == repeat_thrice(range(1, 4))
    discard_rows(tmp_path, 3)
    write_rounds(tmp_path, range(4, 5))
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 5))
    discard_rows(tmp_path, -1)
    assert read_rows(tmp_path).num_rows == 0


def test_reading_during_a_merge_returns_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rounds(tmp_path, range(1, 5))
    real = record._files

    def list_then_merge(folder: Path) -> list[record._File]:
        files = real(folder)
        monkeypatch.setattr(record, "_files", real)
        compact(tmp_path)
        return files

    monkeypatch.setattr(record, "_files", list_then_merge)
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 5))


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    write_rounds(tmp_path, range(1, 2))
    (tmp_path / "rows" / "notes.parquet").write_bytes(b"mine")
    assert read_rounds(tmp_path) == [1, 1, 1]
    discard_rows(tmp_path, -1)
    assert list_files(tmp_path) == ["notes.parquet"]


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing"])
def test_the_error_names_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    write_rounds(tmp_path, range(1, 3))
    rows_path(tmp_path, 2).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"00000002\.parquet is not a readable Parquet file .*Restore it"):
        read_rows(tmp_path)


@pytest.mark.parametrize("merged", [False, True])
def test_every_changed_bit_is_detected(tmp_path: Path, merged: bool) -> None:
    write_rounds(tmp_path, range(1, 4))
    path = (compact(tmp_path) if merged else None) or rows_path(tmp_path, 2)
    # Other Parquet readers accept the file too.
    assert pq.read_table(path)["round"].to_pylist() == (repeat_thrice(range(1, 4)) if merged else [2, 2, 2])
    original = path.read_bytes()
    bits = {*range(0, 8 * len(original), 211), *range(8 * len(original) - 256, 8 * len(original), 3)}
    for bit in bits:
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(RunDirectoryError, match=rf"{path.name} is not a readable Parquet file .*Restore it"):
            read_rows(tmp_path)


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Files of earlier versions have no checksum."""
    rows_path(tmp_path, 1).parent.mkdir()
    pq.write_table(record.to_table(make_rows(1)), rows_path(tmp_path, 1))
    write_rounds(tmp_path, range(2, 3))
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 3))
    compact(tmp_path)
    assert read_rounds(tmp_path) == repeat_thrice(range(1, 3))


def test_missing_rounds_are_listed() -> None:
    assert list_missing_rounds([1, 2, 3], 3) == ""
    assert list_missing_rounds([3, 3, 4], 9) == "1 to 2, 5 to 9"
    assert list_missing_rounds([2, 4], 4) == "1, 3"
    assert list_missing_rounds([], 0) == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    write_rounds(tmp_path, range(1, 2))

    def fail_to_sync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail_to_sync)
    with pytest.raises(
        ResourcesError, match=r"is full: it has .* and the rows in 00000001.parquet need about .*; make room"
    ):
        write_rows(rows_path(tmp_path, 1), make_rows(5))
    assert read_rounds(tmp_path) == [1, 1, 1]
    assert list_files(tmp_path) == ["00000001.parquet"]


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("a file")
    with pytest.raises(
        ResourcesError, match="the rows in 00000001.parquet cannot be written to .*make the folder writable"
    ):
        write_rows(rows_path(tmp_path, 1), make_rows(1))
