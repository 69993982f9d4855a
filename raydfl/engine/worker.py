"""Worker: carries out tasks for any client, one after another, in one process.

A client is an id plus a record in the private store, so a worker serves as many clients as there are; it keeps one built
network for each combination of architectures and re-loads it in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raydfl.core import part_names, seeds
from raydfl.core.cuts import cut_tensors
from raydfl.core.errors import ClientError, RaydflError
from raydfl.core.memory import keep_freed_memory
from raydfl.core.metrics import attack_success, reduced
from raydfl.core.tensors import FlatTensors, OwnTensors
from raydfl.core.types import Client, Metrics
from raydfl.core.users_code import FAILURES, describe, is_users
from raydfl.data import ClientData, Examples, Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.fine_tuning import fine_tune, personal_name
from raydfl.engine.messages import by_servers_names, received, received_bytes, sent_updates
from raydfl.engine.networks import BuiltNetworks, seed_torch
from raydfl.engine.orders import SERVER, SERVER_VALIDATION, TRIGGERED, Measurement, Order, Reply, split_groups
from raydfl.engine.storage.private import PrivateRef, PrivateStore
from raydfl.engine.validation import check_number, check_weights, checked_metrics, reason_of
from raydfl.training import (
    Clock,
    DeadlineExceededError,
    Execution,
    Step,
    check_device,
)
from raydfl.training.together import run_in_lockstep

KEPT_MODEL, KEPT_STATE, KEPT_MOMENTS = "model:", "state:", "moments:"
"""Prefixes in a private record: tensors of models that are not shared, what the method keeps in step.state, and the optimiser's."""


