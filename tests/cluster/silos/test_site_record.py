"""The record of outgoing data: every change of a line, and every missing or moved line, is detected."""

from __future__ import annotations

import json
import multiprocessing
import random
from pathlib import Path

import pytest
from commands import Raydfl

from raydfl.cluster.site_record import HEADS, Head, SiteRecord, find_break, read_heads
from raydfl.core.errors import InputError, RunDirectoryError

LINES = 6


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Write a record of six lines."""
    path = tmp_path / "site" / "record.jsonl"
    site = SiteRecord(path, "north")
    for number in range(LINES):
        site.append("sent", round=number, user="mara@clinic ☂", bytes={"tensors": 100 * number})
    return path


def make_heads(path: Path, *numbers: int) -> list[Head]:
    lines = path.read_bytes().splitlines()
    return [Head(number, json.loads(lines[number - 1])["hash"]) for number in numbers]


def write_heads(folder: Path, heads: list[Head], site: str = "north") -> Path:
    folder.mkdir(exist_ok=True)
    rows = [{"site": site, "round": number, "head": str(head)} for number, head in enumerate(heads, 1)]
    (folder / HEADS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_an_intact_record_has_no_break(record: Path) -> None:
    last, problem = find_break(record, make_heads(record, 1, 4, LINES))
    assert problem == ""
    assert last == make_heads(record, LINES)[0]
    assert (record.stat().st_mode & 0o777, record.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_each_line_has_the_hash_of_the_previous_line(record: Path) -> None:
    entries = [json.loads(line) for line in record.read_bytes().splitlines()]
    assert [entry["number"] for entry in entries] == list(range(1, LINES + 1))
    assert [entry["previous"] for entry in entries[1:]] == [entry["hash"] for entry in entries[:-1]]
    assert entries[0]["previous"] == 64 * "0"


def test_every_changed_byte_is_detected_with_its_line(record: Path) -> None:
    content, draw = record.read_bytes(), random.Random(1)
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] = draw.choice([value for value in range(256) if value != content[position]])
        record.write_bytes(changed)
        line = content.count(b"\n", 0, position) + 1
        # A changed line break joins two lines.
        assert find_break(record)[1].startswith(f"line {line}: "), position


@pytest.mark.parametrize("removed", range(LINES))
def test_a_removed_line_is_detected(record: Path, removed: int) -> None:
    heads, lines = make_heads(record, LINES), record.read_bytes().splitlines(keepends=True)
    del lines[removed]
    record.write_bytes(b"".join(lines))
    assert find_break(record, heads)[1].startswith(f"line {removed + 1}: ")
    if removed < LINES - 1:  # no head is needed
        assert "missing" in find_break(record)[1]


@pytest.mark.parametrize("kept", range(LINES))
def test_a_truncated_tail_is_detected_by_a_head(record: Path, kept: int) -> None:
    heads, lines = make_heads(record, 2, LINES), record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:kept]))
    assert find_break(record)[1] == ""  # the chain alone does not know its end
    assert f"line {kept + 1}: the record ends here" in find_break(record, heads)[1]


def test_a_cut_line_is_detected_without_a_head(record: Path) -> None:
    content = record.read_bytes()
    for size in range(len(content) - 30, len(content)):
        record.write_bytes(content[:size])
        assert find_break(record)[1].startswith(f"line {LINES}: "), size


@pytest.mark.parametrize("first", range(LINES - 1))
def test_reordered_lines_are_detected(record: Path, first: int) -> None:
    lines = record.read_bytes().splitlines(keepends=True)
    lines[first], lines[first + 1] = lines[first + 1], lines[first]
    record.write_bytes(b"".join(lines))
    assert find_break(record)[1].startswith(f"line {first + 1}: it has the number {first + 2}")


def test_a_record_that_was_written_again_is_detected_by_a_head(record: Path) -> None:
    """The forger recomputes the whole chain without one line."""
    heads = make_heads(record, 3)
    entries = [json.loads(line) for line in record.read_bytes().splitlines()]
    record.unlink()
    for entry in entries[1:]:
        SiteRecord(record, "north").append("sent", round=entry["round"], bytes=entry["bytes"])
    assert find_break(record)[1] == ""
    assert "line 3: its hash differs" in find_break(record, heads)[1]


def test_nothing_is_appended_to_a_damaged_record(record: Path) -> None:
    with record.open("ab") as file:
        file.write(b'{"number":7')
    with pytest.raises(RunDirectoryError, match="last line of its record .* is damaged.*raydfl site audit"):
        SiteRecord(record, "north").append("sent")


def append_lines(path: Path) -> None:
    for number in range(20):
        SiteRecord(path, "north").append("sent", round=number)


def test_processes_append_to_one_chain(tmp_path: Path) -> None:
    context, path = multiprocessing.get_context("fork"), tmp_path / "record.jsonl"
    processes = [context.Process(target=append_lines, args=(path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    last, problem = find_break(path)
    assert (last.number, problem) == (60, "")


def test_audit_prints_the_line_and_exits_with_1(record: Path, tmp_path: Path, raydfl: Raydfl) -> None:
    run = write_heads(tmp_path / "run", make_heads(record, 2, LINES))
    assert read_heads(run, "south") == []
    result = raydfl("site", "audit", record, "--site", "north", "--run", run)
    assert result.code == 0
    assert "6 lines, 2 heads of runs agree" in result.out
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:4]))
    result = raydfl("site", "audit", record, "--site", "north", "--run", run)
    assert result.code == 1
    assert "line 5: the record ends here" in result.out
    record.write_bytes(b"".join(lines[1:]))
    result = raydfl("site", "audit", record)
    assert (result.code, result.out.split(", ")[1][:7]) == (1, "line 1:")


def test_audit_rejects_wrong_arguments(record: Path, tmp_path: Path, raydfl: Raydfl) -> None:
    run = write_heads(tmp_path / "run", make_heads(record, 2))
    raydfl("site", "audit", tmp_path / "none").refuses("none cannot be read: No such file", "record")
    raydfl("site", "audit", record, "--run", run).refuses("Add --site NAME")
    raydfl("site", "audit", record, "--run", run, "--site", "west").refuses("no head of site 'west'")
    raydfl("site", "audit", record, "--run", tmp_path, "--site", "north").refuses("site_heads.jsonl cannot be read")
    (run / HEADS).write_text("{}\n")
    with pytest.raises(InputError, match="site_heads.jsonl cannot be read: KeyError"):
        read_heads(run, "north")
