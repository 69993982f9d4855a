"""The membership attack. Oracles: values by hand, and a model with labels that it can only memorise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from raydfl.core.errors import InputError
from raydfl.data import Population
from raydfl.engine.config import Config
from raydfl.runs import Progress, run
from raydfl.runs.inference import compare_losses, measure_membership

Tiny = Callable[..., Config]


def test_three_training_clips_and_two_held_out_clips_by_hand() -> None:
    """Of six pairs, four training clips have the lower loss, and one pair is equal: (4 + 0.5) / 6."""
    found = compare_losses(np.array([0.1, 0.4, 0.9]), np.array([0.4, 1.0]))
    assert found.auc == pytest.approx(4.5 / 6)
    assert 0 < found.low < found.auc < found.high < 1
    assert compare_losses(np.zeros(5), np.ones(5)).auc == 1.0


def test_memorised_labels_are_found_and_honest_labels_are_not(tiny: Tiny) -> None:
    """Random labels are independent of the recordings: lower losses of training clips come from memory alone."""
    alone = ("models.model=mlp", "data.partition={by: iid, clients: 1}", "train.cohort=1.0", "train.rounds=1")
    memorise = ("data.corrupt.labels={rate: 1.0}", "train.local_epochs=150", "train.optimiser={name: adam, lr: 0.01}")
    names = {"memorised": memorise, "untrained": ("train.optimiser.lr=1e-9",)}
    found = {}
    for name, rest in names.items():
        result = run(tiny(*alone, "evaluate.clients=none", *rest, f"run.name={name}"), Progress("quiet"))
        found[name] = measure_membership(result.run_dir)
    assert found["memorised"].low > 0.5
    assert found["untrained"].low <= 0.5 <= found["untrained"].high
    population = Population.load(result.run_dir / "population", features=False)
    assert found["untrained"].members == int(np.sum(population.sizes()))


def test_runs_without_classes_are_rejected(tiny: Tiny) -> None:
    config = tiny("objective={name: compact, size: 4, normal: [tone0]}", "train.rounds=1", "evaluate.clients=none")
    result = run(config, Progress("quiet"))
    with pytest.raises(InputError, match="needs one class for each clip"):
        measure_membership(result.run_dir)
