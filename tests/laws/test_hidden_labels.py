"""Law 1 of examples: hidden labels decide nothing. Semi-supervised training by a method of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import differ, finish, same, truth
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl import Batch, Config, Method, Plan, Step, Update, fit
from raydfl.cluster.server import Server
from raydfl.data.population import Population
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

Tiny = Callable[..., Config]
POOLS = ("data.unlabelled={keep: 0.5}", "train.rounds=2")


@dataclass(frozen=True, kw_only=True)
class PseudoLabels(Method):
    """FedAvg that takes what the network is surest of for the label of a clip without one."""

    cheats: bool = False

    def loss(self, step: Step, batch: Batch) -> Tensor:
        logits = step.forward("model", batch)
        guess = batch.columns["hidden_label"] if self.cheats else logits.detach().argmax(dim=1)
        labels = torch.where(batch.columns["pool"] == 0, batch.y, guess)
        return batch.mean(F.cross_entropy(logits, labels, reduction="none"))

    def local(self, step: Step) -> Update:
        return step.update(fit(step, self.loss, batches=Plan({"labelled": 4, "unlabelled": 4}, leads="unlabelled")))


def run_with(config: Config, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, bytes]:
    """A whole run in which the hidden labels were changed before the first round."""
    run_dir = create(config, Progress("quiet"))
    population = Population.load(run_dir / "population")
    column = "train@unlabelled/column/hidden_label"
    hidden = population._arrays[column]
    assert len(set(hidden.tolist())) == 3
    population._arrays[column] = change(np.array(hidden))
    population.save(run_dir / "population")
    server = Server(run_dir, config)
    try:
        while server.round_index < config.train.rounds:
            server.round()
    finally:
        server.close()
    return truth(run_dir)


@pytest.mark.parametrize("together", [1, 3])
def test_hidden_labels_permuted_give_the_same_bits(tiny: Tiny, together: int) -> None:
    def runs(**options: Any) -> tuple[dict[str, bytes], dict[str, bytes]]:
        settings = [*POOLS, f"train.together={together}", *(f"method.{key}={value}" for key, value in options.items())]
        name = f"{__file__}:PseudoLabels"
        return (
            run_with(tiny(*settings, f"run.name=a{options}".translate(_PLAIN), method=name), lambda hidden: hidden),
            run_with(
                tiny(*settings, f"run.name=b{options}".translate(_PLAIN), method=name),
                np.random.default_rng(0).permutation,
            ),
        )

    same(*runs())
    assert differ(*runs(cheats=True)), "a method that looks at them is found out"


_PLAIN = str.maketrans("", "", "{}' :")


def test_the_unlabelled_pool_is_trained_on_by_the_plan_alone(tiny: Tiny) -> None:
    """FedAvg itself trains on the labelled pool: less data, another model; the plan's method learns from both."""
    by_plan = finish(tiny(*POOLS, "run.name=plan", method=f"{__file__}:PseudoLabels"))
    labelled = finish(tiny(*POOLS, "run.name=labelled"))
    everything = finish(tiny("train.rounds=2", "run.name=everything"))
    assert differ(by_plan, labelled)
    assert differ(labelled, everything)
