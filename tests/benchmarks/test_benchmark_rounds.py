"""The contestants of benchmarks/rounds.py do the same work: they end with the same model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rounds
import torch
from digits import idx, spoken_and_written
from peers.bare import FedAvg, FedMLAC, ModalityMirror
from peers.turns import Process
from peers.work import Work

from raydfl.cluster.server import Server
from raydfl.engine.storage.folder import final_state
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

ROUNDS = 2


@pytest.fixture
def data(feature_cache: Path) -> dict[str, Any]:
    """Return data with 14 speakers of tones, so a cohort of 12 is a real selection."""
    return {
        "name": f"{Path(__file__).parents[1] / 'tones.py'}:Tones",
        "speakers": 14,
        "cache": str(feature_cache),
        "features": {"sample_rate": 8000, "bands": 16, "window_ms": 25, "hop_ms": 10, "seconds": 0.25},
        "partition": {"by": "group"},
    }


@pytest.fixture
def pictures(tmp_path: Path, feature_cache: Path) -> dict[str, Any]:
    """Write noise as images of digits, with 22 or 23 training images for each of 14 clients."""
    rng = np.random.default_rng(0)
    for kind, shape, end in (("images-idx3", (420, 28, 28), 256), ("labels-idx1", (420,), 10)):
        (tmp_path / f"t10k-{kind}-ubyte").write_bytes(idx(rng.integers(0, end, shape, dtype=np.uint8)))
    return rounds.mnist(tmp_path) | {"cache": str(feature_cache), "partition": {"by": "iid", "clients": 14}}


LOOPS = {"crnn_lite": FedAvg, "fedmlac": FedMLAC, "cnn": FedAvg, "split_cnn": FedAvg, "modality_mirror": ModalityMirror}


@pytest.mark.parametrize("name", LOOPS)
def test_bare_loop_and_raydfl_end_with_the_same_model(
    name: str, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name == "cnn":
        data = request.getfixturevalue("pictures")
    if name == rounds.MIRROR:  # one round in each phase
        monkeypatch.setattr(rounds, "FIRST_ROUNDS", 1)
        spoken_and_written(tmp_path, takes=30)
        data |= rounds.fsdd(tmp_path, tmp_path) | {"features": data["features"], "test_takes": 1}
        data["partition"] = {"by": "iid", "clients": 14}
        del data["speakers"]
    config = rounds.configuration(data, tmp_path, name, actors=0)
    path = tmp_path / "work.pt"
    rounds.make_work(config, ROUNDS).save(path)
    bare = LOOPS[name](Work.load(path))
    before = dict(bare.weights)
    bare.run(ROUNDS)
    run_dir = create(config, Progress("quiet"))
    server = Server(run_dir, config)
    for _ in range(ROUNDS):
        server.round()
    server.finish()
    server.close()
    tensors = dict(final_state(run_dir).tensors["global"])
    if name != rounds.MIRROR:
        tensors = {key.partition("/")[2]: value for key, value in tensors.items()}
    # Kernels round differently, and one rounding may change which element a maximum pooling of split_cnn keeps.
    limit = 5e-4 if name == "split_cnn" else 1e-6
    assert rounds.largest_difference(bare.weights, tensors) < limit
    assert rounds.largest_difference(bare.weights, {key: before[key] for key in tensors}) > max(1e-3, 20 * limit)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["crnn_lite", "crnn_base", "cnn"])
@pytest.mark.parametrize("words", [("bare loop, 2 processes",), tuple(rounds.PEER_COMMANDS)], ids=["bare", "peers"])
def test_contestants_in_other_processes_end_with_the_bare_loops_model(
    words: tuple[str, ...], work: str, data: dict[str, Any], pictures: dict[str, Any], tmp_path: Path
) -> None:
    contestants = rounds.contestants(work, pictures if work == "cnn" else data, tmp_path, rounds.WARM_UP + ROUNDS)
    chosen = rounds.choose(contestants, words)
    if len(chosen) == 1:
        pytest.skip("not installed: make bench-peers")
    seconds, differences = rounds.measure(chosen, turns=1, rounds=ROUNDS)
    # FedJAX sums with XLA, in a different order than PyTorch.
    assert all(difference < (1e-5 if name.startswith("FedJAX") else 1e-6) for name, difference in differences.items())
    assert all(len(times) == 1 and times[0] > 0 for times in seconds.values())


@pytest.mark.slow
def test_a_version_compared_with_itself_takes_the_same_time(data: dict[str, Any], tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    (earlier / ".venv/bin").mkdir(parents=True)
    (earlier / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (earlier / ".venv/bin/python").chmod(0o755)
    for name in ("benchmarks", "raydfl"):
        (earlier / name).symlink_to(Path(rounds.__file__).parents[1] / name)
    line = rounds.compare_versions(earlier, "crnn_lite", data, tmp_path, actors=1, turns=4, rounds=2)
    mean, low, high = map(float, line.replace(",", "").replace("[", "").replace("]", "").split()[:3])
    assert low <= mean <= high
    assert 0.4 < mean < 2.5


def test_a_failed_contestant_reports_its_error(tmp_path: Path) -> None:
    program = "import sys; print('no such file', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"(?s)somebody ended with exit code 3:.*no such file"):
        Process("somebody", [sys.executable, "-c", program], tmp_path / "log")


def test_selection_keeps_the_first_contestant(capsys: pytest.CaptureFixture[str]) -> None:
    contestants = dict.fromkeys(["bare loop, 1 thread", "bare loop, 2 threads", "raydfl, 2 actors"], object)
    assert list(rounds.choose(contestants, ["raydfl"])) == ["bare loop, 1 thread", "raydfl, 2 actors"]
    assert rounds.choose(contestants, None) == contestants
    assert capsys.readouterr().out == ""
    assert list(rounds.choose(contestants, ["raydfI"])) == ["bare loop, 1 thread"]
    assert "no contestant has 'raydfI' in its name: bare loop, 1 thread; bare loop, 2 thr" in capsys.readouterr().out


def test_the_table_contains_ratios_within_a_turn() -> None:
    # The second contestant takes half of the first's time in each turn, however slow the machine is in that turn.
    results = {
        "a": ({"first": [1.0, 4.0, 2.0], "second": [0.5, 2.0, 1.0]}, {"first": 0.0, "second": 3e-8}),
        "b": ({"first": [1.0, 1.0, 1.0]}, {"first": 0.0}),
    }
    lines = rounds.table(results).splitlines()
    assert lines[0].split() == ["a", "b"]
    assert lines[1].split() == ["first", "1.00", "(1.00-1.00)", "0e+00", "1.00", "(1.00-1.00)", "0e+00"]
    assert lines[2].split() == ["second", "0.50", "(0.50-0.50)", "3e-08", "-"]
    assert lines[3].split()[-2:] == ["2000", "1000"]


def test_the_table_compares_the_speed_of_peers() -> None:
    seconds = {"first": [1.0, 1.0], "Flower, 2 client slots": [1.0, 0.6], "raydfl, 2 actors": [0.25, 0.2]}
    lines = rounds.table({"a": (seconds, dict.fromkeys(seconds, 0.0))}).splitlines()
    assert lines[4].split() == ["Flower", "/", "raydfl,", "2", "actors", "3.50", "(3.00-4.00)"]


def test_models_with_different_tensors_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"different tensors: \['b'\]"):
        rounds.largest_difference({"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)})
