"""What a process does with memory that it frees."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from raydfl.core.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(1 << 19) for _ in range(20)]  # 80 MB, 20,480 pages of 4 kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = [faults() for _ in range(3)][-1]
done = keep_freed_memory()
print(default, done, [faults() for _ in range(3)][-1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of Linux's C library")
@pytest.mark.parametrize("said", [None, "131072"])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", said)
    default, done, kept = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout.split()
    assert done == str(said is None)
    if int(default) < 1000:
        pytest.skip("large pages: hardly a fault in the first place")
    if said is None:
        assert int(kept) < int(default) / 10
    else:
        assert int(kept) > int(default) / 2
