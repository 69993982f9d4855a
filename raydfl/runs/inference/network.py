"""Export of modules to ONNX by PyTorch's exporter, and verification against PyTorch.

ONNX has no counterpart of raydfl's own operators, so the exporter traces PyTorch's (``ops.use("torch")``). Two modules are replaced
first: a single-layer GRU by one ``GRU`` node with lengths, a convolution with pooling by PyTorch's. The numbers of examples and
frames stay free where the network allows it.
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
"""Maximum number of elements of a folded constant. Larger ones, such as Fourier matrices, are computed when a session opens."""
TOLERANCE = 1e-4
"""Largest accepted difference between two implementations, relative to the largest absolute answer or to 1."""
_BATCH, _FRAMES = 3, 96
"""Size of the traced example. The exporter would take a size of 1 for a constant."""


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX model in memory."""

    content: bytes
    frames: int | None
    """Fixed number of input frames. ``None``: any number."""
    lengths: bool
    """True if the graph has the input ``lengths``."""
    difference: float
    """Largest absolute difference of an output to PyTorch's."""


def trace(module: nn.Module, examples: Mapping[str, Tensor], sizes: Sequence[Any], outputs: Sequence[str]) -> bytes:
    """Export a module to ONNX.

    Args:
        module: Module in evaluation mode, after :func:`replace_modules`.
        examples: Example of each input by name.
        sizes: Free dimensions of each input, in the format of ``torch.export``.
        outputs: Names of the outputs.
    """
    with silence("torch.onnx", "torch.fx", "onnxscript", "onnx_ir"), use("torch"), torch.no_grad():
        program: Any = torch.onnx.export(
            module,
            tuple(examples.values()),
            dynamo=True,
            dynamic_shapes=tuple(sizes),
            input_names=[*examples],
            output_names=[*outputs],
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
        optimizer.optimize(program.model, output_size_limit=_FOLDED)
    proto = program.model_proto
    for node in proto.graph.node:
        del node.metadata_props[:]  # source locations with paths of this machine
    content: bytes = proto.SerializeToString()
    return content


def open_session(content: bytes, threads: int = 0) -> Any:
    """Open an ONNX Runtime session on the CPU that logs errors only. ``threads=0`` uses all cores."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def to_onnx(model: RunModel, with_lengths: bool | None = None) -> Graph:
    """Export the network of a model with the inputs ``x`` and ``lengths`` and the outputs ``model.output_names``.

    Args:
        model: Model of a run.
        with_lengths: Whether to add the input ``lengths``. ``None``: only if the lengths of the run's clips vary.

    Raises:
        InputError: The network cannot be exported, or the graph's results differ from PyTorch's.
    """
    images = isinstance(model.spec.inputs, tuple)
    if with_lengths is None:
        with_lengths = model.length is None and not images
    reasons = []
    # Some networks export only with a fixed number of frames. All recordings must have it.
    for frames in (None,) if with_lengths or images else (None, model.length):
        try:
            network = _Outputs(replace_modules(model.network), model).eval()
            content = _trace_network(network, model, frames, with_lengths)
            return Graph(content, frames, with_lengths, _compare_graph(content, model, frames, with_lengths))
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  (copying, tracing or calling a user's network raises anything)
            reasons.append(_summarise_error(error))
    raise InputError(
        f"model {model.name!r} ({model.spec.architecture}) cannot be exported to ONNX: {reasons[0]}. Its "
        f"forward(x, lengths) must be traceable by torch.export: do not branch on a tensor's value, and take sizes from x.shape. "
        f"copy.deepcopy must be able to copy the network."
    )


class _Outputs(nn.Module):
    """A network with the probabilities as a second output, if its outputs are logits."""

    def __init__(self, network: nn.Module, model: RunModel) -> None:
        super().__init__()
        self.network, self.objective = network, model.objective
        self.count = len(model.output_names)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs = self.network(x, lengths)
        return (outputs, self.objective.answer(outputs)) if self.count == 2 else (outputs,)


class _Convolution(Conv1d):
    """raydfl.ops.Conv1d computed by PyTorch's operators."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Conv1d.forward(self, x)

    def pooled(self, x: Tensor, pool: int, lengths: Tensor | None = None) -> Tensor:
        if lengths is not None:
            outside = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
            x = x.masked_fill(outside.unsqueeze(2), 0.0)
        # max_pool2d with a dimension of 1, because torch.export takes the frames of max_pool1d for a constant.
        maps = self(x.transpose(1, 2)).relu().unsqueeze(2)
        return nn.functional.max_pool2d(maps, (1, pool)).squeeze(2).transpose(1, 2)


class _Recurrence(nn.Module):
    """A single-layer GRU as one ONNX ``GRU`` node."""

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
        suffixes = ("", "_reverse") if gru.bidirectional else ("",)

        def stack_gates(name: str) -> Tensor:
            return torch.stack([_reorder_gates(getattr(gru, name + suffix).detach()) for suffix in suffixes])

        self.register_buffer("weights", stack_gates("weight_ih_l0"))
        self.register_buffer("recurrent_weights", stack_gates("weight_hh_l0"))
        biases = [stack_gates("bias_ih_l0"), stack_gates("bias_hh_l0")] if gru.bias else []
        self.register_buffer("biases", torch.cat(biases, dim=1) if biases else None)
        self.directions, self.hidden = len(suffixes), gru.hidden_size

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._build_node(x, None, hx)

    def outputs(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self._build_node(x, lengths, None)[0]

    def _build_node(self, x: Tensor, lengths: Tensor | None, hx: Tensor | None) -> tuple[Tensor, Tensor]:
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


def _reorder_gates(gates: Tensor) -> Tensor:
    """Change PyTorch's order of gates (reset, update, candidate) to ONNX's (update, reset, candidate)."""
    reset, update, candidate = gates.chunk(3)
    return torch.cat([update, reset, candidate])


def replace_modules(network: nn.Module) -> nn.Module:
    """Copy a network, replacing modules without an ONNX form."""
    network = copy.deepcopy(network)
    holder = nn.ModuleDict({"network": network})
    for parent in list(holder.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1d):
                child.__class__ = _Convolution
            elif isinstance(child, nn.GRU) and child.num_layers == 1 and child.batch_first:
                setattr(parent, name, _Recurrence(child))
    return holder["network"]


def _trace_network(network: nn.Module, model: RunModel, frames: int | None, with_lengths: bool) -> bytes:
    x, lengths = _draw_example(model, _BATCH, frames or _FRAMES, with_lengths)
    fixed = frames or isinstance(model.spec.inputs, tuple)
    any_size = {0: "batch"} if fixed else {0: "batch", 1: "frames"}
    sizes = (any_size, {0: "batch"}) if with_lengths else (any_size,)
    inputs = {"x": x} if lengths is None else {"x": x, "lengths": lengths}
    return trace(network, inputs, sizes, model.output_names)


def _draw_example(model: RunModel, batch: int, frames: int, with_lengths: bool) -> tuple[Tensor, Tensor | None]:
    """Draw a batch of random inputs. The first example has all frames, like the longest example of any batch."""
    random = torch.Generator().manual_seed(batch * 10_000 + frames)
    inputs = model.spec.inputs
    x = torch.randn(batch, *(inputs if isinstance(inputs, tuple) else (frames, inputs)), generator=random)
    if not with_lengths:
        return x, None
    lengths = torch.randint(1, frames + 1, (batch,), generator=random)
    lengths[0] = frames
    outside = torch.arange(frames) >= lengths.unsqueeze(1)
    return x.masked_fill(outside.unsqueeze(2), 0.0), lengths


def _compare_graph(content: bytes, model: RunModel, frames: int | None, with_lengths: bool) -> float:
    """Return the largest absolute difference of a logit to PyTorch's, over batches of several sizes.

    Raises:
        InputError: A difference exceeds the tolerance.
    """
    session, worst = open_session(content), 0.0
    for batch, length in ((1, frames or 64), (2, frames or 101), (5, frames or 230)):
        x, lengths = _draw_example(model, batch, length, with_lengths)
        expected = model.logits(x, lengths).numpy()
        inputs = {"x": x.numpy()} if lengths is None else {"x": x.numpy(), "lengths": lengths.numpy()}
        outputs = session.run([*model.output_names], inputs)
        answer = model.objective.answer(torch.from_numpy(expected)).numpy()
        for actual, target in zip(outputs, [expected, answer], strict=False):
            difference = compare(actual, target, model, f"(x {list(x.shape)})")
            worst = max(worst, difference if target is expected else 0.0)
    return worst


def compare(actual: np.ndarray, expected: np.ndarray, model: RunModel, case: str, tolerant: bool = False) -> float:
    """Return the largest absolute difference between a graph's output and the expected one. Logarithms count as probabilities.

    Args:
        actual: Output of the graph.
        expected: raydfl's output, of the same shape. The number of tokens may differ.
        model: Model of a run.
        case: Description of the input, for the error message.
        tolerant: Accept any difference, as for int8.

    Raises:
        InputError: The difference exceeds :data:`TOLERANCE`.
    """
    # An output at each token may have tokens of padding.
    both = model.objective.join([torch.from_numpy(actual).double(), torch.from_numpy(expected).double()])
    actual, expected = np.split((both.exp() if model.objective.answers == "text" else both).numpy(), 2)
    difference = float(np.abs(actual - expected).max())
    if not tolerant and not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise InputError(
            f"the ONNX graph of model {model.name!r} ({model.spec.architecture}) differs from raydfl predict by "
            f"{difference:.1e} {case}; nothing was written. Export another form, or use the model with raydfl predict."
        )
    return difference


def _summarise_error(error: Exception) -> str:
    """Summarise the innermost cause of an exporter's error in one line."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300].rstrip('.')}"


@contextlib.contextmanager
def silence(*names: str) -> Iterator[None]:
    """Suppress warnings, standard error, and log messages below ERROR of the named loggers."""
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
