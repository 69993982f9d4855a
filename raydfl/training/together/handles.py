"""Stand-ins for the fields of a step during the batched computation of a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from raydfl.training.step import Step
from raydfl.training.together.lockstep import NotBatchableError


class UnequalClientsError(NotBatchableError):
    """The clients of this group differ. A different group of the same kind may be batchable."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Place of a client's tensor: ``step.state[name]`` or ``step.received[key][name]``."""

    key: str | None
    """Key in ``step.received``. ``None``: the tensor is in ``step.state``."""
    name: str

    def read(self, steps: Sequence[Step]) -> list[Tensor]:
        """Return the tensor of each client.

        Raises:
            UnequalClientsError: a client has no such tensor, or the shapes or types differ.
        """
        values = []
        for step in steps:
            tensors = step.state if self.key is None else step.received.get(self.key, {})
            if self.name not in tensors:
                raise UnequalClientsError(f"not all clients have {self}")
            values.append(tensors[self.name])
        first = values[0]
        for value in values[1:]:
            if value.shape != first.shape or value.dtype != first.dtype:
                raise UnequalClientsError(f"{self} differs between clients in shape or type")
        return values

    def __str__(self) -> str:
        return f"step.state[{self.name!r}]" if self.key is None else f"step.received[{self.key!r}][{self.name!r}]"


class TensorHandle(Mapping[str, Tensor]):
    """Read-only stand-in for ``step.state`` or an entry of ``step.received``.

    Args:
        key: key as in :class:`TensorSource`.
        tensors: tensors of each client.
        available: mapped tensors of the current computation, updated before each computation.
        requested: receives the sources that are not available. The handle then returns the first client's tensor, and the
            computation must be repeated.
    """

    def __init__(
        self,
        key: str | None,
        tensors: Sequence[Mapping[str, Tensor]],
        available: Mapping[TensorSource, Tensor],
        requested: dict[TensorSource, None],
    ) -> None:
        self._key = key
        self._tensors = tensors
        self._available = available
        self._requested = requested

    def __getitem__(self, name: str) -> Tensor:
        source = TensorSource(self._key, name)
        if source in self._available:
            return self._available[source]
        if name not in self:
            raise KeyError(name)
        self._requested[source] = None
        return self._tensors[0][name].detach().clone()

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and TensorSource(self._key, name) in self._available:
            return True
        count = sum(name in tensors for tensors in self._tensors)
        if 0 < count < len(self._tensors):
            raise UnequalClientsError(f"not all clients have {TensorSource(self._key, str(name))}")
        return count > 0

    def __iter__(self) -> Iterator[str]:
        names = self._tensors[0].keys()
        if any(tensors.keys() != names for tensors in self._tensors[1:]):
            place = "step.state" if self._key is None else f"step.received[{self._key!r}]"
            raise UnequalClientsError(f"{place} does not hold the same names at all clients")
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Unavailable:
    """Stand-in for a field without a batched form. Any use of it ends the batched computation.

    Args:
        name: name of the field of the step.
    """

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_reason", f"the loss reads step.{name}, which is not the same for all clients")

    def _refuse(self, *_: object) -> NoReturn:
        raise NotBatchableError(object.__getattribute__(self, "_reason"))

    def __getattr__(self, _: str) -> NoReturn:
        self._refuse()

    __setattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __contains__ = __call__ = _refuse
    __hash__ = __str__ = __repr__ = __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __mod__ = __floordiv__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _refuse
    __int__ = __float__ = __index__ = _refuse
