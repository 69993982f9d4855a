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

from raydfl.core import ops
from raydfl.engine.config import Config
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
        pickle.loads(sent).check_kernels()
    assert "VSX here" in caplog.text
