"""ProFiLA's equations against closed forms, private and shared tensors, and resumed runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import known, stop_after
from several_clients import BANDS, CLASSES, make_examples, make_steps
from torch import nn

from raydfl import read_rows, replay
from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.types import ModelSpec, Ratio, State, Update
from raydfl.data.examples import ClientData
from raydfl.engine.config import Config
from raydfl.methods.profila import PROTOTYPE, ProFiLA, add_prototype
from raydfl.methods.profila_as_run import ProFiLAAsRun
from raydfl.models.dense import MeanLinear
from raydfl.objectives.compact import Compact
from raydfl.runs._run import resume
from raydfl.testing import assert_same_bits, read_tensors, train_federation

Tiny = Callable[..., Config]
RNG = np.random.default_rng


def make_method(cls: type[ProFiLA] = ProFiLA, **options: Any) -> Any:
    method = cls(**options)
    object.__setattr__(method, "objective", Compact(size=CLASSES, normal=("usual",)))
    return method


def make_networks() -> dict[str, nn.Module]:
    network = MeanLinear(BANDS, CLASSES)
    add_prototype(network, CLASSES)
    Compact(size=CLASSES).extend(network, ModelSpec("model", "made by the test", BANDS, CLASSES))
    return {"model": network}


# -- equation 5 --------------------------------------------------------------------------------------------------------


def test_the_weight_of_the_alignment_follows_its_schedule() -> None:
    options: dict[str, Any] = {"lam": (1.0, 2.0), "warm_rounds": 4, "total_rounds": 10}
    rising, literal = make_method(**options), make_method(ProFiLAAsRun, **options, schedule="literal")
    for method in (rising, literal):
        assert [method.compute_weight(r) for r in range(4)] == pytest.approx([1.25, 1.5, 1.75, 2.0])  # t = 1 ... 4
    assert rising.compute_weight(6) == pytest.approx(2 * (0.8 + 0.2 * (1 - math.cos(math.pi / 4))))  # t = 7, halfway
    assert literal.compute_weight(6) == pytest.approx(2 * (0.8 + 0.2 * math.cos(math.pi / 4)))
    assert rising.compute_weight(50) == pytest.approx(2.0)
    assert literal.compute_weight(50) == pytest.approx(1.6)
    assert make_method(ProFiLAAsRun, **options, schedule="constant").compute_weight(6) == 2.0
    assert make_method(ProFiLAAsRun, **options, first_round=0).compute_weight(0) == 1.0


# -- the loss ----------------------------------------------------------------------------------------------------------


def compute_loss(method: Any, weight: float, pool: list[int] | None = None) -> tuple[float, torch.Tensor, Any]:
    """Return the loss of a batch, its embeddings and the network. Its own prototype was (1, 0, 0) before."""
    step = make_steps(method, make_networks)[1]
    network: Any = step.models["model"]
    network.own_prototype.copy_(torch.tensor([3.0, 0.0, 0.0]))
    step.state["lambda"] = torch.tensor(weight)
    batch = step.data.train.batch(np.arange(6))
    if pool is not None:
        batch = dataclasses.replace(batch, columns={"pool": torch.tensor(pool)})
    z = F.normalize(network(batch.x), dim=1).detach()
    return float(method.loss(step, batch).detach()), z, network


def normalise(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm()


def test_clips_approach_the_clients_prototype_and_their_mean_the_common_prototype() -> None:
    value, z, network = compute_loss(make_method(memory=0.6), 0.3)
    target = normalise(0.6 * torch.tensor([1.0, 0, 0]) + 0.4 * z.mean(dim=0))
    task = (z - target).square().sum(dim=1).mean()
    alignment = (normalise(z.mean(dim=0)) - normalise(network.prototype)).square().sum()
    assert value == pytest.approx(float(task + 0.3 * alignment), rel=1e-5)
    torch.testing.assert_close(network.own_prototype, 0.9 * torch.tensor([3.0, 0, 0]) + 0.1 * z.mean(dim=0))
    smoothed_loss, z, network = compute_loss(
        make_method(ProFiLAAsRun, anomalous_share=0.0, memory=0.6, align="smoothed"), 0.3
    )
    assert smoothed_loss == pytest.approx(
        float(task + 0.3 * (target - normalise(network.prototype)).square().sum()), rel=1e-5
    )


@pytest.mark.parametrize(
    ("options", "clips", "anomalous", "momentum"),
    [
        ({}, 6, 0, 0.9),
        ({}, 2, 0, 0.9),  # the last batch is short
        ({"cls": ProFiLAAsRun}, 6, 2, 0.9),
        ({"cls": ProFiLAAsRun}, 6, 6, 1.0),  # every clip has weight 0
    ],
)
def test_a_batch_updates_the_clients_prototype_with_momentum(
    options: dict[str, Any], clips: int, anomalous: int, momentum: float
) -> None:
    method = make_method(**options)
    object.__setattr__(method, "objective", Compact(size=CLASSES))  # all clips are normal
    step = make_steps(method, make_networks, sizes=[6])[0]
    step.training = step.training.model_copy(update={"batch_size": 6})
    network: Any = step.models["model"]
    pool = torch.tensor([1] * anomalous + [0] * (clips - anomalous))
    batch = dataclasses.replace(step.data.train.batch(np.arange(clips)), columns={"pool": pool})
    before = normalise(F.normalize(network(step.data.train.batch(np.arange(6)).x), dim=1).detach().mean(dim=0))
    with torch.no_grad():
        method._update_prototype(step, first=True)
        network.output.weight.neg_()
        network.output.bias.add_(1.0)
        z = F.normalize(network(batch.x), dim=1)[pool == 0]
        step.state["lambda"] = torch.tensor(0.0)
        method.loss(step, batch)
    mean = z.mean(dim=0) if len(z) else before
    torch.testing.assert_close(method.get_prototype(network), normalise(momentum * before + (1 - momentum) * mean))


def test_the_alignments_gradient_reaches_the_network() -> None:
    gradients = []
    for weight in (0.0, 1.0):
        method = make_method()
        step = make_steps(method, make_networks)[1]
        step.state["lambda"] = torch.tensor(weight)
        method.loss(step, step.data.train.batch(np.arange(6))).backward()
        gradients.append(step.models["model"].output.weight.grad)
    assert float((gradients[0] - gradients[1]).norm()) > 0.01


def test_anomalous_clips_are_pushed_away_and_contrasted() -> None:
    pool = [0, 1, 0, 1, 0, 1]
    method = make_method(
        ProFiLAAsRun, memory=0.6, push=(0.7, 0.3), margin=(1.9, 1.5), contrast=0.4, contrast_temperature=0.5
    )
    value, z, _ = compute_loss(method, 0.0, pool)
    usual, strange = z[::2], z[1::2]
    target, centre = normalise(0.6 * torch.tensor([1.0, 0, 0]) + 0.4 * usual.mean(dim=0)), normalise(usual.mean(dim=0))
    expected = (usual - target).square().sum(dim=1).mean()
    for weight, margin, centroid in ((0.7, 1.9, target), (0.3, 1.5, centre)):
        expected += weight * (margin - (strange - centroid).norm(dim=1)).clamp_min(0).square().mean()
    contrasts = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        logs = torch.log_softmax((z[i] @ z[others].T) / 0.5, dim=0)
        contrasts.append(-np.mean([float(logs[k]) for k, j in enumerate(others) if pool[j] == pool[i]]))
    assert value == pytest.approx(float(expected) + 0.4 * float(np.mean(contrasts)), rel=1e-4)
    plain = make_method(ProFiLAAsRun, memory=0.6, centre_of="all", push=(0.0, 0.0), contrast=0.0)
    of_all, z, _ = compute_loss(plain, 0.0, pool)
    target = normalise(0.6 * torch.tensor([1.0, 0, 0]) + 0.4 * z.mean(dim=0))
    assert of_all == pytest.approx(float((z - target).square().sum(dim=1).mean()), rel=1e-5)


def test_an_epoch_with_anomalous_clips_ends_with_the_smaller_pool() -> None:
    """Check the code's plan: 1011 normal and 202 anomalous clips in batches of 24 and 8 give 25 batches."""
    step = make_steps(make_method(), make_networks)[0]
    whole = make_examples(1213, 0)
    empty = whole.take(np.zeros(0, np.int64))
    pools = {"normal": whole.take(np.arange(1011)), "anomalous": whole.take(np.arange(1011, 1213))}
    step.data = ClientData(pools, empty, empty)
    step.training = step.training.model_copy(update={"batch_size": 32})
    plan = make_method(ProFiLAAsRun).plan_batches(step)
    assert plan is not None
    assert (dict(plan.rows), plan.steps) == ({"normal": 24, "anomalous": 8}, 25)


