"""ProFiLA's equations against closed forms, what stays with whom, and runs that are stopped."""

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


def made(cls: type[ProFiLA] = ProFiLA, **options: Any) -> Any:
    method = cls(**options)
    object.__setattr__(method, "objective", Compact(size=CLASSES, normal=("usual",)))
    return method


def networks() -> dict[str, nn.Module]:
    network = MeanLinear(BANDS, CLASSES)
    add_prototype(network, CLASSES)
    Compact(size=CLASSES).extend(network, ModelSpec("model", "made by the test", BANDS, CLASSES))
    return {"model": network}


# -- equation 5 --------------------------------------------------------------------------------------------------------


def test_the_alignments_weight_over_the_rounds() -> None:
    given: dict[str, Any] = {"lam": (1.0, 2.0), "warm_rounds": 4, "total_rounds": 10}
    rising, literal = made(**given), made(ProFiLAAsRun, **given, schedule="literal")
    for method in (rising, literal):
        assert [method.compute_weight(r) for r in range(4)] == pytest.approx([1.25, 1.5, 1.75, 2.0])  # t = 1 ... 4
    assert rising.compute_weight(6) == pytest.approx(2 * (0.8 + 0.2 * (1 - math.cos(math.pi / 4))))  # t = 7, half-way
    assert literal.compute_weight(6) == pytest.approx(2 * (0.8 + 0.2 * math.cos(math.pi / 4)))
    assert rising.compute_weight(50) == pytest.approx(2.0)
    assert literal.compute_weight(50) == pytest.approx(1.6)
    assert made(ProFiLAAsRun, **given, schedule="constant").compute_weight(6) == 2.0
    assert made(ProFiLAAsRun, **given, first_round=0).compute_weight(0) == 1.0


# -- the loss ----------------------------------------------------------------------------------------------------------


def loss_of(method: Any, weight: float, pool: list[int] | None = None) -> tuple[float, torch.Tensor, Any]:
    """The loss of a batch; what the network makes of it; and the network, whose centre was (1, 0, 0)."""
    step = make_steps(method, networks)[1]
    network: Any = step.models["model"]
    network.own_prototype.copy_(torch.tensor([3.0, 0.0, 0.0]))
    step.state["lambda"] = torch.tensor(weight)
    batch = step.data.train.batch(np.arange(6))
    if pool is not None:
        batch = dataclasses.replace(batch, columns={"pool": torch.tensor(pool)})
    z = F.normalize(network(batch.x), dim=1).detach()
    return float(method.loss(step, batch).detach()), z, network


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm()


def test_clips_are_drawn_to_the_clients_prototype_and_their_mean_to_the_common_one() -> None:
    value, z, network = loss_of(made(memory=0.6), 0.3)
    target = unit(0.6 * torch.tensor([1.0, 0, 0]) + 0.4 * z.mean(dim=0))
    task = (z - target).square().sum(dim=1).mean()
    aligned = (unit(z.mean(dim=0)) - unit(network.prototype)).square().sum()
    assert value == pytest.approx(float(task + 0.3 * aligned), rel=1e-5)
    torch.testing.assert_close(network.own_prototype, 0.9 * torch.tensor([3.0, 0, 0]) + 0.1 * z.mean(dim=0))
    smoothed, z, network = loss_of(made(ProFiLAAsRun, anomalous_share=0.0, memory=0.6, align="smoothed"), 0.3)
    assert smoothed == pytest.approx(float(task + 0.3 * (target - unit(network.prototype)).square().sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "clips", "anomalous", "momentum"),
    [
        ({}, 6, 0, 0.9),
        ({}, 2, 0, 0.9),  # the last batch is short
        ({"cls": ProFiLAAsRun}, 6, 2, 0.9),
        ({"cls": ProFiLAAsRun}, 6, 6, 1.0),  # no clip counts
    ],
)
def test_a_batch_moves_the_clients_prototype_by_1_minus_momentum(
    options: dict[str, Any], clips: int, anomalous: int, momentum: float
) -> None:
    method = made(**options)
    object.__setattr__(method, "objective", Compact(size=CLASSES))  # all clips are normal
    step = make_steps(method, networks, sizes=[6])[0]
    step.training = step.training.model_copy(update={"batch_size": 6})
    network: Any = step.models["model"]
    pool = torch.tensor([1] * anomalous + [0] * (clips - anomalous))
    batch = dataclasses.replace(step.data.train.batch(np.arange(clips)), columns={"pool": pool})
    before = unit(F.normalize(network(step.data.train.batch(np.arange(6)).x), dim=1).detach().mean(dim=0))
    with torch.no_grad():
        method._update_prototype(step, first=True)
        network.output.weight.neg_()
        network.output.bias.add_(1.0)
        z = F.normalize(network(batch.x), dim=1)[pool == 0]
        step.state["lambda"] = torch.tensor(0.0)
        method.loss(step, batch)
    mean = z.mean(dim=0) if len(z) else before
    torch.testing.assert_close(method.get_prototype(network), unit(momentum * before + (1 - momentum) * mean))


