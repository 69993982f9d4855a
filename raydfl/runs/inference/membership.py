"""Membership attack on a trained model: training clips have lower losses than held-out clips.

S. Yeom, I. Giacomelli, M. Fredrikson, S. Jha, Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting, CSF 2018:
an attacker regards clips with a low loss as training clips. The AUC of this decision is 0.5 for a model without memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from raydfl.controls import auc_interval
from raydfl.core.errors import InputError
from raydfl.data import Examples, Population
from raydfl.engine.storage import local_run
from raydfl.runs.inference.model import RunModel, _Run

_BATCH = 64


@dataclass(frozen=True, slots=True)
class Membership:
    """AUC of the losses of training clips against held-out clips."""

    auc: float
    """Probability that a training clip has a lower loss than a held-out clip. Equal losses count as half."""
    low: float
    """Lower end of the 95 % interval."""
    high: float
    """Upper end of the 95 % interval."""
    members: int
    """Number of training clips."""
    others: int
    """Number of held-out clips."""


def measure_membership(run_dir: str | Path, trust: bool = False) -> Membership:
    """Measure how well the loss of a run's shared model separates training clips from held-out clips.

    Training clips are those of all clients except simulated attackers, without canary clips. Held-out clips are the server's test
    clips and the clients' validation and test clips.

    Args:
        run_dir: Run folder.
        trust: Approve the code named by the run's configuration.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run directory, or has no completed round.
        InputError: The objective does not predict one class, the data have parts or sites, or a set of clips is empty.
        DataError: Features are missing.
    """
    run = _Run(local_run(run_dir), trust)
    if run.config.data.sites or run.config.data.parts:
        where = "data.sites" if run.config.data.sites else "data.parts"
        raise InputError(f"{where}: the membership attack needs one data set on this machine.")
    if run.method.objective.answers != "class":
        raise InputError("objective: the membership attack needs one class for each clip.")
    model, attack = run.load_shared(None), run.config.components.attack
    population = Population.load(run.run_dir / "population").use(run.config.data)
    clients = range(len(population))
    attacks = [False] * len(clients) if attack is None else attack.attackers(population.ids, run.config.run.seed, 0)
    honest = [number for number in clients if not attacks[number]]
    data = [population.data(number) for number in honest]
    canaries = [population.read_canaries(number).clips for number in honest]
    trained = [
        client.train.take(np.flatnonzero(~np.isin(client.train.clips, clips)))
        for client, clips in zip(data, canaries, strict=True)
    ]
    members = compute_losses(model, [examples.cut_for_test() for examples in trained])
    held_out = [examples for client in data for examples in (client.validation, client.test)]
    others = compute_losses(model, [population.test, *held_out])
    if not len(members) or not len(others):
        kind = "held-out" if len(members) else "training"
        raise InputError(
            f"data.split: the membership attack needs {kind} clips. Hold some out with data.split.validation."
        )
    return compare_losses(members, others)


def compare_losses(members: np.ndarray, others: np.ndarray) -> Membership:
    """Compute the AUC of the losses of training clips against held-out clips.

    Args:
        members: Losses of training clips, float64 [members].
        others: Losses of held-out clips, float64 [others].
    """
    from sklearn.metrics import roc_auc_score  # only audits need it

    is_member = np.repeat([1, 0], [len(members), len(others)])
    auc = float(roc_auc_score(is_member, -np.concatenate([members, others])))
    return Membership(auc, *auc_interval(auc, len(members), len(others)), len(members), len(others))


def compute_losses(model: RunModel, sets: Sequence[Examples]) -> np.ndarray:
    """Compute the mean cross-entropy of each clip's examples.

    Args:
        model: Trained model.
        sets: Examples with the labels to score.

    Returns:
        float64 [clips]: the clips of each set in ascending order.
    """
    losses = [np.zeros(0)]
    for examples in sets:
        if not len(examples):
            continue
        values = [
            torch.nn.functional.cross_entropy(model.logits(batch.x, batch.lengths), batch.y, reduction="none")
            for batch in examples.batches(_BATCH, None)
        ]
        _, clips, counts = np.unique(examples.clips, return_inverse=True, return_counts=True)
        losses.append(np.bincount(clips, torch.cat(values).double().numpy()) / counts)
    return np.concatenate(losses)
