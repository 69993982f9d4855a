"""Many runs: studies, which are grids and searches, and federations as trials of one's own Tuner; all of Ray Tune.

Imports runs and all below it. Outside of the room only the names below are used.
Begin with study.py, which explains the words of the room, then load.py, run.py, results.py and tables.py. A trial is federation.py.
"""

from raydfl.core.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
