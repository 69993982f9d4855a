"""The kernels on which a run's last digits depend: recorded at the start and at each resume, with a warning if they differ."""

from __future__ import annotations

import io
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import stop_after

from raydfl.core import ops, version
from raydfl.core.errors import ConfigError
from raydfl.core.ops import _backend
from raydfl.engine import Worker, software
from raydfl.engine.config import Config
from raydfl.engine.storage.private import PrivateStore
from raydfl.runs._run import resume
from raydfl.runs.progress import Progress

Tiny = Callable[..., Config]


def test_resume_on_other_kernels_is_recorded_with_a_warning(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("train.rounds=1", "run.name=moved")
    stop_after(config, 1)
    run_dir = Path(config.run.dir) / "moved"

    def about() -> dict[str, object]:
        found: dict[str, object] = json.loads((run_dir / "run.json").read_text())
        return found

    def messages(rounds: int) -> str:
        stream = io.StringIO()
        resume(run_dir, [f"train.rounds={rounds}"], Progress("lines", stream))
        return stream.getvalue()

    first = ops.kernels()
    assert about()["kernels"] == first
    assert first["instruction_set"] == torch.backends.cpu.get_cpu_capability()
    assert first["onednn"] in torch.__config__.show()
    assert "other kernels" not in messages(2)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "VSX")
    difference = f"instruction_set {first['instruction_set']} there, VSX here"
    assert messages(3).count(f"warning: the run resumes on other kernels ({difference}).") == 1
    assert "other kernels" not in messages(3)  # there is nothing to do
    assert "other kernels" not in messages(4)
    resumes = about()["resumes"]
    assert isinstance(resumes, list)
    assert [event["round"] for event in resumes] == [1, 2, 3]
    assert [event["kernels"]["instruction_set"] for event in resumes] == [first["instruction_set"], "VSX", "VSX"]
    former = {key: value for key, value in about().items() if key not in ("kernels", "resumes")}
    (run_dir / "run.json").write_text(json.dumps(former))
    assert "other kernels" not in messages(5)


def test_worker_with_other_kernels_logs_a_warning(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = pickle.dumps(tiny())
    pickle.loads(sent).check_kernels()
    assert not caplog.records
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "VSX")
    with caplog.at_level(logging.WARNING):
        pickle.loads(sent).check_software()
        pickle.loads(sent).check_kernels()
    assert "VSX here" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setattr(torch, "__version__", "1.0"), r"torch 1\.0 here, \S+ on the first machine"),
        (
            lambda patch: patch.setattr(software, "describe_source", lambda: "0.0.9 (0)"),
            r"raydfl 0\.0\.9 \(0\) here, 0\.1\.0 \(\w+\) on the first",
        ),
        (
            lambda patch: patch.setattr(_backend, "is_compiled", lambda: not ops.is_compiled()),
            r"operators \w+ here, \w+ on the first",
        ),
    ],
)
def test_worker_with_different_software_is_rejected(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    sent = pickle.dumps(tiny())
    change(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        pickle.loads(sent).check_software()
    with pytest.raises(ConfigError, match="Install the same raydfl and PyTorch on every node"):
        Worker(Path(), pickle.loads(sent), PrivateStore(Path()), "cpu")


def test_description_of_the_source_changes_with_any_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "core").mkdir()
    monkeypatch.setattr(version, "__file__", str(tmp_path / "core" / "version.py"))
    module = tmp_path / "core" / "module.py"
    texts = set()
    for content in ("a = 1", "a = 2"):
        module.write_text(content)
        texts.add(version.describe_source.__wrapped__())
    module.rename(tmp_path / "module.py")
    texts.add(version.describe_source.__wrapped__())
    assert len(texts) == 3
