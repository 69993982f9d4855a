"""The result of a run: history, figures and notebook output match the metrics table, and a loaded result is equal."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import ray.train
from fake_run import config, make_run
from matplotlib.figure import Figure
from test_progress import Clock, make_report, make_result

from raydfl import Result, load_result, resume, run
from raydfl.core.errors import InputError, RunDirectoryError
from raydfl.engine.config import Config
from raydfl.runs.progress import Progress, default_progress
from raydfl.runs.report import write_report

Tiny = Callable[..., Config]


def test_history_equals_the_metrics_table(tmp_path: Path) -> None:
    rows = make_run(tmp_path / "run", config(rounds=6), clients=3)
    history = Result(tmp_path / "run", 6, finished=True).history
    assert history.index.tolist() == [1, 2, 3, 4, 5, 6]
    assert history.index.name == "round"
    pooled = [row for row in rows if row.client == "" and row.array is None]
    table = history.to_dict("index")
    assert {(number, name) for number, row in table.items() for name, value in row.items() if value == value} == {
        (row.round, f"{row.split} {row.metric}") for row in pooled
    }
    assert all(table[row.round][f"{row.split} {row.metric}"] == row.value for row in pooled)
    assert history["test plugin/accuracy"].notna().tolist() == [False] * 4 + [True, True]
    assert history.columns[0] == "test plugin/accuracy"  # as on the page: scores first


def test_figures_equal_those_of_the_report(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config(rounds=5), clients=3)
    result = Result(tmp_path / "run", 5, finished=True)
    figures = result.figures()
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert page.count("<figure") == len(figures) >= 6
    curve = next(line for line in result.plot().axes[0].lines if line.get_label() == "plugin, test data")
    np.testing.assert_array_equal(curve.get_ydata(), result.history["test plugin/accuracy"].dropna())
    shown: Any = figures["bytes sent"]
    assert isinstance(shown, Figure)
    assert shown.get_facecolor() == (1, 1, 1, 1)
    assert shown._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"has no figure 'acuracy'. Choose one of 'accuracy', .*'bytes sent'"):
        result.plot("acuracy")


def test_before_the_first_round(tmp_path: Path) -> None:
    make_run(tmp_path / "run", done=0)
    result = Result(tmp_path / "run", 0, finished=False)
    assert result.history.empty
    assert result.figures() == {}
    with pytest.raises(InputError, match="No round is recorded yet"):
        result.plot()
    with pytest.raises(RunDirectoryError, match="no such|no run|is not a run"):
        load_result(tmp_path / "elsewhere")


def test_loaded_result_equals_the_returned_result(tiny: Tiny) -> None:
    stop = {"run.stop={patience: 1, min_delta: 10}", "run.best={}", "evaluate.every=1", "train.rounds=4"}
    for name, settings in {"ended": stop, "whole": {"train.rounds=2"}}.items():
        result = run(tiny(f"run.name={name}", *settings))
        assert load_result(result.run_dir) == result
        assert result.status == "finished"
    assert result.ended == ""
    stopped = run(tiny("run.name=early", "train.rounds=3"), on_round=lambda report: report.round == 1)
    assert load_result(stopped.run_dir) == stopped
    assert (stopped.status, stopped.round) == ("stopped", 1)


def test_notebook_escapes_names(tmp_path: Path) -> None:
    result = Result(
        tmp_path / "<i>", 3, finished=True, scores={"test <b>m</b>/accuracy": 0.25, "test m/accuracy_client_std": 1.0}
    )
    page = result._repr_html_()
    assert "<td>test &lt;b&gt;m&lt;/b&gt;/accuracy</td><td>0.25</td>" in page
    assert "<i>" not in page
    assert "client_std" not in page
    assert page.startswith("<div><b>finished</b> after 3 rounds")


class Page(ModuleType):
    """Displays below a notebook's cell, recorded through IPython's interface."""

    def __init__(self) -> None:
        super().__init__("IPython")
        self.shown: list[list[dict[str, str]]] = []
        self.display_module = ModuleType("IPython.display")
        self.display_module.display = self.display  # type: ignore[attr-defined]
        self.kernel: object | None = object()

    def get_ipython(self) -> Any:
        return self

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        states = [content]
        self.shown.append(states)
        handle = ModuleType("handle")
        handle.update = lambda new, raw: states.append(new)  # type: ignore[attr-defined]
        return handle


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    display = Page()
    monkeypatch.setitem(sys.modules, "IPython", display)
    monkeypatch.setitem(sys.modules, "IPython.display", display.display_module)
    return display


def test_notebook_overwrites_one_display(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress("auto", clock=clock)
    assert (progress.mode, progress.live) == ("notebook", True)
    progress.start(1000, 0, "fedavg <on> fsdd")
    for index in range(1, 1001):
        clock.now = index / 64
        progress.round(make_report(index, scores={"test m/accuracy": 0.75}))
    progress.message("client [bold]anna[/bold] was slow")
    progress.finish(make_result(Path("runs/x")), 10.0)
    (states,) = page.shown
    assert len(states) == 1 + 1000 // 13 + 1  # at the start, after each fifth of a second, at the end
    assert states[-1]["text/plain"].splitlines()[0] == "fedavg <on> fsdd  round 1000/1000  0 s left"
    assert '<progress value="1000" max="1000"' in states[-1]["text/html"]
    assert "fedavg &lt;on&gt; fsdd" in states[-1]["text/html"]
    assert "loss 0.5000  test m/accuracy 0.750" in states[-1]["text/html"]
    assert capsys.readouterr().out.splitlines()[:2] == [
        "client [bold]anna[/bold] was slow",
        "stopped after 7 of 1000 rounds, 10 s: test m/accuracy 0.750",
    ]


def test_steps_in_a_notebook(page: Page) -> None:
    progress = Progress("notebook", clock=Clock())
    with progress.steps("features", 30) as advance:
        advance(12)
        advance(18)
    progress.start(2, 0, "run")
    with progress.steps("more", None) as advance:
        advance(5)
    first, second = page.shown
    assert first[-1]["text/plain"] == "features  30/30"
    assert [state["text/plain"] for state in second] == ["run  ", "run  \nmore  ", "run  "]
    assert "<progress style" in second[1]["text/html"]  # of unknown length


def test_only_a_kernel_is_a_notebook(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_progress().mode == "notebook"
    page.kernel = None  # IPython on a terminal
    assert default_progress().mode == "quiet"
    assert Progress("auto").mode == "lines"
    monkeypatch.delitem(sys.modules, "IPython")
    assert default_progress().mode == "quiet"


def test_a_run_in_a_notebook(page: Page, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tiny("train.rounds=2"))
    assert page.shown[-1][-1]["text/plain"].splitlines()[0].endswith("round 2/2  0 s left")
    assert "round 1" not in capsys.readouterr().out
    assert result.finished


@pytest.mark.parametrize(
    ("module", "former", "name"),
    [
        ("raydfl", "parts_of_rounds", "split_round_times"),
        ("raydfl", "drawn", "sample_clients"),
        ("raydfl", "computing_in", "autocast"),
        ("raydfl.ops", "compiled", "is_compiled"),
    ],
)
def test_former_names_warn(module: str, former: str, name: str) -> None:
    package = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{former} is now named {name}"):
        assert getattr(package, former) is getattr(package, name)
    assert former not in dir(package)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'unknown'"):
        package.unknown  # noqa: B018


def test_the_checkpoint_of_ray_is_a_complete_run(tiny: Tiny, tmp_path: Path) -> None:
    """A copy resumes to the same bits as the run itself."""
    outcome = run(tiny("train.rounds=1"))
    result = load_result(outcome.run_dir)
    checkpoint = result.checkpoint
    assert isinstance(checkpoint, ray.train.Checkpoint)
    with checkpoint.as_directory() as folder:
        assert Path(folder).samefile(outcome.run_dir)
    copy = Path(checkpoint.to_directory(str(tmp_path / "copy")))
    assert load_result(copy) == dataclasses.replace(result, run_dir=copy)
    for folder in (copy, outcome.run_dir):
        assert resume(folder, ["train.rounds=2"]).finished
    model = "model.safetensors"
    assert (copy / model).read_bytes() == (outcome.run_dir / model).read_bytes()


def test_the_result_of_ray_has_scores_and_history(tiny: Tiny) -> None:
    outcome = run(tiny("train.rounds=2", "evaluate.every=1"))
    converted = outcome.to_ray()
    assert isinstance(converted, ray.train.Result)
    assert converted.metrics == {"round": 2, **outcome.scores}
    assert converted.error is None
    assert Path(converted.path).samefile(outcome.run_dir)
    assert converted.checkpoint is not None
    assert Path(converted.checkpoint.path).samefile(outcome.run_dir)
    assert converted.metrics_dataframe is not None
    assert converted.metrics_dataframe.equals(outcome.history)
    assert dataclasses.replace(outcome, round=0).checkpoint is None
