"""Readers of text: limits of size, and one translation of failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raydfl.core import files
from raydfl.core.errors import ConfigError, DataError, translate_failures
from raydfl.core.files import read_json


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff{", "it is not UTF-8 text"),
        (b"[" * 100_000, "it is nested too deep"),
        (b"{", "Expecting property name"),
        (b'"' + b"x" * 100 + b'"', "it is larger than 0 MiB"),
        (None, "No such file or directory"),
    ],
)
def test_each_failure_of_a_json_file_has_a_reason(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    if reason.startswith("it is larger"):
        monkeypatch.setattr(files, "_JSON_BYTES", 101)
    with pytest.raises(DataError, match=f"^run: {reason}"), translate_failures(lambda text: DataError(f"run: {text}")):
        read_json(path)


def test_a_file_of_the_maximum_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_JSON_BYTES", 102)
    (tmp_path / "run.json").write_text(json.dumps("x" * 100))
    assert read_json(tmp_path / "run.json") == "x" * 100


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("id"), "KeyError: 'id'"),
        (MemoryError(), "it needs more memory than is available"),
        (ValueError("wrong."), "wrong"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
)
def test_every_exception_is_translated(error: Exception, reason: str) -> None:
    with pytest.raises(DataError, match=f"^{reason}"), translate_failures(DataError):
        raise error


def test_errors_of_raydfl_and_interrupts_pass_through() -> None:
    with pytest.raises(ConfigError, match=r"^kept\.$"), translate_failures(DataError):
        raise ConfigError("kept.")
    with pytest.raises(KeyboardInterrupt), translate_failures(DataError):
        raise KeyboardInterrupt
