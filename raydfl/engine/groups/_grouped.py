"""Extension of any method by groups of clients: the server keeps the method's state once per group.

- ``plan`` and ``plan_evaluation`` are called for each group with the group's state. A client gets its own group's task.
- ``aggregate`` is called for each group with the updates of its members.
- A client's code sees the method's own keys (``global``), regardless of its group.

Every client always has a model. Clients that were never in a group use the state without a group: the mean of the last round's
groups, weighted like the updates. A new group starts from the state of most of its members. A group's state is deleted when its
last member leaves.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.core.metrics import pool
from raydfl.core.part_names import plain_name
from raydfl.core.spool import Spool
from raydfl.core.types import BuiltModels, Client, Metric, Metrics, State, Task, Tensors, Update
from raydfl.data import Examples
from raydfl.engine.groups._membership import BOOK, GLOBAL, PREFIX, Membership, entry_key, split_key
from raydfl.engine.groups._rule import ClientUpdate, GroupRule
from raydfl.methods import CLIENTS, Method
from raydfl.training import Step

KEPT = "updates of last layers"
"""Entry of the state with the tensors that a group rule keeps."""

EXTRA = f"{BOOK}/extra"
"""Key in the state's ``extra`` for groups' facts that differ from the facts without a group."""

_GROUPS = "groups of this client"
"""Option of a task: the client's group, or the groups to choose from."""

_SERVER = ""


def add_groups(method: Method, rule: GroupRule) -> Method:
    """Return a method that keeps its state once per group.

    The result is an instance of a subclass of the method's class and inherits its declarations. :class:`Grouped` overrides only the
    calls that access the server's entries.

    Raises:
        ConfigError: The rule does not support the method.
    """
    cls = type(method)
    if rule.choosing and cls.phases:
        raise ConfigError(
            f"train.groups: clients choose among the models of all groups, but method {cls.__name__.lower()!r} has several phases, "
            f"and entries of groups differ between phases. Set train.groups to hdbscan, cfl or known"
        )
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    grouped = cast(Method, object.__new__(type(cls.__name__, (Grouped, cls), names)))
    vars(grouped).update(vars(method), ungrouped=method, discovery=rule)
    return grouped


