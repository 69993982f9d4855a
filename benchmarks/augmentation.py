"""Compare the time of a round with SpecAugment and noise to the same round without.

The work is that of rounds.py: the Free Spoken Digit Dataset, 60 clients, 12 a round, batch 16, log-mel 64 x 101,
FedAvg. Both runs are in this process and alternate every round, so that a busy machine affects both. Compared are the
process's own CPU time and the clock time.

    python benchmarks/augmentation.py --root PATH/TO/fsdd
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rounds import configuration, fsdd

from raydfl.cluster.server import Server
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

TRANSFORMS = [{"name": "noise", "snr_db": [0, 20]}, {"name": "spec_augment", "frames": 20, "bands": 8}]
WARM_UP = 3
"""Warm-up rounds, in which the losses are recorded."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the Free Spoken Digit Dataset")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each")
    parser.add_argument("--model", default="crnn_base", choices=["crnn_base", "crnn_lite"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raydfl-augmentation-") as folder:
        servers = []
        for number, transforms in enumerate(([], TRANSFORMS)):
            data = {**fsdd(given.root), "transforms": transforms}
            config = configuration(data, Path(folder) / str(number), given.model, 0)
            servers.append(Server(create(config, Progress("quiet")), config))
        cpu: list[list[float]] = [[], []]
        day: list[list[float]] = [[], []]
        for number in range(WARM_UP + given.rounds):
            for which, server in enumerate(servers):
                began = time.process_time(), time.perf_counter()
                server.round()
                if number >= WARM_UP:
                    cpu[which].append(time.process_time() - began[0])
                    day[which].append(time.perf_counter() - began[1])
        for server in servers:
            server.close()
    print(f"{given.model}, {given.rounds} rounds each, medians")
    for name, times in (("CPU time", cpu), ("time of day", day)):
        ratios = sorted(one / other for one, other in zip(times[1], times[0], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{name}: without {statistics.median(times[0]):.3f} s, with {statistics.median(times[1]):.3f} s, "
            f"ratio {statistics.median(ratios):.3f} (middle half {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
