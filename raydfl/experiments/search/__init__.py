"""Searches for good settings: many federations, one file, one command, one page. Begin with plan.py, controller.py and run.py."""

from raydfl.experiments.search.plan import Search, load_search, trial_name
from raydfl.experiments.search.results import SearchResults, best_command, columns, lines
from raydfl.experiments.search.run import run_search

__all__ = ["Search", "SearchResults", "best_command", "columns", "lines", "load_search", "run_search", "trial_name"]
