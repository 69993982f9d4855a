"""An ONNX graph in memory, and the names of its outputs; for modules that need none of the packages of the extra ``onnx``."""

from __future__ import annotations

from dataclasses import dataclass

from raydfl.objectives import Objective

OPSET = 18
"""Version of the ONNX operators."""
TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit or to 1, up to which two implementations agree."""


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX model in memory."""

    content: bytes
    frames: int | None
    """Frames that it takes; ``None``: any number."""
    lengths: bool
    """True where it has the input ``lengths``."""
    difference: float
    """Largest difference to PyTorch of an output."""


def output_names(objective: Objective) -> tuple[str, ...]:
    """Return what the outputs of a graph are called: logits and probabilities, or the score, or plain outputs."""
    return {"score": ("score",), "none": ("outputs",)}.get(objective.answers, ("logits", "probabilities"))
