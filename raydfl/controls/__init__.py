"""Controls of a run: scores without training, on the run's test clips, for comparison with the scores of trained models.

``chance`` and ``majority`` ignore the recordings. *Raw-feature controls* use the features of all clients' training clips without a
network: a linear model and the nearest neighbour for classes, distances from normal clips for anomalies.

Imports objectives, data and core. Begin with measure.py.
"""

from raydfl.controls._clips import TESTS
from raydfl.controls._control import Control, auc_interval, from_json, to_json, wilson_interval
from raydfl.controls.measure import measure_controls

__all__ = ["TESTS", "Control", "auc_interval", "from_json", "measure_controls", "to_json", "wilson_interval"]
