"""Memory: the limit of this process, and the C library's allocator."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the limit of a container: version 2, then version 1."""

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


def read_memory_limit() -> int:
    """Return the memory that this process can have at most, in bytes: the machine's, or the limit of its container."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in map(Path, _CGROUPS):
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():  # "max": unlimited
            limit = min(limit, int(text))
    return limit


def read_free_memory() -> int:
    """Return the memory that this process can still allocate, in bytes: the available memory, or its container's limit."""
    limit = read_memory_limit()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return limit
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return limit if available is None else min(limit, 1024 * int(available))