class Grouped(Method):
    """Method with a separate state for each group. It calls the ungrouped method once per group."""

    ungrouped: Method
    discovery: GroupRule

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Create the method's state, including the rule's initial groups.

        Raises:
            ConfigError: An entry has the form of a group's name, or the rule cannot group these clients.
        """
        state = self.ungrouped.init(clients, models, rng)
        for key in state.tensors:
            if split_key(key) != ("", key):
                raise ConfigError(
                    f"train.groups: the method has an entry {key!r}, but names with the prefix {PREFIX!r} are reserved for groups. "
                    f"Rename it in init(), or set train.groups=none"
                )
        tensors = state.tensors.get(GLOBAL, {})
        self.discovery.check(clients, [name for name in tensors if not name.startswith(type(self.ungrouped).changes)])
        column = self.discovery.column
        has_truth = all(column in client.profile for client in clients)
        membership = Membership(
            clients=[client.id for client in clients],
            keys=[""] * len(clients),
            parts=[str(client.profile.get("part", "")) for client in clients],
            truth=[str(client.profile[column]) for client in clients] if has_truth else None,
        )
        parameters = {f"{n}/{k}" for built in models for n, m in built.items() for k, _ in m.named_parameters()}
        states = {"": state, **self.discovery.begin(state, parameters, rng)}
        return _join(state, states, membership, {})

    def begin_phase(self, state: State) -> State:
        """Begin the phase in every group."""
        membership = Membership.from_state(state)
        states = {group: self.ungrouped.begin_phase(_select_state(state, group)) for group in _list_groups(state)}
        return _join(state, states, membership, state.tensors.get(KEPT, {}))

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Plan all clients with each group's state and the same random numbers, then select each client's task by its group."""
        own, start = Membership.from_state(state).groups(), rng.bit_generator.state
        tasks: list[Task] = []
        for group in dict.fromkeys(own.values()):
            rng.bit_generator.state = start  # so that all groups draw the same cohort
            planned = self.ungrouped.plan(_select_state(state, group), clients, rng, cohort)
            tasks += [self._address(state, task, group) for task in planned if own[task.client_id] == group]
        place = {client: number for number, client in enumerate(own)}
        return sorted(tasks, key=lambda task: place[task.client_id])

    def _address(self, state: State, task: Task, group: str) -> Task:
        """Return a client's task with its group's entries in place of the method's."""
        groups = [group]
        if self.discovery.choosing:
            groups = [name for name in _list_groups(state) if name]
            groups.sort(key=lambda name: name != group)  # the group of the last choice first
        return dataclasses.replace(
            task,
            receive=tuple(entry_key(key, name) for name in groups for key in task.receive),
            has=tuple(entry_key(key, name) for name in groups for key in task.has),
            options={**task.options, _GROUPS: groups},
        )

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Plan to evaluate clients with their group's models, and on the server each group's models on its members' parts."""
        membership = Membership.from_state(state)
        if not clients:
            return list(self._plan_server_tasks(state, membership))
        own = membership.groups()
        members: dict[str, list[Client]] = {}
        for client in clients:
            members.setdefault(own[client.id], []).append(client)
        return [
            self._address(state, task, group)
            for group, of_group in members.items()
            for task in self.ungrouped.plan_evaluation(_select_state(state, group), of_group)
        ]

    def _plan_server_tasks(self, state: State, membership: Membership) -> Iterator[Task]:
        for group in _list_groups(state):
            sizes = membership.sizes(group)
            planned = self.ungrouped.plan_evaluation(_select_state(state, group), []) or [
                Task(_SERVER, phase="evaluate")
            ]
            for task in planned if sizes else ():
                parts = {part: sizes[part] for part in task.options.get("parts", sizes) if sizes[part]}
                receive = tuple(entry_key(key, group) for key in task.receive)
                yield dataclasses.replace(task, receive=receive, options={**task.options, "parts": parts})

    def local(self, step: Step) -> Update:
        """Train with the entries of the client's group, and address the updates to the group."""
        group = self._enter(step)
        result = self.ungrouped.local(step)

        def readdress(update: Update) -> Update:
            return dataclasses.replace(update, key=entry_key(update.key, group))

        return dataclasses.replace(readdress(result), further=tuple(map(readdress, result.further)))

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Evaluate with the entries of the client's group."""
        if _GROUPS in step.options:
            self._enter(step)
        else:  # on the server, or a further evaluation of the same step
            step.received = {split_key(key)[1]: tensors for key, tensors in step.received.items()}
        return self.ungrouped.evaluate(step, examples, batch_size)

    def _enter(self, step: Step) -> str:
        """Give a step only the entries of its group, under the method's keys, and return the group."""
        groups = cast("Sequence[str]", step.options[_GROUPS])
        step.options = {name: value for name, value in step.options.items() if name != _GROUPS}
        entries: dict[str, dict[str, Tensors]] = {group: {} for group in groups}
        for key, tensors in step.received.items():
            group, own = split_key(key)
            entries[group][own] = tensors
        chosen = self.discovery.choose(step, entries, self.ungrouped)
        step.received = entries[chosen]
        return chosen

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Divide the clients into groups, and aggregate each group's updates."""
        old, spool = Membership.from_state(state), Spool()
        arriving = self._receive(state, updates, spool)
        division = self.discovery.divide(old, arriving, state.tensors.get(KEPT, {}))
        for _ in arriving:
            pass  # a rule may skip updates, but all of them must reach the spool
        new = division.members
        before, after, start = old.groups(), new.groups(), rng.bit_generator.state
        states = {group: _select_state(state, group) for group in _list_groups(state)}
        weights: dict[str, Counter[tuple[str, str]]] = {}
        reports: dict[str, tuple[list[str], Metrics]] = {}
        for group in dict.fromkeys(new.keys):
            if group and group not in states:
                had = Counter(before[client] for client, own in after.items() if own == group)
                states[group] = states[had.most_common(1)[0][0]]
        senders = dict.fromkeys(after[update.client_id] for update in spool)
        for group in senders:
            rng.bit_generator.state = start  # so that a group's result does not depend on earlier groups
            places: list[str] = []
            own_updates = _select_updates(spool, after, group, weights.setdefault(group, Counter()), places)
            start_state = _set_size(states[group], new, group)
            states[group], report = self.ungrouped.aggregate(start_state, own_updates, rng)
            reports[group] = places, report
        states[""] = _average_groups(states, weights)
        if not self.discovery.choosing:
            left = {*old.keys} - {*new.keys, ""}
            states = {group: own for group, own in states.items() if group not in left}
        report = _pool_reports(reports, [update.client_id for update in spool])
        return _join(state, states, new, division.kept), {**report, **division.metrics, **new.metrics()}

    def _receive(self, state: State, updates: Iterable[Update], spool: Spool) -> Iterator[ClientUpdate]:
        """Store all updates in the spool, under the method's keys, and yield the first update of each client."""
        states: dict[str, State] = {}
        seen: set[str] = set()
        changes = type(self.ungrouped).changes
        for update in updates:
            group, key = split_key(update.key)
            if group not in states:
                states[group] = _select_state(state, group)
            whole = self.ungrouped.complete(states[group], dataclasses.replace(update, key=key))
            spool.add(whole)
            if update.client_id not in seen:
                seen.add(update.client_id)
                received, common = (
                    {name: value for name, value in own.get(key, {}).items() if not name.startswith(changes)}
                    for own in (states[group].tensors, state.tensors)
                )
                yield ClientUpdate(whole, received, group, common)


def _list_groups(state: State) -> list[str]:
    """Return the groups with entries. The first is empty, for the entries without a group."""
    return list(dict.fromkeys(["", *(split_key(key)[0] for key in state.tensors)]))


