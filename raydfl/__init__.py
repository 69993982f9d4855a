"""raydfl: federated learning for audio on Ray clusters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from raydfl.aggregate import Rule
    from raydfl.config import Config, load_config, make_config
    from raydfl.data.dataset import Dataset
    from raydfl.errors import RaydflError
    from raydfl.method import Method
    from raydfl.replays import replay
    from raydfl.runs import Outcome, resume, run
    from raydfl.step import Step
    from raydfl.train import fit, predict
    from raydfl.types import Batch, Client, Ratio, State, Task, Update
    from raydfl.using.model import load_model
    from raydfl.using.onnx_file import export_model
    from raydfl.using.recordings import classify

_WHERE = {
    "Rule": "raydfl.aggregate",
    "Config": "raydfl.config",
    "load_config": "raydfl.config",
    "make_config": "raydfl.config",
    "Dataset": "raydfl.data.dataset",
    "RaydflError": "raydfl.errors",
    "Method": "raydfl.method",
    "Outcome": "raydfl.runs",
    "classify": "raydfl.using.recordings",
    "export_model": "raydfl.using.onnx_file",
    "load_model": "raydfl.using.model",
    "replay": "raydfl.replays",
    "resume": "raydfl.runs",
    "run": "raydfl.runs",
    "Step": "raydfl.step",
    "fit": "raydfl.train",
    "predict": "raydfl.train",
    "Batch": "raydfl.types",
    "Client": "raydfl.types",
    "Ratio": "raydfl.types",
    "State": "raydfl.types",
    "Task": "raydfl.types",
    "Update": "raydfl.types",
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
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: ``raydfl --help`` need not wait for PyTorch and Ray."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
