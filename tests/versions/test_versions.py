"""Supported versions agree in the bounds of pyproject.toml, the tested ends and the docs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from end import WITH_RAY
from packaging.requirements import Requirement
from packaging.version import Version

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_pins(path: Path) -> dict[str, Version]:
    lines = [line.split("==") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name.lower(): Version(version) for name, version in lines}


OLDEST, NEWEST, USUAL = (
    read_pins(path) for path in (HERE / "oldest.txt", HERE / "newest.txt", ROOT / "constraints.txt")
)
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
def test_lower_bounds_equal_the_oldest_tested_versions(line: str) -> None:
    requirement = Requirement(line)
    name = requirement.name.lower()
    for versions in (OLDEST, NEWEST, USUAL):
        assert versions[name] in requirement.specifier
    assert OLDEST[name] <= USUAL[name]
    lower = [Version(bound.version) for bound in requirement.specifier if bound.operator == ">="]
    assert lower in ([], [OLDEST[name]])


@pytest.mark.parametrize("test", WITH_RAY)
def test_the_tests_of_the_oldest_and_newest_versions_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_the_docs_list_the_oldest_and_newest_versions() -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    rows = {
        name.lower(): ends for name, *ends in re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    }
    assert len(rows) >= 5
    for name in rows.keys() - {"python"}:
        package = {"pytorch": "torch"}.get(name, name)
        assert rows[name] == [str(OLDEST[package]), str(NEWEST[package])], name
