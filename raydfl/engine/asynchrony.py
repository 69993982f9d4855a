"""Server steps of asynchronous training in virtual time (``train.fleet``): the clients of a step, and their stale updates.

J. Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022 (FedBuff).
C. Xie et al., Asynchronous Federated Optimization, OPT 2020 (FedAsync).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
import torch

from raydfl.core import seeds
from raydfl.core.errors import ConfigError
from raydfl.core.tensors import FlatTensors, Layout, flatten
from raydfl.core.types import Client, Ratio, State, Task, Update
from raydfl.engine.assembly import format_value
from raydfl.engine.clients import Available, Clients
from raydfl.engine.config import Config
from raydfl.engine.fleet import LATE, LOST, Capacity, InFlight, Start, Step, Versions, advance
from raydfl.engine.hours import Hours
from raydfl.engine.messages import count_received_bytes
from raydfl.engine.orders import Order, check_tasks
from raydfl.engine.telemetry import RoundRows
from raydfl.training import FleetSettings


class StepPlanner:
    """Planner of the server steps of asynchronous training.

    Args:
        settings: ``train.fleet``.
        config: Configuration of the run.
        clients: Clients of the run.
        cohorts: Size of the cohort by phase.
        part_of: Returns the part of a client by its index.

    Raises:
        ConfigError: The settings do not fit each other or the number of clients.
    """

    def __init__(
        self,
        settings: FleetSettings,
        config: Config,
        clients: Clients,
        cohorts: Mapping[str, int],
        part_of: Callable[[int], str],
    ) -> None:
        self._settings = settings
        self._config = config
        self._clients = clients
        self._part_of = part_of
        self._columns = {
            setting: _read_costs(setting, column, clients) for setting, column in settings.seconds.columns.items()
        }
        self._capacities = {
            phase: _make_capacity(settings, cohort, clients.eligible) for phase, cohort in cohorts.items()
        }
        self._hours = None if settings.hours is None else Hours.read(settings.hours, clients)
        self._eligible = None if clients.draw is None else clients.draw.chances > 0

    def plan(
        self,
        state: State,
        before: InFlight,
        draw: Callable[[State, Sequence[Client], np.random.Generator, int], list[Task]],
    ) -> Step:
        """Compute the arrivals of the next server step, without training. Repeated calls return equal steps.

        Args:
            state: State of the server before the step.
            before: Clients in flight before the step.
            draw: Draws the tasks of some clients, given the state, the available clients, a generator and a number of clients.

        Raises:
            ConfigError: The method plans a client twice, too many clients, or tasks that cannot wait.
        """
        seed, version = self._config.run.seed, state.round_index
        rng = seeds.generator(seed, version, "", "plan")
        measure = functools.partial(self._measure_work, state, functools.cache(_flatten(state)))

        def start(now: float, free: int, unavailable: Set[int]) -> list[Start]:
            ends, taken = self._find_taken(now, unavailable)
            free = min(free, self._count_eligible(taken))
            if free <= 0:
                return []
            available = Available(self._clients, taken) if len(taken) else self._clients
            tasks = draw(state, available, rng, free)
            check_tasks(tasks, state.tensors)
            starts = sorted(
                ((self._clients.index_of(task.client_id), task) for task in tasks), key=lambda pair: pair[0]
            )
            _check_starts(starts, free, set(taken.tolist()))
            works = [measure(index, task) for index, task in starts]
            return [
                work
                if work.lost or ends is None or now + work.seconds <= ends[work.client]
                else replace(work, lost=LOST)
                for work in works
            ]

        capacity = self._capacities[state.phase]
        step = advance(before.fleet, version, capacity, start, self._find_opening)
        if step.arrivals:
            return step
        if self._hours is not None and step.fleet.seconds > before.fleet.seconds:
            raise ConfigError(
                f"train.fleet.hours: no client has finished in round {version + 1}, from second {before.fleet.seconds:g} to "
                f"{step.fleet.seconds:g}; {self._describe_lost(step)}. Lower train.fleet.seconds, lengthen the clients' hours, or "
                f"raise train.fleet.hours.most"
            )
        if any(reason == LATE for _, reason in step.dropped):
            raise ConfigError(
                f"train.deadline: in round {version + 1} no client finishes within {self._config.train.deadline:g} virtual "
                f"seconds. Raise train.deadline, or set train.late=partial"
            )
        raise ConfigError(f"train.fleet: the method planned no client for round {version + 1}. Correct its plan()")

    def get_buffer(self, phase: str) -> int:
        """Return the number of arrivals in a server step of a phase."""
        return self._capacities[phase].buffer

    def _find_taken(self, now: float, unavailable: Set[int]) -> tuple[np.ndarray | None, np.ndarray]:
        """Return the ends of the clients' hours, if any, and the sorted indices of unavailable clients."""
        taken = np.array(sorted(unavailable), np.int64)
        if self._hours is None:
            return None, taken
        ends = self._hours.find_ends(now)
        return ends, np.union1d(taken, np.flatnonzero(np.isneginf(ends)))

    def _count_eligible(self, taken: np.ndarray) -> int:
        excluded = len(taken) if self._eligible is None else int(np.count_nonzero(self._eligible[taken]))
        return self._clients.eligible - excluded

    def _find_opening(self, now: float, unavailable: Set[int]) -> float:
        return math.inf if self._hours is None else self._hours.find_opening(now, unavailable, self._eligible)

    def _describe_lost(self, step: Step) -> str:
        ids = list(dict.fromkeys(self._clients[flight.start.client].id for flight, _ in step.dropped))
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        return f"lost: {', '.join(map(repr, ids[:3]))}{more}" if ids else "no client has started"

    def _is_lost(self, version: int, task: Task) -> bool:
        if not self._settings.lost:
            return False
        rng = seeds.generator(self._config.run.seed, version, task.client_id, "fleet/lost")
        return bool(rng.random() < self._settings.lost)

    def _measure_work(
        self,
        state: State,
        flatten: Callable[[str], FlatTensors],
        index: int,
        task: Task,
    ) -> Start:
        """Measure the virtual duration of a client's work, and whether and how it ends early."""
        spread, client = self._settings.seconds.spread, self._clients[index]
        start, example, down, up = (
            float(self._columns[name][index]) if name in self._columns else getattr(self._settings.seconds, name)
            for name in ("start", "example", "down", "up")
        )
        train = self._config.train.resolve_phase(state.phase)
        seconds, lost, most_batches = example * client.num_examples * train.local_epochs, "", None
        if self._is_lost(state.round_index, task):
            lost = LOST
        pace = 1.0
        if spread:
            rng = seeds.generator(self._config.run.seed, 0, client.id, "fleet/pace")
            pace = math.exp(spread * float(rng.standard_normal()))
        if train.deadline is not None and pace * seconds > train.deadline:
            batches = train.local_epochs * math.ceil(client.num_examples / train.batch_size)
            most_batches = math.floor(train.deadline / (pace * seconds) * batches)
            if not most_batches or train.late == "drop":
                lost = lost or LATE
            seconds = train.deadline / pace
        seconds = pace * (start + seconds)
        if down is not None or up is not None:
            broadcast = {key: flatten(key) for key in task.receive}
            lacks = frozenset(self._config.components.models) - {spec.name for spec in client.models}
            upload = () if lost == LATE else ((up, replace(task, has=())),)
            for rate, sent in ((down, task), *upload):
                order = Order(0, sent, state.round_index, 0.0, part=self._part_of(index))
                seconds += count_received_bytes(order, broadcast, lacks) / rate if rate is not None else 0.0
        if not 0 < seconds < math.inf:
            raise ConfigError(
                f"train.fleet.seconds: the work of client {client.id!r} takes {seconds} s. Change start, example or spread so that "
                f"its duration is positive and finite"
            )
        return Start(index, task, seconds, lost, most_batches)


