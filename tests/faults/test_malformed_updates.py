"""A malformed update of a client is dropped without other effects.

Oracle: a method that plans the same rounds without the client ends with the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import faulty_methods
import numpy as np
import pytest
import torch

from raydfl.core.errors import ClientError, RaydflError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Ratio, Update
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.record import MetricRow
from raydfl.engine.validation import Kinds, UpdateChecker, check_form, check_metrics, check_weights, is_finite
from raydfl.runs._replay import replay
from raydfl.runs._run import resume, run
from raydfl.testing import assert_same_bits, read_tensors, train_federation

Tiny = Callable[..., Config]
FAULTY = Path(__file__).parent / "faulty_methods.py"
COMMON = ("train.cohort=1.0", "run.on_error=drop", "train.rounds=2")
NONSENSE = f"method.name={FAULTY}:Nonsense"

SAID = {
    "no update": r"client 's2': local\(\) returned a NoneType, not an Update. End it with: return step.update",
    "shape": r"client 's2': the update's tensor 'model/\S+' has the shape \(.*\), but \(.*\) under 'global'. Use",
    "broadcast": r"client 's2': the update's tensor 'model/\S+' has the shape \(\), but \(.*\) under 'global'. Use",
    "array": r"client 's2': the update's entry 'model/\S+' is a ndarray. Map names to tensors",
    "complex": r"tensor 'model/\S+' is torch.complex64: send its real and imaginary parts",
    "name": r"client 's2': the update holds the tensor 'model/more', but the server has no such tensor under 'global'. Put it",
    "key": r"client 's2': the update has the key 'mine', but the server's state has only 'global'. .*the class variable additions",
    "key of no kind": r"client 's2': the update's key is \['global'\], not a string",
    "weight nan": r"client 's2': the weight of its update is nan. It must be from 0 to 1e\+12",
    "weight negative": r"client 's2': the weight of its update is -1.0. It must be from 0 to 1e\+12",
    "weight boundless": r"client 's2': the weight of its update is 1e\+300. It must be from 0 to 1e\+12",
    "weight word": "client 's2': the weight of its update is 'much'. It must be a number",
    "weight of tensor": r"client 's2': the weight of 'model/\S+' is inf. It must be from 0",
    "weight missing": r"client 's2': the weight of 'model/\S+' is missing",
    "weight of elements": r"client 's2': the weight of 'model/\S+' has elements outside 0 to 1e\+12",
    "weight of others": r"client 's2': the weight of 'model/\S+' has shape \(7,\), but the tensor has",
    "cut outside": r"client 's2': the cut of the update's tensor 'model/\S+' does not fit: .* index 99 of dimension 0",
    "cut twice": r"client 's2': the cut of the update's tensor 'model/\S+' does not fit: .* index of dimension 0 twice",
    "cut of others": r"client 's2': the cut of the update's tensor 'model/\S+' does not fit: the tensor has the shape",
    "cut word": r"client 's2': the update's cuts are {'model/\S+': 'half'}. Map the names of cut tensors",
    "metric kind": r"client 's2': metric 'share' is an array \[2\], but a ratio at other clients. Use the same kind",
    "metric shape": r"client 's2': metric 'seen' is an array \[4\], but an array \[3\] at other clients. Use the same kind",
    "metric number": r"client 's2': metric 'share' is 0.5. Use a raydfl.Ratio",
    "metric text": r"client 's2': metric 'share' is Ratio\(total='a', count=1\). Use a raydfl.Ratio",
    "metric objects": r"client 's2': metric 'seen' is array.*. Use a raydfl.Ratio",
    "metric confusion": r"client 's2': metric 'model/confusion' is an array \[3\], but a confusion matrix must be square",
    "metrics": "client 's2': the metrics are a list. Return a dict",
    "metrics without end": r"client 's2': 10,\d{3} metrics exceed the limit of 1,000 for a client in a round. Use fewer names",
}


def read_metrics(run_dir: Path) -> list[MetricRow]:
    return record.to_rows(record.read_rows(run_dir))


@pytest.fixture(scope="module")
def reference_cache() -> dict[str, dict[str, bytes]]:
    """Cache of tensors of federations without a client, by client."""
    return {}


def train_without(reference_cache: dict[str, dict[str, bytes]], tiny: Tiny, client: str) -> dict[str, bytes]:
    if client not in reference_cache:
        extra = [f"method.name={FAULTY}:Absent", f"method.client={client}", "run.name=absent"]
        reference_cache[client] = train_federation(tiny(*COMMON, *extra))
    return reference_cache[client]


@pytest.mark.parametrize("what", SAID)
def test_the_problem_of_an_update_is_reported(what: str) -> None:
    honest = Update(
        {"model/a": torch.ones(2, 3), "model/b": torch.ones(3)},
        7.0,
        {"loss": Ratio(1.0, 2), "share": Ratio(1, 2), "seen": np.ones(3)},
        client_id="s2",
    )
    metrics = check_metrics(honest.metrics, "client 's2'")
    checker = UpdateChecker({"global": Layout.from_tensors(honest.tensors)}, (), [(honest, metrics)])

    def check(update: Update) -> str:
        check_form(update, "client 's2'")
        metrics = check_metrics(update.metrics, "client 's2'")
        flat = FlatTensors.from_tensors(update.tensors)
        check_weights(update, flat.layout)
        return f"client 's2': {checker.misfit(update, metrics)}"

    assert check(honest) == "client 's2': "
    try:
        output = check(faulty_methods.SENT[what](honest))
    except (RaydflError, TypeError) as error:
        output = str(error)
    assert re.match(SAID[what], output)


@pytest.mark.parametrize(
    "what",
    [
        "no update",
        "shape",
        "key",
        "weight nan",
        "weight of elements",
        "cut outside",
        "metric kind",
        "metrics without end",
    ],
)
def test_a_malformed_update_is_dropped_or_stops_the_run(
    tiny: Tiny, reference_cache: dict[str, dict[str, bytes]], what: str
) -> None:
    extra = [NONSENSE, f"method.what={what}"]
    stopped = tiny(*COMMON, *extra, "run.on_error=stop", "run.name=sent")
    with pytest.raises(ClientError, match="round 2, " + SAID[what]):
        run(stopped)
    run_dir = Path(stopped.run.dir) / "sent"
    assert final_state(run_dir).round_index == 1
    resume(run_dir, ["run.on_error=drop"])
    assert_same_bits(train_without(reference_cache, tiny, "s2"), read_tensors(run_dir))
    [note] = [row.note for row in read_metrics(run_dir) if row.metric == "failed" and row.client]
    assert note is not None
    assert re.match("error: round 2, " + SAID[what], note)
    if what == "shape":
        assert "has the shape" in replay(run_dir, 2, "s2").rejected


@pytest.mark.parametrize("what", ["metric kind", "shape"])
def test_the_first_client_is_not_trusted_more_than_others(
    tiny: Tiny, reference_cache: dict[str, dict[str, bytes]], what: str
) -> None:
    config = tiny(*COMMON, NONSENSE, f"method.what={what}", "method.client=s0", "run.name=first")
    assert_same_bits(train_without(reference_cache, tiny, "s0"), train_federation(config))


def test_clients_may_send_extra_tensors_of_the_method(tiny: Tiny, reference_cache: dict[str, dict[str, bytes]]) -> None:
    """Extra tensors, under a state key or a new key, become part of the state and change nothing else."""
    for what, addition, key in [("addition", "own/", "global"), ("other key", "model/", "mine")]:
        extra = (NONSENSE, f"method.what={what}", f"method.addition={addition}", "run.on_error=stop")
        config = tiny(*COMMON, *extra, f"run.name={key}")
        train_federation(config)
        tensors = final_state(Path(config.run.dir) / key).tensors
        if key == "global":
            assert torch.equal(tensors["global"]["own/counts"], torch.ones(2))
        else:
            assert set(tensors) == {"global", "mine"}
            assert set(tensors["mine"]) == set(tensors["global"])
            assert_same_bits(
                train_without(reference_cache, tiny, "s2"),
                {
                    name: value
                    for name, value in read_tensors(Path(config.run.dir) / key).items()
                    if "server mine" not in name
                },
            )


@pytest.mark.parametrize("client", ["s0", "s2"])
def test_a_client_with_inconsistent_metrics_is_dropped_from_evaluation(tiny: Tiny, client: str) -> None:
    extra = [NONSENSE, "method.what=evaluation", "method.round=9", f"method.client={client}", "run.name=measured"]
    output = rf"round 1, client '{client}': metric 'validation model/confusion' is an array"
    with pytest.raises(ClientError, match=output):
        run(tiny(*COMMON, *extra, "run.on_error=stop"))
    outcome = resume(Path(tiny(*extra).run.dir) / "measured", ["run.on_error=drop"])
    failed = [row for row in read_metrics(outcome.run_dir) if row.metric == "failed" and row.client]
    assert [(row.round, row.phase, row.client) for row in failed] == [(1, "evaluate", client), (2, "evaluate", client)]
    [*_, pooled] = [
        row.array for row in read_metrics(outcome.run_dir) if row.split == "validation" and row.array is not None
    ]
    assert len(pooled) > 2  # from the other clients


def test_an_overflowing_state_is_not_committed(tiny: Tiny) -> None:
    """The client updates are finite, but their squares in the server's Adam state overflow."""
    from_client = [f"method.name={FAULTY}:NonsenseToAdam", "method.what=huge"]
    config = tiny(*COMMON, *from_client, "run.name=huge")
    output = (
        r"round 2: the aggregated state is not finite: '.*model/\S+' of .*. The largest value in an update is "
        r"3e\+38, of client 's2'. The last commit remains valid"
    )
    with pytest.raises(ClientError, match=output):
        run(config)
    state = final_state(Path(config.run.dir) / "huge")
    assert state.round_index == 1
    assert all(is_finite(tensor) for group in state.tensors.values() for tensor in group.values())


