"""Inference with trained models: classify recordings, export to ONNX, write a DCASE submission.

Start reading with model.py and recordings.py; fused.py handles models of several views. onnx.py exports graphs from network.py
(features as input), wave.py (samples as input), streaming.py (samples in pieces) and int8.py. encoder.py exports
pretrained encoders and adapters. listening.py reads a microphone.
"""

from raydfl.runs.inference.canary_clips import ClipAudit, audit_clips
from raydfl.runs.inference.encoder import export_encoder
from raydfl.runs.inference.fused import classify, predict_fused
from raydfl.runs.inference.listening import listen
from raydfl.runs.inference.membership import Membership, compare_losses, measure_membership
from raydfl.runs.inference.model import RunFusion, RunModel, load_model, open_model
from raydfl.runs.inference.onnx import export_model
from raydfl.runs.inference.recordings import Prediction, predictions
from raydfl.runs.inference.submission import write_submission
from raydfl.runs.inference.tested import score_tests
from raydfl.runs.inference.threshold import Threshold

__all__ = [
    "ClipAudit",
    "Membership",
    "Prediction",
    "RunFusion",
    "RunModel",
    "Threshold",
    "audit_clips",
    "classify",
    "compare_losses",
    "export_encoder",
    "export_model",
    "listen",
    "load_model",
    "measure_membership",
    "open_model",
    "predict_fused",
    "predictions",
    "score_tests",
    "write_submission",
]