def test_the_alignments_gradient_reaches_the_network() -> None:
    found = []
    for weight in (0.0, 1.0):
        method = made()
        step = make_steps(method, networks)[1]
        step.state["lambda"] = torch.tensor(weight)
        method.loss(step, step.data.train.batch(np.arange(6))).backward()
        found.append(step.models["model"].output.weight.grad)
    assert float((found[0] - found[1]).norm()) > 0.01


def test_anomalous_clips_are_pushed_away_and_told_apart() -> None:
    pool = [0, 1, 0, 1, 0, 1]
    method = made(ProFiLAAsRun, memory=0.6, push=(0.7, 0.3), margin=(1.9, 1.5), contrast=0.4, contrast_temperature=0.5)
    value, z, _ = loss_of(method, 0.0, pool)
    usual, strange = z[::2], z[1::2]
    target, centre = unit(0.6 * torch.tensor([1.0, 0, 0]) + 0.4 * usual.mean(dim=0)), unit(usual.mean(dim=0))
    expected = (usual - target).square().sum(dim=1).mean()
    for weight, margin, place in ((0.7, 1.9, target), (0.3, 1.5, centre)):
        expected += weight * (margin - (strange - place).norm(dim=1)).clamp_min(0).square().mean()
    contrasts = []
    for i in range(6):
        among = [j for j in range(6) if j != i]
        logs = torch.log_softmax((z[i] @ z[among].T) / 0.5, dim=0)
        contrasts.append(-np.mean([float(logs[k]) for k, j in enumerate(among) if pool[j] == pool[i]]))
    assert value == pytest.approx(float(expected) + 0.4 * float(np.mean(contrasts)), rel=1e-4)
    plain = made(ProFiLAAsRun, memory=0.6, centre_of="all", push=(0.0, 0.0), contrast=0.0)
    of_all, z, _ = loss_of(plain, 0.0, pool)
    target = unit(0.6 * torch.tensor([1.0, 0, 0]) + 0.4 * z.mean(dim=0))
    assert of_all == pytest.approx(float((z - target).square().sum(dim=1).mean()), rel=1e-5)


def test_an_epoch_with_anomalous_clips_ends_where_either_pool_would() -> None:
    """The code's: 1011 normal and 202 anomalous clips in batches of 24 and 8 are 25 batches."""
    step = make_steps(made(), networks)[0]
    whole = make_examples(1213, 0)
    empty = whole.take(np.zeros(0, np.int64))
    pools = {"normal": whole.take(np.arange(1011)), "anomalous": whole.take(np.arange(1011, 1213))}
    step.data = ClientData(pools, empty, empty)
    step.training = step.training.model_copy(update={"batch_size": 32})
    plan = made(ProFiLAAsRun).plan_batches(step)
    assert plan is not None
    assert (dict(plan.rows), plan.steps) == ({"normal": 24, "anomalous": 8}, 25)


# -- equations 4 and 6 -------------------------------------------------------------------------------------------------


def update(client: str, value: float, clips: int, auc: float | None) -> Update:
    measured = Ratio(0.0, 0) if auc is None else Ratio(auc, 1)
    tensors = {"model/a": torch.tensor([value]), PROTOTYPE: torch.tensor([1.0, value, 0.0])}
    return Update(tensors, float(clips), {"performance": measured}, "global", client)


STATE = State(0, {"global": {"model/a": torch.zeros(1), PROTOTYPE: torch.tensor([0.0, 0.0, 2.0])}})


def test_clients_count_by_clips_and_performance_and_the_prototype_moves() -> None:
    updates = [update("a", 1.0, 10, 0.9), update("b", 2.0, 30, 0.5)]
    method = made(ProFiLAAsRun, alpha=0.3, beta=0.7, temperature=2.0)
    state, _ = method.aggregate(STATE, updates, RNG(0))
    grown = np.exp(np.array([0.9, 0.5]) / 2)
    weights = 0.3 * np.array([0.25, 0.75]) + 0.7 * grown / grown.sum()
    mean = float(weights @ [1, 2])
    assert float(state.tensors["global"]["model/a"]) == pytest.approx(mean, rel=1e-6)
    moved = 0.7 * torch.tensor([0, 0, 2.0]) + 0.3 * unit(torch.tensor([1.0, mean, 0]))
    torch.testing.assert_close(state.tensors["global"][PROTOTYPE], unit(moved))


