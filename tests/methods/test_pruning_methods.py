"""FedLPS, FedMP and Hermes: their masks, bandit and averages against computations by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from test_mathematics import Data, OneClient
from torch import nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import Client, ModelSpec, Ratio, State, Task, Update
from raydfl.methods._method import Method
from raydfl.methods.fedapta import FedAPTA
from raydfl.methods.fedlps import FedLPS
from raydfl.methods.fedmp import FedMP
from raydfl.methods.hermes import Hermes
from raydfl.models import build_model
from raydfl.testing import make_batch
from raydfl.training.settings import OptimiserSettings, TrainSettings
from raydfl.training.step import Step

CLIENTS = [Client(f"c{i}", i, 10 + i, profile={"speed": 1 + i}) for i in range(3)]
RNG = np.random.default_rng(0)


def make_network(architecture: str = "mlp", inputs: int | tuple[int, int, int] = 4, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelSpec("model", architecture, inputs, 3, tuple(sorted(options.items()))))


def make_step(
    method: Method, state: State, kept: dict[str, torch.Tensor], client: int, task: Task | None = None
) -> Step:
    rng = np.random.default_rng(client)
    batch = make_batch(torch.tensor(rng.normal(size=(6, 2, 4))).float(), torch.tensor(rng.integers(3, size=6)))
    step = Step(
        client=CLIENTS[client],
        models={"model": make_network(hidden=10)},
        received={"global": {n: t.clone() for n, t in state.tensors["global"].items()}},
        data=OneClient(Data([batch])),  # type: ignore[arg-type]
        state=kept,
        rng=np.random.default_rng(0),
        device=torch.device("cpu"),
        training=TrainSettings(local_epochs=1, batch_size=6, optimiser=OptimiserSettings(lr=0.5)),
        phase="train",
        round_index=state.round_index,
        options={} if task is None else task.options,
        shared=method.shared,
    )
    step.load("global")
    return step


def test_fedlps_masks_inputs_filters_scales_and_heads() -> None:
    cnn = make_network("cnn", (2, 8, 8), filters=(4, 6), kernel=3, hidden=8)
    masks = FedLPS()._masks({"model": cnn}, frozenset(), 0.5)
    first, second = (layer.weight.detach().double().numpy() for layer in cnn.convolutions)
    rows = np.abs(first).sum(axis=(1, 2, 3))
    assert masks["model/convolutions.0.weight"].flatten(1)[:, 0].tolist() == (rows > np.sort(rows)[1]).tolist()
    assert masks["model/convolutions.0.weight"].shape == (4, 2, 1, 1)  # the first layer prunes only filters
    assert torch.equal(masks["model/convolutions.0.bias"], masks["model/convolutions.0.weight"][:, 0, 0, 0])
    columns = np.abs(second).sum(axis=(0, 2, 3))
    inputs = columns > np.sort(columns)[1]
    rows = np.abs(second * inputs[:, None, None]).sum(axis=(1, 2, 3))
    np.testing.assert_array_equal(
        masks["model/convolutions.1.weight"][..., 0, 0].numpy(), np.outer(rows > np.sort(rows)[2], inputs)
    )
    weight = cnn.output.weight.detach().double().numpy()
    length = np.sqrt((weight * weight).sum(axis=0))
    assert masks["model/output.weight"][0].tolist() == (length > np.sort(length)[3]).tolist()
    split = make_network("split_cnn", 8, filters=(4,), groups=2)
    with torch.no_grad():
        split.blocks[0].mix_norm.weight.copy_(torch.tensor([0.5, -2.0, 1.0, 0.1]))
    assert FedLPS()._masks({"model": split}, frozenset(), 0.5)["model/blocks.0.mix_norm.weight"].tolist() == [
        0,
        1,
        1,
        0,
    ]
    assert set(FedLPS(inputs=False, norms=False)._masks({"model": cnn}, frozenset(), 0.5)) == {
        f"model/convolutions.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")
    }


def test_fedlps_prunes_after_the_first_training_and_returns_pruned_entries_unchanged() -> None:
    method = FedLPS()
    state = method.init(CLIENTS, [{"model": make_network(hidden=10)}], RNG)
    state_of_client: dict[str, torch.Tensor] = {}
    first = method.local(make_step(method, state, state_of_client, 0))
    assert (first.tensors["model/output.weight"] != state.tensors["global"]["model/output.weight"]).all()
    mask = state_of_client["mask/model/output.weight"]
    norms = torch.linalg.vector_norm(first.tensors["model/output.weight"].double(), dim=0)
    assert torch.equal(mask[0] == 1, norms > norms.sort().values[4])
    second = method.local(make_step(method, state, state_of_client, 0)).tensors["model/output.weight"]
    before = state.tensors["global"]["model/output.weight"]
    assert torch.equal(second[:, mask[0] == 0], before[:, mask[0] == 0])
    assert (second[:, mask[0] == 1] != before[:, mask[0] == 1]).any()
    assert torch.equal(state_of_client["mask/model/output.weight"], mask)  # masks never change again
    with pytest.raises(ConfigError, match="nothing to prune in a network of Flatten"):
        method.init(CLIENTS, [{"model": nn.Sequential(nn.Flatten())}], RNG)


class Rated(Hermes):
    """Hermes with accuracies set by the test."""

    def _accuracy(self, step: Step) -> float:
        return 0.9 if step.client.index != 1 else 0.1


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (FedAPTA(ratio=0.4, prune=("linear",), drift="off"), 63),  # 83 minus 4 units of 4 weights and a bias
        (FedAPTA(ratio=0.0, drift="off"), 83),
        (FedMP(ratios=(0.4,), prune=("linear",)), 63),
        (FedMP(ratios=(0.0,)), 83),
        (Rated(step=0.4, prune=("linear",)), 63),
        (Rated(target=0.0), 83),
        (FedLPS(ratio=0.5), 48),  # minus 2 inputs of 10 units, and 5 inputs of 3 classes
        (FedLPS(ratio=0.0), 83),
    ],
)
def test_clients_report_the_kept_weights(method: Method, kept: int) -> None:
    """The network has 4 inputs, 10 units and 3 classes: 50 + 33 weights and biases."""
    state = method.init(CLIENTS, [{"model": make_network(hidden=10)}], RNG)
    task = method.plan(state, CLIENTS, RNG, 3)[0]
    update = method.local(make_step(method, state, {}, 0, task))
    assert update.metrics["kept_weights"] == Ratio(kept, 1)


def test_fedmps_bandit_follows_its_formula_and_the_residual_is_restored() -> None:
    method = FedMP(ratios=(0.0, 0.5), prune=("linear",), speed_from="speed", discount=0.5, exploration=0.3)
    state = method.init(CLIENTS, [{"model": make_network(hidden=10)}], RNG)
    losses, expected, by_client = [], 0.0, {c.id: {} for c in CLIENTS}
    for round_index in range(5):
        tasks = method.plan(state, CLIENTS, RNG, 3)
        chosen = [float(task.options["ratio"]) for task in tasks]
        for client, ratio in zip(CLIENTS, chosen, strict=True):
            counts = by_client[client.id]
            tries = sum(n for n, _ in counts.values())
            bounds = {
                arm: counts[arm][1] / counts[arm][0] + 0.3 * math.sqrt(math.log(max(tries, 1)) / counts[arm][0])
                if arm in counts
                else math.inf
                for arm in (0.0, 0.5)
            }
            assert ratio == max(bounds, key=lambda arm: bounds[arm])
        updates = [method.local(make_step(method, state, {}, i, task)) for i, task in enumerate(tasks)]
        before = state.tensors["global"]["model/hidden.weight"]
        state, report = method.aggregate(state, iter(updates), RNG)
        state = dataclasses.replace(state, round_index=round_index + 1)
        assert report["fedmp/ratio"] == Ratio(sum(chosen), 3)
        whole = [
            torch.where(u.tensors["mask/model/hidden"][:, None] == 1, u.tensors["model/hidden.weight"], before)
            for u in updates
        ]
        mean = sum(c.num_examples * w for c, w in zip(CLIENTS, whole, strict=True)) / 33
        torch.testing.assert_close(state.tensors["global"]["model/hidden.weight"], mean)
        losses.append(sum(u.metrics["loss"].value * c.num_examples for u, c in zip(updates, CLIENTS, strict=True)) / 33)  # type: ignore[union-attr]
        if round_index == 0:
            continue  # The first round has no earlier loss, so no client gets a reward.
        times = [c.num_examples * (1 - r) / (1 + c.index) for c, r in zip(CLIENTS, chosen, strict=True)]
        for client, ratio, time in zip(CLIENTS, chosen, times, strict=True):
            counts = {arm: (0.5 * n, 0.5 * total) for arm, (n, total) in by_client[client.id].items()}
            expected = (losses[-2] - losses[-1]) / (1 + abs(time - np.mean(times)) / np.mean(times))
            number, total = counts.get(ratio, (0.0, 0.0))
            by_client[client.id] = {**counts, ratio: (number + 1, total + expected)}
            arm_statistics = state.extra["bandit"][client.id][str(method.ratios.index(ratio))]
            assert arm_statistics == pytest.approx([number + 1, total + expected])
    with pytest.raises(ConfigError, match="the profile of client 'c0' has None under 'power'"):
        FedMP(prune=("linear",), speed_from="power").init(CLIENTS, [{"model": make_network()}], RNG)


def test_hermes_averages_commonly_kept_units_and_keeps_the_rest_private() -> None:
    method = Rated(prune=("linear",), step=0.4, target=0.5)
    state = method.init(CLIENTS, [{"model": make_network(hidden=10)}], RNG)
    private_states: list[dict[str, torch.Tensor]] = [{} for _ in CLIENTS]

    def round_of(chosen: list[int]) -> list[Update]:
        nonlocal state
        updates = [method.local(make_step(method, state, private_states[i], i)) for i in chosen]
        new, _ = method.aggregate(state, iter(updates), RNG)
        state = dataclasses.replace(new, round_index=state.round_index + 1)
        return updates

    name, layer = "model/hidden.weight", "model/hidden"
    first = state.tensors["global"][name]
    updates = round_of([0, 1])
    masks = [u.tensors[f"mask/{layer}"] for u in updates]
    assert [int((mask == 0).sum()) for mask in masks] == [4, 0]  # client 1 is too inaccurate to prune
    common = masks[0] * masks[1] == 1
    mean = (10 * updates[0].tensors[name] + 11 * updates[1].tensors[name]) / 21
    after = state.tensors["global"]
    torch.testing.assert_close(after[name][common], mean[common])
    assert torch.equal(after[name][~common], first[~common])
    torch.testing.assert_close(
        after["model/output.weight"],
        (10 * updates[0].tensors["model/output.weight"] + 11 * updates[1].tensors["model/output.weight"]) / 21,
    )
    assert after[f"round/{layer}"].tolist() == common.float().tolist()
    # Client 1 alone, then client 0 again: it receives the average since its last round, without its pruned units.
    own_of_1 = updates[1].tensors[name]
    step = make_step(method, state, private_states[1], 1)
    method._load_personal(step, _find_layers(method, step))
    torch.testing.assert_close(step.parameters()[name].detach(), torch.where(common[:, None], after[name], own_of_1))
    round_of([1])
    step = make_step(method, state, private_states[0], 0)
    method._load_personal(step, _find_layers(method, step))
    received = step.parameters()[name].detach()
    assert torch.equal(received[masks[0] == 1], state.tensors["global"][name][masks[0] == 1])
    assert not received[masks[0] == 0].any()
    again = round_of([0])[0].tensors[f"mask/{layer}"]
    assert int((again == 0).sum()) == 5  # 0.8 exceeds the target
    assert (again[masks[0] == 0] == 0).all()


def _find_layers(method: Hermes, step: Step) -> list[object]:
    from raydfl.methods._pruning import find_prunable_layers

    return find_prunable_layers(step.models, step.fixed, method.prune)  # type: ignore[return-value]
