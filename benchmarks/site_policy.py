"""Measure the costs of a site's policy and record: time of a round and of the start, memory, and bytes of the record.

    python benchmarks/site_policy.py --rounds 20 --turns 3

Runs of jobs/silos.yaml in this process (two sites, 16 clients) alternate between no policy and a policy at each site.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.compute as pc

from raydfl import load_config, run
from raydfl.cluster.site_guard import SiteGuard
from raydfl.cluster.site_policy import POLICIES, SitePolicy
from raydfl.cluster.site_record import SiteRecord
from raydfl.core.yaml import to_yaml
from raydfl.engine.storage import read_rows
from raydfl.engine.telemetry import WALL

JOB = Path(__file__).parents[1] / "jobs" / "silos.yaml"
SITES = ("north", "south")


def main() -> None:
    """Measure and print a line for each cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raydfl-policy-") as name:
        folder = Path(name)
        policies = [make_policy(folder, site) for site in SITES]
        places = os.pathsep.join(str(write_policy(folder, policy)) for policy in policies)
        times: dict[str, list[float]] = {"": [], places: []}
        seconds, memory = guard(folder, policies[0])
        train(folder, "first", 1)  # Imports and caches.
        for turn in range(given.turns):
            for policy in times:
                with mock.patch.dict(os.environ, {POLICIES: policy}):
                    times[policy] += train(folder, f"{turn}-{bool(policy)}", given.rounds)
        without, with_policy = (statistics.median(seconds) for seconds in times.values())
        print(f"round without policy  {1000 * without:8.1f} ms")
        print(
            f"round with policies   {1000 * with_policy:8.1f} ms  (difference {1000 * (with_policy - without):+.1f} ms)"
        )
        lines = [line for policy in policies for line in policy.record.read_bytes().splitlines(keepends=True)]
        rounds = given.turns * given.rounds * len(SITES)
        print(f"record                {sum(map(len, lines)) / rounds:8.0f} bytes per round and site")
        print(f"line of the record    {1000 * append(folder):8.2f} ms")
        print(f"start of a process    {1000 * seconds:8.1f} ms  (digests of the code; memory {memory:+.1f} MB)")


def make_policy(folder: Path, site: str) -> SitePolicy:
    """Return a policy that allows everything."""
    values: dict[str, Any] = {"methods": ["any"], "rules": ["any"], "code": ["any"]}
    values |= {"site": site, "record": folder / "records" / f"{site}.jsonl", "metrics": ["loss", "accuracy"]}
    return SitePolicy.model_validate(values)


def write_policy(folder: Path, policy: SitePolicy) -> Path:
    """Write a policy, and return its file."""
    path = folder / f"{policy.site}.yaml"
    path.write_text(to_yaml(policy.model_dump(mode="json"), flow=False))
    return path


def configure(folder: Path, name: str, rounds: int) -> Any:
    """Load the configuration of a run in this process."""
    sites = [f"data.sites.{site}.folder={folder / site}" for site in SITES]
    places = [f"run.dir={folder / 'runs'}", f"run.name={name}", f"data.cache={folder / 'cache'}"]
    return load_config(JOB, [*sites, *places, "ray.actors=0", f"train.rounds={rounds}", "train.local_epochs=1"])


def train(folder: Path, name: str, rounds: int) -> list[float]:
    """Train a run, and return the time of each round in seconds."""
    result = run(configure(folder, name, rounds))
    rows = read_rows(
        result.run_dir, where=(pc.field("client") == "") & pc.field("metric").isin([f"seconds/{part}" for part in WALL])
    )
    return list(rows.group_by("round").aggregate([("value", "sum")]).column("value_sum").to_pylist())


def append(folder: Path, lines: int = 100) -> float:
    """Return the median time of a line of a record in seconds."""
    record, times = SiteRecord(folder / "records" / "lines.jsonl", "north"), []
    for number in range(lines):
        begin = time.perf_counter()
        record.append("sent", run="run", round=number, bytes={"tensors": 100_000, "weights": 80, "metrics": 300})
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def guard(folder: Path, policy: SitePolicy) -> tuple[float, float]:
    """Return the time of the first check of a run in a process in seconds, and its memory in MB."""
    config = configure(folder, "guard", 1)
    begin, before = time.perf_counter(), read_memory()
    SiteGuard(policy, config)
    return time.perf_counter() - begin, (read_memory() - before) / 1e6


def read_memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
