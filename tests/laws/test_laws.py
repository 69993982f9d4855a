"""The laws of the engine that need no Ray: order of arrival, whole commits, replay, read-only broadcasts, privacy, buffers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import differ, known, known_run

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
from raydfl.methods import Method
from raydfl.methods._server_optimiser import ServerOptimiser
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


def as_in_other_laws(method: str, together: int) -> list[str]:
    """Settings that several laws share: what they compare is trained once for all."""
    # FedOpt's usual eps turns the rounding of a change near 0 into a whole step.
    return [f"train.together={together}", "evaluate.every=3", *(["method.eps=0.001"] if method == "fedopt" else [])]


def alike(method: str) -> bool:
    """Whether it differs from FedAdam, which stands for all, by the formula of a step of the server alone."""
    cls = registry.find("raydfl.methods", method, Method, "method")
    return issubclass(cls, ServerOptimiser) and method != "fedadam"


def in_ways(
    *ways: int, every: Sequence[str] = tuple(METHODS), all_of: Sequence[str] = ("fedavg", "fedmlac")
) -> list[Any]:
    """Methods in the first of several ways, and those of ``all_of`` in all; the other pairs are slow."""
    return [
        pytest.param(
            way,
            method,
            marks=[] if (way == ways[0] and not alike(method)) or method in all_of else [pytest.mark.slow],
        )
        for way in ways
        for method in every
    ]


def every_method() -> list[Any]:
    """All, those that are alike in the slow suite."""
    return [pytest.param(method, marks=[pytest.mark.slow] if alike(method) else []) for method in METHODS]


class WatchedPool(SerialPool):
    """Delivers replies in a random order, and keeps every byte that goes out and comes back."""

    def __init__(self, worker: Worker, seed: int) -> None:
        super().__init__(worker)
        self.random = random.Random(seed)
        self.bytes: list[bytes] = []

    def _note(self, value: object) -> None:
        self.bytes.append(pickle.dumps(value, protocol=5))

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        shuffled = split_groups(orders)
        self.random.shuffle(shuffled)
        replies = [reply for group in shuffled for reply in self.workers[""].carry_out(group, broadcast)]
        self.random.shuffle(replies)
        for value in (orders, broadcast, replies):
            self._note(value)
        yield from replies

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        return {}


def finish_watched(config: Config, seed: int = 0) -> tuple[dict[str, bytes], WatchedPool, Path]:
    run_dir = create(config, Progress("quiet"))
    store = RunStore(run_dir)
    pool = WatchedPool(Worker(run_dir, config, PrivateStore(run_dir / "private")), seed)
    federation = Federation(config, Population.load(run_dir / "population"), store, pool)
    while federation.state.round_index < config.train.rounds:
        federation.round()
    federation.close()
    pool.close()
    return read_tensors(run_dir), pool, run_dir


def committed_round(server: Server) -> None:
    """One round, on the disk when this returns."""
    server.round()
    server.finish()


@pytest.mark.parametrize(("together", "method"), in_ways(2, 1))  # two together, and the third of a cohort alone
def test_law_1_any_order_of_work_and_arrival_gives_the_same_bits(tiny: Tiny, method: str, together: int) -> None:
    settings = as_in_other_laws(method, together)
    shuffled, _, _ = finish_watched(tiny("run.name=shuffled", *settings, method=method), seed=together)
    assert_same_bits(known(tiny(*settings, method=method)), shuffled)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("how", ["entry", "layer", "frozen", "hook", "gradient hook", "buffer", "more entries"])
def test_law_1_a_client_leaves_nothing_in_a_network(tiny: Tiny, how: str, together: int) -> None:
    """What each client does to its networks after its training is seen by nobody else."""
    settings = (f"train.together={together}", "train.cohort=1.0", "data.speakers=4", "train.rounds=2")
    undisturbed = known(tiny(*settings, "method.how=''", method=f"{EXTRA}:Untidy"))
    assert_same_bits(
        undisturbed, train_federation(tiny("run.name=untidy", *settings, f"method.how={how}", method=f"{EXTRA}:Untidy"))
    )


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("method", every_method())
def test_a_network_is_built_once_for_all_clients(
    tiny: Tiny, method: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no client's code has changed is not built again; and raydfl's own code, of which that is believed, changes nothing."""
    made: list[Replica] = []

    def make(*arguments: Any) -> Replica:
        made.append(Replica(*arguments))
        return made[-1]

    monkeypatch.setattr(networks, "Replica", make)
    config = tiny("train.cohort=1.0", "data.speakers=3", f"train.together={together}", method=method)
    server = start_server(config)
    kinds = len(Clients(Population.load(Path(config.run.dir) / "tiny" / "population"), config).variants())
    server.round()
    first = len(made)
    assert kinds <= first <= kinds * together + 1  # and once for the server's own evaluation
    server.round()
    next_phase = len(type(config.components.method).phases) > 1  # in which the server may measure other models
    assert len(made) <= first + next_phase
    users = "extra_methods" in method
    for replica in made:
        assert (replica.networks is None) == users
        assert replica._parts.unchanged
    server.close()


