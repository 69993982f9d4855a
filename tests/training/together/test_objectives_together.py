"""Every objective, and what losses report: looped, stacked and from a recording the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import several_clients
import torch
import torch.nn.functional as F
from several_clients import BANDS, CLASSES, both, make_steps
from torch import Tensor, nn

from raydfl.core import registry
from raydfl.core.types import Batch, ModelSpec, Ratio
from raydfl.methods import Method
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedprox import FedProx
from raydfl.models.crnn import CRNN
from raydfl.objectives import Objective, find_objective
from raydfl.training._fit import fit
from raydfl.training.step import Step

OBJECTIVES: dict[str, list[dict[str, Any]]] = {
    "classify": [{}],
    "multi_label": [{}],
    "compact": [{"size": 4}, {"size": 4, "by": "class", "spread": 0.5}],
    "reconstruct": [{"size": 4, "bins": 3, "hidden": 8}],
    "contrast": [{"size": 4, "frames": 5}],
}
CASES = [
    pytest.param({"name": name, **options}, id=f"{name}-{i}")
    for name in OBJECTIVES
    for i, options in enumerate(OBJECTIVES[name])
]


def given(method: Method, objective: Objective) -> Method:
    object.__setattr__(method, "objective", objective)
    return method


def networks(objective: Objective, dropout: float = 0.0) -> Callable[[], dict[str, nn.Module]]:
    def build() -> dict[str, nn.Module]:
        spec = ModelSpec("model", "made by the test", BANDS, CLASSES, outputs=objective.outputs(CLASSES))
        network = CRNN(BANDS, spec.width, filters=(4,), hidden=5, dropout=dropout)
        objective.extend(network, spec)
        return {"model": network}

    return build


@pytest.fixture(autouse=True)
def labels_as_the_objective_needs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = request.node.callspec.params.get("setting") if hasattr(request.node, "callspec") else None
    if setting is None or setting["name"] != "multi_label":
        return
    made = several_clients.make_examples
    sets = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]], bool)
    monkeypatch.setattr(several_clients, "make_examples", lambda *a: dataclasses.replace(made(*a), sets=sets))


def test_every_objective_is_here() -> None:
    assert sorted(OBJECTIVES) == registry.names("raydfl.objectives")


@pytest.mark.parametrize("lengths", [False, True], ids=["fixed", "lengths"])
@pytest.mark.parametrize("setting", CASES)
def test_several_clients_learn_it_together_as_alone(setting: dict[str, Any], lengths: bool) -> None:
    objective = find_objective(setting)
    both(given(FedProx(mu=0.1), objective), networks(objective, dropout=0.2), lengths=lengths)


class Reporting(FedAvg):
    """Counts what a pseudo-label method would: how many examples are sure, and how sure those are, as a sum over some."""

    def loss(self, step: Step, batch: Batch) -> Any:
        logits = step.forward("model", batch)
        weight = torch.ones_like(logits[:, 0]) if batch.weight is None else batch.weight
        confidence = logits.softmax(dim=1).amax(dim=1)
        sure = (confidence > 0.35).float() * weight
        value = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        return value, {
            "accepted": (sure.sum(), weight.sum()),
            "batches": (1, 1),
            "confidence": ((sure * confidence).sum(), sure.sum()),
        }


def test_a_loss_reports_the_same_batched_and_unbatched() -> None:
    both(Reporting(), networks(find_objective({"name": "classify"})))


def test_reports_are_added_up_over_all_batches() -> None:
    step = make_steps(Reporting(), networks(find_objective({"name": "classify"})), sizes=(9,), epochs=3)[0]
    counted: list[Tensor] = []

    def loss(step: Step, batch: Batch) -> Any:
        counted.append(batch.y.sum())
        return step.forward("model", batch).square().mean(), {"labels": (batch.y.sum(), len(batch.y)), "calls": (2, 1)}

    found = fit(step, loss)
    assert found["labels"] == Ratio(float(sum(counted)), 27)  # 9 examples, 3 epochs
    assert found["calls"] == Ratio(18, 9)  # in batches of 4


@pytest.mark.parametrize(
    "report",
    [{"loss": (1, 2)}, {"steps": (1, 2)}, {"share": 0.5}, {"share": (1, 2, 3)}],
    ids=["loss", "steps", "number", "three"],
)
def test_a_report_that_cannot_be_one_is_refused(report: dict[str, Any]) -> None:
    step = make_steps(FedAvg(), networks(find_objective({"name": "classify"})), sizes=(3,))[0]
    with pytest.raises(ValueError, match=r"give a pair \(sum, count\), under a name different"):
        fit(step, lambda step, batch: (step.forward("model", batch).mean(), report))


def test_the_crops_of_every_step_are_new() -> None:
    objective = find_objective({"name": "contrast", "size": 4, "frames": 3})
    step = make_steps(given(FedAvg(), objective), networks(objective), sizes=(8,), epochs=4)[0]
    seen: list[Tensor] = []
    network = step.models["model"]
    forward = network.forward

    def noted(x: Tensor, lengths: Tensor | None = None) -> Tensor:
        seen.append(x.clone())
        return forward(x, lengths)

    network.forward = noted  # type: ignore[method-assign]
    fit(step, lambda step, batch: objective.loss(step, "model", batch))
    assert all(x.shape[1:] == (3, BANDS) for x in seen)
    assert len({x.numpy().tobytes() for x in seen}) == len(seen) == 16  # two crops in each of 2 batches, 4 epochs
