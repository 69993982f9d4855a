"""Objectives: what is learnt of the examples, beside the method. One file an objective; its name is its name in a configuration.

An objective says how wide the networks' last layer is, what a batch's loss is, what a network answers for a recording, and what is
measured. Methods ask it by default, so that a method need not know what it learns. One of your own is a subclass of
:class:`Objective`.

Imports training, data and core. Begin with classify.py.
"""

from raydfl.objectives._find import find_objective
from raydfl.objectives._objective import Objective
from raydfl.objectives.classify import Classify

__all__ = ["Classify", "Objective", "find_objective"]
