"""Kill processes at random moments in runs of every method on a cluster of several nodes, and compare the results.

    python benchmarks/kills.py [--methods fedavg scaffold] [--store bucket] [--seed 1] [--out kills.md]

One Ray cluster of a head and two worker nodes on this machine serves all runs. Each run is killed five times by ``kill
-9``, at moments drawn by the seed: a client actor, the server actor, a client actor again, a worker node (a new one
then joins) and the driver, after which the run is resumed. Half of the runs commit every round, the rest every third.
The resulting state (the server's tensors, every client's private state) is compared bit for bit with an undisturbed run
in one process without Ray.

The runs are in one of three stores:

- ``folder``: a folder that all nodes see.
- ``bucket``: an object store (moto). Each worker node has a mount namespace of its own that hides the driver's cache
  by a file system in memory. A killed node loses its files. Then the whole cluster is killed too, with Ray's GCS and
  every raylet, and the run is resumed on a new one. Needs the right to create mount namespaces.
- ``machine``: a folder of one machine, with the Ray that the run itself starts. Only client actors, the server actor
  and the driver are killed.

The table has the killed process, the moment, the time until the next finished round, and whether the run's result was
equal.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from clusters import Bucket, Machines, OneMachine

from raydfl.cluster import server as servers
from raydfl.cluster.server import Server
from raydfl.core import registry
from raydfl.core.remote import below
from raydfl.engine.config import Config, load_config, make_config
from raydfl.engine.overrides import apply_overrides
from raydfl.engine.storage.mirror import local_run
from raydfl.engine.telemetry import RoundReport
from raydfl.runs import _run as runs
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import read_tensors

ROOT = Path(__file__).parents[1]
PLAN = ("client actor", "server actor", "client actor", "node", "driver")
"""What is killed in one run."""
PLANS = {
    "folder": PLAN,
    "bucket": (*PLAN, "cluster"),
    "machine": ("client actor", "server actor", "client actor", "driver"),
}
"""The same by store."""
ROUNDS = 200
_FIRST, _APART = 3, 6
"""Rounds before the first kill, and from one to the next."""
_WITHIN = 0.3
"""Maximum delay of a kill after the report of its round, in seconds."""
_PATIENCE = 660.0
"""Seconds without a finished round until a run counts as hanging."""


class HangingError(Exception):
    """A run made no progress after a kill."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One row of the table."""

    method: str
    commit_every: int
    what: str
    after_round: int
    """Rounds reported before the kill."""
    recovery: float
    """Seconds from the kill until the next round was reported."""
    equal: bool
    """Whether the run's final state was equal."""


class _Told(Progress):
    """A progress display that reports each round to another process."""

    def __init__(self, to: Connection) -> None:
        super().__init__("quiet")
        self._to = to

    def round(self, report: RoundReport) -> None:
        self._to.send(report.round)


def _drive(values: dict[str, Any], to: Connection) -> None:
    """Start or resume the run: the code of the driver's process."""
    servers._CALL_S = 0.0  # each round is reported when it is finished, so that a kill can hit any round
    runs.write_page = lambda records, out: out.write_text("not drawn") and out  # type: ignore[assignment]
    runs.run(make_config(values), _Told(to))
    to.send(None)


class Driver:
    """A process that runs ``raydfl run``'s code, forked from a process with everything imported."""

    def __init__(self, config: Config) -> None:
        context = multiprocessing.get_context("forkserver")
        self._from, to = context.Pipe(duplex=False)
        self.process = context.Process(target=_drive, args=(config.model_dump(mode="json"), to))
        self.process.start()
        to.close()

    def rounds(self) -> Iterator[int]:
        """Yield the numbers of finished rounds until the driver ends.

        Raises:
            HangingError: No round was finished for a long time.
        """
        while True:
            if not self._from.poll(_PATIENCE):
                raise HangingError(f"no round for {_PATIENCE:g} s")
            try:
                number = self._from.recv()
            except EOFError:  # killed, or failed
                return
            if number is None:
                return
            yield number

    def pending(self) -> list[int]:
        """Return finished rounds that were not yielded yet."""
        numbers = []
        with contextlib.suppress(EOFError):
            while self._from.poll():
                numbers.append(self._from.recv())
        return [number for number in numbers if number is not None]

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.process.kill()
        self.process.join()

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        self.process.join(60)
        self.process.kill()
        self.process.join()
        return self.process.exitcode or 0


