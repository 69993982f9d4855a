"""Aggregation rules: many clients' updates in, the server's new tensors out.

A rule works per key and, within a key, per tensor name, over the clients that sent that name: partial models, several
global models and masks need no rule of their own. What nobody sent, or nobody gave any weight, stays as it is.

Updates are taken in client order, and sums run in that order or in a single thread, so that the result is a function of
the updates alone, to the bit.

A rule of one's own is a subclass of :class:`CollectingRule` with one short method, or of :class:`Rule` for full control.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, reduce
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from threadpoolctl import ThreadpoolController
from torch import Tensor

from raydfl import registry
from raydfl.errors import ConfigError, RaydflError, nearest
from raydfl.rows import Parts, Rows, Weight, compiled
from raydfl.tensors import FlatTensors, Layout
from raydfl.types import Ratio, Tensors, Update

_TOGETHER = 4  # updates that a running mean adds at once: each then costs little more than reading it


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """What a rule returns."""

    tensors: dict[str, dict[str, Tensor]]
    """By key, then by name: everything that the server had or the clients sent; float32."""
    report: Mapping[str, Ratio]
    """What the rule did: ``"lpa/pruned/plugin/gru"`` = clients left out, of the clients that took part."""


@dataclass(frozen=True)
class Rule(ABC):
    """A rule; the fields of a subclass are its options."""

    @abstractmethod
    def __call__(self, updates: Iterable[Update], current: Mapping[str, Tensors]) -> Aggregate:
        """Combine the updates, which are read once, in client order.

        Args:
            updates: finite tensors; each update names the key that it changes.
            current: the server's tensors by key; what no update changes is returned as it is.

        Raises:
            RaydflError: tensors of one name differ in shape, or a weight is missing, negative, not finite or of another
                shape than its tensor.
        """


@dataclass(frozen=True)
class WeightedMean(Rule):
    """The mean weighted by ``Update.weight`` (the number of examples, as a rule), summed in float64.

    It keeps one sum for each parameter and at most four updates: its memory does not grow with the cohort.
    """

    def __call__(self, updates: Iterable[Update], current: Mapping[str, Tensors]) -> Aggregate:
        """See :class:`Rule`."""
        means: dict[str, _RunningMean] = {}
        for update in updates:
            if update.key not in means:
                means[update.key] = _RunningMean(current.get(update.key, {}))
            means[update.key].add(update, self._counted(update.weight))
        return Aggregate(_over_current({key: mean.result() for key, mean in means.items()}, current), {})

    def _counted(self, weight: Any) -> Any:
        return weight


@dataclass(frozen=True)
class UniformMean(WeightedMean):
    """The mean in which every client (with masks: every client's element) of a weight above 0 counts the same."""

    def _counted(self, weight: Any) -> Any:
        if isinstance(weight, Mapping):
            return {name: self._counted(value) for name, value in weight.items()}
        return weight.sign() if isinstance(weight, Tensor) else float(np.sign(weight))


@dataclasses.dataclass
class Group:
    """The tensors of one key that the same clients sent, and what a rule may need to combine them."""

    layout: Layout
    """Where each tensor lies in a row, and in the vector that a rule returns."""
    rows: Sequence[np.ndarray]
    """One float32 [elements] for each client, in client order. Read-only: they may be other processes' memory."""
    updates: Sequence[Update]
    """Where the rows come from: their clients and weights."""
    current: Tensors
    """The server's tensors of this key."""
    report: dict[str, Ratio] = dataclasses.field(default_factory=dict)
    """What the rule has to say about this group; the reports of all groups are added up."""
    _scratch: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32), repr=False)

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self.rows)

    @cached_property
    def _numbers(self) -> list[float] | None:
        """The clients' weights where all of them are plain numbers."""
        weights = [(update, update.weight) for update in self.updates]
        if any(isinstance(weight, Mapping) for _, weight in weights):
            return None
        return [cast(float, _weight_of(update, weight, "", ())) for update, weight in weights]

    def layers(self, by: Literal["module", "tensor"]) -> dict[str, list[str]]:
        """The tensors' names by layer: each tensor for itself, or all tensors of a module (names up to the last dot)."""
        layers: dict[str, list[str]] = {}
        for name in self.layout.names:
            layers.setdefault(name.rpartition(".")[0] or name if by == "module" else name, []).append(name)
        return layers

    def matrix(self, names: Sequence[str] | None = None) -> np.ndarray:
        """Some tensors (all by default), one client in each row: float32 [clients, their elements], to work in.

        The next call overwrites it: fresh memory of this size would cost more than the work that is done in it.
        """
        columns = [self.layout.columns(name) for name in names or self.layout.names]
        width = sum(part.stop - part.start for part in columns)
        if self._scratch.size < len(self.rows) * width:
            self._scratch = np.empty(len(self.rows) * width, np.float32)
        matrix = self._scratch[: len(self.rows) * width].reshape(len(self.rows), width)
        for target, row in zip(matrix, self.rows, strict=True):
            start = 0
            for part in columns:
                stop = start + part.stop - part.start
                target[start:stop] = row[part]
                start = stop
        return matrix

    def parts(self, names: Sequence[str]) -> Parts:
        """Where some tensors lie in a row: ranges of elements, those of neighbours in one."""
        parts: list[tuple[int, int]] = []
        for name in names:
            columns = self.layout.columns(name)
            if parts and parts[-1][1] == columns.start:
                parts[-1] = (parts[-1][0], columns.stop)
            else:
                parts.append((columns.start, columns.stop))
        return parts

    def squared_deviations(self, names: Sequence[str]) -> np.ndarray:
        """How far each client's values of some tensors, taken as one vector, are from the uniform mean of all clients.

        The rows are read where they lie; see :meth:`raydfl.rows.Rows.squared_deviations` for the precision.

        Returns:
            The squared Euclidean distances: float64 [clients].
        """
        return self._rows.squared_deviations(self.parts(names))

    def mean(self, name: str, kept: Sequence[int]) -> np.ndarray:
        """The weighted mean of one tensor over some of the clients: float32 [elements].

        It is that of :class:`WeightedMean` over these clients, bit for bit.

        Args:
            kept: positions in ``rows``, ascending.
        """
        columns, shape = self.layout.columns(name), self.layout.shapes[self.layout.positions[name]]
        weights = [_weight_of(self.updates[row], self.updates[row].weight, name, shape) for row in kept]
        total = np.zeros(columns.stop - columns.start)
        self._rows.add_to(total, weights, kept, columns.start)
        return _divided(total, _total(weights), self.current.get(name))

    def means(self, names: Sequence[str], kept: Sequence[int]) -> dict[str, np.ndarray]:
        """:meth:`mean` of several tensors, faster: to the bit where sums are compiled or everybody is kept.

        Otherwise they are rounded to float32 on the way: in float64 these means would cost NumPy more than all that a rule
        does besides.
        """
        weights = [] if self._numbers is None else [self._numbers[row] for row in kept]
        weight = _total(weights)
        if weight == 0:
            return {name: self.mean(name, kept) for name in names}
        parts = self.parts(names)
        if compiled() or len(kept) == len(self.rows):
            sums = [np.zeros(stop - start) for start, stop in parts]
            for total, (start, _) in zip(sums, parts, strict=True):
                self._rows.add_to(total, weights, kept, start)
            means = np.concatenate([_divided(total, weight, None) for total in sums])
        else:
            # A power of two changes no digit; with weights below 1 the sum cannot overflow.
            shares = np.ldexp(weights, -math.frexp(weight)[1])
            means = self._rows.approximate_sum(shares, kept, parts) / shares.sum()
        columns = [self.layout.columns(name) for name in names]
        edges = np.cumsum([part.stop - part.start for part in columns])
        return dict(zip(names, np.split(means, edges[:-1]), strict=True))


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
        """The server's new values, float [group.layout.size], from those that the clients sent."""

    def __call__(self, updates: Iterable[Update], current: Mapping[str, Tensors]) -> Aggregate:
        """See :class:`Rule`."""
        by_key: dict[str, list[Update]] = {}
        for update in updates:
            by_key.setdefault(update.key, []).append(update)
        changed: dict[str, dict[str, Tensor]] = {}
        report: dict[str, Ratio] = {}
        with _blas().limit(limits=1, user_api="blas"):  # how a matrix product sums depends on its number of threads
            for key, sent in by_key.items():
                changed[key] = {}
                for group in _groups(sent, current.get(key, {})):
                    vector = np.ascontiguousarray(self.combine(group), dtype=np.float32)
                    # Each tensor gets memory of its own: pickling a view would pickle the whole vector.
                    changed[key] |= {name: view.clone() for name, view in group.layout.views(vector).items()}
                    for name, ratio in group.report.items():
                        report[name] = report.get(name, Ratio(0, 0)) + ratio
        return Aggregate(_over_current(changed, current), report)