def _select_state(state: State, group: str) -> State:
    """Return the method's state of a group. The state without a group provides missing entries and facts."""
    tensors: dict[str, Tensors] = {}
    for key, entry in state.tensors.items():
        own, plain = split_key(key)
        if key != KEPT and (own == group or (not own and plain not in tensors)):
            tensors[plain] = entry
    facts = {key: value for key, value in state.extra.items() if key != EXTRA and not _is_book(key)}
    facts |= cast("Mapping[str, Any]", state.extra.get(EXTRA, {})).get(group, {})
    return dataclasses.replace(state, tensors=tensors, extra=facts)


def _is_book(key: str) -> bool:
    """Return whether a key of ``extra`` stores the membership of all clients or of a part's."""
    return plain_name(key) == BOOK


def _join(state: State, states: Mapping[str, State], membership: Membership, kept: Tensors) -> State:
    """Join the groups' states into one state."""
    base = states[""]
    tensors = {entry_key(key, group): entry for group, own in states.items() for key, entry in own.tensors.items()}
    if kept:
        tensors[KEPT] = kept
    own_facts = {
        group: {
            key: value
            for key, value in own.extra.items()
            if plain_name(key) != CLIENTS and (key not in base.extra or base.extra[key] != value)
        }
        for group, own in states.items()
        if group
    }
    extra: dict[str, Any] = {BOOK: dataclasses.asdict(membership), **base.extra}
    if any(own_facts.values()):
        extra[EXTRA] = {group: facts for group, facts in own_facts.items() if facts}
    return dataclasses.replace(state, tensors=tensors, extra=extra)


def _set_size(state: State, membership: Membership, group: str) -> State:
    """Return a copy of a group's state, with the number of its members as the number of clients."""
    sizes = membership.sizes(group)
    extra = dict(state.extra)
    for key, value in state.extra.items():
        if plain_name(key) == CLIENTS and isinstance(value, int):
            part = key.partition("@")[2]
            extra[key] = sizes[part] if part else sizes.total()
    return dataclasses.replace(state, extra=extra)


def _select_updates(
    spool: Spool, after: Mapping[str, str], group: str, weights: Counter[tuple[str, str]], places: list[str]
) -> Iterator[Update]:
    """Yield the updates of a group's members.

    Args:
        spool: Updates of the round.
        after: Group by client id.
        group: The group.
        weights: Sums of the updates' weights by key and tensor, updated in place.
        places: Ids of the updates' clients, extended in place.
    """
    for update in spool:
        if after[update.client_id] != group:
            continue
        for name in update.tensors:
            weight = update.weight[name] if isinstance(update.weight, Mapping) else update.weight
            number = float(weight.double().mean()) if isinstance(weight, Tensor) else float(weight)
            weights[update.key, name] += number  # type: ignore[assignment]  # a Counter of numbers
        places.append(update.client_id)
        yield update


def _average_groups(states: Mapping[str, State], weights: Mapping[str, Counter[tuple[str, str]]]) -> State:
    """Average the tensors of all groups, weighted like their updates, for clients without a group.

    Entries without updates, such as a generator or moments, are copied from the group with the largest weight.
    """
    base = states[""]
    if not weights:
        return base
    changed = {key for group_weights in weights.values() for key, _ in group_weights}
    largest = states[max(weights, key=lambda group: weights[group].total())]
    tensors: dict[str, Tensors] = {key: entry for key, entry in largest.tensors.items() if key not in changed}
    for key in changed:
        entry: dict[str, Tensor] = {}
        names = base.tensors.get(key) or largest.tensors.get(key, {})
        for name, value in names.items():
            parts = [
                (group_weights[key, name], states[group].tensors[key][name])
                for group, group_weights in weights.items()
                if group_weights[key, name] > 0
            ]
            total = sum(weight for weight, _ in parts)
            entry[name] = (
                torch.stack([tensor.double() * (weight / total) for weight, tensor in parts]).sum(dim=0).to(value.dtype)
                if parts
                else value
            )
        if entry:
            tensors[key] = entry
    facts = {key: value for key, value in largest.extra.items() if plain_name(key) != CLIENTS or key not in base.extra}
    order = [key for key in base.tensors if key in tensors]
    tensors = {**{key: tensors[key] for key in order}, **tensors}
    return dataclasses.replace(base, tensors=tensors, extra={**base.extra, **facts})


def _pool_reports(reports: Mapping[str, tuple[list[str], Metrics]], clients: Sequence[str]) -> dict[str, Metric]:
    """Pool the metrics of the groups' aggregations. Arrays with a number for each update are sorted into client order."""
    pooled: list[Metrics] = []
    for places, report in reports.values():
        own: dict[str, Metric] = {}
        for name, value in report.items():
            own[name] = value
            if isinstance(value, np.ndarray) and value.shape == (len(places),):
                members, joined = set(places), np.zeros(len(clients))
                joined[[place for place, client in enumerate(clients) if client in members]] = value
                own[name] = joined
        pooled.append(own)
    return pool(pooled)
