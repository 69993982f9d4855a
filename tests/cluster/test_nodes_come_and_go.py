"""Nodes join and leave in the middle of a round: present nodes work, and the results keep their bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from gated import MODELS
from helpers import known
from marked import Marked, until

from raydfl.engine.config import Config
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
HERE = Path(__file__).parent
GATED = f"{HERE}/gated.py:Gated"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def start() -> Iterator[Callable[..., Marked]]:
    started: list[Marked] = []

    def begin(*arguments: str) -> Marked:
        started.append(Marked.python(*arguments))
        return started[-1]

    yield begin
    for one in reversed(started):
        one.end()


class Gate:
    """Gate for pausing rounds in the middle."""

    def __init__(self, folder: Path, rounds: list[int]) -> None:
        self.folder = folder
        folder.mkdir()
        for number in rounds:
            (folder / f"hold-{number}").touch()

    def waiting(self, number: int) -> set[str]:
        """Return the processes with waiting clients of the round."""
        return {path.name.rpartition("-")[2] for path in self.folder.glob(f"at-{number}-*")}

    def open(self, number: int) -> None:
        (self.folder / f"hold-{number}").unlink()


def test_nodes_join_and_leave_in_the_middle_of_rounds(tiny: Tiny, start: Callable[..., Marked], tmp_path: Path) -> None:
    common = [MODELS, "train.rounds=5", "train.cohort=1.0", "evaluate.every=5"]
    fleet = start(str(HERE / "fleet.py"))
    address = fleet.ask()
    fleet.ask("add 1 0")
    gate = Gate(tmp_path / "gate", [2, 3, 4])
    config = tiny(
        *common,
        "run.name=elastic",
        "ray.actors=2",
        "ray.min_actors=1",
        "ray.ready_timeout=200",
        f"ray.address='{address}'",
        f"method.gate={gate.folder}",
        method=GATED,
    )
    file = tmp_path / "elastic.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run = start("-m", "raydfl", "run", str(file), "--json")
    assert run.process.stdout is not None

    first = until(lambda: gate.waiting(2), "clients in round 2", [run])
    assert len(first) == 1  # rounds start with one actor
    fleet.ask("add 1 0")
    both = until(lambda: len(gate.waiting(2)) == 2 and gate.waiting(2), "the second actor in the same round", [run])
    gate.open(2)

    until(lambda: gate.waiting(3) == both, "both actors in round 3", [run])
    fleet.ask("remove 0")
    until(
        lambda: len(set(fleet.mark.pids("ray::ClientActor")) & {int(pid) for pid in both}) == 1, "the end of one", [run]
    )
    gate.open(3)

    until(lambda: gate.waiting(4), "round 4 with what is left", [run])
    assert len(gate.waiting(4)) == 1
    fleet.ask("add 1 0")
    until(lambda: len(gate.waiting(4)) == 2, "a third node's actor in round 4", [run])
    gate.open(4)

    out, problems = run.process.communicate(timeout=300)
    assert run.process.returncode == 0, problems
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["round"] for event in events if event["event"] == "round"] == [1, 2, 3, 4, 5]
    output = [event["text"] for event in events if event["event"] == "message" and event["text"].startswith("Nodes:")]
    fields = " ".join(output)
    assert fields.count("1 joined") == 2, output
    assert fields.count("1 left") == 1, output
    assert_same_bits(
        known(tiny(*common, "ray.actors=0", method=GATED)),
        read_tensors(Path(config.run.dir) / "elastic"),
    )


def test_cpu_and_gpu_clients_in_one_federation(tiny: Tiny, start: Callable[..., Marked], tmp_path: Path) -> None:
    """Logical GPUs are scheduled like real GPUs. Without CUDA, all actors compute on the CPU, so bits are equal."""
    import torch

    common = [MODELS, "train.rounds=2", "train.cohort=1.0"]
    fleet = start(str(HERE / "fleet.py"))
    address = fleet.ask()
    fleet.ask("add 2 1")
    fleet.ask("add 1 0")
    gate = Gate(tmp_path / "gate", [1])
    config = tiny(
        *common,
        "run.name=mixed",
        "ray.actors=2",
        "ray.gpus=0.5",
        "ray.cpu_actors=1",
        "ray.cpu_fallback=true",
        "ray.ready_timeout=200",
        f"ray.address='{address}'",
        f"method.gate={gate.folder}",
        method=GATED,
    )
    file = tmp_path / "mixed.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run = start("-m", "raydfl", "run", str(file), "--json")
    until(lambda: len(gate.waiting(1)) == 3, "three actors in round 1", [run])
    assert sorted(path.read_text() for path in gate.folder.glob("at-1-*")) == ["", "0", "0"]
    gate.open(1)
    _, problems = run.process.communicate(timeout=300)
    assert run.process.returncode == 0, problems
    if not torch.cuda.is_available():
        assert_same_bits(
            known(tiny(*common, "ray.actors=0", method=GATED)),
            read_tensors(Path(config.run.dir) / "mixed"),
        )
