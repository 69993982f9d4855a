"""The round: plan, train, aggregate, evaluate, record, commit. A plain class that knows no Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from raydfl.core import part_names, seeds
from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Client, Metrics, ModelSpec, Ratio, State, Task, Update
from raydfl.data import Population
from raydfl.engine.adversary import Adversary
from raydfl.engine.arrivals import Arrivals
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.entries import received_entries
from raydfl.engine.evaluation import Evaluation, Variants, pooled
from raydfl.engine.method_calls import naming_failures
from raydfl.engine.orders import SERVER, Measurement, Order, Reply, check_tasks, grouped, in_order, keys_of
from raydfl.engine.parts import join_states
from raydfl.engine.pool import Pool
from raydfl.engine.recall import recalled
from raydfl.engine.storage import record
from raydfl.engine.storage.committer import Committer
from raydfl.engine.storage.folder import file_name_of
from raydfl.engine.storage.mirror import RunMirror
from raydfl.engine.storage.private import PrivateIndex, PrivateRef
from raydfl.engine.storage.store import RunStore, as_stored
from raydfl.engine.telemetry import RoundReport, RoundRows
from raydfl.engine.validation import check_failed, check_overflow
from raydfl.engine.worker import build_models


@dataclass(frozen=True, slots=True)
class _Begun:
    """A round that the clients work on."""

    round_index: int
    """Rounds completed before it."""
    orders: list[Order]
    replies: Iterator[Reply]
    started: float
    planned: float
    """When its planning began and when its orders were sent (time.perf_counter)."""


class Federation:
    """A federation that can be asked for one round at a time.

    All that it knows is State and the index of the clients' private records; both are in every commit, so a new Federation on the
    same folder goes on where the last commit was, and does the same rounds to the same bits.
    """

    def __init__(self, config: Config, population: Population, store: RunStore, pool: Pool) -> None:
        """Open the newest commit, or begins with round 0. The store must be locked."""
        self.config = config
        self.store = store
        self.pool = pool
        self.method = config.parts.method
        self.clients = Clients(population, config, planning=True)
        self._phases = self._configured_phases = config.phases
        self._cohorts = {
            name: config.train.in_phase(name).cohort_size(self.clients.eligible) for name in self._phases.names or ("",)
        }
        self._attackers = Adversary(config.parts.attack, type(self.method).changes, population.ids, config.run.seed)
        self._site_of, self._part_of = population.site_of, population.part_of
        variants = {
            part: [(specs, build_models(self.method, specs, config.run.seed)) for specs in of_part]
            for part, of_part in self.clients.variants_of_parts().items()
        }
        shards = {part: of.shards for part, of in population.each.items()}
        self._evaluation = Evaluation(
            config.evaluate,
            self.method,
            self.clients,
            shards,
            variants,
            config.parts.fine_tune.part,
            self._orders,
            self._received_entries,
        )
        self._rows: list[record.MetricRow] = []
        """Measurements of the rounds since the last commit."""
        self._marked = time.perf_counter()
        self._ahead: _Begun | None = None
        """The next round, where the clients work on it already."""
        commit, self.warnings = store.open_latest()
        self._selection = config.selection
        """The evaluated rounds so far, as they are compared."""
        if commit is None:
            self.state = self._first_state(variants)
            self._check_file_names()
            self._evaluation.server_orders(
                self.state
            )  # a plan that cannot be measured ends the run before its first round
            self._private = PrivateIndex()
            self._check_metrics()
            record.discard_rows(store.folder, -1)
            store.together = self._choose_width()
            store.commit(self.state, self._private)
        else:
            self._phases = self._phases.as_begun(commit.begun)
            self.state, self._private, store.together = self._in_phase(commit.state), commit.private, commit.together
            record.discard_rows(store.folder, self.state.round_index)
            self._recall()
        if not store.private_here:
            pool.retain(store.segments)
        self._committer = Committer(store, self.state, self._private)

    def _check_file_names(self) -> None:
        """Refuse entries of the state, or parts, whose models would be written into the files of the best round's.

        Raises:
            ConfigError: naming the first.
        """
        for name in (*self.state.tensors, *self.config.data.parts) if self._selection.for_best else ():
            if re.match(r"best($|-)", file_name_of(name)):
                raise ConfigError(
                    f"run.best: the models of {name!r} would be written into model-best.safetensors, which is the best round's; "
                    f"give it another name, or leave run.best out"
                )

    def _recall(self) -> None:
        """Read back from the record how the rounds so far compare, and keep the commit of the best one.

        Raises:
            ConfigError: a metric by which they are to be compared is none that is measured.
        """
        if not self._selection.wanted:
            return
        self._selection, names, unkept = recalled(self.store, self._selection, self._phases, self.state.round_index)
        if unkept is not None:
            self.warnings.append(
                f"the best round so far is {unkept.text}, but its models are not kept; run.best compares the rounds from here on"
            )
        phase = self._selection.phase
        if names:
            self._selection.check(phase, names)
        else:
            self._check_metrics()
        if self._selection.best is not None and self._selection.best.round:
            self.store.keep_best(self._selection.best.round)

    def _check_metrics(self) -> None:
        """Measure the state at hand, to see that what rounds are to be compared by is measured; in later phases too.

        Raises:
            ConfigError: naming what is not, and what is.
        """
        if not self._selection.wanted:
            return
        at_hand, names = self.state, self._phases.names
        try:
            for phase in names[names.index(at_hand.phase) :] if names else ("",):
                if phase != self.state.phase:
                    self.state = self._begun(dataclasses.replace(self.state, phase=phase))
                found, _ = self._measured([order.task.client_id for order in self.plan()])
                self._selection.check(phase, list(record.scores(found)))
        finally:
            self.state = at_hand

    @property
    def stopped(self) -> str:
        """The reason for training to stop here by ``run.stop``; empty: it goes on, as long as there are rounds."""
        last = self._phases.names[-1] if self._phases.names else ""
        return self._selection.reason if self._selection.phase == last else ""

    def _first_state(self, variants: Mapping[str, Variants]) -> State:
        states = {
            part: self._init(self.clients.of_part(part), [models for _, models in built])
            for part, built in variants.items()
        }
        common = self.config.data.heads == "common"
        state = states[""] if "" in states else join_states(states, self._with_another_class(variants), common)
        if not state.tensors:
            raise ConfigError(
                f"method {self.config.method['name']!r} starts with no tensors at all: its shared() keeps everything private"
            )
        return self._in_phase(as_stored(state))

    def _in_phase(self, state: State) -> State:
        """Return a state that knows of which phase its next round is."""
        return dataclasses.replace(state, phase=self._phases.at(state.round_index))

    def _init(self, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]]) -> State:
        with naming_failures(self.method, "init", "before the first round"):
            return self.method.init(clients, models, seeds.generator(self.config.run.seed, 0, "", "init"))

    def _with_another_class(self, variants: Mapping[str, Variants]) -> State:
        """Return what the first part's state would be with one class more: what then has another shape depends on classes."""
        outputs = self.method.objective.outputs

        def widened(spec: ModelSpec) -> ModelSpec:
            width = None if spec.outputs is None else outputs(spec.classes + 1)
            return dataclasses.replace(spec, classes=spec.classes + 1, outputs=width, init_from=())

        wider = [[widened(spec) for spec in specs] for specs, _ in next(iter(variants.values()))]
        return self._init(self.clients, [build_models(self.method, specs, self.config.run.seed) for specs in wider])

    def _choose_width(self) -> int:
        setting = self.config.train.together
        if isinstance(setting, int):
            return setting
        orders = self.plan()
        return self.pool.width(orders, self.broadcast(keys_of(orders)))

    def round(self, ahead: bool = False) -> RoundReport:
        """Do one round: train a cohort, aggregate, evaluate if it is time, commit if it is time.

        Args:
            ahead: have clients begin with the next round, if there is one, before this one is recorded and reported. Who then asks
                for no further round has them work for nothing.

        Raises:
            ClientError: a method's code failed, or too many updates were rejected; nothing of the round counts.
        """
        before = self.state, self._private, self._phases, self._selection
        report = RoundReport(self.state.round_index + 1)
        rows = RoundRows(report.round)
        try:
            begun = self._begin()
            note = self._round(report, rows, begun)
            went_back = self._next_phase(report)
            if ahead and not went_back and not report.stopped:
                self._begin_ahead()
            moved = note()
        except BaseException:
            self.state, self._private, self._phases, self._selection = before
            self._ahead = None
            raise
        self._rows += rows
        self._committer.note_moved(before[1], moved)
        if went_back:
            self._committer.go_back_to(self._private)
        best = self._selection.best is not None and self._selection.best.round == report.round
        due = report.round % self.config.run.commit_every == 0 or report.round == self.config.train.rounds
        if due or best or went_back or report.stopped:
            self._prepare_commit(report, best)
        return report

    def _views_of(self, client: str) -> str:
        """Return which further views a client has: ``video+depth``; ``none`` where it has the first alone."""
        return "+".join(self.clients.by_id(client).profile["views"]) or "none"

    def _begin(self) -> _Begun:
        """Return the next round with its orders sent: where that was done ahead, as it was."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.round_index == self.state.round_index:
            return ahead
        started = time.perf_counter()
        orders = self.plan()
        replies = self._carry_out(orders)
        return _Begun(self.state.round_index, orders, replies, started, time.perf_counter())

    def _begin_ahead(self) -> None:
        """Have clients begin with the next round, if they can do so while this process does something else.

        Not where they have a deadline, for nobody looks at it until the round is asked for; nor where private state is to be moved.
        """
        train, moving = self.config.train, self._committer.worth_moving(self._private) is not None
        if not self.pool.apart or self.state.round_index >= train.rounds or moving:
            return
        if train.in_phase(self.state.phase).deadline is None:
            with contextlib.suppress(Exception):  # whatever is wrong, the next round will say it
                self._ahead = self._begin()

    def _round(self, report: RoundReport, rows: RoundRows, begun: _Begun) -> Callable[[], dict[int, PrivateRef]]:
        """Do all of a round but its record and its commit; return what records it, and gives the new places of private state."""
        config, orders = self.config, begun.orders
        views = any(data.views for data in config.data.each.values())
        kind_of = self._views_of if views else None
        arrivals = Arrivals(orders, begun.replies, report, config.run.on_error, kind_of)
        resumed = time.perf_counter()
        # Only now: what the last round left to write need not keep the clients waiting.
        self._committer.begin()

        attackers = [order.task.client_id for order in orders if order.attacking]
        state, metrics = self._aggregate(orders, arrivals, attackers)
        aggregated = time.perf_counter()
        check_failed(report.round, report.rejected, len(orders), config.run.max_failed, self.store.folder)
        check_overflow(report.round, state.tensors, self.state.tensors, arrivals.largest, attackers)
        moved = {self.clients.index_of(client): ref for client, ref in arrivals.moved.items()}
        self._private = self._private.changed(moved)
        self.state = dataclasses.replace(state, round_index=report.round)
        report.phase = state.phase
        measured = RoundRows(report.round)
        if report.round % config.evaluate.every == 0 or report.round == config.train.rounds:
            self._evaluate(report, measured, [order.task.client_id for order in orders])
            self._compare(report, measured)
        report.seconds.update(
            train_and_aggregate=aggregated - begun.started,
            plan=begun.planned - begun.started,
            clients=resumed - begun.planned + arrivals.seconds,
            aggregate=aggregated - resumed - arrivals.seconds,
            evaluate=time.perf_counter() - aggregated,
        )

        def note() -> dict[int, PrivateRef]:
            arrivals.record(rows, self.store.together > 1, config.train.deadline is not None)
            if self._attackers.attack is not None:
                rows.add({"attackers": Ratio(len(attackers), 1)})
                for client in attackers:
                    rows.add({"attacker": Ratio(1, 1)}, client)
            rows.add(metrics)
            if state.phase:
                rows.add({"phase": Ratio(self._phases.number(state.phase), 1)})
            rows.extend(measured)
            arrivals.record_work(rows, self.pool.places(), begun.started, self.clients.index_of)
            self._note_durations(report)
            rows.add({f"seconds/{what}": Ratio(seconds, 1) for what, seconds in report.seconds.items()})
            return moved

        return note

    def plan(self) -> list[Order]:
        """Return the orders of the next round: the same whenever they are asked for."""
        rng = seeds.generator(self.config.run.seed, self.state.round_index, "", "plan")
        with naming_failures(self.method, "plan", f"round {self.state.round_index + 1}"):
            tasks = self.method.plan(self.state, self.clients, rng, self._cohorts[self.state.phase])
        if self.config.train.clients is not None:
            self._check_take_part(tasks)
        return self._orders(tasks, None)

    def _check_take_part(self, tasks: Sequence[Task]) -> None:
        """Refuse a plan for nobody, or of a method that draws in its own way, and so clients that ``train.clients`` leaves out."""
        if not tasks:
            raise ConfigError(
                f"train.clients: none of the clients that it leaves can take part in round {self.state.round_index + 1} of method "
                f"{self.config.method['name']!r}{f', phase {self.state.phase!r}' * bool(self.state.phase)}; take back one of its "
                f"conditions"
            )
        for task in tasks:
            if self.clients.by_id(task.client_id).chance == 0:
                raise ConfigError(
                    f"train.clients: method {self.config.method['name']!r} plans client {task.client_id!r}, which does not take "
                    f"part; its plan() must draw with raydfl.drawn, or leave train.clients out"
                )

    def _received_entries(self, state: State) -> frozenset[str]:
        """Return the keys of a state's entries that clients receive."""
        return received_entries(self.config, state, self.clients, self._phases.first)

    def _orders(self, tasks: Sequence[Task], measure: tuple[Measurement, ...] | None) -> list[Order]:
        """Return orders for what a method planned, in client order."""
        check_tasks(tasks, self.state.tensors)
        stage = self._stage(self.state.round_index)
        placed = sorted(((self.clients.index_of(t.client_id), t) for t in tasks), key=lambda pair: pair[0])
        orders = [
            Order(
                position,
                task,
                self.state.round_index,
                float(self.clients[index].num_examples),
                self._private.get(index),
                measure,
                attacking=measure is None and self._attackers.attacks(index, self.state.round_index),
                part=self._part_of(index),
                stage=stage,
            )
            for position, (index, task) in enumerate(placed)
        ]
        kinds = [(self.clients[index].models, self._site_of(index), self._part_of(index)) for index, _ in placed]
        return grouped(orders, kinds, self.store.together)

    def _stage(self, round_index: int) -> str | None:
        """Return the phase of the round after so many completed ones, where it may be another one than is configured."""
        return None if self._phases == self._configured_phases else self._phases.at(round_index)

    def _carry_out(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Have the pool begin with orders; the replies come in order of completion."""
        return self.pool.run(orders, self.broadcast(keys_of(orders)))

    def broadcast(self, keys: set[str]) -> dict[str, FlatTensors]:
        """Return the entries of the state as they are sent."""
        return {key: FlatTensors.of(self.state.tensors[key]) for key in sorted(keys)}

    def _aggregate(
        self, orders: Sequence[Order], arrivals: Arrivals, attackers: Sequence[str]
    ) -> tuple[State, Metrics]:
        """Return the state that the method makes of the clients' updates, and what it measured."""
        rng = seeds.generator(self.config.run.seed, self.state.round_index, "", "aggregate")
        plain = part_names.plain_name if self.config.data.parts else str
        sent = self._attackers.sent(
            arrivals.updates(self.state.tensors, lambda key, name: self.method.may_send(key, plain(name))),
            {order.task.client_id: order.cost for order in orders},
            frozenset(attackers),
            self.state.tensors,
            self.state.round_index,
        )
        elsewhere: list[BaseException] = []

        def arriving() -> Iterator[Update]:
            try:
                yield from sent
            except BaseException as error:
                elsewhere.append(error)
                raise

        updates = arriving()
        with naming_failures(self.method, "aggregate", f"round {self.state.round_index + 1}", elsewhere):
            state, metrics = self.method.aggregate(self.state, updates, rng)
        for _ in updates:
            pass  # a rule need not look at every update, but every client's reply counts
        return dataclasses.replace(as_stored(state), phase=self.state.phase), metrics

    def _evaluate(self, report: RoundReport, rows: RoundRows, cohort: Sequence[str]) -> None:
        """Measure the new state: shared models on the server's data, and clients on their own hold-out."""
        found, report.unmeasured = self._measured(cohort)
        report.scores = record.scores(found)
        rows.add_notes("evaluate", "failed", report.unmeasured)
        rows += found

    def _measured(self, cohort: Sequence[str]) -> tuple[list[record.MetricRow], dict[str, str]]:
        """Return what is measured of the state, and why clients could not be measured, by client id."""
        settings, round_index = self.config.run, self.state.round_index
        stage = self._stage(round_index - 1)
        orders = [dataclasses.replace(order, stage=stage) for order in self._evaluation.orders(self.state, cohort)]
        # All at once: they are metrics and no tensors.
        replies = in_order(self._carry_out(orders), len(orders)) if orders else []
        found, unmeasured = pooled(round_index, orders, replies, settings.on_error)
        at_clients = sum(order.task.client_id != SERVER for order in orders)
        check_failed(round_index, unmeasured, at_clients, settings.max_failed)
        return found, unmeasured

    def _compare(self, report: RoundReport, rows: RoundRows) -> None:
        """Compare the round's scores with those before: it may be the best, or end the training or its phase."""
        if not self._selection.wanted:
            return
        self._selection = self._selection.noted(report.round, report.phase, report.scores)
        best = self._selection.best
        if best is not None and best.round:
            rows.add_fact("best_round", best.round, best.text)
        if not self._selection.reason:
            return
        report.stopped = self.stopped
        if report.stopped:
            rows.add_fact("stopped", report.round, report.stopped)
        elif self._phases.at(report.round) == report.phase:
            self._phases = self._phases.ended(report.phase, report.round)
            rows.add_fact("phase_stopped", report.round, f"{report.phase}: {self._selection.reason}")

    def _next_phase(self, report: RoundReport) -> bool:
        """Begin the next phase if the round was the last of its own; return whether with an earlier round's models."""
        self.state = self._in_phase(self.state)
        phase, best = self.state.phase, self._selection.best
        if phase == report.phase:
            return False
        own = self.config.train.phases.get(phase)
        back = own is not None and own.begin == "best" and best is not None and 0 < best.round < report.round
        if back and best is not None:
            self._await_commit(report)
            name = self.store.commit_of(best.round)
            if name is None:
                raise RunDirectoryError(
                    f"phase {phase!r} begins with the models of round {best.round}, whose commit is not in "
                    f"{self.store.folder / 'commits'} any more; restore it from a copy, or start the run again"
                )
            commit = self.store.load(name)
            self.state = dataclasses.replace(commit.state, round_index=report.round, phase=phase)
            self._private = commit.private
        self.state = self._begun(self.state)
        return back

    def _begun(self, state: State) -> State:
        """Return the state with which the phase that it names begins."""
        with naming_failures(self.method, "begin_phase", f"after round {state.round_index}, phase {state.phase!r}"):
            begun = self.method.begin_phase(state)
        return dataclasses.replace(as_stored(begun), phase=state.phase)

    def heaviest(self) -> list[list[Order]]:
        """Return what of the next round needs the most memory: the largest client's training with its group, and evaluations."""
        orders = self.plan()
        largest = max(orders, key=lambda order: order.cost)
        group = [order for order in orders if order is largest or order.group == largest.group >= 0]
        at_server = self._evaluation.server_orders(self.state)[:1]
        at_clients = self._evaluation.client_orders(self.state, [largest.task.client_id])
        return [group, *([order] for order in (*at_server, *at_clients))]

    def _note_durations(self, report: RoundReport) -> None:
        """Tell the round's wall-clock seconds as a whole. A commit can only be told with the round after it."""
        committer = self._committer
        now = time.perf_counter() if self._ahead is None else self._ahead.started
        report.seconds.update(round=now - self._marked, commit=committer.seconds, commit_wait=committer.waited)
        self._marked, committer.waited = now, 0.0

    def _prepare_commit(self, report: RoundReport, best: bool = False) -> None:
        """Hold fast what the next commit shall be; it begins when the clients have work again, or at the end."""
        self._await_commit(report)
        self._compact()
        begun = () if self._phases == self._configured_phases else self._phases.first
        self._committer.prepare(self.state, self._private, self._rows, best, begun)
        self._rows = []

    def _compact(self) -> None:
        """Keep the private segments below about twice what counts."""
        sparse = None if self._ahead is not None else self._committer.worth_moving(self._private)
        if sparse is not None:
            moved = self.pool.compact(self.state.round_index, sparse)
            self._committer.note_moved(self._private, moved)
            self._private = self._private.changed(moved)

    def _await_commit(self, report: RoundReport) -> None:
        report.rows += self._committer.wait()
        forgotten = self.store.take_forgotten()
        if forgotten:
            self.pool.remove(forgotten)

    def copy_to(self, mirror: RunMirror) -> None:
        """Bring a mirror up to the newest commit, and have every further one copied there.

        Raises:
            RunDirectoryError: it holds another run, or is ahead of this one.
            ResourcesError: it cannot be reached.
        """
        mirror.sync()
        self._committer.mirror = mirror

    def finish(self, report: RoundReport) -> None:
        """Make everything up to now durable, and wait until it is.

        Raises:
            ResourcesError: the disk is full; the last commit still counts.
        """
        if self._committer.round_index != self.state.round_index:
            self._prepare_commit(report)
        self._committer.begin()
        self._await_commit(report)

    def close(self) -> None:
        """Write what is to be committed, and let the commit under way end."""
        self._committer.close()
