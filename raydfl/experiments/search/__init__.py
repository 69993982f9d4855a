"""Searches for good settings: many federations with Ray Tune, one file, one command, one page."""
