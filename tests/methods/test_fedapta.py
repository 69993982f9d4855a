"""FedAPTA against its equations in float64, and its parts separately."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_mathematics import Data, OneClient
from torch import nn

from raydfl import Config
from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, Client, ModelSpec, State, Task, Update
from raydfl.engine.groups import add_groups, find_group_rule
from raydfl.engine.groups._membership import Membership
from raydfl.methods._pruning import find_prunable_layers, make_masks
from raydfl.methods.fedapta import FedAPTA
from raydfl.models import build_model
from raydfl.testing import make_batch, start_server
from raydfl.training.settings import OptimiserSettings, TrainSettings
from raydfl.training.step import Step

Tiny = Callable[..., Config]
Arrays = dict[str, NDArray[np.float64]]
BANDS, HIDDEN, CLASSES, RATE, DECAY, SIZE = 4, 5, 3, 0.2, 0.01, 6
SIZES = [8, 12, 10, 6, 14, 9]
RATIOS = [0.0, 0.2, 0.4, 0.6, 0.8, 0.4]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelSpec("model", "mlp", BANDS, CLASSES, (("hidden", HIDDEN),)))


def list_batches(number: int) -> list[Batch]:
    """Return a client's batches. Even and odd clients share the inputs but not the labels, so the true groups are known."""
    rng = np.random.default_rng(number)
    result = []
    for _ in range(2):
        y = rng.integers(2, size=SIZE)
        x = 0.3 * rng.normal(size=(SIZE, 2, BANDS)) + np.where(y[:, None, None] == 1, 1, -1) * [1, 0.5, -0.5, 1]
        result.append(make_batch(torch.tensor(x, dtype=torch.float32), torch.tensor(y + number % 2)))
    return result


CLIENTS = [
    Client(f"c{i}", i, n, profile={"ratio": r, "kind": "ab"[i % 2]})
    for i, (n, r) in enumerate(zip(SIZES, RATIOS, strict=True))
]


def make_step(method: FedAPTA, task: Task, state: State, kept: dict[str, torch.Tensor], decay: float = DECAY) -> Step:
    client = next(c for c in CLIENTS if c.id == task.client_id)
    step = Step(
        client=client,
        models={"model": make_network()},
        received={key: {n: t.clone() for n, t in state.tensors[key].items()} for key in task.receive},
        data=OneClient(Data(list_batches(client.index))),  # type: ignore[arg-type]
        state=kept,
        rng=np.random.default_rng(0),
        device=torch.device("cpu"),
        training=TrainSettings(
            local_epochs=1, batch_size=SIZE, optimiser=OptimiserSettings(lr=RATE, weight_decay=decay)
        ),
        phase="train",
        round_index=state.round_index,
        options=task.options,
        shared=method.shared,
    )
    step.load(task.receive[0])
    return step


def train_round(
    method: FedAPTA, state: State, kept: list[dict[str, torch.Tensor]]
) -> tuple[State, list[Update], dict[str, Any]]:
    tasks = method.plan(state, CLIENTS, np.random.default_rng(0), len(CLIENTS))
    updates = [method.local(make_step(method, task, state, kept[i])) for i, task in enumerate(tasks)]
    new, report = method.aggregate(state, iter(updates), np.random.default_rng(0))
    return dataclasses.replace(new, round_index=state.round_index + 1), updates, dict(report)


def compute_client_round(
    w: Arrays, i: int, h: Arrays, g_i: Arrays, g: Arrays, ratio: float, drift: str
) -> tuple[Arrays, Arrays, float]:
    """Compute client i's parameters after its round, its mask and its mean loss in float64."""
    norms = np.abs(w["hidden.weight"]).sum(axis=1)
    drop = np.argsort(norms, kind="stable")[: min(HIDDEN - 1, math.floor(ratio * HIDDEN + 0.5))]
    unit = np.ones(HIDDEN)
    unit[drop] = 0
    mask = {"hidden.weight": unit[:, None], "hidden.bias": unit}
    scale = np.mean(SIZES) / SIZES[i]
    parameters, losses = {name: value.copy() for name, value in w.items()}, []
    for batch in list_batches(i):
        x, y = batch.x.double().numpy().mean(axis=1), batch.y.numpy()
        m = {name: parameters[name] * mask.get(name, 1.0) for name in parameters}
        before = x @ m["hidden.weight"].T + m["hidden.bias"]
        hidden = np.maximum(before, 0)
        logits = hidden @ m["output.weight"].T + m["output.bias"]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        losses.append(-np.log(p[np.arange(len(y)), y]).mean())
        p[np.arange(len(y)), y] -= 1
        p /= len(y)
        back = (p @ m["output.weight"]) * (before > 0)
        gradient = {
            "output.weight": p.T @ hidden,
            "output.bias": p.sum(axis=0),
            "hidden.weight": back.T @ x,
            "hidden.bias": back.sum(axis=0),
        }
        for name, full in gradient.items():
            total = full
            if drift == "full":
                kept_units = mask.get(name, 1.0)
                losses[-1] += 0.05 * scale * (kept_units * (parameters[name] - w[name] + h[name]) ** 2).sum()
                losses[-1] += (kept_units * (parameters[name] - w[name]) * (scale * g[name] - g_i[name])).sum()
                total = total + 0.1 * scale * (parameters[name] - (w[name] - h[name])) + scale * g[name] - g_i[name]
            parameters[name] -= RATE * (total * mask.get(name, 1.0) + DECAY * parameters[name])
    recover_pruned = {n: parameters[n] * mask.get(n, 1.0) + w[n] * (1 - mask.get(n, 1.0)) for n in parameters}
    return recover_pruned, mask, float(np.mean(losses))


