"""Measure the processor time of a client of each method relative to FedAvg's, server and commits included.

    python benchmarks/methods.py --root PATH/TO/fsdd [--works crnn_lite resnet18 --rounds 10]

The work is that of rounds.py, with six clients a round, in one process and one thread. The methods alternate every
round, so that a busy machine affects all of them. Reported are medians over rounds, after two for warm-up. Ditto trains
two models.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rounds import CUT, WORKS, configuration, fsdd

from raydfl.cluster.server import Server
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

METHODS: Mapping[str, Mapping[str, object]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox"},
    "SCAFFOLD": {"name": "scaffold"},
    "Ditto": {"name": "ditto"},
    **{name: method for name, method in CUT.items() if method["name"] == "fedapta"},
}
"""FedAvg, the reference, and methods that extend its loss."""
COHORT, WARM_UP = 6, 2


def measure(work: str, data: Mapping[str, object], rounds: int, runs: Path) -> dict[str, float]:
    """Return processor seconds for a client of each method."""
    servers = {}
    for name, method in METHODS.items():
        config = configuration(data, runs, work, 0, method=method)
        train = config.train.model_copy(update={"cohort": COHORT})
        config = config.model_copy(update={"train": train})
        servers[name] = Server(create(config, Progress("quiet")), config)
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(WARM_UP + rounds):
        for name, server in servers.items():
            began = time.process_time()
            server.round()
            if number >= WARM_UP:
                seconds[name].append((time.process_time() - began) / COHORT)
    for server in servers.values():
        server.close()
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the Free Spoken Digit Dataset")
    works = [work for work, models in WORKS.items() if [*models] == ["model"] and work not in ("cnn", "film_cnn")]
    parser.add_argument("--works", nargs="+", default=["crnn_lite", "crnn_base"], choices=works)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each method that count")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory(prefix="raydfl-methods-") as folder:
        for work in given.works:
            found[work] = measure(work, fsdd(given.root), given.rounds, Path(folder))
    print(f"{'':24}" + "".join(f"{work:>16}" for work in found))
    for name in METHODS:
        print(f"{name:24}" + "".join(f"{each[name] / each['FedAvg']:16.2f}" for each in found.values()))
    print(f"{'ms of a FedAvg client':24}" + "".join(f"{1000 * each['FedAvg']:16.1f}" for each in found.values()))


if __name__ == "__main__":
    main()
