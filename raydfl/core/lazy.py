"""Lazy imports: a package imports a name's module when the name is first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for a package with a stub ``__init__.pyi``.

    The stub lists all names, one line each: ``from MODULE import NAME as NAME``. Type checkers read it instead of ``__init__.py``.

    Args:
        package: the package's ``__name__``.
        file: the package's ``__file__``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {
        alias.name: str(line.module) for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names
    }

    def import_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:
            return importlib.import_module(f"{home}.{name}")
        return getattr(importlib.import_module(home), name)

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return list(homes), import_name, list_names
