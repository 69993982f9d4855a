"""Evaluation after a round: shared models on the server's data, and clients' models on their held-out clips."""

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
from raydfl.engine.validation import Kinds, kinds_of, make_printable, reject_misfit
from raydfl.methods import Method, check_prefixes
from raydfl.training import find_fixed_tensors

Variants = Sequence[tuple[Sequence[ModelSpec], Mapping[str, nn.Module]]]
"""Distinct combinations of the clients' architectures, each with built models by name."""


class Evaluation:
    """Planner of a state's evaluation.

    Args:
        settings: ``evaluate`` of the configuration.
        method: Method of the run.
        clients: All clients.
        shards: Shards of the server's data by part.
        variants: Combinations of architectures by part.
        part: ``evaluate.fine_tune.part``.
        order: Function that makes orders of tasks and measurements.
        received: Function that returns the keys of the entries of a state that clients receive.
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
        for combinations in variants.values():
            check_prefixes([models for _, models in combinations], part, "evaluate.fine_tune.part")
        self._settings = settings
        self._method = method
        self._clients = clients
        self._shards = shards
        self._order = order
        self._received = received
        names = (spec.name for combinations in variants.values() for specs, _ in combinations for spec in specs)
        self._models = tuple(dict.fromkeys(names))
        self._fully_shared = {part: _find_shared_models(method, of_part) for part, of_part in variants.items()}

    def make_orders(self, state: State, cohort: Sequence[str]) -> list[Order]:
        """Make the orders of an evaluation: for the server's data first, then for clients.

        Args:
            state: State to evaluate.
            cohort: Ids of the round's clients.
        """
        at_server = self.make_server_orders(state)
        return at_server + self.make_client_orders(state, cohort, len(at_server))

    def make_server_orders(self, state: State) -> list[Order]:
        """Make orders that evaluate the shared models on shards of the server's data.

        The method plans them. Without such a plan, every entry with complete models that clients receive is evaluated on every
        split.

        Raises:
            ConfigError: The method's plan is invalid.
        """
        if not self._settings.server:
            return []
        planned = [task for task in self._plan(state, []) if task.client_id == SERVER]
        names = [spec.name for shared in self._fully_shared.values() for spec in shared]
        if not names:
            return []
        check_server_tasks(planned, state.tensors, list(dict.fromkeys(names)), list(self._shards))
        orders: list[Order] = []
        for task, part in itertools.product(planned or self._plan_complete_entries(state), self._shards):
            if part not in task.options.get("parts", self._shards):
                continue
            specs = self._select_models(task, state, part)
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
        """Have the method plan the tasks of an evaluation."""
        with naming_failures(self._method, "plan_evaluation", f"the evaluation after round {state.round_index}"):
            return self._method.plan_evaluation(state, clients)

    def _plan_complete_entries(self, state: State) -> list[Task]:
        """Return a task for each entry with a complete model. Of several entries, only the clients' received ones count."""
        tasks = [Task(SERVER, phase="evaluate", receive=(key,)) for key in state.tensors]
        complete = [task for task in tasks if any(self._select_models(task, state, part) for part in self._shards)]
        if len(complete) < 2:
            return complete
        received = self._received(state)
        return [task for task in complete if task.receive[0] in received]

    def _select_models(self, task: Task, state: State, part: str) -> tuple[ModelSpec, ...]:
        """Select the models of a part that a task of the server evaluates.

        Raises:
            ConfigError: The task names a model with a tensor that is missing in the received entries.
        """
        tensors: dict[str, Tensor] = {}
        for key in task.receive:
            tensors = {**part_names.select_part(state.tensors[key], part), **tensors}
        available = {spec.name: spec for spec, shapes in self._fully_shared[part].items() if _holds(tensors, shapes)}
        named = task.options.get("models")
        if named is None:
            return tuple(available.values())
        for name in named:
            if name not in available:
                raise ConfigError(
                    f"plan_evaluation(): the server cannot evaluate the model {name!r} of {', '.join(map(repr, task.receive))}, "
                    f"because some of its tensors are missing there. Plan an evaluation of entries with all tensors"
                )
        return tuple(available[name] for name in dict.fromkeys(named))

    def make_client_orders(self, state: State, cohort: Sequence[str], first_position: int = 0) -> list[Order]:
        """Make orders that evaluate clients on their held-out clips, and private models also on the server's test clips.

        Args:
            state: State to evaluate.
            cohort: Ids of the round's clients.
            first_position: Position of the first order.
        """
        settings, clients = self._settings, self._clients
        if settings.clients == "none":
            return []
        chosen = list(clients) if settings.clients == "all" else [clients.by_id(name) for name in cohort]
        whole = {spec.name for shared in self._fully_shared.values() for spec in shared}
        names = self._models
        measure = [Measurement("validation", names), Measurement("client_test", names)]
        private = tuple(name for name in names if name not in whole)
        if private and settings.client_test_clips:
            splits = {shard.split for shards in self._shards.values() for shard in shards}
            measure += [
                Measurement(split, private, sample=settings.client_test_clips)
                for split in ("test", TRIGGERED)
                if split in splits
            ]
        tasks = [task for task in self._plan(state, chosen) if task.client_id != SERVER]
        orders = self._order(tasks, tuple(measure))
        return [dataclasses.replace(order, position=first_position + order.position) for order in orders]


