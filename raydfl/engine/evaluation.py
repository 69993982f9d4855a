"""Measurements after a round: shared models on the server's data, and clients' models on their own hold-out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.core import part_names, seeds
from raydfl.core.errors import ClientError, ConfigError
from raydfl.core.metrics import pool as pool_metrics
from raydfl.core.metrics import summarise
from raydfl.core.types import Client, Metrics, ModelSpec, Ratio, State, Task, Tensors
from raydfl.core.users_code import naming_failures
from raydfl.data import Shard
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.orders import SERVER, TRIGGERED, Measurement, Order, Reply, check_server_tasks
from raydfl.engine.settings import EvaluateSettings
from raydfl.engine.storage import record
from raydfl.engine.validation import Kinds, kinds_of, left_out, shown_reason
from raydfl.methods import Method, check_prefixes
from raydfl.training import find_fixed_tensors

Variants = Sequence[tuple[Sequence[ModelSpec], Mapping[str, nn.Module]]]
"""Each combination of architectures that clients have, with models built of it."""


class Evaluation:
    """Plans what is measured of a state, and pools what was.

    Args:
        settings: ``evaluate`` of the configuration.
        method: of the run.
        clients: all of them.
        shards: of each part's data at the server.
        variants: of each part.
        part: ``evaluate.fine_tune.part``.
        order: makes orders of tasks that measure something.
        received: returns the keys of a state's entries that clients receive.
    """

    def __init__(
        self,
        settings: EvaluateSettings,
        method: Method,
        clients: Clients,
        shards: Mapping[str, Sequence[Shard]],
        variants: Mapping[str, Variants],
        part: Sequence[str],
        order: Callable[[Sequence[Task], tuple[Measurement, ...]], list[Order]],
        received: Callable[[State], Collection[str]],
    ) -> None:
        for of_part in variants.values():
            check_prefixes([models for _, models in of_part], part, "evaluate.fine_tune.part")
        self._settings = settings
        self._method = method
        self._clients = clients
        self._shards = shards
        self._order = order
        self._received = received
        of_all = (spec.name for of_part in variants.values() for specs, _ in of_part for spec in specs)
        self._models = tuple(dict.fromkeys(of_all))
        self._fully_shared = {part: _shared_models(method, of_part) for part, of_part in variants.items()}

    def orders(self, state: State, cohort: Sequence[str]) -> list[Order]:
        """Return what to measure of a state: on the server's data first, then at clients.

        Args:
            state: to be measured.
            cohort: ids of the clients that took part in the round.
        """
        at_server = self.server_orders(state)
        return at_server + self.client_orders(state, cohort, len(at_server))

    def server_orders(self, state: State) -> list[Order]:
        """Return orders for the shared models, on shards of the server's data.

        What the method planned for the server; else every entry that clients receive and that holds models whole, on every split.

        Raises:
            ConfigError: what the method planned cannot be measured.
        """
        if not self._settings.server:
            return []
        planned = [task for task in self._plan(state, []) if task.client_id == SERVER]
        names = [spec.name for shared in self._fully_shared.values() for spec in shared]
        if not names:
            return []
        check_server_tasks(planned, state.tensors, list(dict.fromkeys(names)), list(self._shards))
        orders: list[Order] = []
        for task, part in itertools.product(planned or self._whole_entries(state), self._shards):
            if part not in task.options.get("parts", self._shards):
                continue
            specs = self._measured_models(task, state, part)
            if not specs:
                continue
            for shard in self._shards[part]:
                if shard.split != task.options.get("split", shard.split):
                    continue
                measure = (Measurement(shard.split, tuple(spec.name for spec in specs), shard),)
                orders.append(
                    Order(
                        len(orders),
                        task,
                        state.round_index,
                        float(shard.stop - shard.start),
                        None,
                        measure,
                        server_models=specs,
                        part=part,
                        place=shard.place,
                    )
                )
        return orders

    def _plan(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Return the tasks that the method plans for an evaluation."""
        with naming_failures(self._method, "plan_evaluation", f"the evaluation after round {state.round_index}"):
            return self._method.plan_evaluation(state, clients)

    def _whole_entries(self, state: State) -> list[Task]:
        """Return a task for each entry that holds a model whole; of several only those that clients receive."""
        tasks = [Task(SERVER, phase="evaluate", receive=(key,)) for key in state.tensors]
        whole = [task for task in tasks if any(self._measured_models(task, state, part) for part in self._shards)]
        if len(whole) < 2:
            return whole
        received = self._received(state)
        return [task for task in whole if task.receive[0] in received]

    def _measured_models(self, task: Task, state: State, part: str) -> tuple[ModelSpec, ...]:
        """Return the models of a part that a task of the server measures.

        Raises:
            ConfigError: of one that it names, not every tensor is in the entries that the task receives.
        """
        tensors: dict[str, Tensor] = {}
        for key in task.receive:
            tensors = {**part_names.of_part(state.tensors[key], part), **tensors}
        held = {spec.name: spec for spec, shapes in self._fully_shared[part].items() if _holds(tensors, shapes)}
        named = task.options.get("models")
        if named is None:
            return tuple(held.values())
        for name in named:
            if name not in held:
                raise ConfigError(
                    f"plan_evaluation(): the server is to measure the model {name!r} of {', '.join(map(repr, task.receive))}, "
                    f"where not every tensor of it is"
                )
        return tuple(held[name] for name in dict.fromkeys(named))

    def client_orders(self, state: State, cohort: Sequence[str], first_position: int = 0) -> list[Order]:
        """Return orders for clients' models on their own hold-out, and for private ones on some of the server's test clips."""
        settings, clients = self._settings, self._clients
        if settings.clients == "none":
            return []
        chosen = list(clients) if settings.clients == "all" else [clients.by_id(name) for name in cohort]
        whole = {spec.name for shared in self._fully_shared.values() for spec in shared}
        names = self._models
        measure = [Measurement("validation", names), Measurement("client_test", names)]
        private = tuple(name for name in names if name not in whole)
        if private and settings.client_test_clips:
            there = {shard.split for of_part in self._shards.values() for shard in of_part}
            measure += [
                Measurement(split, private, sample=settings.client_test_clips)
                for split in ("test", TRIGGERED)
                if split in there
            ]
        tasks = [task for task in self._plan(state, chosen) if task.client_id != SERVER]
        orders = self._order(tasks, tuple(measure))
        return [dataclasses.replace(order, position=first_position + order.position) for order in orders]


