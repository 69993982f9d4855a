"""Compare LPA on 100 clients x 1,000,000 parameters in 20 layers with one read of that memory and a naive loop.

``python benchmarks/lpa.py [--clients 100 --parameters 1000000 --layers 20 --repeats 9]``; one thread. The three
alternate, so that a busy machine affects all of them, and each ratio is taken within one repetition.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Update
from raydfl.rules import LayerwisePruning, WeightedMean

TARGET = 5.0


def make_updates(clients: int, parameters: int, layers: int) -> list[Update]:
    """Return clients' updates as they arrive from the object store: one read-only vector each."""
    width = parameters // layers
    inputs = math.isqrt(width)
    names = [f"net/layer{index:02d}.{part}" for index in range(layers) for part in ("weight", "bias")]
    shapes = [
        shape
        for _ in range(layers)
        for shape in ((width // inputs - 1, inputs), (width - (width // inputs - 1) * inputs,))
    ]
    layout = Layout(tuple(names), tuple(shapes))
    generator = np.random.default_rng(0)
    updates = []
    for index in range(clients):
        vector = generator.standard_normal(layout.size, dtype=np.float32)
        vector *= 1 + 0.01 * index  # distinct deviations, so that the naive loop must choose the same clients
        vector.flags.writeable = False
        updates.append(Update(FlatTensors(layout, vector), float(10 + index % 7), client_id=f"c{index:03d}"))
    return updates


def one_read(updates: Sequence[Update]) -> float:
    """Return the sum of all updates."""
    return float(sum(update.tensors.vector.sum() for update in updates if isinstance(update.tensors, FlatTensors)))


def naive(updates: Sequence[Update], vl: float, vh: float) -> Mapping[str, Tensor]:
    """Compute LPA naively: for each layer, client by client, in torch."""
    by_layer: dict[str, list[str]] = {}
    for name in updates[0].tensors:
        by_layer.setdefault(name.rpartition(".")[0], []).append(name)
    result = {}
    for names in by_layer.values():
        vectors = [torch.cat([update.tensors[name].flatten() for name in names]) for update in updates]
        mean = sum(vectors[1:], start=vectors[0]) / len(vectors)
        deviations = [float(torch.linalg.vector_norm(vector - mean)) for vector in vectors]
        order = sorted(range(len(vectors)), key=deviations.__getitem__)
        kept = sorted(order[int(vl * len(order) + 1e-9) : len(order) - int(vh * len(order) + 1e-9)])
        weights = [cast(float, updates[index].weight) for index in kept]
        for name in names:
            parts = [weight * updates[index].tensors[name] for weight, index in zip(weights, kept, strict=True)]
            result[name] = sum(parts[1:], start=parts[0]) / sum(weights)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    updates = make_updates(arguments.clients, arguments.parameters, arguments.layers)
    current = {"global": {name: torch.zeros_like(tensor) for name, tensor in updates[0].tensors.items()}}
    rule, mean = LayerwisePruning(vl=0.1, vh=0.1), WeightedMean()

    ours, theirs = rule(updates, current).tensors["global"], naive(updates, rule.vl, rule.vh)
    gap = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    print(f"largest difference to the naive loop: {gap:.1e}")

    timed: dict[str, Callable[[], object]] = {
        "one read": lambda: one_read(updates),
        "weighted mean": lambda: mean(updates, current),
        "LPA": lambda: rule(updates, current),
        "naive loop": lambda: naive(updates, rule.vl, rule.vh),
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(arguments.repeats):
        for name, function in timed.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)

    print(f"{'':14}{'median ms':>10}{'reads':>8}{'fastest ms':>13}{'reads':>8}")
    reads = seconds["one read"]
    for name, times in seconds.items():
        paired = statistics.median(time / read for time, read in zip(times, reads, strict=True))
        fastest = min(times)
        print(
            f"{name:14}{1000 * statistics.median(times):10.1f}{paired:8.2f}{1000 * fastest:13.1f}{fastest / min(reads):8.2f}"
        )
    print(f"target: LPA within {TARGET:g} reads")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(limits=1):
        main()
