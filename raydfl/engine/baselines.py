"""Training without a federation: settings for the names ``local`` and ``centralised`` in place of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydfl.core.errors import ConfigError
from raydfl.core.nested import get_path
from raydfl.engine.overrides import apply_values

POOLED: Mapping[str, Any] = {"data.partition": {"by": "iid", "clients": 1}, "train.cohort": 1.0}
"""Settings of a run on pooled data."""
LOCAL: Mapping[str, Any] = {"method": {"name": "fedper", "personal": ["model"]}}
"""Settings of a run without averaging: each client keeps its model."""
BASELINES: Mapping[str, Mapping[str, Any]] = {"centralised": {"method": {"name": "fedavg"}, **POOLED}, "local": LOCAL}
"""Settings of each name."""


def expand_baseline(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the method ``local`` or ``centralised`` of a configuration by its settings.

    Args:
        values: Groups of settings, as in a YAML file.

    Raises:
        ConfigError: The name has options, or the data have parts or sites, so that clips cannot be pooled.
    """
    method = values.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    if not isinstance(name, str) or name not in BASELINES:
        return values
    if isinstance(method, Mapping) and len(method) > 1:
        raise ConfigError(f"method: {name} has no options. Write method={name}")
    if name == "centralised" and (get_path(values, "data.parts") or get_path(values, "data.sites")):
        raise ConfigError(
            "method: centralised pools the clips of all clients, but the data have parts or sites. Remove them"
        )
    return apply_values(dict(values), BASELINES[name])
