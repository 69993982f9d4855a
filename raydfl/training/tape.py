"""Tape: a step's loss and gradients, recorded once and computed again without the Python code that chose the operations.

A small network's step is short, and most of what is not arithmetic in it is Python and autograd finding out, again, which
operations to do. A method whose losses are always the same operations says so (``Method.pure``; networks of one's own say it too).
The operations of such a loss and of its backward pass are recorded once they have come some times for this network, mode, autocast
and shape of batch, and done again from there if for one batch they gave the bits of the loss's own code: value, gradients, buffers,
and the state of PyTorch's generators. Else the loss goes on running by its code, and the log says why.

What is recorded are the operations below autograd (``torch.utils._python_dispatch``), as a ``torch.fx.Graph``: the same operations
on the same types and shapes in the same order, those that draw from PyTorch's generators and those that write into what they were
given included. ``make_fx`` of PyTorch records the same, but takes 1.3 s and 120 MB more in a process when it is first used, 60 ms
for each recording instead of 5 (CRNN-Base), and takes a tensor that it does not know for a constant.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import getitem
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from raydfl.core.types import Batch
from raydfl.core.users_code import FAILURES, is_users
from raydfl.training.networks import layers_and_tensors
from raydfl.training.precision import computing_in
from raydfl.training.randomness import generator_states, seed_of_step, set_generator_states, step_randomness
from raydfl.training.step import Loss, Step, computed
from raydfl.training.together import signature as alike
from raydfl.training.together.handles import Unavailable

logger = logging.getLogger(__name__)

FIRST = 16
"""Times that a computation is done by the loss's code before it is recorded, which takes as long as some eight steps. The nth waits
(n - 1)² times longer: clips of many lengths make many computations, each of which comes seldom."""

LARGEST = 1 << 22
"""Elements of a client's models and state up to which its steps are recorded: larger networks gain little, and to make a recording
takes several copies of them, and all of a step's intermediate results."""

_MOST = 500
"""Kinds of fits that are remembered for a network, and shapes of batches for each kind. (A tape of CRNN-Base takes 20 KB.)"""

_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")
_HIDDEN = ("client", "data", "rng", "round_index", "training", "clock", "moments", "cuts")  # no pure loss reads them
_SAME_BITS: Any = {"rtol": 0, "atol": 0, "equal_nan": True, "msg": "it does not give the same bits again"}
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class TapeError(Exception):
    """A computation that is not the same operations for all values of its tensors, or uses tensors that were not named."""


@dataclasses.dataclass(eq=False, frozen=True, slots=True)
class Tape:
    """A recorded computation."""

    inputs: Mapping[Hashable, Hashable]
    """The inputs of ``run``: the names in its arguments' order, and each one's form."""
    run: Callable[..., tuple[Tensor | None, ...]]
    """Gives the outputs for inputs of those forms; to be called without gradients."""


