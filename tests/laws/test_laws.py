"""The laws of the engine without Ray: order of arrival, atomic commits, replay, read-only broadcasts, privacy and buffers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import differ, each_method, known, known_run, marks_of

from raydfl.cluster.server import Server
from raydfl.core import registry
from raydfl.core.errors import ClientError, ConfigError, InputError, RunDirectoryError
from raydfl.core.tensors import FlatTensors
from raydfl.data.population import Population
from raydfl.engine import networks
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.orders import Order, Reply, split_groups
from raydfl.engine.pool import SerialPool
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.private import PrivateRef, PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.runs._replay import replay
from raydfl.runs._run import resume, run
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, start_server, to_bytes, train_federation
from raydfl.training import Replica

Tiny = Callable[..., Config]


EXTRA = Path(__file__).parent.parent / "extra_methods.py"
METHODS = [
    *registry.names("raydfl.methods"),
    *(f"{EXTRA}:{name}" for name in ("SeveralGlobals", "TwoPhases", "Summing")),
]


def make_common_settings(method: str, together: int) -> list[str]:
    """Return the settings shared by several laws, so their reference runs train only once."""
    # FedOpt's usual eps turns the rounding of a change near 0 into a whole step.
    return [f"train.together={together}", "evaluate.every=3", *(["method.eps=0.001"] if method == "fedopt" else [])]


def make_method_params(
    *variants: int, every: Sequence[str] = tuple(METHODS), all_of: Sequence[str] = ("fedavg", "fedmlac")
) -> list[Any]:
    """Pair representatives with the first way, and ``all_of`` with every way. Mark the rest as slow."""
    return [
        pytest.param(
            variant,
            method,
            marks=marks_of(method) if variant == variants[0] or method in all_of else [pytest.mark.slow],
        )
        for variant in variants
        for method in every
    ]


class WatchedPool(SerialPool):
    """Pool with replies in random order, and a record of all bytes of orders, broadcasts and replies."""

    def __init__(self, worker: Worker, seed: int) -> None:
        super().__init__(worker)
        self.random = random.Random(seed)
        self.bytes: list[bytes] = []

    def _record(self, value: object) -> None:
        self.bytes.append(pickle.dumps(value, protocol=5))

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        shuffled = split_groups(orders)
        self.random.shuffle(shuffled)
        replies = [reply for group in shuffled for reply in self.workers[""].carry_out(group, broadcast)]
        self.random.shuffle(replies)
        for value in (orders, broadcast, replies):
            self._record(value)
        yield from replies

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        return {}


def finish_with_watched_pool(config: Config, seed: int = 0) -> tuple[dict[str, bytes], WatchedPool, Path]:
    run_dir = create(config, Progress("quiet"))
    store = RunStore(run_dir)
    pool = WatchedPool(Worker(run_dir, config, PrivateStore(run_dir / "private")), seed)
    federation = Federation(config, Population.load(run_dir / "population"), store, pool)
    while federation.state.round_index < config.train.rounds:
        federation.round()
    federation.close()
    pool.close()
    return read_tensors(run_dir), pool, run_dir


def train_and_commit_round(server: Server) -> None:
    """Train a round and wait until its commit is on disk."""
    server.round()
    server.finish()


@pytest.mark.parametrize(
    ("together", "method"), make_method_params(2, 1)
)  # Two clients of a cohort train batched, the third alone.
def test_law_1_any_order_of_work_and_arrival_gives_the_same_bits(tiny: Tiny, method: str, together: int) -> None:
    settings = make_common_settings(method, together)
    shuffled, _, _ = finish_with_watched_pool(tiny("run.name=shuffled", *settings, method=method), seed=together)
    assert_same_bits(known(tiny(*settings, method=method)), shuffled)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("how", ["entry", "layer", "frozen", "hook", "gradient hook", "buffer", "more entries"])
def test_law_1_no_client_sees_changes_to_a_network_by_another_client(tiny: Tiny, how: str, together: int) -> None:
    """Change each client's networks after its training. The rest of the cohort must not see the changes."""
    settings = (f"train.together={together}", "train.cohort=1.0", "data.speakers=4", "train.rounds=2")
    reference = known(tiny(*settings, "method.how=''", method=f"{EXTRA}:Untidy"))
    assert_same_bits(
        reference, train_federation(tiny("run.name=untidy", *settings, f"method.how={how}", method=f"{EXTRA}:Untidy"))
    )


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("method", each_method(METHODS))
def test_a_network_is_built_once_for_all_clients(
    tiny: Tiny, method: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks are reused unless a user's code changes them. raydfl's own code changes none."""
    replicas: list[Replica] = []

    def make(*arguments: Any) -> Replica:
        replicas.append(Replica(*arguments))
        return replicas[-1]

    monkeypatch.setattr(networks, "Replica", make)
    config = tiny("train.cohort=1.0", "data.speakers=3", f"train.together={together}", method=method)
    server = start_server(config)
    number_of_variants = len(Clients(Population.load(Path(config.run.dir) / "tiny" / "population"), config).variants())
    server.round()
    first = len(replicas)
    assert (
        number_of_variants <= first <= number_of_variants * together + 1
    )  # The server's evaluation builds its own network.
    server.round()
    # The next phase may evaluate different models on the server.
    next_phase = len(type(config.components.method).phases) > 1
    assert len(replicas) <= first + next_phase
    by_user = "extra_methods" in method
    for replica in replicas:
        assert (replica.networks is None) == by_user
        assert replica._parts.unchanged
    server.close()


@pytest.mark.parametrize("method", each_method(METHODS))
def test_law_8_batched_clients_equal_unbatched_clients(tiny: Tiny, method: str) -> None:
    """Compare whole runs to float tolerance, with private state, server optimisers and evaluation."""
    tensors_by_size = {}
    for together in (1, 2):
        settings = make_common_settings(method, together)
        # Clients with individual learning rates, or still without a prototype, train unbatched.
        if method.startswith("profila"):
            settings += ["train.cohort=1.0", "method.adaptive_lr=false"]
        run_dir = known_run(tiny(*settings, method=method))
        commit = RunStore(run_dir).load(RunStore(run_dir).latest() or "")
        private = PrivateStore(run_dir / "private")
        tensors_by_size[together] = {
            f"{k} {n}": t for k, group in commit.state.tensors.items() for n, t in group.items()
        }
        tensors_by_size[together] |= {
            f"{i} {n}": t for i, ref in commit.private.items() for n, t in private.read(ref).items()
        }
        rows = record.read_rows(run_dir).to_pylist()
        shares = [row["value"] for row in rows if row["metric"] == "vectorised"]
        # The third client of a cohort trains alone. In the last round networks may differ between devices.
        expected = 1.0 if method.startswith("profila") else 2 / 3
        assert shares[:2] == ([] if together == 1 else [pytest.approx(expected)] * 2)
    assert tensors_by_size[1].keys() == tensors_by_size[2].keys()
    for name, tensor in tensors_by_size[1].items():
        torch.testing.assert_close(tensors_by_size[2][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_law_1_the_seed_determines_the_result(tiny: Tiny) -> None:
    assert_same_bits(train_federation(tiny("run.name=a")), train_federation(tiny("run.name=b")))
    assert differ(train_federation(tiny("run.name=c")), train_federation(tiny("run.name=d", "run.seed=2")))


@pytest.mark.parametrize(("commit_every", "method"), make_method_params(1, 2))
def test_law_2_a_run_resumed_after_any_round_has_the_same_bits(tiny: Tiny, method: str, commit_every: int) -> None:
    settings = make_common_settings(method, 1)
    reference = known(tiny(*settings, method=method))
    config = tiny(*settings, f"run.commit_every={commit_every}", "run.name=stopped", method=method)
    for rounds in (1, 2):  # a process that ends after n rounds without closing the run
        server = start_server(config)
        while server.round_index < rounds:
            server.round()
        server.close()
    server = start_server(config)
    assert server.round_index == 2
    server.close()
    assert_same_bits(reference, train_federation(config))


@pytest.mark.parametrize("step", ["plan", "train", "aggregate", "rows", "commit file", "LATEST"])
def test_law_2_a_process_killed_during_a_round_leaves_no_trace_of_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Kill the process at each step of the second round. Only files on disk survive."""
    import raydfl.engine.storage.committer
    import raydfl.engine.storage.store
    from raydfl.methods.fedmlac import FedMLAC

    reference = known(tiny(method="fedmlac"))
    config = tiny("run.name=dying", method="fedmlac")
    server = start_server(config)
    server.round()
    server.finish()

    class Dead(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Dead

    calls = {"train": 0}
    with monkeypatch.context() as patch:
        if step == "plan":
            patch.setattr(FedMLAC, "plan", die)
        elif step == "train":
            original = Worker.carry_out

            def second_client(
                self: Worker,
                orders: Sequence[Order],
                broadcast: Mapping[str, FlatTensors],
                arrived: float | None = None,
            ) -> list[Reply]:
                calls["train"] += 1
                if calls["train"] == 2:
                    raise Dead
                return original(self, orders, broadcast, arrived)

            patch.setattr(Worker, "carry_out", second_client)
        elif step == "aggregate":
            patch.setattr(FedMLAC, "aggregate", die)
        elif step == "rows":
            patch.setattr(raydfl.engine.storage.committer.record, "write_rows", die)
        else:
            original_write = raydfl.engine.storage.store.write_durably

            def write(path: Path, data: bytes) -> None:
                if (path.name == "LATEST") == (step == "LATEST"):
                    raise Dead
                original_write(path, data)

            patch.setattr(raydfl.engine.storage.store, "write_durably", write)
        with pytest.raises(Dead):
            train_and_commit_round(server)
    server.close()
    again = start_server(config)
    assert again.round_index == 1
    again.close()
    assert_same_bits(reference, train_federation(config))


def test_law_2_a_commit_is_a_snapshot_of_the_state(tiny: Tiny) -> None:
    """Change the returned state in place, as a method may do in the next round, before the commit is written."""
    config = tiny("run.name=held")
    server = start_server(config)
    server.round()
    state = server._federation.state
    before = {name: tensor.clone() for name, tensor in state.tensors["global"].items()}
    for tensor in state.tensors["global"].values():
        tensor.add_(1.0)
    server.finish()
    server.close()
    store = RunStore(Path(config.run.dir) / "held")
    committed = store.load(store.latest() or "").state.tensors["global"]
    assert all(torch.equal(committed[name], before[name]) for name in before)


def test_law_2_a_failed_round_leaves_no_trace(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat the failed round on the same server of the same process, with the same bits."""
    from raydfl.methods.fedmlac import FedMLAC

    reference = known(tiny(method="fedmlac"))
    config = tiny("run.name=failing", method="fedmlac")
    server = start_server(config)
    server.round()
    original = FedMLAC.aggregate

    def aggregate_and_fail(self: FedMLAC, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        raise KeyError("a method's own mistake")

    with monkeypatch.context() as patch:
        patch.setattr(FedMLAC, "aggregate", aggregate_and_fail)
        with pytest.raises(ClientError, match="KeyError"):
            server.round()
    while server.round_index < config.train.rounds:
        server.round()
    server.close()
    assert_same_bits(reference, read_tensors(Path(config.run.dir) / "failing"))


def test_law_2_rows_are_recorded_once_each(tiny: Tiny) -> None:
    from raydfl.engine.storage import record

    config = tiny("train.rounds=4", "run.commit_every=2", "run.name=rows")
    server = start_server(config)
    for _ in range(3):  # round 3 is lost
        server.round()
    server.close()
    train_federation(config)
    table = record.read_rows(Path(config.run.dir) / "rows")
    rows = zip(*(table.column(name).to_pylist() for name in ("round", "metric", "client")), strict=True)
    rounds = [number for number, metric, client in rows if metric == "loss" and not client]
    assert rounds == [1, 2, 3, 4]


def test_law_3_a_round_opens_only_its_cohort(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record every client with opened data or private state."""
    config = tiny("train.rounds=3", "train.cohort=2", method="fedmlac")
    clients: list[int] = []
    original = Population.data
    monkeypatch.setattr(
        Population, "data", lambda self, index, attacking=False: (clients.append(index), original(self, index))[1]
    )
    server = start_server(config)
    for _ in range(3):
        clients.clear()
        server.round()
        assert len(set(clients)) == 2
    server.close()


def test_law_4_a_client_cannot_change_the_broadcast_of_another_client(tiny: Tiny) -> None:
    assert_same_bits(
        train_federation(tiny("run.name=a", f"method.name={EXTRA}:Vandal")), train_federation(tiny("run.name=b"))
    )


@pytest.mark.parametrize("method", ["fedmlac", "fedper", "fedkad"])
def test_law_5_no_byte_of_private_state_is_sent(tiny: Tiny, method: str) -> None:
    _, pool, run_dir = finish_with_watched_pool(tiny(method=method))
    store = RunStore(run_dir)
    traffic = b"".join(pool.bytes)
    private = PrivateStore(run_dir / "private")
    count = 0
    for name in store.commits():
        for ref in store.load(name).private.values():
            for tensor in private.read(ref).values():
                # 16 bytes with more than 8 distinct values identify a tensor.
                data = to_bytes(tensor)
                for start in range(0, len(data) - 15, 16):
                    piece = data[start : start + 16]
                    if len(set(piece)) > 8:
                        count += 1
                        assert piece not in traffic
    assert count > 20


def test_law_5_the_search_finds_the_broadcast(tiny: Tiny) -> None:
    _, pool, run_dir = finish_with_watched_pool(tiny("train.rounds=2"))
    store = RunStore(run_dir)
    first = store.load(store.commits()[1])  # broadcast in round 2
    traffic = b"".join(pool.bytes)
    for tensor in first.state.tensors["global"].values():
        assert to_bytes(tensor)[:16] in traffic


def test_law_5_sending_a_private_tensor_is_rejected(tiny: Tiny) -> None:
    server = start_server(tiny(f"method.name={EXTRA}:Leaking"))
    with pytest.raises(ClientError, match=r"shared\(\) keeps private: model/output.weight, model/output.bias"):
        server.round()
    server.close()


def test_law_6_floating_buffers_are_averaged_and_counters_are_not(tiny: Tiny) -> None:
    settings = ["train.rounds=1", "train.cohort=1.0", "train.batch_size=5", "run.name=buffers"]
    config = tiny(f"models.model={EXTRA}:WithBuffers", *settings)
    run_dir = run(config).run_dir
    tensors = final_state(run_dir).tensors["global"]
    assert not any("num_batches_tracked" in name for name in tensors)
    # Repeat the round by hand: train each client alone and average the running statistics, weighted by examples.
    store, means, weights = RunStore(run_dir), [], []
    worker = Worker(run_dir, config, PrivateStore(run_dir / "scratch"))
    first = store.load(store.commits()[0]).state
    broadcast = {"global": FlatTensors.from_tensors(first.tensors["global"])}
    federation = Federation(config, worker.population, RunStore(run_dir / "other"), SerialPool(worker))
    for order in federation.plan():
        update = worker.carry_out([order], broadcast)[0].update
        assert update is not None
        means.append(update.tensors["model/normalise.running_mean"].double())
        weights.append(update.weight)
    expected = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    torch.testing.assert_close(tensors["model/normalise.running_mean"].double(), expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(
        tensors["model/normalise.running_mean"], first.tensors["global"]["model/normalise.running_mean"]
    )


def test_counters_start_at_zero_for_every_client(tiny: Tiny) -> None:
    """Inspect the integer buffers of a network after loading it again in place."""
    config = tiny(f"models.model={EXTRA}:WithBuffers")
    run_dir = create(config, Progress("quiet"))
    worker = Worker(run_dir, config, PrivateStore(run_dir / "private"))
    federation = Federation(config, worker.population, RunStore(run_dir), SerialPool(worker))
    order = federation.plan()[0]
    for _ in range(2):
        step = worker.prepare(order, federation.broadcast({"global"}))
        assert int(step.models["model"].normalise.num_batches_tracked) == 0
        step.models["model"].normalise.num_batches_tracked += 5
        step.models["model"].output.weight.requires_grad_(False)
    assert step.models["model"] is worker.prepare(order, federation.broadcast({"global"})).models["model"]
    assert all(p.requires_grad for p in step.models["model"].parameters())


def test_training_a_client_leaves_private_weights_of_the_others_unchanged(tiny: Tiny) -> None:
    config = tiny("train.cohort=1", "train.rounds=6", method="fedmlac")
    server = start_server(config)
    run_dir = Path(config.run.dir) / "tiny"
    store, private = RunStore(run_dir), PrivateStore(run_dir / "private")
    latest: dict[int, dict[str, bytes]] = {}
    rounds = 0
    for _ in range(6):
        server.round()
        server.finish()
        commit = store.load(store.latest() or "")
        current = {i: {n: to_bytes(t) for n, t in private.read(ref).items()} for i, ref in commit.private.items()}
        changed = [i for i in current if i not in latest or latest[i] != current[i]]
        assert len(changed) == 1  # the round's only client
        rounds += 1
        latest = current
    server.close()
    assert rounds == 6
    assert len(latest) > 1


@pytest.mark.parametrize(
    ("commit_every", "method"),
    make_method_params(1, 3, every=["fedavg", "fedmlac", "scaffold", "fedkad"], all_of=["fedmlac"]),
)
def test_a_replayed_update_equals_the_sent_update(tiny: Tiny, method: str, commit_every: int) -> None:
    config = tiny("train.rounds=4", "run.keep=9", f"run.commit_every={commit_every}", method=method)
    run_dir = create(config, Progress("quiet"))
    worker = Worker(run_dir, config, PrivateStore(run_dir / "private"))
    vectors: dict[tuple[int, str], np.ndarray] = {}

    class Recording(SerialPool):
        def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
            for reply in super().run(orders, broadcast):
                if reply.update is not None:
                    vectors[orders[0].round_index + 1, reply.client_id] = FlatTensors.from_tensors(
                        reply.update.tensors
                    ).vector.copy()
                yield reply

    federation = Federation(config, worker.population, RunStore(run_dir, keep=9), Recording(worker))
    while federation.state.round_index < 4:
        federation.round()
    federation.close()
    before = read_tensors(run_dir)
    for (round_number, client_id), vector in vectors.items():
        reply = replay(run_dir, round_number, client_id)
        assert reply.update is not None
        assert np.array_equal(FlatTensors.from_tensors(reply.update.tensors).vector, vector)
    assert_same_bits(before, read_tensors(run_dir))  # replay leaves the run unchanged


def test_replay_errors_name_the_cohort_and_the_kept_rounds(tiny: Tiny) -> None:
    config = tiny("train.rounds=5", "run.keep=2", "train.cohort=1")
    run_dir = run(config).run_dir
    with pytest.raises(RunDirectoryError, match="round 1 .* cannot be replayed.*Choose round 5 or later"):
        replay(run_dir, 1, "s0")
    with pytest.raises(InputError, match="is not in the cohort of round 5[.] Choose one of 's[0-5]'"):
        replay(run_dir, 5, "nobody")


def test_a_failing_method_stops_the_run_with_place_and_replay_command(tiny: Tiny) -> None:
    config = tiny(f"method.name={EXTRA}:Failing", "method.client=s2", "train.cohort=1.0", "run.name=failing")
    message = r"client 's2' failed in round 2, phase 'train': ZeroDivisionError: a method's own mistake"
    with pytest.raises(ClientError, match=message) as caught:
        run(config)
    line = str(caught.value).splitlines()[-1]
    assert line.endswith("--round 2 --client s2")
    run_dir = Path(config.run.dir) / "failing"
    assert final_state(run_dir).round_index == 1
    with pytest.raises(ClientError) as again:
        replay(run_dir, 2, "s2")
    assert isinstance(again.value.__cause__, ZeroDivisionError)


def test_a_non_finite_update_is_rejected_and_recorded(tiny: Tiny) -> None:
    from raydfl.engine.storage import record

    config = tiny(
        f"method.name={EXTRA}:Diverging", "method.bad=[s1]", "train.cohort=1.0", "train.rounds=1", "run.name=bad"
    )
    run_dir = run(config).run_dir
    tensors = final_state(run_dir).tensors["global"]
    assert all(bool(torch.isfinite(t).all()) for t in tensors.values())
    failures = [r for r in record.to_rows(record.read_rows(run_dir)) if r.metric == "failed"]
    assert [(r.client, r.value) for r in failures] == [("", 1.0), ("s1", 1.0)]


def test_too_many_rejected_updates_stop_the_run(tiny: Tiny) -> None:
    config = tiny(f"method.name={EXTRA}:Diverging", "method.bad=[s0, s1, s2, s3]", "train.cohort=1.0", "run.name=worse")
    with pytest.raises(ClientError, match=r"4 of 6 clients were rejected .*not finite: model/.*max_failed=0.5"):
        run(config)
    assert final_state(Path(config.run.dir) / "worse").round_index == 0


def test_several_global_models_are_all_evaluated_and_exported(tiny: Tiny) -> None:
    outcome = run(
        tiny(f"method.name={EXTRA}:SeveralGlobals", "method.number=2", "train.cohort=1.0", "run.name=several")
    )
    assert {"test model-0:model/accuracy", "test model-1:model/accuracy"} <= set(outcome.scores)
    assert (outcome.run_dir / "model-model-0.safetensors").exists()
    assert (outcome.run_dir / "model-model-1.safetensors").exists()


def test_two_phases_and_their_state_survive(tiny: Tiny) -> None:
    config = tiny(f"method.name={EXTRA}:TwoPhases", "train.rounds=4", "run.name=phases")
    run_dir = run(config).run_dir
    state = final_state(run_dir)
    assert state.extra == {"phase": "distil"}
    assert set(state.tensors) == {"global", "teacher"}
    at_switch = [n for n in RunStore(run_dir).commits() if n.startswith("000002")]
    teacher = RunStore(run_dir).load(at_switch[0]).state.tensors["teacher"]
    for name, value in teacher.items():
        assert torch.equal(value, state.tensors["teacher"][name])


def test_extending_a_run_equals_a_longer_run(tiny: Tiny) -> None:
    long = train_federation(tiny("train.rounds=4", "run.name=long"))
    short = run(tiny("train.rounds=2", "run.name=short"))
    assert short.finished
    outcome = resume(short.run_dir, ["train.rounds=4"])
    assert (outcome.round, outcome.finished) == (4, True)
    assert_same_bits(long, read_tensors(short.run_dir))


def test_resuming_with_different_settings_is_rejected(tiny: Tiny) -> None:
    run_dir = run(tiny("train.rounds=1", "run.name=mine")).run_dir
    with pytest.raises(
        RunDirectoryError, match=r"belongs to another configuration \(train.optimiser.lr: 0.1 there, 0.7 here\)"
    ):
        resume(run_dir, ["train.optimiser.lr=0.7"])
    with pytest.raises(RunDirectoryError, match="another run.name"):
        run(tiny("train.rounds=1", "run.name=mine", "run.seed=9"))


@pytest.mark.parametrize("missing", ["run.json", "config.yaml"])
def test_an_incomplete_run_directory_is_reported(tiny: Tiny, missing: str) -> None:
    run_dir = run(tiny("train.rounds=1")).run_dir
    (run_dir / missing).unlink()
    with pytest.raises(RunDirectoryError, match="interrupted before it began"):
        resume(run_dir)


def test_a_cohort_larger_than_the_population_is_an_error(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"train.cohort: 7 clients a round, but the population has 6"):
        run(tiny("train.cohort=7"))


def test_one_server_at_a_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    server = start_server(config)
    try:
        lock = RunStore.lock
        monkeypatch.setattr(RunStore, "lock", lambda self: lock(self, wait=0.1))
        with pytest.raises(RunDirectoryError, match="in use by process"):
            Server(Path(config.run.dir) / "tiny", config)
    finally:
        server.close()
