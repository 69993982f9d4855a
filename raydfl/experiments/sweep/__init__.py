"""Grids of runs: one file, one command, one table."""
