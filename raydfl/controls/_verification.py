"""Controls of speaker verification: chance, and the cosines of clips described by raw features.

A clip is described by the mean and the standard deviation of its features in :data:`INTERVALS` time intervals, standardised with
the training clips. Trials are those of the run.
"""

from __future__ import annotations

import numpy as np
import torch

from raydfl.controls._classification import INTERVALS
from raydfl.controls._clips import LIMIT, describe_clips, draw_clips, remove_constants
from raydfl.controls._control import RAW, Control
from raydfl.core.metrics import summarise
from raydfl.data import Examples, Population
from raydfl.objectives import Objective


def measure_verifiers(data: Population, objective: Objective, rng: np.random.Generator) -> tuple[list[Control], str]:
    """Measure the controls of the server's test and held-out clips.

    Args:
        data: population of one part, with clips.
        objective: objective of the run, whose answers are embeddings.
        rng: generator that draws the training clips.

    Returns:
        The controls, and the reason for missing controls.
    """
    values = [_describe(part)[0] for part in draw_clips(data.read_role("train"), LIMIT, rng)]
    tests = {split: parts[0] for split in ("test", "server_validation") if (parts := data.read_role(split))}
    if not values or not tests:
        return [], "Raw features have no score, because the server has no test clips."
    mean, spread = np.concatenate(values).mean(axis=0), remove_constants(np.concatenate(values).std(axis=0))
    controls = []
    for split, examples in tests.items():
        tested, clips = _describe(examples)
        scores = summarise(objective.metrics(torch.from_numpy((tested - mean) / spread), clips))
        found = {"chance": 0.5, f"{RAW}cosine": scores["eer"].value} if "eer" in scores else {}
        controls += [Control(name, split, "eer", float(value), len(clips)) for name, value in found.items()]
    return controls, ""


def _describe(part: Examples) -> tuple[np.ndarray, Examples]:
    """Describe clips: float64 [clips, values], and the first example of each clip."""
    mean, deviation, first = describe_clips(part, INTERVALS)
    return np.concatenate([mean, deviation], axis=1), first