def pool_replies(
    round_index: int, orders: Sequence[Order], replies: Sequence[Reply], on_error: str
) -> tuple[list[record.MetricRow], dict[str, str]]:
    """Pool the metrics of an evaluation.

    Args:
        round_index: Round of the evaluated state.
        orders: Orders of the evaluation.
        replies: Replies to all orders, by position.
        on_error: ``"stop"`` or ``"drop"``: response to a client whose metrics differ in kind from the majority.

    Returns:
        Rows with the metrics of each client and with the pooled metrics, and the reasons of failed evaluations by client id.

    Raises:
        ClientError: Metrics on the server's data differ in kind, or a client's metrics do and ``on_error`` is ``"stop"``.
    """
    at_clients = [reply for reply in replies if reply.client_id != SERVER]
    server: dict[str, dict[tuple[str, str, float], list[Metrics]]] = {}
    """By split, then by prefix, part and weight in the part's mean."""
    kinds = Kinds()
    for reply in replies:
        if reply.client_id != SERVER:
            continue
        order = orders[reply.position]
        prefix = _make_prefix(order)
        misfit = kinds.misfit(_list_kinds(reply, prefix))
        if misfit:
            raise ClientError(f"round {round_index}, the evaluation on the server's data: {misfit}")
        model = prefix, order.part, float(order.task.options.get("parts", {}).get(order.part, 0))
        for split, metrics in reply.measured.items():
            server.setdefault(split, {}).setdefault(model, []).append(metrics)
    clients: dict[str, dict[str, Metrics]] = {}
    unmeasured: dict[str, str] = {}
    prefixes = {reply.client_id: _make_prefix(orders[reply.position]) for reply in at_clients}
    kinds = Kinds([_list_kinds(reply, prefixes[reply.client_id]) for reply in at_clients if reply.measured][:3])
    for reply in at_clients:
        prefix = prefixes[reply.client_id]
        misfit = kinds.misfit(_list_kinds(reply, prefix))
        if misfit or reply.rejected:
            reason = reply.rejected or reject_misfit(round_index, reply.client_id, misfit, on_error)
            unmeasured[reply.client_id] = make_printable(reason)
            continue
        for split, metrics in reply.measured.items():
            clients.setdefault(split, {})[reply.client_id] = {prefix + name: v for name, v in metrics.items()}
    rows: list[record.MetricRow] = []
    for split, measured in server.items():
        parts: dict[str, list[tuple[Metrics, float]]] = {}
        for (prefix, part, weight), pieces in measured.items():
            whole = pool_metrics(pieces)
            scores = {**whole, **summarise(whole)}
            named = {prefix + name: value for name, value in scores.items()}
            rows += record.rows_from_metrics(round_index, "evaluate", "", split, named)
            if weight:
                parts.setdefault(part, []).append((scores, weight))
        for part, models in parts.items():
            scores = {part_names.qualify(part, ":", name): v for name, v in _average_models(models).items()}
            rows += record.rows_from_metrics(round_index, "evaluate", "", split, scores)
    for split, measured_clients in clients.items():
        rows += record.rows_from_clients(round_index, "evaluate", split, measured_clients)
    return rows, unmeasured