def test_is_finite_agrees_with_torch() -> None:
    """Oracle: torch.isfinite, which allocates a mask of the same size."""
    rng = np.random.default_rng(0)
    for bad in (0.0, np.nan, np.inf, -np.inf):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            values = torch.from_numpy(rng.normal(size=(3, 4))).to(dtype)
            values[1, 2] = bad
            assert is_finite(values) == bool(torch.isfinite(values).all())
    assert is_finite(torch.empty(0))
    assert is_finite(torch.tensor([2**40]))


def test_a_majority_of_the_first_three_clients_decides() -> None:
    """An entry missing from all three gets the form of its first sender. Clients with other forms have no influence."""
    kinds = Kinds([{"x": "a"}, {"x": "b"}, {"x": "b", "y": "c"}])
    assert kinds.misfit({"x": "a", "z": "d"}).startswith("x is a, but b at other clients")
    assert kinds.misfit({"x": "b", "z": "e"}) == ""
    assert kinds.misfit({"z": "d"}).startswith("z is d, but e at other clients")
    assert kinds.misfit({"y": "d"}).startswith("y is d, but c at other clients")
    assert Kinds([{"x": "a"}, {"x": "b"}]).misfit({"x": "b"})  # the first of two


def test_extra_tensors_have_a_common_shape(tiny: Tiny) -> None:
    def make_update(*shape: int) -> tuple[Update, dict[str, Ratio]]:
        return Update({"w": torch.ones(2), "more": torch.ones(*shape)}, 1.0), {"loss": Ratio(1, 2)}

    server = {"global": Layout.from_shapes({"w": (2,)})}
    checker = UpdateChecker(server, ("more",), [make_update(3), make_update(2, 3), make_update(2, 3)])
    assert "tensor 'more' under 'global' is of shape (3,), but of shape (2, 3) at other clients" in checker.misfit(
        *make_update(3)
    )
    assert checker.misfit(*make_update(2, 3)) == ""
    assert "the server has no such tensor under 'global'" in UpdateChecker(server, ()).misfit(*make_update(3))
