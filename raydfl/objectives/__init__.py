"""Objectives, the learning tasks of a federation.

An objective defines the width of the networks' last layer, the loss of a batch, the answer for a recording, and the metrics.
Methods use the configured objective by default, so most methods support every task. Each objective is a file of this room;
the file's name is the objective's name in a configuration. To write an objective, subclass :class:`Objective`.

Imports training, data and core. Begin with classify.py.
"""

from raydfl.objectives._anomaly import AnomalyObjective
from raydfl.objectives._find import find_objective
from raydfl.objectives._objective import Objective
from raydfl.objectives._reference import distances
from raydfl.objectives._tokens import TokenObjective, count_frames_per_token
from raydfl.objectives.classify import Classify
from raydfl.objectives.contrast import Contrast
from raydfl.objectives.events import Events, mark_active_frames
from raydfl.objectives.reconstruct import average_bins
from raydfl.objectives.verify import Verify

__all__ = [
    "AnomalyObjective",
    "Classify",
    "Contrast",
    "Events",
    "Objective",
    "TokenObjective",
    "Verify",
    "average_bins",
    "count_frames_per_token",
    "distances",
    "find_objective",
    "mark_active_frames",
]
