"""Deprecated aliases of renamed public functions and classes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any


def alias_former_names(module: str, names: Mapping[str, str]) -> None:
    """Keep a module's former names importable. Their use emits a ``DeprecationWarning``.

    Args:
        module: the module's ``__name__``.
        names: the new name of each former name.
    """

    def get_attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now named {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    # Set here, because type checkers accept any attribute of a module that defines __getattr__ itself.
    vars(sys.modules[module])["__getattr__"] = get_attribute
