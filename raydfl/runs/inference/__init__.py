"""Uses of a trained model: classify recordings, write it as ONNX.

Begin with model.py and recordings.py.
"""

from raydfl.runs.inference.model import RunModel, load_model
from raydfl.runs.inference.onnx import export_model
from raydfl.runs.inference.recordings import Prediction, classify, predictions

__all__ = [
    "Prediction",
    "RunModel",
    "classify",
    "export_model",
    "load_model",
    "predictions",
]
