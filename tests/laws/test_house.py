"""Where code lives: what import-linter (pyproject.toml, ``make check``), which holds who imports whom, does not see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
    """But for the two doors, which import when they are asked, so that ``raydfl --help`` waits for no heavy library."""
    assert {file for file, _ in imports_for_types()} <= {"__init__.py", "cli/main.py"}
