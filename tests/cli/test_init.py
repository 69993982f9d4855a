"""`raydfl init`, from this repository and from a wheel. Oracle: the repository's own files."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from commands import Raydfl

ROOT = Path(__file__).resolve().parents[2]


def _read_contents(root: Path) -> dict[str, bytes]:
    """Return the content of ``jobs/``, ``tune/`` and ``cluster.yaml`` by relative path."""
    files = [root / "cluster.yaml", *(root / "jobs").rglob("*"), *(root / "tune").rglob("*")]
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in files
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_init_writes_the_examples_of_the_documentation(
    raydfl: Raydfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = raydfl("init")
    assert output.code == 0
    assert _read_contents(tmp_path) == _read_contents(ROOT)
    assert output.out.splitlines()[1] == "start with: raydfl run jobs/tiny.yaml  # seconds, without Ray"
    assert raydfl("config", "jobs/tiny.yaml").code == 0
    (tmp_path / "jobs" / "tiny.yaml").unlink()
    (tmp_path / "jobs" / "mine.yaml").write_text("mine")
    assert raydfl("init").out.partition("\n")[0].endswith(": 1")  # missing files are restored, existing files stay
    assert (tmp_path / "jobs" / "mine.yaml").read_text() == "mine"
    assert ": 0 (all exist)\n" in raydfl("init").out
    assert "cd 'a folder' && raydfl run" in raydfl("init", "a folder").out
    assert _read_contents(tmp_path / "a folder") == _read_contents(ROOT)


def test_init_overwrites_nothing(raydfl: Raydfl, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "tiny.yaml").write_text("changed")
    (tmp_path / "cluster.yaml").mkdir()
    raydfl("init", tmp_path).refuses(r"cluster\.yaml, jobs/tiny\.yaml", "nothing was written", "raydfl init FOLDER")
    assert (tmp_path / "jobs" / "tiny.yaml").read_text() == "changed"
    assert len(list(tmp_path.rglob("*"))) == 3


def test_an_impossible_folder_is_reported(raydfl: Raydfl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    raydfl("init", tmp_path / "file" / "folder").refuses("file/folder", "cannot be written", "Choose another folder")


def _run_command(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, check=False, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_and_a_source_distribution_contain_the_examples(tmp_path: Path) -> None:
    """Build both from a copy of git's files without a compiler, then use the wheel from an empty folder."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a git repository")
    source = tmp_path / "source"
    for name in _run_command(["git", "ls-files", "-co", "--exclude-standard"], ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())

    def build_package(kind: str, folder: Path) -> Path:
        code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(tmp_path)!r}))"
        return tmp_path / _run_command([sys.executable, "-P", "-c", code], folder, CXX="no-compiler").splitlines()[-1]

    with tarfile.open(build_package("sdist", source)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert _read_contents(unpacked) == _read_contents(ROOT)
    for name in ("setup.py", "raydfl/core/ops/csrc/operators.cpp", "raydfl/core/ops/csrc/kernels.h"):
        assert (unpacked / name).is_file(), name

    with zipfile.ZipFile(build_package("wheel", unpacked)) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    _run_command(
        [sys.executable, "-P", "-m", "raydfl", "init"], tmp_path / "empty", PYTHONPATH=str(tmp_path / "installed")
    )
    assert _read_contents(tmp_path / "empty") == _read_contents(ROOT)
