"""Worker: execution of orders for any client in one process.

A client is an id plus a record in the private store, so one worker can serve all clients. It keeps one network for each combination
of architectures, and reloads the weights in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from raydfl.core import part_names, seeds
from raydfl.core.cuts import cut_tensors
from raydfl.core.errors import ClientError, RaydflError
from raydfl.core.memory import keep_freed_memory
from raydfl.core.metrics import attack_success, reduce_scores
from raydfl.core.tensors import FlatTensors, OwnTensors
from raydfl.core.types import Client, Metrics
from raydfl.core.users_code import FAILURES, describe, is_users
from raydfl.data import ClientData, Examples, Population
from raydfl.engine.blocks import sum_block
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.fine_tuning import fine_tune, personal_name
from raydfl.engine.messages import blame_method, count_received_bytes, rename_for_server, select_received, split_updates
from raydfl.engine.networks import BuiltNetworks, seed_torch
from raydfl.engine.orders import (
    MEAN,
    SERVER,
    SERVER_VALIDATION,
    TRIGGERED,
    Measurement,
    Order,
    Reply,
    split_groups,
    split_pieces,
)
from raydfl.engine.passes import BlockUpdates, HeldBlocks
from raydfl.engine.storage.private import PrivateRef, PrivateStore
from raydfl.engine.validation import check_metrics, check_number, check_weights, shorten_reason
from raydfl.rules import TwoPassRule
from raydfl.training import (
    Clock,
    DeadlineExceededError,
    Execution,
    PrivateTask,
    Step,
    TrainingCounter,
    TrainSettings,
    WithheldData,
    allow_tf32,
    check_device,
)
from raydfl.training.together import run_in_lockstep

T = TypeVar("T")
KEPT_MODEL, KEPT_STATE, KEPT_MOMENTS = "model:", "state:", "moments:"
"""Prefixes in a private record: private tensors of models, the method's ``step.state``, and the optimiser's moments."""


def _strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors with a prefix in their names, and remove the prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Worker:
    """Executor of orders. It owns no client's state, so any worker can serve any client at any time."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        private: PrivateStore,
        device: str = "cpu",
        population: Population | None = None,
        place: str = "",
    ) -> None:
        """Create a worker.

        Args:
            run_dir: Run directory. It is not read if ``population`` is given.
            config: Configuration of the run.
            private: Store of clients' private state.
            device: PyTorch device.
            population: Population of the whole federation; ``None``: load it from ``run_dir``.
            place: Site of the worker. It serves only clients of this site, because it has only their clips.

        Raises:
            ConfigError: The software, or the content of a file in the configuration, differs from the starting machine's.
        """
        config.check_software()
        config.check_files()
        self.run_dir = run_dir
        self.place = place
        self.config = config
        self.private = private
        self.device = torch.device(device)
        if self.device.type == "cpu":
            config.check_kernels()
        if self.device.type == "cuda" and self.device.index is None:
            # Tensors' devices have an index, and parts of torch.cuda require it.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.method = config.components.method
        self.population = Population.load(run_dir / "population") if population is None else population
        self.clients = Clients(self.population, config)
        self.population.use(config.data)
        keep_freed_memory()
        self.attack = config.components.attack
        at_clients = (self.method, self.method.objective, *([] if self.attack is None else [self.attack]))
        users_code = any(is_users(type(part).__module__) for part in at_clients)
        self.networks = BuiltNetworks(self.method, config.run.seed, self.device, users_code)
        # Cached, because batched training requires the same settings object for all clients of a group.
        self._training_in = functools.cache(config.train.resolve_phase)
        self._counter = TrainingCounter()
        self._held = HeldBlocks()
        self._samples: dict[tuple[str, str, int], Examples] = {}

    def carry_out(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], arrived: float | None = None
    ) -> list[Reply]:
        """Train or evaluate clients. A group is batched; groups follow one another. The updates of a complete block are added.

        Args:
            orders: Orders to execute.
            broadcast: Server's tensors by key, with at least the received keys of the tasks. They are only read.
            arrived: Arrival of the orders, in seconds of ``time.perf_counter``; ``None``: now.

        Returns:
            A reply for each order, group by group; in a block by position. One reply for a block in a pass.

        Raises:
            ClientError: The method's code failed, and ``run.on_error`` is ``stop``. The message has the client, round and phase,
                and the command for a replay.
        """
        if torch.get_num_threads() != self.config.ray.threads:
            torch.set_num_threads(self.config.ray.threads)  # the setting holds only for the calling thread
        since = time.perf_counter() if arrived is None else arrived
        replies = [reply for piece in split_pieces(orders) for reply in self._carry_out_piece(piece, broadcast, since)]
        self.private.close()  # before the server learns of the records, because a worker on another node may read them next
        return replies

    def do(self, job: Callable[[Worker], T]) -> T:
        """Run a job on this worker."""
        return job(self)

    def read_ahead(self, orders: Sequence[Order]) -> None:
        """Prefetch the data of orders from the disk, while this worker executes earlier orders."""
        for order in orders:
            if order.task.client_id != SERVER and order.measure is None:
                index = self.clients.index_of(order.task.client_id)
                self.population.data(index, order.attacking).train.read_ahead()
            if order.private is not None:
                self.private.read_ahead(order.private)

    def _carry_out_piece(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], arrived: float
    ) -> Sequence[Reply]:
        """Execute a group, or a complete block group by group."""
        first = orders[0]
        if first.block is None or first.block.clients != len(orders):
            return self._carry_out_group(orders, broadcast, arrived)
        groups = split_groups(orders)
        # Lazily, so that the rule adds an update before the next group trains.
        replies = (reply for group in groups for reply in self._carry_out_group(group, broadcast, arrived))
        rule, on_error = self.config.components.rule, self.config.run.on_error
        if not isinstance(rule, TwoPassRule):
            return sum_block(first.block, replies, rule, self.method.additions, on_error, first.round_number)
        started = time.perf_counter()
        kept = self._held.find(first) if first.repeats else None
        if kept is None:
            kept = BlockUpdates(broadcast)
            args = (rule, self.method.additions, on_error, first.round_number, kept)
            trained = sum_block(first.block, replies, *args)
            if first.block.kept is None:
                self._held.keep(first, kept)
            if not first.repeats:
                return trained
        reply = kept.repeat(first, rule, {key: broadcast[MEAN + key] for key in first.block.means})
        return [dataclasses.replace(reply, seconds=time.perf_counter() - started)]

    def _carry_out_group(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], arrived: float
    ) -> list[Reply]:
        started, processor = time.perf_counter(), time.process_time()
        work = [functools.partial(self._carry_out, order, broadcast, place) for place, order in enumerate(orders)]
        replies = []
        for outcome in run_in_lockstep(work) if len(work) > 1 else [work[0]()]:
            if isinstance(outcome, Exception):
                raise outcome
            replies.append(outcome)
        seconds = (time.perf_counter() - started) / len(orders)  # a batch has no times of single clients
        processor = (time.process_time() - processor) / len(orders)
        return [
            dataclasses.replace(
                reply, seconds=seconds, processor=processor, waited=started - arrived + number * seconds
            )
            for number, reply in enumerate(replies)
        ]

    def _carry_out(self, order: Order, broadcast: Mapping[str, FlatTensors], place: int) -> Reply:
        do = self._train if order.measure is None else self._evaluate
        try:
            return do(order, broadcast, place)
        except DeadlineExceededError as error:
            return self._reject(order, broadcast, str(error))
        except ClientError as error:
            if not self._may_drop(order):
                raise
            return self._reject(order, broadcast, f"error: {error}")
        except RaydflError:
            raise  # a problem of the folder, the disk or the configuration concerns all clients
        except FAILURES as error:  # a method's code may raise anything
            if not self._may_drop(order):
                raise ClientError(self._describe(order, error)) from error
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()  # releases the failed client's cached memory to the next client
            return self._reject(order, broadcast, f"error: {describe(error)}")

    def _may_drop(self, order: Order) -> bool:
        """Return whether a failing client is dropped. Failures on the server's data always stop the run."""
        return self.config.run.on_error == "drop" and order.task.client_id != SERVER

    def _reject(self, order: Order, broadcast: Mapping[str, FlatTensors], reason: str) -> Reply:
        """Make the reply for a dropped client. The client keeps its previous private state."""
        return Reply(
            order.position,
            order.task.client_id,
            rejected=shorten_reason(reason),
            private=order.private,
            bytes_down=count_received_bytes(order, broadcast, self._list_lacking(order)),
        )

    def _describe(self, order: Order, error: BaseException) -> str:
        task = order.task
        round_ = order.round_number
        text = f"{order.subject} failed in round {round_}, phase {task.phase!r}: {describe(error)}"
        if isinstance(error, torch.OutOfMemoryError):
            text += (
                ". Lower train.batch_size, evaluate.batch_size or train.together, or raise ray.gpus for more GPU memory"
            )
        if task.client_id and order.measure is None:
            client = shlex.quote(task.client_id)
            text += (
                f"\nInspect it with: raydfl replay {shlex.quote(str(self.run_dir))} --round {round_} --client {client}"
            )
        return text

    def prepare(self, order: Order, broadcast: Mapping[str, FlatTensors], place: int = 0) -> Step:
        """Create a step for the method's code, with open data, loaded models and seeded generators.

        Args:
            order: Order of the client.
            broadcast: Server's tensors by key.
            place: Number of the client in its group. Clients in batched training have networks of their own.
        """
        task, training = order.task, self._training_in(order.stage)
        check_device(training.precision, self.device)
        allow_tf32(training.precision, self.device)
        client, data = self._find_client(order)
        purpose = task.phase if order.measure is None else f"evaluate/{task.phase}"
        private = self._make_private_task(order, training, data)
        if private is None:
            seed = seeds.seed_for(self.config.run.seed, order.version, client.id, f"torch/{purpose}")
        else:  # random numbers of losses depend on the positions of examples in their batch
            seed = int(private.key.generator(0, "torch").integers(2**62))
        seed_torch(seed, self.device)
        received = select_received(order, broadcast, self._list_lacking(order))
        kept = self.private.read(order.private) if order.private is not None else {}
        built, subject = self.networks.build(client.models, place), f"{order.subject}, round {order.round_number}"
        fixed = cut_tensors(self.networks.build_fixed(client.models), task.cuts, subject)
        built.start(received, _strip_prefix(KEPT_MODEL, kept), self.method.shared, subject, fixed)
        return Step(
            client=client,
            models=dict(built.models),
            # A copy, so that a method's in-place changes do not reach the next client.
            received={key: OwnTensors(tensors, self.device) for key, tensors in received.items()},
            data=data if private is None else cast(ClientData, WithheldData()),
            state={name: tensor.to(self.device) for name, tensor in _strip_prefix(KEPT_STATE, kept).items()},
            moments={name: tensor.to(self.device) for name, tensor in _strip_prefix(KEPT_MOMENTS, kept).items()},
            rng=seeds.generator(self.config.run.seed, order.version, client.id, purpose),
            device=self.device,
            training=training,
            phase=task.phase,
            round_index=order.version,
            options=task.options,
            cuts=task.cuts,
            shared=self.method.shared,
            fixed=built.fixed,
            execution=Execution(networks=built.networks, private=private),
            clock=Clock()
            if order.measure is not None
            else Clock(training.real_deadline, training.late == "partial", self.device, order.most_batches),
        )

    def _make_private_task(self, order: Order, training: TrainSettings, data: ClientData) -> PrivateTask | None:
        """Make the secrets of a client's differentially private training; ``None``: it needs none."""
        if training.optimiser.private is None or order.measure is not None:
            return None
        if order.key is None:
            raise AssertionError("an order of private training needs a key")
        return PrivateTask(order.key, data, self.config.privacy.metrics == "outside")

    def _list_lacking(self, order: Order) -> frozenset[str]:
        """List the models of the method that the order's client does not have."""
        if order.task.client_id == SERVER:
            return frozenset()
        client = self.clients.by_id(order.task.client_id)
        return frozenset(self.config.components.models) - {spec.name for spec in client.models}

    def _find_client(self, order: Order) -> tuple[Client, ClientData]:
        if order.task.client_id == SERVER:
            test = self._select_split("test", order.part)
            empty = test.take(np.zeros(0, np.int64))
            client = Client(SERVER, -1, 0, order.server_models, part_names.describe_part(order.part))
            return client, ClientData({"train": empty}, validation=empty, test=test)
        client = self.clients.by_id(order.task.client_id)
        return client, self.population.data(client.index, order.attacking)

    def _train(self, order: Order, broadcast: Mapping[str, FlatTensors], place: int) -> Reply:
        step = self.prepare(order, broadcast, place)
        bytes_down = count_received_bytes(order, broadcast, self._list_lacking(order))
        step.clock.start()
        attack = self.attack if order.attacking else None
        result = self.method.local(step) if attack is None else attack.local(self.method, step)
        if step.execution.private is not None:
            step.data = step.execution.private.data
        with blame_method(order):
            updates = split_updates(result, order.subject, self.method.shared, step.fixed)
            measured = [reduce_scores(check_metrics(update.metrics, order.subject)) for update in updates]
            all_metrics = {name: value for metrics in measured for name, value in metrics.items()}
            check_number(all_metrics, order.subject)
        updates = [rename_for_server(update, order, broadcast) for update in updates]
        payloads = [FlatTensors.from_tensors(update.tensors) for update in updates]
        updates = [
            dataclasses.replace(update, tensors=flat, client_id=step.client.id, metrics=metrics)
            for update, flat, metrics in zip(updates, payloads, measured, strict=True)
        ]
        reply = Reply(
            order.position,
            step.client.id,
            private=order.private,
            bytes_down=bytes_down,
            together=step.execution.together,
            looped_because=step.execution.looped_because,
            cut=step.clock.steps if step.clock.cut else None,
        )
        # aminmax returns NaN for minimum and maximum if there is a NaN.
        extremes = [float(value) for flat in payloads if flat.vector.size for value in torch.aminmax(flat.whole)]
        if not all(map(math.isfinite, extremes)):
            bad = [name for flat in payloads for name, tensor in flat.items() if not bool(torch.isfinite(tensor).all())]
            return dataclasses.replace(
                reply, rejected=f"not finite: {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}"
            )
        with blame_method(order):
            for update, flat in zip(updates, payloads, strict=True):
                check_weights(update, flat.layout)
        weights = [w for update in updates if isinstance(update.weight, Mapping) for w in update.weight.values()]
        return dataclasses.replace(
            reply,
            update=updates[0],
            further=tuple(updates[1:]),
            largest=max(map(abs, extremes), default=0.0),
            measured={"train": all_metrics},
            private=self._store_private(order, step),
            bytes_up=sum(flat.vector.nbytes for flat in payloads)
            + sum(w.nbytes if isinstance(w, Tensor) else 8 for w in weights),
            multiply_adds=self._counter.count(step),
        )

    def _store_private(self, order: Order, step: Step) -> PrivateRef | None:
        """Store the client's private state: private tensors of its models, the method's state, and the optimiser's moments."""
        private = {KEPT_MODEL + n: t for n, t in step.floating_state().items() if not self.method.shared(n)}
        private.update({KEPT_STATE + n: t for n, t in step.state.items()})
        private.update({KEPT_MOMENTS + n: t for n, t in step.moments.items()})
        return (
            self.private.append(order.round_index + 1, private, order.start if order.early else None)
            if private
            else None
        )

    def _evaluate(self, order: Order, broadcast: Mapping[str, FlatTensors], place: int) -> Reply:
        step = self.prepare(order, broadcast, place)
        models, measured = step.models, dict[str, Metrics]()
        for measurement in order.measure or ():
            step.models = {name: models[name] for name in measurement.models if name in models}
            examples = self._select_examples(step, measurement, order.part)
            if len(examples) and step.models:
                metrics = self._measure(order, step, examples)
                if measurement.split == TRIGGERED and self.attack is not None:
                    metrics = attack_success(metrics, self.attack.target_class(self.population.classes))
                measured[measurement.split] = metrics
        held_out = [m for m in order.measure or () if m.split in ("validation", "client_test") and m.split in measured]
        tuning = self.config.components.fine_tune
        if held_out and tuning.epochs and len(step.data.train):
            step.models = models
            objective, features = self.method.objective, type(self.method).on_features
            tuned = fine_tune(step, objective, tuning.epochs, tuning.part, self.method.fixed, features)
            for measurement in held_out:
                metrics = self._measure(order, tuned, self._select_examples(step, measurement, order.part))
                personal = {personal_name(name, len(models)): value for name, value in metrics.items()}
                measured[measurement.split] = {**measured[measurement.split], **personal}
        bytes_down = count_received_bytes(order, broadcast, self._list_lacking(order))
        return Reply(order.position, step.client.id, private=order.private, measured=measured, bytes_down=bytes_down)

    def _measure(self, order: Order, step: Step, examples: Examples) -> Metrics:
        """Evaluate a step on examples. Scores of single clips never leave their client or site."""
        result = self.method.evaluate(step, examples, self.config.evaluate.batch_size)
        with blame_method(order):
            metrics = check_metrics(result, order.subject)
            return reduce_scores(metrics) if order.task.client_id != SERVER or order.place else metrics

    def _select_examples(self, step: Step, measurement: Measurement, part: str) -> Examples:
        if measurement.split == "validation":
            return step.data.validation
        if measurement.split == "client_test":
            return step.data.test
        if measurement.sample is not None:
            return self._sample(measurement.split, measurement.sample, part)
        examples, shard = self._select_split(measurement.split, part), measurement.shard
        return examples if shard is None else examples.take(np.arange(shard.start, shard.stop))

    def _select_split(self, split: str, part: str) -> Examples:
        data = self.population.parts[part]
        if split == SERVER_VALIDATION:
            return data.validation
        return data.triggered if split == TRIGGERED else data.test

    def _sample(self, split: str, count: int, part: str) -> Examples:
        """Sample clips of the server's test data by the run seed, with all their segments."""
        if (part, split, count) not in self._samples:
            examples = self._select_split(split, part)
            clips = np.unique(examples.clips)
            rng = seeds.generator(self.config.run.seed, 0, "", "test sample")
            sampled = rng.permutation(clips)[:count]
            self._samples[part, split, count] = examples.take(np.flatnonzero(np.isin(examples.clips, sampled)))
        return self._samples[part, split, count]
