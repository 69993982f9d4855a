"""Listeners: the decisions after a round, one class each.

:class:`Federation` calls their ``after_round`` in order and continues from the last returned checkpoint. If a listener fails, the
round is discarded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from raydfl.core.errors import RunDirectoryError
from raydfl.core.types import Ratio, State
from raydfl.core.users_code import naming_failures
from raydfl.engine.asynchrony import record_step
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.example_privacy import STEPS, PrivateExamples, describe_examples
from raydfl.engine.fleet import InFlight
from raydfl.engine.pool import Pool
from raydfl.engine.privacy import STUDY, PrivateRun, list_warnings, mark_epsilon
from raydfl.engine.rounds import Checkpoint, Round
from raydfl.engine.settings import RunSettings
from raydfl.engine.storage.committer import Committer
from raydfl.engine.storage.private import PrivateRef
from raydfl.engine.storage.store import RunStore, as_stored
from raydfl.engine.telemetry import RoundRows
from raydfl.engine.worker import Worker


class Listener(Protocol):
    """Interface of an action after each round."""

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """Return the starting checkpoint of the next round.

        Args:
            done: Aggregated and evaluated round. A listener may add rows to it.
            checkpoint: Checkpoint of the previous listener.
        """
        ...


class BestRound:
    """Tracks the best round by ``run.best`` and ``run.stop``."""

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """Add the scores of an evaluated round to the selection."""
        if not done.evaluated or not checkpoint.selection.wanted:
            return checkpoint
        selection = checkpoint.selection.update(done.report.round, done.report.phase, done.report.scores)
        if selection.best is not None and selection.best.round:
            done.measured.add_fact("best_round", selection.best.round, selection.best.text)
        return dataclasses.replace(checkpoint, selection=selection)


class StopRule:
    """Ends the training, or its phase, by ``run.stop``."""

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """End the phase of an evaluated round, or the training if the phase is the last, once the metric stops improving."""
        report, reason, phases = done.report, checkpoint.selection.reason, checkpoint.phases
        if not done.evaluated or not reason:
            return checkpoint
        report.stopped = checkpoint.stopped
        if report.stopped:
            done.measured.add_fact("stopped", report.round, report.stopped)
        elif phases.find(report.round) == report.phase:
            done.measured.add_fact("phase_stopped", report.round, f"{report.phase}: {reason}")
            return dataclasses.replace(checkpoint, phases=phases.end(report.phase, report.round))
        return checkpoint


class PrivacyBudget:
    """Measures epsilon in evaluated rounds, and ends the training by ``run.stop.epsilon``.

    Args:
        private: Noise and accounting of the run.
    """

    def __init__(self, private: PrivateRun) -> None:
        self._private = private

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """Add epsilon to an evaluated round, and end the training if another round would exceed the limit."""
        report = done.report
        report.withheld, ended = not self._private.outside, self._private.explain_end(report.round)
        if done.evaluated or ended:
            epsilon = self._private.mechanism.compute_epsilon(report.round)
            warnings = "; ".join(list_warnings(self._private.mechanism, self._private.secret))
            report.privacy = f"epsilon {epsilon:.3g}{f' ({warnings})' if warnings else ''}"
            done.measured.add_fact(self._private.metric, epsilon, self._private.describe(report.round, epsilon))
        return _end_training(done, checkpoint, ended)


class TimeLimit:
    """Ends the training by ``run.stop.seconds``, in virtual time."""

    def __init__(self, run: RunSettings) -> None:
        self._limit = math.inf if run.stop is None or run.stop.seconds is None else run.stop.seconds

    def explain_end(self, in_flight: InFlight) -> str:
        """Return why the training ends at the virtual time of a queue; empty: it continues."""
        now = in_flight.fleet.seconds
        return f"the virtual time ({now:g} s) has reached run.stop.seconds" if now >= self._limit else ""

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """End the training in the first round that reaches the limit."""
        return _end_training(done, checkpoint, self.explain_end(checkpoint.in_flight))


class ExampleBudget:
    """Counts the private steps of clients, measures their epsilons, and ends the training by ``run.stop.epsilon``.

    Args:
        examples: Keys and accounting of the run.
    """

    def __init__(self, examples: PrivateExamples) -> None:
        self._examples = examples

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """Add a round's steps, and in an evaluated round the largest and the median epsilon."""
        report, examples, steps = done.report, self._examples, Counter(checkpoint.steps)
        for client in done.cohort:  # also without an update, because the accounting must not depend on arrivals
            steps[client] += (count := examples.count_steps(client))
            done.measured.add({STEPS: Ratio(count, 1)}, client)
        ended = examples.explain_end(report.round, steps)
        report.withheld = not examples.outside
        if done.evaluated or ended:
            largest, median = examples.measure(steps)
            text = describe_examples(examples.mechanism, report.round, largest, median, examples.secret)
            mark = mark_epsilon([] if examples.secret else [STUDY])
            report.privacy = f"epsilon {largest:.3g}, median {median:.3g}{mark}"
            done.measured.add_fact("privacy/epsilon", largest, text)
            done.measured.add_fact("privacy/epsilon_median", median, "")
        return _end_training(done, dataclasses.replace(checkpoint, steps=steps), ended)


