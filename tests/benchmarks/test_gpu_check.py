"""benchmarks/gpu_check.py covers all parts, keeps its time limit, and completes without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu import equality, federations
from gpu.lines import Line, Watch, report_failure, run_checked, table

from raydfl.core import registry


def test_every_method_objective_transform_and_attack_is_compared() -> None:
    for dry in (False, True):
        cases = federations.cases(dry)
        for kind, package in (
            ("method", "raydfl.methods"),
            ("objective", "raydfl.objectives"),
            ("transform", "raydfl.data.transforms"),
            ("attack", "raydfl.attacks"),
        ):
            assert federations.names(kind, cases) == registry.names(package)
        assert len({str(case) for case in cases}) == len(cases)


def test_differences_are_relative_to_the_tolerance() -> None:
    expected = {"a": torch.tensor([0.0, 1.0]), "b": torch.zeros(0)}
    tolerance = equality.ABSOLUTE + equality.RELATIVE
    result = {"a": torch.tensor([0.0, 1.0 + 3 * tolerance]), "b": torch.zeros(0)}
    share, place = equality.difference(expected, result)
    assert share == pytest.approx(3, rel=1e-3)
    assert place == "a"
    assert equality.difference(expected, {**result, "a": torch.tensor([0.0, float("nan")])})[0] == float("inf")
    with pytest.raises(ValueError, match="other tensors: .*'b'"):
        equality.difference(expected, {"a": expected["a"]})


def test_parts_without_time_are_cut_short_and_failures_are_listed(tmp_path: Path) -> None:
    clock = [0.0]
    watch = Watch(600, now=lambda: clock[0])
    watch.begin(700)
    clock[0] = 599
    assert watch.left == 1  # the whole check reaches its limit first
    clock[0] = 601
    lines = equality.check(federations.cases(), tmp_path, tmp_path, "cpu", watch)
    assert {line.result for line in lines} == {"cut short"}
    assert len(lines) == len(federations.cases())

    def fail() -> Line:
        raise RuntimeError("a tensor on the CPU\nand more")

    line = run_checked("part", "thing", fail)
    assert (line.result, line.figure) == ("FAILED", "RuntimeError: a tensor on the CPU")
    assert "in fail" in line.details["traceback"]
    assert table([line, report_failure("p", "x", ValueError("v"))]).splitlines() == [
        "part  thing  FAILED  RuntimeError: a tensor on the CPU",
        "p     x      FAILED  ValueError: v",
    ]


def test_nothing_is_tried_on_a_gpu_with_a_failed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    line = run_checked("part", "thing", lambda: Line("part", "thing", "ok"))
    assert (line.result, line.figure.partition(":")[0]) == ("skipped", "a kernel has failed")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert run_checked("part", "thing", lambda: Line("part", "thing", "ok")).result == "ok"


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "there is no GPU that PyTorch"), (["--device", "cpu"], "measures nothing of a GPU; give --dry-run too")],
)
def test_without_a_gpu_the_check_explains_the_requirement(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    try:
        code: object = gpu_check.main()
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_completes_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--dry-run", "--out", str(tmp_path)])
    code = gpu_check.main()
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [line for line in report["lines"] if line["result"] not in ("ok", "cut short")] == []
    assert code == 0
    assert {line["part"] for line in report["lines"]} == {
        "equal to the CPU",
        "memory",
        "together: auto",
        "clients a second",
    }
    assert report["dry run"]
    assert report["environment"]["pytorch"] == torch.__version__
    assert "0 failed" in capsys.readouterr().out
