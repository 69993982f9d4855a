"""The values that change from round to round, and the round under way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from raydfl.core.types import Metrics, State
from raydfl.engine.arrivals import Arrivals
from raydfl.engine.orders import Order, Reply
from raydfl.engine.phases import Phases
from raydfl.engine.selection import Selection
from raydfl.engine.storage.private import PrivateIndex, PrivateRef
from raydfl.engine.telemetry import RoundReport, RoundRows


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The values that change from round to round. A resumed run restores them from a commit and the metrics table."""

    state: State
    private: PrivateIndex
    """The location of each client's private state."""
    phases: Phases
    """The phases with the rounds in which they really begin: ``run.stop`` can end a phase early."""
    selection: Selection

    def with_state(self, state: State) -> Checkpoint:
        """Return this checkpoint with another state, labelled with the phase of its next round."""
        return dataclasses.replace(self, state=dataclasses.replace(state, phase=self.phases.at(state.round_index)))

    @property
    def stopped(self) -> str:
        """The reason why ``run.stop`` ends the training; empty: training continues while rounds are left."""
        return self.selection.reason if self.selection.phase == self.phases.names[-1] else ""


@dataclass(slots=True)
class Round:
    """A round under way: its orders, and the results of the steps so far."""

    before: Checkpoint
    """The checkpoint from which the round was planned."""
    orders: list[Order]
    replies: Iterator[Reply]
    """The pool's replies to the orders, in order of completion."""
    times: dict[str, float]
    """Ends of the steps so far, on the clock of ``time.perf_counter``."""
    report: RoundReport
    measured: RoundRows
    """Rows of the evaluation, and of decisions that follow from it."""
    read_ahead: bool = False
    """Whether clients may begin the next round before this one is recorded."""
    arrivals: Arrivals | None = None
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the aggregation."""
    evaluated: bool = False
    went_back: bool = False
    """Whether the next phase begins with the models of an earlier round."""

    @classmethod
    def from_checkpoint(cls, before: Checkpoint) -> Round:
        """Return the round after a checkpoint, without orders."""
        number = before.state.round_index + 1
        now = time.perf_counter()
        return cls(before, [], iter(()), {"started": now}, RoundReport(number), RoundRows(number))

    def mark(self, step: str) -> None:
        """Note that a step ends now."""
        self.times[step] = time.perf_counter()

    @property
    def cohort(self) -> list[str]:
        """The ids of the clients that train, in client order."""
        return [order.task.client_id for order in self.orders]

    @property
    def attackers(self) -> list[str]:
        """The ids of the clients that attack, in client order."""
        return [order.task.client_id for order in self.orders if order.attacking]

    @property
    def received(self) -> Arrivals:
        """The replies to the orders.

        Raises:
            AssertionError: the round has not received any.
        """
        if self.arrivals is None:
            raise AssertionError("the round has no replies yet")
        return self.arrivals

    def moved(self, index_of: Callable[[str], int]) -> Mapping[int, PrivateRef]:
        """Return the new locations of private state by a client's position.

        Args:
            index_of: a client's position in the population, by its id.
        """
        return {index_of(client): ref for client, ref in self.received.moved.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds of the steps (:attr:`RoundReport.seconds`)."""
        times, waited = self.times, self.received.seconds
        return {
            "train_and_aggregate": times["aggregated"] - times["started"],
            "plan": times["dispatched"] - times["started"],
            "clients": times["resumed"] - times["dispatched"] + waited,
            "aggregate": times["aggregated"] - times["resumed"] - waited,
            "evaluate": times["evaluated"] - times["aggregated"],
        }
