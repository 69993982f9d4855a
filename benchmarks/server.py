"""Measure the server's own work in a round, without clients: milliseconds and GB/s of each part.

    python benchmarks/server.py [--clients 12 100 500 --parameters 50000 400000 4000000 --repeats 5 --numpy]

- one read: the sum of all updates, the reference for the next two.
- mean, LPA: the rules, on updates in memory.
- broadcast: the state as one vector, pickled like Ray does, and copied once, as into the object store.
- unpickle: all clients' results as they arrive from the object store, their vectors not copied.
- commit: the state written to disk and the pointer moved, in the folder for temporary files (TMPDIR).
- rows: the clients' metrics, written to disk.

Parts alternate; the fastest of all repetitions counts. One thread. The last columns are the peak memory of the two
rules beyond the updates: LPA holds all of them at once, the mean four at a time. Sizes beyond half of the free memory
are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from lpa import make_updates, one_read
from threadpoolctl import threadpool_limits

from raydfl.core import ops
from raydfl.core.ops.sums import sums_are_compiled
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Ratio, State, Update
from raydfl.engine.orders import Reply
from raydfl.engine.storage import record
from raydfl.engine.storage.private import PrivateIndex
from raydfl.engine.storage.store import RunStore
from raydfl.rules import LayerwisePruning, Rule, WeightedMean

LAYERS = 20


def pickle_value(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a value like Ray: arrays out of band, without copies."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def parts_of(updates: Sequence[Update], folder: Path) -> dict[str, tuple[Callable[[], object], int]]:
    """Return each part of the server's round, with the bytes it reads or writes."""
    state = State(1, {"global": {name: tensor + 0 for name, tensor in updates[0].tensors.items()}})
    results = [
        pickle_value(Reply(position, update.client_id, update, measured={"train": {"loss": Ratio(1.0, 10.0)}}))
        for position, update in enumerate(updates)
    ]
    store = RunStore(folder)
    mean, lpa = WeightedMean(), LayerwisePruning()

    def broadcast() -> object:
        data, buffers = pickle_value(FlatTensors.from_tensors(state.tensors["global"]))
        return data, [np.frombuffer(buffer, np.uint8).copy() for buffer in buffers]

    def write_rows() -> None:
        measured = {update.client_id: {"loss": Ratio(1.0, 10.0)} for update in updates}
        record.write_rows(record.rows_path(folder, 1), record.rows_from_clients(1, "train", "train", measured))

    model = sum(tensor.nbytes for tensor in state.tensors["global"].values())
    return {
        "one read": (lambda: one_read(updates), model * len(updates)),
        "mean": (lambda: mean(updates, state.tensors), model * len(updates)),
        "LPA": (lambda: lpa(updates, state.tensors), model * len(updates)),
        "broadcast": (broadcast, model),
        "unpickle": (lambda: [pickle.loads(data, buffers=buffers) for data, buffers in results], 0),  # noqa: S301
        "commit": (lambda: store.commit(state, PrivateIndex()), model),
        "rows": (write_rows, 0),
    }


def fastest(parts: dict[str, tuple[Callable[[], object], int]], repeats: int) -> dict[str, float]:
    """Return the seconds of each part."""
    seconds = dict.fromkeys(parts, float("inf"))
    for _ in range(repeats):
        for name, (function, _) in parts.items():
            start = time.perf_counter()
            function()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def peak_bytes(rule: Rule, updates: Sequence[Update]) -> int:
    """Return a rule's peak allocation beyond the updates."""
    tracemalloc.start()
    try:
        rule(updates, {})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    """Measure and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[12, 100, 500], help="clients of a round")
    parser.add_argument("--parameters", type=int, nargs="+", default=[50_000, 400_000, 4_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--numpy", action="store_true", help="do not use the compiled operators")
    arguments = parser.parse_args()
    with ops.use("torch") if arguments.numpy else contextlib.nullcontext():
        print(f"sums: {'compiled' if sums_are_compiled() else 'NumPy'}; ms, and GB/s where a part is about memory")
        heading = "".join(
            f"{name:>16}" for name in ("one read", "mean", "LPA", "broadcast", "unpickle", "commit", "rows")
        )
        print(f"{'clients':>7}{'parameters':>12}{heading}{'mean, MB':>12}{'LPA, MB':>10}")
        for parameters, clients in itertools.product(arguments.parameters, arguments.clients):
            size = f"{clients:7}{parameters:12,}"
            if (needed := 4 * parameters * clients) > psutil.virtual_memory().available / 2:
                print(f"{size}  left out: the updates take {needed / 1e9:.1f} GB")
                continue
            updates = make_updates(clients, parameters, LAYERS)
            with tempfile.TemporaryDirectory() as folder:
                parts = parts_of(updates, Path(folder))
                seconds = fastest(parts, arguments.repeats)
            cells = [
                f"{1e3 * seconds[name]:9.2f} {total / seconds[name] / 1e9 if total else float('nan'):6.1f}".replace(
                    "nan", "   "
                )
                for name, (_, total) in parts.items()
            ]
            peaks = [peak_bytes(rule, updates) / 1e6 for rule in (WeightedMean(), LayerwisePruning())]
            print(f"{size}{''.join(cells)}{peaks[0]:12.1f}{peaks[1]:10.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(limits=1):
        main()
