"""Enforcement of a site's policy in the processes at the site, and the record of their replies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from raydfl.cluster.site_policy import SitePolicy, find_policy
from raydfl.cluster.site_record import Head, SiteRecord
from raydfl.cluster.site_reports import SiteReport
from raydfl.core.errors import PolicyError
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Metrics, Update
from raydfl.data import Population
from raydfl.engine import SERVER, Config, Order, Reply, Worker
from raydfl.engine.storage import PrivateStore, digest_components, digest_values

T = TypeVar("T")


class SiteGuard:
    """Policy and record of a site, for a run in this process."""

    def __init__(self, policy: SitePolicy, config: Config) -> None:
        """Check a run, and record its start.

        Args:
            policy: Policy of the site.
            config: Configuration of the run.

        Raises:
            PolicyError: The run violates the policy.
        """
        self.policy = policy
        self.record = SiteRecord(policy.record, policy.site)
        values = config.model_dump(mode="json")
        components = digest_components(values)
        self._run = {
            "run": config.run.name or "",
            "user": config.started_by,
            "configuration": digest_values(values),
            "code": [f"{component.kind} {component.name} {component.digest}" for component in components],
        }
        with self.record_rejections():
            policy.check_run(config, components)
            policy.check_moment(0, datetime.now().astimezone())
        self.record.append("opened", **self._run)

    @contextlib.contextmanager
    def record_rejections(self) -> Iterator[None]:
        """Record a violation of the policy before its reason leaves the site."""
        try:
            yield
        except PolicyError as error:
            self.record.append("rejected", **self._run, reason=str(error), bytes={"text": len(str(error).encode())})
            raise

    @contextlib.contextmanager
    def record_failures(self, **values: Any) -> Iterator[None]:
        """Record an error before its message leaves the site. Violations of the policy are recorded already."""
        try:
            yield
        except PolicyError:
            raise
        except Exception as error:
            text = str(error)
            self.record.append("failed", **self._run, **values, reason=text, bytes={"text": len(text.encode())})
            raise

    def note(self, sizes: Mapping[str, int], **values: Any) -> Head:
        """Record outgoing data, and return the new head of the record.

        Args:
            sizes: Bytes by kind.
            values: Further values of the line.
        """
        sent = {"user": self._run["user"], "configuration": self._run["configuration"]}
        return self.record.append("sent", run=self._run["run"], **sent, **values, bytes=dict(sizes))


def call_at_site(function: Callable[..., T], config: Config, site: str, *arguments: Any) -> T:
    """Call a function at a site within the limits of its policy, and record the result as outgoing data.

    Args:
        function: A function of :mod:`raydfl.cluster.sites`, with the configuration and the site as its first arguments.
        config: Configuration of the run.
        site: Name of the site.
        arguments: Further arguments.

    Raises:
        PolicyError: The run violates the policy.
    """
    policy = find_policy(site)
    if policy is None:
        return function(config, site, *arguments)
    guard = SiteGuard(policy, config)
    with guard.record_failures():
        result = function(config, site, *arguments)
    kind = "classes"
    if isinstance(result, SiteReport):
        kind = "report"
        with guard.record_rejections():
            policy.check_clients(len(result.examples))
    content = dataclasses.asdict(result) if isinstance(result, SiteReport) else result
    guard.note({kind: len(json.dumps(content).encode())})
    return result


class GuardedWorker(Worker):
    """Worker at a site with a policy. It withholds metrics, and records all replies before they leave the site."""

    def __init__(
        self,
        guard: SiteGuard,
        run_dir: Path,
        config: Config,
        private: PrivateStore,
        device: str,
        population: Population | None,
        place: str,
    ) -> None:
        """Create a worker, and check the numbers of clients.

        Raises:
            PolicyError: The site or a cohort has too few clients.
        """
        self._guard = guard
        super().__init__(run_dir, config, private, device, population, place)
        places = [self.population.place_of(index) for index in range(len(self.population))]
        self._site_clients = places.count(place)
        with guard.record_rejections():
            guard.policy.check_clients(self._site_clients)
            guard.policy.check_cohorts(config, len(places))

    def carry_out(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], arrived: float | None = None
    ) -> list[Reply]:
        """Check the policy, train or evaluate clients, withhold metrics, and record the replies."""
        round_number, guard = orders[0].round_number, self._guard
        with guard.record_rejections():
            guard.policy.check_moment(round_number, datetime.now().astimezone())
        with guard.record_failures(round=round_number):
            replies = super().carry_out(orders, broadcast, arrived)
        replies = [self._withhold(reply, clients) for reply, clients in _count_summed(orders, replies)]
        sizes = sum((_measure_reply(reply) for reply in replies), Counter[str]())
        head = guard.note(sizes, round=round_number, replies=len(replies))
        return [*replies[:-1], dataclasses.replace(replies[-1], site_head=str(head))]

    def do(self, job: Callable[[Worker], T]) -> T:
        """Run a job on this worker, and record its result."""
        with self._guard.record_failures():
            result = job(self)
        self._guard.note({"answer": len(pickle.dumps(result))})
        return result

    def _withhold(self, reply: Reply, block: int) -> Reply:
        """Withhold a reply's metrics, except allowed metrics of the site's test clips and of a block's sums."""
        clients = self._site_clients if reply.client_id == SERVER else 1
        allow = self._guard.policy.withhold_metrics

        def withhold(updates: Sequence[Update], clients: int) -> tuple[Update, ...]:
            return tuple(dataclasses.replace(update, metrics=allow(update.metrics, clients)) for update in updates)

        measured: dict[str, Metrics] = {split: allow(metrics, clients) for split, metrics in reply.measured.items()}
        return dataclasses.replace(
            reply,
            update=None if reply.update is None else withhold([reply.update], 1)[0],
            further=withhold(reply.further, 1),
            sums=withhold(reply.sums, block),
            measured=measured,
        )


def _count_summed(orders: Sequence[Order], replies: Sequence[Reply]) -> Iterator[tuple[Reply, int]]:
    """Yield each reply with the number of clients behind its sums; 0: it has no sums."""
    blocks = {order.position: order.block for order in orders if order.block is not None}
    accepted = Counter(block.first for reply in replies if (block := blocks.get(reply.position)) and not reply.rejected)
    for reply in replies:
        block = blocks.get(reply.position)
        yield reply, 0 if block is None else block.accepted or accepted[block.first]


def _measure_reply(reply: Reply) -> Counter[str]:
    """Return the bytes of a reply by kind."""
    updates = [*reply.updates, *reply.sums]
    rest = dataclasses.replace(reply, update=None, further=(), sums=(), measured={}, rejected="", looped_because="")
    return Counter(
        {
            "tensors": sum(FlatTensors.from_tensors(update.tensors).vector.nbytes for update in updates),
            "weights": sum(len(pickle.dumps((update.weight, update.senders, update.cuts))) for update in updates),
            "metrics": len(pickle.dumps((reply.measured, [update.metrics for update in updates]))),
            "text": len((reply.rejected + reply.looped_because).encode()),
            "other": len(pickle.dumps(rest)),
        }
    )
