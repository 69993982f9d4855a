"""The command ``raydfl report`` with images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from commands import Raydfl

from raydfl.engine.config import Config
from raydfl.runs._run import run

Tiny = Callable[..., Config]


def test_reports_of_one_and_of_several_runs(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    one, two = (run(tiny("train.rounds=2", f"run.seed={seed}", f"run.name=seed{seed}")).run_dir for seed in (1, 2))
    (one / "report.html").unlink()
    assert raydfl("report", one).out == f"{one / 'report.html'}\n"
    assert "<html" in (one / "report.html").read_text()
    out = tmp_path / "both.html"
    assert raydfl("report", one, two, "--out", out).out == f"{out}\n"
    page = out.read_text()
    assert "seed1" in page
    assert "seed2" in page
