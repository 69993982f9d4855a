"""Aliases that keep the former names of public functions and classes importable, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any


def alias_former_names(module: str, names: Mapping[str, str]) -> None:
    """Keep former names of a module's attributes importable; using one raises a ``DeprecationWarning``.

    Args:
        module: ``__name__`` of the module that has the attributes.
        names: new name of each former name.
    """

    def get_attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now named {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    # Set here and not defined in the module: type checkers accept any attribute of a module with a __getattr__.
    vars(sys.modules[module])["__getattr__"] = get_attribute
