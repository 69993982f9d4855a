"""A simulated GPU: tensors with the device "cuda", computed on the CPU, that cannot be mixed with CPU tensors.

It rejects operations that a GPU rejects: tensors of both devices, ``.numpy()``, generators of the other device, raydfl's compiled
operators (CPU only), functions of torch.cuda that take the number of a device, and batch norm of unaligned tensors. It cannot test
CUDA's kernels.

PyTorch's C++ code sees the device "meta" (so do tensors inside of torch.func.vmap, which are not ours); both names mean this GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from raydfl.training.together import lockstep

CUDA, META, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
GIB = 1 << 30
aten = torch.ops.aten
_OfPyTorch = torch.Generator
CROSSING = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
"""Operations that take tensors of both devices."""
CPU_INDICES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations whose indices, not whose values, may lie on the CPU."""
BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten._native_batch_norm_legit.default}


class OnGpu(Tensor):
    """A tensor of the simulated GPU. ``values`` stores its data."""

    __slots__ = ("values",)  # no attribute that whoever looks through a tensor's would find
    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=META,
            requires_grad=False,
        )
        made.values = values
        return made  # type: ignore[no-any-return]

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "meta")


def _wrap(value: Any) -> Any:
    return OnGpu(value) if type(value) is Tensor else value


def _unwrap(value: Any) -> Any:
    return value.values if isinstance(value, OnGpu) else value


def _computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation with an operand or the result on the GPU."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    gpu = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    _check_mixed(function, args, tensors, gpu)
    if function.namespace == "raydfl" and gpu:
        raise NotImplementedError(f"{function}: there is no kernel for 'CUDA' tensors")
    if function in BATCH_NORMS and any(tensor.values.data_ptr() % 16 for tensor in gpu):  # seen with cuDNN 9.19
        raise RuntimeError("CUDA error: misaligned address")
    to_cpu = "device" in kwargs and kwargs["device"] is not None and not _is_gpu(kwargs["device"])
    own = {name: value for name, value in tree_map(_unwrap, kwargs).items() if name not in ("device", "pin_memory")}
    if "device" in kwargs and function.namespace == "aten":
        own["device"] = CPU
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        found = function(*tree_map(_unwrap, args), **own)
    if to_cpu:
        return found
    if function is aten.copy_.default and not isinstance(args[0], OnGpu):
        return args[0]
    if function is aten._local_scalar_dense.default:
        return found
    wrapped = tree_map(_wrap, found)
    return return_and_correct_aliasing(function, args, kwargs, wrapped) if gpu else wrapped


def _check_mixed(function: Any, args: Any, tensors: list[Tensor], gpu: list[OnGpu]) -> None:
    of_cpu = [tensor for tensor in tensors if not isinstance(tensor, OnGpu)]
    if not gpu or not of_cpu or function in CROSSING:
        return
    if function in CPU_INDICES and isinstance(args[0], OnGpu):
        values = [value for value in args[2:] if isinstance(value, Tensor)]
        of_cpu = [value for value in values if not isinstance(value, OnGpu)]
    # A number on the CPU may stand in elementwise operations.
    if of_cpu and not (torch.Tag.pointwise in function.tags and all(tensor.ndim == 0 for tensor in of_cpu)):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {function} got cuda:0 and cpu")


class _Below(TorchDispatchMode):
    """Create tensors on the GPU, by moves and by the argument ``device``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else PyTorch's compiler would be imported."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        if any(isinstance(value, OnGpu) for value in flat) or _is_gpu(kwargs.get("device")):
            return _computed(function, args, kwargs)
        return function(*args, **kwargs)


class _Above(TorchFunctionMode):
    """Translate devices in arguments, and reject access to the memory of a GPU tensor."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        name = getattr(function, "__name__", "")
        if isinstance(first, OnGpu):
            if name == "__set__" and function.__self__ is Tensor.data:
                first.values = args[1].values
                return None
            if name in ("data_ptr", "untyped_storage", "is_pinned"):
                return getattr(first.values, name)()
            if name in ("numpy", "__array__"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            if name == "tolist":
                return first.values.tolist()
            if name == "cpu":
                return function(*args, **kwargs)
        if name == "cuda" and isinstance(first, Tensor):
            return first.to(META)
        device = kwargs.get("device")
        if _is_gpu(device):
            kwargs["device"] = META
        args = tuple(META if isinstance(value, torch.device) and _is_gpu(value) else value for value in args)
        if name == "to" and len(args) > 1 and isinstance(args[1], str) and _is_gpu(args[1]):
            args = (first, META, *args[2:])
        if function in (torch.tensor, torch.as_tensor) and _is_gpu(device):
            del kwargs["device"]
            return function(*args, **kwargs).to(META)
        generator = kwargs.get("generator")
        if isinstance(generator, _OfPyTorch):
            on_gpu = _is_gpu(device) or isinstance(first, OnGpu)
            if on_gpu != isinstance(generator, _Generator):
                raise RuntimeError(
                    f"Expected a generator of the {'GPU' if on_gpu else 'CPU'}, got one of the other device"
                )
        return function(*args, **kwargs)


class _Generator(_OfPyTorch):
    """A generator of the GPU."""


class _Generators(_OfPyTorch):
    """Replacement of torch.Generator for both devices."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator() if _is_gpu(device) else _OfPyTorch(device)


@contextlib.contextmanager
def here() -> Iterator[None]:
    """Simulate a GPU in this thread within the block."""
    with _Below(), _Above():
        yield


@contextlib.contextmanager
def pretended() -> Iterator[pytest.MonkeyPatch]:
    """Simulate one GPU of 16 GiB within the block, also in the threads of clients trained together."""
    generator = torch.Generator()
    run = lockstep._Member._run

    def run_here(member: Any) -> None:
        with here():
            run(member)

    index = torch.cuda._utils._get_device_index

    def of_a_device(value: Any, optional: bool = True) -> Any:
        def asked(device: Any = None) -> Any:
            if device is not None and index(device, optional=optional) not in (0, None):
                raise ValueError(device)
            return value() if callable(value) else value

        return asked

    patches = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_rng_state": lambda *_: generator.get_state(),
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "manual_seed": generator.manual_seed,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "pretended",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=16 * GIB, name="pretended"),
        "mem_get_info": lambda *_: (15 * GIB, 16 * GIB),
        "memory_reserved": lambda *_: GIB,
        "max_memory_reserved": lambda *_: GIB,
        "reset_peak_memory_stats": lambda *_: None,
        "set_per_process_memory_fraction": lambda *_: None,
        "get_per_process_memory_fraction": of_a_device(1.0, optional=False),
    }
    autocast = torch.is_autocast_enabled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: autocast("cuda" if device == "meta" else device))
        for name, value in patches.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Generator", _Generators)
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: False)
        patch.setattr(lockstep._Member, "_run", run_here)
        with here():
            yield patch
