"""Building the objective that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.objectives._objective import Objective

_PACKAGE = "raydfl.objectives"


def find_objective(setting: Mapping[str, Any]) -> Objective:
    """Return the objective that a configuration describes.

    Args:
        setting: ``name`` (a built-in's, or ``my_file.py:Class``), and the objective's options.

    Raises:
        ConfigError: there is no such objective, it lacks loss() or metrics(), or an option of it is unknown, of the wrong
            type or out of range.
    """
    options = dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"objective: a name is missing; known: {', '.join(registry.names(_PACKAGE))}")
    cls = registry.find(_PACKAGE, name, Objective, "objective")
    if cls.loss is Objective.loss or (cls.metrics is Objective.metrics and cls.evaluate is Objective.evaluate):
        missing = "loss" if cls.loss is Objective.loss else "metrics"
        raise ConfigError(f"objective: {name!r} has no {missing}(); write it in the class {cls.__name__}")
    return registry.build(cls, options, "objective")
