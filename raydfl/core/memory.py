"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""
_KEPT = 2**31 - 1  # bytes, the largest value that mallopt accepts


def keep_freed_memory() -> bool:
    """Make glibc reuse freed memory instead of returning it to the system.

    Each training step allocates and frees the same large tensors. By default glibc returns large freed blocks to the system. The
    kernel must then zero their pages again in the next step: a fifth of the time of 2-d convolutional networks, or more. With this
    setting the process keeps the memory of its largest step.

    Returns:
        Whether the setting took effect. It does not with another C library, or if the environment sets MALLOC_TRIM_THRESHOLD_,
        MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES.
    """
    user_settings = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if user_settings or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has no mallopt
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
