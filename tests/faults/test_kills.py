"""kill -9 of a client actor, the server actor or the driver in the middle of a round does not change the bits.

Each run uses the command line in a separate process with its own Ray. Its processes carry a mark.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from helpers import known
from marked import Marked

from raydfl.engine.config import Config
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
TESTS = Path(__file__).parent.parent
SLOW = f"{TESTS}/extra_methods.py:Slow"
FLEET = ("data.speakers=8", "train.fleet={buffer: 2, concurrency: 6, seconds: {spread: 1.5}}")
pytestmark = pytest.mark.slow


@pytest.fixture
def command() -> Iterator[Callable[..., Marked]]:
    started: list[Marked] = []

    def start(*arguments: str) -> Marked:
        started.append(Marked.raydfl(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.end()


def write_config(config: Config, tmp_path: Path) -> str:
    path = tmp_path / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return str(path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [(), FLEET])
@pytest.mark.parametrize(("title", "commit_every"), [("ray::ClientActor", 1), ("ray::ServerActor", 2)])
def test_a_killed_actor_changes_nothing(
    tiny: Tiny,
    command: Callable[..., Marked],
    tmp_path: Path,
    title: str,
    commit_every: int,
    settings: tuple[str, ...],
) -> None:
    common = [
        *settings,
        "train.rounds=12",
        "ray.actors=2",
        "ray.cpus=0.5",
        f"run.commit_every={commit_every}",
        "method.seconds=0.2",
    ]
    config = tiny(*common, "run.name=killed", method=SLOW)
    running = command("run", write_config(config, tmp_path), "--json")
    kills, rounds = 0, []
    for event in running.events():
        if event["event"] == "round":
            rounds.append(event["round"])
            if kills < 2 and event["round"] >= (1, 5)[kills]:
                time.sleep(0.25)  # Kill in a later round. Rounds of a fleet can be short.
                os.kill(running.mark.pids(title)[0], signal.SIGKILL)
                kills += 1
    assert running.process.wait(60) == 0, running.process.stderr.read() if running.process.stderr else ""
    assert kills == 2
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == 12
    if title == "ray::ClientActor":  # A server can be lost after the commit of a round and before its report.
        assert rounds == list(range(1, 13))
    assert_same_bits(
        known(tiny(*common, "ray.actors=0", method=SLOW)),
        read_tensors(Path(config.run.dir) / "killed"),
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [(), FLEET])
def test_a_killed_driver_is_resumed_to_the_same_bits(
    tiny: Tiny, command: Callable[..., Marked], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    common = [*settings, "train.rounds=12", "ray.actors=2", "ray.cpus=0.5", "method.seconds=0.2"]
    config = tiny(*common, "run.name=killed", method=SLOW)
    running = command("run", write_config(config, tmp_path), "--json")
    run_dir = Path(config.run.dir) / "killed"
    for event in running.events():
        if event["event"] == "round" and event["round"] == 2:
            time.sleep(0.25)
            running.process.send_signal(signal.SIGKILL)
            break
    running.end()
    committed = int((run_dir / "LATEST").read_text()[:6])
    assert 2 <= committed < 12
    resumed = command("resume", str(run_dir), "--json")
    rounds = [event["round"] for event in resumed.events() if event["event"] == "round"]
    assert resumed.process.wait(60) == 0
    assert rounds == list(range(committed + 1, 13))
    assert_same_bits(known(tiny(*common, "ray.actors=0", method=SLOW)), read_tensors(run_dir))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("actors", [0, 2])
def test_control_c_stops_after_the_round_and_says_how_to_resume(
    tiny: Tiny, command: Callable[..., Marked], tmp_path: Path, actors: int
) -> None:
    common = ["train.rounds=5", f"ray.actors={actors}", "ray.cpus=0.5", "method.seconds=0.2", "run.commit_every=2"]
    config = tiny(*common, "run.name=stopped", method=SLOW)
    running = command("run", write_config(config, tmp_path), "--json")
    run_dir = Path(config.run.dir) / "stopped"
    events = []
    for event in running.events():
        events.append(event)
        if event["event"] == "round" and event["round"] == 2:
            time.sleep(0.2)
            os.killpg(running.process.pid, signal.SIGINT)  # to the whole process group, like a terminal
    assert running.process.wait(60) == 1
    assert events[-1]["event"] == "finish"
    assert events[-1]["status"] == "stopped"
    assert events[-1]["round"] == 3
    assert "raydfl resume" in str(events[-1]["next_step"])
    assert (run_dir / "LATEST").read_text().startswith("000003")  # committed outside the interval of commits
    resumed = command("resume", str(run_dir), "--json")
    list(resumed.events())
    assert resumed.process.wait(60) == 0
    assert_same_bits(known(tiny(*common, "ray.actors=0", method=SLOW)), read_tensors(run_dir))
