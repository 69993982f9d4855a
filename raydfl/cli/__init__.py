"""The command line: words on a terminal.

Imports every room; no room imports it. Its one door is main.py, the command ``raydfl``. Begin with main.py.
"""

__all__ = ["main"]
