"""Reports of generated runs with known metrics: contents of the page, forbidden contents, and remarks on missing files."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import itertools
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fake_run import CLASSES, LAYERS, config, make_run
from matplotlib.axis import Axis

from raydfl.controls import Control, to_json
from raydfl.core.errors import InputError, ResourcesError, RunDirectoryError
from raydfl.core.metrics import worst_decile
from raydfl.engine.storage.record import MetricRow, compact, rows_path, write_rows
from raydfl.engine.telemetry import TIMELINE, WALL
from raydfl.runs.report import compare, draw_figures, read_run, write_page, write_report
from raydfl.runs.report import figures as plots
from raydfl.runs.report.cost import show_traffic
from raydfl.runs.report.data import Curve
from raydfl.runs.report.scores import show_confusions

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Parsed page. Parsing fails for tags in a wrong order, and for content that loads anything or executes another script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.svg_text: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == []
        assert self.tags.count("script") == 1
        assert self.has_trusted_script()

    def has_trusted_script(self) -> bool:
        """Return whether the page's policy has the digest of its only script, and loads nothing else."""
        (script,) = re.findall(r"<script>(.*?)</script>", self.source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; script-src 'sha256-"
        return html.unescape(re.findall(r'Policy" content="([^"]*)"', self.source)[0]) == f"{policy}{digest}'"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in {"iframe", "object", "embed", "link", "base", "form"}
        assert tag != "script" or not attrs
        for name, value in attrs:
            assert not name.startswith("on")
            if name in {"src", "href", "action", "srcset", "data"}:
                assert value is not None
                assert value.startswith("#")
            for target in re.findall(r"url\(([^)]*)\)", value or ""):
                assert target.startswith("#")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data
            assert "@import" not in data
            return
        if self.open and self.open[-1] == "script":
            assert not re.search(r"://|import|fetch|XMLHttp|innerHTML|eval", data)
            return
        self.text.append(data)
        if self.open and self.open[-1] in {"td", "th"}:
            self.tables[-1][-1][-1] += data
        if self.open and self.open[-1] == "text":
            self.svg_text.append(data.strip())

    def has(self, text: str) -> bool:
        return text in " ".join(" ".join(self.text).split())

    def table(self, *header: str) -> list[list[str]]:
        """Return the rows of the table with this start of the header."""
        for table in self.tables:
            if tuple(table[0][: len(header)]) == header:
                return table[1:]
        raise AssertionError(f"no table {header}")

    @property
    def figures(self) -> int:
        return self.tags.count("figure")


def open_page(tmp_path: Path, *folders: Path) -> Page:
    out = tmp_path / "out" / "page.html"
    assert write_report(list(folders), out) == out
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    return Page(out)


def read_results(page: Page) -> dict[tuple[str, str, str], list[str]]:
    """Map model, data and score to the other cells of the table of results."""
    rows = page.table("score", "last", "model", "data")
    return {(model, data, score): [last, *rest] for score, last, model, data, *rest in rows}


def find_value(rows: Sequence[MetricRow], round_index: int, split: str, metric: str) -> float:
    matches = [r.value for r in rows if (r.round, r.client, r.split, r.metric) == (round_index, "", split, metric)]
    assert len(matches) == 1
    return matches[0]


def format_percent(number: float) -> str:
    return f"{100 * number:.1f} %"


def test_one_run(tmp_path: Path) -> None:
    rows = make_run(tmp_path / "a run")
    shown = open_page(tmp_path, tmp_path / "a run")
    results = read_results(shown)

    accuracies = [find_value(rows, r, "test", "plugin/accuracy") for r in (5, 10, 15, 20)]
    last, tail, best, clients, worst = results["plugin", "test data", "accuracy"]
    assert last == f"{format_percent(accuracies[-1])} (round 20)"
    assert tail == "-"  # four measurements
    assert best == f"{format_percent(max(accuracies))} (round {5 * (int(np.argmax(accuracies)) + 1)})"
    assert (clients, worst) == ("-", "-")

    own = [
        r.value for r in rows if r.client and r.round == 20 and r.split == "validation" and r.metric == "local/accuracy"
    ]
    assert len(own) == 12
    _, _, _, clients, worst = results["local", "clients' held-out clips", "accuracy"]
    assert clients == f"{format_percent(float(np.mean(own)))} ± {format_percent(float(np.std(own)))}"
    assert worst == format_percent(worst_decile(own))
    assert results["local", "clients' held-out clips", "loss"][0].endswith("(round 20)")
    assert results["plugin", "test data", "macro F1"][0].startswith(
        format_percent(find_value(rows, 20, "test", "plugin/macro_f1"))
    )
    assert len(results) == 9  # two models with four scores each, and the training loss

    assert shown.has("method fedmlac · data fsdd · seed 1 · 2026-01-02 03:04:05 · raydfl 0.1.0")
    assert shown.has("20 of 20")
    assert shown.has("Total: to the clients 240.0 kB, from the clients 120.0 kB.")  # 20 rounds, 12 clients
    assert shown.has("360.0 kB sent in both directions") or shown.has("sent in both directions 360.0 kB")
    assert shown.has("clients 12")
    assert shown.has("1 min 20 s")  # 20 rounds of 4 seconds
    assert shown.has("failed: 3.")  # in rounds 3, 10 and 17
    assert shown.has("not finished") is False
    assert shown.table("model", "architecture") == [
        ["plugin", "crnn_lite", "36,515", "shared", ""],
        ["local", "crnn_tiny", "12,115", "private", "clients: 7"],
        ["local", "crnn_base", "194,979", "private", "clients: 5"],
    ]
    assert ["train.optimiser.lr", "0.2"] in shown.table("setting")
    # accuracy, F1, loss; clients; two confusion matrices; pruning, failures; bytes, seconds
    assert shown.figures == 10


@pytest.mark.usefixtures("pictures")
def test_confusion_matrix_and_pruning_in_the_figures(tmp_path: Path) -> None:
    rows = make_run(tmp_path / "run")
    shown = open_page(tmp_path, tmp_path / "run")
    matrix = next(r.array for r in rows if r.metric == "plugin/confusion" and r.round == 20)
    assert matrix is not None
    assert {f"{number:.0f}" for number in matrix.ravel() if number} <= set(shown.svg_text)
    assert set(CLASSES) <= set(shown.svg_text)
    assert shown.has(f"Round 20, {matrix.sum():.0f} examples")
    assert {f"plugin/{layer}" for layer in LAYERS} <= set(shown.svg_text)
    assert shown.has("plugin/gru 2.5")


def test_sections_without_content_are_omitted(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config("fedavg", rounds=2))
    shown = open_page(tmp_path, tmp_path / "run")
    assert not shown.has("pruning")
    assert not shown.has("Aggregation")


def test_an_unfinished_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", done=7)
    shown = open_page(tmp_path, tmp_path / "run")
    assert shown.has(
        f"This run is not finished: 7 of 20 rounds are done. Resume it with: raydfl resume {tmp_path / 'run'}"
    )
    assert shown.table("score", "last")[0][1].endswith("(round 5)")


def test_uncommitted_rounds_are_ignored(tmp_path: Path) -> None:
    make_run(tmp_path / "run", done=7)
    (tmp_path / "run" / "LATEST").write_text("000006-00000000.safetensors")
    assert open_page(tmp_path, tmp_path / "run").has("6 of 20 rounds are done")


def test_a_run_before_its_first_round(tmp_path: Path) -> None:
    make_run(tmp_path / "run", done=0)
    shown = open_page(tmp_path, tmp_path / "run")
    assert shown.has("No round of this run is recorded yet. Resume it with: raydfl resume")
    assert shown.figures == 0
    assert ["method.name", "fedmlac"] in shown.table("setting")


def test_compacted_run_has_the_same_report(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    before = open_page(tmp_path, tmp_path / "run").source
    compact(tmp_path / "run")
    assert open_page(tmp_path, tmp_path / "run").source == before


def test_missing_files_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for name in ("config.yaml", "run.json", "LATEST"):
        (tmp_path / "run" / name).unlink()
    shown = open_page(tmp_path, tmp_path / "run")
    assert shown.has("config.yaml is missing, so the configuration is not shown.")
    assert shown.has("run.json is missing, so the names of classes and models are unknown.")
    assert len(shown.table("score", "last")) == 9


def test_skipped_clips_are_listed(tmp_path: Path) -> None:
    clips = [{"clip": f"clip-{i}.wav", "reason": "empty"} for i in range(250)]
    make_run(tmp_path / "run", config(rounds=1), about={"skipped": [*clips, "plain.wav"]})
    shown = open_page(tmp_path, tmp_path / "run")
    assert shown.has("251 clips skipped")
    assert len(shown.table("clip", "reason")) == 200
    assert shown.has("The first 200 of 251. All are in run.json.")


def test_html_in_names_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>$\\frac{{{% raw %}"
    settings = config(rounds=5)
    settings["data"]["name"] = evil
    settings["method"]["note"] = evil
    settings["method"]["name"] = "fedmlac"
    make_run(
        tmp_path / "run",
        settings,
        classes=[evil, "_under$score$", "\x00\x01null", "größe 数字 \U0001f600"],
        about={
            "id": evil,
            "created": evil,
            "models": {evil: {"architecture": evil, evil: evil}},
            "skipped": [{"clip": evil, "reason": evil}],
        },
    )
    more = [
        MetricRow(5, "train", "", "server", f"lpa/pruned/{evil}", 1.0, 1.0),
        MetricRow(5, "evaluate", "", evil, f"{evil}/accuracy", 0.5, 1.0),
        MetricRow(5, "evaluate", evil, evil, f"{evil}/accuracy", 0.5, 1.0),
        MetricRow(5, "train", "", "server", f"seconds/{evil}", 1.0, 1.0),
    ]
    write_rows(rows_path(tmp_path / "run", 5), [*more])
    shown = open_page(tmp_path, tmp_path / "run")
    assert shown.has(evil)
    assert "img" not in shown.tags
    make_run(tmp_path / "other", config("fedavg", rounds=5))
    compared = open_page(tmp_path, tmp_path / "run", tmp_path / "other")
    assert compared.has(evil)
    assert "img" not in compared.tags


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config(rounds=1))
    shown = open_page(tmp_path, tmp_path / "run")
    assert "secret" not in shown.source
    assert ["track.uri", "https://***@tracking.example"] in shown.table("setting")


def test_a_diverged_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config(rounds=2))
    nothing = float("nan")
    rows = [
        MetricRow(2, "train", "", "train", "loss", nothing, 1.0),
        MetricRow(2, "evaluate", "", "test", "plugin/loss", float("inf"), 1.0),
        MetricRow(2, "evaluate", "", "test", "plugin/accuracy", nothing, 0.0),
    ]
    write_rows(rows_path(tmp_path / "run", 2), rows)
    results = read_results(open_page(tmp_path, tmp_path / "run"))
    assert results["plugin", "test data", "loss"][0] == "inf (round 2)"
    assert results["-", "training data", "loss"][0] == "nan (round 2)"
    assert results["-", "training data", "loss"][2].endswith("(round 1)")  # the best is a number


@pytest.mark.usefixtures("pictures")
def test_several_runs(tmp_path: Path) -> None:
    recorded = {}
    for name, settings in {
        "mlac-1": config(),
        "mlac-2": config(seed=2),
        "mlac-3": config(seed=3),
        "mlac-alpha": config(alpha=0.9),
        "avg": config("fedavg"),
    }.items():
        settings["ray"]["actors"] = len(name)  # where a run was computed does not tell it from others
        recorded[name] = make_run(tmp_path / name, settings)
    shown = open_page(tmp_path, *(tmp_path / name for name in recorded))
    assert shown.has("5 runs of 3 configurations")
    scores = {
        (row[0], *row[4:6]): [row[6], *row[1:4]] for row in shown.table("run", "accuracy", "macro F1", "loss", "model")
    }
    assert {key[0] for key in scores} == {"fedmlac", "fedmlac alpha=0.9", "fedavg"}

    last = [find_value(recorded[f"mlac-{i}"], 20, "test", "plugin/accuracy") for i in (1, 2, 3)]
    row = scores["fedmlac", "plugin", "test data"]
    assert row[0] == "3"
    assert row[1] == f"{format_percent(float(np.mean(last)))} ({100 * min(last):.1f} to {100 * max(last):.1f})"
    losses = [find_value(recorded[f"mlac-{i}"], 20, "test", "plugin/loss") for i in (1, 2, 3)]
    assert row[3] == f"{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
    own = find_value(recorded["avg"], 20, "validation", "model/accuracy_client_mean")
    assert scores["fedavg", "model", "clients' held-out clips"][:2] == ["1", format_percent(own)]

    differences = {row[0]: row[1:] for row in shown.table("setting")}
    assert differences["method.alpha"] == ["-", "0.9", "-"]
    assert differences["method.name"] == ["fedmlac", "fedmlac", "fedavg"]
    assert not [key for key in differences if key.startswith(("run.", "ray."))]
    assert [row[:4] for row in shown.table("run", "configuration")] == [
        ["mlac-1", "fedmlac", "1", "20 of 20"],
        ["mlac-2", "fedmlac", "2", "20 of 20"],
        ["mlac-3", "fedmlac", "3", "20 of 20"],
        ["mlac-alpha", "fedmlac alpha=0.9", "1", "20 of 20"],
        ["avg", "fedavg", "1", "20 of 20"],
    ]
    # three scores on the test data and the hold-out, and the training loss
    assert shown.figures == 7
    assert "fedmlac alpha=0.9: plugin" in shown.svg_text


def test_comparison_of_finished_and_unfinished_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "done", config(rounds=10))
    make_run(tmp_path / "half", config(rounds=10, seed=2), done=7)
    make_run(tmp_path / "none", config(rounds=10, seed=3), done=0)
    make_run(tmp_path / "bare", config(rounds=10, seed=4))
    (tmp_path / "bare" / "config.yaml").unlink()
    shown = open_page(tmp_path, *(tmp_path / name for name in ("done", "half", "none", "bare")))
    assert shown.has("half: This run is not finished: 7 of 10 rounds are done.")
    assert shown.has("none: No round of this run is recorded yet.")
    assert shown.has("bare: config.yaml is missing")
    rows = {row[0]: row for row in shown.table("run", "accuracy") if row[4] == "plugin"}
    assert rows["fedmlac (done)"][6] == "2"  # the run without rounds has no score
    assert rows["fedmlac (bare)"][6] == "1"


@pytest.mark.usefixtures("pictures")
def test_curves_of_a_comparison_look_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has one colour in all figures. With more runs than colours, the pair of colour and dashes is unique."""
    drawn: list[list[plots.Series]] = []
    draw = plots.plot_curves

    def spy(title: str, caption: str, series: list[plots.Series], unit: str, **options: Any) -> plots.Plot:
        drawn.append(series)
        return draw(title, caption, series, unit, **options)

    monkeypatch.setattr(compare, "plot_curves", spy)
    for alpha in range(5):
        rows = make_run(tmp_path / f"{alpha}", config(rounds=5, alpha=alpha))
        # the shared model is measured on the clients' own hold-out too
        own = [dataclasses.replace(row, split="validation") for row in rows if row.metric.startswith("plugin/")]
        write_rows(rows_path(tmp_path / f"{alpha}", 5), [*(row for row in rows if row.round == 5), *own])
    open_page(tmp_path, *(tmp_path / f"{alpha}" for alpha in range(5)))
    assert max(map(len, drawn)) == 10
    looks: dict[str, tuple[int, int]] = {}
    for series in drawn:
        for item in series:
            look = (item.colour % len(plots.SERIES), item.dash % 4)
            assert looks.setdefault(item.label, look) == look
        assert len({looks[item.label] for item in series}) == len(series)
    runs = {label.partition(":")[0] for label in looks}
    assert len({(label.partition(":")[0], look[0]) for label, look in looks.items()}) == len(runs)
    assert len({look[0] for look in looks.values()}) == min(len(runs), len(plots.SERIES))


@pytest.mark.usefixtures("pictures")
def test_a_comparison_has_names_dots_and_the_line_of_chance(tmp_path: Path) -> None:
    for seed in (1, 2):
        settings = config("fedavg", seed=seed)
        settings["run"]["name"] = f"first-{seed}"
        make_run(tmp_path / f"first-{seed}", settings)
        (tmp_path / f"first-{seed}" / "controls.json").write_text(
            to_json([Control("chance", "test", "accuracy", 0.25, 400)], "")
        )
    runs = [read_run(tmp_path / f"first-{seed}") for seed in (1, 2)]
    write_page(runs, tmp_path / "page.html")
    shown = Page(tmp_path / "page.html")
    assert shown.table("run", "accuracy")[0][0] == "first-1, first-2"
    assert shown.has("Mean over seeds. Dots: single seeds. Dotted line: chance.")
    accuracy = re.findall(r"<svg.*?</svg>", shown.source, re.DOTALL)[0]
    values = np.stack([run.curves["test", "model/accuracy"].values for run in runs])
    assert accuracy.count("fill-opacity: 0.6") >= values.size
    rounds = runs[0].curves["test", "model/accuracy"].rounds
    for number, value in zip(rounds, values.mean(axis=0), strict=True):
        assert f"<title>first-1, first-2: model, round {number:g}: {100 * value:.1f} %</title>" in accuracy


@pytest.mark.usefixtures("pictures")
def test_scores_over_virtual_time_are_drawn_for_runs_that_have_it(tmp_path: Path) -> None:
    """A round of the first run lasts 20 s or, with its second seed, 40 s. The second run has no virtual time."""
    for name, seed in (("fleet-1", 1), ("fleet-2", 2), ("plain", 3)):
        settings = config("fedavg", seed=seed, rounds=20 if name != "plain" else 21)
        settings["run"]["name"] = name
        make_run(tmp_path / name, settings)
    runs = [read_run(tmp_path / name) for name in ("fleet-1", "fleet-2", "plain")]
    rounds = np.arange(1.0, 21.0)
    for run, pace in zip(runs, (20, 40), strict=False):
        run.curves["server", "virtual_seconds"] = Curve(rounds, pace * rounds, np.ones(20))
    write_page(runs[:1], tmp_path / "one.html")
    write_page(runs, tmp_path / "page.html")
    for file, label, pace in (("one.html", "model, test data", 20), ("page.html", "fleet-1, fleet-2: model", 30)):
        shown = Page(tmp_path / file)
        assert shown.has(
            "accuracy over virtual time" if file == "one.html" else "accuracy, test data, over virtual time"
        )
        curves = [run.curves["test", "model/accuracy"] for run in (runs[:1] if file == "one.html" else runs[:2])]
        for number, value in zip(curves[0].rounds, np.mean([c.values for c in curves], axis=0), strict=True):
            assert f"<title>{label}, virtual time (s) {pace * number:g}: {100 * value:.1f} %</title>" in shown.source
        assert "plain: model, virtual" not in shown.source


def test_a_mean_of_ten_needs_ten_measurements(tmp_path: Path) -> None:
    rows = make_run(tmp_path / "run", config("fedavg", rounds=60))
    rows_of = read_results(open_page(tmp_path, tmp_path / "run"))
    accuracies = [find_value(rows, r, "test", "model/accuracy") for r in range(15, 61, 5)]
    assert rows_of["model", "test data", "accuracy"][1] == format_percent(float(np.mean(accuracies)))


@pytest.mark.usefixtures("pictures")
def test_pages_suit_phones_and_keyboards(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    shown = open_page(tmp_path, tmp_path / "run")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in shown.source
    assert shown.source.count('<div class="wide" tabindex="0" role="region"') == shown.source.count("<table>")
    assert "prefers-color-scheme: dark" in shown.source
    assert re.search(r'<svg role="img" aria-label="[^"]+" style="max-width: [\d.]+rem"', shown.source)


@pytest.mark.parametrize("theme", [0, 1])
def test_text_has_the_contrast_of_wcag_aa(tmp_path: Path, theme: int) -> None:
    """Text needs a ratio of 4.5 to its background, lines of figures 3."""
    make_run(tmp_path / "run", config(rounds=5))
    source = open_page(tmp_path, tmp_path / "run").source
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", source.split(":root {")[1 + theme].partition("}")[0]))

    def compute_luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    def compute_contrast(front: str, back: str) -> float:
        high, low = sorted((compute_luminance(colours[front]), compute_luminance(colours[back])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for front, back in itertools.product(("ink", "soft"), ("paper", "panel")):
        assert compute_contrast(front, back) >= 4.5, (front, back)
    assert compute_contrast("ink", "note") >= 4.5
    for number in range(7):
        assert compute_contrast(f"series-{number}", "panel") >= 3, number


def test_long_labels_of_a_legend_are_wrapped() -> None:
    x = np.arange(3.0)
    figure = plots.plot_curves("t", "", [plots.Series("run " * 60, x, x)], "u").figure()
    figure.draw_without_rendering()
    (legend,) = figure.legends
    extent = legend.get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.x1


def test_duplicate_runs_are_shown_once(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config(rounds=1))
    assert open_page(tmp_path, tmp_path / "run", tmp_path / "x" / ".." / "run").has("method fedmlac")


def test_output_folder_gets_report_html(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config(rounds=1))
    assert write_report([tmp_path / "run"], tmp_path / "run") == tmp_path / "run" / "report.html"


def test_phases_of_a_round_are_one_curve_with_added_bytes(tmp_path: Path) -> None:
    rows = [
        MetricRow(1, "stage one", "", "server", "bytes_up", 10.0, 3.0),
        MetricRow(1, "stage two", "", "server", "bytes_up", 5.0, 2.0),
        MetricRow(2, "stage two", "", "server", "bytes_up", 5.0, 2.0),
    ]
    write_rows(rows_path(tmp_path / "run", 2), rows)
    run = read_run(tmp_path / "run")
    assert run.sum_totals("bytes_up") == 50.0
    assert run.curves["server", "bytes_up"].totals.tolist() == [40.0, 10.0]
    assert run.sum_totals("bytes_down") is None
    assert not show_traffic(run)
    own = [("clients", 2.0), ("bytes_down", 3000.0), ("bytes_up", 1000.0)]
    curves = {("server", f"views/video/{name}"): Curve(*np.array([[1, 2, 3], [v] * 3, [v] * 3])) for name, v in own}
    phased = dataclasses.replace(run, curves={**run.curves, **curves}, about={"phases": {"all": 1, "distil": 3}})
    assert show_traffic(phased).rows == [
        ("all", "also video", "4", "6.0 kB", "2.0 kB", "1.5 kB", "500 B"),
        ("distil", "also video", "2", "3.0 kB", "1.0 kB", "1.5 kB", "500 B"),
    ]


def test_only_the_last_client_scores_are_read(tmp_path: Path) -> None:
    rows = [
        MetricRow(1, "evaluate", "a", "validation", "m/accuracy", 0.1, 5),
        MetricRow(1, "evaluate", "b", "validation", "m/accuracy", 0.2, 5),
        MetricRow(1, "evaluate", "", "validation", "m/accuracy", 0.15, 10),
        MetricRow(2, "evaluate", "a", "validation", "m/accuracy", 0.7, 5),
        MetricRow(2, "evaluate", "", "validation", "m/accuracy", 0.7, 5),
        MetricRow(1, "evaluate", "a", "test", "m/accuracy", 0.4, 5),
        MetricRow(1, "evaluate", "", "test", "m/accuracy", 0.4, 5),
    ]
    write_rows(rows_path(tmp_path / "run", 2), rows)
    clients = {key: (r, v.tolist()) for key, (r, v) in read_run(tmp_path / "run").clients.items()}
    assert clients == {("validation", "m/accuracy"): (2, [0.7]), ("test", "m/accuracy"): (1, [0.4])}


def break_file(folder: Path, name: str, content: bytes) -> Path:
    make_run(folder, config(rounds=1))
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b"[" * 100_000, r"run.json cannot be read: it is nested too deep[.] Restore it"),
        (
            "config.yaml",
            b"a: " + b"[" * 30_000,
            r"config.yaml: line 1 is nested more than 100 levels deep",
        ),
        ("config.yaml", b"a: [1,\nb: }", r"config.yaml is not valid YAML in line 2, .*[.] Restore it"),
        ("config.yaml", b"- a list", r"config.yaml must contain a mapping, not list"),
        ("config.yaml", b"\xff\xfe", r"config.yaml cannot be read: it is not UTF-8 text"),
        ("run.json", b'{"id": ', r"run.json cannot be read: Expecting value: line 1 .*[.] Restore it"),
        ("run.json", b"3", r"run.json must contain a mapping, not int"),
        ("rows/00000001.parquet", b"PAR1", r"00000001.parquet is not a readable Parquet file"),
        ("LATEST", b"nonsense", r"LATEST"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = break_file(tmp_path / "run", name, content)
    with pytest.raises(RunDirectoryError, match=message):
        write_report([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_missing_run_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="there is no run directory .*nowhere[.] Give the folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "page.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        RunDirectoryError, match="empty is not a run directory: it has no config.yaml, run.json or rows/"
    ):
        write_report([tmp_path / "empty"], tmp_path / "page.html")
    with pytest.raises(InputError, match="no run directory is given"):
        write_report([], tmp_path / "page.html")


def test_unwritable_output_is_an_error(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config(rounds=1))
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        ResourcesError, match=r"the report cannot be written to .*file: .*; make room or choose another"
    ):
        write_report([tmp_path / "run"], tmp_path / "file" / "page.html")


@pytest.mark.usefixtures("pictures")
def test_run_json_with_other_types(tmp_path: Path) -> None:
    """A report is written for any types of the values."""
    make_run(tmp_path / "run", config(rounds=5))
    about = {
        "method": {"name": "m"},
        "data": {"name": "d"},
        "classes": ["too", "few"],
        "models": {"plugin": "crnn_lite"},
    }
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"method": "fedmlac", "train": None}))
    shown = open_page(tmp_path, tmp_path / "run")
    assert shown.table("model", "architecture") == [["plugin", "crnn_lite", "", "", ""]]
    assert {"0", "1", "2", "3"} <= set(shown.svg_text)


# -- figures -------------------------------------------------------------------------------------------------------------


def draw_figure(folder: Path, title: str, rows: dict[int, list[MetricRow]]) -> Any:
    """Draw a figure of a run with only these rows by round."""
    for number, some in rows.items():
        write_rows(rows_path(folder, number), some)
    return draw_figures(read_run(folder), title)[title]


def server_row(number: int, metric: str, value: float, array: np.ndarray | None = None) -> MetricRow:
    return MetricRow(number, "train", "", "server", metric, value, 1.0, array)


@pytest.mark.usefixtures("pictures")
def test_colours_of_a_figure_are_css_variables() -> None:
    x = np.arange(5.0)
    series = [plots.Series(f"s{i}", x, x / 5 + i, colour=i, dash=i) for i in range(9)]
    svg = plots.plot_curves("what", "It shows.", series, "accuracy (%)", percent=True).to_svg("f")
    assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) == set()
    assert {f"--series-{i}" for i in range(7)} == set(re.findall(r"--series-\d", svg))
    assert "currentColor" in svg
    assert 'aria-label="what. It shows."' in svg
    assert "accuracy (%)" in svg
    assert ">round<" in svg


@pytest.mark.usefixtures("pictures")
def test_figures_are_reproducible_and_keep_matplotlib_settings() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    x = np.arange(3.0)
    made = [plots.plot_curves("t", "c", [plots.Series("a", x, x)], "u").to_svg("f") for _ in range(2)]
    assert made[0] == made[1]
    assert dict(mpl.rcParams) == before


def test_bytes_are_cumulative_with_a_suitable_unit(tmp_path: Path) -> None:
    rows = {number: [server_row(number, "bytes_up", number * 1e6)] for number in (1, 2, 3)}
    (axes,) = draw_figure(tmp_path, "bytes sent", rows).axes
    assert axes.lines[0].get_ydata().tolist() == [1.0, 3.0, 6.0]
    assert axes.get_ylabel() == "sent so far (MB)"


def test_clients_are_sorted(tmp_path: Path) -> None:
    scores = {"a": 0.9, "b": 0.1, "c": 0.5, "": 0.5}
    rows = [MetricRow(1, "evaluate", client, "test", "m/accuracy", score, 1.0) for client, score in scores.items()]
    (axes,) = draw_figure(tmp_path, "accuracy of each client", {1: rows}).axes
    assert axes.lines[0].get_ydata().tolist() == [0.1, 0.5, 0.9]
    assert axes.lines[0].get_xdata().tolist() == pytest.approx([1 / 6, 3 / 6, 5 / 6])


@pytest.mark.usefixtures("pictures")
def test_a_large_confusion_matrix_is_readable(tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).integers(5, size=(200, 200)).astype(float)
    row = MetricRow(1, "evaluate", "", "test", "m/confusion", np.nan, matrix.sum(), matrix)
    (axes,) = draw_figure(tmp_path, "m, test data", {1: [row]}).axes
    assert len(axes.get_xticks()) == 50  # every fourth
    assert not axes.texts
    (plot,) = show_confusions(read_run(tmp_path)).plots
    svg = plot.to_svg("f")
    assert len(svg) < 200_000
    assert 'href="data:image/png;base64,' in svg


@pytest.mark.parametrize("rounds", [[2], [1, 2], [3, 4, 5], [1, 1000]])
def test_ticks_of_rounds_are_whole_numbers(tmp_path: Path, rounds: list[int]) -> None:
    names = ("bytes_up", "failed", "lpa/pruned/conv", *(f"seconds/{name}" for name in (*WALL, "round", "fit")))
    work = np.array([[0.0, actor, 0.0, 1.0] for actor in range(len(rounds))])
    for number in rounds:
        rows = [server_row(number, name, 1.0) for name in (*names, "seconds/transfer", "seconds/wait")]
        write_rows(rows_path(tmp_path, number), [*rows, server_row(number, TIMELINE, np.nan, work)])
    figures = draw_figures(read_run(tmp_path))
    actors = figures.pop("who worked when")
    assert list(figures) == [
        *("layer-wise pruning (LPA)", "updates that were not used"),
        *("bytes sent", "where the time goes", "other times per round"),
    ]
    for figure in figures.values():
        ticks = list_ticks(figure.axes[-1].xaxis)
        assert ticks
        assert all(tick == int(tick) for tick in ticks)
        assert set(ticks) >= set(rounds) or len(rounds) < rounds[-1]
    assert list_ticks(actors.axes[0].yaxis) == list(range(len(rounds)))


def test_the_timeline_shows_work_before_the_round(tmp_path: Path) -> None:
    """With train.fleet a client may work before the server step of its arrival."""
    for number in (1, 2):
        work = np.array([[0.0, 0.0, -3.0, -1.0]])
        write_rows(rows_path(tmp_path, number), [server_row(number, TIMELINE, np.nan, work)])
    axes = draw_figures(read_run(tmp_path))["who worked when"].axes[0]
    low, high = axes.get_xlim()
    assert low == -3
    assert 0 <= high < 0.1


def list_ticks(axis: Axis) -> list[float]:
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_majorticklocs().tolist() if low <= tick <= high]


@pytest.mark.parametrize("values", [[np.nan, np.nan], [np.inf, 1.0], []])
@pytest.mark.usefixtures("pictures")
def test_curves_with_extreme_values(values: list[float]) -> None:
    y = np.array(values)
    series = plots.Series("s", np.arange(float(len(y))), y, y, y)
    for percent_axis in (False, True):
        assert "<svg" in plots.plot_curves("t", "", [series], "u", percent=percent_axis).to_svg("f")


@pytest.mark.usefixtures("pictures")
def test_groups_of_clients_over_rounds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, config("fedavg", rounds=3))
    groups = {1: [[0, 1, 1], [1, 0, 0]], 2: [[2, 1, 1], [1, 0, 0]], 3: [[2, 2, 1], [1, 0, 0]]}
    rows = [server_row(r, "tasks/membership", np.nan, np.array(matches, np.float64)) for r, matches in groups.items()]
    rows += [server_row(r, "tasks/purity", 1.0) for r in groups]
    write_rows(rows_path(folder, 3), rows)
    shown = open_page(tmp_path, folder)
    assert shown.has("who is with whom")
    assert shown.has("Clients in round 3: group 1: 1, group 2: 2.")
    assert shown.has("At the end: purity 1.00.")
    assert {"kind 1", "kind 2", "group 1", "group 2"} <= set(shown.svg_text)
    assert shown.svg_text.count("group 1") == 1
    matches = read_run(folder)
    assert matches.memberships[3].tolist() == groups[3]
    # Clients by their kind: the second and third are of kind 1, the first of kind 2.
    cells = draw_figures(matches, "who is with whom")["who is with whom"].axes[0].collections[0].get_array()
    assert cells.filled(0).tolist() == [[1, 1, 2], [1, 1, 1], [0, 2, 2]]
