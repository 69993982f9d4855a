"""Number of clients for batched training, measured once for each kind of work and device."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
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
"""Largest ratio of a client's times at the doubled and the former width that justifies the memory of the doubled width."""


def ask_width(pool: Pool, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
    """Have a worker at the first order's site choose the number of clients for batched training; 1 without orders.

    Raises:
        ResourcesError: The worker is lost.
    """
    if not orders:
        return 1
    place = orders[0].place
    own = [order for order in orders if order.place == place]
    width = pool.ask(place, lambda worker: choose_width(worker, own, broadcast))
    if width is None:
        raise ResourcesError(
            "train.together=auto: a client actor was lost in the measurement, probably for lack of memory. Set train.together to a "
            "number"
        )
    return width


def choose_width(worker: Worker, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
    """Choose the number of clients for batched training on a worker's device.

    The width is 1 on the CPU, where unbatched training with fused operations is fastest, and where a varying measurement would make
    equal runs differ. On a GPU, it is measured once for each model and device.
    """
    if worker.device.type == "cpu" or len(orders) < 2:
        return 1
    train, data = worker.config.train, worker.config.data
    models = worker.clients.by_id(orders[0].task.client_id).models
    device = torch.cuda.get_device_name(worker.device), torch.cuda.get_device_properties(worker.device).total_memory
    work = (worker.method, models, train.batch_size, train.optimiser, train.precision)
    kind = ((*work, worker.config.ray.gpus, device), torch.__version__)
    path = (data.cache or default_cache()) / "widths.json"
    return measure_once(path, kind, lambda: measure_width(worker, orders, broadcast))


def measure_width(worker: Worker, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
    """Measure the fastest number of clients for batched training. The results of the training are discarded."""
    orders = sorted(orders, key=lambda order: -order.cost)  # the largest clients need the most memory
    private = worker.private

    def measure_seconds(width: int) -> float:
        group = [dataclasses.replace(order, group=0) for order in orders[:width]]
        return min(worker.carry_out(group, broadcast)[0].seconds for _ in range(3))  # the first includes the warm-up

    with tempfile.TemporaryDirectory(prefix="raydfl-width-") as scratch:
        worker.private = PrivateStore(Path(scratch), also_read=[private.folder], uri=private.uri)
        try:
            return find_best_width(measure_seconds, len(orders))
        finally:
            worker.private.close()
            worker.private = private
            worker.networks.replicas.clear()  # frees the GPU memory of widths that the run will not use


def find_best_width(measure_seconds: Callable[[int], float], most: int) -> int:
    """Double the width until a client's time no longer falls by at least 5 %, and return the fastest width.

    Two clients together may be slower than one, because the operations of a group cost more. Four are measured in any case.

    Args:
        measure_seconds: Function from a width to the seconds for a client. Its failure, such as a lack of memory, ends the search.
        most: Largest width.
    """
    best, fastest = 1, measure_seconds(1)
    width, former = 2, math.inf
    while width <= most:
        try:
            seconds = measure_seconds(width)
        except (RuntimeError, ClientError) as error:
            logger.info("Batched training of %d clients failed, so the width is %d: %s", width, best, error)
            break
        if seconds > _WORTH * former:
            break
        if seconds <= _WORTH * fastest:
            best, fastest = width, seconds
        width, former = 2 * width, seconds
    return best


def measure_once(path: Path, kind: Hashable, measure: Callable[[], int]) -> int:
    """Measure a number for a kind of work, or read it from the cache of earlier measurements.

    Args:
        path: JSON file of the cache.
        kind: All values that affect the number. Equal kinds must have an equal ``repr``.
        measure: Function that measures the number.
    """
    key = hashlib.blake2b(repr(kind).encode(), digest_size=12).hexdigest()
    cached: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):  # the file is missing, or of an older version
        cached = json.loads(path.read_text())
    if isinstance(cached.get(key), int):
        return cached[key]
    number = measure()
    with contextlib.suppress(OSError):  # without a writable cache, the next run measures again
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps({**cached, key: number}, indent=1)))
    return number
