"""The run directory. Oracles: what was written is what is read, and what a crash may leave behind is known."""

from __future__ import annotations

import errno
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from raydfl.errors import ResourcesError, RunDirectoryError
from raydfl.files import write_durably
from raydfl.private import PrivateIndex, PrivateRef, PrivateStore
from raydfl.store import RunStore
from raydfl.types import State


def tensors_of(value: float, size: int = 5) -> dict[str, torch.Tensor]:
    return {"model:a": torch.full((size,), value), "state:count": torch.tensor([int(value)], dtype=torch.int64)}


def state_of(round_index: int) -> State:
    return State(
        round_index,
        {"global": {"m/w": torch.arange(6.0).view(2, 3) + round_index}, "k|1": {"m/w": torch.full((2,), float("inf"))}},
        {"names": ["a", "b"], "n": round_index},
    )


def test_private_records_come_back_as_written_from_any_process(tmp_path: Path) -> None:
    writer = PrivateStore(tmp_path)
    refs = [writer.append(1 + i // 2, tensors_of(i)) for i in range(4)]
    assert len({ref.segment for ref in refs}) == 2  # one segment a round and writer
    reader = PrivateStore(tmp_path)
    for value, ref in enumerate(refs):
        read = reader.read(ref)
        assert set(read) == {"model:a", "state:count"}
        assert torch.equal(read["model:a"], torch.full((5,), float(value)))
        assert read["state:count"].dtype == torch.int64


def test_two_writers_of_one_round_never_touch_the_same_segment(tmp_path: Path) -> None:
    first, second = PrivateStore(tmp_path), PrivateStore(tmp_path)
    a, b = first.append(1, tensors_of(1)), second.append(1, tensors_of(2))
    assert a.segment != b.segment
    assert torch.equal(second.read(a)["model:a"], torch.ones(5))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_private_state_is_noticed(tmp_path: Path, damage: str) -> None:
    store = PrivateStore(tmp_path)
    ref = store.append(1, tensors_of(3))
    path = tmp_path / ref.segment
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(RunDirectoryError, match="private state"):
        PrivateStore(tmp_path).read(ref)


def test_commit_and_load_round_trip(tmp_path: Path) -> None:
    private = PrivateStore(tmp_path / "private")
    refs = {i: private.append(1, tensors_of(i)) for i in (3, 1, 7)}
    store = RunStore(tmp_path)
    name = store.commit(state_of(1), PrivateIndex().changed(refs), {r.segment for r in refs.values()})
    commit, warnings = RunStore(tmp_path).open_latest()
    assert warnings == []
    assert commit is not None
    assert commit.name == name
    assert commit.state.round_index == 1
    assert commit.state.extra == {"names": ["a", "b"], "n": 1}
    assert commit.private == refs
    for key, tensors in state_of(1).tensors.items():
        for tensor_name, tensor in tensors.items():
            assert torch.equal(commit.state.tensors[key][tensor_name], tensor)


def test_an_index_is_what_a_dictionary_would_be(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    index, reference = PrivateIndex(), dict[int, PrivateRef]()
    for round_index in range(30):
        clients = rng.choice(40, size=5, replace=False).tolist()
        refs = {
            client: PrivateRef(f"{round_index:06d}-{client % 2}.seg", 10 * client, client + 1, client)
            for client in clients
        }
        before, index = index, index.changed(refs)
        assert before == reference
        reference.update(refs)
        assert index == reference
        assert list(index) == sorted(reference)
        assert set(index.segments) == {ref.segment for ref in reference.values()}
        assert index.bytes == sum(ref.length for ref in reference.values())
    assert 99 not in index
    assert index.changed({}) is index


def test_equal_states_make_equal_files(tmp_path: Path) -> None:
    names = [RunStore(tmp_path / folder).commit(state_of(4), PrivateIndex()) for folder in ("a", "b")]
    assert names[0] == names[1]
    a, b = ((tmp_path / f / "commits" / names[0]).read_bytes() for f in ("a", "b"))
    assert a == b


def test_only_the_newest_commits_and_their_segments_are_kept(tmp_path: Path) -> None:
    private, store = PrivateStore(tmp_path / "private"), RunStore(tmp_path, keep=2)
    index: dict[int, PrivateRef] = {}
    for round_index in range(1, 7):
        index[round_index % 2] = private.append(round_index, tensors_of(round_index))
        store.commit(state_of(round_index), PrivateIndex().changed(index), {ref.segment for ref in index.values()})
    assert store.rounds() == [5, 6]
    # Round 5 refers to records of rounds 4 and 5, round 6 to those of 5 and 6: nothing older is left.
    assert sorted(int(p.name[:6]) for p in (tmp_path / "private").iterdir()) == [4, 5, 6]


def test_what_never_counted_is_removed_when_the_run_is_opened(tmp_path: Path) -> None:
    private, store = PrivateStore(tmp_path / "private"), RunStore(tmp_path)
    kept = private.append(1, tensors_of(1))
    store.commit(state_of(1), PrivateIndex().changed({0: kept}), {kept.segment})
    before = (tmp_path / "LATEST").read_bytes()
    later = private.append(2, tensors_of(2))
    store.commit(state_of(2), PrivateIndex().changed({0: later}), {later.segment})
    write_durably(tmp_path / "LATEST", before)  # as if the crash had come before LATEST moved
    commit, _ = RunStore(tmp_path).open_latest()
    assert commit is not None
    assert commit.state.round_index == 1
    assert RunStore(tmp_path).rounds() == [1]
    assert [p.name for p in (tmp_path / "private").iterdir()] == [kept.segment]
    assert torch.equal(PrivateStore(tmp_path / "private").read(commit.private[0])["model:a"], torch.ones(5))


def test_a_damaged_newest_commit_falls_back_to_the_one_before(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.commit(state_of(1), PrivateIndex())
    newest = store.commit(state_of(2), PrivateIndex())
    path = tmp_path / "commits" / newest
    path.write_bytes(path.read_bytes()[:-3])
    commit, warnings = RunStore(tmp_path).open_latest()
    assert commit is not None
    assert commit.state.round_index == 1
    assert newest in warnings[0]
    assert "damaged" in warnings[0]
    again, warnings = RunStore(tmp_path).open_latest()  # said once, then the truth
    assert again is not None
    assert (again.state.round_index, warnings) == (1, [])


def test_no_whole_commit_is_an_error_that_says_so(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    name = store.commit(state_of(1), PrivateIndex())
    (tmp_path / "commits" / name).write_bytes(b"")
    with pytest.raises(RunDirectoryError, match="start the run afresh"):
        RunStore(tmp_path).open_latest()


def test_nonsense_in_latest_is_an_error(tmp_path: Path) -> None:
    RunStore(tmp_path).commit(state_of(1), PrivateIndex())
    (tmp_path / "LATEST").write_text("what?")
    with pytest.raises(RunDirectoryError, match="LATEST does not name a commit"):
        RunStore(tmp_path).open_latest()


def test_compaction_moves_what_counts_and_keeps_its_bytes(tmp_path: Path) -> None:
    private = PrivateStore(tmp_path)
    refs = {i: private.append(1, tensors_of(i, 100)) for i in range(10)}
    for i in range(8):
        refs[i] = private.append(2, tensors_of(10 + i, 100))
    moved = private.compact(3, PrivateIndex().changed(refs))
    assert set(moved) == {8, 9}  # round 1's segment is 20 % alive, round 2's wholly
    assert all("compact" in ref.segment for ref in moved.values())
    for i, ref in moved.items():
        assert torch.equal(private.read(ref)["model:a"], torch.full((100,), float(i)))


def test_a_full_disk_is_said_with_numbers_and_leaves_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path)
    store.commit(state_of(1), PrivateIndex())
    original = Path.replace

    def full(self: Path, target: Path) -> Path:
        if "LATEST" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(
        ResourcesError, match=r"is full: it has [\d,]+ bytes free and LATEST need about [\d,]+; .*resume"
    ):
        store.commit(state_of(2), PrivateIndex())
    monkeypatch.undo()
    commit, _ = RunStore(tmp_path).open_latest()
    assert commit is not None
    assert commit.state.round_index == 1
    assert not list(tmp_path.glob(".LATEST*"))


def _hold(folder: str, ready: multiprocessing.synchronize.Event, done: multiprocessing.synchronize.Event) -> None:
    store = RunStore(Path(folder))
    store.lock()
    ready.set()
    done.wait(30)


def test_a_run_directory_has_one_writer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path), ready, done))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid}"):
            RunStore(tmp_path).lock(wait=0.3)
    finally:
        done.set()
        process.join()
    RunStore(tmp_path).lock(wait=0.3)  # the lock ended with its process
