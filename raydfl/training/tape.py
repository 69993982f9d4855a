"""Tape: the tensor operations of a computation, recorded once and done again without the Python code that chose them.

What is recorded are the operations below autograd (``torch.utils._python_dispatch``), backward passes included, as a
``torch.fx.Graph``. Doing them again gives the same bits: they are the same operations on the same types and shapes, in the same
order, those that draw from PyTorch's generators and those that write into what they were given included. What it leaves out is
everything else: layers' and losses' code, autograd's bookkeeping, rules of vmap.

``make_fx`` of PyTorch records the same, but takes 1.3 s and 120 MB more in a process when it is first used, 60 ms for each
recording instead of 5 (CRNN-Base), and takes a tensor that it does not know for a constant.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SIZED_BY_VALUES = torch.Tag.dynamic_output_shape


class TapeError(Exception):
    """A computation that is not the same operations for all values of its tensors, or uses tensors that were not named."""


class Tape:
    """A recorded computation."""

    def __init__(self, graph: Graph, inputs: Mapping[Hashable, Tensor]) -> None:
        """Compile it.

        Args:
            graph: with a placeholder for each input, in that order.
            inputs: by name.
        """
        self.inputs = {name: form(tensor) for name, tensor in inputs.items()}
        """What :attr:`run` has to be given: the names in its arguments' order, and each one's form."""
        # Not a GraphModule, which keeps the graph, many times as large as the function.
        source = graph.python_code("_")
        self.code = source.src
        """Its operations, shapes and numbers as text: equal for equal computations."""
        names = dict(source.globals)
        exec(compile(source.src, "<tape>", "exec"), names)  # noqa: S102 - what PyTorch wrote of its own operations
        self.run: Callable[..., tuple[Tensor | None, ...]] = functools.partial(names["forward"], None)
        """The outputs for inputs of those forms; to be called without gradients."""


def form(tensor: Tensor) -> Hashable:
    """What has to be equal about two tensors for one to take the other's place in a tape."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def record(computation: Callable[[], Sequence[Tensor | None]], known: Mapping[int, Hashable]) -> Tape:
    """Carry out a computation and keep its operations.

    Args:
        computation: its outputs; those that are views of others, or of inputs, become tensors of their own in the tape.
        known: the tensors that it may use, ``id(tensor)`` to a name for it. It may grow while the computation runs.

    Raises:
        TapeError: it cannot be recorded, and why. Whatever it did to its tensors is done.
        Exception: what the computation raises.
    """
    recorder = _Recorder(known)
    with recorder:
        outputs = computation()
    return recorder.tape(outputs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, known: Mapping[int, Hashable]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._graph = Graph()
        self._nodes: dict[int, Node] = {}
        """Of every tensor that was seen."""
        self._alive: list[Tensor] = []
        """All of these, so that none is taken for another that had its place in memory before."""
        self._inputs: dict[Hashable, Tensor] = {}
        self._begin: Node | None = None
        """The first operation: inputs stand before it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else PyTorch's compiler would be imported (1.1 s, 120 MB)."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:  # to a tape, which knows no gradients, the same tensor
            node = self._node(args[0])
            alias = function(*args)
            self._keep(alias, node)
            return alias
        if _SIZED_BY_VALUES in function.tags and not _indexed_by_positions(function, args):
            raise TapeError(f"the shape of what {function} gives depends on values")
        node = self._graph.call_function(function, self._argument(tuple(args)), self._argument(kwargs or {}))
        if self._begin is None:
            self._begin = node
        found = function(*args, **(kwargs or {}))
        self._keep(found, node)
        return found

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(item) for item in value)
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if not isinstance(value, _PLAIN):
            raise TapeError(f"an operation with a {type(value).__name__}")
        return value

    def _node(self, tensor: Tensor) -> Node:
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        if id(tensor) not in self._known:
            raise TapeError(
                f"it uses a tensor {list(tensor.shape)} that is neither its models' nor its step's nor computed of them"
            )
        name = self._known[id(tensor)]
        with contextlib.nullcontext() if self._begin is None else self._graph.inserting_before(self._begin):
            node = self._graph.placeholder(f"input_{len(self._inputs)}")
        self._inputs[name] = tensor
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        return node

    def _keep(self, found: Any, node: Node) -> None:
        """Remember which node the tensors of a result are."""
        if isinstance(found, Tensor):
            self._nodes[id(found)] = node
            self._alive.append(found)
        elif isinstance(found, (list, tuple)):
            for place, item in enumerate(found):
                if item is not None:
                    self._keep(item, self._graph.call_function(operator.getitem, (node, place)))
        elif found is not None:
            raise TapeError("it looks at the value of a tensor")

    def tape(self, outputs: Sequence[Tensor | None]) -> Tape:
        """What was recorded, ending in these outputs."""
        taken = {_storage(tensor) for tensor in self._inputs.values()}
        nodes: list[Node | None] = []
        for tensor in outputs:
            if tensor is None:
                nodes.append(None)
                continue
            node = self._node(tensor)
            if _storage(tensor) in taken or not tensor.is_contiguous():
                options: dict[str, Any] = {"memory_format": torch.contiguous_format}
                node = self._graph.call_function(torch.ops.aten.clone.default, (node,), options)
            taken.add(_storage(tensor))
            nodes.append(node)
        self._graph.output(tuple(cast("list[Any]", nodes)))
        return Tape(self._graph, self._inputs)


def _indexed_by_positions(function: Any, args: Sequence[Any]) -> bool:
    """Whether this is ``x[index]`` with integers, whose result has the shape of the index."""
    if function is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
