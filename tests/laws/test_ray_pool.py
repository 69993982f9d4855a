"""Laws 1, 3 and 4 on Ray: any number of actors gives the bits of the serial pool, also after actors die."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers import known

from raydfl.cluster.actors import ActorPool
from raydfl.cluster.pool import RayPool
from raydfl.cluster.server import Server
from raydfl.core.errors import ClientError, ResourcesError
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.orders import Order, Reply
from raydfl.engine.storage.store import RunStore
from raydfl.engine.telemetry import RoundReport
from raydfl.runs._run import OnRound, resume, run
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.runs.result import Result
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
EXTRA = Path(__file__).parent.parent / "extra_methods.py"
pytestmark = [pytest.mark.usefixtures("ray_session", "free_cpus"), pytest.mark.slow]


BLOCKS = ("train.cohort=1.0", "train.block=2")
PRUNING = (*BLOCKS, "method.vl=0.2", "method.vh=0.2")
"""A client out of six is excluded from each layer on each side."""


ASYNCHRONOUS = (
    "data.speakers=8",
    "train.rounds=8",
    "train.fleet={buffer: 2, concurrency: 6, seconds: {spread: 1.5}}",
)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", ()),
        ("fedmlac", ()),
        ("fedmlac", PRUNING),
        ("scaffold", ()),
        ("scaffold", BLOCKS),
        ("scaffold", ASYNCHRONOUS),
        ("fedavg", (*ASYNCHRONOUS, "train.together=4")),
        ("fedmlac", (*ASYNCHRONOUS, "train.fleet.buffer=1", "train.rounds=16", "evaluate.every=5")),
    ],
)
def test_law_1_serial_and_1_2_and_4_actors_give_the_same_bits(
    tiny: Tiny, method: str, settings: tuple[str, ...]
) -> None:
    reference = known(tiny(*settings, method=method))
    for actors in (1, 2, 4):
        outcome = run(tiny(f"run.name=actors{actors}", f"ray.actors={actors}", *settings, method=method))
        assert_same_bits(reference, read_tensors(outcome.run_dir))


def test_data_parts_on_2_actors_give_the_bits_of_the_serial_pool(tiny: Tiny) -> None:
    parts = "data.parts={low: {speakers: 4}, high: {classes: 5, first: 10, speakers: 3}}"
    reference = known(tiny(parts, "train.rounds=2"))
    assert_same_bits(
        reference, read_tensors(run(tiny(parts, "run.name=actors", "ray.actors=2", "train.rounds=2")).run_dir)
    )


@pytest.mark.parametrize(
    ("method", "settings"), [("fedmlac", ()), ("fedmlac", PRUNING), ("fedper", ("train.cohort=3", "train.block=2"))]
)
def test_an_actor_for_each_client_gives_the_same_bits(tiny: Tiny, method: str, settings: tuple[str, ...]) -> None:
    reference = known(tiny(*settings, method=method))
    outcome = run(tiny("run.name=own", "ray.actors=per_client", "ray.cpus=0.5", *settings, method=method))
    assert_same_bits(reference, read_tensors(outcome.run_dir))


def test_actors_lost_before_each_pass_train_their_blocks_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """End an actor with trained blocks before the first pass, and another before the second."""
    killed = []
    start = ActorPool.start

    def kill_and_start(pool: ActorPool, orders: Sequence[Order], *more: Any) -> list[Reply]:
        if orders[0].repeats:
            key, slot = next(iter(pool._held.holders.values()))
            os.kill(ray.get(slot.actor.process_id.remote()), signal.SIGKILL)
            killed.append(key)
        return start(pool, orders, *more)

    reference = known(tiny(*PRUNING, "train.rounds=1", method="fedmlac"))
    config = tiny(*PRUNING, "train.rounds=1", "run.name=lost", "ray.actors=2", method="fedmlac")
    run_dir = create(config, Progress("quiet"))
    monkeypatch.setattr(ActorPool, "start", kill_and_start)
    with contextlib.closing(Server(run_dir, config)) as server:
        server.round()
        server.finish()
    assert len(killed) == 2
    assert_same_bits(reference, read_tensors(run_dir))


def test_a_server_lost_between_the_passes_repeats_the_round(tiny: Tiny, tmp_path: Path) -> None:
    mark = tmp_path / "killed"
    rule = f"method.rule={{name: {EXTRA}:KilledLPA, vl: 0.2, vh: 0.2, mark: {mark}}}"
    outcome = run(tiny(*BLOCKS, rule, "run.name=server", "ray.actors=2"))
    assert mark.exists()
    assert_same_bits(known(tiny(*BLOCKS, rule)), read_tensors(outcome.run_dir))


def test_law_4_a_vandal_in_an_actor_leaves_the_bits_unchanged(tiny: Tiny) -> None:
    reference = known(tiny())
    outcome = run(tiny("run.name=vandal", f"method.name={EXTRA}:Vandal", "ray.actors=2"))
    assert_same_bits(reference, read_tensors(outcome.run_dir))


def test_an_exception_of_a_method_on_the_server_ends_the_run(tiny: Tiny) -> None:
    """Use a LookupError. It was once mistaken for a missing remote server and retried for ever."""
    with pytest.raises(ClientError, match="KeyError: 'no such entry'"):
        run(tiny(f"method.name={EXTRA}:Forgetful", "run.name=forgetful", "ray.actors=1"))


def test_an_exception_of_a_method_in_an_actor_keeps_its_message(tiny: Tiny) -> None:
    with pytest.raises(ClientError, match=r"client 's2' failed in round 2.*ZeroDivisionError: a method's own mistake"):
        run(tiny(f"method.name={EXTRA}:Failing", "method.client=s2", "train.cohort=1.0", "ray.actors=2"))


def test_missing_resources_are_reported_with_numbers(tiny: Tiny) -> None:
    with pytest.raises(ResourcesError, match=r"8 client actors with 1 CPU each need 8 CPU, but the cluster has 4"):
        run(tiny("ray.actors=8"))
    with pytest.raises(ResourcesError, match=r"3 client actors with 0.5 GPU each need 1.5 GPU, but the cluster has 1"):
        run(tiny("ray.actors=3", "ray.gpus=0.5"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="applies to machines without CUDA")
def test_a_missing_gpu_is_rejected_unless_cpu_fallback_is_allowed(tiny: Tiny) -> None:
    """Give Ray a logical GPU unknown to PyTorch. The CPU gives the bits of a run without a GPU share."""
    share = ("run.name=gpu", "ray.gpus=0.25")
    with pytest.raises(
        ResourcesError, match=r"ray.gpus=0.25, but PyTorch finds no GPU: .* is built for CUDA .*\. Install"
    ):
        run(tiny(*share, "ray.actors=2"))
    with pytest.raises(ResourcesError, match=r"ray.gpus=0.1, but PyTorch finds no GPU"):
        run(tiny("run.name=each", "ray.gpus=0.1", "ray.actors=per_client", "ray.cpus=0.1"))
    lines, outcome = run_on_cpu_fallback(tiny(*share, "ray.actors=2", "ray.cpu_fallback=true"), actors=2)
    assert_same_bits(known(tiny()), read_tensors(outcome.run_dir))
    warning = next(number for number, line in enumerate(lines) if line.startswith("warning: client actors on the CPU"))
    assert warning < next(number for number, line in enumerate(lines) if line.startswith("round 1"))


def run_on_cpu_fallback(config: Config, actors: int, on_round: OnRound | None = None) -> tuple[list[str], Result]:
    """Train on the CPU instead of a GPU, and check that the output and run.json report it for ``actors`` actors."""
    output = io.StringIO()
    outcome = run(config, Progress("lines", output), on_round)
    lines = output.getvalue().splitlines()
    assert lines[0] == "ray.cpu_fallback: clients train on the CPU if PyTorch finds no GPU"
    reason = json.loads((outcome.run_dir / "run.json").read_text())["cpu_fallback"]
    assert reason.startswith(f"client actors on the CPU: {actors}; ")
    assert f"warning: {reason}" in lines
    return lines, outcome


@pytest.mark.skipif(torch.cuda.is_available(), reason="applies to machines without CUDA")
def test_a_cpu_fallback_is_reported_for_actors_that_start_later(tiny: Tiny) -> None:
    """Use an actor for each client and for the server's evaluation, then an actor that gets CPUs only after the first round."""
    common = ("ray.gpus=0.1", "ray.cpu_fallback=true", "train.cohort=1.0")
    run_on_cpu_fallback(tiny("run.name=each", "ray.actors=per_client", "ray.cpus=0.1", *common), actors=7)

    config = tiny("run.name=late", "ray.actors=2", "ray.cpus=2", "ray.min_actors=1", "train.rounds=500", *common)
    manifest = Path(config.run.dir) / "late" / "run.json"
    holder = ray.remote(Holder).options(num_cpus=2).remote()

    def end_when_both_have_started(report: RoundReport) -> bool:
        if report.round == 1:
            assert "CPU: 1;" in manifest.read_text()
            ray.kill(holder)
        time.sleep(0.05)
        return "CPU: 2;" in manifest.read_text()

    run_on_cpu_fallback(config, 2, end_when_both_have_started)


