"""Run directory: files are read as written, and opening a run cleans up after a crash."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import stat
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import raydfl.engine.storage.private
import raydfl.engine.storage.store
from raydfl.core.errors import ConfigError, ResourcesError, RunDirectoryError
from raydfl.core.files import plain_name, write_durably
from raydfl.core.types import State
from raydfl.engine.storage.committer import SegmentUsage
from raydfl.engine.storage.private import PrivateIndex, PrivateRef, PrivateStore
from raydfl.engine.storage.store import RunStore, as_stored

LOOP: list[Any] = []
LOOP.append(LOOP)


def make_tensors(value: float, size: int = 5) -> dict[str, torch.Tensor]:
    return {"model:a": torch.full((size,), value), "state:count": torch.tensor([int(value)], dtype=torch.int64)}


def make_state(round_index: int) -> State:
    return State(
        round_index,
        {"global": {"m/w": torch.arange(6.0).view(2, 3) + round_index}, "k|1": {"m/w": torch.full((2,), float("inf"))}},
        {"names": ["a", "b"], "n": round_index},
    )


def test_private_records_come_back_as_written_from_any_process(tmp_path: Path) -> None:
    writer = PrivateStore(tmp_path)
    refs = [writer.append(1 + i // 2, make_tensors(i)) for i in range(4)]
    assert len({ref.segment for ref in refs}) == 2  # one segment for each round and writer
    reader = PrivateStore(tmp_path)
    for value, ref in enumerate(refs):
        read = reader.read(ref)
        assert set(read) == {"model:a", "state:count"}
        assert torch.equal(read["model:a"], torch.full((5,), float(value)))
        assert read["state:count"].dtype == torch.int64


@pytest.mark.parametrize("elements", [10, 600_000], ids=["in one piece", "tensor by tensor"])
def test_a_segment_is_a_sequence_of_safetensors_files(tmp_path: Path, elements: int) -> None:
    store = PrivateStore(tmp_path)
    records = [{"a": torch.randn(elements), "b": torch.randn(3, elements).t(), "c": torch.tensor(n)} for n in range(2)]
    refs = [store.append(1, tensors) for tensors in records]
    data = (tmp_path / refs[0].segment).read_bytes()
    assert [ref.offset for ref in refs] == [0, len(data) // 2]
    for ref, tensors in zip(refs, records, strict=True):
        torch.testing.assert_close(store.read(ref), tensors, rtol=0, atol=0)
        record = data[ref.offset : ref.offset + ref.length]
        torch.testing.assert_close(safetensors.torch.load(record), tensors, rtol=0, atol=0)


def test_private_tensors_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    store = PrivateStore(tmp_path)
    names = [f"state:{number}" for number in (7, 1, 10, 3, 0, 5)]
    ref = store.append(1, {name: torch.zeros(number + 1) for number, name in enumerate(names)})
    for _ in range(5):
        assert list(store.read(ref)) == sorted(names)


def test_two_writers_of_one_round_never_share_a_segment(tmp_path: Path) -> None:
    first, second = PrivateStore(tmp_path), PrivateStore(tmp_path)
    a, b = first.append(1, make_tensors(1)), second.append(1, make_tensors(2))
    assert a.segment != b.segment
    assert torch.equal(second.read(a)["model:a"], torch.ones(5))


def test_reading_ahead_advises_existing_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda file, offset, length, advice: advised.append((offset, length)))
    store = PrivateStore(tmp_path)
    refs = [store.append(1, make_tensors(i)) for i in range(3)]
    elsewhere = PrivateStore(tmp_path / "replay", also_read=[tmp_path])
    elsewhere.read_ahead(refs[2])
    elsewhere.read_ahead(PrivateRef("gone.seg", 0, 9, 0))
    assert advised == [(refs[2].offset, refs[2].length)]
    monkeypatch.delattr("os.posix_fadvise")  # as on macOS
    elsewhere.read_ahead(refs[2])
    assert len(advised) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_private_state_is_detected(tmp_path: Path, damage: str) -> None:
    store = PrivateStore(tmp_path)
    ref = store.append(1, make_tensors(3))
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
    refs = {i: private.append(1, make_tensors(i)) for i in (3, 1, 7)}
    store = RunStore(tmp_path)
    name = store.commit(make_state(1), PrivateIndex().replace(refs), {r.segment for r in refs.values()})
    commit, warnings = RunStore(tmp_path).open_latest()
    assert warnings == []
    assert commit is not None
    assert commit.name == name
    assert commit.state.round_index == 1
    assert commit.state.extra == {"names": ["a", "b"], "n": 1}
    assert commit.private == refs
    for key, tensors in make_state(1).tensors.items():
        for tensor_name, tensor in tensors.items():
            assert torch.equal(commit.state.tensors[key][tensor_name], tensor)


EXTRAS: list[dict[Any, Any]] = [
    {},
    {"members": {3: (1, 2), 4: ()}, "names": ["a", None, True], 7: 0.1},
    {"deep": [{"x": {"y": (float("inf"), np.float64(0.25), np.str_("z"))}}]},
]


@pytest.mark.parametrize("extra", EXTRAS)
def test_as_stored_returns_the_state_that_a_commit_loads(tmp_path: Path, extra: dict[Any, Any]) -> None:
    whole = torch.arange(12.0)
    groups = {
        "a": {"w": whole, "transposed": torch.arange(6.0).view(2, 3).T, "trained": torch.nn.Parameter(torch.ones(2))},
        "b": {"w": whole, "half of it": whole[4:9], "none of it": whole[3:3], "counts": torch.tensor([1, 2])},
        "parts": dict(zip("xy", torch.ones(6).split(3), strict=True)),
    }
    stored = as_stored(State(4, groups, extra))
    store = RunStore(tmp_path)
    loaded = store.load(store.commit(stored, PrivateIndex())).state
    assert (loaded.round_index, loaded.extra) == (stored.round_index, stored.extra)
    assert repr(loaded.extra) == repr(stored.extra)  # equality alone does not tell 1 from True
    for key, group in groups.items():
        assert list(loaded.tensors[key]) == list(stored.tensors[key]) == list(group)
        for name, tensor in group.items():
            for copy in (loaded.tensors[key][name], stored.tensors[key][name]):
                assert type(copy) is torch.Tensor
                assert (copy.dtype, copy.requires_grad, copy.is_contiguous()) == (tensor.dtype, False, True)
                assert torch.equal(copy, tensor)
    before = {(key, name): tensor.clone() for key, group in stored.tensors.items() for name, tensor in group.items()}
    for tensor in stored.tensors["a"].values():
        tensor.fill_(9)
    assert all(torch.equal(stored.tensors[key][name], before[key, name]) for key, name in before if key != "a")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (State(0, {}, {"seen": {1, 2}}), r"State.extra\['seen'\] is of type set. It may hold JSON values only"),
        (State(0, {}, {"a": [{"n": np.int64(3)}]}), r"State.extra\['a'\]\[0\]\['n'\] is of type int64"),
        (State(0, {}, {"a": {(1, 2): 3}}), r"State.extra\['a'\] has the key \(1, 2\) of type tuple"),
        (State(0, {}, {"t": torch.ones(1)}), r"State.extra\['t'\] is of type Tensor.*Store tensors in State.tensors"),
        (State(0, {}, {"a": {1: 2, "1": 3}}), "State.extra has a dict with the key '1' twice"),
        (State(0, {}, {"loop": LOOP}), "State.extra cannot be stored: Circular reference"),
        (State(0, {"global": {"lr": 0.1}}), r"State.tensors\['global'\]\['lr'\] is a float, not a tensor"),  # type: ignore[dict-item]
        (State(0, {3: {"w": torch.ones(1)}}), r"State.tensors\[3\]\['w'\]: the keys and names .* must be strings"),  # type: ignore[dict-item]
        (State(0, {"k": {"w": torch.eye(2).to_sparse()}}), r"\['w'\] is a torch.sparse_coo tensor of torch.float32"),
        (State(0, {"k": {"w": torch.ones(1, dtype=torch.complex128)}}), r"\['w'\] is .* tensor of torch.complex128"),
    ],
)
def test_unstorable_values_are_rejected_with_their_place(state: State, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_stored(state)


def test_keys_and_names_may_contain_any_characters(tmp_path: Path) -> None:
    groups = {"a|b": {"x": torch.zeros(2)}, "a": {"b|x": torch.ones(3)}, "0": {"1|x": torch.full((1,), 2.0)}, "": {}}
    store = RunStore(tmp_path)
    state = store.load(store.commit(State(1, groups), PrivateIndex())).state
    assert {key: {name: tensor.tolist() for name, tensor in group.items()} for key, group in state.tensors.items()} == {
        "a|b": {"x": [0, 0]},
        "a": {"b|x": [1, 1, 1]},
        "0": {"1|x": [2]},
        "": {},
    }


def test_commits_of_the_first_format_are_read(tmp_path: Path) -> None:
    metadata = {
        "round_index": 7,
        "extra": {"n": 1},
        "keys": {"global": ["m/w"], "k|1": ["m/w"]},
        "base": "",
        "segments": [],
    }
    tensors = {
        "private": torch.zeros((5, 0), dtype=torch.int64),
        "global|m/w": torch.ones(2),
        "k|1|m/w": torch.zeros(3),
    }
    data = safetensors.torch.save(tensors, {"raydfl": json.dumps({**metadata, "together": 4})})
    name = f"000007-{zlib.crc32(data):08x}.safetensors"
    write_durably(tmp_path / "commits" / name, data)
    commit = RunStore(tmp_path).load(name)
    assert (commit.state.round_index, commit.state.extra, commit.together) == (7, {"n": 1}, 4)
    assert {key: group["m/w"].tolist() for key, group in commit.state.tensors.items()} == {
        "global": [1, 1],
        "k|1": [0, 0, 0],
    }


@pytest.fixture
def small_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make indexes merge recent records into their base if they exceed eight records and half of the base."""
    monkeypatch.setattr(raydfl.engine.storage.private, "_RECENT", 8)
    monkeypatch.setattr(raydfl.engine.storage.private, "_PART", 2)


