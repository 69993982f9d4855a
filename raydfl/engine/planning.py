"""The clients of the next round, and their orders."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from raydfl.core import seeds
from raydfl.core.errors import ConfigError
from raydfl.core.tensors import Layout
from raydfl.core.types import Client, State, Task
from raydfl.core.users_code import naming_failures
from raydfl.data import Population
from raydfl.engine.asynchrony import StepPlanner
from raydfl.engine.blocks import make_blocks
from raydfl.engine.clients import Available, Clients
from raydfl.engine.config import Config
from raydfl.engine.example_privacy import PrivateExamples
from raydfl.engine.fleet import Flight, Step
from raydfl.engine.orders import Measurement, Order, assign_groups, check_take_part, check_tasks
from raydfl.engine.pool import EarlyOrders
from raydfl.engine.privacy import PrivateRun
from raydfl.engine.rounds import Checkpoint
from raydfl.engine.storage.store import RunStore


class RoundPlanner:
    """Planner of rounds, a pure function of the checkpoint.

    Args:
        config: Configuration of the run.
        population: Clients and their data.
        clients: The same clients, as the method sees them.
        cohorts: Size of the cohort by phase.
        private: Differential privacy of the run by client, if any.
        examples: Differential privacy of the run by example, if any.
        attacks: Returns whether a client, by its index, attacks in a round.
        store: Run directory with the block and the batch width of clients.

    Raises:
        ConfigError: ``train.fleet`` does not fit the clients.
    """

    def __init__(
        self,
        config: Config,
        population: Population,
        clients: Clients,
        cohorts: Mapping[str, int],
        private: PrivateRun | None,
        examples: PrivateExamples | None,
        attacks: Callable[[int, int], bool],
        store: RunStore,
    ) -> None:
        self._config = config
        self._population = population
        self._clients = clients
        self._cohorts = cohorts
        self._private = private
        self._examples = examples
        self._attacks = attacks
        self._store = store
        fleet = config.train.fleet
        self._steps = None if fleet is None else StepPlanner(fleet, config, clients, cohorts, population.part_of)

    def plan(self, checkpoint: Checkpoint, drawn: bool = True) -> tuple[list[Order], Step | None]:
        """Plan the orders of the next round, and its step of asynchronous training (``train.fleet``), if any.

        Args:
            checkpoint: Checkpoint before the round.
            drawn: With Poisson sampling, draw the number of clients. ``False``: plan their expected number.
        """
        state = checkpoint.state
        if self._steps is not None:
            step = self._steps.plan(state, checkpoint.in_flight, self._draw_tasks)
            flights = {f.start.task.client_id: f for f in step.arrivals}
            orders = self.make_orders(checkpoint, [f.start.task for f in step.arrivals], None, flights)
            return orders, step
        clients = self._clients.find_available(state.round_index)
        cohort = self._draw_size(state, clients) if drawn else self._cohorts[state.phase]
        if not cohort:
            return [], None
        tasks = self._draw_tasks(state, clients, self._make_generator(state, "plan"), cohort)
        if isinstance(clients, Available):
            self._check_rested(tasks, clients, state.round_index)
        if self._private is not None:
            self._private.check_plan(len(tasks), cohort, self._config.method["name"])
        return self.make_orders(checkpoint, tasks, None), None

    def plan_early(self, checkpoint: Checkpoint, step: Step, most: int) -> EarlyOrders | None:
        """Plan orders of clients in flight after a step of asynchronous training, as if they arrived in the next step.

        Args:
            checkpoint: Checkpoint before the step.
            step: The step.
            most: Largest number of orders.

        Returns:
            ``None`` if an order cannot be carried out before its step: batched training needs all clients of a step.
        """
        if self._steps is None or (self._store.together > 1 and self._steps.get_buffer(checkpoint.state.phase) > 1):
            return None
        flights = [flight for flight in step.fleet.flights if not flight.start.lost][:most]
        later = dataclasses.replace(checkpoint.state, round_index=checkpoint.state.round_index + 1)
        by_client = {flight.start.task.client_id: flight for flight in flights}
        tasks = [flight.start.task for flight in flights]
        orders = self.make_orders(dataclasses.replace(checkpoint, state=later), tasks, None, by_client)
        by_start = {order.start: dataclasses.replace(order, early=True) for order in orders}
        starts = frozenset(flight.number for flight in step.fleet.flights)
        return EarlyOrders([by_start[flight.number] for flight in flights], starts)

    def _draw_tasks(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Draw the tasks of a cohort by the method."""
        method, number = self._config.components.method, state.round_index + 1
        with naming_failures(method, "plan", f"round {number}"):
            tasks = method.plan(state, clients, rng, cohort)
        if self._config.train.clients is not None:
            check_take_part(tasks, self._clients, number, self._config.method["name"])
        return tasks

    def _check_rested(self, tasks: Sequence[Task], available: Available, round_index: int) -> None:
        """Reject tasks of clients whose turn it is not (``train.clients.rest``).

        Raises:
            ConfigError: The method plans such a client.
        """
        for task in tasks:
            if not available.has(self._clients.index_of(task.client_id)):
                raise ConfigError(
                    f"train.clients.rest: method {self._config.method['name']!r} plans client {task.client_id!r}, which rests in "
                    f"round {round_index + 1}. Draw from the given clients in plan(), or set train.clients.rest=1"
                )

    def _draw_size(self, state: State, clients: Clients | Available) -> int:
        """Draw the number of clients in the next round.

        With Poisson sampling the number is binomial, and all subsets of this size are equally likely.

        Args:
            state: State before the round.
            clients: Clients whose turn it is.
        """
        cohort, settings = self._cohorts[state.phase], self._config.train.clients
        if settings is None or settings.draw == "fixed" or clients.draw is None:
            return cohort
        chance = cohort * settings.rest / self._clients.eligible
        return int(self._make_generator(state, "draw").binomial(clients.draw.eligible, chance))

    def _make_generator(self, state: State, purpose: str) -> np.random.Generator:
        """Return the generator of a draw in the next round. The cohorts of a private run are secret."""
        secret = None if self._private is None else self._private.generator(state.round_index, purpose)
        return secret or seeds.generator(self._config.run.seed, state.round_index, "", purpose)

    def make_orders(
        self,
        checkpoint: Checkpoint,
        tasks: Sequence[Task],
        measure: tuple[Measurement, ...] | None,
        flights: Mapping[str, Flight] = MappingProxyType({}),
    ) -> list[Order]:
        """Make orders of a method's tasks, in client order.

        Args:
            checkpoint: Checkpoint before the round.
            tasks: Tasks of different clients.
            measure: Planned measurements; ``None``: training.
            flights: Arrivals in virtual time (``train.fleet``), by the client's id.
        """
        state = checkpoint.state
        check_tasks(tasks, state.tensors)
        placed = sorted(((self._clients.index_of(t.client_id), t) for t in tasks), key=operator.itemgetter(0))
        clients = [self._clients.item(index) for index, _ in placed]
        places = [self._population.place_of(client.index) for client in clients]
        layouts = {key: Layout.from_tensors(group) for key, group in state.tensors.items()}
        blocks = make_blocks(places, self._store.block if measure is None else 1, layouts)
        records = checkpoint.private.select([client.index for client in clients])
        examples = self._examples if measure is None else None
        arrived = [flights.get(task.client_id) for _, task in placed]
        versions = [state.round_index if flight is None else flight.version for flight in arrived]
        orders = [
            Order(
                position,
                task,
                state.round_index,
                float(clients[position].num_examples),
                records[position],
                measure,
                attacking=measure is None and self._attacks(index, state.round_index),
                part=self._population.part_of(index),
                block=blocks[position],
                place=places[position],
                stage=state.phase,
                key=None if examples is None else examples.derive_key(versions[position], task.client_id, task.phase),
                staleness=state.round_index - versions[position],
                most_batches=None if flight is None else flight.start.most_batches,
                start=-1 if flight is None else flight.number,
            )
            for position, ((index, task), flight) in enumerate(zip(placed, arrived, strict=True))
        ]
        return assign_groups(orders, [client.models for client in clients], self._store.together)
