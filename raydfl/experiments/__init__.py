"""Studies of many runs on Ray Tune: grids, searches, and federations as trials of a user's Tuner.

Imports runs and every room below it. Read study.py first, which defines the terms of this room, then load.py, run.py, results.py
and tables.py. federation.py trains a trial.
"""

from raydfl.core.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
