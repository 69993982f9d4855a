"""Many runs: grids (sweep/), searches on Ray Tune (search/), and federations in a Tuner of one's own (trainable.py).

Imports runs and all below it. What they share: plan.py (configurations), metric.py and table.py (results), trial.py (a run as
Ray Tune sees it). Begin with trainable.py, sweep/run.py and search/run.py.
"""
