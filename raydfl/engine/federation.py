"""The round: plan, train, aggregate, evaluate, record, commit. A plain class that knows no Ray."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from raydfl.core import seeds
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import State, Task, Update
from raydfl.core.users_code import naming_failures
from raydfl.data import Population, join_shards
from raydfl.engine.adversary import Adversary
from raydfl.engine.arrivals import Arrivals
from raydfl.engine.asynchrony import rebase_updates
from raydfl.engine.autotune import ask_width
from raydfl.engine.best_round import check_file_names, restore_selection
from raydfl.engine.block_size import choose_block
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.evaluation import Evaluation, find_received_entries, pool_replies
from raydfl.engine.example_privacy import PrivateExamples, read_steps
from raydfl.engine.fleet import NOBODY, Versions
from raydfl.engine.initial_state import make_initial_state
from raydfl.engine.listeners import (
    BestRound,
    Compaction,
    ExampleBudget,
    Listener,
    PhaseChange,
    PrivacyBudget,
    ReadAhead,
    Recorder,
    StopRule,
    TimeLimit,
    begin_phase,
)
from raydfl.engine.networks import build_variants
from raydfl.engine.orders import (
    SERVER,
    Measurement,
    Order,
    Reply,
    keys_of,
    name_version,
    sort_replies,
)
from raydfl.engine.passes import select_updates
from raydfl.engine.planning import RoundPlanner
from raydfl.engine.pool import EARLY, EarlyOrders, Pool, ask_everywhere
from raydfl.engine.privacy import PrivateRun
from raydfl.engine.rounds import Checkpoint, Round
from raydfl.engine.rule_memory import check_rule_memory
from raydfl.engine.storage import record
from raydfl.engine.storage.committer import Committer
from raydfl.engine.storage.mirror import RunMirror
from raydfl.engine.storage.private import PrivateIndex
from raydfl.engine.storage.store import RunStore, as_stored
from raydfl.engine.telemetry import RoundReport
from raydfl.engine.validation import check_failed, check_overflow
from raydfl.rules import Gaussian, TwoPassRule


class Federation:
    """Federation of a run, executed round by round.

    Only its checkpoint changes between rounds. Every commit stores the checkpoint, so a new Federation in the same folder resumes
    after the last commit and gives the same bits.
    """

    def __init__(
        self, config: Config, population: Population, store: RunStore, pool: Pool, run_dir: Path | None = None
    ) -> None:
        """Open the newest commit, or create and commit round 0.

        Args:
            config: Configuration of the run.
            population: Clients and their data.
            store: Run directory. The caller holds its lock.
            pool: Workers that execute the orders.
            run_dir: Folder with ``run.json`` and the key of the noise; ``None``: the folder of the store.
        """
        self.config = config
        self.store = store
        self.pool = pool
        self._sites = any(population.places)
        self.method = config.components.method
        self.clients = Clients(population, config, planning=True)
        run_dir = store.folder if run_dir is None else run_dir
        self._private = PrivateRun.open(config, run_dir)
        self._examples = PrivateExamples.open(config, run_dir, population, self.clients)
        cohorts = {
            name: config.train.resolve_phase(name).cohort_size(self.clients.eligible) for name in config.phases.names
        }
        self._attackers = Adversary(
            config.components.attack, type(self.method).changes, population.ids, config.run.seed
        )
        self._planner = RoundPlanner(
            config, population, self.clients, cohorts, self._private, self._examples, self._attackers.attacks, store
        )
        variants = build_variants(self.method, self.clients.variants_of_parts(), config.run.seed)
        self._evaluation = Evaluation(
            config.evaluate,
            self.method,
            self.clients,
            {
                part: join_shards(data.shards) if self.method.objective.compares_clips else data.shards
                for part, data in population.parts.items()
            },
            variants,
            config.components.fine_tune.part,
            self._make_orders,
            lambda state: find_received_entries(config, state, self.clients, self.checkpoint.phases.first),
        )
        networks = [networks for combinations in variants.values() for networks in combinations]
        commit, self.warnings = store.open_latest()
        largest = max(cohorts.values())
        store.block = commit.block if commit else choose_block(config.train, config.components, largest)
        need, large = "", False
        if store.block == 1 or config.ray.actors == "per_client":
            need, large = check_rule_memory(self.method, networks, [*cohorts.values()])
        self.warnings += [need] * large
        self.notes = [need] if need and not large and commit is None else []
        state = make_initial_state(config, self.clients, variants) if commit is None else commit.state
        private, begun = (PrivateIndex(), ()) if commit is None else (commit.private, commit.begun)
        selection = config.make_selection(population)
        in_flight = NOBODY if commit is None else commit.in_flight
        self._time_limit = TimeLimit(config.run)
        spent = "" if self._private is None else self._private.explain_end(state.round_index)
        spent = spent or self._time_limit.explain_end(in_flight)
        phases = config.phases.replace_first(begun)
        self.checkpoint = Checkpoint(state, private, phases, selection, spent, in_flight).replace_state(state)
        if commit is None:
            self._start()
        else:
            store.together = commit.together  # another one would change the last bits of the run
            # A crash between rows and LATEST leaves rows of rounds without a commit, which the run repeats.
            record.discard_rows(store.folder, self.state.round_index)
            self._restore_selection()
        if self._examples is not None:
            steps = read_steps(store.folder, self.state.round_index)
            spent = self._examples.explain_end(self.state.round_index, steps)
            self.checkpoint = dataclasses.replace(self.checkpoint, steps=steps, spent=self.checkpoint.spent or spent)
        if not store.private_here:
            named = frozenset[str]().union(*store.files.values())
            ask_everywhere(pool, population.places, lambda worker: worker.private.retain(named))

        def remove(segments: Collection[str]) -> None:
            # No wait: segments of a lost request are removed when the run is next opened.
            ask_everywhere(pool, population.places, lambda worker: worker.private.remove(segments), wait=False)

        self._committer = Committer(store, self.state, self.checkpoint.private, remove)
        self._ahead = ReadAhead(config, pool, self._committer, self._begin)
        self._compaction = Compaction(pool, self._committer, self._ahead, population.place_of)
        self._listeners: Sequence[Listener] = (
            BestRound(),
            StopRule(),
            *(() if self._private is None else (PrivacyBudget(self._private),)),
            *(() if self._examples is None else (ExampleBudget(self._examples),)),
            self._time_limit,
            PhaseChange(config, store, self._committer),
            self._ahead,
            Recorder(config, self.clients, pool, store, self._committer, self._private or self._examples),
        )

    @property
    def state(self) -> State:
        """The server's state after the completed rounds."""
        return self.checkpoint.state

    @property
    def stopped(self) -> str:
        """Reason of ``run.stop`` to end the training; empty: training continues until ``train.rounds``."""
        return self.checkpoint.stopped

    def round(self, ahead: bool = False) -> RoundReport:
        """Train a cohort, aggregate its updates, evaluate and commit.

        Args:
            ahead: Let clients begin the next round before this round is recorded. Their work is lost if the next round is not run.

        Raises:
            ClientError: A method's code failed, or too many updates were rejected. The checkpoint remains that of the last round.
        """
        with self._transaction():
            # 1. Plan the round and 2. send its orders, unless clients already work on it.
            current = self._ahead.take(self.state.round_index) or self._begin()
            current.read_ahead = ahead
            # 3. Clients train while the last round is written. 4. The pool replaces lost actors, and updates are checked.
            updates = self._receive(current)
            # 5. Aggregate the updates in client order.
            self._accept(current, self._aggregate(current, updates))
            # 6. Evaluate the new state, if an evaluation is due.
            self._evaluate(current)
            for listener in self._listeners:
                self.checkpoint = listener.after_round(current, self.checkpoint)
        # 7. Commit, if a commit is due.
        self._commit(current)
        return current.report

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Restore the checkpoint after any exception."""
        before = self.checkpoint
        try:
            yield
        except BaseException:
            self.checkpoint = before
            raise

    def _begin(self) -> Round:
        """Plan the next round and send its orders."""
        current = Round.from_checkpoint(self.checkpoint)
        current.orders, step = self._planner.plan(self.checkpoint)
        current.use_step(step)
        early = self._plan_early(current)
        if early is None:
            current.replies = self._send(current.orders)
        else:
            current.early = True
            versions = (self.checkpoint.in_flight.versions, current.in_flight.versions)
            tensors = self.broadcast(keys_of([*current.orders, *early.orders]), versions)
            current.replies = self.pool.run(current.orders, tensors, early)
        current.mark("dispatched")
        return current

    def _plan_early(self, current: Round) -> EarlyOrders | None:
        """Plan orders of clients in flight, for workers without other work in the round; ``None``: early work is impossible."""
        before, number = self.checkpoint, current.report.round
        if current.step is None or not self.pool.concurrent or self._sites:
            return None
        if self.config.components.attack is not None:  # It chooses its clients in the round of their arrival.
            return None
        ends = number >= self.config.train.rounds or before.phases.find(number) != before.state.phase
        # A compaction waits until no client reads private state.
        if ends or self._committer.select_sparse(before.private) is not None:
            return None
        return self._planner.plan_early(before, current.step, EARLY * self.pool.count_workers())

    def _send(self, orders: Sequence[Order], means: Mapping[str, FlatTensors] | None = None) -> Iterator[Reply]:
        """Send orders to the pool, with the means of a pass, and return its replies, in order of completion."""
        means = means or {}
        return self.pool.run(orders, {**self.broadcast(keys_of(orders) - means.keys()), **means})

    def _receive(self, current: Round) -> Iterator[Update]:
        """Return the round's updates in client order, with attackers' updates replaced."""
        views = any(data.views for data in self.config.data.each.values())
        current.arrivals = arrivals = Arrivals(
            current.orders,
            current.replies,
            current.report,
            self.config.run.on_error,
            self.clients.views_of if views else None,
        )
        current.mark("resumed")
        self._committer.begin()  # after the orders, so that clients need not wait for the disk
        rule = self.config.components.rule
        updates = arrivals.updates(self.state.tensors, self.method.additions, rule)
        if isinstance(rule, TwoPassRule) and current.orders and current.orders[0].block is not None:
            updates = select_updates(rule, updates, arrivals.blocks, self._send)
        if self.config.train.fleet is not None:
            staleness = {order.task.client_id: order.staleness for order in current.orders}
            versions, changes = self.checkpoint.in_flight.versions, type(self.method).changes
            updates = rebase_updates(updates, staleness, self.config.train.fleet, self.state, versions, changes)
        return self._attackers.replace_updates(
            updates,
            {order.task.client_id: order.cost for order in current.orders},
            frozenset(current.attackers),
            self.state.tensors,
            self.state.round_index,
        )

    def _accept(self, current: Round, state: State) -> None:
        """Check the aggregated state and make it the current one.

        Raises:
            ClientError: Too many updates were rejected, or the state overflows.
        """
        report, arrivals, run = current.report, current.received, self.config.run
        current.mark("aggregated")
        check_failed(report.round, report.rejected, len(current.orders), run.max_failed, self.store.folder)
        check_overflow(report.round, state.tensors, self.state.tensors, arrivals.largest, current.attackers)
        report.phase = state.phase
        report.virtual_seconds = None if current.step is None else current.step.fleet.seconds
        self.checkpoint = dataclasses.replace(
            self.checkpoint,
            state=dataclasses.replace(state, round_index=report.round),
            private=self.checkpoint.private.replace(current.get_moves(self.clients.index_of)),
            in_flight=current.in_flight,
        )

    def _evaluate(self, current: Round) -> None:
        """Evaluate shared models on the server's data, and clients on their held-out clips, if an evaluation is due."""
        report = current.report
        last = report.round == self.config.train.rounds or bool(self._time_limit.explain_end(current.in_flight))
        before, now = current.before.in_flight.fleet.seconds, current.in_flight.fleet.seconds
        current.evaluated = last or self.config.evaluate.is_due(report.round, before, now)
        if current.evaluated:
            rows, report.unmeasured = self._measure(current.cohort)
            report.scores = record.scores(rows)
            current.measured.add_notes("evaluate", "failed", report.unmeasured)
            current.measured += rows
        current.mark("evaluated")

    def _commit(self, done: Round) -> None:
        """Prepare a commit of the round, if a commit is due. It is written when clients have work again, or at the end."""
        report, best = done.report, self.checkpoint.selection.best
        self._committer.note_moved(done.before.private, done.get_moves(self.clients.index_of))
        if done.went_back:
            self._committer.restore(self.checkpoint.private)
        is_best = best is not None and best.round == report.round
        due = report.round % self.config.run.commit_every == 0 or report.round == self.config.train.rounds
        if due or is_best or done.went_back or report.stopped:
            self._prepare_commit(report, is_best)

    def _prepare_commit(self, report: RoundReport, best: bool = False) -> None:
        """Compact private state and snapshot the checkpoint for the next commit."""
        report.rows += self._committer.wait()
        self.checkpoint = self._compaction.before_commit(self.checkpoint)
        checkpoint = self.checkpoint
        begun = () if checkpoint.phases == self.config.phases else checkpoint.phases.first
        self._committer.prepare(checkpoint.state, checkpoint.private, best, begun, checkpoint.in_flight)

    def _start(self) -> None:
        """Check the evaluation's settings, then commit round 0.

        Raises:
            ConfigError: A planned evaluation or a metric of ``run.best`` or ``run.stop`` is impossible, or the best round's models
                would overwrite a file.
        """
        names = (*self.state.tensors, *self.config.data.parts)
        check_file_names(self.checkpoint.selection, names)
        self._evaluation.make_server_orders(self.state)  # raises ConfigError for an invalid plan, before any training
        self._check_metrics()
        record.discard_rows(self.store.folder, -1)
        together, alone = self.config.train.together, self.config.ray.actors == "per_client"
        # The time of one client must not end the training of others (raydfl.engine.privacy_settings).
        alone = alone or (self.config.train.deadline is not None and isinstance(self.config.components.rule, Gaussian))
        if not isinstance(together, int):
            orders = [] if alone else self.plan(drawn=False)
            together = ask_width(self.pool, orders, self.broadcast(keys_of(orders)))
        self.store.together = together
        self.store.commit(self.state, self.checkpoint.private)

    def _restore_selection(self) -> None:
        """Restore the comparison of rounds from the metrics table, and keep the commit of the best round.

        Raises:
            ConfigError: A metric of ``run.best`` or ``run.stop`` is not measured.
        """
        if not self.checkpoint.selection.wanted:
            return
        selection, names, unkept = restore_selection(
            self.store, self.checkpoint.selection, self.checkpoint.phases, self.state.round_index
        )
        self.checkpoint = dataclasses.replace(self.checkpoint, selection=selection)
        if unkept is not None:
            self.warnings.append(
                f"the best round so far is {unkept.text}, but its models are not kept. run.best selects among later rounds only"
            )
        if names:
            selection.check(selection.phase, names)
        else:
            self._check_metrics()
        if selection.best is not None and selection.best.round:
            self.store.keep_best(selection.best.round)

    def _check_metrics(self) -> None:
        """Evaluate the current state as if in each later phase, to check the metrics of ``run.best`` and ``run.stop``.

        Raises:
            ConfigError: A metric is not measured. The message lists the measured metrics.
        """
        before, names = self.checkpoint, self.checkpoint.phases.names
        if not before.selection.wanted:
            return
        try:
            for phase in names[names.index(before.state.phase) :]:
                if phase != self.state.phase:
                    state = begin_phase(self.config, dataclasses.replace(self.state, phase=phase))
                    self.checkpoint = dataclasses.replace(before, state=state)
                rows, _ = self._measure([order.task.client_id for order in self.plan(drawn=False)])
                before.selection.check(phase, list(record.scores(rows)))
        finally:
            self.checkpoint = before

    def plan(self, drawn: bool = True) -> list[Order]:
        """Plan the orders of the next round. Repeated calls return equal orders.

        Args:
            drawn: With Poisson sampling, draw the number of clients. ``False``: plan their expected number.
        """
        return self._planner.plan(self.checkpoint, drawn)[0]

    def _make_orders(self, tasks: Sequence[Task], measure: tuple[Measurement, ...]) -> list[Order]:
        return self._planner.make_orders(self.checkpoint, tasks, measure)

    def broadcast(self, keys: set[str], versions: Sequence[Versions] | None = None) -> dict[str, FlatTensors]:
        """Return entries of the server's state and of earlier states, with flat tensors, to send to clients.

        Args:
            keys: Keys in the broadcast.
            versions: Earlier states; ``None``: those of the checkpoint.
        """
        tensors = {
            name_version(key, version): group
            for states in versions or (self.checkpoint.in_flight.versions,)
            for version, entries in states.items()
            for key, group in entries.items()
        }
        tensors |= self.state.tensors
        return {key: FlatTensors.from_tensors(tensors[key]) for key in sorted(keys)}

    def _aggregate(self, current: Round, sent: Iterator[Update]) -> State:
        """Return the state that the method aggregates from the clients' updates, or from their noisy sum."""
        if not current.orders and self._private is None:
            return self.state
        rng = seeds.generator(self.config.run.seed, self.state.round_index, "", "aggregate")
        elsewhere: list[BaseException] = []

        def note_failures() -> Iterator[Update]:
            try:
                yield from sent
            except BaseException as error:
                elsewhere.append(
                    error
                )  # a client's or the pool's failure, for which the message must not blame aggregate()
                raise

        updates: Iterator[Update] = note_failures()
        summed, gaussian = None, cast(Gaussian, self.config.components.rule)
        if self._private is not None:
            summed = self._private.sum_updates(gaussian, updates, self.state)
            updates = iter([summed.update])
        with naming_failures(self.method, "aggregate", f"round {self.state.round_index + 1}", elsewhere):
            state, metrics = self.method.aggregate(self.state, updates, rng)
        if self._private is not None and summed is not None:
            state, metrics = self._private.keep_clip(gaussian, summed, state), {**summed.metrics, **metrics}
        current.metrics = metrics
        for _ in updates:
            pass  # a rule may skip updates, but the round must record every client's reply
        return dataclasses.replace(as_stored(state), phase=self.state.phase)

    def _measure(self, cohort: Sequence[str]) -> tuple[list[record.MetricRow], dict[str, str]]:
        """Evaluate the state.

        Returns:
            Rows for the metrics table, and the reasons of failed evaluations by client id.
        """
        settings, round_index = self.config.run, self.state.round_index
        stage = self.checkpoint.phases.find(round_index - 1)
        orders = [dataclasses.replace(order, stage=stage) for order in self._evaluation.make_orders(self.state, cohort)]
        # Replies with metrics are small, so the server can hold all of them.
        replies = sort_replies(self._send(orders), len(orders)) if orders else []
        rows, unmeasured = pool_replies(round_index, orders, replies, settings.on_error)
        at_clients = sum(order.task.client_id != SERVER for order in orders)
        check_failed(round_index, unmeasured, at_clients, settings.max_failed)
        return rows, unmeasured

    def find_heaviest(self) -> list[list[Order]]:
        """Return the orders of the next round with the largest memory footprint.

        These are the training of the largest client with its group, and its evaluations, each in a list for one actor.
        """
        orders = self.plan(drawn=False)
        largest = max(orders, key=lambda order: order.cost)
        group = [order for order in orders if order is largest or order.group == largest.group >= 0]
        at_server = self._evaluation.make_server_orders(self.state)[:1]
        at_clients = self._evaluation.make_client_orders(self.state, [largest.task.client_id])
        return [group, *([order] for order in (*at_server, *at_clients))]

    def copy_to(self, mirror: RunMirror) -> None:
        """Upload the newest commit to a mirror, and every later commit too.

        Raises:
            RunDirectoryError: The mirror has another run, or is ahead of this run.
            ResourcesError: The mirror cannot be reached.
        """
        mirror.sync(frozenset[str]().union(*self.store.files.values()))
        self._committer.mirror = mirror

    def finish(self, report: RoundReport) -> None:
        """Commit the current round, and wait until the commit is durable.

        Raises:
            ResourcesError: The disk is full. The last commit remains valid.
        """
        if self._committer.round_index != self.state.round_index:
            self._prepare_commit(report)
        self._committer.begin()
        report.rows += self._committer.wait()

    def close(self) -> None:
        """Write the prepared commit, and wait for the running one."""
        self._committer.close()
