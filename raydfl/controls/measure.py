"""Measurement of the controls of a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raydfl.controls._classification import measure_classifiers
from raydfl.controls._control import Control
from raydfl.controls._detection import measure_detectors
from raydfl.controls._events import measure_frame_model
from raydfl.controls._transcription import measure_same_answer
from raydfl.controls._verification import measure_verifiers
from raydfl.core.part_names import qualify
from raydfl.core.seeds import generator
from raydfl.data import Population
from raydfl.objectives import AnomalyObjective, Events, Objective


def measure_controls(population: Population, objective: Objective, seed: int) -> tuple[list[Control], str]:
    """Measure the controls of a run on its test clips and held-out clips.

    The controls train on the clips of all clients, with the labels that the clients have, and on at most 20,000 clips. With
    several views, they read the first.

    Args:
        population: the run's population, with its transforms (:meth:`raydfl.data.Population.use`).
        objective: the run's objective.
        seed: seed of the run.

    Returns:
        The controls, and the reasons for missing controls. The reason is empty if none is missing.

    Raises:
        DataError: the features are missing.
    """
    controls: list[Control] = []
    notes: list[str] = []
    for name, data in population.parts.items():
        measured, note = _measure_part(data, objective, generator(seed, 0, name, "controls"))
        controls += [replace(control, metric=qualify(name, "/", control.metric)) for control in measured]
        notes += [qualify(name, ": ", note)] * bool(note)
    return controls, " ".join(notes)


def _measure_part(data: Population, objective: Objective, rng: np.random.Generator) -> tuple[list[Control], str]:
    """Measure the controls of a part, and explain missing controls."""
    if not data.has_clips:
        return [], "Raw features have no score, because the server does not read clips at sites."
    if isinstance(objective, AnomalyObjective):
        return measure_detectors(data, objective, rng)
    if isinstance(objective, Events):
        return measure_frame_model(data, objective, rng)
    if objective.answers in ("class", "set"):
        return measure_classifiers(data, rng)
    if objective.answers == "embedding":
        return measure_verifiers(data, objective, rng)
    if objective.answers == "text" and data.sequences is not None:
        return measure_same_answer(data, rng)
    return [], f"No raw-feature control for the objective {type(objective).__name__.lower()}."
