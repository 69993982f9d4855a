"""Private state behind a URI: workers without a common folder give the same bits, and superseded segments are removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from helpers import known

from raydfl.core import registry
from raydfl.core import remote as remote_module
from raydfl.core.errors import ResourcesError, RunDirectoryError
from raydfl.core.tensors import FlatTensors
from raydfl.data.population import Population
from raydfl.data.transfer import fetch_population, upload_population
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.orders import Order, Reply, split_groups
from raydfl.engine.pool import SerialPool
from raydfl.engine.storage import private as private_module
from raydfl.engine.storage.mirror import RunMirror
from raydfl.engine.storage.private import PrivateStore, UploadedPrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
FAST = ("fedper", "scaffold", "fedmlac", "ditto", "fedapta")
METHODS = registry.names("raydfl.methods")
SETTINGS = ("evaluate.every=3", "train.cohort=1.0", "data.speakers=4")


class Nodes(SerialPool):
    """Pool of two workers. A client changes its worker in every round."""

    def __init__(self, first: Worker, second: Worker) -> None:
        super().__init__(first)
        self._both = first, second

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        for number, group in enumerate(split_groups(orders)):
            worker = self._both[(number + orders[0].round_index) % 2]
            worker.read_ahead(group)
            yield from worker.carry_out(group, broadcast)


def open_federation(config: Config, run_dir: Path, remote: Path) -> Federation:
    """Open a run with two workers that have only the URI in common, with their own copies of the data."""
    uri = f"file://{remote}/run"
    data = upload_population(run_dir / "population", f"file://{remote}/data")
    workers = []
    for name in ("one", "two"):
        population = fetch_population(data, run_dir.parent / name)
        store = UploadedPrivateStore(run_dir.parent / name / "private", f"{uri}/private")
        workers.append(Worker(run_dir.parent / name, config, store, population=population))
    store = RunStore(run_dir, uploads=f"{uri}/private")
    federation = Federation(config, Population.load(run_dir / "population"), store, Nodes(*workers))
    federation.copy_to(RunMirror(run_dir, uri))
    return federation


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in METHODS]
)
def test_workers_without_a_common_folder_give_the_same_bits(tiny: Tiny, tmp_path: Path, method: str) -> None:
    reference = known(tiny(*SETTINGS, method=method))
    config = tiny("run.name=nodes", *SETTINGS, method=method)
    run_dir = create(config, Progress("quiet"))
    federation = open_federation(config, run_dir, tmp_path / "remote")
    while federation.state.round_index < config.train.rounds:
        federation.round()
    federation.close()
    assert not list(run_dir.glob("**/*.seg"))
    assert_same_bits(reference, read_tensors(tmp_path / "remote" / "run"))


def test_the_uri_has_only_the_segments_of_its_commits(tiny: Tiny, tmp_path: Path) -> None:
    """Oracle: the kept commits. Superseded segments go with their last commit, and orphans when the run is next opened."""
    config = tiny("run.name=nodes", *SETTINGS, "train.rounds=8", method="fedper")
    run_dir = create(config, Progress("quiet"))
    remote = tmp_path / "remote" / "run" / "private"

    def check() -> set[str]:
        store = RunStore(run_dir)
        named = {name for commit in store.commits() for name in store.load(commit).private.segments}
        assert {path.name for path in remote.glob("*.seg")} == named
        return named

    federation = open_federation(config, run_dir, tmp_path / "remote")
    for _ in range(6):
        federation.round()
    federation.close()
    assert check()
    (remote / "000005-deadbeef-3.seg").write_bytes(b"the reply with this segment was lost")
    federation = open_federation(config, run_dir, tmp_path / "remote")
    check()
    while federation.state.round_index < config.train.rounds:
        federation.round()
    federation.close()
    check()
    assert_same_bits(
        known(tiny(*SETTINGS, "train.rounds=8", method="fedper")), read_tensors(tmp_path / "remote" / "run")
    )


def make_state(value: float) -> dict[str, torch.Tensor]:
    return {"state:a": torch.full((300,), value)}


def test_compaction_moves_records_to_new_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_module, "_LARGEST", 4000)  # three records of about 1.3 kB
    writer, reader = (UploadedPrivateStore(tmp_path / name, f"file://{tmp_path}/far") for name in ("a", "b"))
    refs = {}
    for client in range(5):
        refs[client] = writer.append(1, make_state(float(client)))
        writer.close()
    assert len({ref.segment for ref in refs.values()}) == 5, "a segment never changes after its upload"
    moved = reader.compact(2, refs)
    assert len({ref.segment for ref in moved.values()}) == 2
    assert {name: size for name, size in writer.sizes().items() if "compact" in name} == {
        segment: sum(ref.length for ref in moved.values() if ref.segment == segment)
        for segment in {ref.segment for ref in moved.values()}
    }
    for path in tmp_path.glob("far/000001-*"):
        path.unlink()
    for client, ref in moved.items():
        writer.read_ahead(ref)
        assert torch.equal(writer.read(ref)["state:a"], make_state(float(client))["state:a"])
    with pytest.raises(RunDirectoryError, match=r"file://.*far/000001-.*seg is missing: it holds a client's private"):
        reader.read(refs[0])
    damaged = next(tmp_path.glob("far/*compact*"))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(RunDirectoryError, match=r"file://.*compact.*seg is damaged at byte 0"):
        reader.read(next(ref for ref in moved.values() if ref.segment == damaged.name))


def test_a_process_without_actors_reads_uploaded_records(tmp_path: Path) -> None:
    writer = UploadedPrivateStore(tmp_path / "nothing", f"file://{tmp_path}/far")
    ref = writer.append(1, make_state(3.0))
    writer.close()
    reader = PrivateStore(tmp_path / "local", uri=f"file://{tmp_path}/far")
    assert torch.equal(reader.read(ref)["state:a"], make_state(3.0)["state:a"])
    assert reader.sizes() == {ref.segment: ref.length}


def test_a_uri_without_permission_to_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_PAUSES", (0.0,))
    (tmp_path / "far").write_text("a file in place of the folder")
    store = UploadedPrivateStore(tmp_path / "nothing", f"file://{tmp_path}/far/private")
    store.append(1, make_state(1.0))
    with pytest.raises(ResourcesError, match=r"far/private/000001-.*cannot be written.*access of every node to it"):
        store.close()


def test_the_data_of_a_population_are_copied_once(tiny: Tiny, tmp_path: Path) -> None:
    run_dir = create(tiny(), Progress("quiet"))
    uri = f"file://{tmp_path}/data"
    place = upload_population(run_dir / "population", uri)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert upload_population(run_dir / "population", uri) == place
    copy, saved = fetch_population(place, tmp_path / "node"), Population.load(run_dir / "population")
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert [*copy.ids] == [*saved.ids]
    for index in range(len(saved)):
        ours, theirs = copy.data(index).train, saved.data(index).train
        assert len(ours) == len(theirs)
        assert (ours.labels == theirs.labels).all()
    assert {store.folder.parent for store in copy.stores} == {tmp_path / "node"}
    assert [store.frames.tobytes() for store in copy.stores] == [store.frames.tobytes() for store in saved.stores]
    for file in (tmp_path / "data").rglob("*"):
        if file.is_file():
            file.unlink()
    fetch_population(place, tmp_path / "node")  # from the node's own disk


def test_a_node_without_room_for_the_features_is_reported(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = create(tiny(), Progress("quiet"))
    place = upload_population(run_dir / "population", f"file://{tmp_path}/data")
    with pytest.raises(ResourcesError, match=r"cannot be written to .*choose another folder with data.cache"):
        fetch_population(place, run_dir / "run.json" / "cache")
    monkeypatch.setattr("raydfl.data.transfer.free_bytes", lambda folder: 100)
    with pytest.raises(ResourcesError, match=r"the disk of .*node.* is full.*choose another folder with data.cache"):
        fetch_population(place, tmp_path / "node")