def _average_models(measured: Sequence[tuple[Metrics, float]]) -> Metrics:
    """Compute a part's scores: means over its models, weighted by ``Task.options["parts"]``, and sums of confusion matrices."""
    ratios: dict[str, list[tuple[Ratio, float]]] = {}
    sums: dict[str, np.ndarray] = {}
    for metrics, weight in measured:
        for name, value in metrics.items():
            if isinstance(value, Ratio) and value.count:
                ratios.setdefault(name, []).append((value, weight))
            elif isinstance(value, np.ndarray):
                sums[name] = sums[name] + value * weight if name in sums else value * weight
    scores: dict[str, Ratio | np.ndarray] = dict(sums)
    for name, weighted in ratios.items():
        count = sum(ratio.count for ratio, _ in weighted)
        mean = sum(ratio.value * weight for ratio, weight in weighted) / sum(weight for _, weight in weighted)
        scores[name] = Ratio(mean * count, count)
    return scores


def _list_kinds(reply: Reply, prefix: str = "") -> dict[str, str]:
    """Return the kinds of a reply's metrics."""
    kinds: dict[str, str] = {}
    for split, metrics in reply.measured.items():
        kinds |= kinds_of(metrics, f"{split} {prefix}")
    return kinds


def _make_prefix(order: Order) -> str:
    """Return the prefix of an order's metrics: the part, and on the server the entry of the state.

    The entry ``global`` has no prefix, unless the plan weights models in a part. The part's name alone then denotes their mean.
    """
    words = [order.part]
    if order.task.client_id == SERVER:
        key = order.task.receive[0]
        words = [order.part, key] if "parts" in order.task.options else label_entry(order.part, key)
    return "".join(f"{word}:" for word in words if word)


def _find_shared_models(method: Method, variants: Variants) -> dict[ModelSpec, dict[str, torch.Size]]:
    """Find the models that the server can evaluate, because all their floating-point tensors are shared or fixed.

    A name stands for its first architecture, because a model with several architectures cannot be shared completely.

    Returns:
        Shapes of the shared tensors of each model. A completely fixed model has none.
    """
    shared: dict[str, tuple[ModelSpec, dict[str, torch.Size]]] = {}
    for specs, models in variants:
        fixed = find_fixed_tensors(models, method.fixed)
        for spec in specs:
            if spec.name in models and spec.name not in shared:
                state = models[spec.name].state_dict()
                shapes = {
                    f"{spec.name}/{key}": value.shape
                    for key, value in state.items()
                    if value.is_floating_point() and f"{spec.name}/{key}" not in fixed
                }
                if all(method.shared(name) for name in shapes):
                    shared[spec.name] = (spec, shapes)
    return dict(shared.values())


def _holds(tensors: Tensors, shapes: Mapping[str, torch.Size]) -> bool:
    """Return whether an entry of the state has a tensor with each of the names and shapes. False without names."""
    return bool(shapes) and all(name in tensors and tensors[name].shape == shape for name, shape in shapes.items())


def find_received_entries(config: Config, state: State, clients: Clients, begun: Sequence[int] = ()) -> frozenset[str]:
    """Return the keys of the entries that tasks of the last round or of its evaluation receive, and ``"global"``.

    Args:
        config: Configuration of the run.
        state: State after the last round.
        clients: All clients of the run. The evaluation is planned for each of them.
        begun: Number of completed rounds before each phase, if a phase ended early.
    """
    method, last = config.components.method, max(0, state.round_index - 1)
    phase = config.phases.replace_first(begun).find(last)
    # The last round is planned again, because a method's schedule may end with it.
    before = dataclasses.replace(state, round_index=last, phase=phase)
    cohort = config.train.resolve_phase(phase).cohort_size(clients.eligible)
    with naming_failures(method, "plan", f"round {last + 1}"):
        tasks = [*method.plan(before, clients, seeds.generator(config.run.seed, last, "", "plan"), cohort)]
    with naming_failures(method, "plan_evaluation", f"the evaluation after round {state.round_index}"):
        tasks += [*method.plan_evaluation(state, clients), *method.plan_evaluation(state, [])]
    return frozenset(["global", *(key for task in tasks for key in task.receive)])


def label_entry(part: str, key: str) -> list[str]:
    """Return the name of an entry of the state in metrics and files, as words: its part, and its key unless ``global``."""
    return [word for word in (part, "" if key == "global" else key) if word]
