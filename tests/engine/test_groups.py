"""Groups of clients: discovery rules, stable names, and separate state for each group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import known, stop_after
from scipy.spatial.distance import pdist, squareform
from several_clients import BANDS, CLASSES, make_steps
from torch import nn

from raydfl import Config, final_state, read_rows, resume
from raydfl.core.clustering import Distance, adjusted_rand_index, assign_noise, distances, hdbscan_labels, match, purity
from raydfl.core.cuts import Cut
from raydfl.core.errors import ConfigError
from raydfl.core.spool import Spool
from raydfl.core.types import Client, Ratio, State, Update
from raydfl.engine.groups import add_groups, find_group_rule
from raydfl.engine.groups._grouped import KEPT
from raydfl.engine.groups._membership import BOOK, Membership
from raydfl.engine.groups._rule import ClientUpdate
from raydfl.methods import Method
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.scaffold import Scaffold
from raydfl.models.dense import MeanMLP
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("kind", "scipy_name"), [("cosine", "cosine"), ("l1", "cityblock"), ("l2", "euclidean")])
def test_distances_match_scipy(kind: Distance, scipy_name: str) -> None:
    rows = np.random.default_rng(1).normal(size=(7, 6))
    vectors = [{"w": torch.tensor(row[:4]).view(2, 2), "b": torch.tensor(row[4:])} for row in rows]
    expected = pdist(rows, scipy_name)
    np.testing.assert_allclose(
        distances(vectors, kind), squareform(expected / (1 if kind == "cosine" else expected.mean())), atol=1e-12
    )


def test_inner_products_and_heads_of_different_shapes() -> None:
    vectors = [{"w": torch.tensor(values)} for values in ([1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [1.0, 0.0, 0.0])]
    # Products: 2, 0, 0. Differences from the largest: 0, 2, 2. Their mean: 4 / 3.
    inner = distances(vectors[:3], "inner")
    np.testing.assert_allclose(inner, [[0, 0, 1.5], [0, 0, 1.5], [1.5, 1.5, 0]])
    for kind in ("cosine", "l1", "l2", "inner"):
        assert distances(vectors, kind)[3, :3].tolist() == [2.0, 2.0, 2.0]  # type: ignore[arg-type]
    with_zero = distances([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], "cosine")
    assert with_zero.tolist() == [[0, 1], [1, 0]]


def test_noise_joins_the_nearest_cluster_or_stays_alone() -> None:
    points = np.array([0.0, 0.1, 0.2, 5.0, 5.1, 5.2, 1.0, 9.0])
    matrix = np.abs(points[:, None] - points)
    labels = np.array([0, 0, 0, 1, 1, 1, -1, -1])
    assert assign_noise(labels, matrix, 1.0).tolist() == [0, 0, 0, 1, 1, 1, 0, 2]
    assert assign_noise(labels, matrix, 0.0).tolist() == [0, 0, 0, 1, 1, 1, 2, 3]
    assert assign_noise(labels, matrix, 9.0).tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
    assert assign_noise(np.full(8, -1), matrix, 1.0).tolist() == [0] * 8
    assert hdbscan_labels(matrix[:6, :6], 3, 2, "eom", 0.0, False).tolist() in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


def test_a_cluster_keeps_the_name_of_most_of_its_members() -> None:
    # Two clients of task1 and one of task2 now form a cluster. The rest of task2 keeps its name. New clients form a new cluster.
    assert match([4, 4, 4, 7, 7, 9], ["task1", "task1", "task2", "task2", "task2", ""]) == {4: "task1", 7: "task2"}
    # Both clusters come from task1: the larger one keeps the name, the smaller one is new.
    assert match([0, 0, 1], ["task1", "task1", "task1"]) == {0: "task1"}
    assert purity([0, 0, 0, 1], ["a", "a", "b", "b"]) == 0.75


NAMES = [f"c{number}" for number in range(8)]


def make_grouped_method(rule: Any, method: Method | None = None) -> Method:
    group_rule = find_group_rule(rule)
    assert group_rule is not None
    return add_groups(FedAvg() if method is None else method, group_rule)


def init_state(method: Method, truth: str = "part") -> State:
    models: dict[str, nn.Module] = {"model": nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))}
    clients = [Client(name, i, 10, profile={truth: "ab"[i % 2]}) for i, name in enumerate(NAMES)]
    state = method.init(clients, [models], RNG)
    zero = {
        key: {name: torch.zeros_like(value) for name, value in entry.items()} for key, entry in state.tensors.items()
    }
    return dataclasses.replace(state, tensors=zero)


def make_update(state: State, number: int, direction: Sequence[float], weight: float = 1.0) -> Update:
    """Return an update of client ``number``: its last layer moves by ``direction``, its first by 1."""
    book = Membership.from_state(state)
    key = book.groups()[NAMES[number]] or "global"
    tensors = dict(state.tensors[key])
    tensors["model/0.weight"] = tensors["model/0.weight"] + 1
    tensors["model/1.weight"] = tensors["model/1.weight"] + torch.tensor(np.array(direction, np.float32)).view(2, 2)
    return Update(tensors, weight, {}, key, NAMES[number])


UP, DOWN = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)


def get_groups(state: State) -> list[str]:
    return list(Membership.from_state(state).keys)


def test_each_group_has_its_own_model_and_every_client_has_one() -> None:
    method = make_grouped_method({"name": "hdbscan", "min_cluster_size": 2, "min_samples": 1})
    state = init_state(method)
    small = [0.01, 0.0, -0.01, 0.0]
    # Even clients go up, odd ones down; clients 6 and 7 are not drawn.
    sent = [make_update(state, i, np.add(DOWN if i % 2 else UP, small[i % 4]), weight=1 + i) for i in range(6)]
    state, report = method.aggregate(state, iter(sent), RNG)
    assert get_groups(state) == ["task1", "task2"] * 3 + ["", ""]
    assert set(state.tensors) == {"global", "task1", "task2"}
    for key, members in (("task1", (0, 2, 4)), ("task2", (1, 3, 5))):
        expected = sum((1 + i) * sent[i].tensors["model/1.weight"] for i in members) / sum(1 + i for i in members)
        torch.testing.assert_close(state.tensors[key]["model/1.weight"], expected)
    global_mean = sum((1 + i) * sent[i].tensors["model/1.weight"] for i in range(6)) / 21
    torch.testing.assert_close(state.tensors["global"]["model/1.weight"], global_mean)
    assert report["tasks/purity"] == Ratio(1.0, 1)
    assert report["tasks/rand_index"] == Ratio(1.0, 1)
    assert report["tasks/membership"].tolist() == [[1, 2, 1, 2, 1, 2, 0, 0], [0, 1] * 4]  # type: ignore[union-attr]
    assert [task.receive for task in method.plan(state, make_clients(state), RNG, 8)] == [
        (key or "global",) for key in get_groups(state)
    ]
    # Client 0 now behaves like the odd ones. Clients 6 (like 4) and 7 join. Clients 1 and 2 are absent.
    old = state
    later_updates = [make_update(state, i, np.add(UP if i == 4 else DOWN, small[i % 4])) for i in (0, 3, 4, 5, 7)]
    later_updates.insert(3, dataclasses.replace(later_updates[2], client_id="c6", key="global"))
    later_updates = sorted(later_updates, key=lambda sent_update: sent_update.client_id)
    state, report = method.aggregate(state, iter(later_updates), RNG)
    assert get_groups(state) == ["task2", "task2", "task1", "task2", "task1", "task2", "task1", "task2"]
    # Changes are relative to the received model: client 0 received task1, but joins task2.
    expected = sum(u.tensors["model/1.weight"] for u in later_updates if u.client_id in ("c0", "c3", "c5", "c7")) / 4
    torch.testing.assert_close(state.tensors["task2"]["model/1.weight"], expected)
    # Groups without members are removed, and every client still has a model.
    assert not torch.equal(old.tensors["task1"]["model/0.weight"], state.tensors["task1"]["model/0.weight"])
    state, report = method.aggregate(state, (make_update(state, i, UP) for i in range(3)), RNG)
    assert report["tasks/undivided"] == Ratio(1.0, 1)
    assert get_groups(state)[:3] == ["task2"] * 3
    state, _ = method.aggregate(state, (make_update(state, i, UP) for i in (0, 4, 6)), RNG)
    assert set(state.tensors) == {"global", *get_groups(state)}


def make_clients(state: State) -> list[Client]:
    return [Client(name, i, 10, profile={}) for i, name in enumerate(Membership.from_state(state).clients)]


def test_accumulated_changes_affect_the_grouping() -> None:
    options = {"name": "hdbscan", "min_cluster_size": 2, "min_samples": 1}
    for share, divided in ((0.0, False), (1.0, True)):
        method = make_grouped_method({**options, "accumulate": share})
        state = init_state(method)
        for chosen in (range(4), range(4, 8)):  # each cohort is large enough; the one after them is uninformative
            noise = np.random.default_rng(5).normal(size=(8, 4)) * 0.01
            sent = [make_update(state, i, np.add(DOWN if i % 2 else UP, noise[i])) for i in chosen]
            state, report = method.aggregate(state, iter(sent), RNG)
        state, report = method.aggregate(state, (make_update(state, i, (0.05,) * 4) for i in range(2)), RNG)
        assert (report["tasks/undivided"] == Ratio(0.0, 1)) is divided
        assert (KEPT in state.tensors) is divided
        if divided:
            assert get_groups(state) == ["task1", "task2"] * 4
            assert len(state.tensors[KEPT]) == 8
            accumulated = state.tensors[KEPT]["0/model/1.weight"].flatten().numpy()
            first = make_update(init_state(method), 0, UP).tensors["model/1.weight"].flatten().numpy()
            assert accumulated == pytest.approx(first + noise[0] + 0.05, abs=1e-6)


def test_clients_are_compared_by_last_layers_or_named_layers() -> None:
    names = [
        "model/conv.weight",
        "model/conv.bias",
        "model/gru.weight@a",
        "model/output.weight@a",
        "model/output.bias@a",
    ]
    find = lambda layers: find_group_rule({"name": "hdbscan", "layers": layers}).head(names)  # type: ignore[union-attr]  # noqa: E731
    assert find(1) == names[3:]
    assert find(2) == names[2:]
    assert find(["model/conv"]) == names[:2]
    with pytest.raises(ConfigError, match="no tensor's name begins with model/head"):
        find(["model/head"])


def test_large_updates_are_restored_from_a_file() -> None:
    updates = [
        Update({"a": torch.full((3,), float(i)), "b": torch.ones(2, 2) * i}, i, {}, "k", f"c{i}") for i in range(5)
    ]
    spool = Spool(largest=50)
    for sent in updates:
        spool.add(sent)
    for _ in range(2):
        for expected, restored in zip(updates, spool, strict=True):
            assert (expected.client_id, expected.weight, expected.key) == (
                restored.client_id,
                restored.weight,
                restored.key,
            )
            assert all(torch.equal(expected.tensors[name], restored.tensors[name]) for name in expected.tensors)


PARTS = "data.parts={low: {speakers: 3}, high: {first: 10, speakers: 3}}"


def test_groups_are_found_without_part_names_and_measured_on_their_members(tiny: Tiny) -> None:
    config = tiny(
        PARTS,
        "data.heads=common",
        "train.cohort=1.0",
        "train.rounds=2",
        "train.groups={name: hdbscan, min_cluster_size: 2, min_samples: 1}",
    )
    folder = run(config).run_dir
    state = final_state(folder)
    assert not [name for entry in state.tensors.values() for name in entry if "@" in name]
    rows = {
        (row["split"], row["metric"]): row
        for row in read_rows(folder).to_pylist()
        if row["round"] == 2 and not row["client"]
    }
    book = Membership.from_state(state)
    for part in ("low", "high"):
        keys = [key for key, key_part in zip(book.keys, book.parts, strict=True) if key_part == part]
        scores = {key: rows["test", f"{part}:{key}:model/accuracy"]["value"] for key in keys}
        assert rows["test", f"{part}:model/accuracy"]["value"] == pytest.approx(np.mean([scores[key] for key in keys]))
        measured = {metric.split(":")[1] for split, metric in rows if split == "test" and metric.count(":") == 2}
        assert measured <= set(book.keys)
    assert np.array(rows["server", "tasks/membership"]["array"]).reshape(2, 6)[1].tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("method", ["fedavg", "fedmlac"])
def test_known_groups_have_their_own_entries_and_resume_to_the_bit(tiny: Tiny, method: str) -> None:
    settings = [PARTS, "train.groups=known", "train.rounds=2", "evaluate.clients=none"]
    whole = train_federation(tiny(*settings, method=method))
    assert {name.split()[1] for name in whole if name.startswith("server")} == {"global", "task_low", "task_high"}
    stopped = tiny(*settings, "run.name=stopped", method=method)
    stop_after(stopped, 1)
    folder = Path(stopped.run.dir) / "stopped"
    resume(folder)
    assert_same_bits(read_tensors(folder), whole)


def test_k_means_compares_directions_and_not_lengths() -> None:
    """Oracle: six changes along three axes, of lengths from 0.1 to 10."""
    rule = find_group_rule({"name": "kmeans", "clusters": 3})
    axes, lengths = (0, 1, 2, 0, 1, 2), (10.0, 0.1, 1.0, 0.1, 10.0, 3.0)
    heads = [{"w": length * torch.eye(3)[axis]} for axis, length in zip(axes, lengths, strict=True)]
    labels, noise, undivided = rule.labels(heads)  # type: ignore[union-attr]
    assert adjusted_rand_index(labels.tolist(), axes) == 1
    assert (noise, undivided) == (0, False)
    labels, _, undivided = rule.labels([heads[i] for i in (0, 1, 3, 4)])  # type: ignore[union-attr]
    assert (labels.tolist(), undivided) == ([0, 0, 0, 0], True)  # two directions


def test_k_means_finds_the_groups_of_a_round() -> None:
    method = make_grouped_method({"name": "kmeans"})
    state = init_state(method)
    state, report = method.aggregate(state, (make_update(state, i, DOWN if i % 2 else UP) for i in range(6)), RNG)
    assert get_groups(state) == ["task1", "task2"] * 3 + ["", ""]
    assert report["tasks/purity"] == report["tasks/rand_index"] == Ratio(1.0, 1)


@pytest.mark.parametrize("rule", [{"name": "kmeans"}, {"name": "hdbscan", "min_cluster_size": 2, "min_samples": 1}])
@pytest.mark.parametrize(("reference", "groups"), [("received", 1), ("common", 2)])
def test_a_common_reference_keeps_groups_whose_models_differ(rule: dict[str, Any], reference: str, groups: int) -> None:
    """Oracle: in the second round all clients move in the same direction, so only the groups' models differ."""
    method = make_grouped_method({**rule, "reference": reference})
    state = init_state(method)
    state, _ = method.aggregate(state, (make_update(state, i, DOWN if i % 2 else UP) for i in range(8)), RNG)
    assert get_groups(state) == ["task1", "task2"] * 4
    same = (0.0, 0.1, 0.0, 0.0)
    state, report = method.aggregate(state, (make_update(state, i, same) for i in range(8)), RNG)
    assert report["tasks/groups"] == Ratio(groups, 1)
    if groups == 2:
        assert get_groups(state) == ["task1", "task2"] * 4


