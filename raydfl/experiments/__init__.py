"""Many runs: grids (sweep/), searches (search/), and federations as trials of one's own Tuner (trainable.py); all of Ray Tune.

Imports runs and all below it. Outside of the room only the names below and those of sweep/ and search/ are used.
Begin with trial.py, a run as Ray Tune sees it, and execute.py, which does many of them side by side.
Grids and searches share plan.py, metric.py and table.py.
"""

from raydfl.experiments.plan import check_data_sets, label_of, prepare
from raydfl.experiments.trainable import trainable

__all__ = ["check_data_sets", "label_of", "prepare", "trainable"]
