"""Grids of runs: one file, one command, one table. Begin with grid.py and run.py."""

from raydfl.experiments.sweep.descriptions import features_text
from raydfl.experiments.sweep.grid import Sweep, load_sweep
from raydfl.experiments.sweep.page import write_page
from raydfl.experiments.sweep.results import collect, columns, lines, write_tables
from raydfl.experiments.sweep.run import SweepOutcome, run_sweep

__all__ = [
    "Sweep",
    "SweepOutcome",
    "collect",
    "columns",
    "features_text",
    "lines",
    "load_sweep",
    "run_sweep",
    "write_page",
    "write_tables",
]
