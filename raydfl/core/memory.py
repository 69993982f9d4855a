"""Memory that a process frees: whether the system gets it back."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of the settings in glibc's malloc.h."""
_KEPT = 2**31 - 1  # bytes, the greatest that mallopt takes


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees, for its next step.

    A training step takes and frees the same large tensors as the one before. The C library of Linux gives freed blocks of many
    megabytes back to the system, which fills them with zeros again, page by page, when the next step asks for them: a fifth of the
    time of a network with convolutions in two dimensions, and more. The process then holds as much as its largest step needed.

    Returns:
        Whether it does: not where the C library is another one, and not where MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or
        GLIBC_TUNABLES are set in the environment, which then decide.
    """
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if chosen or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has none
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
