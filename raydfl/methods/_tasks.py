"""Task discovery: clients are grouped by their updates, and each group has a model of its own.

A method takes it by deriving from :class:`WithTasks`; ``method.tasks`` says how:

- ``none``: there is one model for all, and the method is what it is without this.
- ``hdbscan``: the server compares the changes of the last layers in a round's updates, and clusters the clients (FedAPTA, step 7).
- ``known``: the clients' profile says who belongs together: the upper bound.

The server's state then has one entry for each group, and ``global``. An entry's name stays with the cluster that has the most
members in common with it. Every client always has a model:

- before it was first chosen: ``global``, which after each round is the mean of that round's groups, weighted as the updates are;
- while it is not in the cohort: the present model of the group that it was last in;
- an entry goes when its last member has left it, so nobody's is missing.

A client's update is compared with the model that it was sent. A new group's robust rule, if one is configured, compares with the
model that most of its members had. A cohort of less than twice ``min_cluster_size`` is one group, and so is one in which all points
are noise; ``tasks/undivided`` records it.

What the server is told: nothing but the updates. Clients' parts or columns are used to measure (purity, adjusted Rand index, and
each group's model on its members' test data), never to decide, unless ``known`` says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core import registry
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.part_names import plain_name
from raydfl.core.settings import StrictTypes
from raydfl.core.types import Client, Metrics, Ratio, State, Task, Tensors, Update
from raydfl.methods._clustering import (
    Distance,
    adjusted_rand_index,
    distances,
    hdbscan_labels,
    match,
    purity,
    with_noise,
)
from raydfl.methods._method import Method
from raydfl.methods._spool import Spool
from raydfl.training import TrainSettings

GLOBAL = "global"

BOOK = "tasks"
"""The key of the state's ``extra`` under which it stands who is in which group."""

HEADS = "updates of last layers"
"""The entry of the state with what ``accumulate`` keeps: tensors ``NUMBER OF CLIENT/name``."""


def _layers_of(tensors: Iterable[str]) -> list[str]:
    """Return the names of the layers that have these tensors, in their order."""
    return list(dict.fromkeys(plain_name(name).rpartition(".")[0] for name in tensors))


@dataclass(frozen=True, kw_only=True)
class KnownTasks(StrictTypes):
    """Groups by a column of the clients' profile."""

    by: Annotated[str, Field(description="name in the clients' profile; part: the part of data.parts")] = "part"


@dataclass(frozen=True, kw_only=True)
class DiscoveredTasks(StrictTypes):
    """Groups by HDBSCAN on the changes of the last layers."""

    distance: Annotated[Distance, Field(description="between two updates; the paper: cosine")] = "cosine"
    layers: Annotated[
        int | tuple[str, ...],
        Field(description="how many of the last layers count; or the beginnings of their tensors' names"),
    ] = 1
    min_cluster_size: Annotated[int, Field(ge=2, description="clients of the smallest cluster")] = 5
    min_samples: Annotated[int, Field(ge=1, description="neighbours that make a client's surroundings dense")] = 2
    selection: Annotated[
        Literal["eom", "leaf"], Field(description="HDBSCAN's choice of clusters: excess of mass, or the smallest ones")
    ] = "eom"
    epsilon: Annotated[float, Field(ge=0, description="clusters that are nearer to each other are one; 0: none")] = 0.0
    single: Annotated[bool, Field(description="all clients may be found to be one cluster")] = False
    noise: Annotated[
        Literal["attach", "alone"],
        Field(description="clients in no cluster: attach them to the nearest one, or let each be a group of its own"),
    ] = "attach"
    threshold: Annotated[
        float, Field(ge=0, description="mean distance to a cluster from which on a client is not attached to it")
    ] = 1.0
    accumulate: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="what is kept of a client's earlier changes when a new one is added; above 0 clients outside the "
            "cohort are clustered too, by what they sent before",
        ),
    ] = 0.0
    truth: Annotated[
        str, Field(description="name in the clients' profile with which the groups are compared; it decides nothing")
    ] = "part"

    def __post_init__(self) -> None:
        """Refuse to look at no layer."""
        if not self.layers or (isinstance(self.layers, int) and self.layers < 1):
            raise ConfigError(f"method.tasks.layers is {self.layers!r}; give a number from 1 on, or names")

    def head(self, tensors: Iterable[str]) -> list[str]:
        """Return the names of the tensors that are compared, of those of an update that the server has too, in their order.

        Raises:
            ConfigError: there are none.
        """
        names = list(tensors)
        if isinstance(self.layers, int):
            modules = _layers_of(names)[-self.layers :]
            return [name for name in names if plain_name(name).rpartition(".")[0] in modules]
        found = [name for name in names if plain_name(name).startswith(self.layers)]
        if not found:
            raise ConfigError(
                f"method.tasks.layers: no tensor's name begins with {' or '.join(self.layers)}; {nearest(self.layers[0], names)}"
            )
        return found

    def check_layers(self, tensors: Iterable[str]) -> None:
        """Check that the server has the layers that are compared.

        Args:
            tensors: names of its tensors.

        Raises:
            ConfigError: it has fewer, or none with such a name.
        """
        names = list(tensors)
        found = len(_layers_of(names))
        if isinstance(self.layers, int) and self.layers > found:
            raise ConfigError(
                f"method.tasks.layers is {self.layers}, but the clients share {found} layers; take at most {found}"
            )
        self.head(names)

    def labels(self, heads: Sequence[Mapping[str, Tensor]]) -> tuple[np.ndarray, int, bool]:
        """Return the cluster of each client, how many of them were noise, and whether the clients were not divided at all."""
        if len(heads) < 2 * self.min_cluster_size:
            return np.zeros(len(heads), np.int64), 0, True
        matrix = distances(heads, self.distance)
        found = hdbscan_labels(
            matrix, self.min_cluster_size, self.min_samples, self.selection, self.epsilon, self.single
        )
        threshold = self.threshold if self.noise == "attach" else 0.0
        return with_noise(found, matrix, threshold), int((found < 0).sum()), bool((found < 0).all())


