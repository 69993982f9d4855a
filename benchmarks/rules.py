"""Measure every aggregation rule on 100 clients x 1,000,000 parameters, in units of one read of that memory.

``python benchmarks/rules.py [--clients 100 --parameters 1000000 --repeats 3 --only krum,dnc]``; one thread, processor
time. A read precedes each rule, and the ratio is taken between the two. Options are the defaults (20 % attackers where
a rule expects a number), and the clients are random values around 0, without outliers.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import numpy as np
import torch
from lpa import make_updates, one_read
from threadpoolctl import threadpool_limits

from raydfl.core.noise_key import NoiseKey
from raydfl.rules import RULES, Gaussian


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(RULES), help="names of rules, separated by commas")
    arguments = parser.parse_args()
    updates = make_updates(arguments.clients, arguments.parameters, layers=20)
    current = {"global": {name: torch.zeros_like(tensor) for name, tensor in updates[0].tensors.items()}}
    print(f"{'':18}{'median ms':>10}{'reads':>8}")
    for name in arguments.only.split(","):
        rule = RULES[name]()
        seconds, ratios = [], []
        for _ in range(arguments.repeats):
            start = time.process_time()
            one_read(updates)
            between = time.process_time()
            if isinstance(rule, Gaussian):  # with noise, which a run draws from its key
                normals = functools.partial(NoiseKey.from_seed(0).normals, 0, "noise")
                rule([rule.sum_privately(updates, current, len(updates), 1.0, normals).update], current)
            else:
                rule(updates, current, np.random.default_rng(0))
            seconds.append(time.process_time() - between)
            ratios.append(seconds[-1] / (between - start))
        print(f"{name:18}{1000 * statistics.median(seconds):10.1f}{statistics.median(ratios):8.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(limits=1):
        main()
