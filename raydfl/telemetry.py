"""Where the time of a round goes, and the same as metrics of Ray.

All times are differences of one process's clock, and travel with results that are sent anyway: an actor says how long after the
arrival of a call a client's work began and how long it took, the server knows when it sent the call and when it had the answer.
What is left between the two is transfer. So clocks of two nodes are never compared, and no time is negative.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raydfl.types import Ratio

if TYPE_CHECKING:
    from raydfl.federation import RoundReport
    from raydfl.worker import Result

TIMELINE = "timeline"
"""The array of the record that says which actor worked on which client when."""

WALL = ("plan", "clients", "aggregate", "evaluate", "commit_wait")
"""Parts of a round's wall-clock time that exclude each other; what is left of the round lies between rounds."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a client was worked on: seconds of the server's time.perf_counter."""

    actor: int
    """A number for each place of the pool; an actor that takes a lost one's place has its number."""
    sent: float
    """When the call with the client's order went out."""
    begin: float
    """When work on the client began, as far as the server can tell: it takes the way there and the way back as equally long."""
    end: float
    answered: float
    """When the server had the call's answer; it looks for answers while it has nothing to aggregate."""


def placed(results: Sequence[Result], actor: int, sent: float, answered: float) -> list[Result]:
    """The results of one call with their spans.

    Args:
        results: with ``waited`` and ``seconds`` as the actor measured them.
        actor: who did it.
        sent: when the call went out, on the server's clock.
        answered: when the answer was there, on the same clock.
    """
    inside = max((result.waited + result.seconds for result in results), default=0.0)
    arrived = sent + max(0.0, answered - sent - inside) / 2
    found = []
    for result in results:
        begin = min(arrived + result.waited, answered)
        end = min(begin + result.seconds, answered)
        found.append(dataclasses.replace(result, span=Span(actor, sent, begin, end, answered)))
    return found


class Watch(Iterator["Result"]):
    """The results of a pool's run, watched as they come."""

    def __init__(self, results: Iterator[Result]) -> None:
        self._results = results
        self.seconds = 0.0
        """For which whoever asked for results was kept waiting."""
        self.spans: list[tuple[str, Span]] = []
        """By client id, in order of arrival; without those that a pool gave none."""
        self.queued = 0.0
        """Seconds that orders lay at an actor before work on them began, added up."""
        self.retried: dict[str, int] = {}
        """Times that a client's work was given to another actor, by client id."""

    def __next__(self) -> Result:
        asked = time.perf_counter()
        try:
            result = next(self._results)
        finally:
            self.seconds += time.perf_counter() - asked
        if result.span is not None:
            self.spans.append((result.client_id, result.span))
        self.queued += result.waited
        if result.retried:
            self.retried[result.client_id] = result.retried
        return result

    def work(self, actors: int) -> dict[str, Ratio]:
        """How the actors spent the time from the first order sent to the last answer, in seconds of actors.

        Args:
            actors: how many there are; those of the spans count in any case.

        Returns:
            ``transfer`` (something was on its way to or from an actor that computed nothing; a mean over clients), ``wait`` (an
            actor had nothing to do; a mean over actors) and ``queue`` (orders lay at an actor that worked on others; over
            clients). The totals of transfer and wait, with the time of the spans themselves, are ``actors`` times the whole.
        """
        if not self.spans:
            return {}
        spans = [span for _, span in self.spans]
        began, ended = min(span.sent for span in spans), max(span.answered for span in spans)
        computed = sum(span.end - span.begin for span in spans)
        busy, until = 0.0, dict.fromkeys((span.actor for span in spans), began)
        for span in sorted(spans, key=lambda span: span.sent):
            busy += max(0.0, span.answered - max(span.sent, until[span.actor]))
            until[span.actor] = max(span.answered, until[span.actor])
        actors = max(actors, len(until))
        return {
            "transfer": Ratio(max(0.0, busy - computed), len(spans)),
            "wait": Ratio(max(0.0, actors * (ended - began) - busy), actors),
            "queue": Ratio(self.queued, len(spans)),
        }

    def timeline(self, began: float, index: Mapping[str, int]) -> np.ndarray:
        """float64 [clients, 4], by begin of work: index of the client, number of the actor, begin and end in seconds.

        Args:
            began: when the round began, which becomes 0.
            index: of each client, by id.
        """
        rows = [(index[client], span.actor, span.begin - began, span.end - began) for client, span in self.spans]
        return np.array(sorted(rows, key=lambda row: row[2]), np.float64).reshape(-1, 4)


_FLUSH = 1.0
"""Seconds between two updates of Ray's metrics, which are collected every 10 s or so."""


class RayMetrics:
    """The sums of a run's rounds as metrics of Ray, in the process that makes them; Ray's agent of the node shows them."""

    def __init__(self, run: str, method: str) -> None:
        """Tags are the run's and the method's name, and no more than a handful of kinds: nothing about clients."""
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
        """These rounds were done; they show after the next call that comes a second or more after the last that did."""
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
    """Ray refuses to count nothing."""
    if value > 0:
        counter.inc(value, tags or None)  # type: ignore[attr-defined]