# -- equations 4 and 6 -------------------------------------------------------------------------------------------------


def make_update(client: str, value: float, clips: int, auc: float | None) -> Update:
    metric = Ratio(0.0, 0) if auc is None else Ratio(auc, 1)
    tensors = {"model/a": torch.tensor([value]), PROTOTYPE: torch.tensor([1.0, value, 0.0])}
    return Update(tensors, float(clips), {"performance": metric}, "global", client)


STATE = State(0, {"global": {"model/a": torch.zeros(1), PROTOTYPE: torch.tensor([0.0, 0.0, 2.0])}})


def test_clients_are_weighted_by_clips_and_performance_and_the_prototype_moves() -> None:
    updates = [make_update("a", 1.0, 10, 0.9), make_update("b", 2.0, 30, 0.5)]
    method = make_method(ProFiLAAsRun, alpha=0.3, beta=0.7, temperature=2.0)
    state, _ = method.aggregate(STATE, updates, RNG(0))
    grown = np.exp(np.array([0.9, 0.5]) / 2)
    weights = 0.3 * np.array([0.25, 0.75]) + 0.7 * grown / grown.sum()
    mean = float(weights @ [1, 2])
    assert float(state.tensors["global"]["model/a"]) == pytest.approx(mean, rel=1e-6)
    expected = 0.7 * torch.tensor([0, 0, 2.0]) + 0.3 * normalise(torch.tensor([1.0, mean, 0]))
    torch.testing.assert_close(state.tensors["global"][PROTOTYPE], normalise(expected))