KINDS: Mapping[str, type[KnownTasks | DiscoveredTasks]] = {"hdbscan": DiscoveredTasks, "known": KnownTasks}


def find_tasks(setting: str | Mapping[str, Any]) -> KnownTasks | DiscoveredTasks | None:
    """Return what ``method.tasks`` describes; ``None``: one model for all.

    Raises:
        ConfigError: no such kind, or an option that it does not have or that is out of range.
    """
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if name == "none" and not options:
        return None
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(
            f"method.tasks: {setting!r:.80}; write hdbscan, known, none, or {{name: hdbscan, min_cluster_size: 3}}; "
            f"{nearest(str(name), [*KINDS, 'none'])}"
        )
    return registry.build(KINDS[name], options, "method.tasks")


@dataclasses.dataclass(frozen=True)
class Membership:
    """The members of groups: what the state's ``extra`` holds under :data:`BOOK`."""

    clients: Sequence[str]
    """Ids of all clients."""
    keys: Sequence[str]
    """The entry of the state that is each client's; empty: it was never in a group."""
    parts: Sequence[str]
    """The part of each, to measure with."""
    truth: Sequence[str] | None
    """The kinds that groups are compared with; ``None``: it is not known."""
    following: int = 1
    """The number of the next new group."""

    @classmethod
    def of(cls, state: State) -> Membership:
        """Read it."""
        return cls(**state.extra[BOOK])

    def key_of(self) -> dict[str, str]:
        """Return each client's entry of the state, by its id."""
        return {client: key or GLOBAL for client, key in zip(self.clients, self.keys, strict=True)}

    def moved(self, keys: Mapping[str, str], following: int) -> Membership:
        """Return it with some clients' new groups, by id."""
        new = [keys.get(client, key) for client, key in zip(self.clients, self.keys, strict=True)]
        return dataclasses.replace(self, keys=new, following=following)

    def metrics(self) -> dict[str, Ratio | np.ndarray]:
        """Return the number of groups, how they agree with the truth, and who is in which.

        ``tasks/membership`` is float64 [2, clients]: the number of each client's group, 0 before it was in one; and of the truth.
        """
        numbers = {key: place for place, key in enumerate(sorted(set(self.keys) - {""}, key=_natural), start=1)}
        groups = [_number(key, numbers) for key in self.keys]
        found: dict[str, Ratio | np.ndarray] = {"tasks/groups": Ratio(len(numbers), 1)}
        codes = np.full(len(groups), -1.0)
        if self.truth is not None:
            kinds = {kind: code for code, kind in enumerate(sorted(set(self.truth)))}
            codes = np.array([kinds[kind] for kind in self.truth], np.float64)
            pairs = [(key, kind) for key, kind in zip(self.keys, self.truth, strict=True) if key]
            if pairs:
                keys, truth = zip(*pairs, strict=True)
                found["tasks/purity"] = Ratio(purity(keys, truth), 1)
                found["tasks/rand_index"] = Ratio(adjusted_rand_index(keys, truth), 1)
        found["tasks/membership"] = np.stack([np.array(groups, np.float64), codes])
        return found


def _number(key: str, numbers: Mapping[str, int]) -> int:
    """Return the number of a group: the one in its name, which lasts, or its place among all."""
    end = key.removeprefix("task")
    return int(end) if end.isdigit() else numbers.get(key, 0)


