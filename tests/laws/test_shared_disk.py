"""Private state on a network file system, where remote nodes see a write only after its file is closed or synced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from helpers import known
from marked import Marked
from shared_disk import SharedDisk

from raydfl.core import registry
from raydfl.core.tensors import FlatTensors
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.orders import Order, Reply, split_groups
from raydfl.engine.pool import SerialPool
from raydfl.engine.storage.private import PrivateStore, SharedPrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
EXTRA = Path(__file__).parent.parent / "extra_methods.py"
FAST = ("fedper", "scaffold", "fedmlac")
METHODS = [*registry.names("raydfl.methods"), *(f"{EXTRA}:{name}" for name in ("SeveralGlobals", "TwoPhases"))]


class Nodes(SerialPool):
    """Pool with a worker on the server's node and a worker on a remote node. Clients alternate between the nodes."""

    def __init__(self, disk: SharedDisk, server_worker: Worker, remote_worker: Worker) -> None:
        super().__init__(server_worker)
        self._disk, self._remote_worker = disk, remote_worker

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        groups, turn = split_groups(orders), orders[0].round_index % 2
        for group in groups[turn::2]:
            with self._disk.on("other"):
                replies = self._remote_worker.carry_out(group, broadcast)
            yield from replies
        for group in groups[1 - turn :: 2]:
            yield from super().run(group, broadcast)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in METHODS]
)
def test_two_nodes_on_a_network_file_system_give_the_same_bits(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """No commit refers to an unsynced segment either."""
    settings = ("evaluate.every=3", "train.cohort=1.0", "data.speakers=4")
    reference = known(tiny(*settings, method=method))
    config = tiny("run.name=nodes", *settings, method=method)
    run_dir = create(config, Progress("quiet"))
    disk = SharedDisk(run_dir, tmp_path / "caches")
    disk.mount(monkeypatch)
    workers = [Worker(run_dir, config, kind(run_dir / "private")) for kind in (PrivateStore, SharedPrivateStore)]
    store = RunStore(run_dir)
    federation = Federation(config, Population.load(run_dir / "population"), store, Nodes(disk, *workers))
    while federation.state.round_index < config.train.rounds:
        federation.round()
    federation.close()
    commit = store.newest()
    assert commit is not None
    assert disk.unsynced().isdisjoint(commit.private.files() if commit.private else ())
    assert_same_bits(reference, read_tensors(run_dir))


def test_compacted_records_reach_the_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SharedDisk(tmp_path, tmp_path.parent / "caches")
    disk.mount(monkeypatch)
    writer, reader = SharedPrivateStore(tmp_path), PrivateStore(tmp_path)
    refs = writer.compact(1, {3: writer.append(1, {"state:a": torch.ones(2)})})
    with disk.on("other"):
        assert torch.equal(reader.read(refs[3])["state:a"], torch.ones(2))
    assert not disk.unsynced()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_actors_on_two_nodes_of_a_network_file_system_give_the_same_bits(tiny: Tiny, tmp_path: Path) -> None:
    """Run methods with private state on a shared cluster, where every process is a node of its own.

    The private state is a model, layers, control variates, a second model, or a model with a mask.
    """
    settings = ("evaluate.every=3", "train.cohort=1.0", "data.speakers=4")
    private = ("fedmlac", "fedper", "scaffold", "ditto", "fedapta")
    references = {name: known(tiny(*settings, method=name)) for name in private}
    assert all(any(key.startswith("client ") for key in tensors) for tensors in references.values())
    configs = [
        tiny(*settings, "ray.actors=2", f"run.name=nodes{number}", method=name) for number, name in enumerate(private)
    ]
    (tmp_path / "configs.json").write_text(json.dumps([config.model_dump(mode="json") for config in configs]))
    process = Marked.python(str(Path(__file__).with_name("on_two_nodes.py")), str(tmp_path))
    try:
        _, problems = process.process.communicate(timeout=800)
    finally:
        process.end()
    assert process.process.returncode == 0, problems
    disk = SharedDisk(tmp_path / "runs", tmp_path / "caches")
    for config, name in zip(configs, private, strict=True):
        run_dir = Path(config.run.dir) / str(config.run.name)
        commit = RunStore(run_dir).newest()
        assert commit is not None
        assert disk.unsynced().isdisjoint(commit.private.files())
        assert_same_bits(references[name], read_tensors(run_dir))
