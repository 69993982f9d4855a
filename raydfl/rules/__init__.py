"""Aggregation rules, which combine the client updates of a round into the server's new tensors.

A rule aggregates each tensor separately, over the clients that sent it. It needs no special case for partial models,
several global models or masks. A tensor without any update, or with weights of 0 only, keeps its value.

Rules read updates in client order and add them up in this order, or in a single thread. The result is therefore
reproducible to the bit. It depends only on the updates and, for randomised rules, on the round's generator.

To write a rule, subclass :class:`CollectingRule` and define one method, or subclass :class:`Rule` for full control.
Each built-in rule is a file of this room; the file's name is the rule's name in a configuration.

Imports core. Begin with median.py and krum.py, then weighted_mean.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydfl.core import registry
from raydfl.core.errors import ConfigError, nearest
from raydfl.rules._collecting import CollectingRule, one_thread
from raydfl.rules._cuts import cut_misfit, fill_cuts
from raydfl.rules._group import Group
from raydfl.rules._robust import RobustRule
from raydfl.rules._rule import Aggregate, Rule, Selection, TwoPassRule
from raydfl.rules._weights import read_weight
from raydfl.rules.gaussian import AdaptiveClip, Gaussian, NoisySum
from raydfl.rules.lpa import LayerwisePruning
from raydfl.rules.uniform_mean import UniformMean
from raydfl.rules.weighted_mean import WeightedMean

__all__ = [
    "RULES",
    "AdaptiveClip",
    "Aggregate",
    "CollectingRule",
    "Gaussian",
    "Group",
    "LayerwisePruning",
    "NoisySum",
    "RobustRule",
    "Rule",
    "Selection",
    "TwoPassRule",
    "UniformMean",
    "WeightedMean",
    "cut_misfit",
    "fill_cuts",
    "find_rule",
    "one_thread",
    "read_weight",
    "rule_class",
]


def rule_class(name: str) -> type[Rule]:
    """Find a rule's class by its name.

    Args:
        name: a built-in rule, or ``my_file.py:Class``.

    Raises:
        ConfigError: no rule has this name. The message suggests the nearest one.
    """
    return registry.find("raydfl.rules", name, Rule, "rule")  # type: ignore[type-abstract]


RULES: Mapping[str, type[Rule]] = {name: rule_class(name) for name in registry.names("raydfl.rules")}
"""Built-in rules by their names in a configuration."""


def find_rule(setting: str | Mapping[str, Any] | None, default: Rule, where: str = "rule") -> Rule:
    """Build the rule of a configuration.

    Args:
        setting: a name (of :data:`RULES`, or ``my_file.py:Class``), or a mapping with ``name`` and the rule's options.
            ``None`` selects ``default``.
        default: the method's own rule.
        where: the place in the configuration, for error messages.

    Raises:
        ConfigError: the rule or one of its options is unknown, or a value is out of range.
    """
    if setting is None:
        return default
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"{where}: the name of the rule is missing. Write, for example, {where}: {{name: lpa, vl: 0.1}}. "
            f"{nearest('', RULES)}"
        )
    return registry.build(rule_class(name), options, where)
