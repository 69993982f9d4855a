"""Uses of a trained model: classify recordings, write it as ONNX, write a submission to DCASE.

Begin with model.py and recordings.py; fused.py is for models of several views. What onnx.py writes is made in network.py (features
in), wave.py (samples in), streaming.py (samples piece by piece) and int8.py.
"""

from raydfl.runs.inference.fused import classify, fused_predictions
from raydfl.runs.inference.model import RunFusion, RunModel, load_model, open_model
from raydfl.runs.inference.onnx import export_model
from raydfl.runs.inference.recordings import Prediction, predictions
from raydfl.runs.inference.submission import write_submission
from raydfl.runs.inference.tested import score_tests
from raydfl.runs.inference.threshold import Threshold

__all__ = [
    "Prediction",
    "RunFusion",
    "RunModel",
    "Threshold",
    "classify",
    "export_model",
    "fused_predictions",
    "load_model",
    "open_model",
    "predictions",
    "score_tests",
    "write_submission",
]