@dataclass(frozen=True)
class LayerwisePruning(CollectingRule):
    """Layer-wise pruning aggregation of FedMLAC.

    For each layer, the clients are sorted by the Euclidean distance of their parameters to the uniform mean of all; those
    with the smallest and the largest deviations are left out, and the others are averaged by their weights. A layer of the
    new model can therefore come from other clients than the next layer. Equations 10 to 14 of the paper.

    Ties go by client order. Where nobody would be left, the client of median deviation is kept. One client is never pruned.
    The report counts the clients left out of each layer.
    """

    vl: Annotated[
        float, Field(ge=0, lt=1, description="share of clients left out for the smallest deviation, 0..1")
    ] = 0.1
    vh: Annotated[float, Field(ge=0, lt=1, description="share of clients left out for the largest deviation, 0..1")] = (
        0.1
    )
    by: Annotated[
        Literal["module", "tensor"],
        Field(description="what a layer is: all tensors of a module (weights and biases together), or each tensor"),
    ] = "module"

    def combine(self, group: Group) -> np.ndarray:
        """See :class:`CollectingRule`."""
        vector = np.empty(group.layout.size, dtype=np.float32)
        clients = len(group.rows)
        # 0.29 * 100 is 28.999...: the guard makes the floor the one of the decimal numbers that the user wrote.
        smallest, largest = (math.floor(share * clients + 1e-9) for share in (self.vl, self.vh))
        for layer, names in group.layers(self.by).items():
            kept = list(range(clients))
            if clients > 1 and smallest + largest > 0:
                order = np.argsort(group.squared_deviations(names), kind="stable").tolist()
                middle = (clients - 1) // 2
                last = clients - largest
                kept = sorted(order[smallest:last] if smallest < last else order[middle : middle + 1])
            for name, mean in group.means(names, kept).items():
                vector[group.layout.columns(name)] = mean
            group.report[f"lpa/pruned/{layer}"] = Ratio(clients - len(kept), clients)
        return vector


