"""Names of packages: imports on first use, so that importing a package is fast, and former names that warn."""

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
        name = _replace_former(package, name, former)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:
            return importlib.import_module(f"{home}.{name}")
        return getattr(importlib.import_module(home), name)

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return list(homes), import_name, list_names


def alias_former_names(module: str, former: Mapping[str, str]) -> None:
    """Keep a module's former names importable. Their use emits a ``DeprecationWarning``.

    Args:
        module: the module's ``__name__``.
        former: New name of each former name.
    """

    def get_attribute(name: str) -> Any:
        if name not in former:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(sys.modules[module], _replace_former(module, name, former))

    # Set here, because type checkers accept any attribute of a module that defines __getattr__ itself.
    vars(sys.modules[module])["__getattr__"] = get_attribute


def _replace_former(module: str, name: str, former: Mapping[str, str]) -> str:
    """Return the present name of a module's attribute, with a warning for a former name."""
    if name in former:
        warnings.warn(f"{module}.{name} is now named {former[name]}", DeprecationWarning, stacklevel=3)
    return former.get(name, name)
