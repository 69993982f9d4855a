"""The checkpoint between rounds, and the current round."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from raydfl.core.types import Metrics, State
from raydfl.engine.arrivals import Arrivals
from raydfl.engine.fleet import NOBODY, InFlight, Step
from raydfl.engine.orders import Order, Reply
from raydfl.engine.phases import Phases
from raydfl.engine.selection import Selection
from raydfl.engine.storage.private import PrivateIndex, PrivateRef
from raydfl.engine.telemetry import RoundReport, RoundRows


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Values that change from round to round. A resumed run restores them from a commit and the metrics table."""

    state: State
    private: PrivateIndex
    """Location of each client's private state."""
    phases: Phases
    """Phases with their actual first rounds. ``run.stop`` can end a phase early."""
    selection: Selection
    spent: str = ""
    """Reason of ``run.stop.epsilon`` or ``run.stop.seconds`` to end the training; empty: training continues."""
    in_flight: InFlight = NOBODY
    """Clients that train asynchronously (``train.fleet``)."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Private steps of each client so far, by its id (``train.optimiser.private``)."""

    def replace_state(self, state: State) -> Checkpoint:
        """Return a copy with another state, labelled with the phase of its next round."""
        return dataclasses.replace(self, state=dataclasses.replace(state, phase=self.phases.find(state.round_index)))

    @property
    def stopped(self) -> str:
        """Reason of ``run.stop`` to end the training; empty: training continues until ``train.rounds``."""
        return self.spent or (self.selection.reason if self.selection.phase == self.phases.names[-1] else "")


@dataclass(slots=True)
class Round:
    """Current round: its orders, and the results of its finished steps."""

    before: Checkpoint
    """Checkpoint from which the round was planned."""
    orders: list[Order]
    replies: Iterator[Reply]
    """Replies of the pool, in order of completion."""
    times: dict[str, float]
    """End of each finished step, in seconds of ``time.perf_counter``."""
    report: RoundReport
    measured: RoundRows
    """Rows of the evaluation, and of decisions based on it."""
    step: Step | None = None
    """Server step of asynchronous training; ``None``: the training is synchronous, without virtual time."""
    in_flight: InFlight = NOBODY
    """Clients in flight after the step."""
    early: bool = False
    """Whether workers also carry out orders of later steps."""
    read_ahead: bool = False
    """Whether clients may begin the next round before this round is recorded."""
    arrivals: Arrivals | None = None
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the aggregation."""
    evaluated: bool = False
    went_back: bool = False
    """Whether the next phase begins with the models of an earlier round."""

    @classmethod
    def from_checkpoint(cls, before: Checkpoint) -> Round:
        """Create the round after a checkpoint, without orders."""
        number = before.state.round_index + 1
        now = time.perf_counter()
        return cls(before, [], iter(()), {"started": now}, RoundReport(number), RoundRows(number))

    def use_step(self, step: Step | None) -> None:
        """Set the server step of asynchronous training, if any, and copy the tensors for its clients in flight."""
        self.step = step
        if step is not None:
            self.in_flight = self.before.in_flight.advance(step.fleet, self.before.state)

    def mark(self, step: str) -> None:
        """Record the current time as the end of a step."""
        self.times[step] = time.perf_counter()

    @property
    def cohort(self) -> list[str]:
        """Ids of the training clients, in client order."""
        return [order.task.client_id for order in self.orders]

    @property
    def attackers(self) -> list[str]:
        """Ids of the attackers, in client order."""
        return [order.task.client_id for order in self.orders if order.attacking]

    @property
    def received(self) -> Arrivals:
        """Replies to the orders.

        Raises:
            AssertionError: The round has no replies yet.
        """
        if self.arrivals is None:
            raise AssertionError("the round has no replies yet")
        return self.arrivals

    def get_moves(self, index_of: Callable[[str], int]) -> Mapping[int, PrivateRef]:
        """Return the new locations of private state by client index.

        Args:
            index_of: Function from a client's id to its index in the population.
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
