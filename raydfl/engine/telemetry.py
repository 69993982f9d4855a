"""Timing of a round: seconds of its parts, and the report of a round.

Each time is a difference of readings of a single clock. An actor measures the delay and the duration of each client's work and
sends them with its reply. The server measures the time from call to answer. The remainder is transfer time. Clocks of two nodes
are never compared, so no time is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raydfl.core.types import Metrics, Ratio
from raydfl.engine.orders import Reply, Span
from raydfl.engine.storage import record


@dataclass(slots=True)
class RoundReport:
    """Report of a round, for the progress line, the metrics table and the trackers."""

    round: int
    """Completed rounds."""
    phase: str = ""
    """Phase of the round; empty without phases."""
    clients: int = 0
    loss: float = float("nan")
    """Mean training loss per example, before aggregation."""
    scores: dict[str, float] = field(default_factory=dict)
    """Pooled scores of the evaluation after the round, by split and metric: ``"test plugin/accuracy"``."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Reasons of dropped clients, by client id."""
    cut: dict[str, int] = field(default_factory=dict)
    """Optimiser steps of clients whose training ``train.deadline`` ended early, by client id. Their updates are used."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    """Reasons of failed evaluations, by client id."""
    looped_because: str = ""
    """Reason for unbatched training of clients, if ``train.together`` asked for batches."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by part: ``train_and_aggregate`` (with its parts ``plan``, ``clients`` and ``aggregate``), ``evaluate``,
    ``round`` (since the previous report), ``commit`` (the last finished commit, in the background) and ``commit_wait`` (waiting
    for a commit)."""
    work: dict[str, Ratio] = field(default_factory=dict)
    """Seconds of the actors during training: ``fit``, ``transfer``, ``wait`` and ``queue`` (docs/report.md#times)."""
    retried: int = 0
    """Times that a client's training moved to another actor."""
    bytes_down: int = 0
    bytes_up: int = 0
    privacy: str = ""
    """Guarantee of the models after an evaluated round with the rule gaussian, such as ``epsilon 1.99``; empty: not computed."""
    virtual_seconds: float | None = None
    """Virtual time of the server (``train.fleet``); ``None``: synchronous training."""
    withheld: bool = False
    """Whether metrics of clients, such as the loss, are withheld for privacy."""
    stopped: str = ""
    """Reason of early stopping after this round; empty: training continues."""
    rows: list[record.MetricRow] = field(default_factory=list)
    """Rows committed since the last report, usually of earlier rounds."""

    @property
    def used(self) -> int:
        """Number of aggregated clients."""
        return self.clients - len(self.rejected)

    @property
    def training_seconds(self) -> float:
        """Wall-clock seconds of training and aggregation; NaN if unknown."""
        return self.seconds.get("train_and_aggregate", float("nan"))

    @property
    def clients_per_second(self) -> float:
        """Aggregated clients per second; NaN if the time is unknown."""
        return self.used / self.training_seconds if self.training_seconds > 0 else float("nan")

    @property
    def times(self) -> dict[str, float]:
        """Seconds by part of the round, as in the metrics ``seconds/<part>``."""
        return {**self.seconds, **{use: ratio.value for use, ratio in self.work.items()}}


class RoundRows(list[record.MetricRow]):
    """Rows of one round for the metrics table, in order."""

    def __init__(self, round_index: int) -> None:
        super().__init__()
        self.round = round_index

    def add(self, metrics: Metrics, client: str = "") -> None:
        """Add metrics of the round's training, or of one client in it."""
        self += record.rows_from_metrics(self.round, "train", client, "server", metrics)

    def add_fact(self, metric: str, value: float, note: str) -> None:
        """Add a value with an explanation."""
        self.append(record.MetricRow(self.round, "train", "", "server", metric, float(value), 1.0, note=note))

    def add_notes(self, phase: str, metric: str, notes: Mapping[str, str]) -> None:
        """Add events of single clients, such as failures, with their reasons by client id."""
        self += [
            record.MetricRow(self.round, phase, client, "server", metric, 1.0, 1.0, note=note)
            for client, note in notes.items()
        ]


TIMELINE = "timeline"
"""Metric of the array with the actor, begin and end of each client's work."""

WALL = ("plan", "clients", "aggregate", "evaluate", "commit_wait")
"""Disjoint parts of a round's wall-clock time. The remainder is time between rounds."""


def add_spans(
    replies: Sequence[Reply], actor: int, sent: float, answered: float, retried: Mapping[int, int] | None = None
) -> list[Reply]:
    """Add the time span and the number of retries to the replies of one call, in place, because copies take longer.

    Args:
        replies: Replies with ``waited`` and ``seconds`` as measured by the actor.
        actor: Number of the actor.
        sent: Time of the call, on the server's clock in seconds.
        answered: Time of the answer, on the same clock.
        retried: Retries of orders, by position.
    """
    inside = max((reply.waited + reply.seconds for reply in replies), default=0.0)
    arrived = sent + max(0.0, answered - sent - inside) / 2  # assumes equally long ways there and back
    for reply in replies:
        begin = min(arrived + reply.waited, answered)
        end = min(begin + reply.seconds, answered)
        object.__setattr__(reply, "span", Span(actor, sent, begin, end, answered))
        object.__setattr__(reply, "retried", (retried or {}).get(reply.position, 0))
    return list(replies)


class ReplyTimer:
    """Collector of the times in replies."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        """Client ids and spans in order of arrival. Replies without a span are omitted."""
        self.queued = 0.0
        """Total time of orders in actors' queues, in seconds."""
        self.retried: dict[str, int] = {}
        """Times that a client's work moved to another actor, by client id."""

    def note(self, reply: Reply) -> None:
        """Add the times of a reply."""
        if reply.span is not None:
            self.spans.append((reply.client_id, reply.span))
        self.queued += reply.waited
        if reply.retried:
            self.retried[reply.client_id] = reply.retried

    def work(self, actors: int) -> dict[str, Ratio]:
        """Compute the actors' time without work, from the first order to the last answer.

        Args:
            actors: Number of actors, at least the number in the spans.

        Returns:
            Seconds of ``transfer`` (an idle actor waits for data; mean over clients), ``wait`` (an actor has no order; mean over
            actors) and ``queue`` (an order waits for a busy actor; mean over clients). The totals of transfer, wait and the spans
            add up to ``actors`` times the wall-clock time.
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
        """Build the timeline of the round.

        Args:
            began: Begin of the round on the server's clock, in seconds. The timeline starts there.
            index: Client indices, by client id.

        Returns:
            float64 [clients, 4], sorted by begin of work: client index, actor number, begin and end in seconds.
        """
        rows = [(index[client], span.actor, span.begin - began, span.end - began) for client, span in self.spans]
        return np.array(sorted(rows, key=lambda row: row[2]), np.float64).reshape(-1, 4)
