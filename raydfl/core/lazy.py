"""Packages that import their names on first use, so importing the package is fast."""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any


def lazy_names(
    package: str, file: str, former: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package with an ``__init__.pyi``.

    The stub defines the package's names: each of its lines is ``from MODULE import NAME as NAME``. Type checkers read it instead of
    ``__init__.py``.

    Args:
        package: The package's ``__name__``.
        file: The package's ``__file__``.
        former: New name of each former name. Using a former name raises a ``DeprecationWarning``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {
        alias.name: str(line.module) for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names
    }

    def import_name(name: str) -> Any:
        if name in former:
            warnings.warn(f"{package}.{name} is now named {former[name]}", DeprecationWarning, stacklevel=2)
            name = former[name]
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:
            return importlib.import_module(f"{home}.{name}")
        return getattr(importlib.import_module(home), name)

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return list(homes), import_name, list_names