def _without(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of the name."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@contextlib.contextmanager
def _malformed(order: Order) -> Iterator[None]:
    """Turn what a check finds wrong with something that a method's code has made into a failure of that code."""
    try:
        yield
    except RaydflError as error:
        raise ClientError(f"round {order.round_number}, {error}") from None


class Worker:
    """Carries out orders. Owns nothing: any worker of a run can serve any client at any time."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        private: PrivateStore,
        device: str = "cpu",
        population: Population | None = None,
        place: str = "",
    ) -> None:
        """Open it.

        Args:
            run_dir: of the run; nothing of it is read if ``population`` is given.
            config: of the run.
            private: where clients' private state lies.
            device: on which to compute.
            population: of the whole federation; ``None``: the one in ``run_dir``.
            place: the site whose clients alone this worker can serve, because it has their clips.

        Raises:
            ConfigError: a file that the configuration names is not what it is where the run was started.
        """
        config.check_files()
        self.run_dir = run_dir
        self.place = place
        self.config = config
        self.private = private
        self.device = torch.device(device)
        if self.device.type == "cpu":
            config.check_kernels()
        if self.device.type == "cuda":
            if self.device.index is None:  # tensors name theirs, and parts of torch.cuda ask for it
                self.device = torch.device("cuda", torch.cuda.current_device())
            torch.backends.cudnn.allow_tf32 = False  # else convolutions and GRUs round float32 to 10 bits
        self.method = config.parts.method
        self.population = Population.load(run_dir / "population") if population is None else population
        self.clients = Clients(self.population, config)
        self.population.use(config.data)
        keep_freed_memory()
        self.attack = config.parts.attack
        at_clients = (self.method, self.method.objective, *([] if self.attack is None else [self.attack]))
        users_code = any(is_users(type(part).__module__) for part in at_clients)
        self.networks = BuiltNetworks(self.method, config.run.seed, self.device, users_code)
        # The same object for all of one phase: clients are computed together if theirs is the same.
        self._training_in = functools.cache(config.train.resolve_phase)
        self._samples: dict[tuple[str, str, int], Examples] = {}

    def carry_out(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], arrived: float | None = None
    ) -> list[Reply]:
        """Train or evaluate some clients: those of a group together, groups one after another.

        Args:
            orders: what to do.
            broadcast: the server's tensors by key, at least those that the tasks receive; only read.
            arrived: when the orders came, on time.perf_counter; ``None``: now.

        Raises:
            ClientError: the method's code failed, and ``run.on_error`` is ``stop``; says client, round, phase and how to replay it.
        """
        if torch.get_num_threads() != self.config.ray.threads:
            torch.set_num_threads(self.config.ray.threads)  # it holds for one thread of the process only
        since = time.perf_counter() if arrived is None else arrived
        replies = [reply for group in split_groups(orders) for reply in self._carry_out_group(group, broadcast, since)]
        self.private.close()  # before anybody is told of a record: workers on other nodes may read it next
        return replies

    def read_ahead(self, orders: Sequence[Order]) -> None:
        """Have what these orders need fetched from the disk, while this worker still works on others."""
        for order in orders:
            if order.task.client_id != SERVER and order.measure is None:
                index = self.clients.index_of(order.task.client_id)
                self.population.data(index, order.attacking).train.read_ahead()
            if order.private is not None:
                self.private.read_ahead(order.private)

    def _carry_out_group(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], arrived: float
    ) -> list[Reply]:
        started = time.perf_counter()
        work = [functools.partial(self._carry_out, order, broadcast, place) for place, order in enumerate(orders)]
        replies = []
        for outcome in run_in_lockstep(work) if len(work) > 1 else [work[0]()]:
            if isinstance(outcome, Exception):
                raise outcome
            replies.append(outcome)
        seconds = (time.perf_counter() - started) / len(orders)
        return [
            dataclasses.replace(reply, seconds=seconds, waited=started - arrived + number * seconds)
            for number, reply in enumerate(replies)
        ]

    def _carry_out(self, order: Order, broadcast: Mapping[str, FlatTensors], place: int) -> Reply:
        do = self._train if order.measure is None else self._evaluate
        try:
            return do(order, broadcast, place)
        except DeadlineExceededError as error:
            return self._left_out(order, broadcast, str(error))
        except ClientError as error:
            if not self._may_drop(order):
                raise
            return self._left_out(order, broadcast, f"error: {error}")
        except RaydflError:
            raise  # the folder, the disk or the configuration: not this client's
        except FAILURES as error:  # whatever a method's code raises
            if not self._may_drop(order):
                raise ClientError(self._describe(order, error)) from error
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            return self._left_out(order, broadcast, f"error: {describe(error)}")

    def _may_drop(self, order: Order) -> bool:
        """Return whether a failure of this order leaves its client out; failures on the server's data always stop the run."""
        return self.config.run.on_error == "drop" and order.task.client_id != SERVER

    def _left_out(self, order: Order, broadcast: Mapping[str, FlatTensors], reason: str) -> Reply:
        """Return the reply of a client that is left out: its private state stays. The reason is made one line, for the record."""
        sent = received_bytes(order, broadcast, self._lacks(order))
        return Reply(
            order.position,
            order.task.client_id,
            rejected=reason_of(reason),
            private=order.private,
            bytes_down=sent,
        )

    def _describe(self, order: Order, error: BaseException) -> str:
        task = order.task
        round_ = order.round_number
        text = f"{order.subject} failed in round {round_}, phase {task.phase!r}: {describe(error)}"
        if isinstance(error, torch.OutOfMemoryError):
            text += "; lower train.batch_size, evaluate.batch_size or train.together, or give actors more of a GPU (ray.gpus)"
        if task.client_id and order.measure is None:
            client = shlex.quote(task.client_id)
            text += (
                f"\nlook at it with: raydfl replay {shlex.quote(str(self.run_dir))} --round {round_} --client {client}"
            )
        return text

    def prepare(self, order: Order, broadcast: Mapping[str, FlatTensors], place: int = 0) -> Step:
        """Return a step ready for the method's code: data opened, models loaded, generators seeded.

        Args:
            place: which of the built networks it gets; clients that are worked on at the same time have different ones.
        """
        task, training = order.task, self._training_in(order.stage)
        check_device(training.precision, self.device)
        client, data = self._who(order)
        purpose = task.phase if order.measure is None else f"evaluate/{task.phase}"
        seed_torch(seeds.seed_for(self.config.run.seed, order.round_index, client.id, f"torch/{purpose}"), self.device)
        sent = received(order, broadcast, self._lacks(order))
        kept = self.private.read(order.private) if order.private is not None else {}
        built, whose = self.networks.build(client.models, place), f"{order.subject}, round {order.round_number}"
        fixed = cut_tensors(self.networks.fixed_of_whole(client.models), task.cuts, whose)
        built.start(sent, _without(KEPT_MODEL, kept), self.method.shared, whose, fixed)
        return Step(
            client=client,
            models=dict(built.models),
            # A copy: whatever a method does to what it received, the next client gets what the server sent.
            received={key: OwnTensors(tensors, self.device) for key, tensors in sent.items()},
            data=data,
            state={name: tensor.to(self.device) for name, tensor in _without(KEPT_STATE, kept).items()},
            moments={name: tensor.to(self.device) for name, tensor in _without(KEPT_MOMENTS, kept).items()},
            rng=seeds.generator(self.config.run.seed, order.round_index, client.id, purpose),
            device=self.device,
            training=training,
            phase=task.phase,
            round_index=order.round_index,
            options=task.options,
            cuts=task.cuts,
            shared=self.method.shared,
            fixed=built.fixed,
            execution=Execution(networks=built.networks),
            clock=Clock()
            if order.measure is not None
            else Clock(training.deadline, training.late == "partial", self.device),
        )

    def _lacks(self, order: Order) -> frozenset[str]:
        """Return the models of the method that the order's client does not have."""
        if order.task.client_id == SERVER:
            return frozenset()
        client = self.clients.by_id(order.task.client_id)
        return frozenset(self.config.parts.models) - {spec.name for spec in client.models}

    def _who(self, order: Order) -> tuple[Client, ClientData]:
        if order.task.client_id == SERVER:
            test = self._test("test", order.part)
            nothing = test.take(np.zeros(0, np.int64))
            client = Client(SERVER, -1, 0, order.server_models, part_names.describe_part(order.part))
            return client, ClientData({"train": nothing}, validation=nothing, test=test)
        client = self.clients.by_id(order.task.client_id)
        return client, self.population.data(client.index, order.attacking)

    def _train(self, order: Order, broadcast: Mapping[str, FlatTensors], place: int) -> Reply:
        step = self.prepare(order, broadcast, place)
        bytes_down = received_bytes(order, broadcast, self._lacks(order))
        step.clock.start()
        attack = self.attack if order.attacking else None
        found = self.method.local(step) if attack is None else attack.local(self.method, step)
        with _malformed(order):
            updates = sent_updates(found, order.subject, self.method.shared, step.fixed)
            measured = [reduced(checked_metrics(update.metrics, order.subject)) for update in updates]
            together = {name: value for metrics in measured for name, value in metrics.items()}
            check_number(together, order.subject)
        updates = [by_servers_names(update, order.part, broadcast) for update in updates]
        sent = [FlatTensors.of(update.tensors) for update in updates]
        updates = [
            dataclasses.replace(update, tensors=flat, client_id=step.client.id, metrics=metrics)
            for update, flat, metrics in zip(updates, sent, measured, strict=True)
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
        # A NaN is both.
        extremes = [float(value) for flat in sent if flat.vector.size for value in torch.aminmax(flat.whole)]
        if not all(map(math.isfinite, extremes)):
            bad = [name for flat in sent for name, tensor in flat.items() if not bool(torch.isfinite(tensor).all())]
            return dataclasses.replace(
                reply, rejected=f"not finite: {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}"
            )
        with _malformed(order):
            for update, flat in zip(updates, sent, strict=True):
                check_weights(update, flat.layout)
        weights = [w for update in updates if isinstance(update.weight, Mapping) for w in update.weight.values()]
        return dataclasses.replace(
            reply,
            update=updates[0],
            further=tuple(updates[1:]),
            largest=max(map(abs, extremes), default=0.0),
            measured={"train": together},
            private=self._keep(order, step),
            bytes_up=sum(flat.vector.nbytes for flat in sent)
            + sum(w.nbytes if isinstance(w, Tensor) else 8 for w in weights),
        )

    def _keep(self, order: Order, step: Step) -> PrivateRef | None:
        """Write what stays with the client: private tensors of its models, the method's state, and the optimiser's moments."""
        kept = {KEPT_MODEL + n: t for n, t in step.floating_state().items() if not self.method.shared(n)}
        kept.update({KEPT_STATE + n: t for n, t in step.state.items()})
        kept.update({KEPT_MOMENTS + n: t for n, t in step.moments.items()})
        return self.private.append(order.round_index + 1, kept) if kept else None

    def _evaluate(self, order: Order, broadcast: Mapping[str, FlatTensors], place: int) -> Reply:
        step = self.prepare(order, broadcast, place)
        models, measured = step.models, dict[str, Metrics]()
        for measurement in order.measure or ():
            step.models = {name: models[name] for name in measurement.models if name in models}
            examples = self._examples(step, measurement, order.part)
            if len(examples) and step.models:
                metrics = self._measure(order, step, examples)
                if measurement.split == TRIGGERED and self.attack is not None:
                    metrics = attack_success(metrics, self.attack.target_class(self.population.classes))
                measured[measurement.split] = metrics
        own = [
            each
            for each in order.measure or ()
            if each.split in ("validation", "client_test") and each.split in measured
        ]
        tuning = self.config.parts.fine_tune
        if own and tuning.epochs and len(step.data.train):
            step.models = models
            objective, features = self.method.objective, type(self.method).on_features
            tuned = fine_tune(step, objective, tuning.epochs, tuning.part, self.method.fixed, features)
            for measurement in own:
                found = self._measure(order, tuned, self._examples(step, measurement, order.part))
                personal = {personal_name(name, len(models)): value for name, value in found.items()}
                measured[measurement.split] = {**measured[measurement.split], **personal}
        bytes_down = received_bytes(order, broadcast, self._lacks(order))
        return Reply(order.position, step.client.id, private=order.private, measured=measured, bytes_down=bytes_down)

    def _measure(self, order: Order, step: Step, examples: Examples) -> Metrics:
        """Return the metrics of some examples; scores of single clips stay where the clips are."""
        found = self.method.evaluate(step, examples, self.config.evaluate.batch_size)
        with _malformed(order):
            metrics = checked_metrics(found, order.subject)
            return reduced(metrics) if order.task.client_id != SERVER or order.place else metrics

    def _examples(self, step: Step, measurement: Measurement, part: str) -> Examples:
        if measurement.split == "validation":
            return step.data.validation
        if measurement.split == "client_test":
            return step.data.test
        if measurement.sample is not None:
            return self._sample(measurement.split, measurement.sample, part)
        test, shard = self._test(measurement.split, part), measurement.shard
        return test if shard is None else test.take(np.arange(shard.start, shard.stop))

    def _test(self, split: str, part: str) -> Examples:
        held = self.population.parts[part]
        if split == SERVER_VALIDATION:
            return held.validation
        return held.triggered if split == TRIGGERED else held.test

    def _sample(self, split: str, count: int, part: str) -> Examples:
        """Return some of the server's test clips, drawn by the run seed, with all their segments."""
        if (part, split, count) not in self._samples:
            test = self._test(split, part)
            clips = np.unique(test.clips)
            rng = seeds.generator(self.config.run.seed, 0, "", "test sample")
            drawn = rng.permutation(clips)[:count]
            self._samples[part, split, count] = test.take(np.flatnonzero(np.isin(test.clips, drawn)))
        return self._samples[part, split, count]