def form(tensor: Tensor) -> Hashable:
    """Return what has to be equal about two tensors for one to take the other's place in a tape."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def record(computation: Callable[[], Sequence[Tensor | None]], known: Mapping[int, Hashable]) -> Tape:
    """Carry out a computation and keep its operations. Outputs that are views become tensors of their own in the tape.

    Args:
        computation: gives the outputs.
        known: the tensors that it may use, ``id(tensor)`` to a name for it.

    Raises:
        TapeError: it cannot be recorded, and why. Whatever it did to its tensors is done.
    """
    recorder = _Recorder(known)
    with recorder:
        outputs = computation()
    tape = recorder.tape(outputs)
    del outputs
    if recorder.still_used():
        raise TapeError(
            "it keeps what it computed (in a list, say); let it report sums and counts (docs/objectives.md)"
        )
    return tape


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, known: Mapping[int, Hashable]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._graph = Graph()
        self._nodes: dict[int, tuple[Node, Tensor]] = {}
        """The node of every tensor that was seen, and the tensor: it is kept, so that no other gets its id."""
        self._inputs: dict[Hashable, Tensor] = {}
        self._begin = self._graph.call_function(tuple)  # the node that inputs stand before; taken out at the end

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else PyTorch's compiler would be imported (1.1 s, 120 MB)."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:  # to a tape, which knows no gradients, the same tensor
            node = self._node(args[0])
        elif torch.Tag.dynamic_output_shape in function.tags and not _indexed_by_positions(function, args):
            raise TapeError(f"the shape of what {function} gives depends on values")
        else:
            node = self._graph.call_function(function, *map_aggregate((tuple(args), kwargs or {}), self._argument))
        found = function(*args, **(kwargs or {}))
        self._keep(found, node)
        return found

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if not isinstance(value, _PLAIN):
            raise TapeError(f"an operation with a {type(value).__name__}")
        return value

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)][0]
        if id(tensor) not in self._known:
            shape = list(tensor.shape)
            raise TapeError(f"it uses a tensor {shape} that is neither its models' nor its step's nor computed of them")
        with self._graph.inserting_before(self._begin):
            node = self._graph.placeholder(f"input_{len(self._inputs)}")
        self._inputs[self._known[id(tensor)]] = tensor
        self._keep(tensor, node)
        return node

    def _keep(self, found: Any, node: Node) -> None:
        """Remember which node the tensors of a result are."""
        if isinstance(found, Tensor):
            self._nodes[id(found)] = (node, found)
        elif isinstance(found, (list, tuple)):
            for place, item in enumerate(found):
                if item is not None:
                    self._keep(item, self._graph.call_function(getitem, (node, place)))
        elif found is not None:
            raise TapeError("it looks at the value of a tensor")

    def still_used(self) -> bool:
        """Forget all tensors, and return whether somebody else still has one that was computed."""
        computed = [weakref.ref(tensor) for key, (_, tensor) in self._nodes.items() if key not in self._known]
        self._nodes.clear()
        return any(tensor() is not None for tensor in computed)

    def tape(self, outputs: Sequence[Tensor | None]) -> Tape:
        """Return what was recorded, ending in these outputs."""
        taken = {tensor.untyped_storage().data_ptr() for tensor in self._inputs.values()}
        nodes: list[Any] = []
        for tensor in outputs:
            nodes.append(None if tensor is None else self._node(tensor))
            if tensor is not None:
                if tensor.untyped_storage().data_ptr() in taken or not tensor.is_contiguous():
                    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
                    nodes[-1] = self._graph.call_function(torch.ops.aten.clone.default, (nodes[-1],), options)
                taken.add(tensor.untyped_storage().data_ptr())
        self._graph.erase_node(self._begin)
        self._graph.output(tuple(nodes))
        source = self._graph.python_code("_")  # a GraphModule would keep the graph, many times as large as this
        names = dict(source.globals)

        def bound(operator: re.Match[str]) -> str:
            name = operator.group().replace(".", "_")
            names[name] = functools.reduce(getattr, operator.groups(), torch.ops)._op
            return name

        # To look for torch.ops.aten.mm.default, and its Python method around the operator, take 0.8 us of an operation's 2 to 6.
        code = _OPERATOR.sub(bound, source.src)
        exec(compile(code, "<tape>", "exec"), names)  # noqa: S102 - what PyTorch wrote of its own operations
        return Tape({name: form(t) for name, t in self._inputs.items()}, functools.partial(names["forward"], None))


def _indexed_by_positions(function: Any, args: Sequence[Any]) -> bool:
    """Return whether this is ``x[index]`` with integers, whose result has the shape of the index."""
    masks = (torch.bool, torch.uint8)
    return function is torch.ops.aten.index.Tensor and all(i is None or i.dtype not in masks for i in args[1])


Compute = Callable[[int, Batch], tuple[Tensor, dict[str, Tensor]]]
"""The value of a loss, detached, and its reports, by the number of a step and its batch; sets the parameters' gradients."""


