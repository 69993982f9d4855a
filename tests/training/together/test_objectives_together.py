"""Every objective, and metrics reported by losses: equal when unbatched and batched."""

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
from raydfl.data import Examples
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
    "identify": [{"size": 4, "machines": 3}],
    "transcribe": [{}],
    "events": [{}, {"times": False}],
    "verify": [{"size": 4}, {"size": 4, "ramp": 0, "margin": 0.4, "spread": 0.3, "distance": 1.5}],
}
CASES = [
    pytest.param({"name": name, **options}, id=f"{name}-{i}")
    for name in OBJECTIVES
    for i, options in enumerate(OBJECTIVES[name])
]


def with_objective(method: Method, objective: Objective) -> Method:
    object.__setattr__(method, "objective", objective)
    return method


def make_builder(objective: Objective, dropout: float = 0.0) -> Callable[[], dict[str, nn.Module]]:
    def build() -> dict[str, nn.Module]:
        spec = ModelSpec("model", "made by the test", BANDS, CLASSES, outputs=objective.outputs(CLASSES))
        network = CRNN(BANDS, spec.width, filters=(4,), hidden=5, dropout=dropout)
        objective.extend(network, spec)
        return {"model": network}

    return build


@pytest.fixture(autouse=True)
def make_labels_for_objective(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = request.node.callspec.params.get("setting") if hasattr(request.node, "callspec") else None
    make_examples = several_clients.make_examples
    sets = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]], bool)

    def make(*a: Any) -> Examples:
        examples = make_examples(*a)
        if setting["name"] == "multi_label":
            return dataclasses.replace(examples, sets=sets)
        if setting["name"] == "transcribe":
            return dataclasses.replace(examples, sequences=np.array([[0, 1], [2, -1], [-1, -1]], np.int32))
        if setting["name"] == "events":
            events = [[(0.02, 0.055, 0), (0.04, 0.1, 2)], [(-np.inf, np.inf, 1), (0, 0, -1)], [(0, 0, -1), (0, 0, -1)]]
            return dataclasses.replace(examples, events=np.array(events), frame_seconds=0.01)
        return dataclasses.replace(examples, columns={"group": examples.labels})

    if setting is not None and setting["name"] in ("multi_label", "identify", "transcribe", "events"):
        monkeypatch.setattr(several_clients, "make_examples", make)


def test_every_objective_is_covered() -> None:
    assert sorted(OBJECTIVES) == registry.names("raydfl.objectives")


@pytest.mark.parametrize("lengths", [False, True], ids=["fixed", "lengths"])
@pytest.mark.parametrize("setting", CASES)
def test_batched_clients_equal_unbatched_clients_for_each_objective(setting: dict[str, Any], lengths: bool) -> None:
    objective = find_objective(setting)
    both(with_objective(FedProx(mu=0.1), objective), make_builder(objective, dropout=0.2), lengths=lengths)


class Reporting(FedAvg):
    """FedAvg with metrics of pseudo-labels: the number of confident examples and their mean confidence."""

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
    both(Reporting(), make_builder(find_objective({"name": "classify"})))


def test_reports_are_summed_over_all_batches() -> None:
    step = make_steps(Reporting(), make_builder(find_objective({"name": "classify"})), sizes=(9,), epochs=3)[0]
    label_sums: list[Tensor] = []

    def loss(step: Step, batch: Batch) -> Any:
        label_sums.append(batch.y.sum())
        return step.forward("model", batch).square().mean(), {"labels": (batch.y.sum(), len(batch.y)), "calls": (2, 1)}

    metrics = fit(step, loss)
    assert metrics["labels"] == Ratio(float(sum(label_sums)), 27)  # 9 examples in 3 epochs
    assert metrics["calls"] == Ratio(18, 9)  # in batches of 4


@pytest.mark.parametrize(
    "report",
    [{"loss": (1, 2)}, {"steps": (1, 2)}, {"share": 0.5}, {"share": (1, 2, 3)}],
    ids=["loss", "steps", "number", "three"],
)
def test_an_invalid_report_is_rejected(report: dict[str, Any]) -> None:
    step = make_steps(FedAvg(), make_builder(find_objective({"name": "classify"})), sizes=(3,))[0]
    with pytest.raises(ValueError, match=r"give a pair \(sum, count\), under a name different"):
        fit(step, lambda step, batch: (step.forward("model", batch).mean(), report))


def test_every_step_draws_new_crops() -> None:
    objective = find_objective({"name": "contrast", "size": 4, "frames": 3})
    step = make_steps(with_objective(FedAvg(), objective), make_builder(objective), sizes=(8,), epochs=4)[0]
    inputs: list[Tensor] = []
    network = step.models["model"]
    forward = network.forward

    def record_input(x: Tensor, lengths: Tensor | None = None) -> Tensor:
        inputs.append(x.clone())
        return forward(x, lengths)

    network.forward = record_input  # type: ignore[method-assign]
    fit(step, lambda step, batch: objective.loss(step, "model", batch))
    assert all(x.shape[1:] == (3, BANDS) for x in inputs)
    assert (
        len({x.numpy().tobytes() for x in inputs}) == len(inputs) == 16
    )  # two crops in each of 2 batches and 4 epochs