def pooled(
    round_index: int, orders: Sequence[Order], replies: Sequence[Reply], on_error: str
) -> tuple[list[record.MetricRow], dict[str, str]]:
    """Return what was measured, of each client and pooled, and why clients could not be measured, by client id.

    Args:
        round_index: whose state was measured.
        orders: of the evaluation.
        replies: of all of them, by position.
        on_error: ``"stop"`` or ``"drop"``: what becomes of a client whose metrics do not fit those of the others.

    Raises:
        ClientError: what was measured on the server's data does not fit together, or a client's metrics, where none is left out.
    """
    at_clients = [reply for reply in replies if reply.client_id != SERVER]
    server: dict[str, dict[tuple[str, str, float], list[Metrics]]] = {}
    """By split, then by prefix, part and how much it counts there."""
    kinds = Kinds()
    for reply in replies:
        if reply.client_id != SERVER:
            continue
        order = orders[reply.position]
        prefix = _prefix(order)
        misfit = kinds.misfit(_kinds(reply, prefix))
        if misfit:
            raise ClientError(f"round {round_index}, the evaluation on the server's data: {misfit}")
        whose = prefix, order.part, float(order.task.options.get("parts", {}).get(order.part, 0))
        for split, metrics in reply.measured.items():
            server.setdefault(split, {}).setdefault(whose, []).append(metrics)
    clients: dict[str, dict[str, Metrics]] = {}
    unmeasured: dict[str, str] = {}
    prefixes = {reply.client_id: _prefix(orders[reply.position]) for reply in at_clients}
    kinds = Kinds([_kinds(reply, prefixes[reply.client_id]) for reply in at_clients if reply.measured][:3])
    for reply in at_clients:
        prefix = prefixes[reply.client_id]
        misfit = kinds.misfit(_kinds(reply, prefix))
        if misfit or reply.rejected:
            reason = reply.rejected or left_out(round_index, reply.client_id, misfit, on_error)
            unmeasured[reply.client_id] = shown_reason(reason)
            continue
        for split, metrics in reply.measured.items():
            clients.setdefault(split, {})[reply.client_id] = {prefix + name: v for name, v in metrics.items()}
    rows: list[record.MetricRow] = []
    for split, measured in server.items():
        means: dict[str, _PartMean] = {}
        for (prefix, part, weight), pieces in measured.items():
            whole = pool_metrics(pieces)
            scores = {**whole, **summarise(whole)}
            named = {prefix + name: value for name, value in scores.items()}
            rows += record.rows_from_metrics(round_index, "evaluate", "", split, named)
            if weight:
                means.setdefault(part, _PartMean()).add(scores, weight)
        for part, mean in means.items():
            found = {part_names.qualify(part, ":", name): value for name, value in mean.scores().items()}
            rows += record.rows_from_metrics(round_index, "evaluate", "", split, found)
    for split, of_clients in clients.items():
        rows += record.rows_from_clients(round_index, "evaluate", split, of_clients)
    return rows, unmeasured


