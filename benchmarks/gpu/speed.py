"""Parts 3 and 4: the group size of ``train.together: auto`` and its gain; clients a second against a bare cuDNN loop.

Everything runs in one process, as one actor with the whole GPU. The clients share a few clips of noise
(benchmarks/scaling.py).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import scaling
from rounds import KERNEL, largest_difference, make_work
from torch import Tensor

from gpu.bare import Loop
from gpu.busy import busy
from gpu.federations import open_federation
from gpu.lines import Line, Watch, run_checked
from raydfl.data.build import build_population
from raydfl.engine.autotune import measure_width
from raydfl.engine.config import Config, make_config
from raydfl.engine.federation import Federation
from raydfl.engine.worker import Worker
from raydfl.runs.folder import write_new_run

TOGETHER, SPEED = "together: auto", "clients a second"
CRNN = {"kernel": KERNEL, "dropout": 0.0}
NETWORKS: Mapping[str, Mapping[str, Any]] = {"crnn_base": CRNN, "split_cnn": {"dropout": 0.0}, "resnet18": {}}
COHORTS = (12, 100, 500)
TINY_NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "crnn_tiny": CRNN,
    "split_cnn_tiny": {"dropout": 0.0},
    "mlp": {},
}
TINY_COHORTS = (2, 3)
_ALIKE = 1e-3
"""Largest difference of a weight after a round due to rounding."""
EXAMPLES, TINY_EXAMPLES = 45, 5
"""Clips of a client: three batches of 16, as the Free Spoken Digit Dataset dealt to 60 clients.
In a dry run one of 4 and one of 1."""


def configuration(network: str, cohort: int, folder: Path, together: int | str, dry: bool) -> Config:
    """Return the work as a configuration of raydfl."""
    options = (TINY_NETWORKS if dry else NETWORKS)[network]
    window = {
        "sample_rate": 8000,
        "bands": 16 if dry else 64,
        "window_ms": 25,
        "hop_ms": 10,
        "seconds": 0.2 if dry else 1.0,
    }
    return make_config(
        {
            "method": {"name": "fedavg"},
            "models": {"model": {"name": network, **options}},
            "data": {
                "name": f"{Path(scaling.__file__).resolve()}:Noise",
                "cache": str(folder / "cache"),
                "split": {"test": None},
                "features": window,
            },
            "train": {
                "rounds": 10**6,
                "cohort": cohort,
                "batch_size": 4 if dry else 16,
                "together": together,
                "optimiser": {"lr": 0.01},
            },
            "evaluate": {"every": 10**6, "server": False, "clients": "none"},
            "ray": {"actors": 0},
            "run": {"dir": str(folder / "runs"), "name": f"{network}-{cohort}-{together}", "commit_every": 10**6},
            "track": {"mlflow": False},
        }
    )


@contextlib.contextmanager
def work_of(config: Config, device: str, clients: int, examples: int) -> Iterator[tuple[Federation, Worker]]:
    """Open a new run with this number of clients on the device."""
    population = scaling.enlarge(build_population(config.data, 0), clients, examples)
    write_new_run(Path(config.run.dir) / str(config.run.name), config, population, {})
    with open_federation(config, device) as open_run:
        yield open_run


def rate(federation: Federation, seconds: float, cohort: int) -> float:
    """Return clients a second over rounds that take about ``seconds``; at least one round."""
    started, rounds = time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - started < seconds:
        federation.round()  # its updates are on the CPU when it ends, so no synchronisation is needed
        rounds += 1
    return rounds * cohort / (time.perf_counter() - started)


def gain(network: str, folder: Path, device: str, dry: bool) -> Line:
    """Return the line of the group size chosen by ``train.together: auto``."""
    cohort = max(TINY_COHORTS if dry else COHORTS[:2])
    size = (cohort, TINY_EXAMPLES if dry else EXAMPLES)
    config = configuration(network, cohort, folder, "auto" if device != "cpu" else 2, dry)
    with work_of(config, device, *size) as (federation, worker):
        width, seconds = federation.store.together, 0.1 if dry else 3.0
        if device == "cpu":  # on a CPU `auto` is 1 without a measurement; here the measurement is tested
            orders = federation.plan()
            keys = {key for order in orders for key in order.task.receive}
            width = measure_width(worker, orders, federation.broadcast(keys))
        federation.round()  # warm-up
        chosen = rate(federation, seconds, cohort)
    with work_of(configuration(network, cohort, folder, 1, dry), device, *size) as (federation, _):
        federation.round()
        alone = rate(federation, seconds, cohort)
    figure = (
        f"{width} of {cohort} clients at once: {chosen:.1f} clients a second, {chosen / alone:.2f} of one at a time"
    )
    return Line(TOGETHER, network, "ok", figure, {"width": width, "clients a second": chosen, "alone": alone})


def compare_loops(network: str, cohort: int, folder: Path, device: str, dry: bool, together: int | str) -> Line:
    """Return the line of raydfl against the bare loop at one cohort size."""
    clients, examples = max(TINY_COHORTS if dry else COHORTS), TINY_EXAMPLES if dry else EXAMPLES
    config = configuration(network, cohort, folder, together, dry)
    first, seconds = min(TINY_COHORTS if dry else COHORTS), 0.1 if dry else 4.0
    with work_of(config, device, clients, examples) as (federation, _):
        bare = Loop(make_work(config, rounds=2), device)
        bare.round(0, float("inf") if cohort == first else 0.0)  # warm-up
        federation.round()
        weights = {name: value.cpu() for name, value in bare.weights.items()}
        difference = largest_difference(weights, _weights(federation)) if cohort == first else None
        theirs = bare.rate(seconds)
        del bare
        ours, share, how = busy(lambda: rate(federation, seconds, cohort), device)
        width = federation.store.together
    figure = f"{ours:8.1f}   bare loop {theirs:8.1f}   ratio {ours / theirs:6.2f}   busy {share:4.0%} ({how})   {width} at once"
    details = {"ours": ours, "bare": theirs, "busy": share, "by": how, "together": width, "difference": difference}
    good = difference is None or difference < _ALIKE
    figure += "" if good else f"   but the models differ by {difference:.0e} after a round"
    return Line(SPEED, f"{network}, {cohort} a round", "ok" if good else "FAILED", figure, details)


def _weights(federation: Federation) -> dict[str, Tensor]:
    """Return the global model's state dict."""
    return {name.partition("/")[2]: value for name, value in federation.state.tensors["global"].items()}