def test_changes_from_the_common_reference_are_differences_of_models() -> None:
    """Oracle: the client's model minus the common model; a client keeps the received values outside its cut."""
    received, common = {"w": torch.tensor([1.0, 2.0, 3.0])}, {"w": torch.tensor([0.5, 0.5, 0.5])}
    cut = Cut([[1]])
    update = Update({"w": torch.tensor([7.0])}, 1.0, {}, "global", "c0", cuts={"w": cut})
    message = ClientUpdate(update, received, "", common)
    assert message.change(["w"])["w"].tolist() == [0.0, 5.0, 0.0]
    assert message.change(["w"], common=True)["w"].tolist() == [0.5, 6.5, 2.5]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("dbscan", "train.groups: unknown rule 'dbscan'. Choose one of cfl, hdbscan, ifca, kmeans, known, none"),
        ({"name": "hdbscan", "distance": "euclid"}, "train.groups.distance"),
        ({"name": "hdbscan", "min_cluster_size": 1}, "train.groups.min_cluster_size"),
        ({"name": "known", "by": "task"}, "the clients' profiles have no column 'task'"),
        (
            {"name": "hdbscan", "layers": 99},
            r"train.groups.layers is 99, but the clients share only \d layers. Set it to at most \d",
        ),
        ({"name": "hdbscan", "layers": ["model/head"]}, "no tensor's name begins with model/head"),
        ({"name": "cfl", "min_size": 5}, "train.groups.min_size is 5, but 8 clients cannot be split"),
        ({"name": "cfl", "gamma": 2}, "train.groups.gamma"),
        ({"name": "kmeans", "clusters": 1}, "train.groups.clusters"),
        ({"name": "kmeans", "reference": "global"}, "train.groups.reference"),
    ],
)
def test_invalid_group_rules_are_rejected(rule: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        init_state(make_grouped_method(rule), truth="kind")


def test_the_state_records_the_membership() -> None:
    state = init_state(make_grouped_method({"name": "known", "by": "task"}), truth="task")
    assert state.extra[BOOK]["truth"] == ["a", "b"] * 4
    state, _ = make_grouped_method({"name": "known", "by": "task"}).aggregate(
        state, iter([make_update(state, 0, UP)]), RNG
    )
    assert get_groups(state) == ["task_a", "task_b"] * 4  # including clients that were not drawn
    assert torch.equal(state.tensors["task_b"]["model/1.weight"], torch.zeros(2, 2))


def test_equations_use_the_number_of_clients_in_the_group() -> None:
    """Scaffold's control variate moves by the participating fraction of the group."""
    scaffold, method = Scaffold(), make_grouped_method({"name": "known", "by": "kind"}, Scaffold())
    state = init_state(method, truth="kind")
    sent = [make_update(state, number, UP) for number in range(5)]
    sent = [
        dataclasses.replace(
            sent_update, tensors={n: t + 1 if n.startswith("control/") else t for n, t in sent_update.tensors.items()}
        )
        for sent_update in sent
    ]
    state, _ = method.aggregate(state, iter(sent), RNG)
    for kind in "ab":
        members = [name for number, name in enumerate(NAMES) if "ab"[number % 2] == kind]
        reference = dataclasses.replace(init_state(scaffold), extra={"clients": len(members)})
        reference, _ = scaffold.aggregate(
            reference, (sent_update for sent_update in sent if sent_update.client_id in members), RNG
        )
        for name, value in reference.tensors["global"].items():
            assert torch.equal(state.tensors[f"task_{kind}"][name], value)


def test_ifca_chooses_the_group_with_the_smallest_loss() -> None:
    """The losses are computed by hand. The step ends with the chosen group's models."""
    rule = find_group_rule({"name": "ifca"})
    assert rule is not None
    step = make_steps(FedAvg(), lambda: {"model": MeanMLP(BANDS, CLASSES, hidden=7)})[0]
    initial = {name: value.clone() for name, value in step.floating_state().items()}
    batch = step.data.train.batch(np.arange(len(step.data.train)))
    received, losses = {}, {}
    for group, factor in (("task1", 1.0), ("task2", -1.0)):
        received[group] = {"global": {name: factor * value for name, value in initial.items()}}
        step.received = received[group]
        step.load("global")
        losses[group] = F.cross_entropy(step.models["model"](batch.x), batch.y).item()
    chosen = rule.choose(step, received, FedAvg())
    assert chosen == min(losses, key=losses.__getitem__)
    assert all(torch.equal(value, received[chosen]["global"][name]) for name, value in step.floating_state().items())


def test_ifca_averages_the_models_of_a_groups_members() -> None:
    method = make_grouped_method({"name": "ifca", "groups": 3, "spread": 0.5})
    models: dict[str, nn.Module] = {"model": nn.Sequential(nn.Linear(2, 2, bias=False))}
    state = method.init([Client(name, i, 10) for i, name in enumerate(NAMES)], [models], RNG)
    first = [state.tensors[key]["model/0.weight"] for key in ("global", "task1", "task2", "task3")]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert {task.receive for task in method.plan(state, make_clients(state), RNG, 8)} == {("task1", "task2", "task3")}
    sent = [
        Update({"model/0.weight": torch.full((2, 2), float(i))}, 1.0 + i, {}, f"task{1 + i % 2}", NAMES[i])
        for i in range(4)
    ]
    state, report = method.aggregate(state, iter(sent), RNG)
    assert get_groups(state) == ["task1", "task2"] * 2 + [""] * 4
    for key, mean in (("task1", (0 * 1 + 2 * 3) / 4), ("task2", (1 * 2 + 3 * 4) / 6)):
        torch.testing.assert_close(state.tensors[key]["model/0.weight"], torch.full((2, 2), mean))
    assert torch.equal(state.tensors["task3"]["model/0.weight"], first[3])  # no client chose it
    assert report["tasks/moved"] == Ratio(4, 4)


FOUR = [(1.0, 0.0), (1.0, 0.1), (-1.0, 0.0), (-1.0, 0.1)]
"""Changes of four clients. Mean: (0, 0.05); largest norm: sqrt(1.01); a_cross: the cosine of (1, 0.1) and (-1, 0.1)."""
CROSS = (-1 + 0.01) / 1.01


@pytest.mark.parametrize(
    ("options", "split"),
    [
        ({"eps_mean": 0.0501, "eps_max": 1.004}, True),
        ({"eps_mean": 0.0499, "eps_max": 1.004}, False),
        ({"eps_mean": 0.0501, "eps_max": 1.006}, False),
        ({"eps_mean": 1.0, "eps_max": 0.0, "gamma": np.sqrt((1 - CROSS) / 2) - 1e-6}, True),
        ({"eps_mean": 1.0, "eps_max": 0.0, "gamma": np.sqrt((1 - CROSS) / 2) + 1e-6}, False),
        ({"eps_mean": 1.0, "eps_max": 0.0, "min_size": 2}, True),
        ({"eps_mean": 1.0, "eps_max": 0.0, "min_size": 3}, False),
    ],
)
def test_cfl_splits_a_group_by_the_criteria_of_the_paper(options: dict[str, float], split: bool) -> None:
    method = make_grouped_method({"name": "cfl", **{name: type(value)(value) for name, value in options.items()}})
    state = init_state(method)
    sent = []
    for number, change in enumerate(FOUR):
        tensors = {name: torch.zeros_like(value) for name, value in state.tensors["global"].items()}
        tensors["model/1.weight"][0] = torch.tensor(change)
        sent.append(Update(tensors, 1.0, {}, "global", NAMES[number]))
    state, report = method.aggregate(state, iter(sent), RNG)
    assert get_groups(state)[:4] == (["task1", "task1", "task2", "task2"] if split else ["task1"] * 4)
    assert report["tasks/mean_norm"].value == pytest.approx(0.05)  # type: ignore[union-attr]
    assert report["tasks/max_norm"].value == pytest.approx(np.sqrt(1.01))  # type: ignore[union-attr]


def test_cfl_assigns_new_clients_to_the_most_similar_group() -> None:
    method = make_grouped_method({"name": "cfl", "eps_mean": 1.0, "eps_max": 0.5})
    state = init_state(method)
    directions = [(1.0, 0.0), (-1.0, 0.0)]
    for chosen in (range(4), range(6)):
        sent = []
        for number in chosen:
            key = get_groups(state)[number] or "global"
            tensors = {name: value.clone() for name, value in state.tensors[key].items()}
            tensors["model/1.weight"][0] += 0.9 * torch.tensor(directions[number % 2])
            sent.append(Update(tensors, 1.0, {}, key, NAMES[number]))
        state, _ = method.aggregate(state, iter(sent), RNG)
    assert get_groups(state) == ["task1", "task2"] * 3 + ["", ""]


@pytest.mark.parametrize("rule", ["{name: cfl, eps_mean: 100, eps_max: 0}", "ifca", "hdbscan", "kmeans"])
def test_parts_may_have_different_classes(tiny: Tiny, rule: str) -> None:
    """Last layers of different shapes count as different, and each group has the layers of both parts."""
    parts = "data.parts={low: {speakers: 3}, high: {classes: 5, first: 10, speakers: 3}}"
    config = tiny(parts, f"train.groups={rule}", "train.rounds=1", "train.cohort=1.0")
    bits = known(config)
    heads = [name for name in bits if name.startswith("server task1 model/output.weight@")]
    assert len(heads) == 2


def test_the_former_name_of_the_setting_keeps_its_meaning(tiny: Tiny) -> None:
    setting = "{name: known, by: group}"
    former, present = tiny(f"method.tasks={setting}"), tiny(f"train.groups={setting}")
    assert former.digest() == present.digest() != tiny().digest()
    assert tiny("train.groups=none").digest() == tiny("method.tasks=none").digest() == tiny().digest()
    assert tiny("train.groups=hdbscan", method="fedapta").digest() == tiny(method="fedapta").digest()
    assert tiny("method.tasks=none", method="fedapta").digest() != tiny(method="fedapta").digest()
    with pytest.raises(ConfigError, match="Remove method.tasks, the former name of train.groups"):
        tiny(f"method.tasks={setting}", "train.groups=hdbscan")


@pytest.mark.parametrize(
    ("settings", "method", "message"),
    [
        (
            ["train.groups={name: ifca, groups: 9}"],
            "fedavg",
            "train.groups.groups is 9, but the population has 6 clients",
        ),
        (["train.groups={name: ifca, groups: 1}"], "fedavg", "train.groups.groups"),
        (["train.groups=ifca"], "harmony", "method 'harmony' has several phases"),
        (
            [
                "data.profile={kind: {values: [a, b]}}",
                "train.groups={name: known, by: kind}",
                "train.clients.where={kind: a}",
            ],
            "fedavg",
            "no client of group 'b' takes part in training",
        ),
        (["train.groups={name: known, by: device}"], "fedavg", "the clients' profiles have no column 'device'"),
        (["train.groups=5"], "fedavg", "train.groups"),
    ],
)
def test_unusable_groups_are_rejected_before_the_first_round(
    tiny: Tiny, settings: list[str], method: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start_server(tiny(*settings, method=method))
