"""Groups of clients: each has the method's state for itself. One file a discovery rule; its name is its name in a configuration.

Begin with known.py, the simplest rule, and _grouped.py, which turns any method into one with groups.
"""

from raydfl.engine.groups._grouped import Grouped, add_groups
from raydfl.engine.groups._rule import GroupRule, find_group_rule

__all__ = ["GroupRule", "Grouped", "add_groups", "find_group_rule"]