def check_together(folder: Path, device: str, dry: bool, watch: Watch) -> list[Line]:
    """Return a line for each network with the group size chosen by ``train.together: auto``."""
    return _each(TOGETHER, {n: functools.partial(gain, n, folder, device, dry) for n in _networks(dry)}, watch)


def check_speed(folder: Path, device: str, dry: bool, watch: Watch) -> list[Line]:
    """Return a line for each network and cohort size."""
    together = "auto" if device != "cpu" else 1
    cohorts = TINY_COHORTS if dry else COHORTS
    works = {
        f"{network}, {cohort} a round": functools.partial(compare_loops, network, cohort, folder, device, dry, together)
        for cohort in cohorts
        for network in _networks(dry)
    }
    return _each(SPEED, works, watch)


def _networks(dry: bool) -> Mapping[str, Mapping[str, Any]]:
    return TINY_NETWORKS if dry else NETWORKS


def _each(part: str, works: Mapping[str, Callable[[], Line]], watch: Watch) -> list[Line]:
    lines: list[Line] = []
    for what, work in works.items():
        if watch.left <= 0:
            lines.append(Line(part, what, "cut short", "no time was left"))
            continue
        lines.append(run_checked(part, what, work))
        print(f"{lines[-1].result:9} {what} ({lines[-1].details['seconds']} s) {lines[-1].figure}", flush=True)
    return lines