def draw_refs(rng: np.random.Generator, round_index: int) -> dict[int, PrivateRef]:
    return {
        client: PrivateRef(f"{round_index:06d}-{client % 2}.seg", 10 * client, int(rng.integers(1, 99)), client)
        for client in rng.choice(40, size=5, replace=False).tolist()
    }


@pytest.mark.usefixtures("small_base")
def test_an_index_behaves_like_a_dictionary() -> None:
    rng = np.random.default_rng(0)
    index, reference = PrivateIndex(), dict[int, PrivateRef]()
    bases = []
    for round_index in range(60):
        refs = draw_refs(rng, round_index)
        before, index = index, index.replace(refs)
        assert before == reference
        reference.update(refs)
        assert index == reference
        assert list(index) == sorted(reference)
        assert len(index) == len(reference)
        lengths: Counter[str] = Counter()
        for ref in reference.values():
            lengths[ref.segment] += ref.length
        assert index.bytes_by_segment() == lengths
        chosen = set(sorted(lengths)[::3])
        assert index.select_segments(chosen) == {
            client: ref for client, ref in reference.items() if ref.segment in chosen
        }
        bases.append(index.base)
    assert 99 not in index
    assert index.replace({}) is index
    assert 3 < len({id(base) for base in bases}) < 30  # a new base in some rounds only