DISCOVERED = {"name": "hdbscan", "min_cluster_size": 3, "min_samples": 1}
KNOWN = {"name": "known", "by": "kind"}


@pytest.mark.parametrize(("drift", "tasks"), [("full", DISCOVERED), ("server", KNOWN), ("off", KNOWN)])
def test_two_rounds_with_two_clusters_follow_the_equations(drift: Any, tasks: dict[str, Any]) -> None:
    method = FedAPTA(
        ratio_from="ratio",
        prune=("linear",),
        drift=drift,
    )
    rule = find_group_rule(tasks)
    assert rule is not None
    method = add_groups(method, rule)
    state = method.init(CLIENTS, [{"model": make_network()}], np.random.default_rng(0))
    first = {
        n.removeprefix("model/"): t.double().numpy()
        for n, t in state.tensors["global"].items()
        if n.startswith("model/")
    }
    zero = {name: np.zeros_like(value) for name, value in first.items()}
    models, controls = [first] * 2, [zero] * 2  # the groups of even and odd clients
    h, g_i = [dict(zero) for _ in CLIENTS], [dict(zero) for _ in CLIENTS]
    drifts: list[dict[str, torch.Tensor]] = [{} for _ in CLIENTS]
    for round_index in range(2):
        state, updates, report = train_round(method, state, drifts)
        keys = Membership.from_state(state).keys[:2]
        assert Membership.from_state(state).keys == keys * 3
        assert report["tasks/groups"].value == 2
        new, new_controls = [], []
        for group in range(2):
            members = [i for i in range(len(CLIENTS)) if i % 2 == group]
            w, g = models[group], controls[group]
            models_by_client = {}
            moves: list[Arrays] = []
            for i in members:
                parameters, mask, loss = compute_client_round(w, i, h[i], g_i[i], g, RATIOS[i], drift)
                models_by_client[i] = parameters
                assert updates[i].metrics["loss"].value == pytest.approx(loss, rel=1e-4)  # type: ignore[union-attr]
                sent_mask = updates[i].tensors["mask/model/hidden"].numpy()
                np.testing.assert_array_equal(sent_mask, mask["hidden.bias"])
                scale = np.mean(SIZES) / SIZES[i]
                change = {
                    n: -scale * g[n] - (parameters[n] - w[n]) / (RATE * math.ceil(np.mean(SIZES) / SIZE))
                    for n in parameters
                }
                h[i] = {n: h[i][n] + value - w[n] for n, value in parameters.items()}
                g_i[i] = {n: g_i[i][n] + change[n] for n in parameters}
                moves.append({n: change[n] / scale for n in parameters})
            n_all = sum(SIZES[i] for i in members)
            mean = {n: sum(SIZES[i] * models_by_client[i][n] for i in members) / n_all for n in w}
            if drift != "off":
                mean = {n: mean[n] + sum(h[i][n] for i in members) / len(members) for n in w}
            new.append(mean)
            new_controls.append({n: g[n] + sum(move[n] for move in moves) / len(members) for n in w})
        models, controls = new, new_controls
        for group, key in enumerate(keys):
            for name, value in models[group].items():
                np.testing.assert_allclose(
                    state.tensors[key][f"model/{name}"].numpy(),
                    value,
                    atol=2e-5,
                    rtol=1e-4,
                    err_msg=f"{round_index} {name}",
                )
                if drift == "full":
                    np.testing.assert_allclose(
                        state.tensors[key][f"control/model/{name}"].numpy(), controls[group][name], atol=2e-5, rtol=1e-4
                    )
        assert not [name for entry in state.tensors.values() for name in entry if name.startswith(("drift/", "mask/"))]
    for i, private in enumerate(drifts):  # only the drift is kept
        assert {name.partition("/")[0] for name in private} == {
            "full": {"drift", "control"},
            "server": {"drift"},
            "off": set(),
        }[drift]
        for name in h[i] if drift != "off" else ():
            np.testing.assert_allclose(private[f"drift/model/{name}"].numpy(), h[i][name], atol=2e-5, rtol=1e-4)