def _flatten(state: State) -> Callable[[str], FlatTensors]:
    return lambda key: FlatTensors.from_tensors(state.tensors[key])


def _read_costs(setting: str, column: str, clients: Clients) -> np.ndarray:
    """Read a column of the profile for ``train.fleet.seconds``, float64 [clients].

    Raises:
        ConfigError: A client has no finite number, a negative one, or the rate 0. The message names the client.
    """
    values, places = clients.read_column(column)
    rate = setting in {"down", "up"}
    fits = [
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and 0 <= value < math.inf
        and not (rate and value == 0)
        for value in values
    ]
    bad = np.flatnonzero(~np.array([*fits, False])[places])
    if len(bad):
        client, place = clients[int(bad[0])], int(places[bad[0]])
        found = f"has {column} = {format_value(values[place])}" if place >= 0 else f"has no {column}"
        raise ConfigError(
            f"train.fleet.seconds.{setting}: client {client.id!r} {found}. Give each client a finite number "
            f"{'above' if rate else 'of at least'} 0 in this column of the profile"
        )
    costs: np.ndarray = np.array([float(value) if ok else 0.0 for value, ok in zip(values, fits, strict=True)])[places]
    return costs


def _make_capacity(settings: FleetSettings, cohort: int, eligible: int) -> Capacity:
    buffer = settings.buffer or cohort
    concurrency = settings.concurrency or buffer
    if concurrency < buffer:
        raise ConfigError(
            f"train.fleet.concurrency: {concurrency} clients train at the same time, but a server step needs {buffer} updates. "
            f"Raise concurrency, or lower train.fleet.buffer"
        )
    most = math.inf if settings.stale.most is None else settings.stale.most
    hours = settings.hours
    longest = math.inf if hours is None else hours.period * hours.most
    capacity = Capacity(buffer, concurrency, most, settings.over, longest)
    if settings.over > 1 and not capacity.synchronous:
        raise ConfigError(
            f"train.fleet.over: {settings.over:g} has an effect only if concurrency ({concurrency}) equals buffer ({buffer}). "
            f"Remove over, or remove concurrency"
        )
    if capacity.places > eligible:
        raise ConfigError(
            f"train.fleet: {capacity.places} clients train at the same time, but only {eligible} can take part. Lower "
            f"train.fleet.{'over' if concurrency <= eligible else 'concurrency'}, or relax train.clients"
        )
    return capacity