def test_a_client_whose_performance_is_unknown_counts_as_the_mean_and_without_any_it_is_fedavg() -> None:
    method = made(alpha=0.0, beta=1.0)
    given = [update("a", 1.0, 10, 0.9), update("b", 2.0, 30, None), update("c", 4.0, 30, 0.5)]
    state, _ = method.aggregate(STATE, given, RNG(0))
    grown = np.exp([0.9, 0.7, 0.5])
    assert float(state.tensors["global"]["model/a"]) == pytest.approx(float(grown @ [1, 2, 4] / grown.sum()), rel=1e-6)
    unknown = [dataclasses.replace(each, metrics={}) for each in given]
    state, _ = method.aggregate(STATE, unknown, RNG(0))
    assert float(state.tensors["global"]["model/a"]) == pytest.approx((10 + 60 + 120) / 70, rel=1e-6)
    still, _ = method.aggregate(STATE, [], RNG(0))
    assert torch.equal(still.tensors["global"][PROTOTYPE], STATE.tensors["global"][PROTOTYPE])


def test_performance_is_the_mean_of_the_last_rounds() -> None:
    method, state = made(ProFiLAAsRun, alpha=0.0, beta=1.0, history=2), STATE
    for auc in (0.1, 0.5, 0.9):
        state, _ = method.aggregate(state, [update("a", 1.0, 1, auc), update("b", 2.0, 1, 0.5)], RNG(0))
    assert state.extra["performance"] == {"a": [0.5, 0.9], "b": [0.5, 0.5]}
    grown = np.exp([0.7, 0.5])
    assert float(state.tensors["global"]["model/a"]) == pytest.approx(float(grown @ [1, 2] / grown.sum()), rel=1e-6)


def test_learning_rates_follow_performance() -> None:
    method = made(lr_min=0.05, lr_max=0.13)
    step = make_steps(method, networks)[0]  # its rate is 0.1
    assert method._adapt_rate(step) is None
    step.state["best"] = torch.tensor(0.8)
    for auc, rate, best in (
        (0.6, 0.12, 0.8),  # below 0.7: raised
        (0.6, 0.13, 0.8),  # and no further
        (0.75, 0.13, 0.8),  # neither poor nor the best
        (0.9, 0.13 * 0.99, 0.9),  # the best so far: lowered
    ):
        step.state["auc"] = torch.tensor(auc)
        assert method._adapt_rate(step) == pytest.approx(rate, rel=1e-6)
        assert float(step.state["best"]) == pytest.approx(best)


# -- runs --------------------------------------------------------------------------------------------------------------

FILM = ("models.model=film_cnn_tiny", "data.transforms=[{name: random_crop, size: 9, test: segments}]")
ADAM = ("train.optimiser={name: adam, lr: 0.0005, keep: true}", "train.local_epochs=2", "train.cohort=3")


def test_a_stopped_run_goes_on_to_the_same_bits_with_kept_moments(tiny: Tiny) -> None:
    settings = [*FILM, *ADAM, "train.rounds=4", "method.history=2"]  # of profila_as_run
    reference = known(tiny(*settings, method="profila"))
    names = "\n".join(reference)
    assert all(
        part in names for part in ("moments:model/adapter", "state:rate", "model:model/output", "model/objective")
    )
    half = tiny(*settings, "run.name=half", method="profila")
    stop_after(half, 2)
    assert_same_bits(reference, read_tensors(resume(Path(half.run.dir) / "half").run_dir))


def test_a_run_that_began_with_other_equations_is_not_continued(tiny: Tiny) -> None:
    """In the first revision, a client's prototype followed short batches by less."""
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


def test_a_clients_private_tensors_do_not_move_while_others_train(tiny: Tiny) -> None:
    given = [*FILM, "train.cohort=3"]
    one, two = (train_federation(tiny(*given, f"train.rounds={n}", f"run.name=n{n}", method="profila")) for n in (1, 2))
    rows = read_rows(Path(tiny().run.dir) / "n2").to_pylist()
    trained = [{r["client"] for r in rows if r["round"] == n and r["metric"] == "loss" and r["client"]} for n in (1, 2)]
    order = sorted({row["client"] for row in rows if row["client"]} | {f"s{n}" for n in range(6)})
    resting, again = trained[0] - trained[1], trained[0] & trained[1]
    assert resting
    assert again
    for client in resting | again:
        adapter = f"client {order.index(client)} model:model/adapter.first.weight"
        assert (one[adapter] == two[adapter]) is (client in resting)
    assert not any("model/adapter" in name for name in two if name.startswith("server"))


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
def test_what_cannot_be_is_refused(tiny: Tiny, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_federation(tiny(*FILM, *options, method="profila"))


def test_a_network_with_a_prototype_of_its_own_is_refused() -> None:
    network = MeanLinear(BANDS, CLASSES)
    network.own_prototype = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="MeanLinear has an attribute 'own_prototype', .* Rename it"):
        add_prototype(network, CLASSES)


def test_drawing_clips_to_the_batchs_mean_is_the_objectives_own_loss_to_the_bit() -> None:
    method = made(ProFiLAAsRun, task="compact", anomalous_share=0.0, lam=(0.0, 0.0))
    found = []
    for loss in (method.loss, lambda step, batch: method.objective.loss(step, "model", batch)):
        step = make_steps(method, networks)[1]
        loss(step, step.data.train.batch(np.arange(7))).backward()
        found.append([parameter.grad for parameter in step.models["model"].parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
