"""The time of a round, by part, and the same as metrics of Ray.

All times are differences of one process's clock, and travel with replies that are sent anyway: an actor says how long after the
arrival of a call a client's work began and how long it took, the server knows when it sent the call and when it had the answer.
What is left between the two is transfer. So clocks of two nodes are never compared, and no time is negative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raydfl.core.types import Metrics, Ratio
from raydfl.engine.orders import Reply, Span
from raydfl.engine.storage import record


@dataclass(slots=True)
class RoundReport:
    """A report of a round, for the progress line, the record and the trackers."""

    round: int
    """Rounds completed."""
    phase: str = ""
    """The phase of the round, where the method has several."""
    clients: int = 0
    loss: float = float("nan")
    """Mean training loss per example, before aggregation."""
    scores: dict[str, float] = field(default_factory=dict)
    """Scores of the evaluation after the round, pooled: ``"test plugin/accuracy"``."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Why clients were left out of the round, by client id."""
    cut: dict[str, int] = field(default_factory=dict)
    """Optimiser steps by client id, of clients whose training ``train.deadline`` ended early and whose update counts."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    """Why clients could not be evaluated, by client id."""
    looped_because: str = ""
    """Why clients that were to be trained together could not be."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock by part: ``train_and_aggregate`` (and in it ``plan``, ``clients`` and ``aggregate``), ``evaluate`` and ``round``
    (since the last); ``commit``: of the last commit that is done, which ran beside a round; ``commit_wait``: for which a round
    had to wait for it."""
    work: dict[str, Ratio] = field(default_factory=dict)
    """Seconds of the actors in the round's training: ``fit``, ``transfer``, ``wait`` and ``queue``, see docs/observability.md."""
    retried: int = 0
    """Times that a client's training was given to another actor."""
    bytes_down: int = 0
    bytes_up: int = 0
    stopped: str = ""
    """Why no further round is done, where ``run.stop`` ends the training with this one."""
    rows: list[record.MetricRow] = field(default_factory=list)
    """Rows that have become durable since the last report, of rounds before this one, as a rule."""

    @property
    def used(self) -> int:
        """Clients whose updates were used."""
        return self.clients - len(self.rejected)

    @property
    def training_seconds(self) -> float:
        """Wall-clock time of training and aggregation; NaN when it is not known."""
        return self.seconds.get("train_and_aggregate", float("nan"))

    @property
    def clients_per_second(self) -> float:
        """Clients trained in a second of the round; NaN when its time is not known."""
        return self.used / self.training_seconds if self.training_seconds > 0 else float("nan")

    @property
    def times(self) -> dict[str, float]:
        """Seconds by part of the round: those that the record calls ``seconds/<part>``."""
        return {**self.seconds, **{what: ratio.value for what, ratio in self.work.items()}}


class RoundRows(list[record.MetricRow]):
    """The rows of one round, in the order in which they are recorded."""

    def __init__(self, round_index: int) -> None:
        super().__init__()
        self.round = round_index

    def add(self, metrics: Metrics, client: str = "") -> None:
        """Add numbers about the round's training, or about one client's part in it."""
        self += record.rows_from_metrics(self.round, "train", client, "server", metrics)

    def add_fact(self, metric: str, value: float, note: str) -> None:
        """Add a number about the run, and what it means in words."""
        self.append(record.MetricRow(self.round, "train", "", "server", metric, float(value), 1.0, note=note))

    def add_notes(self, phase: str, metric: str, notes: Mapping[str, str]) -> None:
        """Add what happened to single clients."""
        self += [
            record.MetricRow(self.round, phase, client, "server", metric, 1.0, 1.0, note=note)
            for client, note in notes.items()
        ]


TIMELINE = "timeline"
"""The array of the record that says which actor worked on which client when."""

WALL = ("plan", "clients", "aggregate", "evaluate", "commit_wait")
"""Parts of a round's wall-clock time that exclude each other; what is left of the round lies between rounds."""


def with_spans(
    replies: Sequence[Reply], actor: int, sent: float, answered: float, retried: Mapping[int, int] | None = None
) -> list[Reply]:
    """Return the replies of one call with what the pool knows about them.

    Args:
        replies: with ``waited`` and ``seconds`` as the actor measured them.
        actor: who did it.
        sent: when the call went out, on the server's clock.
        answered: when the answer was there, on the same clock.
        retried: times that orders were given to another actor, by position.
    """
    inside = max((reply.waited + reply.seconds for reply in replies), default=0.0)
    arrived = sent + max(0.0, answered - sent - inside) / 2
    found = []
    for reply in replies:
        begin = min(arrived + reply.waited, answered)
        end = min(begin + reply.seconds, answered)
        span = Span(actor, sent, begin, end, answered)
        found.append(dataclasses.replace(reply, span=span, retried=(retried or {}).get(reply.position, 0)))
    return found


class ReplyTimer:
    """The times in the replies of a pool's run; :meth:`note` receives each reply as it comes."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        """By client id, in order of arrival; without those that a pool gave none."""
        self.queued = 0.0
        """Seconds that orders lay at an actor before work on them began, added up."""
        self.retried: dict[str, int] = {}
        """Times that a client's work was given to another actor, by client id."""

    def note(self, reply: Reply) -> None:
        """Take note of a reply."""
        if reply.span is not None:
            self.spans.append((reply.client_id, reply.span))
        self.queued += reply.waited
        if reply.retried:
            self.retried[reply.client_id] = reply.retried

    def work(self, actors: int) -> dict[str, Ratio]:
        """Compute how the actors spent the time from the first order sent to the last answer, in seconds of actors.

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
        """Return float64 [clients, 4], by begin of work: index of the client, number of the actor, begin and end in seconds.

        Args:
            began: when the round began, which becomes 0.
            index: of each client, by id.
        """
        rows = [(index[client], span.actor, span.begin - began, span.end - began) for client, span in self.spans]
        return np.array(sorted(rows, key=lambda row: row[2]), np.float64).reshape(-1, 4)