def test_unknown_performance_counts_as_the_mean_and_no_performance_gives_fedavg() -> None:
    method = make_method(alpha=0.0, beta=1.0)
    updates = [make_update("a", 1.0, 10, 0.9), make_update("b", 2.0, 30, None), make_update("c", 4.0, 30, 0.5)]
    state, _ = method.aggregate(STATE, updates, RNG(0))
    grown = np.exp([0.9, 0.7, 0.5])
    assert float(state.tensors["global"]["model/a"]) == pytest.approx(float(grown @ [1, 2, 4] / grown.sum()), rel=1e-6)
    unknown = [dataclasses.replace(client_update, metrics={}) for client_update in updates]
    state, _ = method.aggregate(STATE, unknown, RNG(0))
    assert float(state.tensors["global"]["model/a"]) == pytest.approx((10 + 60 + 120) / 70, rel=1e-6)
    still, _ = method.aggregate(STATE, [], RNG(0))
    assert torch.equal(still.tensors["global"][PROTOTYPE], STATE.tensors["global"][PROTOTYPE])


def test_performance_is_averaged_over_the_last_rounds() -> None:
    method, state = make_method(ProFiLAAsRun, alpha=0.0, beta=1.0, history=2), STATE
    for auc in (0.1, 0.5, 0.9):
        state, _ = method.aggregate(state, [make_update("a", 1.0, 1, auc), make_update("b", 2.0, 1, 0.5)], RNG(0))
    assert state.extra["performance"] == {"a": [0.5, 0.9], "b": [0.5, 0.5]}
    grown = np.exp([0.7, 0.5])
    assert float(state.tensors["global"]["model/a"]) == pytest.approx(float(grown @ [1, 2] / grown.sum()), rel=1e-6)


def test_learning_rates_follow_performance() -> None:
    method = make_method(lr_min=0.05, lr_max=0.13)
    step = make_steps(method, make_networks)[0]  # its rate is 0.1
    assert method._adapt_rate(step) is None
    step.state["best"] = torch.tensor(0.8)
    for auc, rate, best in (
        (0.6, 0.12, 0.8),  # below 0.7: raised
        (0.6, 0.13, 0.8),  # at the upper limit
        (0.75, 0.13, 0.8),  # neither poor nor the best
        (0.9, 0.13 * 0.99, 0.9),  # the best so far: lowered
    ):
        step.state["auc"] = torch.tensor(auc)
        assert method._adapt_rate(step) == pytest.approx(rate, rel=1e-6)
        assert float(step.state["best"]) == pytest.approx(best)


# -- runs --------------------------------------------------------------------------------------------------------------

