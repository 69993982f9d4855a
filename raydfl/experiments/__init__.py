"""Many runs: grids (sweep/), searches (search/), and federations as trials of one's own Tuner (trainable.py); all of Ray Tune.

Imports runs and all below it. Outside of the room only the names below and those of sweep/ and search/ are used. Begin with
trial.py, a run as Ray Tune sees it; execute.py has many of them done side by side; plan.py, metric.py and table.py are what grids
and searches share.
"""

from raydfl.experiments.plan import label_of, prepare
from raydfl.experiments.trainable import trainable

__all__ = ["label_of", "prepare", "trainable"]