def _natural(key: str) -> tuple[int, str]:
    end = key.removeprefix("task")
    return (int(end), "") if end.isdigit() else (0, key)


@dataclass(frozen=True, kw_only=True)
class WithTasks(Method):
    """Base of methods that can have one model for each group of clients, where ``tasks`` says so."""

    tasks: Annotated[
        str | dict[str, Any],
        Field(
            description="one model for all (none), or for each group of clients: hdbscan, known, or {name, options ...}"
        ),
    ] = "none"

    @functools.cached_property
    def built_tasks(self) -> KnownTasks | DiscoveredTasks | None:
        """The way in which groups are found; ``None``: there is one model for all."""
        return find_tasks(self.tasks)

    def check(self, train: TrainSettings) -> None:
        """Refuse ``tasks`` that are not as they should be."""
        _ = self.built_tasks

    def init(
        self, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]], rng: np.random.Generator
    ) -> State:
        """Return the method's state; all clients begin with ``global``.

        Raises:
            ConfigError: ``known``, and the clients' profile has no such name; or ``hdbscan``, and there are fewer layers.
        """
        state = super().init(clients, models, rng)
        tasks = self.built_tasks
        if tasks is None:
            return state
        column = tasks.by if isinstance(tasks, KnownTasks) else tasks.truth
        told = all(column in client.profile for client in clients)
        if isinstance(tasks, DiscoveredTasks):
            tasks.check_layers(name for name in state.tensors[GLOBAL] if not name.startswith(type(self).changes))
        if isinstance(tasks, KnownTasks) and not told:
            raise ConfigError(
                f"method.tasks.by: clients have no {column!r} in their profile; {nearest(column, clients[0].profile)} Several data "
                f"sets are data.parts, whose name is 'part'; other names come from data.profile"
            )
        book = Membership(
            clients=[client.id for client in clients],
            keys=[""] * len(clients),
            parts=[str(client.profile.get("part", "")) for client in clients],
            truth=[str(client.profile[column]) for client in clients] if told else None,
        )
        return dataclasses.replace(state, extra={**state.extra, BOOK: dataclasses.asdict(book)})

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Send each client its group's model in the place of ``global``."""
        return self._addressed(state, super().plan(state, clients, rng, cohort))

    def _addressed(self, state: State, tasks: list[Task]) -> list[Task]:
        if self.built_tasks is None:
            return tasks
        key_of = Membership.of(state).key_of()
        return [
            dataclasses.replace(
                task, receive=tuple(key_of[task.client_id] if key == GLOBAL else key for key in task.receive)
            )
            for task in tasks
        ]

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Measure clients with their group's model, and at the server each group's model on its members' parts."""
        tasks = self._addressed(state, super().plan_evaluation(state, clients))
        if self.built_tasks is None or clients:
            return tasks
        book = Membership.of(state)
        members: dict[str, Counter[str]] = {}
        for key, part in zip(book.keys, book.parts, strict=True):
            members.setdefault(key or GLOBAL, Counter())[part] += 1
        return tasks + [
            Task("", phase="evaluate", receive=(key,), options={"parts": dict(members[key])})
            for key in state.tensors
            if key in members
        ]

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Find the groups, and apply the method's aggregation to each."""
        tasks = self.built_tasks
        if tasks is None:
            return self.combine(state, updates, rng)
        book = Membership.of(state)
        if isinstance(tasks, KnownTasks):
            truth = cast(Sequence[str], book.truth)
            of = {client: f"task_{kind}" for client, kind in zip(book.clients, truth, strict=True)}
            discovery = _Discovery(book.moved(of, book.following), updates)
        else:
            discovery = _discovered(tasks, book, state, updates, type(self).changes)
        new = discovery.members
        before, after = book.key_of(), new.key_of()
        entries = dict(state.tensors)
        for key in dict.fromkeys(new.keys):
            if key and key not in entries:
                members = Counter(before[client] for client, own in after.items() if own == key)
                entries[key] = state.tensors[members.most_common(1)[0][0]]
        weights: dict[str, Counter[str]] = {}
        given = dataclasses.replace(state, tensors=entries, extra={**state.extra, BOOK: dataclasses.asdict(new)})
        result, report = self.combine(given, _regrouped(discovery.updates, before, after, weights), rng)
        held = {GLOBAL, *new.keys}
        tensors = {key: entry for key, entry in result.tensors.items() if key in held or key not in {*book.keys, HEADS}}
        tensors[GLOBAL] = _mean_of_groups(state.tensors[GLOBAL], result.tensors, weights)
        if discovery.kept:
            tensors[HEADS] = discovery.kept
        extra = {key: value for key, value in result.extra.items() if not key.startswith(f"{BOOK}@")}
        return dataclasses.replace(result, tensors=tensors, extra=extra), {
            **report,
            **discovery.found,
            **new.metrics(),
        }

    def combine(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Make the next state of updates whose groups are found: override it in place of :meth:`aggregate`.

        Args:
            state: with an entry for each group, and the groups as they are now.
            updates: each with the entry that it changes.
            rng: of the round.
        """
        return super().aggregate(state, updates, rng)


def _regrouped(
    updates: Iterable[Update], before: Mapping[str, str], after: Mapping[str, str], weights: dict[str, Counter[str]]
) -> Iterator[Update]:
    """Yield updates for their clients' new groups.

    Args:
        updates: in client order.
        before: the entry that each client was sent.
        after: each client's new one.
        weights: where the weights of the tensors that came are added up, by group and name.
    """
    for update in updates:
        if update.key != before[update.client_id]:
            yield update  # for an entry that is the method's own
            continue
        key = after[update.client_id]
        for name in update.tensors:
            weight = update.weight[name] if isinstance(update.weight, Mapping) else update.weight
            number = float(weight.double().mean()) if isinstance(weight, Tensor) else float(weight)
            weights.setdefault(key, Counter())[name] += number  # type: ignore[assignment]  # a Counter of numbers
        yield dataclasses.replace(update, key=key)


def _mean_of_groups(
    current: Tensors, entries: Mapping[str, Tensors], weights: Mapping[str, Counter[str]]
) -> dict[str, Tensor]:
    """Return the mean of the groups' models, each tensor weighted by what the updates with it weighed; else the current one."""
    found: dict[str, Tensor] = {}
    for name, value in current.items():
        given = [(of[name], entries[key][name]) for key, of in weights.items() if of[name] > 0]
        total = sum(weight for weight, _ in given)
        found[name] = (
            torch.stack([tensor.double() * (weight / total) for weight, tensor in given]).sum(dim=0).to(value.dtype)
            if given
            else value
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Discovery:
    """All that a round's updates said about groups."""

    members: Membership
    """After the round."""
    updates: Iterable[Update]
    """The same updates, to be read once more."""
    found: Mapping[str, Ratio] = dataclasses.field(default_factory=dict)
    """Metrics."""
    kept: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """The changes that the state keeps."""


def _discovered(
    tasks: DiscoveredTasks, book: Membership, state: State, updates: Iterable[Update], others: tuple[str, ...]
) -> _Discovery:
    """Cluster the clients of a round.

    Args:
        tasks: how.
        book: who was in which group.
        state: before the round.
        updates: of the round.
        others: beginnings of the names of tensors that are none of a model.
    """
    spool, heads = Spool(), _kept_heads(state, book) if tasks.accumulate else {}
    for update in updates:
        spool.add(update)
        sent = state.tensors[update.key]
        head = tasks.head(name for name in update.tensors if name in sent and not name.startswith(others))
        change = {plain_name(name): update.tensors[name].double() - sent[name].double() for name in head}
        earlier = heads.get(update.client_id)
        if earlier is not None and [*earlier] == [*change]:
            change = {name: value + tasks.accumulate * earlier[name] for name, value in change.items()}
        heads[update.client_id] = change
    clients = [client for client in book.clients if client in heads]
    labels, noise, undivided = tasks.labels([heads[client] for client in clients])
    own = dict(zip(book.clients, book.keys, strict=True))
    names, following = match(labels.tolist(), [own[client] for client in clients]), book.following
    for label in dict.fromkeys(labels.tolist()):
        if label not in names:
            names[label], following = f"task{following}", following + 1
    new = book.moved({c: names[label] for c, label in zip(clients, labels.tolist(), strict=True)}, following)
    found = {
        "tasks/clusters": Ratio(len(set(labels.tolist())), 1),
        "tasks/noise": Ratio(noise, max(1, len(clients))),
        "tasks/undivided": Ratio(float(undivided), 1),
    }
    kept: dict[str, Tensor] = {}
    if tasks.accumulate:
        place = {client: number for number, client in enumerate(book.clients)}
        kept = {f"{place[c]}/{name}": value.float() for c, head in heads.items() for name, value in head.items()}
    return _Discovery(new, spool, found, kept)


def _kept_heads(state: State, book: Membership) -> dict[str, dict[str, Tensor]]:
    """Return the changes of last layers that the state keeps, by client."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.tensors.get(HEADS, {}).items():
        number, _, tensor = name.partition("/")
        found.setdefault(book.clients[int(number)], {})[tensor] = value.double()
    return found
