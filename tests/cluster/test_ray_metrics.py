"""Ray's metrics of a run: a node's endpoint agrees with the metrics table."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from raydfl.cluster.metrics import RayMetrics
from raydfl.cluster.server import ServerActor
from raydfl.core.types import Ratio
from raydfl.engine.config import Config
from raydfl.engine.storage.record import read_rows, to_rows
from raydfl.engine.telemetry import TIMELINE, RoundReport
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

pytestmark = pytest.mark.slow
Tiny = Callable[..., Config]
EXTRA = Path(__file__).parent.parent / "extra_methods.py"


def scrape_metrics(run: str) -> dict[str, float]:
    """Return a node's metrics of a run as ``name{tag="value"}``, without common tags."""
    node = next(node for node in ray.nodes() if node["Alive"])
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    metrics = {}
    for name, tags, value in re.findall(r"^ray_raydfl_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        values = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        if values.get("run") == run:
            own = [f"{key}={values[key]}" for key in ("method", "part", "direction", "kind", "le") if key in values]
            metrics[f"{name}{{{','.join(own)}}}"] = float(value)
    return metrics


def wait_for_metrics(run: str, rounds: int) -> dict[str, float]:
    """Return the metrics once they are stable for a collection period of about 10 s."""
    deadline = time.monotonic() + 120
    metrics: dict[str, float] = {}
    since = time.monotonic()
    while time.monotonic() < since + 12 or metrics.get("round{method=fedavg}") != rounds:
        assert time.monotonic() < deadline, f"only {metrics} after 120 s"
        time.sleep(1)
        before, metrics = metrics, scrape_metrics(run)
        if metrics != before:
            since = time.monotonic()
    return metrics


def test_a_nodes_metrics_equal_sums_of_the_metrics_table(ray_session: None, tiny: Tiny) -> None:
    config = tiny("run.name=measured", "ray.actors=2", "train.rounds=4", "train.cohort=4", "evaluate.every=2")
    folder = create(config, Progress("quiet"))
    server = ray.remote(ServerActor).options(num_cpus=0).remote()
    try:
        done = ray.get(server.open.remote(str(folder), config))[0]
        while done < 4:
            done = ray.get(server.rounds.remote(done, 4, 0.3))[-1].round
        ray.get(server.finish.remote(4))
        shown = wait_for_metrics("measured", 4)
    finally:
        ray.get(server.close.remote())
        ray.kill(server)
    rows = [row for row in to_rows(read_rows(folder)) if not row.client and row.split == "server"]

    def total(metric: str) -> float:
        return sum(row.value * row.count for row in rows if row.metric == metric)

    tag = "method=fedavg"
    assert shown[f"rounds_total{{{tag}}}"] == 4
    assert shown[f"clients_total{{{tag}}}"] == total("clients") == 16
    assert shown[f"bytes_total{{{tag},direction=down}}"] == total("bytes_down") > 0
    assert shown[f"bytes_total{{{tag},direction=up}}"] == total("bytes_up") > 0
    parts = {name: value for name, value in shown.items() if name.startswith("seconds_total")}
    recorded = {row.metric.removeprefix("seconds/") for row in rows if row.metric.startswith("seconds/")}
    assert {re.search(r"part=(\w+)", name)[1] for name in parts} == recorded  # type: ignore[index]
    for name, value in parts.items():
        part = re.search(r"part=(\w+)", name)[1]  # type: ignore[index]
        assert value == pytest.approx(total(f"seconds/{part}"), rel=1e-6), part
    assert shown[f"round_seconds_count{{{tag}}}"] == 4
    assert not [name for name in shown if "s0" in name or "client=" in name]
    board = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"ray_raydfl_(\w+)", board)) - {"failures_total"}  # no clients failed
    assert asked <= {name.partition("{")[0] for name in shown}
    asked_parts = {part for parts in re.findall(r'part=~\\"([\w|]+)', board) for part in parts.split("|")}
    assert asked_parts
    assert asked_parts <= recorded
    # Two actors have two lanes, and the parts of their time fill these lanes.
    timelines = [row.array for row in rows if row.metric == TIMELINE]
    assert {int(actor) for array in timelines if array is not None for actor in array[:, 1]} == {0, 1}
    for name in ("transfer", "wait", "queue"):
        assert all(row.value >= 0 for row in rows if row.metric == f"seconds/{name}")


def test_failures_are_counted_by_kind_without_the_folders_of_methods(ray_session: None) -> None:
    metrics = RayMetrics("failing", f"{EXTRA}:Slow".rpartition("/")[2])
    report = RoundReport(3, clients=5, rejected={"a": "not finite"}, retried=2)
    report.seconds.update(round=0.5)
    report.work["fit"] = Ratio(1.5, 5)
    metrics.observe([report, report])
    deadline = time.monotonic() + 60
    while not (shown := scrape_metrics("failing")):
        assert time.monotonic() < deadline
        time.sleep(1)
    tag = "method=extra_methods.py:Slow"
    assert shown[f"failures_total{{{tag},kind=rejected}}"] == 2
    assert shown[f"failures_total{{{tag},kind=retried}}"] == 4
    assert shown[f"seconds_total{{{tag},part=fit}}"] == 3.0
    assert shown[f"seconds_total{{{tag},part=round}}"] == 1.0
    assert not [name for name in shown if name.startswith("bytes")]  # nothing was sent
