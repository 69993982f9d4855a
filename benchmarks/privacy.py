"""Compare the time of a round with differential privacy, by client and by clip, to the same round without.

The work is that of rounds.py: the Free Spoken Digit Dataset, 60 clients, 12 a round, batch 16, log-mel 64 x 101, FedAvg. By
client is the rule gaussian, by clip is train.optimiser.private. All runs are in this process and alternate every round, so
that a busy machine affects all of them. Compared are the process's own CPU times.

With --opacus, a network of CRNN-Lite's sizes with the DPGRU of Opacus takes as many steps as a round by clip, on random
clips of the same size and without any federation.

    python benchmarks/privacy.py --root PATH/TO/fsdd
    python benchmarks/privacy.py --root PATH/TO/fsdd --opacus
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
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


def make_opacus_round(steps: int) -> Callable[[], None]:
    """Return a function that takes private steps of 16 clips, 64 x 101, with Opacus."""
    import opacus
    from opacus.layers import DPGRU
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList([nn.Conv1d(64, 32, 3, padding=1), nn.Conv1d(32, 32, 3, padding=1)])
            self.gru, self.output = DPGRU(32, 64, batch_first=True), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for convolution in self.convolutions:
                x = nn.functional.max_pool1d(convolution(x).relu(), 2)
            logits: torch.Tensor = self.output(self.gru(x.transpose(1, 2))[0].mean(dim=1))
            return logits

    network = opacus.GradSampleModule(Network())
    optimiser = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.01), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=16
    )
    x, y = torch.randn(16, 64, 101), torch.randint(0, 10, (16,))

    def train() -> None:
        for _ in range(steps):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimiser.step()

    return train


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the Free Spoken Digit Dataset")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of each")
    parser.add_argument("--model", default="crnn_lite", choices=["crnn_base", "crnn_lite"])
    parser.add_argument("--opacus", action="store_true", help="also time Opacus with a DPGRU")
    given = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="raydfl-privacy-") as folder:
        base = configuration(fsdd(given.root), Path(folder), given.model, 0)
        servers = {}
        for name, settings in CONTESTANTS.items():
            config = change(base, settings, name)
            servers[name] = Server(create(config, Progress("quiet")), config)
        turns = {name: server.round for name, server in servers.items()}
        if given.opacus:
            turns["Opacus"], times["Opacus"] = make_opacus_round(12 * 3), []  # 12 clients with 45 clips: 3 steps of 16
        for number in range(WARM_UP + given.rounds):
            for name, turn in turns.items():
                began = time.process_time()
                turn()
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
