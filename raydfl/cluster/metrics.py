"""Metrics of a round for Ray's own metrics agent."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raydfl.engine import RoundReport

_FLUSH = 1.0
"""Seconds between two updates of Ray's metrics, which are collected every 10 s or so."""


class RayMetrics:
    """The sums of a run's rounds as metrics of Ray, in the process that makes them; Ray's agent of the node shows them."""

    def __init__(self, run: str, method: str) -> None:
        """Make the metrics. Their tags are the run's and the method's name and a handful of kinds: nothing about clients."""
        from ray.util.metrics import Counter, Gauge, Histogram

        tags = {"run": run, "method": method}

        def counter(name: str, description: str, kind: str = "") -> Counter:
            made = Counter(f"raydfl_{name}", description, tag_keys=("run", "method", *([kind] if kind else [])))
            made.set_default_tags(tags)
            return made

        self._rounds = counter("rounds", "Rounds computed, those computed again after a crash included.")
        self._clients = counter("clients", "Clients' work done for training.")
        self._bytes = counter("bytes", "Bytes of tensors sent in training.", "direction")
        self._failures = counter("failures", "Updates rejected, and orders given to another actor.", "kind")
        self._seconds = counter("seconds", "Seconds by part of the rounds; those of actors add up over actors.", "part")
        self._round = Gauge("raydfl_round", "Rounds completed.", tag_keys=("run", "method"))
        self._round.set_default_tags(tags)
        bounds = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000]
        self._length = Histogram("raydfl_round_seconds", "Wall-clock seconds of a round.", bounds, ("run", "method"))
        self._length.set_default_tags(tags)
        self._waiting: list[RoundReport] = []
        self._flushed = -_FLUSH

    def observe(self, reports: Sequence[RoundReport]) -> None:
        """Take note of rounds; they show after the next call that comes a second or more after the last that did."""
        self._waiting += reports
        if time.monotonic() - self._flushed >= _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Hand everything that was observed to Ray."""
        reports, self._waiting = self._waiting, []
        if not reports:
            return
        self._flushed = time.monotonic()
        self._round.set(reports[-1].round)
        sums: dict[str, float] = {}
        for report in reports:
            self._length.observe(max(report.seconds["round"], 1e-9))
            totals = {name: ratio.total for name, ratio in report.work.items()}
            for part, seconds in {**report.seconds, **totals}.items():
                sums[part] = sums.get(part, 0.0) + seconds
        for part, seconds in sums.items():
            _add(self._seconds, seconds, part=part)
        _add(self._rounds, len(reports))
        _add(self._clients, sum(report.clients for report in reports))
        _add(self._bytes, sum(report.bytes_down for report in reports), direction="down")
        _add(self._bytes, sum(report.bytes_up for report in reports), direction="up")
        _add(self._failures, sum(len(report.rejected) for report in reports), kind="rejected")
        _add(self._failures, sum(report.retried for report in reports), kind="retried")


def _add(counter: object, value: float, **tags: str) -> None:
    """Count something; Ray refuses to count nothing."""
    if value > 0:
        counter.inc(value, tags or None)  # type: ignore[attr-defined]
