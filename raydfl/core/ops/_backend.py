"""Choice of the implementation: compiled operators for float32 on a CPU, PyTorch's operations otherwise.

The compiled operators have their own rules for autograd and vmap (csrc/transforms.cpp), with a fraction of the overhead of a
torch.autograd.Function. The PyTorch implementations share :func:`stack_clients` as their vmap rule.
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


class _Operators:
    """The forward operators of csrc/operators.cpp, images.cpp and drift.cpp, and the operators of spectra.cpp."""

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
def _load_operators() -> _Operators | None:
    """Load the compiled operators at first use. Without them, log a line and return ``None``."""
    if not _LIBRARY.exists():
        _log.info(
            "raydfl.ops: the operators are not compiled on this machine (%s is missing), so training on a CPU is slower.",
            _LIBRARY.name,
        )
        return None
    try:
        torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]
        return _Operators()
    except (OSError, AttributeError) as error:  # built for another version of PyTorch or raydfl
        _log.warning(
            "raydfl.ops: %s does not load, so training on a CPU is slower. Install raydfl again. %s", _LIBRARY, error
        )
        return None


def is_compiled() -> bool:
    """Return whether the compiled operators are available."""
    return _load_operators() is not None


def kernels() -> dict[str, str]:
    """Return the names and versions of this machine's CPU kernels. The last digits of results depend on them."""
    config = torch.__config__.show()
    mkl = re.search(r"Math Kernel Library Version (\S+)", config)
    onednn = re.search(r"(?:MKL-DNN|oneDNN) v(\S+)", config)
    return {
        "torch": torch.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "onednn": onednn[1] if onednn else "none",
        "mkl": mkl[1] if mkl else "none",
        "operators": _name_arithmetic(torch.ops.raydfl.instruction_set()) if is_compiled() else "none",
    }


def _name_arithmetic(instruction_set: str) -> str:
    """Return ``"avx2"`` for ``"avx512"``, because these operators differ in speed, not in a bit of their results."""
    return "avx2" if instruction_set == "avx512" else instruction_set


def differing_kernels(before: Mapping[str, object]) -> str:
    """Describe differences to another machine's kernels: ``instruction_set AVX512 there, AVX2 here``. Empty: no differences."""
    here = kernels()
    return ", ".join(
        f"{name} {before[name]} there, {here[name]} here" for name in here if before.get(name, here[name]) != here[name]
    )


@contextmanager
def use(implementation: Literal["auto", "torch"]) -> Iterator[None]:
    """Choose the implementation within a context: ``"torch"``, or ``"auto"`` for compiled operators where possible."""
    token = _CHOICE.set(implementation)
    try:
        yield
    finally:
        _CHOICE.reset(token)


def select_operators(x: Tensor) -> _Operators | None:
    """Return the compiled operators if they are available and support ``x``, else ``None``."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and _CHOICE.get() == "auto":
        return _load_operators()
    return None


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the dtype for operations on ``x`` inside torch.autocast; ``None`` outside, and for float64.

    On a CPU it is float32, because the compiled operators are many times as fast as PyTorch's operations in a short type.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)


def torch_is_better(x: Tensor) -> bool:
    """Return whether PyTorch's own layer (cuDNN) is faster. This is so on a GPU, except in vmap, which does not support it."""
    return x.is_cuda and not torch._C._are_functorch_transforms_active()


def stack_clients(clients: int, dims: tuple[Any, ...], values: tuple[Any, ...]) -> list[Any]:
    """Give every tensor argument of an operation a first dimension of clients: [clients, ...].

    Args:
        clients: number of clients, the size of the mapped dimension.
        dims: mapped dimension of each value. ``None``: all clients share the value.
        values: tensors, and constants, returned unchanged.
    """
    stacked = []
    for value, dim in zip(values, dims, strict=True):
        if isinstance(value, Tensor):
            stacked.append(value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0))
        else:
            stacked.append(value)
    return stacked


def second_derivative_error(name: str) -> RuntimeError:
    """Return the error for differentiating an operator twice."""
    return RuntimeError(
        f"{name} of raydfl.ops cannot be differentiated twice; use {name} of torch.nn in a network whose loss contains gradients"
    )


def check_group(name: str, x: Tensor) -> None:
    """Reject nested vmap: ``x`` must have exactly one dimension of clients."""
    if x.dim() != 4:
        raise RuntimeError(f"{name} of raydfl.ops does not support nested torch.func.vmap. Map it once, over clients.")