class Holder:
    """Actor that occupies CPUs needed by a client actor."""


class Dying(RayPool):
    """Pool that kills an actor's process at the first result of each call, until ``kills`` is 0."""

    kills = 2

    def run(self, orders, broadcast):  # type: ignore[no-untyped-def]
        for number, result in enumerate(super().run(orders, broadcast)):
            if self.kills and not number and orders[0].measure is None:
                self.kills -= 1
                slot = self._pools[""]._slots[self.kills]
                os.kill(ray.get(slot.actor.process_id.remote()), signal.SIGKILL)
            yield result


@pytest.mark.parametrize(("method", "settings"), [("fedmlac", ("train.cohort=1.0",)), ("fedper", BLOCKS)])
def test_killed_client_actors_change_nothing(tiny: Tiny, method: str, settings: tuple[str, ...]) -> None:
    from raydfl.cluster.client import start_client_actor

    reference = known(tiny(*settings, method=method))
    config = tiny("run.name=dying", *settings, "ray.actors=2", method=method)
    run_dir = create(config, Progress("quiet"))
    pool = Dying(
        lambda site, kind, key: start_client_actor(run_dir, config, "", None, None, site, kind, key), config.ray
    )
    federation = Federation(config, Population.load(run_dir / "population"), RunStore(run_dir), pool)
    try:
        while federation.state.round_index < config.train.rounds:
            federation.round()
        federation.close()
    finally:
        pool.close()
    assert pool.kills == 0
    assert_same_bits(reference, read_tensors(run_dir))