def test_pruned_filters_keep_the_received_values_despite_weight_decay() -> None:
    method = FedAPTA(ratio=0.6, prune=("linear",), drift="off")
    state = method.init(CLIENTS, [{"model": make_network()}], np.random.default_rng(0))
    task = method.plan(state, CLIENTS, np.random.default_rng(0), len(CLIENTS))[2]
    update = method.local(make_step(method, task, state, {}, decay=0.5))
    pruned = update.tensors["mask/model/hidden"] == 0
    assert int(pruned.sum()) == 3
    assert not update.tensors["model/hidden.weight"][pruned].any()
    assert not update.tensors["model/hidden.bias"][pruned].any()
    new, _ = method.aggregate(state, iter([update]), np.random.default_rng(0))
    before, after = state.tensors["global"]["model/hidden.weight"], new.tensors["global"]["model/hidden.weight"]
    assert torch.equal(after[pruned], before[pruned])
    assert not torch.isclose(after[~pruned], before[~pruned]).any()


def test_a_ratio_of_all_weights_prunes_more_units() -> None:
    """The network has 43 weights, including 5 prunable units with 4 weights."""
    pruned: dict[tuple[str, float], int] = {}
    for ratio_of, ratio in (("prunable", 0.2), ("all", 0.2), ("prunable", 0.43), ("all", 0.1), ("all", 0.3)):
        method = FedAPTA(ratio=ratio, ratio_of=ratio_of, prune=("linear",), drift="off")  # type: ignore[arg-type]
        state = method.init(CLIENTS, [{"model": make_network()}], np.random.default_rng(0))
        task = method.plan(state, CLIENTS, np.random.default_rng(0), len(CLIENTS))[0]
        mask = method.local(make_step(method, task, state, {})).tensors["mask/model/hidden"]
        pruned[ratio_of, ratio] = int((mask == 0).sum())
    assert pruned == {
        ("prunable", 0.2): 1,  # 0.2 * 5 units
        ("all", 0.2): 2,  # 0.2 * 43 weights / 4 = 2.15 units
        ("prunable", 0.43): 2,
        ("all", 0.1): 1,  # 1.075 units
        ("all", 0.3): 3,  # 3.225 units
    }


def test_a_ratio_above_the_prunable_weights_is_rejected() -> None:
    method = FedAPTA(ratio_from="ratio", ratio_of="all", prune=("linear",), drift="off")
    with pytest.raises(ConfigError, match=r"ratio is 0.8, but the layers of method.prune=\['linear'\] have only 47%"):
        method.init(CLIENTS, [{"model": make_network()}], np.random.default_rng(0))


def test_without_recovery_a_filter_is_the_mean_over_its_holders() -> None:
    method = FedAPTA(ratio_from="ratio", prune=("linear",), drift="off", recover=False)
    state = method.init(CLIENTS, [{"model": make_network()}], np.random.default_rng(0))
    state, updates, _ = train_round(method, state, [{} for _ in CLIENTS])
    for unit in range(HIDDEN):
        holders = [i for i, u in enumerate(updates) if u.tensors["mask/model/hidden"][unit] == 1]
        assert 0 < len(holders) < len(CLIENTS) or unit in torch.nonzero(updates[4].tensors["mask/model/hidden"])
        expected = sum(SIZES[i] * updates[i].tensors["model/hidden.weight"][unit] for i in holders) / sum(
            SIZES[i] for i in holders
        )
        torch.testing.assert_close(state.tensors["global"]["model/hidden.weight"][unit], expected)


def test_the_ratio_comes_from_the_profile_and_masks_from_the_received_model(tiny: Tiny) -> None:
    config = tiny(
        "data.profile={share: {values: [0.0, 0.5]}}",
        "method.ratio_from=share",
        "method.drift=off",
        "train.groups=none",
        "train.cohort=1.0",
        method="fedapta",
    )
    server = start_server(config)
    federation = server._federation
    for _ in range(2):
        orders = federation.plan()
        received = federation.state.tensors["global"]
        network_ = build_model(ModelSpec("model", "crnn_tiny", 16, 3, (("filters", (4,)), ("hidden", 8))))
        layers = find_prunable_layers({"model": network_}, (), ("convolution", "recurrent"))
        expected = make_masks(layers, received, 0.5)
        for order, result in zip(orders, federation._send(orders), strict=True):
            assert result.update is not None
            for name, mask in expected.items():
                client_mask = result.update.tensors[f"mask/{name}"]
                odd = int(order.task.client_id[1:]) % 2
                assert torch.equal(client_mask, mask if odd else torch.ones_like(mask))
        server.round()
    server.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.ratio=1.0"], "method.ratio"),
        (["method.ratio=-0.1"], "method.ratio"),
        (["method.ratio_from=share"], "method.ratio_from: the profile of client 's0' has None under 'share'"),
        (
            ["method.ratio_from=share", "data.profile={share: {values: [0.2, 1.0]}}"],
            "has 1.0 under 'share'. It must be the fraction of weights to prune, from 0 to below 1",
        ),
        (["models.model=linear"], "but the network .Linear, MeanLinear. has no such layer to prune"),
        (["train.optimiser.name=adam"], "needs train.optimiser.name=sgd"),
    ],
)
def test_unprunable_layers_are_rejected(tiny: Tiny, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start_server(tiny(*overrides, method="fedapta"))
