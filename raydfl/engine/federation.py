"""The round: plan, dispatch, aggregate, evaluate, commit. A plain class that knows no Ray."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from raydfl.core import seeds
from raydfl.core.errors import ClientError, ConfigError, printable
from raydfl.core.metrics import pool as pool_metrics
from raydfl.core.metrics import summarise
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Metrics, ModelSpec, Ratio, State, Task, Tensors, Update
from raydfl.data.population import Population
from raydfl.engine.adversary import Adversary
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.orders import SERVER, TRIGGERED, Measurement, Order, Result
from raydfl.engine.pool import Pool
from raydfl.engine.storage import record
from raydfl.engine.storage.committer import Committer
from raydfl.engine.storage.mirror import RunMirror
from raydfl.engine.storage.private import PrivateIndex, PrivateRef, SegmentUsage
from raydfl.engine.storage.store import RunStore, as_stored
from raydfl.engine.telemetry import TIMELINE, ResultTimer, RoundReport
from raydfl.engine.validation import Kinds, UpdateChecker, kinds_of, overflown
from raydfl.engine.worker import build_models, reason_of
from raydfl.methods._method import Method

_SLACK = 64 << 20
"""Bytes of superseded private state that are not worth moving anything."""


_ADVICE = {
    "not finite": "lower train.optimiser.lr or set train.optimiser.clip_norm, and start afresh",
    "error": "mend the method, or raise run.max_failed, and resume the run",
    "late": "raise train.deadline, and start afresh",
    "lost": "check memory (an out-of-memory kill ends an actor), lower ray.actors or raise ray.retries, then resume the run",
}
"""What to do, by the kind of failure with which a reason begins."""


class Federation:
    """A federation that can be asked for one round at a time.

    All that it knows is State and the index of the clients' private records; both are in every commit, so a new Federation on the
    same folder goes on where the last commit was, and does the same rounds to the same bits.
    """

    def __init__(self, config: Config, population: Population, store: RunStore, pool: Pool) -> None:
        """Opens the newest commit, or begins with round 0. The store must be locked."""
        self.config = config
        self.store = store
        self.pool = pool
        self.method = config.parts.method
        self.clients = Clients(population, config)
        self.cohort = config.train.cohort_size(len(self.clients))
        self._attackers = Adversary(config.parts.attack, type(self.method).changes, population.ids, config.run.seed)
        self._sites = population.sites
        self._site_of = population.site_of
        self._variants = [
            (specs, build_models(self.method, specs, config.run.seed)) for specs in self.clients.variants()
        ]
        self._fully_shared = _shared_models(self.method, self._variants)
        self._rows: list[record.MetricRow] = []
        self._committer = Committer(store)
        self._to_commit: tuple[State, PrivateIndex, set[str], set[str], list[record.MetricRow]] | None = None
        self._commit_seconds = 0.0
        self._commit_wait = 0.0
        self._marked = time.perf_counter()
        commit, self.warnings = store.open_latest()
        if commit is None:
            self.state = self._first_state()
            self._private = PrivateIndex()
            record.discard_rows(store.folder, -1)
            store.together = self._choose_width()
            store.commit(self.state, self._private)
        else:
            self.state, self._private, store.together = commit.state, commit.private, commit.together
            record.discard_rows(store.folder, self.state.round_index)
        if config.data.sites:
            pool.retain(store.at_sites)
        self._ledger = SegmentUsage(self._private, store.sizes_of_segments())
        self._committed = self.state.round_index

    def _first_state(self) -> State:
        rng = seeds.generator(self.config.run.seed, 0, "", "init")
        state = self.method.init(self.clients, [models for _, models in self._variants], rng)
        if not state.tensors:
            raise ConfigError(
                f"method {self.config.method['name']!r} starts with no tensors at all: its shared() keeps everything private"
            )
        return as_stored(state)

    def _choose_width(self) -> int:
        setting = self.config.train.together
        if isinstance(setting, int):
            return setting
        orders = self.plan()
        return self.pool.width(orders, self.broadcast({key for order in orders for key in order.task.receive}))

    def plan(self) -> list[Order]:
        """The orders of the next round: the same whenever they are asked for."""
        r = self.state.round_index
        tasks = self.method.plan(
            self.state, self.clients, seeds.generator(self.config.run.seed, r, "", "plan"), self.cohort
        )
        return self._orders(tasks, None)

    def _orders(self, tasks: Sequence[Task], measure: tuple[Measurement, ...] | None) -> list[Order]:
        """Orders in client order; checks what a method planned."""
        placed = sorted(((self.clients.index_of(t.client_id), t) for t in _by_client(tasks)), key=lambda pair: pair[0])
        orders = []
        for position, (index, task) in enumerate(placed):
            for key in task.receive:
                if key not in self.state.tensors:
                    raise ConfigError(
                        f"the method planned to send {key!r} to client {task.client_id!r}, but the server's state has only "
                        f"{', '.join(self.state.tensors)}"
                    )
            cost = float(self.clients[index].num_examples)
            attacking = measure is None and self._attackers.attacks(index, self.state.round_index)
            orders.append(
                Order(
                    position,
                    task,
                    self.state.round_index,
                    cost,
                    self._private.get(index),
                    measure,
                    attacking=attacking,
                    site=self._site_of(index),
                )
            )
        kinds = [(self.clients[index].models, self._site_of(index)) for index, _ in placed]
        return grouped(orders, kinds, self.store.together)

    def round(self) -> RoundReport:
        """One round: train a cohort, aggregate, evaluate if it is time, commit if it is time.

        Raises:
            ClientError: a method's code failed, or too many updates were rejected; nothing of the round counts.
        """
        before = self.state, self._private, len(self._rows)
        try:
            report, moved = self._round()
        except BaseException:
            self.state, self._private, rows = before
            del self._rows[rows:]
            raise
        for client, ref in moved.items():
            self._ledger.move(before[1].get(client), ref)
        if report.round % self.config.run.commit_every == 0 or report.round == self.config.train.rounds:
            self._prepare_commit(report)
        return report

    def _round(self) -> tuple[RoundReport, dict[int, PrivateRef]]:
        """All of a round but its commit: the report, and the new places of clients' private state."""
        started = time.perf_counter()
        report = RoundReport(self.state.round_index + 1)
        orders = self.plan()
        results = ResultTimer(
            self.pool.run(orders, self.broadcast({key for order in orders for key in order.task.receive}))
        )
        planned = time.perf_counter()
        # Only now: what the last round left to write need not keep the clients waiting.
        self._begin_commit()
        rng = seeds.generator(self.config.run.seed, self.state.round_index, "", "aggregate")
        moved: dict[int, PrivateRef] = {}
        sizes: dict[str, float] = {}
        updates = self._attackers.sent(
            self._updates(orders, results, report, moved, sizes),
            {order.task.client_id: order.cost for order in orders},
            frozenset(order.task.client_id for order in orders if order.attacking),
            self.state.tensors,
            self.state.round_index,
        )
        state, metrics = self.method.aggregate(self.state, updates, rng)
        for _ in updates:
            pass  # a rule need not look at every update, but every client's result counts
        state = as_stored(state)
        aggregated = time.perf_counter()
        self._check_failed(report, report.rejected, len(orders))
        self._check_overflow(report.round, state, sizes, [o.task.client_id for o in orders if o.attacking])
        self._private = self._private.changed(moved)
        self.state = dataclasses.replace(state, round_index=report.round)
        self._record(report, "", metrics)
        if report.round % self.config.evaluate.every == 0 or report.round == self.config.train.rounds:
            self._evaluate(report, [order.task.client_id for order in orders])
        evaluated = time.perf_counter()
        report.seconds.update(
            train_and_aggregate=aggregated - started,
            plan=planned - started,
            clients=results.seconds,
            aggregate=aggregated - planned - results.seconds,
            evaluate=evaluated - aggregated,
        )
        self._record_work(report, results, started)
        self._record(
            report, "", {f"seconds/{what}": Ratio(seconds, 1) for what, seconds in self._durations(report).items()}
        )
        return report, moved

    def _durations(self, report: RoundReport) -> dict[str, float]:
        """The round's wall-clock seconds by part. A commit can only be recorded with the round after it."""
        now = time.perf_counter()
        report.seconds.update(round=now - self._marked, commit=self._commit_seconds, commit_wait=self._commit_wait)
        self._marked, self._commit_wait = now, 0.0
        return report.seconds

    def _record_work(self, report: RoundReport, results: ResultTimer, started: float) -> None:
        """How the actors spent the round's training, and who did what when."""
        report.work.update(results.work(self.pool.places()))
        report.retried = sum(results.retried.values())
        index = {client: self.clients.index_of(client) for client, _ in results.spans}
        work: Metrics = {f"seconds/{what}": ratio for what, ratio in report.work.items() if what != "fit"}
        self._record(report, "", {**work, "retried": Ratio(report.retried, 1)})
        self._record(report, "", {TIMELINE: results.timeline(started, index)})
        for client, times in results.retried.items():
            self._record(report, client, {"retried": Ratio(times, 1)})

    def _updates(
        self,
        orders: Sequence[Order],
        results: Iterator[Result],
        report: RoundReport,
        moved: dict[int, PrivateRef],
        sizes: dict[str, float],
    ) -> Iterator[Update]:
        """Updates one after another in client order, whatever the order of arrival; what else came with them is recorded.

        Args:
            moved: gets the new places of clients' private state.
            sizes: gets the largest magnitude that each client sent.
        """
        trained: dict[str, Metrics] = {}
        fit_seconds = 0.0
        vectorised = 0
        ordered = in_order(results, len(orders))
        held = _until_three_updates(ordered)
        first = [(result.update, result.measured["train"]) for result in held if result.update is not None]
        checker = UpdateChecker(self.state.tensors, self.method.may_send, first)
        for result in itertools.chain(held, ordered):
            report.clients += 1
            report.bytes_down += result.bytes_down
            report.bytes_up += result.bytes_up
            fit_seconds += result.seconds
            vectorised += result.together > 1
            report.apart = report.apart or result.apart
            if result.update is None:
                report.rejected[result.client_id] = _one_line(result.rejected)
                continue
            misfit = checker.misfit(result.update, result.measured["train"])
            if misfit:
                report.rejected[result.client_id] = _one_line(self._left_out(report.round, result.client_id, misfit))
                continue
            if result.private is not None and result.private != orders[result.position].private:
                moved[self.clients.index_of(result.client_id)] = result.private
            sizes[result.client_id] = result.largest
            if result.cut is not None:
                report.cut[result.client_id] = result.cut
            trained[result.client_id] = result.measured["train"]
            yield result.update
        pooled = pool_metrics(trained.values())
        loss = pooled.get("loss")
        if isinstance(loss, Ratio):
            report.loss = loss.value
        self._rows += record.rows_from_clients(report.round, "train", "train", trained)
        self._record(
            report,
            "",
            {
                "bytes_down": Ratio(report.bytes_down, 1),
                "bytes_up": Ratio(report.bytes_up, 1),
                "clients": Ratio(report.clients, 1),
                "failed": Ratio(len(report.rejected), 1),
                "seconds/fit": Ratio(fit_seconds, max(1, report.clients)),
            },
        )
        report.work["fit"] = Ratio(fit_seconds, max(1, report.clients))
        if self.store.together > 1:
            self._record(report, "", {"vectorised": Ratio(vectorised, max(1, report.clients))})
        self._note(report.round, "train", "failed", report.rejected)
        if self.config.train.deadline is not None:
            self._record(report, "", {"late": Ratio(len(report.cut), 1)})
            steps = {client: f"{done} steps until train.deadline" for client, done in report.cut.items()}
            self._note(report.round, "train", "late", steps)
        if self._attackers.attack is not None:
            attacking = [order.task.client_id for order in orders if order.attacking]
            self._record(report, "", {"attackers": Ratio(len(attacking), 1)})
            for client_id in attacking:
                self._record(report, client_id, {"attacker": Ratio(1, 1)})

    def _left_out(self, round_index: int, client: str, misfit: str) -> str:
        """Return the reason for which a client is left out whose work does not fit.

        Raises:
            ClientError: clients are not to be left out.
        """
        text = f"round {round_index}, client {client!r}: {misfit}"
        if self.config.run.on_error == "stop":
            raise ClientError(text)
        return reason_of(f"error: {text}")

    def _check_overflow(
        self, round_index: int, state: State, sizes: Mapping[str, float], attackers: Sequence[str]
    ) -> None:
        """Refuse a state that has overflowed: what clients send is finite, but not every sum or square of it.

        Raises:
            ClientError: names the tensors and the client that sent the largest number.
        """
        lost = overflown(state.tensors, self.state.tensors)
        if not lost:
            return
        names = ", ".join(f"{name!r} of {key!r}" for key, name in lost[:3]) + (" ..." if len(lost) > 3 else "")
        sent = ""
        if sizes:
            client = max(sizes, key=lambda name: sizes[name])
            sent = f"; the largest number that a client computed is {sizes[client]:.3g}, of client {client!r}"
        if attackers:
            sent += f"; attackers: {', '.join(map(repr, attackers[:5]))}{' ...' if len(attackers) > 5 else ''}"
        raise ClientError(
            f"round {round_index}: the aggregated state is not finite: {names}{sent}; the last commit counts. Take a rule that "
            f"limits a client's influence (method.rule=median), lower train.optimiser.lr or set train.optimiser.clip_norm, and "
            f"start afresh"
        )

    def _note(self, round_index: int, phase: str, metric: str, notes: Mapping[str, str]) -> None:
        """What befell single clients."""
        self._rows += [
            record.MetricRow(round_index, phase, client, "server", metric, 1.0, 1.0, note=note)
            for client, note in notes.items()
        ]

    def _record(self, report: RoundReport, client: str, metrics: Metrics) -> None:
        self._rows += record.rows_from_metrics(report.round, "train", client, "server", metrics)

    def heaviest(self) -> list[list[Order]]:
        """What of the next round needs the most memory: the largest client's training with its group, and evaluations after it."""
        orders = self.plan()
        largest = max(orders, key=lambda order: order.cost)
        group = [order for order in orders if order is largest or order.group == largest.group >= 0]
        evaluated = self._server_orders()[:1] if self.config.evaluate.server else []
        return [group, *([order] for order in (*evaluated, *self._client_orders([largest.task.client_id], 0)))]

    def broadcast(self, keys: set[str]) -> dict[str, FlatTensors]:
        """The entries of the state as they are sent."""
        return {key: FlatTensors.of(self.state.tensors[key]) for key in sorted(keys)}

    def _check_failed(self, report: RoundReport, failed: Mapping[str, str], clients: int) -> None:
        if len(failed) <= self.config.run.max_failed * clients:
            return
        client, reason = next(iter(failed.items()))
        advice = _ADVICE[reason.partition(":")[0]]
        if failed is report.rejected:
            advice += (
                f", or look at one with: raydfl replay {self.store.folder} --round {report.round} --client '{client}'"
            )
        raise ClientError(
            f"round {report.round}: {len(failed)} of {clients} clients were rejected "
            f"(client {client!r}: {reason}), more than run.max_failed={self.config.run.max_failed:g} allows; {advice}"
        )

    def _evaluate(self, report: RoundReport, cohort: Sequence[str]) -> None:
        """Measure the new state: shared models on the server's data, and clients on their own hold-out."""
        orders = self._server_orders() if self.config.evaluate.server else []
        server_positions = len(orders)
        prefixes = {order.position: _prefix(order.task.receive[0]) for order in orders}
        orders += self._client_orders(cohort, server_positions)
        server: dict[str, list[Metrics]] = {}
        clients: dict[str, dict[str, Metrics]] = {}
        needed = {key for order in orders for key in order.task.receive}
        # All at once: they are metrics and no tensors.
        results = list(in_order(self.pool.run(orders, self.broadcast(needed)), len(orders))) if orders else []
        from_server, from_clients = results[:server_positions], results[server_positions:]
        kinds = Kinds()
        for result in from_server:
            prefix = prefixes[result.position]
            misfit = kinds.misfit(_kinds(result, prefix))
            if misfit:
                raise ClientError(f"round {report.round}, the evaluation on the server's data: {misfit}")
            for split, metrics in result.measured.items():
                server.setdefault(split, []).append({prefix + name: value for name, value in metrics.items()})
        kinds = Kinds([_kinds(result) for result in from_clients if result.measured][:3])
        for result in from_clients:
            misfit = kinds.misfit(_kinds(result))
            if misfit or result.rejected:
                reason = result.rejected or self._left_out(report.round, result.client_id, misfit)
                report.unmeasured[result.client_id] = _one_line(reason)
                continue
            for split, metrics in result.measured.items():
                clients.setdefault(split, {})[result.client_id] = metrics
        self._check_failed(report, report.unmeasured, len(orders) - server_positions)
        self._note(report.round, "evaluate", "failed", report.unmeasured)
        rows: list[record.MetricRow] = []
        for split, parts in server.items():
            pooled = pool_metrics(parts)
            rows += record.rows_from_metrics(report.round, "evaluate", "", split, {**pooled, **summarise(pooled)})
        for split, of_clients in clients.items():
            rows += record.rows_from_clients(report.round, "evaluate", split, of_clients)
        report.scores = record.scores(rows)
        self._rows += rows

    def _server_orders(self) -> list[Order]:
        """The shared models, under every key that holds them whole, on shards of the server's test data, plain and triggered."""
        orders: list[Order] = []
        for key, tensors in self.state.tensors.items():
            specs = tuple(spec for spec, shapes in self._fully_shared.items() if _holds(tensors, shapes))
            if not specs:
                continue
            shards = [
                (site.name, split, start, stop)
                for site in self._sites
                for split, parts in site.shards.items()
                for start, stop in parts
            ]
            for site_name, split, start, stop in shards:
                measure = (Measurement(split, tuple(spec.name for spec in specs), start, stop),)
                task = Task(SERVER, phase="evaluate", receive=(key,))
                orders.append(
                    Order(
                        len(orders),
                        task,
                        self.state.round_index,
                        float(stop - start),
                        None,
                        measure,
                        server_models=specs,
                        site=site_name,
                    )
                )
        return orders

    def _client_orders(self, cohort: Sequence[str], first_position: int) -> list[Order]:
        settings = self.config.evaluate
        if settings.clients == "none":
            return []
        chosen = list(self.clients) if settings.clients == "all" else [self.clients.by_id(name) for name in cohort]
        whole = {spec.name for spec in self._fully_shared}
        names = tuple(type(self.method).models)
        measure = [Measurement("validation", names)]
        private = tuple(name for name in names if name not in whole)
        if private and settings.client_test_clips:
            there = {split for site in self._sites for split, parts in site.shards.items() if parts}
            measure += [
                Measurement(split, private, sample=settings.client_test_clips)
                for split in ("test", TRIGGERED)
                if split in there
            ]
        orders = self._orders(self.method.plan_evaluation(self.state, chosen), tuple(measure))
        return [dataclasses.replace(order, position=first_position + order.position) for order in orders]

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
        if self._committed != self.state.round_index:
            self._prepare_commit(report)
        self._begin_commit()
        self._await_commit(report)

    def _prepare_commit(self, report: RoundReport) -> None:
        """Hold fast what the next commit shall be; it begins when the clients have work again, or at the end."""
        self._await_commit(report)
        self._compact()
        self._to_commit = (_held(self.state), self._private, *self._ledger.take(), self._rows)
        self._committed = self.state.round_index
        self._rows = []

    def _begin_commit(self) -> None:
        if self._to_commit is not None:
            self._committer.start(*self._to_commit)
            self._to_commit = None

    def _await_commit(self, report: RoundReport) -> None:
        asked = time.perf_counter()
        rows, seconds = self._committer.wait()
        self._commit_wait += time.perf_counter() - asked
        forgotten = self.store.take_forgotten()
        if forgotten:
            self.pool.remove(forgotten)
        report.rows += rows
        self._commit_seconds = seconds or self._commit_seconds

    def close(self) -> None:
        """Write what is to be committed, and let the commit under way end."""
        try:
            self._begin_commit()
        finally:
            self._committer.close()

    def _move(self, moved: Mapping[int, PrivateRef]) -> None:
        """These are clients' newest private records now."""
        for client, ref in moved.items():
            self._ledger.move(self._private.get(client), ref)
        self._private = self._private.changed(moved)

    def _compact(self) -> None:
        """Keep the private segments below about twice what counts."""
        if self._ledger.bytes > 2 * self._ledger.live + _SLACK:
            sparse = self._private.within(self._ledger.sparse())
            self._move(self.pool.compact(self.state.round_index, sparse))


