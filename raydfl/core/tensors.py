"""Many tensors as one flat float32 vector, and back as views, without a copy.

Weights travel between processes as one vector per key: Ray reads a NumPy array from its object store without copying it,
which it does not do for torch tensors. Everything travels as float32, counts and masks included (whole numbers are exact
up to 2**24).

An array that comes out of the object store is shared by every process of the node and read-only. torch knows no read-only
tensors: writing into a view of such an array would succeed and change what all the others read. So views are for reading.
``module.load_state_dict(views)`` copies and is safe; ``parameter.data = view``, an optimiser over views and every in-place
operation on one are not.
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
    """The place of each tensor in a flat vector. Hashable: equal layouts describe interchangeable vectors."""

    names: tuple[str, ...]
    """In the order in which they lie in the vector."""
    shapes: tuple[tuple[int, ...], ...]
    """One for each name."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(
                f"a layout needs one shape for each name: {len(self.names)} names, {len(self.shapes)} shapes"
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"a layout names each tensor once: {self.names}")

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of these tensors, in the mapping's order."""
        if isinstance(tensors, FlatTensors):
            return tensors.layout
        return _layout(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """Return the layout of tensors with these shapes, by name, in the mapping's order."""
        return _layout(tuple(shapes), tuple(tuple(shape) for shape in shapes.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        # What is derived stays out of the pickle: a layout travels with every update.
        return _layout, (self.names, self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each tensor, and at the end the vector's length: names + 1 numbers."""
        return tuple(accumulate((math.prod(shape) for shape in self.shapes), initial=0))

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return self.offsets[-1]

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Name -> its index in ``names``."""
        return {name: position for position, name in enumerate(self.names)}

    def columns(self, name: str) -> slice:
        """Return the range of one tensor's elements. Raises ``KeyError`` for an unknown name."""
        position = self.positions[name]
        return slice(self.offsets[position], self.offsets[position + 1])

    def views(self, vector: np.ndarray | Tensor) -> dict[str, Tensor]:
        """Return the tensors in ``vector``, as views of its memory: see the module's warning about writing into them.

        Args:
            vector: float32 [size]; contiguous.
        """
        whole = _as_tensor(vector)
        if whole.shape != (self.size,):
            raise ValueError(f"a vector of {self.size} elements is needed, this one has shape {tuple(whole.shape)}")
        parts = zip(self.names, self.shapes, self.offsets, self.offsets[1:], strict=False)
        return {name: whole[start:stop].view(shape) for name, shape, start, stop in parts}


@lru_cache(maxsize=1024)
def _layout(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Layout:
    """Return one object for equal layouts: several in one message travel once, and what is derived from them is derived once."""
    return Layout(names, shapes)


class FlatTensors(Mapping[str, Tensor]):
    """A mapping of tensors that lie in one vector; reading an item makes a view (see the module's warning).

    It pickles as its layout and one array, which Ray moves without a copy.
    """

    __slots__ = ("_moved", "layout", "vector")

    def __init__(self, layout: Layout, vector: np.ndarray) -> None:
        """Wrap ``vector`` (float32 [layout.size], contiguous) without copying it."""
        if vector.dtype != np.float32 or vector.shape != (layout.size,) or not vector.flags.c_contiguous:
            raise ValueError(
                f"a contiguous float32 vector of {layout.size} elements is needed, "
                f"this one is {vector.dtype} with shape {vector.shape}"
            )
        self.layout = layout
        self.vector = vector
        self._moved: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> FlatTensors:
        """Flatten these tensors (see :func:`flatten`)."""
        return tensors if isinstance(tensors, cls) else cls(*flatten(tensors))

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatTensors, (self.layout, self.vector)

    @property
    def whole(self) -> Tensor:
        """The vector as a tensor of the same memory (see the module's warning)."""
        return _as_tensor(self.vector)

    def on(self, device: torch.device) -> Tensor:
        """Return the vector as a tensor on a device, for reading; it is moved once for all clients of a process that receive it."""
        if device.type == "cpu":
            return self.whole
        if self._moved is None or not _is(self._moved.device, device):
            self._moved = self.whole.to(device)
        return self._moved

    def __getitem__(self, name: str) -> Tensor:
        part = self.vector[self.layout.columns(name)]
        return _as_tensor(part).view(self.layout.shapes[self.layout.positions[name]])

    def __contains__(self, name: object) -> bool:
        return name in self.layout.positions

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def __repr__(self) -> str:
        return f"FlatTensors({len(self)} tensors, {self.layout.size} elements)"


class OwnTensors(Mapping[str, Tensor]):
    """A copy of tensors on a device, to be written into; it is made when a tensor is first asked for."""

    __slots__ = ("_device", "_sent", "_views")

    def __init__(self, sent: FlatTensors, device: torch.device) -> None:
        """``sent`` has to stay as it is until then."""
        self._sent = sent
        self._device = device
        self._views: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._views is None:
            self._views = self._sent.layout.views(self._sent.on(self._device).clone())
        return self._views[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sent

    def __iter__(self) -> Iterator[str]:
        return iter(self._sent)

    def __len__(self) -> int:
        return len(self._sent)

    def __repr__(self) -> str:
        return f"OwnTensors({len(self)} tensors, {self._sent.layout.size} elements)"


def flatten(tensors: Mapping[str, Tensor]) -> tuple[Layout, np.ndarray]:
    """Copy the tensors one after another into a new vector: float32 [layout.size], on the CPU, detached.

    :class:`FlatTensors` give the layout and vector that they have, without a copy.

    Raises:
        TypeError: a tensor is complex, which float32 cannot hold.
    """
    if isinstance(tensors, FlatTensors):
        return tensors.layout, tensors.vector
    layout = Layout.of(tensors)
    block = _block(list(tensors.values()), layout)
    if block is not None:
        return layout, block.numpy().copy()
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise TypeError(f"tensor {name!r} is {tensor.dtype}: send its real and imaginary parts as two tensors")
    if any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return layout, _joined(list(tensors.values())).cpu().numpy()
    vector = np.empty(layout.size, dtype=np.float32)
    for name, view in layout.views(vector).items():
        view.copy_(tensors[name].detach())
    return layout, vector


def _is(device: torch.device, asked: torch.device) -> bool:
    """Return whether a tensor's device is the requested one, whose number may be left open."""
    return device.type == asked.type and asked.index in (None, device.index)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Join the tensors, float32, on the GPU if one of them is there: so the CPU waits for it only once."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return torch.cat([tensor.detach().to(device, torch.float32).flatten() for tensor in tensors])


def _block(tensors: Sequence[Tensor], layout: Layout) -> Tensor | None:
    """Return the memory in which float32 tensors lie one after another on the CPU as one tensor; ``None`` if they do not."""
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
    # What lies between two tensors of one memory is of it too.
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    return first.detach().as_strided((layout.size,), (1,))


def _as_tensor(vector: np.ndarray | Tensor) -> Tensor:
    """Return the same memory as a tensor."""
    if isinstance(vector, Tensor):
        return vector
    if vector.flags.writeable:
        return torch.from_numpy(vector)
    with warnings.catch_warnings():
        # Reading the shared memory of the object store is the purpose; the module's text says what must not be done.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(vector)
