"""docs/security.md: every guarantee names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def read_rows() -> list[tuple[str, str]]:
    """Return the rows of the table of guarantees."""
    table = PAGE.partition("| raydfl guarantees | test |\n|---|---|\n")[2].partition("\n\n")[0]
    return [tuple(cell.strip() for cell in line.strip("|").rsplit("|", 1)) for line in table.splitlines()]  # type: ignore[misc]


@pytest.mark.parametrize(("guarantee", "tests"), read_rows())
def test_a_guarantee_has_a_test(guarantee: str, tests: str) -> None:
    names = re.findall(r"`([^`]+)`", tests)
    assert names, guarantee
    for name in names:
        found = [ROOT / name] if name.startswith("tests/") else list((ROOT / "tests").rglob(name))
        assert len(found) == 1, name
        files = [found[0]] if found[0].is_file() else list(found[0].rglob("test_*.py"))
        assert any("\ndef test_" in file.read_text() for file in files), name
