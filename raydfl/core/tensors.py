"""Conversion of named tensors to one flat float32 vector, and back to views without a copy.

Weights travel between processes as one vector per key: Ray reads a NumPy array from its object store without a copy, but not a
torch tensor. Everything travels as float32, including counts and masks (integers are exact up to 2**24).

All processes of a node share an array in the object store, and it is read-only. torch has no read-only tensors: writing into a view
would succeed and change the weights of all processes. Never write into views. ``module.load_state_dict(views)`` copies and is safe;
``parameter.data = view``, an optimiser over views and in-place operations are not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names, shapes and order of the tensors in a flat vector. Hashable: vectors of equal layouts are interchangeable."""

    names: tuple[str, ...]
    """In the order of the vector."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each name's tensor."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(
                f"Layout: it needs one shape for each name: {len(self.names)} names, {len(self.shapes)} shapes."
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"Layout: it names each tensor once, but names has duplicates: {self.names}.")

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of a mapping of tensors, in its order."""
        if isinstance(tensors, FlatTensors):
            return tensors.layout
        return _layout(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """Return the layout of a mapping of names to shapes, in its order."""
        return _layout(tuple(shapes), tuple(tuple(shape) for shape in shapes.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        # A layout travels with every update, so cached properties stay out of the pickle.
        return _layout, (self.names, self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each tensor, then the vector's length: names + 1 values."""
        return tuple(accumulate((math.prod(shape) for shape in self.shapes), initial=0))

    @property
    def size(self) -> int:
        """Number of elements in the vector."""
        return self.offsets[-1]

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Index of each name in ``names``."""
        return {name: position for position, name in enumerate(self.names)}

    def columns(self, name: str) -> slice:
        """Return the slice of a tensor's elements in the vector.

        Raises:
            KeyError: the name is unknown.
        """
        position = self.positions[name]
        return slice(self.offsets[position], self.offsets[position + 1])

    def views(self, vector: np.ndarray | Tensor) -> dict[str, Tensor]:
        """Return the tensors in ``vector`` as views of its memory. Never write into them (see the module's warning).

        Args:
            vector: float32 [size], contiguous.
        """
        whole = _wrap_vector(vector)
        if whole.shape != (self.size,):
            raise ValueError(f"Layout.views: the vector has shape {tuple(whole.shape)}, not ({self.size},).")
        parts = zip(self.names, self.shapes, self.offsets, self.offsets[1:], strict=False)
        return {name: whole[start:stop].view(shape) for name, shape, start, stop in parts}

    def copy_aligned(self, vector: Tensor) -> dict[str, Tensor]:
        """Copy the tensors in ``vector`` to writable memory, each to an address that is a multiple of 16 bytes.

        On a GPU networks need such addresses: cuDNN's batch norm reads 16 bytes at once, and fails at any other address.

        Args:
            vector: float32 [size].
        """
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = list(accumulate((-(-size // 4) * 4 for size in sizes), initial=0))
        memory = torch.empty(starts[-1], dtype=vector.dtype, device=vector.device)
        parts = zip(self.names, self.shapes, sizes, starts, strict=False)
        copies = {name: memory[start : start + size].view(shape) for name, shape, size, start in parts}
        if copies:
            torch._foreach_copy_(list(copies.values()), list(self.views(vector).values()))  # one operation for all
        return copies


@lru_cache(maxsize=1024)
def _layout(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Layout:
    """Return the same object for equal layouts, so that a message pickles it once and cached properties are shared."""
    return Layout(names, shapes)


class FlatTensors(Mapping[str, Tensor]):
    """A read-only mapping of tensors over one flat vector. Items are views (see the module's warning).

    It pickles as its layout and one array, so Ray moves it without a copy.
    """

    __slots__ = ("_moved", "layout", "vector")

    def __init__(self, layout: Layout, vector: np.ndarray) -> None:
        """Wrap ``vector`` (float32, or float64 for sums, [layout.size], contiguous) without copying it."""
        fits = vector.dtype in (np.float32, np.float64) and vector.shape == (layout.size,)
        if not fits or not vector.flags.c_contiguous:
            raise ValueError(
                f"FlatTensors: a contiguous float32 or float64 vector of {layout.size} elements is needed, "
                f"not {vector.dtype} with shape {vector.shape}."
            )
        self.layout = layout
        self.vector = vector
        self._moved: Tensor | None = None

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> FlatTensors:
        """Flatten a mapping of tensors. Returns ``tensors`` itself if it is flat already."""
        return tensors if isinstance(tensors, cls) else cls(*flatten(tensors))

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatTensors, (self.layout, self.vector)

    @property
    def whole(self) -> Tensor:
        """The vector as a tensor that shares its memory (see the module's warning)."""
        return _wrap_vector(self.vector)

    def to(self, device: torch.device) -> Tensor:
        """Return the vector as a read-only tensor on a device. The copy is cached for all clients of the process."""
        if device.type == "cpu":
            return self.whole
        if self._moved is None or not _is_on(self._moved.device, device):
            self._moved = self.whole.to(device)
        return self._moved

    def __getitem__(self, name: str) -> Tensor:
        part = self.vector[self.layout.columns(name)]
        return _wrap_vector(part).view(self.layout.shapes[self.layout.positions[name]])

    def __contains__(self, name: object) -> bool:
        return name in self.layout.positions

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def __repr__(self) -> str:
        return f"FlatTensors({len(self)} tensors, {self.layout.size} elements)"


class OwnTensors(Mapping[str, Tensor]):
    """A writable copy of tensors on a device, made when an item is first read."""

    __slots__ = ("_device", "_source", "_views")

    def __init__(self, source: FlatTensors, device: torch.device) -> None:
        """Keep a reference to ``source``. It must not change before the first item is read."""
        self._source = source
        self._device = device
        self._views: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._views is None:
            layout, whole = self._source.layout, self._source.to(self._device)
            self._views = layout.views(whole.clone()) if self._device.type == "cpu" else layout.copy_aligned(whole)
        return self._views[name]

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:
        return f"OwnTensors({len(self)} tensors, {self._source.layout.size} elements)"


def flatten(tensors: Mapping[str, Tensor]) -> tuple[Layout, np.ndarray]:
    """Copy tensors into a new flat vector. :class:`FlatTensors` return their own layout and vector, without a copy.

    Returns:
        The layout, and float32 [layout.size] on the CPU, detached.

    Raises:
        TypeError: a tensor is complex.
    """
    if isinstance(tensors, FlatTensors):
        return tensors.layout, tensors.vector
    layout = Layout.from_tensors(tensors)
    block = _find_block(list(tensors.values()), layout)
    if block is not None:  # a single copy, as for a network whose parameters are views of one vector
        return layout, block.numpy().copy()
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise TypeError(f"tensor {name!r} is {tensor.dtype}: send its real and imaginary parts as two tensors")
    if any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return layout, _concatenate(list(tensors.values())).cpu().numpy()
    vector = np.empty(layout.size, dtype=np.float32)
    for name, view in layout.views(vector).items():
        view.copy_(tensors[name].detach())
    return layout, vector


def _is_on(device: torch.device, requested: torch.device) -> bool:
    """Return whether a tensor's device matches the requested device. A request without an index matches any index."""
    return device.type == requested.type and requested.index in (None, device.index)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors as float32, on the GPU if a tensor is on it, so that the CPU waits for a single copy."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return torch.cat([tensor.detach().to(device, torch.float32).flatten() for tensor in tensors])


def _find_block(tensors: Sequence[Tensor], layout: Layout) -> Tensor | None:
    """Return a view over float32 CPU tensors in adjacent memory; ``None`` if they are not adjacent."""
    if not tensors or any(t.dtype is not torch.float32 or t.device.type != "cpu" for t in tensors):
        return None
    first, last = tensors[0], tensors[-1]
    address = first.data_ptr()
    for tensor, offset in zip(tensors, layout.offsets, strict=False):
        if (
            tensor.layout is not torch.strided
            or tensor.data_ptr() != address + 4 * offset
            or not tensor.is_contiguous()
        ):
            return None
    # Two storages may happen to be adjacent. If the first and the last tensor share one, so do all between them.
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    return first.detach().as_strided((layout.size,), (1,))


def _wrap_vector(vector: np.ndarray | Tensor) -> Tensor:
    """Wrap a vector's memory in a tensor."""
    if isinstance(vector, Tensor):
        return vector
    if vector.flags.writeable:
        return torch.from_numpy(vector)
    with warnings.catch_warnings():
        # Read-only memory of the object store is expected here; the module's docstring warns against writing.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(vector)
