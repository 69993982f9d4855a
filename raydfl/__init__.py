"""raydfl: federated learning for audio on Ray clusters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raydfl.core.version import __version__

if TYPE_CHECKING:
    from raydfl.core.errors import RaydflError
    from raydfl.core.types import Batch, Client, Ratio, State, Task, Update
    from raydfl.data.dataset import Dataset
    from raydfl.engine.config import Config, load_config, make_config
    from raydfl.experiments.trainable import trainable
    from raydfl.methods._method import Method
    from raydfl.rules import Rule
    from raydfl.runs.inference.model import load_model
    from raydfl.runs.inference.onnx import export_model
    from raydfl.runs.inference.recordings import classify
    from raydfl.runs.replay import replay
    from raydfl.runs.run import Outcome, resume, run
    from raydfl.training.fit import fit, predict
    from raydfl.training.step import Step

_WHERE = {
    "Rule": "raydfl.rules",
    "Config": "raydfl.engine.config",
    "load_config": "raydfl.engine.config",
    "make_config": "raydfl.engine.config",
    "Dataset": "raydfl.data.dataset",
    "RaydflError": "raydfl.core.errors",
    "trainable": "raydfl.experiments.trainable",
    "Method": "raydfl.methods._method",
    "Outcome": "raydfl.runs.run",
    "classify": "raydfl.runs.inference.recordings",
    "export_model": "raydfl.runs.inference.onnx",
    "load_model": "raydfl.runs.inference.model",
    "replay": "raydfl.runs.replay",
    "resume": "raydfl.runs.run",
    "run": "raydfl.runs.run",
    "Step": "raydfl.training.step",
    "fit": "raydfl.training.fit",
    "predict": "raydfl.training.fit",
    "Batch": "raydfl.core.types",
    "Client": "raydfl.core.types",
    "Ratio": "raydfl.core.types",
    "State": "raydfl.core.types",
    "Task": "raydfl.core.types",
    "Update": "raydfl.core.types",
}

__all__ = [
    "Batch",
    "Client",
    "Config",
    "Dataset",
    "Method",
    "Outcome",
    "Ratio",
    "RaydflError",
    "Rule",
    "State",
    "Step",
    "Task",
    "Update",
    "__version__",
    "classify",
    "export_model",
    "fit",
    "load_config",
    "load_model",
    "make_config",
    "predict",
    "replay",
    "resume",
    "run",
    "trainable",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: ``raydfl --help`` need not wait for PyTorch and Ray."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
