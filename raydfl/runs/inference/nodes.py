"""ONNX graphs written node by node, in Python's own operators: ``a + 1`` is a node ``Add``.

Two kinds of numbers: counts and places are int64, all else is float32. A Python int in an expression becomes an int64 constant, a
Python float a float32 one, an array keeps its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from raydfl.runs.inference.graph import OPSET

Shape = Sequence[int | str]


class Value:
    """An output of a node, or an input of the graph."""

    def __init__(self, nodes: Nodes, name: str) -> None:
        self.nodes = nodes
        self.name = name

    def __add__(self, other: Operand) -> Value:
        return self.nodes("Add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self.nodes("Sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return self.nodes("Sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return self.nodes("Mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return self.nodes("Div", self, other)

    def __floordiv__(self, other: Operand) -> Value:
        """Divide whole numbers; rounds towards 0, so it is Python's for what is not negative."""
        return self.nodes("Div", self, other)

    def __lt__(self, other: Operand) -> Value:
        return self.nodes("Less", self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.nodes("GreaterOrEqual", self, other)

    def __and__(self, other: Operand) -> Value:
        return self.nodes("And", self, other)

    def __matmul__(self, other: Operand) -> Value:
        return self.nodes("MatMul", self, other)

    def size(self, axis: int) -> Value:
        """Return the size of a dimension: int64 []."""
        return self.nodes("Squeeze", self.nodes("Shape", self, start=axis, end=axis + 1))

    def absolute(self) -> Value:
        """Return the same numbers without their signs."""
        return self.nodes("Abs", self)

    def at_least(self, other: Operand) -> Value:
        """Return the larger of both."""
        return self.nodes("Max", self, other)

    def at_most(self, other: Operand) -> Value:
        """Return the smaller of both."""
        return self.nodes("Min", self, other)

    def as_type(self, kind: int) -> Value:
        """Return the same numbers as another ``TensorProto`` type."""
        return self.nodes("Cast", self, to=kind)

    def mean(self, axis: int) -> Value:
        """Return the mean over a dimension, which is kept."""
        return self.nodes("ReduceMean", self, np.array([axis]))

    def sum(self, axis: int, keep: bool = True) -> Value:
        """Return the sum over a dimension."""
        return self.nodes("ReduceSum", self, np.array([axis]), keepdims=int(keep))

    def take(self, places: Operand, axis: int) -> Value:
        """Return what stands at some places of a dimension."""
        return self.nodes("Gather", self, places, axis=axis)

    def cut(self, start: Operand, end: Operand, axis: int) -> Value:
        """Return what stands from ``start`` to before ``end`` of a dimension, the numbers int64 []."""
        first, last = (self.nodes.listed(place) for place in (start, end))
        return self.nodes("Slice", self, first, last, np.array([axis]))

    def with_axes(self, *axes: int) -> Value:
        """Return it with further dimensions of size 1."""
        return self.nodes("Unsqueeze", self, np.array(axes))

    def shaped(self, *sizes: int | Value) -> Value:
        """Return it in another shape; -1 stands for the rest."""
        parts = [self.nodes.listed(size) for size in sizes]
        return self.nodes("Reshape", self, self.nodes("Concat", *parts, axis=0))

    def padded(self, axis: int, before: Operand, after: Operand, ndim: int, value: float = 0.0) -> Value:
        """Return it with constants before and after a dimension.

        Args:
            axis: which.
            before: how many, int64 [].
            after: how many, int64 [].
            ndim: dimensions that it has.
            value: the constant.
        """
        parts: list[Value] = []
        for amount in (before, after):
            sizes: list[Operand] = [0] * ndim
            sizes[axis] = amount
            parts += [self.nodes.listed(size) for size in sizes]
        return self.nodes("Pad", self, self.nodes("Concat", *parts, axis=0), value)


Operand = Value | np.ndarray | int | float


class Nodes:
    """A graph that grows: call it with the name of an operator, its inputs and attributes."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._known: dict[tuple[str, int | float], str] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def __call__(self, operator: str, *inputs: Operand | None, **attributes: Any) -> Value:
        """Add a node and return its first output; ``None`` stands for an input that is left out."""
        return self.several(operator, 1, *inputs, **attributes)[0]

    def several(self, operator: str, outputs: int, *inputs: Operand | None, **attributes: Any) -> list[Value]:
        """Add a node and return its first outputs."""
        given = ["" if each is None else self._name(each) for each in inputs]
        names = [f"{operator}_{len(self._nodes)}_{number}" for number in range(outputs)]
        self._nodes.append(helper.make_node(operator, given, names, **attributes))
        return [Value(self, name) for name in names]

    def input(self, name: str, shape: Shape, kind: int = TensorProto.FLOAT) -> Value:
        """Add an input of the graph."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return Value(self, name)

    def output(self, name: str, value: Value, shape: Shape, kind: int = TensorProto.FLOAT) -> None:
        """Make a value an output of the graph."""
        self._nodes.append(helper.make_node("Identity", [value.name], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def listed(self, number: Operand) -> Value:
        """Return a whole number, int64 [], as int64 [1]."""
        if isinstance(number, Value):
            return self("Reshape", number, np.array([1]))
        return Value(self, self._name(np.array([number], np.int64)))

    def places(self, count: Operand) -> Value:
        """Return 0 to ``count`` - 1, int64."""
        return self("Range", 0, count, 1)

    def where(self, condition: Value, then: Operand, otherwise: Operand) -> Value:
        """Return ``then`` where the condition holds, else ``otherwise``."""
        return self("Where", condition, then, otherwise)

    def joined(self, parts: Sequence[Value], axis: int) -> Value:
        """Return values one after another along a dimension."""
        return self("Concat", *parts, axis=axis)

    def graph(self, content: bytes, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Add a whole ONNX model, and return its outputs by name.

        Args:
            content: the model.
            inputs: what its inputs are given.
        """
        proto = onnx.load_from_string(content)
        if len(proto.functions):
            raise ValueError("the graph has functions of its own, which would have to be renamed")
        prefix = f"inner_{len(self._nodes)}/"
        names = [value.name for value in proto.graph.output]
        proto = onnx.compose.add_prefix(proto, prefix)
        for name, value in inputs.items():
            self._nodes.append(helper.make_node("Identity", [value.name], [prefix + name]))
        self._nodes.extend(proto.graph.node)
        self._constants.extend(proto.graph.initializer)
        return {name: Value(self, prefix + name) for name in names}

    def model(self) -> bytes:
        """Return the finished ONNX model, checked."""
        graph = helper.make_graph(self._nodes, "raydfl", self._inputs, self._outputs, self._constants)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="raydfl")
        proto.ir_version = 10  # what OPSET needs at least, so that older runtimes take it
        onnx.checker.check_model(proto)
        content: bytes = proto.SerializeToString()
        return content

    def _name(self, value: Operand) -> str:
        if isinstance(value, Value):
            return value.name
        if isinstance(value, int | float):
            key = (type(value).__name__, value)
            if key not in self._known:
                self._known[key] = self._kept(np.array(value, np.int64 if isinstance(value, int) else np.float32))
            return self._known[key]
        return self._kept(value)

    def _kept(self, array: np.ndarray) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(array, name))
        return name
