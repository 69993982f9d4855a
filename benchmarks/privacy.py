"""Compare the time of a round with differential privacy, by client and by clip, to the same round without.

The work is that of rounds.py: the Free Spoken Digit Dataset, 60 clients, 12 a round, batch 16, log-mel 64 x 101, FedAvg. By
client is the rule gaussian, by clip is train.optimiser.private. All runs are in this process and alternate every round, so
that a busy machine affects all of them. Compared are the process's own CPU times.

    python benchmarks/privacy.py --root PATH/TO/fsdd
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rounds import configuration, fsdd

from raydfl.cluster.server import Server
from raydfl.engine.config import Config, make_config
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

CONTESTANTS = {
    "without": (("method", {"name": "fedavg", "rule": "uniform_mean"}),),
    "by client": (("method", {"name": "fedavg", "rule": {"name": "gaussian", "clip": 1.0, "noise": 1.0}}),),
    "by clip": (("private", {"clip": 1.0, "noise": 1.0}),),
}
WARM_UP = 2
"""Warm-up rounds, in which the losses are recorded."""


def change(config: Config, settings: tuple[tuple[str, object], ...], name: str) -> Config:
    """Return a configuration with a different method or private optimiser."""
    values = config.model_dump(mode="json")
    for key, value in settings:
        if key == "private":
            values["train"]["optimiser"]["private"] = value
        else:
            values[key] = value
    values["train"]["rounds"], values["run"]["name"] = 1000, name.replace(" ", "-")
    return make_config(values)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the Free Spoken Digit Dataset")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of each")
    parser.add_argument("--model", default="crnn_lite", choices=["crnn_base", "crnn_lite"])
    given = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="raydfl-privacy-") as folder:
        base = configuration(fsdd(given.root), Path(folder), given.model, 0)
        servers = {}
        for name, settings in CONTESTANTS.items():
            config = change(base, settings, name)
            servers[name] = Server(create(config, Progress("quiet")), config)
        for number in range(WARM_UP + given.rounds):
            for name, server in servers.items():
                began = time.process_time()
                server.round()
                if number >= WARM_UP:
                    times[name].append(time.process_time() - began)
        for server in servers.values():
            server.close()
    print(f"{given.model}, {given.rounds} rounds each, medians of CPU time")
    for name, seconds in times.items():
        ratios = sorted(one / other for one, other in zip(seconds, times["without"], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{name:10} {statistics.median(seconds):.3f} s, ratio {statistics.median(ratios):.3f} "
            f"(middle half {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
