"""Handles: what a loss sees of its step while it is computed for several clients at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from raydfl.training.step import Step
from raydfl.training.together.lockstep import NotBatchableError


class UnlikeError(NotBatchableError):
    """These clients hold different things; others may not."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that a step holds for its client: ``step.state[name]``, or ``step.received[key][name]``."""

    key: str | None
    """``None``: in ``step.state``."""
    name: str

    def of(self, steps: Sequence[Step]) -> list[Tensor]:
        """Return the tensor of each client.

        Raises:
            UnlikeError: some client has none, or one of another shape or type.
        """
        values = []
        for step in steps:
            tensors = step.state if self.key is None else step.received.get(self.key, {})
            if self.name not in tensors:
                raise UnlikeError(f"not all clients have {self}")
            values.append(tensors[self.name])
        first = values[0]
        for value in values[1:]:
            if value.shape != first.shape or value.dtype != first.dtype:
                raise UnlikeError(f"{self} differs between clients in shape or type")
        return values

    def __str__(self) -> str:
        return f"step.state[{self.name!r}]" if self.key is None else f"step.received[{self.key!r}][{self.name!r}]"


class TensorHandle(Mapping[str, Tensor]):
    """``step.state`` or an entry of ``step.received``; read only.

    Args:
        key: as in :class:`Source`.
        tensors: each client's own.
        given: the tensors to show, of whichever client is being computed; filled before each computation.
        wanted: where what was asked for and not given is noted; the first client's tensor then stands in for it, and the
            computation is to be done again.
    """

    def __init__(
        self,
        key: str | None,
        tensors: Sequence[Mapping[str, Tensor]],
        given: Mapping[Source, Tensor],
        wanted: dict[Source, None],
    ) -> None:
        self._key = key
        self._tensors = tensors
        self._given = given
        self._wanted = wanted

    def __getitem__(self, name: str) -> Tensor:
        source = Source(self._key, name)
        if source in self._given:
            return self._given[source]
        if name not in self:
            raise KeyError(name)
        self._wanted[source] = None
        return self._tensors[0][name].detach().clone()

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and Source(self._key, name) in self._given:
            return True
        having = sum(name in tensors for tensors in self._tensors)
        if 0 < having < len(self._tensors):
            raise UnlikeError(f"not all clients have {Source(self._key, str(name))}")
        return having > 0

    def __iter__(self) -> Iterator[str]:
        names = self._tensors[0].keys()
        if any(tensors.keys() != names for tensors in self._tensors[1:]):
            what = "step.state" if self._key is None else f"step.received[{self._key!r}]"
            raise UnlikeError(f"{what} does not hold the same names at all clients")
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Unavailable:
    """Stands in for what is no tensor and not the same for all: whatever is done with it, clients are computed apart.

    Args:
        name: the field of the step.
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
