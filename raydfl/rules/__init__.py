"""Aggregation rules: many clients' updates in, the server's new tensors out.

A rule works per key and, within a key, per tensor name, over the clients that sent that name: partial models, several
global models and masks need no rule of their own. What nobody sent, or nobody gave any weight, stays as it is.

Updates are taken in client order, and sums run in that order or in a single thread, so that the result is a function of
the updates alone (and of the round's generator, for rules that draw), to the bit.

A rule of one's own is a subclass of :class:`CollectingRule` with one short method, or of :class:`Rule` for full control.
The built-in ones are the files of this room, whose names are the rules' names in a configuration.

Imports core. Begin with median.py and krum.py, then weighted_mean.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydfl.core import registry
from raydfl.core.errors import ConfigError, nearest
from raydfl.rules._collecting import CollectingRule, one_thread
from raydfl.rules._cuts import cut_misfit, filled
from raydfl.rules._group import Group
from raydfl.rules._robust import RobustRule
from raydfl.rules._rule import Aggregate, Rule
from raydfl.rules._weights import weight_of
from raydfl.rules.lpa import LayerwisePruning
from raydfl.rules.uniform_mean import UniformMean
from raydfl.rules.weighted_mean import WeightedMean

__all__ = [
    "RULES",
    "Aggregate",
    "CollectingRule",
    "Group",
    "LayerwisePruning",
    "RobustRule",
    "Rule",
    "UniformMean",
    "WeightedMean",
    "cut_misfit",
    "filled",
    "find_rule",
    "one_thread",
    "rule_class",
    "weight_of",
]


def rule_class(name: str) -> type[Rule]:
    """Find the rule of that name, built in or ``my_file.py:Class``.

    Raises:
        ConfigError: there is none; the nearest name is given.
    """
    return registry.find("raydfl.rules", name, Rule, "rule")  # type: ignore[type-abstract]


RULES: Mapping[str, type[Rule]] = {name: rule_class(name) for name in registry.names("raydfl.rules")}
"""The built-in rules by their name in a configuration."""


def find_rule(setting: str | Mapping[str, Any] | None, default: Rule, where: str = "rule") -> Rule:
    """Find and build the rule that a configuration names.

    Args:
        setting: a name of :data:`RULES` or ``my_file.py:Class``; or a mapping with ``name`` and the rule's options; or
            ``None`` for ``default``, the method's own rule.
        where: the place in the configuration, for the messages.

    Raises:
        ConfigError: no such rule, or an option that it does not have or whose value is out of range.
    """
    if setting is None:
        return default
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name a rule, as in {where}: {{name: lpa, vl: 0.1}}; {nearest('', RULES)}")
    return registry.build(rule_class(name), options, where)
