"""Run tests with the oldest or newest supported versions, and print a summary line: ``make test-versions``.

python -P tests/versions/end.py oldest LOG
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("ray", "mlflow", "torch", "numpy", "pandas", "pyarrow", "pydantic")
WITH_RAY = [
    "tests/laws/test_ray_pool.py::test_killed_client_actors_change_nothing",
    "tests/laws/test_ray_pool.py::test_law_1_serial_and_1_2_and_4_actors_give_the_same_bits[fedavg]",
    "tests/cluster/jobs/test_submitted_jobs.py::test_jobs_without_the_token_are_rejected",
    "tests/cluster/jobs/test_submitted_jobs.py::test_a_stopped_job_resumes_to_the_same_bits",
    "tests/experiments/test_study_run.py::test_a_study_and_its_runs_are_nested_in_mlflow",
    "tests/experiments/test_trainable.py::test_trials_of_asha_have_the_bits_of_runs_alone",
    "tests/runs/test_tracking.py::test_tracked_run_is_read_back",
    "tests/runs/test_tracking.py::test_rounds_are_tracked_once",
]
"""The pool, a submitted job, a search, a user's own Tuner, and the tracker."""


def run_tests(log: Path, *arguments: str) -> tuple[int, str]:
    """Run tests and return the exit code and pytest's last line."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        f"--rootdir={ROOT}",
        f"--config-file={ROOT / 'pyproject.toml'}",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Ray's workers import from the driver's folder first. In the repository, raydfl has no compiled operators there.
    process = subprocess.run(command, check=False, cwd=log.parent, env=environment, capture_output=True, text=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(process.stdout + process.stderr)
    return process.returncode, (process.stdout.strip().splitlines() or ["nothing printed"])[-1].strip("= ")


def main() -> None:
    """Run the fast laws, then the tests with Ray, and print the summary line."""
    end, log = sys.argv[1], Path(sys.argv[2]).resolve()
    log.write_text("", encoding="utf-8")
    laws = run_tests(log, "--color=no", "--override-ini=addopts=", "-m", "not slow", str(ROOT / "tests" / "laws"))
    ray = run_tests(log, "--color=no", "--override-ini=addopts=", *(f"{ROOT}/{test}" for test in WITH_RAY))
    packages = ", ".join(f"{name} {version(name)}" for name in SHOWN)
    print(
        f"{end}: Python {platform.python_version()}, {packages}; laws: {laws[1]}; with Ray: {ray[1]}; all of it: {log}"
    )
    sys.exit(bool(laws[0] or ray[0]))


if __name__ == "__main__":
    main()
