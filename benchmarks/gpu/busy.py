"""The fraction of the time in which the device computes: from NVML, else from the profiler's time of kernels."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def nvml_is_there(device: str) -> bool:
    """Return whether the GPU's own measure is readable (package ``nvidia-ml-py``)."""
    if device == "cpu":
        return False
    try:
        torch.cuda.utilization()
    except (ImportError, RuntimeError, AssertionError):
        return False
    return True


def busy(work: Callable[[], T], device: str) -> tuple[T, float, str]:
    """Do some work, and measure the fraction of busy time.

    Args:
        work: the work; it should take half a second at least, the interval of NVML's measure.
        device: ``"cuda"``, or ``"cpu"`` in a dry run.

    Returns:
        The work's result, the fraction (0 to 1), and the source of the measure.
    """
    return _measure_by_nvml(work) if nvml_is_there(device) else _measure_by_profiler(work, device)


def _measure_by_nvml(work: Callable[[], T]) -> tuple[T, float, str]:
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            seen.append(torch.cuda.utilization())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        found = work()
    finally:
        over.set()
        watcher.join()
    return found, statistics.fmean(seen[1:] or seen or [0]) / 100, "NVML"


def _measure_by_profiler(work: Callable[[], T], device: str) -> tuple[T, float, str]:
    of_gpu = device != "cpu"
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if of_gpu else ProfilerActivity.CPU]) as seen:
        found = work()
        if of_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    events = seen.key_averages()
    microseconds = sum(e.self_device_time_total if of_gpu else e.self_cpu_time_total for e in events)
    return found, min(1.0, microseconds / 1e6 / seconds), "profiler"