class _PartMean:
    """The scores of a part's clients: the mean of their models' scores, of which each model counts as much as its plan says."""

    def __init__(self) -> None:
        self._ratios: dict[str, list[tuple[Ratio, float]]] = {}
        self._confusions: dict[str, np.ndarray] = {}

    def add(self, scores: Metrics, weight: float) -> None:
        """Add what was measured of one model."""
        for name, value in scores.items():
            if isinstance(value, Ratio) and value.count:
                self._ratios.setdefault(name, []).append((value, weight))
            elif isinstance(value, np.ndarray):
                added = value * weight
                self._confusions[name] = self._confusions[name] + added if name in self._confusions else added

    def scores(self) -> Metrics:
        """Return the means, and the sum of the weighted confusion matrices."""
        found: dict[str, Ratio | np.ndarray] = dict(self._confusions)
        for name, given in self._ratios.items():
            count = sum(ratio.count for ratio, _ in given)
            mean = sum(ratio.value * weight for ratio, weight in given) / sum(weight for _, weight in given)
            found[name] = Ratio(mean * count, count)
        return found


def _kinds(reply: Reply, prefix: str = "") -> dict[str, str]:
    """Return what kind each of an evaluation's metrics is of."""
    kinds: dict[str, str] = {}
    for split, metrics in reply.measured.items():
        kinds |= kinds_of(metrics, f"{split} {prefix}")
    return kinds


def _prefix(order: Order) -> str:
    """Return the prefix of metrics: the part, and at the server the entry of the state; the one global state has none.

    Where the plan says how much a model counts in a part, the part's name alone is for the mean.
    """
    words = [order.part]
    if order.task.client_id == SERVER:
        key = order.task.receive[0]
        words = [order.part, key] if "parts" in order.task.options else label_entry(order.part, key)
    return "".join(f"{word}:" for word in words if word)


def _shared_models(method: Method, variants: Variants) -> dict[ModelSpec, dict[str, torch.Size]]:
    """Return the models that the server can evaluate, because every floating tensor of theirs is shared or fixed.

    With each the shapes of its shared tensors; a model that is fixed as a whole has none. One architecture for each name: the
    first; a model with several architectures cannot be shared as a whole.
    """
    found: dict[str, tuple[ModelSpec, dict[str, torch.Size]]] = {}
    for specs, models in variants:
        fixed = find_fixed_tensors(models, method.fixed)
        for spec in specs:
            if spec.name in models and spec.name not in found:
                state = models[spec.name].state_dict()
                shapes = {
                    f"{spec.name}/{key}": value.shape
                    for key, value in state.items()
                    if value.is_floating_point() and f"{spec.name}/{key}" not in fixed
                }
                if all(method.shared(name) for name in shapes):
                    found[spec.name] = (spec, shapes)
    return dict(found.values())


def _holds(tensors: Tensors, shapes: Mapping[str, torch.Size]) -> bool:
    """Return whether an entry of the state has tensors of all these names and shapes, and there are some."""
    return bool(shapes) and all(name in tensors and tensors[name].shape == shape for name, shape in shapes.items())


def received_entries(config: Config, state: State, clients: Clients, begun: Sequence[int] = ()) -> frozenset[str]:
    """Return the keys of the entries that a task of the last round or of its evaluation receives, and ``"global"``.

    Args:
        config: configuration of the run.
        state: state after that round.
        clients: all clients of the run. The evaluation is planned for each of them.
        begun: rounds completed before each phase, if a phase has ended early.
    """
    method, last = config.parts.method, max(0, state.round_index - 1)
    phase = config.phases.as_begun(begun).at(last)
    # A plan may read a schedule that has no round after the last one, so the last round is planned once more.
    before = dataclasses.replace(state, round_index=last, phase=phase)
    cohort = config.train.resolve_phase(phase).cohort_size(clients.eligible)
    with naming_failures(method, "plan", f"round {last + 1}"):
        tasks = [*method.plan(before, clients, seeds.generator(config.run.seed, last, "", "plan"), cohort)]
    with naming_failures(method, "plan_evaluation", f"the evaluation after round {state.round_index}"):
        tasks += [*method.plan_evaluation(state, clients), *method.plan_evaluation(state, [])]
    return frozenset(["global", *(key for task in tasks for key in task.receive)])


def label_entry(part: str, key: str) -> list[str]:
    """Return the words that name an entry of the state in metrics and files: its part, and its key unless it is global."""
    return [word for word in (part, "" if key == "global" else key) if word]
