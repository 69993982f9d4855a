"""Construction of objectives from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.objectives._objective import Objective

_PACKAGE = "raydfl.objectives"


def find_objective(setting: Mapping[str, Any]) -> Objective:
    """Build the objective of a configuration.

    Args:
        setting: ``name`` (built-in, or ``my_file.py:Class``) and the objective's options.

    Raises:
        ConfigError: the objective is unknown, it lacks loss() or metrics(), or an option is unknown, of the wrong type or
            out of range.
    """
    options = dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"objective: the name is missing. Choose one of {', '.join(registry.names(_PACKAGE))}.")
    cls = registry.find(_PACKAGE, name, Objective, "objective")
    if cls.loss is Objective.loss or (cls.metrics is Objective.metrics and cls.evaluate is Objective.evaluate):
        missing = "loss" if cls.loss is Objective.loss else "metrics"
        raise ConfigError(f"objective: {name!r} has no {missing}(). Define it in the class {cls.__name__}.")
    return registry.build(cls, options, "objective")
