"""Where code lives: what import-linter (pyproject.toml, ``make check``), which holds who imports whom, does not see."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import raydfl

PACKAGE = Path(raydfl.__file__).parent


def imports_for_types() -> Iterator[tuple[str, str]]:
    """File and module of each import of raydfl that only a type checker sees."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for block in ast.walk(ast.parse(path.read_text())):
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
                for node in ast.walk(block):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raydfl"):
                        yield path.relative_to(PACKAGE).as_posix(), node.module or ""


def test_only_the_doors_lie_at_the_root() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "ops.py"}


def test_no_circle_is_hidden_from_who_checks_for_circles() -> None:
    """But for the command line, which imports when it is asked, so that ``raydfl --help`` waits for no heavy library."""
    assert {file for file, _ in imports_for_types()} <= {"cli/main.py"}


def test_every_public_name_is_where_the_stub_says() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    names = [alias.name for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names]
    assert names
    assert sorted(names) == sorted(set(names)) == sorted(raydfl.__all__)
    assert all(getattr(raydfl, name) is not None for name in names)
    assert set(names) <= set(dir(raydfl))
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        raydfl.no_such_name  # noqa: B018


def test_the_map_at_the_door_has_every_room() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^- ``(\w+)``: ", raydfl.__doc__ or "", re.MULTILINE)) == rooms


def test_every_room_has_a_face() -> None:
    """A docstring that says what it is, and where to begin reading; and the names that other rooms may use."""
    for path in PACKAGE.glob("*/__init__.py"):
        face = ast.parse(path.read_text())
        said = ast.get_docstring(face) or ""
        assert "Begin with " in said, path.parent.name
        assert re.search(r"\bImports ", said), path.parent.name
        for file in re.findall(r"\b[\w/]+\.py\b", said.partition("Begin with ")[2].partition("\n\n")[0]):
            assert (path.parent / file).is_file(), (path.parent.name, file)


def test_nobody_enters_a_room_by_a_back_door() -> None:
    """What another room needs of a ``_private.py`` is named in its room's ``__all__``."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if re.match(r"raydfl\.\w+(\.\w+)*\._[a-z]", module) and module.split(".")[1] != room:
                found.add((path.relative_to(PACKAGE).as_posix(), module))
    assert not found
