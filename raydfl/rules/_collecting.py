"""Rules that need all updates at once, and how the updates are cut into groups for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
from pydantic.dataclasses import dataclass
from threadpoolctl import ThreadpoolController
from torch import Tensor

from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Ratio, Tensors, Update
from raydfl.rules._cuts import filled
from raydfl.rules._group import Group
from raydfl.rules._rule import Aggregate, Rule, over_current
from raydfl.rules._weights import check_shapes


@dataclass(frozen=True)
class CollectingRule(Rule):
    """A rule that needs all updates at once. A subclass says how one :class:`Group` becomes one vector.

    The coordinate-wise median, for example::

        @dataclass(frozen=True)
        class Median(CollectingRule):
            def combine(self, group: Group) -> np.ndarray:
                return np.median(group.matrix(), axis=0)
    """

    @abstractmethod
    def combine(self, group: Group) -> np.ndarray:
        """Return the server's new values, float [group.layout.size], from those that the clients sent."""

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """See :class:`Rule`."""
        sent = [filled(update, current.get(update.key, {})) for update in updates]
        by_key: dict[str, list[int]] = {}
        for position, update in enumerate(sent):
            by_key.setdefault(update.key, []).append(position)
        changed: dict[str, dict[str, Tensor]] = {}
        report: dict[str, Ratio] = {}
        kept, elements, judged = np.zeros(len(sent)), np.zeros(len(sent)), False
        with one_thread():
            for key, positions in by_key.items():
                changed[key] = {}
                for members, group in _groups([sent[position] for position in positions], current.get(key, {})):
                    group.random = rng
                    vector = np.ascontiguousarray(self.combine(group), dtype=np.float32)
                    # Each tensor gets memory of its own: pickling a view would pickle the whole vector.
                    changed[key] |= {name: view.clone() for name, view in group.layout.views(vector).items()}
                    for name, ratio in group.report.items():
                        report[name] = report.get(name, Ratio(0, 0)) + ratio
                    if group.influence is not None:
                        judged = True
                        places = [positions[member] for member in members]
                        kept[places] += group.influence * group.layout.size
                        elements[places] += group.layout.size
        influence = kept / np.maximum(elements, 1) if judged else None
        return Aggregate(over_current(changed, current), report, influence)


def one_thread() -> ThreadpoolController:
    """Return a context in which matrix products use one thread: the order of their sums depends on the number of threads."""
    return _blas().limit(limits=1, user_api="blas")


@cache
def _blas() -> ThreadpoolController:
    """Return the libraries behind NumPy's matrix products."""
    return ThreadpoolController()


def _groups(updates: Sequence[Update], current: Tensors) -> Iterator[tuple[Sequence[int], Group]]:
    """Group the updates of one key so that within a group every client has every tensor; with the clients' positions."""
    rows = [FlatTensors.of(update.tensors) for update in updates]
    shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
    for position, (update, row) in enumerate(zip(updates, rows, strict=True)):
        if position == 0 or row.layout != rows[position - 1].layout:
            check_shapes(update, row.layout, shapes)
    if all(row.layout == rows[0].layout for row in rows):
        yield range(len(rows)), Group(rows[0].layout, [row.vector for row in rows], updates, current)
        return
    senders: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        for name in row:
            senders.setdefault(name, []).append(position)
    names: dict[tuple[int, ...], list[str]] = {}
    for name, those in senders.items():
        names.setdefault(tuple(those), []).append(name)
    for positions, together in names.items():
        layout = Layout(tuple(together), tuple(shapes[name] for name in together))
        yield (
            positions,
            Group(
                layout,
                [_part(rows[position], layout) for position in positions],
                [updates[position] for position in positions],
                current,
            ),
        )


def _part(row: FlatTensors, layout: Layout) -> np.ndarray:
    """Take the tensors of ``layout`` out of a row: float32 [layout.size], the row itself where it has no others."""
    if row.layout == layout:
        return row.vector
    return np.concatenate([row.vector[row.layout.columns(name)] for name in layout.names])
