"""Durations and sizes as text."""

from __future__ import annotations

import math


def format_duration(seconds: float) -> str:
    """Format a duration in seconds. NaN and infinities become ``?``.

    >>> format_duration(5), format_duration(200), format_duration(7300)
    ('5 s', '3 min 20 s', '2 h 1 min')
    """
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_size(number_of_bytes: float) -> str:
    """Format a number of bytes in powers of 1000.

    >>> format_size(999), format_size(1500), format_size(2.5e9)
    ('999 B', '1.5 kB', '2.5 GB')
    """
    if number_of_bytes < 1000:
        return f"{number_of_bytes:.0f} B"
    value = number_of_bytes
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"