def recorded(step: Step, losses: Sequence[Loss], parameters: Sequence[Tensor], seed: Tensor, code: Compute) -> Compute:
    """Return what computes the losses of one client's fit, from recordings where that is possible.

    Args:
        step: the client's; :attr:`Step.execution` has what was recorded with its networks.
        losses: of the fit; they take turns.
        parameters: that are trained.
        seed: of the fit's dropout.
        code: runs the losses' own code.
    """
    recordings = step.execution.recordings
    if recordings is None or not step.training.tape or step.training.precision == "float16":
        return code
    known = step.execution.networks_of(step.models)
    layers, tensors = layers_and_tensors(step.models) if known is None else (known.layers, known.tensors)
    own = (*tensors, *step.state.values())
    if known is None:
        hooked = any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters)
        if hooked or not all(map(_declared, layers)):
            return code
    if sum(map(Tensor.numel, own)) > LARGEST:
        return code
    device, first = step.device.type, dict[int, int]()
    kind = (
        tuple(map(alike.kind, losses)),
        alike.identity(dict(step.options)),
        step.phase,
        known or alike.architecture(step.models),
        tuple(layer.training for layer in layers),
        tuple(first.setdefault(id(tensor), number) for number, tensor in enumerate(own)),  # which are one and the same
        tuple(first[id(parameter)] for parameter in parameters),
        tuple((name, form(tensor)) for name, tensor in step.state.items()),
        tuple((key, tuple(received)) for key, received in step.received.items()),
        step.training.precision,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )
    if kind not in recordings and len(recordings) >= _MOST:
        recordings.clear()
    return _Player(step, losses, parameters, seed, code, tensors, recordings.setdefault(kind, {})).compute


def _declared(layer: nn.Module) -> bool:
    """Return whether a layer's code is raydfl's, PyTorch's or said to be pure, and nobody has hooked anything else into it."""
    pure = not is_users(type(layer).__module__) or vars(type(layer)).get("pure", False)
    return pure and not any(getattr(layer, hooks) for hooks in alike.HOOKS)


@dataclasses.dataclass(eq=False, slots=True)
class Recording:
    """One loss of a kind of fit on batches of one shape: how often its code computed it, and its tape."""

    by_code: int = 0
    played: int = 0
    tried: bool = False  # recorded, with or without success
    reports: tuple[str, ...] = ()  # names of what the loss reports
    tape: Tape | None = None
    inputs: list[Tensor | str] | None = None  # of every client, where these are its networks' tensors and batches alone


