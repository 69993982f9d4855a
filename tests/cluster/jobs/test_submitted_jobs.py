"""Jobs on a head with a token: training, stopping, resuming to the same bits, access control, features and sweeps."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from head import Head, working_dir
from helpers import known

from raydfl.engine.config import Config
from raydfl.engine.storage.store import RunStore
from raydfl.testing import assert_same_bits, read_tensors, train_federation

Tiny = Callable[..., Config]
TESTS = Path(__file__).resolve().parents[2]
SLOW = f"{TESTS}/extra_methods.py:Slow"
PATIENCE = ["--runtime-env-json", json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}})]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Make the folder to submit."""
    return working_dir(tmp_path / "package")


def write(config: Config, path: Path) -> None:
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))


def read_rounds(run_dir: Path) -> int:
    name = RunStore(run_dir).latest() if run_dir.exists() else None
    return 0 if name is None else int(name.partition("-")[0])


def wait_until(true: Callable[[], bool], head: Head, submission: str, seconds: float = 150) -> None:
    """Wait until a condition of a job holds."""
    deadline = time.monotonic() + seconds
    while not true():
        ended = int(time.monotonic()) % 5 == 0 and head.status(submission) in ("FAILED", "SUCCEEDED", "STOPPED")
        if ended or time.monotonic() > deadline:
            pytest.fail(head.job("logs", submission).stdout)
        time.sleep(0.1)


def test_a_stopped_job_resumes_to_the_same_bits(tiny: Tiny, head: Head, package: Path, tmp_path: Path) -> None:
    """The run is stored behind a URI. The local folder is deleted between the two jobs, like a lost machine."""
    common = ["train.rounds=30", "train.cohort=4", "method.seconds=0.3", "run.commit_every=3"]
    kept, database = tmp_path / "kept", tmp_path / "mlflow.db"
    where = [f"run.dir=file://{kept}", "run.name=job", "track.mlflow=true", f"track.uri=sqlite:///{database}"]
    write(tiny(*common, *where, "ray.actors=2", method=SLOW), package / "jobs" / "job.yaml")
    command = ["--working-dir", ".", "--", "python", "jobs/train.py", "jobs/job.yaml", f"data.cache={tmp_path}/cache"]
    first = head.job("submit", "--no-wait", "--submission-id", "first", *PATIENCE, *command, "--json", folder=package)
    assert first.returncode == 0, first.stdout + first.stderr
    wait_until(lambda: read_rounds(kept / "job") >= 3, head, "first")
    assert head.job("stop", "first").returncode == 0
    assert head.status("first") == "STOPPED"
    log = head.job("logs", "first").stdout
    events = parse_events(log)
    stopped = read_rounds(kept / "job")
    assert 3 <= stopped < 30
    ends = [(event["status"], event["next_step"]) for event in events if event["event"] == "finish"]
    assert ends == [("stopped", f"raydfl resume file://{kept}/job ray.address=auto")], log
    # Stopping commits the current round, whatever commit_every is.
    assert [event["round"] for event in events if event["event"] == "round"] == list(range(1, stopped + 1))
    shutil.rmtree(tmp_path / "cache")
    second_job = head.job("submit", "--submission-id", "again", *PATIENCE, *command, "--json", folder=package)
    assert second_job.returncode == 0, second_job.stdout + second_job.stderr
    assert head.status("again") == "SUCCEEDED"
    rounds = [event["round"] for event in parse_events(second_job.stdout) if event["event"] == "round"]
    assert rounds == list(range(stopped + 1, 31))
    assert_same_bits(known(tiny(*common, method=SLOW)), read_tensors(kept / "job"))
    # MLflow has one run, with absolute paths.
    with contextlib.closing(sqlite3.connect(database)) as store:
        found = store.execute("select run_uuid, status, artifact_uri from runs").fetchall()
    mlflow_id = json.loads((kept / "job" / "run.json").read_text())["mlflow_run_id"]
    assert [(run_id, status) for run_id, status, _ in found] == [(mlflow_id, "FINISHED")]
    assert found[0][2].startswith(f"file://{tmp_path}/cache/runs/")


def parse_events(log: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith('{"event"')]


