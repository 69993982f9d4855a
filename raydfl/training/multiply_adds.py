"""Multiply-adds of clients' trainings: a budget independent of the machine and of the implementation.

A client's budget is the sum, over its trained networks, of the multiply-adds of a forward pass of an example, times the number of
training examples. Networks count as built. A masked tensor counts by its share of kept elements. Backward passes, teachers and
evaluations are not counted. Each architecture is measured once for each number of frames. A client has the number of frames of the
example nearest to the mean of its examples.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from raydfl.core.ops import use
from raydfl.core.types import Batch, view_of
from raydfl.core.users_code import FAILURES
from raydfl.data import Examples
from raydfl.training.randomness import preserve_generators
from raydfl.training.step import Step
from raydfl.training.substitute import use_eval_mode

_ATEN = torch.ops.aten


def count_multiply_adds(network: nn.Module, batch: Batch) -> Counter[str]:
    """Count the multiply-adds of a forward pass by parameter. Products without a parameter have an empty name."""
    counter = _MultiplyAdds(network)
    with torch.no_grad(), use_eval_mode(network), preserve_generators(), _split_fused_layers(), counter:
        network(*batch.input_of(network))
    return counter.counts


@contextlib.contextmanager
def _split_fused_layers() -> Iterator[None]:
    """Compute fused layers by convolutions and matrix products inside a ``with`` block."""
    backends: Sequence[Any] = (torch.backends.mkldnn, torch.backends.cudnn)
    enabled, fast = [backend.enabled for backend in backends], torch.backends.mha.get_fastpath_enabled()
    try:
        for backend in backends:
            backend.enabled = False
        torch.backends.mha.set_fastpath_enabled(False)
        with use("torch"), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for backend, before in zip(backends, enabled, strict=True):
            backend.enabled = before


class _MultiplyAdds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the products in convolutions and matrix products, by the parameter among the operands."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._sources = [(parameter.detach(), [name]) for name, parameter in network.named_parameters()]
        """Parameters and stacks of parameters, with their names."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import its compiler, in some seconds.

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        packet = function.overloadpacket
        if packet is _ATEN.convolution:
            x, weight, transposed = arguments[0], arguments[1], arguments[6]
            self._add((x if transposed else result).numel() * math.prod(weight.shape[1:]), weight)
        elif packet in (_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm, _ATEN.baddbmm_):
            left, right = arguments[-2:]
            self._add(left.numel() * right.shape[-1], left, right)
        elif packet in (_ATEN.stack, _ATEN.cat):
            self._sources.append((result, [name for part in arguments[0] for name in self._find_names(part)]))
        return result

    def _add(self, count: int, *operands: Tensor) -> None:
        names = next(filter(None, map(self._find_names, operands)), [""])
        for name in names:
            self.counts[name] += count / len(names)  # type: ignore[assignment]

    def _find_names(self, operand: Tensor) -> list[str]:
        """Return the names of the parameters in an operand's memory."""
        for source, names in self._sources:
            if 0 <= operand.data_ptr() - source.data_ptr() < source.numel() * source.element_size():
                return names
        return []


class TrainingCounter:
    """Counter of the multiply-adds of clients' trainings, with a measurement of each architecture."""

    def __init__(self) -> None:
        self._measured: dict[Hashable, Counter[str]] = {}

    def count(self, step: Step) -> float:
        """Return the multiply-adds of a client's training; NaN if a network cannot compute a single example."""
        pools = [pool for pool in step.data.pools.values() if isinstance(pool, Examples) and len(pool)]
        total = 0.0
        for model, number in step.clock.examples.items() if pools else ():
            place, views = _find_average(pools[0], view_of(step.models[model])), pools[0].views.items()
            key = (
                step.client.models,
                model,
                tuple((name, view.length or int(view.counts[place])) for name, view in views),
            )
            if key not in self._measured:
                self._measured[key] = _measure(step, model, pools[0].take(np.array([place])))
            counts, kept = self._measured[key], step.execution.kept
            total += number * sum(count * kept.get(f"{model}/{name}", 1.0) for name, count in counts.items())
        return total if pools or not step.clock.steps else math.nan


def _find_average(examples: Examples, name: str) -> int:
    """Return the position of an example of nearly average length in a view."""
    view = examples.views.get(name, examples.first_view)
    if view.length is not None and not view.optional:
        return 0
    present = np.flatnonzero(view.counts) if view.counts.any() else np.arange(len(view.counts))
    lengths = view.counts[present]
    return int(present[np.abs(lengths - lengths.mean()).argmin()])


def _measure(step: Step, model: str, example: Examples) -> Counter[str]:
    """Count the multiply-adds of an example."""
    network, first = step.models[model], np.zeros(1, np.int64)
    if getattr(network, "on_features", False):  # inputs are features of encoders
        return _count_linear_layers(network)
    try:
        batch = example.batch(first, step.device, example.draw(first, 0, 0) if example.changed else None)
        return count_multiply_adds(network, batch)
    except FAILURES:  # A budget must not end a run.
        return Counter({"": math.nan})


def _count_linear_layers(network: nn.Module) -> Counter[str]:
    """Count the multiply-adds of linear layers for a vector of features. NaN with further matrices of weights."""
    layers = {f"{name}.weight": layer.weight for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    matrices = {name for name, parameter in network.named_parameters() if parameter.ndim > 1}
    return Counter({name: weight.numel() if matrices <= layers.keys() else math.nan for name, weight in layers.items()})