@dataclasses.dataclass(eq=False, slots=True)
class _Player:
    """Computes the losses of one client's fit; fields as the arguments of ``recorded``."""

    step: Step
    losses: Sequence[Loss]
    parameters: Sequence[Tensor]
    seed: Tensor
    code: Compute
    tensors: Sequence[Tensor]  # the models'
    recordings: dict[Hashable, Recording]
    inputs: dict[Recording, list[Tensor | str] | None] = dataclasses.field(default_factory=dict)  # see _find

    def compute(self, number: int, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """See Compute."""
        fresh = batch.tensors()
        key = (number % len(self.losses), *[(n, t.shape, t.stride()) for n, t in fresh.items()])
        recording = self.recordings.get(key)
        if recording is None:
            if len(self.recordings) >= _MOST:
                return self.code(number, batch)
            recording = self.recordings[key] = Recording()
        if recording.tape is not None:
            if recording not in self.inputs:
                self.inputs[recording] = recording.inputs or self._find(recording.tape)
            inputs = self.inputs[recording]
            if inputs is not None:
                recording.played += 1
                value, *rest = self._play(recording.tape, inputs, number, fresh)
                reports = dict(zip(recording.reports, cast("list[Tensor]", rest), strict=False))
                self._set_gradients(rest[len(reports) :])
                return cast(Tensor, value), reports
        recording.by_code += 1
        if recording.tried or recording.by_code <= FIRST + sum(r.tried for r in self.recordings.values()) ** 2:
            return self.code(number, batch)
        return self._record(recording, number, batch)

    def _record(self, recording: Recording, number: int, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute it by the loss's code, and record it besides; whatever comes of that, the client does not notice."""
        recording.tried = True
        before = self._values()
        value, reports = self.code(number, batch)
        gradients, after = [parameter.grad for parameter in self.parameters], self._values()
        try:
            self._put_back(before)
            tape = self._taped(number, batch)
            self._put_back(before)
            inputs = self._find(tape) or []
            played = self._play(tape, inputs, number, batch.tensors())
            expected = [value, *reports.values(), *gradients, *after]
            torch.testing.assert_close([*played, *self._values()], expected, **_SAME_BITS)
            recording.tape, recording.reports = tape, tuple(reports)
            known = self.step.execution.networks_of(self.step.models)
            if known and all(isinstance(name, str) or cast(Any, name)[0] == "model" for name in tape.inputs):
                recording.inputs = inputs
        except FAILURES as error:  # the loss goes on as it is, without a tape
            name = getattr(self.losses[number % len(self.losses)], "__qualname__", "the loss")
            logger.info("train.tape: %s runs by its code in every step: %s: %s", name, type(error).__name__, error)
        finally:
            self._put_back(after)
            self._set_gradients(gradients)
        return value, reports

    def _taped(self, number: int, batch: Batch) -> Tape:
        step, seed = self.step, seed_of_step(self.seed, number)
        known = {id(tensor): name for name, tensor in self._named().items()} | {id(seed): "seed"}
        known.update((id(tensor), name) for name, tensor in batch.tensors().items())
        hidden = {name: cast(Any, Unavailable(name, "all steps")) for name in _HIDDEN}
        shown = dataclasses.replace(step, state=cast(Any, MappingProxyType(step.state)), **hidden)

        def computation() -> list[Tensor | None]:
            with step_randomness(seed), computing_in(step.training.precision, step.device):
                value, reports = computed(self.losses[number % len(self.losses)], shown, batch)
            gradients = torch.autograd.grad(value, list(self.parameters), allow_unused=True)
            return [value.detach(), *reports.values(), *gradients]

        return record(computation, known)

    def _find(self, tape: Tape) -> list[Tensor | str] | None:
        """Return this client's inputs of a tape, and the names of those that come with each step; ``None`` if one does not fit."""
        holders: Any = {"model": self.tensors, "state": self.step.state, "received": self.step.received}
        found = [n if isinstance(n, str) else functools.reduce(getitem, cast(Any, n), holders) for n in tape.inputs]
        forms = [None if isinstance(own, str) else form(own) for own in found]
        return found if all(a is None or a == b for a, b in zip(forms, tape.inputs.values(), strict=True)) else None

    def _play(
        self, tape: Tape, inputs: Sequence[Tensor | str], number: int, fresh: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, ...]:
        if "seed" in tape.inputs:
            fresh = {**fresh, "seed": seed_of_step(self.seed, number)}
        with torch.no_grad():
            return tape.run(*[fresh[place] if isinstance(place, str) else place for place in inputs])

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _named(self) -> dict[Hashable, Tensor]:
        """Return the step's tensors by their names in tapes. What the client received is copied for that."""
        named: dict[Hashable, Tensor] = {("model", place): tensor for place, tensor in enumerate(self.tensors)}
        named.update((("state", name), tensor) for name, tensor in self.step.state.items())
        for key, received in self.step.received.items():
            named.update((("received", key, name), tensor) for name, tensor in received.items())
        return named

    def _values(self) -> list[Tensor]:
        """Return copies of the step's tensors and of the states of PyTorch's generators."""
        return [*(tensor.detach().clone() for tensor in self._named().values()), *generator_states()]

    @torch.no_grad()
    def _put_back(self, values: Sequence[Tensor]) -> None:
        live = self._named().values()
        for tensor, value in zip(live, values, strict=False):
            tensor.copy_(value)
        set_generator_states(values[len(live) :])
