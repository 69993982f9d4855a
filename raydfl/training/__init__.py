"""One client's local work: the step that a method's code sees, the loop that trains, the optimiser.

Imports data and core. Begin with step.py and _fit.py; together/ trains several clients in one computation.
"""

from raydfl.training._fit import fit, predict
from raydfl.training.clock import Clock, DeadlineExceededError
from raydfl.training.execution import Execution
from raydfl.training.fates import fixed_tensors
from raydfl.training.plan import Plan
from raydfl.training.precision import check_device, computing_in
from raydfl.training.randomness import preserved
from raydfl.training.replica import Replica
from raydfl.training.settings import ClientSettings, PhaseSettings, TrainSettings
from raydfl.training.step import Loss, Reported, Step
from raydfl.training.substitute import computing_with

__all__ = [
    "ClientSettings",
    "Clock",
    "DeadlineExceededError",
    "Execution",
    "Loss",
    "PhaseSettings",
    "Plan",
    "Replica",
    "Reported",
    "Step",
    "TrainSettings",
    "check_device",
    "computing_in",
    "computing_with",
    "fit",
    "fixed_tensors",
    "predict",
    "preserved",
]
