"""Local training of a client: the step of a method's code, the training loop, the optimiser.

Imports data and core. Begin with step.py and _fit.py. together/ trains several clients in one batched computation.

Terms: a *flat name* is ``"model/layer.weight"``. A tensor is *shared* (sent to the server), *private* (kept at the client) or
*fixed* (never changed, sent or kept). A training is *batched* if several clients compute it at once, else *unbatched*.
"""

from raydfl.training._fit import fit, predict
from raydfl.training.clock import Clock, DeadlineExceededError
from raydfl.training.execution import Execution
from raydfl.training.fleet import FleetSettings, HoursSettings
from raydfl.training.multiply_adds import TrainingCounter, count_multiply_adds
from raydfl.training.ownership import find_fixed_tensors
from raydfl.training.plan import Plan
from raydfl.training.precision import allow_tf32, autocast, check_device
from raydfl.training.private import check_networks, count_steps
from raydfl.training.randomness import preserve_generators
from raydfl.training.replica import Replica
from raydfl.training.settings import ClientSettings, PhaseSettings, TrainSettings
from raydfl.training.step import Loss, Reported, Step
from raydfl.training.substitute import substitute_tensors
from raydfl.training.withheld import PrivateTask, WithheldData

__all__ = [
    "ClientSettings",
    "Clock",
    "DeadlineExceededError",
    "Execution",
    "FleetSettings",
    "HoursSettings",
    "Loss",
    "PhaseSettings",
    "Plan",
    "PrivateTask",
    "Replica",
    "Reported",
    "Step",
    "TrainSettings",
    "TrainingCounter",
    "WithheldData",
    "allow_tf32",
    "autocast",
    "check_device",
    "check_networks",
    "count_multiply_adds",
    "count_steps",
    "find_fixed_tensors",
    "fit",
    "predict",
    "preserve_generators",
    "substitute_tensors",
]
