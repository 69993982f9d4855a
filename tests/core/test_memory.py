"""Processes can keep freed memory for reuse."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from raydfl.core.memory import keep_freed_memory

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(1 << 19) for _ in range(20)]  # 80 MB, 20,480 pages of 4 kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = [count_faults() for _ in range(3)][-1]
changed = keep_freed_memory()
print(default, changed, [count_faults() for _ in range(3)][-1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of Linux's C library")
@pytest.mark.parametrize("threshold", [None, "131072"])
def test_freed_memory_is_kept_unless_the_environment_sets_a_threshold(
    threshold: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if threshold is not None:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", threshold)
    default, changed, faults = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout.split()
    assert changed == str(threshold is None)
    if int(default) < 1000:
        pytest.skip("large pages: too few page faults to compare")
    if threshold is None:
        assert int(faults) < int(default) / 10
    else:
        assert int(faults) > int(default) / 2
