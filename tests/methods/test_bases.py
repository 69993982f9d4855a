"""Whole runs with a new index of private state every few rounds have the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import raydfl.engine.storage.private
import raydfl.engine.storage.store
from raydfl.core.errors import InputError
from raydfl.core.files import write_durably
from raydfl.engine.config import Config
from raydfl.engine.storage.store import RunStore
from raydfl.runs._replay import replay
from raydfl.testing import assert_same_bits, read_tensors, start_server, to_bytes, train_federation

Tiny = Callable[..., Config]
ROUNDS = ["train.rounds=5", "train.cohort=3", "evaluate.every=99"]


@pytest.fixture
def reference(tiny: Tiny) -> Path:
    """Train a run with too few clients for an index file."""
    config = tiny(*ROUNDS, "run.name=reference", method="fedmlac")
    train_federation(config)
    run_dir = Path(config.run.dir) / "reference"
    assert not list(run_dir.glob("private/*.index"))
    return run_dir


@pytest.fixture
def small_base(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an index file after every four changed records."""
    monkeypatch.setattr(raydfl.engine.storage.private, "_RECENT", 3)


def replay_round(run_dir: Path, round_number: int) -> dict[str, bytes]:
    """Replay all updates of a round."""
    tensors = {}
    for client in (f"s{number}" for number in range(6)):
        try:
            update = replay(run_dir, round_number, client).update
        except InputError:
            continue  # the client is not in the cohort
        assert update is not None
        tensors |= {f"{client} {name}": to_bytes(tensor) for name, tensor in update.tensors.items()}
    return tensors


@pytest.mark.slow
@pytest.mark.usefixtures("small_base")
def test_results_do_not_depend_on_the_time_of_an_index(tiny: Tiny, reference: Path) -> None:
    config = tiny(*ROUNDS, "run.name=based", method="fedmlac")
    run_dir = Path(config.run.dir) / "based"
    for rounds in (2, 4):
        server = start_server(config)
        while server.round_index < rounds:
            server.round()
        server.close()
    assert_same_bits(read_tensors(reference), train_federation(config))
    store = RunStore(run_dir)
    assert len(store.load(store.latest() or "").private.base or ()) > 3
    files = sorted(path.name for path in (run_dir / "private").iterdir())
    for round_number in (4, 5):
        updates = replay_round(run_dir, round_number)
        assert len({name.split()[0] for name in updates}) == 3
        assert_same_bits(replay_round(reference, round_number), updates)
    assert sorted(path.name for path in (run_dir / "private").iterdir()) == files


@pytest.mark.usefixtures("small_base")
@pytest.mark.parametrize("written", [True, False])
def test_a_process_killed_at_an_index_keeps_the_last_commit(
    tiny: Tiny, reference: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Kill the process before and after the index file is written. In the second case, no commit refers to the file."""
    config = tiny(*ROUNDS, "run.name=dying", method="fedmlac")
    run_dir = Path(config.run.dir) / "dying"

    class Dead(BaseException):
        pass

    def write(path: Path, data: bytes) -> None:
        if path.suffix != ".index":
            write_durably(path, data)
            return
        if written:
            write_durably(path, data)
        raise Dead

    server = start_server(config)
    server.round()
    server.finish()
    server.round()
    with monkeypatch.context() as patch:
        patch.setattr(raydfl.engine.storage.store, "write_durably", write)
        with pytest.raises(Dead):
            server.finish()
        server.close()
    assert len(list(run_dir.glob("private/*.index"))) == written
    server = start_server(config)
    assert server.round_index == 1
    assert not list(run_dir.glob("private/*.index"))
    server.close()
    assert_same_bits(read_tensors(reference), train_federation(config))
