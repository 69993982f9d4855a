"""What is said of versions fits together: the bounds of pyproject.toml, what both ends are tried with, and the docs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(path: Path) -> dict[str, Version]:
    lines = [line.split("==") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name.lower(): Version(version) for name, version in lines}


OLDEST, NEWEST, USUAL = (pinned(path) for path in (HERE / "oldest.txt", HERE / "newest.txt", ROOT / "constraints.txt"))
OF_USERS = [
    *PROJECT["dependencies"],
    *(
        line
        for name, lines in PROJECT["optional-dependencies"].items()
        if name not in ("dev", "test", "wandb")
        for line in lines
    ),
]


@pytest.mark.parametrize("line", OF_USERS)
def test_a_lower_bound_is_what_was_tried(line: str) -> None:
    needed = Requirement(line)
    name = needed.name.lower()
    for versions in (OLDEST, NEWEST, USUAL):
        assert versions[name] in needed.specifier
    assert OLDEST[name] <= USUAL[name]
    lower = [Version(each.version) for each in needed.specifier if each.operator == ">="]
    assert lower in ([], [OLDEST[name]])


def test_the_docs_name_both_ends() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    rows = {
        name.lower(): ends for name, *ends in re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    }
    assert len(rows) >= 5
    for name in rows.keys() - {"python"}:
        package = {"pytorch": "torch"}.get(name, name)
        assert rows[name] == [str(OLDEST[package]), str(NEWEST[package])], name
