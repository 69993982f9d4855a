"""Groups of clients with a separate copy of the method's state.

Each file is a group rule, with its name in configurations. Read known.py, the simplest rule, and _grouped.py, the extension of a
method by groups, first.
"""

from raydfl.engine.groups._grouped import Grouped, add_groups
from raydfl.engine.groups._rule import GroupRule, find_group_rule

__all__ = ["GroupRule", "Grouped", "add_groups", "find_group_rule"]