RULES: Mapping[str, type[Rule]] = {"weighted_mean": WeightedMean, "uniform_mean": UniformMean, "lpa": LayerwisePruning}
"""The built-in rules by their name in a configuration."""


def find_rule(setting: str | Mapping[str, Any] | None, default: Rule, where: str = "rule") -> Rule:
    """The rule that a configuration asks for.

    Args:
        setting: a name of :data:`RULES` or ``my_file.py:Class``; or a mapping with ``name`` and the rule's options; or
            ``None`` for ``default``, the method's own rule.
        where: the place in the configuration, for the messages.

    Raises:
        ConfigError: no such rule, or an option that it does not have or whose value is out of range.
    """
    if setting is None:
        return default
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name a rule, as in {where}: {{name: lpa, vl: 0.1}}; {nearest('', RULES)}")
    if ":" in name:
        found = registry.load_object(name)
        if not (isinstance(found, type) and issubclass(found, Rule)):
            raise ConfigError(f"{where}: {name!r} is not a subclass of raydfl.aggregate.Rule")
    elif name in RULES:
        found = RULES[name]
    else:
        raise ConfigError(f"{where}: unknown rule {name!r}; {nearest(name, RULES)} Your own class: my_file.py:Class")
    return registry.build(found, options, where)


class _RunningMean:
    """The weighted mean of one key's updates, of which it keeps the sums, and the last few to add them together."""

    def __init__(self, current: Tensors) -> None:
        self._current = current
        self._shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
        self._totals: dict[str, np.ndarray] = {}  # float64 [elements]; those of the first update lie in _flat
        self._weights: dict[str, Weight] = {}
        self._layout = Layout((), ())  # of _flat
        self._flat = np.zeros(0)
        self._waiting: list[tuple[np.ndarray, float]] = []  # updates with that layout, and what they count

    def add(self, update: Update, weight: float | Mapping[str, float | Tensor]) -> None:
        """Add one update, counted with ``weight`` in place of its own."""
        sent = FlatTensors.of(update.tensors)
        if sent.layout == self._layout and not isinstance(weight, Mapping):
            # The same sums as below, in few operations however many tensors there are.
            self._waiting.append((sent.vector, cast(float, _weight_of(update, weight, "", ()))))
            if len(self._waiting) == _TOGETHER:
                self._add_waiting()
            return
        self._add_waiting()
        _check_shapes(update, sent.layout, self._shapes)
        if not self._totals:
            self._layout, self._flat = sent.layout, np.zeros(sent.layout.size)
            self._totals = {name: self._flat[sent.layout.columns(name)] for name in sent}
        rows = Rows([sent.vector])
        for name, shape in zip(sent.layout.names, sent.layout.shapes, strict=True):
            columns = sent.layout.columns(name)
            if name not in self._totals:
                self._totals[name] = np.zeros(columns.stop - columns.start)
            own = _weight_of(update, weight, name, shape)
            rows.add_to(self._totals[name], [own], start=columns.start)
            self._weights[name] = self._weights.get(name, 0.0) + own

    def _add_waiting(self) -> None:
        weights = [weight for _, weight in self._waiting]
        Rows([vector for vector, _ in self._waiting]).add_to(self._flat, weights)
        for name in self._layout.names:
            self._weights[name] = _total(weights, self._weights[name])
        self._waiting = []

    def result(self) -> dict[str, Tensor]:
        """The mean by name, each tensor in memory of its own."""
        self._add_waiting()
        return {
            name: torch.from_numpy(_divided(total, self._weights[name], self._current.get(name))).view(
                self._shapes[name]
            )
            for name, total in self._totals.items()
        }