@pytest.mark.parametrize("method", every_method())
def test_law_8_clients_trained_together_end_as_alone(tiny: Tiny, method: str) -> None:
    """To float tolerance, through the whole engine: private state, server optimisers and evaluation included."""
    ends = {}
    for together in (1, 2):
        settings = as_in_other_laws(method, together)
        if method.startswith(
            "profila"
        ):  # clients with learning rates of their own, or without a prototype yet, train apart
            settings += ["train.cohort=1.0", "method.adaptive_lr=false"]
        run_dir = known_run(tiny(*settings, method=method))
        commit = RunStore(run_dir).load(RunStore(run_dir).latest() or "")
        private = PrivateStore(run_dir / "private")
        ends[together] = {f"{k} {n}": t for k, group in commit.state.tensors.items() for n, t in group.items()}
        ends[together] |= {f"{i} {n}": t for i, ref in commit.private.items() for n, t in private.read(ref).items()}
        rows = record.read_rows(run_dir).to_pylist()
        shares = [row["value"] for row in rows if row["metric"] == "vectorised"]
        # The third of a cohort trains alone; in the last round each may have another network, where devices differ.
        whole = 1.0 if method.startswith("profila") else 2 / 3
        assert shares[:2] == ([] if together == 1 else [pytest.approx(whole)] * 2)
    assert ends[1].keys() == ends[2].keys()
    for name, tensor in ends[1].items():
        torch.testing.assert_close(ends[2][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_law_1_the_seed_decides(tiny: Tiny) -> None:
    assert_same_bits(train_federation(tiny("run.name=a")), train_federation(tiny("run.name=b")))
    assert differ(train_federation(tiny("run.name=c")), train_federation(tiny("run.name=d", "run.seed=2")))


@pytest.mark.parametrize(("commit_every", "method"), in_ways(1, 2))
def test_law_2_stopping_anywhere_and_resuming_gives_the_same_bits(tiny: Tiny, method: str, commit_every: int) -> None:
    settings = as_in_other_laws(method, 1)
    undisturbed = known(tiny(*settings, method=method))
    config = tiny(*settings, f"run.commit_every={commit_every}", "run.name=stopped", method=method)
    for done in (1, 2):  # a process that ends after these rounds, without a word
        server = start_server(config)
        while server.round_index < done:
            server.round()
        server.close()
    server = start_server(config)
    assert server.round_index == 2
    server.close()
    assert_same_bits(undisturbed, train_federation(config))


@pytest.mark.parametrize("step", ["plan", "train", "aggregate", "rows", "commit file", "LATEST"])
def test_law_2_dying_anywhere_in_a_round_leaves_it_undone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Each place at which a process could be lost is cut in the second round; what is on the disk then is all there is."""
    import raydfl.engine.storage.committer
    import raydfl.engine.storage.store
    from raydfl.methods.fedmlac import FedMLAC

    undisturbed = known(tiny(method="fedmlac"))
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
            committed_round(server)
    server.close()
    again = start_server(config)
    assert again.round_index == 1
    again.close()
    assert_same_bits(undisturbed, train_federation(config))


def test_law_2_a_commit_holds_the_state_as_it_was(tiny: Tiny) -> None:
    """A method may change in the next round what it returned in this one: the commit is written meanwhile."""
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
    held = store.load(store.latest() or "").state.tensors["global"]
    assert all(torch.equal(held[name], before[name]) for name in before)


def test_law_2_nothing_counts_of_a_round_that_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within one process: the same server does the round again, to the same bits."""
    from raydfl.methods.fedmlac import FedMLAC

    undisturbed = known(tiny(method="fedmlac"))
    config = tiny("run.name=failing", method="fedmlac")
    server = start_server(config)
    server.round()
    original = FedMLAC.aggregate

    def failing(self: FedMLAC, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        raise KeyError("a method's own mistake")

    with monkeypatch.context() as patch:
        patch.setattr(FedMLAC, "aggregate", failing)
        with pytest.raises(ClientError, match="KeyError"):
            server.round()
    while server.round_index < config.train.rounds:
        server.round()
    server.close()
    assert_same_bits(undisturbed, read_tensors(Path(config.run.dir) / "failing"))


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


def test_law_3_a_round_touches_only_its_cohort(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening data or private state of anybody else would be noticed."""
    config = tiny("train.rounds=3", "train.cohort=2", method="fedmlac")
    touched: list[int] = []
    original = Population.data
    monkeypatch.setattr(
        Population, "data", lambda self, index, attacking=False: (touched.append(index), original(self, index))[1]
    )
    server = start_server(config)
    for _ in range(3):
        touched.clear()
        server.round()
        assert len(set(touched)) == 2
    server.close()


def test_law_4_a_client_cannot_change_what_others_read(tiny: Tiny) -> None:
    assert_same_bits(
        train_federation(tiny("run.name=a", f"method.name={EXTRA}:Vandal")), train_federation(tiny("run.name=b"))
    )


@pytest.mark.parametrize("method", ["fedmlac", "fedper", "fedkad"])
def test_law_5_no_byte_of_private_state_is_sent(tiny: Tiny, method: str) -> None:
    _, pool, run_dir = finish_watched(tiny(method=method))
    store = RunStore(run_dir)
    sent = b"".join(pool.bytes)
    private = PrivateStore(run_dir / "private")
    checked = 0
    for name in store.commits():
        for ref in store.load(name).private.values():
            for tensor in private.read(ref).values():
                # Every stretch of 16 bytes of a tensor that is not all zeros identifies it.
                data = to_bytes(tensor)
                for at in range(0, len(data) - 15, 16):
                    piece = data[at : at + 16]
                    if len(set(piece)) > 8:
                        checked += 1
                        assert piece not in sent
    assert checked > 20


def test_law_5_the_search_finds_what_is_sent(tiny: Tiny) -> None:
    _, pool, run_dir = finish_watched(tiny("train.rounds=2"))
    store = RunStore(run_dir)
    first = store.load(store.commits()[1])  # sent out in round 2
    sent = b"".join(pool.bytes)
    for tensor in first.state.tensors["global"].values():
        assert to_bytes(tensor)[:16] in sent


def test_law_5_sending_a_private_tensor_is_refused(tiny: Tiny) -> None:
    server = start_server(tiny(f"method.name={EXTRA}:Leaking"))
    with pytest.raises(ClientError, match=r"shared\(\) keeps private: model/output.weight, model/output.bias"):
        server.round()
    server.close()


def test_law_6_floating_buffers_are_averaged_counters_stay(tiny: Tiny) -> None:
    settings = ["train.rounds=1", "train.cohort=1.0", "train.batch_size=5", "run.name=buffers"]
    config = tiny(f"models.model={EXTRA}:WithBuffers", *settings)
    run_dir = run(config).run_dir
    tensors = final_state(run_dir).tensors["global"]
    assert not any("num_batches_tracked" in name for name in tensors)
    # The same round by hand: each client trains alone, the mean of its running statistics weighted by its examples.
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


def test_counters_do_not_pass_from_one_client_to_the_next(tiny: Tiny) -> None:
    """The built network is re-loaded in place: its integer buffers must start afresh too."""
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


def test_private_weights_of_one_client_do_not_move_while_others_train(tiny: Tiny) -> None:
    config = tiny("train.cohort=1", "train.rounds=6", method="fedmlac")
    server = start_server(config)
    run_dir = Path(config.run.dir) / "tiny"
    store, private = RunStore(run_dir), PrivateStore(run_dir / "private")
    seen: dict[int, dict[str, bytes]] = {}
    moved = 0
    for _ in range(6):
        server.round()
        server.finish()
        commit = store.load(store.latest() or "")
        now = {i: {n: to_bytes(t) for n, t in private.read(ref).items()} for i, ref in commit.private.items()}
        changed = [i for i in now if i not in seen or seen[i] != now[i]]
        assert len(changed) == 1  # the one client of the round
        moved += 1
        seen = now
    server.close()
    assert moved == 6
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("commit_every", "method"), in_ways(1, 3, every=["fedavg", "fedmlac", "scaffold", "fedkad"], all_of=["fedmlac"])
)
def test_a_replayed_update_is_the_one_that_was_sent(tiny: Tiny, method: str, commit_every: int) -> None:
    config = tiny("train.rounds=4", "run.keep=9", f"run.commit_every={commit_every}", method=method)
    run_dir = create(config, Progress("quiet"))
    worker = Worker(run_dir, config, PrivateStore(run_dir / "private"))
    sent: dict[tuple[int, str], np.ndarray] = {}

    class Recording(SerialPool):
        def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
            for reply in super().run(orders, broadcast):
                if reply.update is not None:
                    sent[orders[0].round_index + 1, reply.client_id] = FlatTensors.from_tensors(
                        reply.update.tensors
                    ).vector.copy()
                yield reply

    federation = Federation(config, worker.population, RunStore(run_dir, keep=9), Recording(worker))
    while federation.state.round_index < 4:
        federation.round()
    federation.close()
    before = read_tensors(run_dir)
    for (round_number, client_id), vector in sent.items():
        replayed = replay(run_dir, round_number, client_id)
        assert replayed.update is not None
        assert np.array_equal(FlatTensors.from_tensors(replayed.update.tensors).vector, vector)
    assert_same_bits(before, read_tensors(run_dir))  # the run is not changed


def test_replay_says_who_took_part_and_what_is_kept(tiny: Tiny) -> None:
    config = tiny("train.rounds=5", "run.keep=2", "train.cohort=1")
    run_dir = run(config).run_dir
    with pytest.raises(RunDirectoryError, match="round 1 .* cannot be replayed.*Choose round 5 or later"):
        replay(run_dir, 1, "s0")
    with pytest.raises(InputError, match="is not in the cohort of round 5[.] Choose one of 's[0-5]'"):
        replay(run_dir, 5, "nobody")


def test_a_failing_method_stops_the_run_with_place_and_replay_line(tiny: Tiny) -> None:
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


def test_an_update_that_is_not_finite_is_rejected_and_recorded(tiny: Tiny) -> None:
    from raydfl.engine.storage import record

    config = tiny(
        f"method.name={EXTRA}:Diverging", "method.bad=[s1]", "train.cohort=1.0", "train.rounds=1", "run.name=bad"
    )
    run_dir = run(config).run_dir
    tensors = final_state(run_dir).tensors["global"]
    assert all(bool(torch.isfinite(t).all()) for t in tensors.values())
    failed = [r for r in record.to_rows(record.read_rows(run_dir)) if r.metric == "failed"]
    assert [(r.client, r.value) for r in failed] == [("", 1.0), ("s1", 1.0)]


def test_too_many_rejected_updates_stop_the_run(tiny: Tiny) -> None:
    config = tiny(f"method.name={EXTRA}:Diverging", "method.bad=[s0, s1, s2, s3]", "train.cohort=1.0", "run.name=worse")
    with pytest.raises(ClientError, match=r"4 of 6 clients were rejected .*not finite: model/.*max_failed=0.5"):
        run(config)
    assert final_state(Path(config.run.dir) / "worse").round_index == 0


def test_several_global_models_are_picked_and_all_evaluated(tiny: Tiny) -> None:
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


def test_a_longer_run_is_the_continuation_of_a_shorter_one(tiny: Tiny) -> None:
    long = train_federation(tiny("train.rounds=4", "run.name=long"))
    short = run(tiny("train.rounds=2", "run.name=short"))
    assert short.finished
    outcome = resume(short.run_dir, ["train.rounds=4"])
    assert (outcome.round, outcome.finished) == (4, True)
    assert_same_bits(long, read_tensors(short.run_dir))


def test_resuming_with_other_numbers_is_refused(tiny: Tiny) -> None:
    run_dir = run(tiny("train.rounds=1", "run.name=mine")).run_dir
    with pytest.raises(
        RunDirectoryError, match=r"belongs to another configuration \(train.optimiser.lr: 0.1 there, 0.7 here\)"
    ):
        resume(run_dir, ["train.optimiser.lr=0.7"])
    with pytest.raises(RunDirectoryError, match="another run.name"):
        run(tiny("train.rounds=1", "run.name=mine", "run.seed=9"))


@pytest.mark.parametrize("missing", ["run.json", "config.yaml"])
def test_a_half_written_run_directory_is_said(tiny: Tiny, missing: str) -> None:
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