def test_a_client_that_kills_every_actor_stops_the_run_with_a_message(tiny: Tiny, tmp_path: Path) -> None:
    killer = tmp_path / "killer.py"
    killer.write_text(
        "import os\nfrom raydfl import Method\n\nclass Killer(Method):\n    def local(self, step):\n        os._exit(1)\n"
    )
    with pytest.raises(ResourcesError, match=r"the actor of client 's\d' was lost 2 times in round 1"):
        run(tiny(f"method.name={killer}:Killer", "ray.actors=1", "ray.retries=1", "run.name=killer"))


def test_only_the_client_that_kills_its_actors_is_dropped_from_its_block(tiny: Tiny, tmp_path: Path) -> None:
    """After too many losses, the pool sends single orders of the block, and the server adds the updates."""
    killer, rejecting = tmp_path / "killer.py", tmp_path / "rejecting.py"
    text = (
        "import os, torch\nfrom raydfl import Method\n\nclass Bad(Method):\n    def local(self, step):\n"
        "        if step.client.id == 's2':\n            {end}\n        return super().local(step)\n"
    )
    killer.write_text(text.format(end="os._exit(1)"))
    rejecting.write_text(text.format(end="raise ValueError"))
    common = ("train.cohort=1.0", "train.block=4", "train.rounds=1", "run.on_error=drop", "evaluate.clients=none")
    reference = known(tiny(*common, f"method.name={rejecting}:Bad"))
    reports: list[RoundReport] = []
    outcome = run(
        tiny(*common, f"method.name={killer}:Bad", "run.name=killer", "ray.actors=2", "ray.retries=1"),
        on_round=reports.append,
    )
    assert list(reports[0].rejected) == ["s2"]
    assert_same_bits(reference, read_tensors(outcome.run_dir))


@pytest.mark.parametrize(("method", "settings"), [("fedmlac", ()), ("fedper", BLOCKS)])
def test_a_resumed_run_may_change_its_pool(tiny: Tiny, method: str, settings: tuple[str, ...]) -> None:
    reference = known(tiny("train.rounds=4", *settings, method=method))
    run(tiny("run.name=moved", "train.rounds=2", *settings, method=method))
    outcome = resume(Path(tiny().run.dir) / "moved", ["train.rounds=4", "ray.actors=2"])
    assert_same_bits(reference, read_tensors(outcome.run_dir))