def _strike(what: str, machines: Machines | OneMachine, driver: Driver, rng: np.random.Generator) -> None:
    if what == "driver":
        driver.kill()
    elif isinstance(machines, Machines) and what == "node":
        machines.kill_node(int(rng.integers(2)))
    elif isinstance(machines, Machines) and what == "cluster":
        machines.kill()
    else:
        title = {"client actor": "ray::ClientActor", "server actor": "ray::ServerActor"}[what]
        until = time.monotonic() + 60
        while not (pids := machines.actors(title)):  # it is still being replaced after the last kill
            if time.monotonic() > until:
                raise HangingError(f"there was no {what} for 60 s")
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(rng.choice(pids)), signal.SIGKILL)


def _at(config: Config, machines: Machines | OneMachine) -> Config:
    ray = config.ray.model_copy(update={"address": machines.address or None})
    return config.model_copy(update={"ray": ray})


def run_disturbed(
    machines: Machines | OneMachine, config: Config, plan: Sequence[str], rng: np.random.Generator
) -> list[tuple[str, int, float]]:
    """Do a run with the kills of the plan. Yield the target, its round, and the seconds until the next round.

    Raises:
        HangingError: The run made no progress, ended too early for the plan, or failed.
    """
    driver = Driver(_at(config, machines))
    kills: list[tuple[str, int, float]] = []
    waiting = list(plan)
    struck: tuple[str, int, float] | None = None
    resumed = struck
    """The kill after which the driver was started again."""
    next_round = _FIRST
    try:
        while True:
            last = 0
            for number in driver.rounds():
                last = number
                if struck is not None:
                    what, after, when = struck
                    kills.append((what, after, time.monotonic() - when))
                    struck, next_round = None, number + _APART - int(rng.integers(4))
                if waiting and number >= next_round and struck is None:
                    what, moment = waiting.pop(0), time.monotonic() + float(rng.uniform(0, _WITHIN))
                    while time.monotonic() < moment and last < config.train.rounds - _FIRST:
                        time.sleep(0.01)
                        last = max([last, *driver.pending()])
                    struck = (what, last, time.monotonic())
                    _strike(what, machines, driver, rng)
                    if what == "driver":
                        break
            if struck is not None and struck[0] in ("driver", "cluster") and struck is not resumed:
                driver.end()  # A driver without its cluster ends by itself.
                driver, resumed = Driver(_at(config, machines)), struck
                continue
            if driver.end() != 0 or last != config.train.rounds or waiting:
                raise HangingError(
                    f"the driver ended with {driver.process.exitcode} after round {last}; left: {waiting}"
                )
            return kills
    finally:
        driver.kill()


def make_tiny_config(method: str, folder: Path, name: str, *overrides: str) -> Config:
    """Return the tiny federation with this method, and its runs in a folder."""
    values = load_config(ROOT / "jobs" / "tiny.yaml").model_dump(mode="json", exclude={"method", "models"})
    values |= {"method": {"name": method}, "run": {"name": name, "dir": str(folder / "runs"), "seed": 1}}
    if method == "fedstar":
        values["data"]["unlabelled"] = {"keep": 0.4}
    if method.startswith("profila"):
        values["objective"] = {"name": "compact", "size": 4, "normal": ["yes"]}
    if method == "profila_as_run":
        pools = {"normal": ["yes"], "anomalous": ["no"]}
        values["data"]["pools"] = {pool: {"column": "label", "values": labels} for pool, labels in pools.items()}
    if method == "fedmlac":
        values["models"] = {"plugin": "crnn_tiny", "local": ["crnn_tiny", {"name": "crnn_tiny", "hidden": 8}]}
    elif method in ("multifl", "unifl", "harmony", "modality_mirror"):
        values["models"] = {"audio": "crnn_tiny", "video": "crnn_tiny"}
    else:
        values["models"] = {"model": "split_cnn_tiny" if method == "fedbn" else "crnn_tiny"}
    common = [
        f"train.rounds={ROUNDS}",
        "evaluate.every=10",
        "train.local_epochs=1",
        "train.optimiser={name: sgd, lr: 0.1}",
    ]
    return make_config(apply_overrides(values, [*common, *overrides]))