def test_the_work_of_a_round_does_not_grow_with_the_population() -> None:
    first = PrivateIndex().replace({client: PrivateRef("1.seg", client, 1, 0) for client in range(100_000)})
    assert (len(first.base or ()), first.table.shape[1]) == (100_000, 0)
    after = first.replace({5: PrivateRef("2.seg", 0, 1, 0)})
    assert after.base is first.base
    assert after.table.shape[1] == 1
    more = after.replace({client: PrivateRef("3.seg", client, 1, 0) for client in range(7, 7 + 100_000 // 16)})
    assert (len(more), more.table.shape[1]) == (100_000, 0)
    assert more.base is not None
    assert set(more.base.segments) == {"1.seg", "2.seg", "3.seg"}
    assert (first[5].segment, after[5].segment, more[7].segment) == ("1.seg", "2.seg", "3.seg")


@pytest.mark.usefixtures("small_base")
def test_segment_usage_agrees_with_the_index(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    index, written = PrivateIndex(), Counter[str]()
    usage = SegmentUsage(index, {})
    written_since: set[str] = set()
    for round_index in range(1, 61):
        refs = draw_refs(rng, round_index)
        for client, ref in refs.items():
            written[ref.segment] += ref.length
            written_since.add(ref.segment)
            usage.move(index.get(client), ref)
        index = index.replace(refs)
        if round_index % 3 == 0:
            assert usage.take() == (set(index.bytes_by_segment()), written_since)
            written_since = set()
        lengths = index.bytes_by_segment()
        assert (usage.live, usage.bytes) == (sum(lengths.values()), sum(written[segment] for segment in lengths))
        assert usage.sparse() == {segment for segment in lengths if lengths[segment] < written[segment] / 2}
        opened = SegmentUsage(index, written)
        assert (opened.live, opened.bytes, opened.sparse()) == (usage.live, usage.bytes, usage.sparse())
    assert usage.sparse()
    elsewhere = SegmentUsage(index, {})
    assert (elsewhere.live, elsewhere.bytes, elsewhere.sparse()) == (usage.live, usage.live, set())


def test_equal_states_make_equal_files(tmp_path: Path) -> None:
    names = [RunStore(tmp_path / folder).commit(make_state(4), PrivateIndex()) for folder in ("a", "b")]
    assert names[0] == names[1]
    a, b = ((tmp_path / f / "commits" / names[0]).read_bytes() for f in ("a", "b"))
    assert a == b


class Writer:
    """A minimal federation: it trains clients in rounds and commits."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.private, self.store = PrivateStore(folder / "private"), RunStore(folder, keep=keep)
        commit, _ = self.store.open_latest()
        self.index = PrivateIndex() if commit is None else commit.private
        self.round = 0 if commit is None else commit.state.round_index
        self.usage = SegmentUsage(self.index, self.store.sizes_of_segments())

    def train(self, clients: Iterable[int]) -> None:
        self.round += 1
        refs = {client: self.private.append(self.round, make_tensors(100 * self.round + client)) for client in clients}
        for client, ref in refs.items():
            self.usage.move(self.index.get(client), ref)
        self.index = self.index.replace(refs)

    def commit(self) -> None:
        self.store.commit(make_state(self.round), self.index, *self.usage.take())

    def list_referenced_files(self) -> set[str]:
        """Return the names of the files referenced by the kept commits."""
        indexes = [self.store.load(name).private for name in self.store.commits()]
        return {file for index in indexes for file in (*index.bytes_by_segment(), index.base_name) if file}

    def list_files(self) -> set[str]:
        return {path.name for path in (self.folder / "private").iterdir()}


def test_only_the_newest_commits_and_their_segments_are_kept(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=2)
    for round_index in range(1, 7):
        writer.train([round_index % 2])
        writer.commit()
    assert writer.store.rounds() == [5, 6]
    # Round 5 refers to records of rounds 4 and 5, round 6 to records of rounds 5 and 6. Older segments are removed.
    assert sorted(int(name[:6]) for name in writer.list_files()) == [4, 5, 6]


@pytest.mark.usefixtures("small_base")
@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("every", [1, 2])
def test_the_folder_holds_exactly_the_referenced_files(tmp_path: Path, keep: int, every: int) -> None:
    """This holds for segments and bases, after every commit and after reopening the run."""
    rng = np.random.default_rng(2)
    writer = Writer(tmp_path, keep)
    bases = set()
    for number in range(1, 41):
        for _ in range(every):
            writer.train(rng.choice(30, size=4, replace=False).tolist())
        writer.commit()
        assert writer.list_files() == writer.list_referenced_files()
        bases |= {name for name in writer.list_files() if name.endswith(".index")}
        if number % 3 == 0:
            # Leftovers of crashes: a segment of a lost actor, a half-written base.
            (tmp_path / "private" / f"{number:06d}-lost.seg").touch()
            (tmp_path / "private" / ".half.index.part").touch()
            index, writer = writer.index, Writer(tmp_path, keep)
            assert writer.index == index
            assert writer.list_files() == writer.list_referenced_files()
    assert len(bases) > 3
    for client, ref in writer.index.items():
        assert int(writer.private.read(ref)["state:count"]) % 100 == client


@pytest.mark.usefixtures("small_base")
def test_a_base_is_durable_before_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write(path: Path, data: bytes) -> None:
        written.append(path.name)
        write_durably(path, data)

    monkeypatch.setattr(raydfl.engine.storage.store, "write_durably", write)
    writer = Writer(tmp_path, keep=2)
    writer.train(range(9))
    writer.commit()
    assert [name.rpartition(".")[2] for name in written] == ["index", "safetensors", "LATEST"]
    writer.train([3])
    writer.commit()
    assert [name.rpartition(".")[2] for name in written[3:]] == ["safetensors", "LATEST"]  # the base is unchanged


@pytest.mark.usefixtures("small_base")
@pytest.mark.parametrize(
    ("damage", "message"),
    [("flip", r"is damaged \(wrong checksum\)"), ("cut", "cannot be read"), ("remove", "is missing")],
)
def test_a_damaged_base_falls_back_to_a_commit_with_an_intact_base(tmp_path: Path, damage: str, message: str) -> None:
    writer = Writer(tmp_path, keep=3)
    writer.train(range(9))
    writer.commit()
    first = writer.index
    writer.train(range(9, 20))
    writer.commit()
    writer.train([2])
    writer.commit()
    assert writer.index.base_name != first.base_name
    path = tmp_path / "private" / writer.index.base_name
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-1])
    commit, warnings = RunStore(tmp_path).open_latest()
    assert commit is not None
    assert commit.state.round_index == 1
    assert commit.private == first
    assert len(warnings) == 2
    for warning in warnings:
        assert re.search(f"commit .*safetensors cannot be used: .*{path.name}.* {message}", warning)
    # Training from this commit writes a new base.
    resumed = Writer(tmp_path, keep=3)
    resumed.train(range(9, 20))
    resumed.commit()
    assert resumed.list_files() == resumed.list_referenced_files()


@pytest.mark.usefixtures("small_base")
@pytest.mark.parametrize("clients", [1, 20])
def test_a_crafted_index_cannot_reach_outside_its_folder(tmp_path: Path, clients: int) -> None:
    """With few clients the commit holds the name, with many an index file does."""
    foreign, folder = tmp_path / "theirs.txt", tmp_path / "runs" / "run"
    foreign.write_text("not ours")
    crafted = RunStore(folder, keep=1)
    refs = {client: PrivateRef("../../../theirs.txt", 0, 0, 0) for client in range(clients)}
    first = crafted.commit(make_state(1), PrivateIndex().replace(refs))
    with pytest.raises(RunDirectoryError, match=r"'\.\./\.\./\.\./theirs.txt' is not the name of a file"):
        RunStore(folder).load(first)
    crafted.keep = 3
    crafted.commit(
        make_state(2), PrivateIndex().replace({0: PrivateStore(folder / "private").append(2, make_tensors(1))})
    )
    store = RunStore(folder, keep=1)
    commit, _ = store.open_latest()
    assert commit is not None
    store.commit(make_state(3), commit.private)
    assert store.rounds() == [3]
    assert foreign.read_text() == "not ours"


def test_only_orphans_of_the_run_are_removed(tmp_path: Path) -> None:
    private, store = PrivateStore(tmp_path / "private"), RunStore(tmp_path)
    ref = private.append(1, make_tensors(1))
    store.commit(make_state(1), PrivateIndex().replace({0: ref}), {ref.segment})
    orphans = ["000009-dead.seg", "0123456789abcdef.index", ".0123456789abcdef.index.0123.part"]
    foreign = ["letter.txt", "my.seg", "books.index"]
    for name in (*orphans, *foreign):
        (tmp_path / "private" / name).touch()
    RunStore(tmp_path).open_latest()
    assert {path.name for path in (tmp_path / "private").iterdir()} == {ref.segment, *foreign}


@pytest.mark.parametrize("method", ["with private state", "without private state"])
def test_the_private_state_of_another_run_is_left_alone(tmp_path: Path, method: str) -> None:
    """The private folder of another run may have been moved into this run."""
    private, store = PrivateStore(tmp_path / "private"), RunStore(tmp_path)
    refs = {0: private.append(1, make_tensors(1))} if method == "with private state" else {}
    store.commit(make_state(1), PrivateIndex().replace(refs))
    shutil.rmtree(tmp_path / "private", ignore_errors=True)
    foreign_ref = PrivateStore(tmp_path / "private").append(1, make_tensors(2))
    RunStore(tmp_path).open_latest()
    assert torch.equal(PrivateStore(tmp_path / "private").read(foreign_ref)["model:a"], torch.full((5,), 2.0))


@pytest.mark.parametrize("name", ["commits", "population", "private", "rows"])
def test_links_to_folders_outside_the_run_are_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    path = tmp_path / "link" / "run" / name
    RunStore(path.parent).lock()  # the path of the run may contain a link
    path.symlink_to(tmp_path / "theirs")
    with pytest.raises(RunDirectoryError, match=rf"{path} is a link to {tmp_path}/theirs, outside the run's folder"):
        RunStore(path.parent).lock()


def test_a_linked_lock_file_is_rejected(tmp_path: Path) -> None:
    """Taking the lock would overwrite the file behind the link."""
    (tmp_path / "letter.txt").write_text("not ours")
    (tmp_path / ".lock").symlink_to(tmp_path / "letter.txt")
    with pytest.raises(RunDirectoryError, match=rf"{tmp_path}/.lock is a link to {tmp_path}/letter.txt"):
        RunStore(tmp_path).lock()
    assert (tmp_path / "letter.txt").read_text() == "not ours"


def test_only_the_owner_can_read_private_state(tmp_path: Path) -> None:
    private = PrivateStore(tmp_path / "private")
    private.append(1, make_tensors(1))
    write_durably(tmp_path / "private" / "0123456789abcdef.index", b"")
    write_durably(tmp_path / "run.json", b"{}")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "private").iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["a.seg", "000001-clinic_a@1f2e.seg", "Größe 2.wav", "..a"])
def test_plain_names_are_accepted(name: str) -> None:
    assert plain_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "a/b", "../a", "a\\b", "a\0b", "a\n", None, 3])
def test_names_with_paths_are_rejected(name: object) -> None:
    with pytest.raises(ValueError, match="is not the name of a file"):
        plain_name(name)


def test_opening_a_run_removes_uncommitted_files(tmp_path: Path) -> None:
    private, store = PrivateStore(tmp_path / "private"), RunStore(tmp_path)
    committed = private.append(1, make_tensors(1))
    store.commit(make_state(1), PrivateIndex().replace({0: committed}), {committed.segment})
    before = (tmp_path / "LATEST").read_bytes()
    uncommitted = private.append(2, make_tensors(2))
    store.commit(make_state(2), PrivateIndex().replace({0: uncommitted}), {uncommitted.segment})
    write_durably(tmp_path / "LATEST", before)  # simulate a crash before LATEST was replaced
    commit, _ = RunStore(tmp_path).open_latest()
    assert commit is not None
    assert commit.state.round_index == 1
    assert RunStore(tmp_path).rounds() == [1]
    assert [p.name for p in (tmp_path / "private").iterdir()] == [committed.segment]
    assert torch.equal(PrivateStore(tmp_path / "private").read(commit.private[0])["model:a"], torch.ones(5))


@pytest.mark.parametrize("commits", [0, 1])
def test_unfinished_files_of_a_killed_process_are_removed(tmp_path: Path, commits: int) -> None:
    for _ in range(commits):
        RunStore(tmp_path).commit(make_state(1), PrivateIndex())
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    now = time.time()
    for name, age in {
        "commits/.000002-00c0ffee.safetensors.0123456789ab.part": 0.0,
        ".LATEST.0123456789ab.part": 0.0,
        ".run.json.0123456789ab.part": 3600.0,
        ".config.yaml.0123456789ab.part": 0.0,  # may belong to a live process that waits for the lock
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (now - age, now - age))
    RunStore(tmp_path).open_latest()
    after = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    assert {str(path) for path in after - before - {Path("commits")}} == {".config.yaml.0123456789ab.part"}


def test_a_damaged_commit_falls_back_to_the_previous_commit(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.commit(make_state(1), PrivateIndex())
    newest = store.commit(make_state(2), PrivateIndex())
    path = tmp_path / "commits" / newest
    path.write_bytes(path.read_bytes()[:-3])
    commit, warnings = RunStore(tmp_path).open_latest()
    assert commit is not None
    assert commit.state.round_index == 1
    assert newest in warnings[0]
    assert "damaged" in warnings[0]
    reopened, warnings = RunStore(tmp_path).open_latest()  # the warning appears once
    assert reopened is not None
    assert (reopened.state.round_index, warnings) == (1, [])


def test_a_run_without_an_intact_commit_is_rejected(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    name = store.commit(make_state(1), PrivateIndex())
    (tmp_path / "commits" / name).write_bytes(b"")
    with pytest.raises(RunDirectoryError, match="Restart the run"):
        RunStore(tmp_path).open_latest()


def test_an_invalid_latest_file_is_rejected(tmp_path: Path) -> None:
    RunStore(tmp_path).commit(make_state(1), PrivateIndex())
    (tmp_path / "LATEST").write_text("what?")
    with pytest.raises(RunDirectoryError, match="LATEST does not name a commit"):
        RunStore(tmp_path).open_latest()


def test_compaction_moves_live_records_unchanged(tmp_path: Path) -> None:
    private = PrivateStore(tmp_path)
    refs = {i: private.append(1, make_tensors(i, 100)) for i in range(10)}
    for i in range(8):
        refs[i] = private.append(2, make_tensors(10 + i, 100))
    index = PrivateIndex().replace(refs)
    usage = SegmentUsage(index, {path.name: path.stat().st_size for path in tmp_path.iterdir()})
    moved = private.compact(3, index.select_segments(usage.sparse()))
    assert set(moved) == {8, 9}  # round 1's segment is 20 % live, round 2's is fully live
    assert all("compact" in ref.segment for ref in moved.values())
    for i, ref in moved.items():
        assert torch.equal(private.read(ref)["model:a"], torch.full((100,), float(i)))


def test_a_full_disk_is_reported_and_leaves_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore(tmp_path)
    store.commit(make_state(1), PrivateIndex())
    original = Path.replace

    def replace_or_fail(self: Path, target: Path) -> Path:
        if "LATEST" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace_or_fail)
    with pytest.raises(
        ResourcesError, match=r"is full: it has [\d,]+ bytes free and LATEST need about [\d,]+; .*resume"
    ):
        store.commit(make_state(2), PrivateIndex())
    monkeypatch.undo()
    commit, _ = RunStore(tmp_path).open_latest()
    assert commit is not None
    assert commit.state.round_index == 1
    assert not list(tmp_path.glob(".LATEST*"))


def _hold_lock(folder: str, ready: multiprocessing.synchronize.Event, done: multiprocessing.synchronize.Event) -> None:
    store = RunStore(Path(folder))
    store.lock()
    ready.set()
    done.wait(30)


def test_a_run_directory_has_one_writer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold_lock, args=(str(tmp_path), ready, done))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid}"):
            RunStore(tmp_path).lock(wait=0.3)
    finally:
        done.set()
        process.join()
    RunStore(tmp_path).lock(wait=0.3)  # the lock ended with its process


def test_segments_and_their_folder_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = PrivateStore(tmp_path)
    ref = private.append(1, make_tensors(1))
    synced: list[Path] = []
    monkeypatch.setattr("raydfl.engine.storage.private.sync", synced.append)
    private.sync([ref.segment])
    assert synced == [tmp_path / ref.segment, tmp_path]
    synced.clear()
    private.sync([])
    assert synced == []