def _total(weights: Sequence[Any], start: Any = 0.0) -> Any:
    """The sum, one after another: Python's own ``sum`` corrects rounding from 3.12 on, but only within one call."""
    return reduce(operator.add, weights, start)


def _divided(total: np.ndarray, weight: Weight, current: Tensor | None) -> np.ndarray:
    """``total / weight`` as float32 [elements]; where the weight is 0, what the server has, or 0 if it has nothing."""
    if isinstance(weight, float) and weight > 0:
        return (total / weight).astype(np.float32)
    result = np.zeros(total.shape)
    if current is not None:
        result[:] = current.detach().cpu().flatten().numpy()
    np.divide(total, weight, out=result, where=np.asarray(weight) > 0)
    return result.astype(np.float32)


def _weight_of(
    update: Update, weight: float | Mapping[str, float | Tensor], name: str, shape: tuple[int, ...]
) -> Weight:
    """The weight of one tensor of an update, checked."""
    what = f"client {update.client_id!r}: the weight of its update"
    value: float | Tensor
    if isinstance(weight, Mapping):
        what = f"client {update.client_id!r}: the weight of {name!r}"
        if name not in weight:
            raise RaydflError(f"{what} is missing; a mapping of weights needs one for each tensor sent")
        value = weight[name]
    else:
        value = weight
    if isinstance(value, Tensor) and value.ndim > 0:
        if tuple(value.shape) != shape:
            raise RaydflError(
                f"{what} has shape {tuple(value.shape)}, the tensor has {shape}; one number does for all too"
            )
        elements: np.ndarray = value.detach().cpu().double().flatten().numpy()
        if not (np.isfinite(elements).all() and (elements >= 0).all()):
            raise RaydflError(f"{what} has elements that are negative or not finite; 0 leaves an element out")
        return elements
    number = float(value)
    if not 0 <= number < np.inf:
        raise RaydflError(f"{what} is {number}; it has to be finite and not negative, and 0 leaves the client out")
    return number


def _check_shapes(update: Update, sent: Layout, known: dict[str, tuple[int, ...]]) -> None:
    """Compare an update's shapes with those known, and learn the new ones."""
    for name, shape in zip(sent.names, sent.shapes, strict=True):
        if known.setdefault(name, shape) != shape:
            raise RaydflError(
                f"client {update.client_id!r} sent {name!r} with shape {shape}, elsewhere under key {update.key!r} it has "
                f"{known[name]}; give networks of different shapes different keys, or do not share this tensor"
            )


def _groups(updates: Sequence[Update], current: Tensors) -> Iterator[Group]:
    """The updates of one key, cut so that within a group every client has every tensor."""
    rows = [FlatTensors.of(update.tensors) for update in updates]
    shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
    for position, (update, row) in enumerate(zip(updates, rows, strict=True)):
        if position == 0 or row.layout != rows[position - 1].layout:
            _check_shapes(update, row.layout, shapes)
    if all(row.layout == rows[0].layout for row in rows):
        yield Group(rows[0].layout, [row.vector for row in rows], updates, current)
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
        yield Group(
            layout,
            [_part(rows[position], layout) for position in positions],
            [updates[position] for position in positions],
            current,
        )


def _part(row: FlatTensors, layout: Layout) -> np.ndarray:
    """The tensors of ``layout`` out of a row: float32 [layout.size], the row itself where it has no others."""
    if row.layout == layout:
        return row.vector
    return np.concatenate([row.vector[row.layout.columns(name)] for name in layout.names])


def _over_current(
    changed: dict[str, dict[str, Tensor]], current: Mapping[str, Tensors]
) -> dict[str, dict[str, Tensor]]:
    """What the server had, with what changed in its place: names keep their order, new ones come last."""
    keys = dict.fromkeys((*current, *changed))
    return {key: {**current.get(key, {}), **changed.get(key, {})} for key in keys}


@cache
def _blas() -> ThreadpoolController:
    """The libraries behind NumPy's matrix products."""
    return ThreadpoolController()