def _check_starts(starts: Sequence[tuple[int, Task]], free: int, unavailable: Set[int]) -> None:
    """Reject tasks that the queue cannot hold.

    Raises:
        ConfigError: There are too many tasks, a client is not available, or a task cannot be stored in a commit.
    """
    if len(starts) > free:
        raise ConfigError(
            f"train.fleet: the method planned {len(starts)} clients for {free} free places. Its plan() must observe `cohort`, or "
            f"remove train.fleet"
        )
    for index, task in starts:
        if index in unavailable:
            raise ConfigError(
                f"train.fleet: the method planned client {task.client_id!r} again, before its earlier work ended or in the step of "
                f"its arrival. Its plan() must draw from `clients`, or remove train.fleet"
            )
        if task.cuts:
            raise ConfigError(
                f"train.fleet: the method sends a part of each tensor to client {task.client_id!r} (Task.cuts), which asynchronous "
                f"training does not support. Choose another method, or remove train.fleet"
            )
        try:
            storable = json.loads(json.dumps(dict(task.options))) == dict(task.options)
        except (TypeError, ValueError, RecursionError):
            storable = False
        if not storable:
            raise ConfigError(
                f"train.fleet: the options of the task of client {task.client_id!r} are not JSON values, so a commit cannot store "
                f"them. Use strings, numbers, lists and dicts with string keys"
            )


def rebase_updates(
    updates: Iterable[Update],
    staleness: Mapping[str, int],
    settings: FleetSettings,
    state: State,
    versions: Versions,
    changes: tuple[str, ...],
) -> Iterator[Update]:
    """Apply the work of stale clients to the current state: value <- current + s (value - base), s = (1 + staleness)^-power.

    With ``mix: change`` the base is the state that the client received, as in FedBuff. With ``mix: model`` it is the current
    state, as in FedAsync. Updates without staleness pass unchanged.

    Args:
        updates: Updates of a server step.
        staleness: Server steps since the start of each client, by its id.
        settings: ``train.fleet``.
        state: Current state of the server.
        versions: Tensors of earlier states by number of completed rounds and key.
        changes: ``Method.changes``. Such tensors have no base and are only scaled.
    """
    flat = functools.cache(_flatten(state))

    @functools.cache
    def gather(key: str, version: int | None, layout: Layout) -> np.ndarray:
        """Return the tensors of a layout in the current state, or as far as they exist in an earlier one."""
        now = flat(key) if key in state.tensors else _EMPTY
        earlier = now if version is None else versions[version].get(key, now)
        if isinstance(earlier, FlatTensors) and earlier.layout == layout:
            return earlier.vector
        names = [name for name in layout.names if not name.startswith(changes)]
        known = {name: earlier[name] if name in earlier else now[name] for name in names}
        shapes = zip(layout.names, layout.shapes, strict=True)
        return flatten({name: known.get(name, torch.zeros(shape)) for name, shape in shapes})[1]

    for update in updates:
        stale = staleness[update.client_id]
        if not stale:
            yield update
            continue
        factor = (1 + stale) ** -settings.stale.power
        value = FlatTensors.from_tensors(update.tensors)
        now = gather(update.key, None, value.layout)
        base = now if settings.mix == "model" else gather(update.key, state.round_index - stale, value.layout)
        vector = now + factor * (value.vector - base)
        for name in value.layout.names:
            if name.startswith(changes):
                vector[value.layout.columns(name)] = factor * value.vector[value.layout.columns(name)]
        yield replace(update, tensors=FlatTensors(value.layout, vector))


_EMPTY = FlatTensors.from_tensors({})


def record_step(rows: RoundRows, step: Step, staleness: Iterable[int], client_of: Callable[[int], str]) -> None:
    """Record the virtual time of a server step, the staleness of its updates, and its dropped clients.

    Args:
        rows: Rows of the round, extended in place.
        step: The server step.
        staleness: Staleness of each arrival in server steps.
        client_of: Returns the id of a client by its index.
    """
    ages = list(staleness)
    rows.add(
        {
            "virtual_seconds": Ratio(step.fleet.seconds, 1),
            "staleness": Ratio(sum(ages), len(ages)),
            "in_flight": Ratio(len(step.fleet.flights), 1),
            "dropped": Ratio(len(step.dropped), 1),
        }
    )
    rows.add_notes("train", "dropped", {client_of(flight.start.client): reason for flight, reason in step.dropped})
