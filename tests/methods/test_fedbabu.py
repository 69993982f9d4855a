"""FedBABU: a head that never changes, and fine-tuning in evaluations, which leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import final_state, known, same, truth
from several_clients import BANDS, CLASSES, make_examples, make_steps
from torch import nn

from raydfl import run
from raydfl.core.errors import ConfigError
from raydfl.core.types import Client, Ratio
from raydfl.engine.config import Config
from raydfl.methods.fedbabu import FedBABU
from raydfl.models.dense import MeanMLP
from raydfl.training import Replica
from raydfl.training.fates import fixed_tensors

Tiny = Callable[..., Config]


def build() -> dict[str, nn.Module]:
    return {"model": MeanMLP(BANDS, CLASSES, hidden=7)}


@pytest.mark.parametrize("part", ["all", "head"])
def test_a_personal_model_is_fine_tuned_on_the_clients_data(part: Literal["all", "head"]) -> None:
    method = FedBABU(fine_tune_epochs=3, fine_tune_part=part)
    steps = [make_steps(method, build)[1] for _ in range(2)]
    for step in steps:
        step.fixed = fixed_tensors(step.models, method.fixed)
        Replica(step.models, step.fixed)  # as the engine holds networks
    step, reference = steps
    network = copy.deepcopy(reference.models["model"]).double().requires_grad_(True)
    trained = list((network if part == "all" else network.output).parameters())
    for _ in range(3):
        for batch in reference.data.train.batches(4, reference.rng):
            loss = F.cross_entropy(network(batch.x.double()), batch.y)
            with torch.no_grad():
                for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    parameter -= 0.1 * gradient
    before = {name: value.clone() for name, value in step.models["model"].state_dict().items()}
    for seed in (5, 6):  # two splits: it is trained once
        examples = make_examples(8, seed)
        measured = method.evaluate(step, examples, 4)
        batch = examples.batch(np.arange(8))
        for name, model in (("model", reference.models["model"].double()), ("personal", network)):
            expected = F.cross_entropy(model(batch.x.double()), batch.y)
            found = measured[f"{name}/loss"]
            assert isinstance(found, Ratio)
            assert found.value == pytest.approx(expected.item(), rel=1e-4)
        assert step.rng.bit_generator.state == reference.rng.bit_generator.state
    assert all(torch.equal(before[name], value) for name, value in step.models["model"].state_dict().items())


def test_fine_tuning_changes_no_model_and_the_server_measures_body_and_head(tiny: Tiny) -> None:
    common = ["train.rounds=2", "train.cohort=1.0"]
    outcome = run(tiny(*common, "method.fine_tune_epochs=2", "run.name=tuned", method="fedbabu"))
    assert {"test model/accuracy", "validation model/accuracy", "validation personal/accuracy"} <= set(outcome.scores)
    assert not any("output" in name for name in final_state(outcome.run_dir).tensors["global"])
    same(known(tiny(*common, "method.fine_tune_epochs=0", method="fedbabu")), truth(outcome.run_dir))


def test_a_head_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"method.head: no tensor's name begins with 'model/top'; layers: model/hidden"
    ):
        FedBABU(head=("model/top",)).init([Client("a", 0, 1)], [build()], np.random.default_rng(0))
    with pytest.raises(ConfigError, match="method.fine_tune_part is head, but method.head is empty"):
        FedBABU(head=(), fine_tune_part="head").init([Client("a", 0, 1)], [build()], np.random.default_rng(0))