@pytest.mark.parametrize("token", [None, "not-the-token-of-this-head-0123456789"])
def test_jobs_without_the_token_are_rejected(head: Head, package: Path, tmp_path: Path, token: str | None) -> None:
    path = tmp_path / "other-token"
    if token is not None:
        path.write_text(token)
    environment = head.environment(RAY_AUTH_TOKEN_PATH=str(path))
    if token is None:
        del environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]
        environment["HOME"] = str(tmp_path)
    refused = head.job(
        "submit", "--working-dir", ".", "--", "python", "jobs/train.py", environment=environment, folder=package
    )
    assert refused.returncode == 1
    assert re.search("authentication", refused.stdout + refused.stderr, re.IGNORECASE)
    # A command that joins the cluster fails at once with the reason.
    began = time.monotonic()
    joined = subprocess.run(
        [sys.executable, "-m", "raydfl", "run", "jobs/tiny.yaml", "ray.actors=1", f"ray.address=127.0.0.1:{head.port}"],
        env=environment | {"RAYDFL_CACHE": str(tmp_path / "cache")},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    took = time.monotonic() - began
    assert joined.returncode == 2, joined.stdout + joined.stderr
    error = joined.stderr.splitlines()[-1]
    # Older versions of Ray use tokens only on request.
    reason = (
        rf"it requires a token, but ({tmp_path}\S* contains none|Ray [\d.]+ sends none)"
        if token is None
        else f"the token in {path} is not"
    )
    assert re.match(rf"error: the Ray cluster at 127\.0\.0\.1:{head.port} refused access: {reason}", error)
    assert "RAY_AUTH_TOKEN_PATH" in error
    assert took < 20, "Ray's own retries take longer"


def test_a_job_with_a_temporary_output_folder_is_rejected(head: Head, package: Path) -> None:
    done = head.job(
        "submit",
        "--working-dir",
        ".",
        "--",
        "python",
        "jobs/train.py",
        "jobs/tiny.yaml",
        "run.name=lost",
        folder=package,
    )
    assert done.returncode == 1  # whatever the entry's code: Ray says FAILED and 1
    assert "exit code 2" in done.stdout + done.stderr
    assert re.search(r"error: run.dir: \S+_ray_pkg_\w+/runs is in the temporary folder of this Ray job", done.stdout)
    assert "run.dir=/shared/" in done.stdout


def test_the_cluster_prepares_features_and_a_stopped_job_resumes(head: Head, package: Path, tmp_path: Path) -> None:
    log = tmp_path / "read.log"
    (package / "jobs" / "slow.yaml").write_text(
        yaml.safe_dump(
            {
                "method": "fedavg",
                "data": {
                    "name": f"{TESTS / 'cluster' / 'jobs' / 'slow_tones.py'}:SlowTones",
                    "log": str(log),
                    "speakers": 24,
                    "features": {"sample_rate": 8000, "bands": 16, "seconds": 0.25},
                    "partition": {"by": "group"},
                    "cache": str(tmp_path / "cache"),
                },
            }
        )
    )
    command = ["--working-dir", ".", "--", "python", "jobs/prepare.py", "jobs/slow.yaml", "--json"]
    first = head.job("submit", "--no-wait", "--submission-id", "prepare", *command, folder=package)
    assert first.returncode == 0, first.stdout + first.stderr
    wait_until(lambda: len(list((tmp_path / "cache").glob("*.parts/*.npz"))) >= 2, head, "prepare")
    done = {path.name for path in (tmp_path / "cache").glob("*.parts/*.npz")}
    assert head.job("stop", "prepare").returncode == 0
    assert head.status("prepare") == "STOPPED"
    second_job = head.job("submit", *command, folder=package)
    assert second_job.returncode == 0, second_job.stdout + second_job.stderr
    assert "Features are ready: 24 clients" in parse_events(second_job.stdout)[-1]["text"]  # type: ignore[operator]
    assert len(list((tmp_path / "cache").glob("*/store.json"))) == 1
    lines = [line.split() for line in log.read_text().splitlines()]
    clips = Counter(clip for clip, _ in lines)
    assert set(clips.values()) <= {1, 2}
    assert sum(count == 1 for count in clips.values()) >= 128 * len(done), "what was there is not computed again"
    assert len({process for _, process in lines}) >= 2, "not by one process"


def test_a_sweep_runs_in_parallel_and_resumes_after_a_stop(
    tiny: Tiny, head: Head, package: Path, tmp_path: Path
) -> None:
    # Enough rounds that no run ends before the stop command starts.
    config = tiny("train.rounds=40", "method.seconds=0.2", "run.name=null", method=SLOW)
    write(config, package / "jobs" / "base.yaml")
    folder = tmp_path / "sweep"
    (package / "jobs" / "grid.yaml").write_text(
        "title: a grid\nbase: base.yaml\naxes: {train.optimiser.lr: [0.1, 0.2]}\nrepeat: {run.seed: [1, 2]}\n"
    )
    command = ["--working-dir", ".", "--", "python", "jobs/sweep.py", "jobs/grid.yaml", f"run.dir={folder}", "--json"]
    first = head.job("submit", "--no-wait", "--submission-id", "sweep", *PATIENCE, *command, folder=package)
    assert first.returncode == 0, first.stdout + first.stderr

    def has_started() -> int:
        return sum(read_rounds(path.parent) >= 2 for path in folder.glob("*/run.json"))

    wait_until(lambda: has_started() >= 2, head, "sweep")
    assert head.job("stop", "sweep").returncode == 0
    assert head.status("sweep") == "STOPPED"
    texts = [str(event.get("text")) for event in parse_events(head.job("logs", "sweep").stdout)]
    assert any(text.startswith("4 runs to do, 3 at a time") for text in texts), texts
    assert any("runs are not finished. Run the same command to continue them." in text for text in texts), texts
    second_job = head.job("submit", *PATIENCE, *command, folder=package)
    assert second_job.returncode == 0, second_job.stdout + second_job.stderr
    assert "continuing after round" in second_job.stdout
    assert {read_rounds(path.parent) for path in folder.glob("*/run.json")} == {40}
    assert len((folder / "grid.csv").read_text().splitlines()) > 2
    run_dir = next(folder.glob("*0.2*seed=2*"))
    reference = tiny(
        "train.rounds=40", "method.seconds=0", "run.name=near", "run.seed=2", "train.optimiser.lr=0.2", method=SLOW
    )
    assert_same_bits(train_federation(reference), read_tensors(run_dir))
