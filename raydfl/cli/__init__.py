"""The command line: argument parsing and terminal output.

It imports every room, and no room imports it. The command ``raydfl`` calls :func:`raydfl.cli.main.main`. Read main.py first.
"""

__all__ = ["main"]
