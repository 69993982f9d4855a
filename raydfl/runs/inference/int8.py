"""Static int8 quantisation of a network by ONNX Runtime, and its effect on held-out scores.

Convolutions and matrix products are quantised, with one scale per output channel of the weights. Ranges of activations are
calibrated on training clips (static quantisation). Dynamic quantisation would be slower than float32, because it measures ranges in
every call. The quantiser does not support GRUs. They stay in float32, like the front end, normalisation and softmax.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from raydfl.core.errors import DataError, InputError, RunDirectoryError
from raydfl.core.metrics import summarise
from raydfl.data import Examples, Population
from raydfl.objectives import Objective
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.network import Graph, open_session, silence
from raydfl.runs.inference.recordings import LEAST_FRAMES

QUANTISED = ("Conv", "Gemm", "MatMul")
"""Operators with int8 weights and inputs."""
_CALIBRATION = 128
"""Number of training examples for calibration."""
_BATCH = 16


def quantise(model: RunModel, graph: Graph) -> tuple[Graph, dict[str, Any]]:
    """Quantise a graph to int8, and compare its score with float32 on held-out clips.

    Args:
        model: Model of a run.
        graph: Its network in float32, with features as input.

    Returns:
        The int8 graph, and a description for JSON with the number of quantised operators and both scores.

    Raises:
        InputError: Training clips for calibration are missing here, or the network has no quantisable operator.
    """
    train, held_out, split = _load_examples(model)
    chosen = np.sort(np.random.default_rng(0).permutation(len(train))[:_CALIBRATION])
    content, operators = _quantise_static(graph.content, list(_make_feeds(model, graph, train.take(chosen))))
    if not operators:
        raise InputError(
            f"--quantize int8: model {model.name!r} ({model.spec.architecture}) has no convolution and no linear layer to "
            f"quantise. Omit the option."
        )
    quantised, measured = replace(graph, content=content), None
    if len(held_out) and type(model.objective).metrics is not Objective.metrics:
        clips = len(np.unique(held_out.clips))
        scores = {dtype: _score(model, form, held_out) for dtype, form in (("float32", graph), ("int8", quantised))}
        measured = {"metric": model.objective.headline, "split": split, "clips": clips, **scores}
    facts = {"type": "int8", "operators": operators, "calibration_examples": len(chosen), "measured": measured}
    return quantised, facts


def _load_examples(model: RunModel) -> tuple[Examples, Examples, str]:
    """Return the model's training examples, its held-out examples, and the name of the held-out split.

    Raises:
        InputError: The examples are not on this machine.
    """
    folder = model.run_dir / "population"
    try:
        population = Population.load(folder).use(model.data)
    except (DataError, RunDirectoryError) as error:
        raise InputError(f"--quantize int8 needs the run's training clips for calibration: {error}") from error
    if model.client:
        data = population.data(population.index(model.client))
        train, held_out, split = data.train, data.validation, "validation"
        if len(data.test):
            held_out, split = data.test, "client_test"
    else:
        part = population.parts.get(model.name.partition(":")[0], population)
        examples = part.first_examples(int(part.sizes().sum()))
        if examples is None:
            raise InputError(
                f"--quantize int8 needs training clips for calibration, but the clips of {model.run_dir} are at its sites "
                f"(data.sites). Omit the option."
            )
        train, held_out, split = examples, part.test, "test"
        if not len(held_out):
            held_out, split = part.validation, "validation"
    if not len(train):
        raise InputError(
            f"--quantize int8 needs training clips for calibration, but client {model.client!r} has no training clip. "
            f"Choose another client."
        )
    return train.select_view(model.spec.view), held_out.select_view(model.spec.view), split


def _make_feeds(model: RunModel, graph: Graph, examples: Examples) -> Iterator[dict[str, np.ndarray]]:
    """Yield the graph's inputs by name, batch by batch."""
    for batch in examples.batches(_BATCH, None):
        x, lengths = batch.x, batch.lengths
        if not graph.lengths:
            yield {"x": x.numpy()}
            continue
        if lengths is None:
            lengths = torch.full((len(x),), x.shape[1], dtype=torch.int64)
        if x.shape[1] < LEAST_FRAMES:
            x = torch.nn.functional.pad(x, (0, 0, 0, LEAST_FRAMES - x.shape[1]))
        yield {"x": x.numpy(), "lengths": lengths.numpy()}


def _score(model: RunModel, graph: Graph, examples: Examples) -> float:
    """Compute the objective's headline score of a graph."""
    session, name = open_session(graph.content), model.output_names[0]
    outputs = [torch.from_numpy(session.run([name], feed)[0]) for feed in _make_feeds(model, graph, examples)]
    metrics = summarise(model.objective.metrics(model.objective.join(outputs), examples))
    return metrics[model.objective.headline].value


class _Clips(CalibrationDataReader):  # type: ignore[misc]
    """Calibration batches in the quantiser's interface."""

    def __init__(self, batches: list[dict[str, np.ndarray]]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def _quantise_static(content: bytes, batches: list[dict[str, np.ndarray]]) -> tuple[bytes, int]:
    """Return an ONNX model in int8, and the number of quantised operators."""
    with tempfile.TemporaryDirectory(prefix="raydfl-int8-") as name, silence(""):
        folder = Path(name)
        original, prepared, quantised = (folder / f"{stem}.onnx" for stem in ("original", "prepared", "int8"))
        original.write_bytes(content)
        quant_pre_process(original, prepared, skip_symbolic_shape=True)
        operators = [node.name for node in onnx.load(prepared).graph.node if node.op_type in QUANTISED]
        quantize_static(
            prepared,
            quantised,
            _Clips(batches),
            op_types_to_quantize=list(QUANTISED),
            per_channel=True,
            reduce_range=True,  # otherwise products overflow on processors without VNNI
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return quantised.read_bytes(), len(operators)
