"""Metrics of rounds for Ray's metrics agent."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raydfl.engine import RoundReport

_FLUSH = 1.0
"""Seconds between two updates of Ray's metrics. Ray collects them about every 10 s."""


class RayMetrics:
    """Ray metrics with totals over a run's rounds. Ray's agent on the node exports them."""

    def __init__(self, run: str, method: str) -> None:
        """Create the metrics. Tags contain the names of run and method, but nothing about clients."""
        from ray.util.metrics import Counter, Gauge, Histogram

        tags = {"run": run, "method": method}

        def counter(name: str, description: str, kind: str = "") -> Counter:
            metric = Counter(f"raydfl_{name}", description, tag_keys=("run", "method", *([kind] if kind else [])))
            metric.set_default_tags(tags)
            return metric

        self._rounds = counter("rounds", "Rounds computed, including rounds repeated after a crash.")
        self._clients = counter("clients", "Client updates computed.")
        self._bytes = counter("bytes", "Bytes of tensors sent in training.", "direction")
        self._failures = counter("failures", "Updates rejected, and orders sent again to another actor.", "kind")
        self._seconds = counter(
            "seconds", "Seconds by part of a round. Seconds of actors are summed over actors.", "part"
        )
        self._round = Gauge("raydfl_round", "Rounds completed.", tag_keys=("run", "method"))
        self._round.set_default_tags(tags)
        bounds = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000]
        self._length = Histogram("raydfl_round_seconds", "Wall-clock seconds of a round.", bounds, ("run", "method"))
        self._length.set_default_tags(tags)
        self._waiting: list[RoundReport] = []
        self._flushed = -_FLUSH

    def observe(self, reports: Sequence[RoundReport]) -> None:
        """Add rounds to the metrics, and update Ray at most once a second."""
        self._waiting += reports
        if time.monotonic() - self._flushed >= _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Pass all observed rounds to Ray."""
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
    """Add an amount to a counter."""
    if value > 0:  # Ray rejects an increase of 0.
        counter.inc(value, tags or None)  # type: ignore[attr-defined]
