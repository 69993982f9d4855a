"""Supported versions: pyproject.toml, the tested versions and the documentation agree."""

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


def read_versions(path: Path) -> dict[str, Version]:
    lines = [line.split("==") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name.lower(): Version(version) for name, version in lines}


OLDEST, NEWEST, USUAL = (
    read_versions(path) for path in (HERE / "oldest.txt", HERE / "newest.txt", ROOT / "constraints.txt")
)
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(
        line
        for name, lines in PROJECT["optional-dependencies"].items()
        if name not in ("dev", "test", "wandb")
        for line in lines
    ),
]


@pytest.mark.parametrize("line", REQUIREMENTS)
def test_lower_bounds_are_the_oldest_tested_versions(line: str) -> None:
    requirement = Requirement(line)
    name = requirement.name.lower()
    for versions in (OLDEST, NEWEST, USUAL):
        assert versions[name] in requirement.specifier
    assert OLDEST[name] <= USUAL[name]
    lower = [Version(specifier.version) for specifier in requirement.specifier if specifier.operator == ">="]
    assert lower in ([], [OLDEST[name]])


@pytest.mark.parametrize("test", WITH_RAY)
def test_the_tests_of_the_oldest_and_newest_versions_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_the_docs_name_the_oldest_and_newest_versions() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    rows = {
        name.lower(): ends for name, *ends in re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    }
    assert len(rows) >= 5
    for name in rows.keys() - {"python"}:
        package = {"pytorch": "torch"}.get(name, name)
        assert rows[name] == [str(OLDEST[package]), str(NEWEST[package])], name
