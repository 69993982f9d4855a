"""What the search's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

SearchFile = Callable[..., Path]
"""Writes a search's file: ``search_file(samples=3)``."""