FILM = ("models.model=film_cnn_tiny", "data.transforms=[{name: random_crop, size: 9, test: segments}]")
ADAM = ("train.optimiser={name: adam, lr: 0.0005, keep: true}", "train.local_epochs=2", "train.cohort=3")


@pytest.mark.slow
def test_a_resumed_run_with_kept_moments_has_the_same_bits(tiny: Tiny) -> None:
    settings = [*FILM, *ADAM, "train.rounds=4", "method.history=2"]  # an option of profila_as_run
    reference = known(tiny(*settings, method="profila"))
    names = "\n".join(reference)
    assert all(
        part in names for part in ("moments:model/adapter", "state:rate", "model:model/output", "model/objective")
    )
    half = tiny(*settings, "run.name=half", method="profila")
    stop_after(half, 2)
    assert_same_bits(reference, read_tensors(resume(Path(half.run.dir) / "half").run_dir))


def test_a_run_of_an_earlier_revision_is_not_resumed(tiny: Tiny) -> None:
    """Revision 1 gave short batches a smaller weight in the client's prototype."""
    config = tiny("train.rounds=2", "run.name=former", method="profila")
    stop_after(config, 1)
    folder = Path(config.run.dir) / "former"
    about = json.loads((folder / "run.json").read_text())
    assert about.pop("revision") == 2
    (folder / "run.json").write_text(json.dumps(about))
    message = "began with revision 1 of the equations of method 'profila', .* revision 2. Restart the run under another"
    with pytest.raises(RunDirectoryError, match=message):
        resume(folder)
    with pytest.raises(RunDirectoryError, match=message):
        replay(folder, 1, "a")


def test_private_tensors_change_only_when_their_client_trains(tiny: Tiny) -> None:
    settings = [*FILM, "train.cohort=3"]
    first, second = (
        train_federation(tiny(*settings, f"train.rounds={n}", f"run.name=n{n}", method="profila")) for n in (1, 2)
    )
    rows = read_rows(Path(tiny().run.dir) / "n2").to_pylist()
    cohorts = [{r["client"] for r in rows if r["round"] == n and r["metric"] == "loss" and r["client"]} for n in (1, 2)]
    order = sorted({row["client"] for row in rows if row["client"]} | {f"s{n}" for n in range(6)})
    resting, again = cohorts[0] - cohorts[1], cohorts[0] & cohorts[1]
    assert resting
    assert again
    for client in resting | again:
        adapter = f"client {order.index(client)} model:model/adapter.first.weight"
        assert (first[adapter] == second[adapter]) is (client in resting)
    assert not any("model/adapter" in name for name in second if name.startswith("server"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["method.personal=[model/adaptor]"], "no tensor's name begins with 'model/adaptor'"),
        (["method.personal=[model/prototype]"], "is the common prototype and must be shared. Remove it"),
        (
            ["objective={name: compact, size: 4, by: class}"],
            "has one prototype per client, but objective.by is class. Set objective.by=all",
        ),
        (["method.alpha=0", "method.beta=0"], "both 0, so all clients have weight 0. Raise either"),
        (["method.mode=as_run"], "the pool 'normal'"),
        (["method.mode=as_run", "train.batch_size=1"], "at least 2"),
        (["method.mode=asrun"], "is neither as_run nor normal"),
        (["method.lr_min=0.1"], "above method.lr_max"),
    ],
)
def test_invalid_settings_are_rejected(tiny: Tiny, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_federation(tiny(*FILM, *options, method="profila"))


def test_a_network_with_an_attribute_own_prototype_is_rejected() -> None:
    network = MeanLinear(BANDS, CLASSES)
    network.own_prototype = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="MeanLinear has an attribute 'own_prototype', .* Rename it"):
        add_prototype(network, CLASSES)


def test_the_compact_task_equals_the_loss_of_the_objective() -> None:
    method = make_method(ProFiLAAsRun, task="compact", anomalous_share=0.0, lam=(0.0, 0.0))
    gradients = []
    for loss in (method.loss, lambda step, batch: method.objective.loss(step, "model", batch)):
        step = make_steps(method, make_networks)[1]
        loss(step, step.data.train.batch(np.arange(7))).backward()
        gradients.append([parameter.grad for parameter in step.models["model"].parameters()])
    assert all(torch.equal(gradient, expected) for gradient, expected in zip(*gradients, strict=True))
