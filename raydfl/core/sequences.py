"""Lazy sequences: items are computed on access."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class OnDemand(Sequence[T_co]):
    """A sequence that computes its items on access. A slice is a list."""

    @abstractmethod
    def item(self, position: int) -> T_co:
        """Compute the item at ``position``, from 0 to the length less 1."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        if isinstance(index, slice):
            return [self.item(position) for position in range(*index.indices(len(self)))]
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"{type(self).__name__}: {index} is outside {length} items.")
        return self.item(int(index) % length)