def _held(state: State) -> State:
    """A state that stays as it is, whatever a method does to the one that it gets in the next round."""
    tensors = {key: {name: tensor.clone() for name, tensor in group.items()} for key, group in state.tensors.items()}
    return State(state.round_index, tensors, copy.deepcopy(dict(state.extra)))


def grouped(orders: Sequence[Order], kinds: Sequence[Hashable], width: int) -> list[Order]:
    """The orders with their groups: at most ``width`` of a kind, phase and receipt, those of similar cost together.

    It is a rule that does not know the pool, because how clients are grouped shows in the last digits of what they compute.
    """
    if width == 1:
        return list(orders)
    alike: dict[Hashable, list[Order]] = {}
    for order, kind in sorted(zip(orders, kinds, strict=True), key=lambda pair: (-pair[0].cost, pair[0].position)):
        alike.setdefault((kind, order.task.phase, order.task.receive), []).append(order)
    group_of: dict[int, int] = {}
    number = 0
    for members in alike.values():
        for part in np.array_split(np.array([order.position for order in members]), -(-len(members) // width)):
            group_of.update(dict.fromkeys(part.tolist(), number))
            number += 1
    return [dataclasses.replace(order, group=group_of[order.position]) for order in orders]


def in_order(results: Iterator[Result], count: int) -> Iterator[Result]:
    """Results by rising position; those that come early wait."""
    early: dict[int, Result] = {}
    following = 0
    for result in results:
        early[result.position] = result
        while following in early:
            yield early.pop(following)
            following += 1
    if following != count:
        raise AssertionError(f"the pool returned {following} of {count} results")


def _until_three_updates(results: Iterator[Result]) -> list[Result]:
    """Take results until three of them have an update, or there are no more."""
    taken: list[Result] = []
    updates = 0
    while updates < 3 and (result := next(results, None)) is not None:
        taken.append(result)
        updates += result.update is not None
    return taken


def _kinds(result: Result, prefix: str = "") -> dict[str, str]:
    """Return what kind each of an evaluation's metrics is of."""
    kinds: dict[str, str] = {}
    for split, metrics in result.measured.items():
        kinds |= kinds_of(metrics, f"{split} {prefix}")
    return kinds


def _by_client(tasks: Sequence[Task]) -> Sequence[Task]:
    seen: set[str] = set()
    for task in tasks:
        if task.client_id in seen:
            raise ConfigError(
                f"the method planned two tasks for client {task.client_id!r} in one round; one is possible"
            )
        seen.add(task.client_id)
    return tasks


def _one_line(reason: str) -> str:
    """Why a client was left out, as it is recorded and shown: at a site it is written by somebody else's process."""
    return printable(" ".join(reason.split()))


def _prefix(key: str) -> str:
    """Metrics of the one global state carry no prefix; those of one of several keys do."""
    return "" if key == "global" else f"{key}:"


def _shared_models(
    method: Method, variants: Sequence[tuple[Sequence[ModelSpec], Mapping[str, nn.Module]]]
) -> dict[ModelSpec, dict[str, torch.Size]]:
    """The models that the server can evaluate, because every floating tensor of theirs is shared, with those tensors' shapes.

    One architecture for each name: the first; a model with several architectures cannot be shared as a whole.
    """
    found: dict[str, tuple[ModelSpec, dict[str, torch.Size]]] = {}
    for specs, models in variants:
        for spec in specs:
            if spec.name in models and spec.name not in found:
                state = models[spec.name].state_dict()
                shapes = {
                    f"{spec.name}/{key}": value.shape for key, value in state.items() if value.is_floating_point()
                }
                if all(method.shared(name) for name in shapes):
                    found[spec.name] = (spec, shapes)
    return dict(found.values())


def _holds(tensors: Tensors, shapes: Mapping[str, torch.Size]) -> bool:
    """Whether an entry of the state has tensors of all these names and shapes."""
    return all(name in tensors and tensors[name].shape == shape for name, shape in shapes.items())
