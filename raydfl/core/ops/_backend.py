"""The choice of the implementation: the compiled one for float32 on a CPU where it was built, PyTorch's operations for all else.

The compiled operators bring their own rules for autograd and vmap (csrc/transforms.cpp), at a fraction of the time that those
of a torch.autograd.Function take for each call. The rules of the others share :func:`grouped`: under ``torch.func.vmap`` all
tensors get the dimension of clients in front.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

_LIBRARY = Path(__file__).with_name("_cpu.so")
_CHOICE: ContextVar[Literal["auto", "torch"]] = ContextVar("raydfl_ops", default="auto")
_log = logging.getLogger(__name__)


class _Compiled:
    """The forward operators of csrc/operators.cpp, csrc/images.cpp and csrc/drift.cpp, and those of csrc/spectra.cpp."""

    def __init__(self) -> None:
        library = torch.ops.raydfl
        self.conv_forward = library.conv_forward.default
        self.conv2d_forward = library.conv2d_forward.default
        self.norm_forward = library.norm_forward.default
        self.gru_forward = library.gru_forward.default
        self.mean_forward = library.mean_forward.default
        self.drop = library.drop.default
        self.drift_forward = library.drift_forward.default
        self.to_power = library.to_power.default
        self.to_logarithm = library.to_logarithm.default
        self.to_z_scores = library.to_z_scores.default
        self.add_noise = library.add_noise.default
        self.mask = library.mask.default


@cache
def _compiled() -> _Compiled | None:
    """Return the compiled operators, loaded at the first use, or ``None`` after one line in the log."""
    if not _LIBRARY.exists():
        _log.info(
            "raydfl.ops: not compiled on this machine (%s is not there); training on a CPU is slower", _LIBRARY.name
        )
        return None
    try:
        torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]
        return _Compiled()
    except (OSError, AttributeError) as error:  # built for another PyTorch, or of another version of raydfl
        _log.warning(
            "raydfl.ops: %s does not load, install raydfl again; training on a CPU is slower: %s", _LIBRARY, error
        )
        return None


def compiled() -> bool:
    """Return whether the operators in C++ are available."""
    return _compiled() is not None


def kernels() -> dict[str, str]:
    """Return the names and versions of the kernels on this machine's CPU. The last digits of results depend on them."""
    built = torch.__config__.show()
    mkl = re.search(r"Math Kernel Library Version (\S+)", built)
    onednn = re.search(r"(?:MKL-DNN|oneDNN) v(\S+)", built)
    return {
        "torch": torch.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "onednn": onednn[1] if onednn else "none",
        "mkl": mkl[1] if mkl else "none",
        "operators": torch.ops.raydfl.instruction_set() if compiled() else "none",
    }


def differing_kernels(before: Mapping[str, object]) -> str:
    """Return how this machine's kernels differ from others: ``instruction_set AVX512 there, AVX2 here``; empty if they do not."""
    here = kernels()
    return ", ".join(
        f"{name} {before[name]} there, {here[name]} here" for name in here if before.get(name, here[name]) != here[name]
    )


@contextmanager
def use(implementation: Literal["auto", "torch"]) -> Iterator[None]:
    """Within this context, ``"torch"`` leaves the compiled operators aside; ``"auto"`` is as it is outside of any context."""
    token = _CHOICE.set(implementation)
    try:
        yield
    finally:
        _CHOICE.reset(token)


def compiled_for(x: Tensor) -> _Compiled | None:
    """Return the compiled operators, if they are there and compute for such an ``x``."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and _CHOICE.get() == "auto":
        return _compiled()
    return None


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the type in which operations on ``x`` compute inside of torch.autocast; ``None`` outside, and for float64.

    On a CPU float32: there a short type only saves memory, and the compiled operators beat PyTorch's in it many times over.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)


def torch_is_better(x: Tensor) -> bool:
    """Return whether PyTorch's own layer is faster: on a GPU, one model at a time (cuDNN); vmap cannot map it."""
    return x.is_cuda and not torch._C._are_functorch_transforms_active()


def grouped(clients: int, dims: tuple[Any, ...], values: tuple[Any, ...]) -> list[Any]:
    """Return the arguments of an operation for all clients at once: every tensor as [clients, ...].

    Args:
        clients: size of the mapped dimension.
        dims: for each value, the mapped dimension, or ``None`` where all clients share the value.
        values: tensors, and others that stay as they are.
    """
    stacked = []
    for value, dim in zip(values, dims, strict=True):
        if isinstance(value, Tensor):
            stacked.append(value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0))
        else:
            stacked.append(value)
    return stacked


def once(name: str) -> RuntimeError:
    """Return the error of an operation that is differentiated twice."""
    return RuntimeError(
        f"{name} of raydfl.ops cannot be differentiated twice; use {name} of torch.nn in a network whose loss contains gradients"
    )


def check_group(name: str, x: Tensor) -> None:
    """Refuse a mapping over what already has a dimension of clients."""
    if x.dim() != 4:
        raise RuntimeError(
            f"{name} of raydfl.ops can be mapped by torch.func.vmap once, over clients, not in two nested ways"
        )
