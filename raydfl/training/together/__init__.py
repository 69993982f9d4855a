"""Several clients in one computation.

Begin with lockstep.py (clients side by side) and executor.py (their models stacked, and the rules for such code).
"""

from raydfl.training.together.lockstep import run_in_lockstep

__all__ = [
    "run_in_lockstep",
]