def run_undisturbed(config: Config) -> Path:
    """Do the whole run in this process, and return its folder."""
    server = Server(create(config, Progress("quiet")), config)
    with contextlib.closing(server):
        while server.round_index < config.train.rounds:
            server.round()
    return Path(config.run.dir) / str(config.run.name)


def campaign(
    methods: Mapping[str, Sequence[str]],
    seed: int,
    folder: Path,
    store: str = "folder",
    settings: Sequence[str] = (),
) -> Iterator[Kill]:
    """Kill runs of these methods by their plans. Yield the rows of each run after its comparison.

    Args:
        methods: the targets to kill, in turn, by method.
        seed: of the moments, and of the actor or node.
        folder: for the runs.
        store: of the runs: a key of :data:`PLANS`.
        settings: of all runs, such as ``train.fleet.buffer=1``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "raydfl.runs._run"])
    hidden = folder / "own"
    hidden.mkdir()
    overrides = [*settings, "ray.actors=2", "ray.ready_timeout=600"]
    with contextlib.ExitStack() as opened:
        if store == "bucket":
            bucket = opened.enter_context(contextlib.closing(Bucket()))
            overrides += [f"run.dir={bucket.uri}", f"data.cache={hidden / 'cache'}"]
        machines = OneMachine() if store == "machine" else Machines(hidden if store == "bucket" else None)
        opened.callback(machines.close)
        for number, (method, plan) in enumerate(methods.items()):
            every = (1, 3)[number % 2]
            reference = run_undisturbed(
                make_tiny_config(method, folder, f"{method}-undisturbed", "ray.actors=0", *settings)
            )
            config = make_tiny_config(method, folder, f"{method}-killed", *overrides, f"run.commit_every={every}")
            kills = run_disturbed(machines, config, plan, np.random.default_rng([seed, number]))
            run = below(str(config.run.dir), str(config.run.name))
            fetched = local_run(run, [f"data.cache={folder / 'fetched'}"])
            equal = read_tensors(fetched) == read_tensors(reference)
            for what, after, recovery in kills:
                yield Kill(method, every, what, after, recovery, equal)


def table(kills: Sequence[Kill]) -> str:
    """Format the rows as Markdown."""
    lines = ["| method | commit every | killed | when | next round after | equal |", "|---|---|---|---|---|---|"]
    for kill in kills:
        when = f"after round {kill.after_round}"
        equal = "yes" if kill.equal else "**no**"
        lines.append(
            f"| {kill.method} | {kill.commit_every} | {kill.what} | {when} | {kill.recovery:.1f} s | {equal} |"
        )
    return "\n".join(lines) + "\n"


def _run_with_token() -> int:
    """Run this program again in a process with its own Ray token, which Ray reads when it is imported."""
    with tempfile.TemporaryDirectory(prefix="rk") as folder:
        token = Path(folder) / "token"
        token.write_text(uuid.uuid4().hex)
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        others = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        return subprocess.run([sys.executable, *sys.argv], env={**others, **own}, check=False).returncode


def main() -> None:
    """Print the table as it grows, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=registry.names("raydfl.methods"))
    parser.add_argument("--store", choices=sorted(PLANS), default="folder", help="where the runs are (default: folder)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="settings of all runs, such as train.fleet.buffer=1")
    parser.add_argument("--out", type=Path, default=None, help="file for the table")
    given = parser.parse_args()
    if os.environ.get("RAY_AUTH_MODE") != "token":
        sys.exit(_run_with_token())
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory(prefix="rk") as folder:
        plans = dict.fromkeys(given.methods, PLANS[given.store])
        for kill in campaign(plans, given.seed, Path(folder), given.store, given.set):
            kills.append(kill)
            print(table([kill]).splitlines()[-1], flush=True)
            if given.out is not None:
                given.out.write_text(table(kills))
    print(f"{len(kills)} kills, {sum(kill.equal for kill in kills)} in runs that ended equal")
    sys.exit(0 if all(kill.equal for kill in kills) else 1)


if __name__ == "__main__":
    main()
