"""A network with weights and activations of 8 bits, by ONNX Runtime's quantiser, and what that costs on the test.

Convolutions and products with matrices are quantised, weights by channel. What the activations' ranges are is learnt from training
clips (static quantisation): a convolution is then one operation on integers, while with ranges found anew in each call (dynamic
quantisation) it is slower than in floats. GRUs stay in floats, for the quantiser knows none; so do a front end, normalisation and
softmax.
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
from raydfl.runs.inference.network import Graph, open_session, quiet
from raydfl.runs.inference.recordings import LEAST_FRAMES

QUANTISED = ("Conv", "Gemm", "MatMul")
"""Operators whose weights and inputs become int8."""
_CALIBRATION = 128
"""Training examples from which ranges are learnt."""
_BATCH = 16


def quantise(model: RunModel, graph: Graph) -> tuple[Graph, dict[str, Any]]:
    """Return a graph in int8, and its description: what was quantised, and its score beside that in floats on held-out clips.

    Args:
        model: of the run.
        graph: its network in floats, from features.

    Raises:
        InputError: there are no training clips here to learn ranges from, or nothing in the network can be quantised.
    """
    train, held_out, split = _examples(model)
    chosen = np.sort(np.random.default_rng(0).permutation(len(train))[:_CALIBRATION])
    content, operators = _static(graph.content, list(_given(model, graph, train.take(chosen))))
    if not operators:
        raise InputError(
            f"--quantize int8: model {model.name!r} ({model.spec.architecture}) has no convolution and no linear layer that could "
            f"be quantised; leave it out"
        )
    found, measured = replace(graph, content=content), None
    if len(held_out) and type(model.objective).metrics is not Objective.metrics:
        clips = len(np.unique(held_out.clips))
        scores = {kind: _score(model, each, held_out) for kind, each in (("float32", graph), ("int8", found))}
        measured = {"metric": model.objective.headline, "split": split, "clips": clips, **scores}
    facts = {"type": "int8", "operators": operators, "calibration_examples": len(chosen), "measured": measured}
    return found, facts


def _examples(model: RunModel) -> tuple[Examples, Examples, str]:
    """Return training examples and held-out ones: those that the run measures the model on, and what they are called.

    Raises:
        InputError: there are none here.
    """
    folder = model.run_dir / "population"
    try:
        population = Population.load(folder).use(model.data)
    except (DataError, RunDirectoryError) as error:
        raise InputError(f"--quantize int8 learns ranges from the run's training clips: {error}") from error
    if model.client:
        data = population.data(population.index(model.client))
        train, held_out, split = data.train, data.validation, "validation"
        if len(data.test):
            held_out, split = data.test, "client_test"
    else:
        part = population.parts.get(model.name.partition(":")[0], population)
        found = part.first_examples(int(part.sizes().sum()))
        if found is None:
            raise InputError(
                f"--quantize int8 learns ranges from training clips, and those of {model.run_dir} lie at its sites (data.sites); "
                f"leave it out"
            )
        train, held_out, split = found, part.test, "test"
        if not len(held_out):
            held_out, split = part.validation, "validation"
    if not len(train):
        raise InputError(f"--quantize int8 learns ranges from training clips, and client {model.client!r} has none")
    return train.seen_by(model.spec.view), held_out.seen_by(model.spec.view), split


def _given(model: RunModel, graph: Graph, examples: Examples) -> Iterator[dict[str, np.ndarray]]:
    """Yield what the graph's inputs are given for some examples, batch by batch."""
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
    """Return the objective's headline score of a graph."""
    session, name = open_session(graph.content), model.output_names[0]
    outputs = np.concatenate([session.run([name], given)[0] for given in _given(model, graph, examples)])
    metrics = summarise(model.objective.metrics(torch.from_numpy(outputs), examples))
    return metrics[model.objective.headline].value


class _Clips(CalibrationDataReader):  # type: ignore[misc]
    """Batches of training clips, as the quantiser asks for them."""

    def __init__(self, batches: list[dict[str, np.ndarray]]) -> None:
        self._left = iter(batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def _static(content: bytes, batches: list[dict[str, np.ndarray]]) -> tuple[bytes, int]:
    """Return an ONNX model in int8, and how many operators became that."""
    with tempfile.TemporaryDirectory(prefix="raydfl-int8-") as name, quiet(""):
        folder = Path(name)
        given, prepared, quantised = (folder / f"{part}.onnx" for part in ("given", "prepared", "int8"))
        given.write_bytes(content)
        quant_pre_process(given, prepared, skip_symbolic_shape=True)
        wanted = [node.name for node in onnx.load(prepared).graph.node if node.op_type in QUANTISED]
        quantize_static(
            prepared,
            quantised,
            _Clips(batches),
            op_types_to_quantize=list(QUANTISED),
            per_channel=True,
            reduce_range=True,  # else products overflow on processors without VNNI
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return quantised.read_bytes(), len(wanted)
