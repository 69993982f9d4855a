"""Record the bits and the ownership of every case in ``golden.json``, and the digest of every job.

Run ``python tests/golden/golden_record.py`` after an intended change. Name the changed cases and the reason in the commit.
Bits are recorded for each set of kernels; the digests of ownership and of jobs hold on every machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "golden"), str(TESTS.parent)]

import numpy as np
from golden_cases import Case, cases
from tiny_federation import tiny_values

from raydfl import Config, load_config, load_study, make_config
from raydfl.engine import apply_overrides
from raydfl.testing import describe_kernels, digest, list_ownership, start_server, train_federation

FILE = TESTS / "golden" / "golden.json"
FLEET = (
    "data.speakers=8",
    "train.rounds=12",
    "train.fleet={buffer: 2, concurrency: 5, seconds: {spread: 1, down: 1e3}}",
)


def configure(name: str, case: Case, folder: Path, cache: Path) -> Config:
    """Make the configuration of a case, with its run in ``folder``."""
    values = tiny_values(case.method)
    values["data"]["cache"] = str(cache)
    values["run"] |= {"dir": str(folder), "name": name.replace(" ", "-")}
    values["train"]["rounds"] = 2
    return make_config(apply_overrides(values, case.overrides))


def measure(config: Config) -> dict[str, Any]:
    """Train a case and return its recorded values."""
    bits = train_federation(config)
    values = np.frombuffer(b"".join(bits[name] for name in sorted(bits) if name.startswith("server ")), np.float32)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], len(values))
    return {
        "ownership": digest({"": json.dumps(list_ownership(config), sort_keys=True).encode()}),
        "bits": digest(bits),
        "signed_sum": round(float(signs @ values), 4),
    }


JOBS = sorted(str(path.relative_to(TESTS.parent)) for path in (TESTS.parent / "jobs").rglob("*.yaml"))
STUDIES = [name for name in JOBS if "\naxes:" in (TESTS.parent / name).read_text()]
# The digest of a study or a job with pretrained weights depends on the user's files.
SWEEPS = [name for name in STUDIES if "init_from: " not in (TESTS.parent / name).read_text()]
RUNS = [
    name
    for name in JOBS
    if name not in STUDIES and "/clusters/" not in name and "name: pretrained" not in (TESTS.parent / name).read_text()
]


def compute_job_digest(name: str) -> str:
    """Return the digest of a job's results, with recordings below ``/recordings``.

    Relative paths are below ``/`` meanwhile, so the digest is the same on every machine.
    """
    file, folder = TESTS.parent / name, Path.cwd()
    os.environ["RAYDFL_DATA"] = "/recordings"
    os.chdir("/")
    try:
        if name in RUNS:
            return load_config(file).digest()
        return digest({run.name: run.config.digest().encode() for run in load_study(file).trials})
    finally:
        os.chdir(folder)
        del os.environ["RAYDFL_DATA"]


def list_arrivals() -> list[dict[str, Any]]:
    """Return the virtual time and the arrivals, with their staleness, of each server step of an asynchronous run."""
    with tempfile.TemporaryDirectory() as folder:
        config = configure("fleet", Case(overrides=FLEET), Path(folder), Path(folder, "cache"))
        with contextlib.closing(start_server(config)) as server:
            steps = []
            for _ in range(config.train.rounds):
                arrivals = {order.task.client_id: order.staleness for order in server._federation.plan()}
                server.round()
                # Rounded, because the last bit of an exponential differs between libraries
                steps.append({"seconds": round(server._federation.checkpoint.in_flight.fleet.seconds, 6), **arrivals})
    return steps


def record() -> None:
    """Write ``golden.json``. Cases with unchanged bits keep the bits recorded with other kernels."""
    recorded, kernels = json.loads(FILE.read_text()) if FILE.exists() else {"cases": {}}, describe_kernels()
    cases_by_name: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases().items():
            values = measure(configure(name, case, Path(folder), Path(folder, "cache")))
            earlier = recorded["cases"].get(name, {"bits": {}})
            if values["bits"] != earlier["bits"].get(kernels):
                print("changed:", name)
                earlier = {"bits": {}}
            cases_by_name[name] = {**values, "bits": {**earlier["bits"], kernels: values["bits"]}}
    jobs = {name: compute_job_digest(name) for name in (*RUNS, *SWEEPS)}
    values = {"cases": cases_by_name, "jobs": jobs, "arrivals": list_arrivals()}
    FILE.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    record()
