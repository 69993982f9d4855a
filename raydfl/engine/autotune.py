"""The number of clients to train in one computation, measured once for a kind of work and a device."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

import torch

from raydfl.core.errors import ClientError, ResourcesError
from raydfl.core.files import default_cache, write_atomically
from raydfl.core.tensors import FlatTensors
from raydfl.engine.orders import Order
from raydfl.engine.pool import Pool
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.worker import Worker

logger = logging.getLogger(__name__)

_WORTH = 0.95
"""A doubled width has to take at most this share of the time for a client, else it is not worth its memory."""


def ask_width(pool: Pool, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
    """Have a worker at the first order's place choose how many clients to train at once; 1 without orders.

    Raises:
        ResourcesError: the worker is lost.
    """
    if not orders:
        return 1
    place = orders[0].place
    own = [order for order in orders if order.place == place]
    width = pool.ask(place, lambda worker: choose_width(worker, own, broadcast))
    if width is None:
        raise ResourcesError(
            "A client actor was lost while it measured how many clients to train together. Check memory, or set "
            "train.together to a number"
        )
    return width


def choose_width(worker: Worker, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
    """Return how many of these clients to train at once on a worker's device.

    On the CPU always 1: there the operations are fused and one client after another is fastest, and a measurement, which is
    never the same twice, would make equal runs differ. On a GPU it is measured, once for a model and a device.
    """
    if worker.device.type == "cpu" or len(orders) < 2:
        return 1
    train, data = worker.config.train, worker.config.data
    models = worker.clients.by_id(orders[0].task.client_id).models
    device = torch.cuda.get_device_name(worker.device), torch.cuda.get_device_properties(worker.device).total_memory
    work = (worker.method, models, train.batch_size, train.optimiser, train.precision)
    kind = ((*work, worker.config.ray.gpus, device), torch.__version__)
    path = (data.cache or default_cache()) / "widths.json"
    return remembered(path, kind, lambda: measure_width(worker, orders, broadcast))


def measure_width(worker: Worker, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
    """Measure how many clients to train at once; nothing that they do meanwhile is kept."""
    orders = sorted(orders, key=lambda order: -order.cost)
    private = worker.private

    def seconds(width: int) -> float:
        group = [dataclasses.replace(order, group=0) for order in orders[:width]]
        return min(worker.carry_out(group, broadcast)[0].seconds for _ in range(3))  # the first warms up

    with tempfile.TemporaryDirectory(prefix="raydfl-width-") as scratch:
        worker.private = PrivateStore(Path(scratch), also_read=[private.folder])
        try:
            return best_width(seconds, len(orders))
        finally:
            worker.private.close()
            worker.private = private
            worker.networks.replicas.clear()


def best_width(seconds: Callable[[int], float], most: int) -> int:
    """Return the width beyond which doubling it gains nothing.

    Args:
        seconds: measures a client's time at a width. A failure of it (no memory) ends the search.
        most: clients that there are.
    """
    best, fastest = 1, seconds(1)
    width = 2
    while width <= most:
        try:
            took = seconds(width)
        except (RuntimeError, ClientError) as error:
            logger.info("%d clients at once do not fit: %s", width, error)
            break
        if took > _WORTH * fastest:
            break
        best, fastest = width, took
        width *= 2
    return best


def remembered(path: Path, kind: Hashable, measure: Callable[[], int]) -> int:
    """Return what ``measure`` gave the first time for work of this kind; later calls read it from ``path``.

    Args:
        kind: what it depends on; equal kinds have equal ``repr``.
    """
    key = hashlib.blake2b(repr(kind).encode(), digest_size=12).hexdigest()
    known: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):  # not there yet, or of an older version: measured again
        known = json.loads(path.read_text())
    if isinstance(known.get(key), int):
        return known[key]
    width = measure()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a measurement, not the run
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps({**known, key: width}, indent=1)))
    return width
