"""Engine behaviour outside the laws: architectures, compaction, checks of plans, exported models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each_method, known, stop_after
from safetensors import safe_open

import raydfl.engine.storage.committer
from raydfl.core import registry
from raydfl.core.errors import ClientError, ConfigError
from raydfl.core.types import Task, Update
from raydfl.data.population import Population
from raydfl.data.shards import shard_ranges
from raydfl.engine.arrivals import Arrivals
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.orders import Order, Reply, sort_replies
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.telemetry import RoundReport
from raydfl.methods import Method
from raydfl.models import build_model
from raydfl.runs._run import run
from raydfl.runs.folder import create, export
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
EXTRA = Path(__file__).parent.parent / "extra_methods.py"


def test_architectures_are_drawn_uniformly_from_the_seed(tiny: Tiny) -> None:
    short = (
        "data.takes=1",
        "data.test_takes=1",
        "data.classes=1",
        "data.features.seconds=0.05",
        "data.split.validation=0",
    )
    config = tiny("data.speakers=300", *short, method="fedmlac")
    population = Population.load(create(config, Progress("quiet")) / "population")
    drawn = [c.models[1].options for c in Clients(population, config)]
    counts = Counter(drawn)
    assert len(counts) == 2
    assert abs(min(counts.values()) - 150) < 4 * np.sqrt(300 / 4)  # four standard deviations
    assert [c.models[1].options for c in Clients(population, config)] == drawn
    other_seed = tiny("data.speakers=300", *short, "run.seed=2", method="fedmlac")
    assert [c.models[1].options for c in Clients(population, other_seed)] != drawn
    assert {c.models[0] for c in Clients(population, config)} == {Clients(population, config)[0].models[0]}
    clients = Clients(population, config)
    assert dict.fromkeys(clients.variants()) == {client.models: None for client in clients}
    assert len(clients.variants()) == 2


def test_equal_architectures_start_from_equal_private_weights(tiny: Tiny) -> None:
    config = tiny("train.cohort=1.0", "train.rounds=1", "train.optimiser.lr=1e-12", method="fedmlac")
    run_dir = run(config).run_dir
    store, private = RunStore(run_dir), PrivateStore(run_dir / "private")
    commit = store.load(store.latest() or "")
    clients = Clients(Population.load(run_dir / "population"), config)
    by_kind: dict[object, list[torch.Tensor]] = {}
    for index, ref in commit.private.items():
        by_kind.setdefault(clients[index].models, []).append(private.read(ref)["model:local/output.weight"])
    assert len(by_kind) == 2
    for tensors in by_kind.values():
        assert all(torch.allclose(tensors[0], t, atol=1e-6) for t in tensors)


def test_a_shared_model_of_two_architectures_is_rejected(tiny: Tiny) -> None:
    config = tiny("models.model=[{name: crnn_tiny, hidden: 8}, {name: crnn_tiny, hidden: 4}]", "run.name=mixed")
    with pytest.raises(
        ConfigError, match=r"models.model is shared between the clients, so all must have one architecture"
    ):
        run(config)


@pytest.mark.slow
def test_compaction_bounds_the_private_store(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["train.rounds=12", "train.cohort=3", "run.keep=1", "evaluate.every=99"]
    reference = known(tiny(*common, method="fedmlac"))
    monkeypatch.setattr(raydfl.engine.storage.committer, "_SLACK", 0)
    config = tiny(*common, "run.name=compacted", method="fedmlac")
    server = start_server(config)
    run_dir = Path(config.run.dir) / "compacted"
    store = RunStore(run_dir)
    compacted = 0
    for _ in range(12):
        server.round()
        server.finish()
        live = sum(ref.length for ref in store.load(store.latest() or "").private.values())
        # Live records, records of the previous commit, and records not yet worth moving.
        assert sum(store.sizes_of_segments().values()) <= 4 * live
        compacted += any("compact" in path.name for path in (run_dir / "private").iterdir())
    server.close()
    assert compacted
    assert_same_bits(reference, train_federation(config))


def test_replies_are_sorted_and_complete() -> None:
    replies = [Reply(position, str(position)) for position in (2, 0, 3, 1)]
    assert [r.position for r in sort_replies(iter(replies), 4)] == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="2 of 4 replies"):
        sort_replies(iter(replies[1::2]), 4)


def make_arrivals(replies: Iterable[Reply], orders: int) -> Arrivals:
    placed = [Order(position, Task(str(position)), 0, 1.0) for position in range(orders)]
    return Arrivals(placed, iter(replies), RoundReport(1), "stop")


def make_reply(position: int, **more: Any) -> Reply:
    update = Update({"w": torch.zeros(1)}, 1.0, client_id=str(position))
    return Reply(position, str(position), update, measured={"train": {}}, **more)


STATE = {"global": {"w": torch.zeros(1)}}


def test_updates_are_in_client_order_and_complete() -> None:
    replies = [make_reply(position) for position in (4, 0, 3, 5, 1)]
    replies.insert(2, Reply(2, "2", rejected="error: none"))
    arrivals = make_arrivals(replies, 6)
    updates = arrivals.updates(STATE, lambda *_: False)
    assert [update.client_id for update in updates] == ["0", "1", "3", "4", "5"]
    assert arrivals._report.rejected == {"2": "error: none"}
    with pytest.raises(AssertionError, match="no reply to order 2"):
        list(make_arrivals([r for r in replies if r.position != 2], 6).updates(STATE, lambda *_: False))


def test_only_the_wait_for_replies_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("raydfl.engine.arrivals.time", SimpleNamespace(perf_counter=lambda: clock.seconds))

    def reply_slowly() -> Iterator[Reply]:
        for position in range(5):
            clock.seconds += 2.0
            yield make_reply(position)

    arrivals = make_arrivals(reply_slowly(), 5)
    for _ in arrivals.updates(STATE, lambda *_: False):
        clock.seconds += 5.0  # the server aggregates
    assert arrivals.seconds == 10.0


@pytest.mark.parametrize(
    ("clips", "size", "expected"),
    [
        ([], 3, []),
        ([0, 1, 2, 3, 4], 2, [(0, 2), (2, 4), (4, 5)]),
        ([0, 0, 0, 0, 1, 1, 2], 2, [(0, 4), (4, 6), (6, 7)]),  # the segments of a clip stay together
        ([5, 5, 5], 1, [(0, 3)]),
    ],
)
def test_shards_never_split_a_clip(clips: list[int], size: int, expected: list[tuple[int, int]]) -> None:
    assert shard_ranges(np.array(clips, np.int64), size) == expected


PLANS = {
    "twice": ("[Task(clients[0].id), Task(clients[0].id)]", "two tasks for client 's0' in one round"),
    "unknown key": (
        "[Task(clients[0].id, receive=('glob',))]",
        "planned to send 'glob' to client 's0', but the server's state has",
    ),
}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_invalid_plans_are_rejected(tiny: Tiny, tmp_path: Path, name: str) -> None:
    code, message = PLANS[name]
    path = tmp_path / "planner.py"
    path.write_text(
        "from raydfl import Method, Task\n\n\nclass Planner(Method):\n"
        f"    def plan(self, state, clients, rng, cohort):\n        return {code}\n"
    )
    with pytest.raises((ConfigError, ClientError), match=message.replace("(", r"\(")):
        run(tiny(f"method.name={path}:Planner"))


def test_exported_models_can_be_loaded_by_name(tiny: Tiny) -> None:
    config = tiny(method="fedmlac")
    run_dir = run(config).run_dir
    state = final_state(run_dir).tensors["global"]
    with safe_open(run_dir / "model.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {name.partition("/")[2]: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert metadata["round"] == "3"
    assert json.loads(metadata["classes"]) == ["tone0", "tone1", "tone2"]
    clients = Clients(Population.load(run_dir / "population"), config)
    model = build_model(clients[0].models[0])
    model.load_state_dict(tensors)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[f"plugin/{name}"])
    assert not any(name.startswith("local/") for name in state)


def test_equal_runs_export_equal_bytes(tiny: Tiny) -> None:
    """Users may compare runs with sha256sum. Commits are equal too if no client has private state."""
    folders = [finish_and_export(tiny(f"run.name={name}", "train.rounds=1")) for name in ("one", "two", "three")]
    for pattern in ("model.safetensors", "commits/*.safetensors", "population/*"):
        files = [
            {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)} for folder in folders
        ]
        assert files[0]
        assert files[0] == files[1] == files[2], pattern
    content = (folders[0] / "model.safetensors").read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0  # the format requires aligned tensors


def finish_and_export(config: Config) -> Path:
    train_federation(config)
    run_dir = Path(config.run.dir) / str(config.run.name)
    export(run_dir, config)
    return run_dir


def test_fedmlac_reports_its_three_metrics(tiny: Tiny) -> None:
    scores = run(tiny(method="fedmlac")).scores
    for name in ("test plugin/accuracy", "test local/accuracy_client_mean", "validation local/accuracy_client_mean"):
        assert 0 <= scores[name] <= 1


def test_server_evaluation_agrees_with_a_direct_computation(tiny: Tiny) -> None:
    config = tiny()
    outcome = run(config)
    population = Population.load(outcome.run_dir / "population")
    model = build_model(Clients(population, config)[0].models[0])
    model.load_state_dict({n.partition("/")[2]: t for n, t in final_state(outcome.run_dir).tensors["global"].items()})
    model.eval()
    batch = population.test.batch(np.arange(len(population.test)))
    with torch.no_grad():
        logits = model(batch.x)
    assert outcome.scores["test model/accuracy"] == pytest.approx(float((logits.argmax(1) == batch.y).double().mean()))
    loss = torch.nn.functional.cross_entropy(logits, batch.y)
    assert outcome.scores["test model/loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.slow
# ProFiLA does not classify.
@pytest.mark.parametrize(
    "method", each_method(name for name in registry.names("raydfl.methods") if not name.startswith("profila"))
)
def test_every_method_beats_chance_on_easy_data(tiny: Tiny, method: str) -> None:
    """Every method learns to classify three pitches in six rounds."""
    settings = [
        "train.rounds=6",
        "train.cohort=1.0",
        "train.together=6",
        "train.local_epochs=3",
        "evaluate.every=6",
        "train.optimiser.momentum=0.9",
    ]
    settings.append("data.features.normalise=group")  # normalisation by clip would remove a constant tone
    cls = registry.find("raydfl.methods", method, Method, "method")  # type: ignore[type-abstract]
    chosen = [f"models.{name}=mlp" for name in cls.models if name not in (*cls.on_features, *cls.copies)]
    extra = ["method.form=supervised"] if method == "fedmlac" else []
    extra += ["method.server_lr=0.05"] if method in ("fedadam", "fedyogi", "fedadagrad", "fedopt") else []
    extra += ["method.momentum=0.3"] if method == "fedavgm" else []
    extra += ["method.server_steps=50"] if method == "fedgen" else []  # an undertrained generator misleads the clients
    extra += ["method.layers=[hidden]"] if method == "fedbn" else []
    extra += ["train.optimiser={lr: 0.5, momentum: 0.0}"] if method == "perfedavg" else []
    extra += ["method.prune=[linear]"] if method in ("fedapta", "fedmp", "hermes") else []
    scores = run(tiny(*settings, *chosen, *extra, f"run.name={method}", method=method)).scores
    reported = ["test plugin/accuracy", "test model/accuracy", "test model/accuracy_client_mean"]
    reported += ["test fused:fusion/accuracy", "test fusion/accuracy", "test audio/accuracy"]
    score = next(scores[name] for name in reported if name in scores)
    assert score > 0.8, f"{method}: {score}"


@pytest.mark.slow
def test_a_failed_start_does_not_block_the_corrected_run(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="no tensor's name begins with 'model/head'"):
        run(tiny("method.personal=[model/head]", "run.name=retry", method="fedper"))
    corrected = run(tiny("run.name=retry", method="fedper"))
    assert corrected.finished
    reference = known(tiny(method="fedper"))
    assert_same_bits(reference, read_tensors(corrected.run_dir))


def test_moving_a_method_file_keeps_the_digest(tiny: Tiny, tmp_path: Path) -> None:
    digests = set()
    for folder in ("a", "b"):
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text("from raydfl import Method\n\n\nclass Mine(Method):\n    pass\n")
        digests.add(tiny(f"method.name={path}:Mine").digest())
    assert len(digests) == 1
    assert digests != {tiny().digest()}


@pytest.mark.slow
def test_the_state_is_the_same_with_and_without_a_resume(tiny: Tiny) -> None:
    """A method always sees its state as stored, including tuples, numeric keys and tensors with shared memory."""
    setting = f"method.name={EXTRA}:Twins"
    whole = known(tiny(setting))
    stop_after(tiny(setting, "run.name=parts"), 1)
    assert_same_bits(whole, train_federation(tiny(setting, "run.name=parts")))
