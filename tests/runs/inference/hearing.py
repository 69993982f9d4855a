"""Untrained models with the front ends of runs, for tests of graphs with samples as input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from used_runs import FEATURES

from raydfl.core.types import ModelSpec
from raydfl.data import DataSettings
from raydfl.models import build_model
from raydfl.objectives import Classify, find_objective
from raydfl.runs.inference.model import RunModel

CLASSES = ("a", "b", "c")


def make_untrained_model(
    architecture: str, average: str = "probabilities", options: Any = (), objective: str = "classify", **data: Any
) -> RunModel:
    """Make a model for clips with the settings ``data``. Large weights expose small differences of features."""
    settings = DataSettings.model_validate({"name": "spoken_words", "features": FEATURES, **data})
    features, segment, cut = settings.features, settings.first_view.test_segments, settings.first_view.pipeline.cut
    length = features.frames
    if length is not None:
        length = min(number for number in (length, segment and segment.frames, cut) if number is not None)
    statistics = None
    if features.normalise == "part":
        statistics = np.random.default_rng(0).uniform(5, 20, (2, features.bands))
    spec = ModelSpec("m", architecture, features.bands, len(CLASSES), tuple(dict(options).items()))
    torch.manual_seed(1)
    network = build_model(spec).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    goal = Classify(average=average) if objective == "classify" else find_objective({"name": objective})  # type: ignore[arg-type]
    network = goal.predictor(network).eval()
    return RunModel(
        Path("runs/x"), "m", "", 1, network, spec, CLASSES, settings, settings.first_view, length, statistics, goal
    )