def _end_training(done: Round, checkpoint: Checkpoint, reason: str) -> Checkpoint:
    """End the training for a reason; empty: it continues."""
    if not reason:
        return checkpoint
    if not done.report.stopped:
        done.report.stopped = reason
        done.measured.add_fact("stopped", done.report.round, reason)
    return dataclasses.replace(checkpoint, spent=reason)


class PhaseChange:
    """Begins the next phase after the last round of a phase.

    Args:
        config: Configuration of the run.
        store: Store of the run.
        committer: Committer of the run.
    """

    def __init__(self, config: Config, store: RunStore, committer: Committer) -> None:
        self._config = config
        self._store = store
        self._committer = committer

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """Begin the next phase from the checkpoint of this round or of the best round.

        Raises:
            ClientError: The method's code failed.
            RunDirectoryError: The best round's commit is missing.
        """
        checkpoint = checkpoint.replace_state(checkpoint.state)
        phase, best = checkpoint.state.phase, checkpoint.selection.best
        if phase == done.report.phase:
            return checkpoint
        checkpoint = dataclasses.replace(checkpoint, in_flight=checkpoint.in_flight.land())
        own = self._config.train.phases.get(phase)
        if own is not None and own.begin == "best" and best is not None and 0 < best.round < done.report.round:
            done.went_back = True
            checkpoint = self._restore(best.round, done, checkpoint)
        return dataclasses.replace(checkpoint, state=begin_phase(self._config, checkpoint.state))

    def _restore(self, best: int, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """Restore the models and the private state of an earlier round."""
        done.report.rows += self._committer.wait()
        name = self._store.commit_of(best)
        if name is None:
            raise RunDirectoryError(
                f"phase {checkpoint.state.phase!r} begins with the models of round {best}, but its commit is missing in "
                f"{self._store.folder / 'commits'}. Restore it from a copy, or restart the run"
            )
        commit = self._store.load(name)
        state = dataclasses.replace(commit.state, round_index=done.report.round)
        return dataclasses.replace(checkpoint, private=commit.private).replace_state(state)


class ReadAhead:
    """Starts the next round at the clients while the server records the current one.

    Args:
        config: Configuration of the run.
        pool: Pool of the run.
        committer: Committer of the run.
        begin: Plans the next round and sends its orders.
    """

    def __init__(self, config: Config, pool: Pool, committer: Committer, begin: Callable[[], Round]) -> None:
        self._train = config.train
        self._pool = pool
        self._committer = committer
        self._begin = begin
        self.begun: Round | None = None
        """Next round, if clients already work on it."""

    def take(self, round_index: int) -> Round | None:
        """Remove and return the started round after ``round_index`` completed rounds, if any."""
        begun, self.begun = self.begun, None
        return begun if begun is not None and begun.before.state.round_index == round_index else None

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """Start the next round if the pool runs in other processes, unless a deadline or a compaction forbids it."""
        train, state = self._train, checkpoint.state
        if not done.read_ahead or done.went_back or done.report.stopped:
            return checkpoint
        if not self._pool.concurrent or state.round_index >= train.rounds:
            return checkpoint
        # Nothing enforces a deadline before the next call of Federation.round.
        moving = self._committer.select_sparse(checkpoint.private) is not None
        if not moving and train.resolve_phase(state.phase).real_deadline is None:
            with contextlib.suppress(Exception):  # the next call of Federation.round raises the error again
                self.begun = self._begin()
                done.times["next started"] = self.begun.times["started"]
        return checkpoint


class Recorder:
    """Adds the rows of a round to the metrics table.

    Args:
        config: Configuration of the run.
        clients: Clients of the run.
        pool: Pool of the run.
        store: Store of the run.
        committer: Committer of the run. A commit makes the rows durable.
        private: Noise and accounting of the run; ``None``: without privacy.
    """

    def __init__(
        self,
        config: Config,
        clients: Clients,
        pool: Pool,
        store: RunStore,
        committer: Committer,
        private: PrivateRun | PrivateExamples | None = None,
    ) -> None:
        self._config = config
        self._clients = clients
        self._pool = pool
        self._store = store
        self._committer = committer
        self._private = private
        self._marked = time.perf_counter()

    def after_round(self, done: Round, checkpoint: Checkpoint) -> Checkpoint:
        """Add rows for the training, the attackers, the phase, the evaluation and the times of a round."""
        report, rows, arrivals = done.report, RoundRows(done.report.round), done.received
        arrivals.record(rows, self._store.together > 1, self._config.train.deadline is not None)
        if done.step is not None:
            staleness = [order.staleness for order in done.orders]
            record_step(rows, done.step, staleness, lambda index: self._clients[index].id)
        if self._config.components.attack is not None:
            rows.add({"attackers": Ratio(len(done.attackers), 1)})
            for client in done.attackers:
                rows.add({"attacker": Ratio(1, 1)}, client)
        rows.add(done.metrics)
        if len(checkpoint.phases.names) > 1:
            rows.add({"phase": Ratio(checkpoint.phases.number(report.phase), 1)})
        rows.extend(done.measured)
        actors = None if done.early else self._pool.count_workers()
        arrivals.record_work(rows, actors, done.times["started"], self._clients.index_of)
        # A commit runs during the next round, so its time is known one round later.
        now = done.times.get("next started") or time.perf_counter()
        commit, waited = self._committer.take_seconds()
        report.seconds |= done.seconds | {"round": now - self._marked, "commit": commit, "commit_wait": waited}
        self._marked = now
        rows.add({f"seconds/{part}": Ratio(seconds, 1) for part, seconds in report.seconds.items()})
        if self._private is not None:
            self._private.keep_rows(rows, report)
        self._committer.add_rows(rows)
        return checkpoint


class Compaction:
    """Keeps the private segments below about twice the size of their live records.

    Args:
        pool: Pool of the run.
        committer: Committer of the run.
        ahead: Listener that starts rounds ahead. While clients work, their records must not move.
        place_of: Returns the site of a client, by its index.
    """

    def __init__(self, pool: Pool, committer: Committer, ahead: ReadAhead, place_of: Callable[[int], str]) -> None:
        self._pool = pool
        self._place_of = place_of
        self._committer = committer
        self._ahead = ahead

    def before_commit(self, checkpoint: Checkpoint) -> Checkpoint:
        """Move the records of sparse segments into a new one."""
        working = self._ahead.begun is not None or self._pool.early
        sparse = None if working else self._committer.select_sparse(checkpoint.private)
        if sparse is None:
            return checkpoint
        by_place: dict[str, dict[int, PrivateRef]] = {}
        for client, ref in sparse.items():
            by_place.setdefault(self._place_of(client), {})[client] = ref
        moved: dict[int, PrivateRef] = {}
        for place, refs in by_place.items():
            job = functools.partial(_compact, round_index=checkpoint.state.round_index, refs=refs)
            moved |= self._pool.ask(place, job) or {}  # if the worker is lost, a later commit tries again
        self._committer.note_moved(checkpoint.private, moved)
        return dataclasses.replace(checkpoint, private=checkpoint.private.replace(moved))


def _compact(worker: Worker, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
    """Compact records at their site, so that private state never passes through the server."""
    return worker.private.compact(round_index, refs)


def begin_phase(config: Config, state: State) -> State:
    """Compute the method's first state of the phase ``state.phase``.

    Raises:
        ClientError: The method's code failed.
    """
    method = config.components.method
    with naming_failures(method, "begin_phase", f"after round {state.round_index}, phase {state.phase!r}"):
        begun = method.begin_phase(state)
    return dataclasses.replace(as_stored(begun), phase=state.phase)
