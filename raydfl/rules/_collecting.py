"""Base class of rules over all updates of a round, and the grouping of updates."""

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
from raydfl.rules._cuts import fill_cuts
from raydfl.rules._group import Group
from raydfl.rules._rule import Aggregate, Rule, merge_tensors
from raydfl.rules._weights import check_shapes


@dataclass(frozen=True)
class CollectingRule(Rule):
    """Base class of rules over all updates of a round. A subclass combines a :class:`Group` into a vector.

    Example, the coordinate-wise median::

        @dataclass(frozen=True)
        class Median(CollectingRule):
            def combine(self, group: Group) -> np.ndarray:
                return np.median(group.matrix(), axis=0)
    """

    @property
    def collects(self) -> bool:
        """Return True."""
        return True

    @abstractmethod
    def combine(self, group: Group) -> np.ndarray:
        """Combine the values of the clients into the server's new values.

        Returns:
            float [group.layout.size].
        """

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Combine the updates group by group."""
        sent = [fill_cuts(update, current.get(update.key, {})) for update in updates]
        by_key: dict[str, list[int]] = {}
        for position, update in enumerate(sent):
            by_key.setdefault(update.key, []).append(position)
        changed: dict[str, dict[str, Tensor]] = {}
        report: dict[str, Ratio] = {}
        # A client may be in several groups: its influence is the mean over groups, weighted by their elements.
        influences, elements, has_influence = np.zeros(len(sent)), np.zeros(len(sent)), False
        with one_thread():
            for key, positions in by_key.items():
                changed[key] = {}
                for members, group in _split_by_senders(
                    [sent[position] for position in positions], current.get(key, {})
                ):
                    group.random = rng
                    vector = np.ascontiguousarray(self.combine(group), dtype=np.float32)
                    # Clone each tensor, because pickling a view would pickle the whole vector.
                    changed[key] |= {name: view.clone() for name, view in group.layout.views(vector).items()}
                    for name, ratio in group.report.items():
                        report[name] = report.get(name, Ratio(0, 0)) + ratio
                    if group.influence is not None:
                        has_influence = True
                        rows = [positions[member] for member in members]
                        influences[rows] += group.influence * group.layout.size
                        elements[rows] += group.layout.size
        influence = influences / np.maximum(elements, 1) if has_influence else None
        return Aggregate(merge_tensors(changed, current), report, influence)


def one_thread() -> ThreadpoolController:
    """Limit NumPy's matrix products to a single thread within a ``with`` block, for reproducible sums."""
    # The number of threads changes the order of the sums, and so their last bits.
    return _find_blas().limit(limits=1, user_api="blas")


@cache
def _find_blas() -> ThreadpoolController:
    return ThreadpoolController()


def _split_by_senders(updates: Sequence[Update], current: Tensors) -> Iterator[tuple[Sequence[int], Group]]:
    """Split the tensors of a key into groups from the same clients.

    Yields:
        The positions of the clients in ``updates``, and their group.
    """
    rows = [FlatTensors.from_tensors(update.tensors) for update in updates]
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
    for name, positions_of_senders in senders.items():
        names.setdefault(tuple(positions_of_senders), []).append(name)
    for positions, group_names in names.items():
        layout = Layout(tuple(group_names), tuple(shapes[name] for name in group_names))
        yield (
            positions,
            Group(
                layout,
                [_select_tensors(rows[position], layout) for position in positions],
                [updates[position] for position in positions],
                current,
            ),
        )


def _select_tensors(row: FlatTensors, layout: Layout) -> np.ndarray:
    """Select the tensors of ``layout`` from a row: float32 [layout.size], without a copy if the layouts are equal."""
    if row.layout == layout:
        return row.vector
    return np.concatenate([row.vector[row.layout.columns(name)] for name in layout.names])
