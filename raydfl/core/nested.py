"""Access to nested mappings, such as configurations, by dotted paths: ``train.rounds``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to a mapping of paths to values: ``{"train.rounds": 5}``."""
    if not isinstance(values, dict):
        return {prefix: values}
    result: dict[str, Any] = {}
    for key, value in values.items():
        result.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return result


def get_path(values: Any, path: str) -> Any:
    """Return the value at a path, such as ``a.b.c``, or ``None`` if the path does not exist."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
