"""Modules as ONNX graphs by PyTorch's exporter, and a run's network as such a graph, compared with PyTorch.

raydfl's own operators have no counterpart in ONNX, so PyTorch's are traced (``ops.use("torch")``) and two modules are replaced
before: a GRU of one layer becomes one ``GRU`` node, which takes lengths too; a convolution with pooling becomes PyTorch's. Batch
and frames are of any size where the network allows it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxscript import optimizer
from torch import Tensor, nn

from raydfl.core.errors import InputError
from raydfl.core.ops import Conv1d, use
from raydfl.runs.inference.model import RunModel

OPSET = 18
"""Version of the ONNX operators."""
_FOLDED = 2048
"""Elements of the largest constant that is computed before: the matrix of a Fourier transform is computed when a file is opened."""
TOLERANCE = 1e-4
"""Largest difference of an answer, relative to the largest one or to 1, up to which two implementations agree."""
_BATCH, _FRAMES = 3, 96
"""Size of the example that the network is traced with; a size of 1 would be taken for a constant."""


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX model in memory."""

    content: bytes
    frames: int | None
    """Frames that it takes; ``None``: any number."""
    lengths: bool
    """True if it has the input ``lengths``."""
    difference: float
    """Largest difference to PyTorch of an output."""


def trace(module: nn.Module, given: Mapping[str, Tensor], sizes: Sequence[Any], outputs: Sequence[str]) -> bytes:
    """Return a module as an ONNX model.

    Args:
        module: in evaluation mode; its modules are replaced already.
        given: an example of each input.
        sizes: the free dimensions of each input by name, as ``torch.export`` takes them.
        outputs: names.
    """
    with quiet("torch.onnx", "torch.fx", "onnxscript", "onnx_ir"), use("torch"), torch.no_grad():
        program: Any = torch.onnx.export(
            module,
            tuple(given.values()),
            dynamo=True,
            dynamic_shapes=tuple(sizes),
            input_names=[*given],
            output_names=[*outputs],
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
        optimizer.optimize(program.model, output_size_limit=_FOLDED)
    proto = program.model_proto
    for node in proto.graph.node:
        del node.metadata_props[:]  # the places in the code that made it
    content: bytes = proto.SerializeToString()
    return content


def open_session(content: bytes, threads: int = 0) -> Any:
    """Return an ONNX Runtime session on the CPU that reports errors only; ``threads`` 0: as many as there are cores."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def to_onnx(model: RunModel, with_lengths: bool | None = None) -> Graph:
    """Return the network with the inputs ``x`` and (if lengths differ) ``lengths`` and the outputs ``model.output_names``.

    Args:
        model: of the run.
        with_lengths: whether there is the input ``lengths``; ``None``: where the lengths of the run's clips differ.

    Raises:
        InputError: the network contains what cannot be exported, or the graph gives other results than the network.
    """
    images = isinstance(model.spec.inputs, tuple)
    if with_lengths is None:
        with_lengths = model.length is None and not images
    reasons = []
    # With a fixed number of frames only where all recordings have it.
    for frames in (None,) if with_lengths or images else (None, model.length):
        try:
            network = _Outputs(replace_modules(model.network), model).eval()
            content = _traced(network, model, frames, with_lengths)
            return Graph(content, frames, with_lengths, _checked(content, model, frames, with_lengths))
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever copying, tracing or calling a user's network raises)
            reasons.append(_reason(error))
    raise InputError(
        f"model {model.name!r} ({model.spec.architecture}) cannot be exported to ONNX: {reasons[0]}. Its "
        f"forward(x, lengths) must be traceable by torch.export: no branch on a tensor's value, and sizes taken from x.shape; and "
        f"copy.deepcopy must be able to copy the network"
    )


class _Outputs(nn.Module):
    """The outputs, and where these are logits the probabilities."""

    def __init__(self, network: nn.Module, model: RunModel) -> None:
        super().__init__()
        self.network, self.objective = network, model.objective
        self.count = len(model.output_names)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs = self.network(x, lengths)
        return (outputs, self.objective.answer(outputs)) if self.count == 2 else (outputs,)


class _Convolution(Conv1d):
    """raydfl.ops.Conv1d in PyTorch's own operations."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Conv1d.forward(self, x)

    def pooled(self, x: Tensor, pool: int, lengths: Tensor | None = None) -> Tensor:
        if lengths is not None:
            outside = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
            x = x.masked_fill(outside.unsqueeze(2), 0.0)
        # Pooling over two dimensions, of which one is 1: torch.export takes the frames of max_pool1d for a constant.
        maps = self(x.transpose(1, 2)).relu().unsqueeze(2)
        return nn.functional.max_pool2d(maps, (1, pool)).squeeze(2).transpose(1, 2)


class _Recurrence(nn.Module):
    """A GRU of one layer as the node of that name, whose gates are in another order: update, reset, candidate."""

    weights: Tensor
    recurrent_weights: Tensor
    biases: Tensor | None

    def __init__(self, gru: nn.GRU) -> None:
        super().__init__()
        self.attributes: dict[str, Any] = {
            "direction": "bidirectional" if gru.bidirectional else "forward",
            "hidden_size": gru.hidden_size,
            "linear_before_reset": 1,
        }
        ways = ("", "_reverse") if gru.bidirectional else ("",)

        def gates(name: str) -> Tensor:
            return torch.stack([_reordered(getattr(gru, name + way).detach()) for way in ways])

        self.register_buffer("weights", gates("weight_ih_l0"))
        self.register_buffer("recurrent_weights", gates("weight_hh_l0"))
        biases = [gates("bias_ih_l0"), gates("bias_hh_l0")] if gru.bias else []
        self.register_buffer("biases", torch.cat(biases, dim=1) if biases else None)
        self.directions, self.hidden = len(ways), gru.hidden_size

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._node(x, None, hx)

    def outputs(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self._node(x, lengths, None)[0]

    def _node(self, x: Tensor, lengths: Tensor | None, hx: Tensor | None) -> tuple[Tensor, Tensor]:
        frames_first = x.transpose(0, 1)
        frames, batch = frames_first.shape[:2]
        counts = None if lengths is None else lengths.to(torch.int32)
        outputs, last = torch.onnx.ops.symbolic_multi_out(
            "GRU",
            (frames_first, self.weights, self.recurrent_weights, self.biases, counts, hx),
            attrs=self.attributes,
            dtypes=(x.dtype, x.dtype),
            shapes=((frames, self.directions, batch, self.hidden), (self.directions, batch, self.hidden)),
        )
        return outputs.permute(2, 0, 1, 3).flatten(2), last


def _reordered(gates: Tensor) -> Tensor:
    """PyTorch's reset, update, candidate as ONNX's update, reset, candidate."""
    reset, update, candidate = gates.chunk(3)
    return torch.cat([update, reset, candidate])


def replace_modules(network: nn.Module) -> nn.Module:
    """Return a copy of the network with the modules that need it replaced."""
    network = copy.deepcopy(network)
    holder = nn.ModuleDict({"network": network})
    for parent in list(holder.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1d):
                child.__class__ = _Convolution
            elif isinstance(child, nn.GRU) and child.num_layers == 1 and child.batch_first:
                setattr(parent, name, _Recurrence(child))
    return holder["network"]


def _traced(network: nn.Module, model: RunModel, frames: int | None, with_lengths: bool) -> bytes:
    x, lengths = _example(model, _BATCH, frames or _FRAMES, with_lengths)
    fixed = frames or isinstance(model.spec.inputs, tuple)
    any_size = {0: "batch"} if fixed else {0: "batch", 1: "frames"}
    sizes = (any_size, {0: "batch"}) if with_lengths else (any_size,)
    given = {"x": x} if lengths is None else {"x": x, "lengths": lengths}
    return trace(network, given, sizes, model.output_names)


def _example(model: RunModel, batch: int, frames: int, with_lengths: bool) -> tuple[Tensor, Tensor | None]:
    """Random input of that size, images of their own; of several lengths the first is the longest, as in every batch."""
    random = torch.Generator().manual_seed(batch * 10_000 + frames)
    inputs = model.spec.inputs
    x = torch.randn(batch, *(inputs if isinstance(inputs, tuple) else (frames, inputs)), generator=random)
    if not with_lengths:
        return x, None
    lengths = torch.randint(1, frames + 1, (batch,), generator=random)
    lengths[0] = frames
    outside = torch.arange(frames) >= lengths.unsqueeze(1)
    return x.masked_fill(outside.unsqueeze(2), 0.0), lengths


def _checked(content: bytes, model: RunModel, frames: int | None, with_lengths: bool) -> float:
    """Return the largest difference of a logit to PyTorch's, over batches of several sizes.

    Raises:
        InputError: the two do not agree.
    """
    session, worst = open_session(content), 0.0
    for batch, length in ((1, frames or 64), (2, frames or 101), (5, frames or 230)):
        x, lengths = _example(model, batch, length, with_lengths)
        expected = model.logits(x, lengths).numpy()
        given = {"x": x.numpy()} if lengths is None else {"x": x.numpy(), "lengths": lengths.numpy()}
        found, *answers = session.run([*model.output_names], given)
        said = model.objective.answer(torch.from_numpy(expected)).numpy()
        for mine, theirs in zip([found, *answers], [expected, said], strict=False):
            difference = compare(mine, theirs, model, f"(x {list(x.shape)})")
            worst = max(worst, difference if theirs is expected else 0.0)
    return worst


def compare(found: np.ndarray, expected: np.ndarray, model: RunModel, what: str, tolerant: bool = False) -> float:
    """Return the largest difference of an output of a model's graph.

    Args:
        found: the output.
        expected: raydfl's own.
        model: of the run.
        what: the input, for the message.
        tolerant: accept any difference, as of a network in int8.

    Raises:
        InputError: the difference is above :data:`TOLERANCE`.
    """
    difference = float(np.abs(found - expected).max())
    if not tolerant and not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise InputError(
            f"the ONNX graph of model {model.name!r} ({model.spec.architecture}) answers otherwise than raydfl predict, by "
            f"{difference:.1e} {what}; nothing was written: export another form, or use the model with raydfl predict"
        )
    return difference


def _reason(error: Exception) -> str:
    """Return the innermost cause of an exporter's error in one line."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300].rstrip('.')}"


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Keep back what exporters say of their own work: warnings, pages of intermediate code, and messages of loggers by name."""
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
