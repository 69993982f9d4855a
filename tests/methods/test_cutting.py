"""Training of parts of a network: a round of each method in NumPy, and rejected configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import known

from raydfl import read_rows
from raydfl.cluster.server import Server
from raydfl.core.errors import ConfigError
from raydfl.core.types import State, Task
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.storage.folder import final_state
from raydfl.testing import assert_same_bits, start_server, train_federation

Tiny = Callable[..., Config]
UNITS, RATE = 6, 0.1
SHARES = [1.0, 0.5, 0.3]
"""Of six units all, three and two."""
COMMON = [
    f"models.model={{name: mlp, hidden: {UNITS}}}",
    "data.partition={by: dirichlet, clients: 5, alpha: 0.3}",
    f"data.profile={{capability: {{values: {SHARES}}}}}",
    "method.share=capability",
    "train.cohort=3",
    "train.rounds=4",
    "train.batch_size=1000",
]
Weights = dict[str, np.ndarray]


def train_one_step(weights: Weights, x: np.ndarray, y: np.ndarray, class_mask: np.ndarray) -> Weights:
    """Do a step of gradient descent on cross-entropy, with logits of classes outside ``class_mask`` set to 0."""
    mean = x.mean(axis=1)
    hidden = mean @ weights["hidden.weight"].T + weights["hidden.bias"]
    logits = (np.maximum(hidden, 0) @ weights["output.weight"].T + weights["output.bias"]) * class_mask
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    back = (shares / shares.sum(axis=1, keepdims=True) - np.eye(len(class_mask))[y]) / len(y) * class_mask
    below = (back @ weights["output.weight"]) * (hidden > 0)
    gradients = {
        "hidden.weight": below.T @ mean,
        "hidden.bias": below.sum(axis=0),
        "output.weight": back.T @ np.maximum(hidden, 0),
        "output.bias": back.sum(axis=0),
    }
    return {name: weights[name] - RATE * gradients[name] for name in weights}


def compute_round(
    server: Weights, population: Population, units: dict[int, np.ndarray], *, masked: bool
) -> tuple[Weights, int, int]:
    """Compute the server's tensors after a round with the given units of each client, and the bytes down and up."""
    totals = {name: np.zeros_like(value) for name, value in server.items()}
    counts = {name: np.zeros_like(value) for name, value in server.items()}
    down = up = 0
    for client, own_units in units.items():
        examples = population.data(client).train
        batch = next(examples.batches(len(examples), None))
        x, y = batch.x.double().numpy(), batch.y.numpy()
        classes = np.unique(y) if masked else np.arange(3)
        indices: dict[str, Any] = {
            "hidden.weight": np.ix_(own_units, np.arange(server["hidden.weight"].shape[1])),
            "hidden.bias": (own_units,),
            "output.weight": np.ix_(np.arange(3), own_units),
            "output.bias": (np.arange(3),),
        }
        class_mask = np.isin(np.arange(3), classes).astype(float)
        update = train_one_step({name: server[name][index] for name, index in indices.items()}, x, y, class_mask)
        down += 4 * sum(value.size for value in update.values())
        for name, value in update.items():
            index, part = indices[name], value
            if name.startswith("output"):
                part = value[classes]
                index = np.ix_(classes, own_units) if value.ndim == 2 else (classes,)
            totals[name][index] += len(y) * part
            counts[name][index] += len(y)
            up += 4 * part.size
    mean = {
        name: np.where(counts[name] > 0, totals[name] / np.maximum(counts[name], 1), server[name]) for name in server
    }
    return mean, down, up


def read_weights(server: Server) -> Weights:
    server.finish()
    tensors = final_state(server._federation.store.folder).tensors["global"]
    return {name.removeprefix("model/"): tensor.double().numpy() for name, tensor in tensors.items()}


def get_units(task: Task) -> np.ndarray:
    cut = task.cuts.get("model/hidden.bias")
    return np.arange(UNITS) if cut is None else np.asarray(cut.indices[0])


