"""GPUs as raydfl sees them: who may use one, how much of its memory, and how much a piece of work needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from raydfl.errors import ResourcesError

CONTEXT = 512 << 20
"""Bytes of a GPU's memory that a process takes before it has computed anything, and that PyTorch's cap does not count."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What one actor needs of a GPU."""

    device: str
    """The GPU's name."""
    total: int
    """Bytes that the GPU has."""
    peak: int
    """Bytes that an actor needs at most, its CUDA context included."""

    @property
    def slots(self) -> int:
        """Actors that fit on the GPU."""
        return self.total // self.peak


class Device(Protocol):
    """A GPU whose memory can be measured."""

    def name(self) -> str:
        """What kind of GPU it is."""
        ...

    def total(self) -> int:
        """Bytes of memory."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Do some work; bytes that this process needed for it at most, its CUDA context included."""
        ...


class CudaDevice:
    """The current CUDA device."""

    def name(self) -> str:
        """As PyTorch calls it."""
        return torch.cuda.get_device_name()

    def total(self) -> int:
        """Of the device."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def peak(self, work: Callable[[], None]) -> int:
        """What PyTorch's allocator held at most, and what else is in use on a GPU that this process has for itself."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        return torch.cuda.max_memory_reserved() + max(total - free - held, CONTEXT)


def cap(gpus: float, total: int) -> float:
    """The share of a GPU's memory that PyTorch may allocate in an actor: its share without the CUDA context.

    Args:
        gpus: the actor's share, above 0; whole GPUs have no cap.
        total: bytes that the GPU has.

    Raises:
        ResourcesError: the context alone fills the share.
    """
    if gpus >= 1:
        return 1.0
    left = gpus - CONTEXT / total
    if left <= 0:
        raise ResourcesError(
            f"ray.gpus={gpus:g} of a GPU with {gigabytes(total)} is {gigabytes(gpus * total)}, which a process needs before it "
            f"computes anything ({gigabytes(CONTEXT)}); raise ray.gpus, or set it to auto"
        )
    return left


def hide_gpus() -> None:
    """Let this process see no GPU, as long as it has not used one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def gigabytes(number_of_bytes: float) -> str:
    """Bytes in words, as memory is counted.

    >>> gigabytes(3 << 29)
    '1.50 GiB'
    """
    return f"{number_of_bytes / 2**30:.2f} GiB"
