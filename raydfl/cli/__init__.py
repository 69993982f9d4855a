"""The command line: argument parsing and terminal output.

Imports every room, and no room imports it. The command ``raydfl`` calls :func:`raydfl.cli.main.main`. Begin with main.py.
"""

__all__ = ["main"]
