"""Batched computation of several clients.

Begin with lockstep.py (clients in lockstep) and executor.py (stacked models, and the rules for batched losses).
"""

from raydfl.training.together.lockstep import run_in_lockstep

__all__ = [
    "run_in_lockstep",
]
