"""The command line: words on a terminal.

Imports every room; only jobs/ and tune/ import it. Begin with main.py.
"""
