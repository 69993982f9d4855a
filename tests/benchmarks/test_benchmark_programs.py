"""Every program in benchmarks/ starts: its imports exist, it explains its arguments, and it runs with its smallest settings."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile
from digits import idx

from raydfl import load_config, run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = {
    str(path.relative_to(BENCHMARKS).with_suffix("")).replace("/", "."): path
    for path in sorted(BENCHMARKS.rglob("*.py"))
    if path.stem != "__init__"
}
PROGRAMS = [name for name, path in MODULES.items() if "." not in name and "__main__" in path.read_text()]
ABSENT = {"flwr": "Flower", "pfl": "pfl-research", "blazefl": "BlazeFL", "fedjax": "FedJAX", "jax": "JAX"}
"""Packages of the environments of ``make bench-peers``."""

ONE = "--rounds 1 --seeds 1"
SMALLEST = {
    "anatomy": "--root {fsdd} --works crnn_lite --rounds 1",
    "audits": "{study} --out {runs}/audit.md",
    "augmentation": "--root {fsdd} --model crnn_lite --rounds 1",
    "blocks": "--clients 20 --actors 3 --blocks 4 --rounds 1",
    "cuts": "device --turns 1 --networks resnet18",
    "export": "{run} {fsdd}/recordings/0_anna_0.wav",
    "fleet_cost": "--root {fsdd} --rounds 1 --in-flight 14 --actors --events 100",
    "isolation": "--clips 4 --seconds 0.1 --repeats 1",
    "lpa": "--clients 3 --parameters 1000 --layers 2 --repeats 1",
    "methods": "--root {fsdd} --works crnn_lite --rounds 1",
    "noise": f"--root {{fsdd}} {ONE}",
    "object_store": "--rounds 1 --turns 1",
    "ops": "--turns 1 --clients 2 --images",
    "packed": "--kinds webdataset --gigabytes 0.01",
    "planning": "--actors 3 --clients 20 --repeats 1",
    "population": "--clients 20 --private 10 --cohort 5 --network mlp --turns 1 --rounds 1 --actors 0",
    "pretrained": "--root {fsdd} --rounds 1 --clients 1",
    "privacy": "--root {fsdd} --rounds 1",
    "rounds": "--root {fsdd} --works crnn_lite --turns 1 --rounds 1 --contestants raydfl",
    "rules": "--clients 10 --parameters 1000 --repeats 1",
    "scale": "jobs/tiny.yaml train.rounds=1 run.dir={runs} track.mlflow=false",
    "scaling": "cohort --methods fedavg --turns 1 --rounds 1",
    "server": "--clients 3 --parameters 5000 --repeats 1",
    "site_policy": "--rounds 1 --turns 1",
    "study_tables": "--check",
    "trials": "--trials 2 --actors 0 --rounds 1",
    "trivial_detectors": "--ids 1 --clips 3",
    "virtual_time": "--root {fsdd} --clients 12 --only synchronous --seeds 1 --out {runs}/fleet --page {runs}/fleet.md",
    "soak": "--rounds 20 --every 2 --allowed 1000 --out {runs}/soak train.local_epochs=20",
}
MADE = {"run": "run_dir", "study": "study"}
"""Fixtures of further placeholders."""
ELSEWHERE = {
    "crossing": "cluster/silos/test_crossing.py",
    "gpu_check": "benchmarks/test_gpu_check.py",
    "kills": "faults/test_campaign.py",
}
"""Programs with a longer test of their own."""


def load_module(name: str) -> ModuleType:
    """Import a module of benchmarks/. Skip the test if a package of a peer is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ABSENT:
            raise
        pytest.skip(f"{ABSENT[package]} is not installed: make bench-peers")


def test_every_program_has_smallest_settings() -> None:
    assert sorted(PROGRAMS) == sorted([*SMALLEST, *ELSEWHERE])
    for name, file in ELSEWHERE.items():
        assert name in (BENCHMARKS.parent / "tests" / file).read_text()


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_uses_only_existing_names_of_raydfl(name: str) -> None:
    """Check imported names, and attributes of modules. Importing a program checks only the first."""
    module = load_module(name)
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = getattr(module, node.value.id, None)
            if isinstance(owner, ModuleType) and owner.__name__.startswith("raydfl"):
                assert hasattr(owner, node.attr), f"line {node.lineno}: {owner.__name__} has no {node.attr}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_explains_its_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as error:
        load_module(name).main()
    assert not error.value.code
    assert str(load_module(name).__doc__).split()[0] in capsys.readouterr().out


def test_the_tables_of_virtual_time_equal_the_json_files() -> None:
    module = load_module("virtual_time")
    results = module.load_results(module.RESULTS)
    assert module.PAGE.read_text() == module.format_page(results)
    page = module.DOCS.read_text()
    assert page == module.replace_table(page, results)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write noise as spoken digits of two speakers, and as images of digits."""
    data = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (data / "fsdd" / "recordings").mkdir(parents=True)
    for speaker in ("anna", "bert"):
        for digit in range(10):
            for take in range(20):
                wave = 0.1 * rng.standard_normal(2000)
                soundfile.write(data / f"fsdd/recordings/{digit}_{speaker}_{take}.wav", wave, 8000)
    (data / "mnist").mkdir()
    for kind, shape, end in (("images-idx3", (420, 28, 28), 256), ("labels-idx1", (420,), 10)):
        (data / f"mnist/t10k-{kind}-ubyte").write_bytes(idx(rng.integers(0, end, shape, dtype=np.uint8)))
    return {"fsdd": data / "fsdd", "mnist": data / "mnist", "runs": data / "runs"}


@pytest.fixture(scope="session")
def run_dir(folders: dict[str, Path]) -> Path:
    """Train a run of a single round with the spoken digits."""
    overrides = [f"data.root={folders['fsdd']}", f"run.dir={folders['runs']}", "run.name=short", "track.mlflow=false"]
    run(
        load_config(
            BENCHMARKS.parent / "jobs/fsdd.yaml", [*overrides, "train.rounds=1", "train.cohort=2", "ray.actors=0"]
        )
    )
    return folders["runs"] / "short"


@pytest.fixture(scope="session")
def study(folders: dict[str, Path], run_dir: Path) -> Path:
    """Write a study with the results of this run, and of a run without a folder."""
    file = folders["runs"] / "study.yaml"
    (folders["runs"] / "results").mkdir()
    for label, name in (("FedAvg", run_dir.name), ("lost", "lost")):
        result = {"run": name, "labels": {"method": label}}
        (folders["runs"] / "results" / f"{name}.json").write_text(json.dumps(result))
    file.write_text(json.dumps({"title": "digits", "results": "results", "dir": str(folders["runs"])}))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_program_runs_with_its_smallest_settings(
    name: str, folders: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    words = SMALLEST[name]
    made = {name: request.getfixturevalue(fixture) for name, fixture in MADE.items() if f"{{{name}}}" in words}
    names = {**folders, **made}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *(word.format(**names) for word in words.split())]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, cwd=BENCHMARKS.parent, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    assert process.stdout.strip()