@pytest.mark.parametrize(("method", "masked"), [("feddrop", False), ("fedrolex", True), ("fedrolex", False)])
def test_rounds_equal_the_reference(tiny: Tiny, method: str, masked: bool) -> None:
    options = [f"method.masked={str(masked).lower()}"] if method == "fedrolex" else []
    server = start_server(tiny(*COMMON, *options, method=method))
    try:
        federation = server._federation
        population = Population.load(federation.store.folder / "population").use(federation.config.data)
        server.round()
        draws, sizes = [], []
        for round_index in (1, 2, 3):
            before, tasks = read_weights(server), {order.task.client_id: order.task for order in federation.plan()}
            units = {population.index(client): get_units(task) for client, task in tasks.items()}
            for client, indices in units.items():
                expected = int(np.ceil(UNITS * SHARES[client % 3] - 1e-9))
                assert len(indices) == expected
                if method == "fedrolex":
                    assert set(indices) == {(round_index + i) % UNITS for i in range(expected)}
            draws += [(round_index, tuple(indices)) for indices in units.values() if len(indices) < UNITS]
            report = server.round()
            after, down, up = compute_round(before, population, units, masked=masked)
            result = read_weights(server)
            for name, value in after.items():
                np.testing.assert_allclose(result[name], value, rtol=2e-5, atol=2e-6)
            assert (report.bytes_down, report.bytes_up) == (down, up)
            sizes.append((down, up))
    finally:
        server.close()
    assert all(up <= down for down, up in sizes)
    assert any(up < down for down, up in sizes) is masked  # some client lacks a class
    if method == "feddrop":
        assert len(set(draws)) > len(draws) / 2  # units are redrawn for each client and round


def test_the_draw_depends_only_on_seed_round_and_client(tiny: Tiny) -> None:
    from raydfl.core.types import Client
    from raydfl.methods.feddrop import FedDrop

    method = FedDrop()

    def chosen(client: str, round_index: int, seed: int, group: str = "hidden") -> list[int]:
        state = State(round_index, {}, {"channels_seed": seed})
        return method.chosen(state, Client(client, 0, 1), group, 50, 25).tolist()

    first = chosen("anna", 3, 1)
    assert first == chosen("anna", 3, 1) == sorted(set(first))
    draws = [chosen("bert", 3, 1), chosen("anna", 4, 1), chosen("anna", 3, 2), chosen("anna", 3, 1, "gru")]
    assert all(first != draw for draw in draws)


@pytest.mark.parametrize(("share", "units"), [(0.75, 4), (0.5, 3), (0.2, 1), (0.01, 1)])
def test_a_share_of_the_weights_sets_the_number_of_channels(tiny: Tiny, share: float, units: int) -> None:
    """Compare with the same number of channels. 16 bands, h units and 3 classes make 20 h + 3 weights, 123 for all units."""
    common = [f"models.model={{name: mlp, hidden: {UNITS}}}", "train.rounds=2", "evaluate.every=9"]
    by_weights = [f"method.share={share}", "method.share_of=weights", "run.name=weights"]
    assert_same_bits(
        train_federation(tiny(*common, *by_weights, method="feddrop")),
        known(tiny(*common, f"method.share={units / UNITS}", method="feddrop")),
    )


@pytest.mark.parametrize("method", ["feddrop", "fedrolex", "heterofl"])
def test_the_record_has_the_kept_weights_of_each_client_and_their_mean(tiny: Tiny, method: str) -> None:
    """16 bands, h units and 3 classes make 20 h + 3 weights. The clients have 6, 3 and 2 units."""
    config = tiny(*COMMON, "data.partition={by: group}", "data.speakers=3", "train.rounds=1", method=method)
    train_federation(config)
    rows = [row for row in read_rows(Path(config.run.dir) / "tiny").to_pylist() if row["metric"] == "kept_weights"]
    assert {row["client"]: row["value"] for row in rows} == {"s0": 123, "s1": 63, "s2": 43, "": (123 + 63 + 43) / 3}


def test_a_share_of_1_equals_fedavg(tiny: Tiny) -> None:
    """Compare all tensors except the entries about sampling."""
    profile = ["data.profile={capability: {values: [1]}}", "train.rounds=2"]
    for method in ("feddrop", "fedrolex"):
        options = ["method.masked=false"] if method == "fedrolex" else []
        tensors = train_federation(
            tiny(*profile, *options, "method.share=capability", f"run.name={method}", method=method)
        )
        expected = known(tiny("train.rounds=2"))
        assert_same_bits({**tensors, "extra": b""}, {**expected, "extra": b""})


PROFILE = "data.profile={capability: {values: [%s]}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.share=0"], "method.share: Input should be greater than 0"),
        (["method.share=1.5"], "method.share: Input should be less than or equal to 1"),
        (
            ["method.share=capacity", PROFILE % "1"],
            "'feddrop' needs the column 'capacity', but the clients' profiles do not have it.",
        ),
        (
            ["method.share=capability", PROFILE % "0.5, 0"],
            "profile of a client has 0 under 'capability'. It must be the client's fraction",
        ),
        (
            ["method.share=capability", PROFILE % "low"],
            "profile of a client has 'low' under 'capability'. It must be the client's fraction",
        ),
        (["models.model=linear"], "linear has no removable channels"),
    ],
)
def test_networks_that_cannot_be_cut_are_rejected_before_the_first_round(
    tiny: Tiny, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start_server(tiny(*overrides, method="feddrop"))
