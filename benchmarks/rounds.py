"""Time of a round: raydfl with one and with two actors against a bare one-thread PyTorch loop, on the same work, interleaved.

The work: FedAvg on the Free Spoken Digit Dataset, 60 clients (each speaker's clips dealt to ten), 12 a round, one epoch, batch 16,
log-mel 64 x 101, CRNN-Base or CRNN-Lite with kernel 5. Dropout is off so that the final models can be compared: the bare loop
draws the same cohorts and the same batches and must end at the same global model to 1e-6.

    python benchmarks/rounds.py --root PATH/TO/fsdd --turns 8

A round of raydfl is timed where a user's driver waits for it: planning, dispatch, object store, aggregation and the commit to the
disk are in it. The contestants take turns of a few rounds each, so that whatever else the machine does meets all of them; ratios
are of turns that stood next to each other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ray
import torch
import torch.nn.functional as F

from raydfl import make_config
from raydfl.clients import Clients
from raydfl.config import Config
from raydfl.data.population import Population
from raydfl.progress import Progress
from raydfl.rundir import create, final_state
from raydfl.seeds import generator
from raydfl.server import ServerActor
from raydfl.worker import build_models


def configuration(root: Path, runs: Path, architecture: str, actors: int) -> Config:
    """The work as a configuration."""
    return make_config(
        {
            "method": {"name": "fedavg"},
            "models": {"model": {"name": architecture, "kernel": 5, "dropout": 0.0}},
            "data": {
                "name": "fsdd",
                "root": str(root),
                "features": {"sample_rate": 8000, "bands": 64, "window_ms": 25, "hop_ms": 10, "seconds": 1.0},
                "partition": {"by": "group", "shards": 10},
            },
            "train": {"rounds": 10**6, "cohort": 12, "local_epochs": 1, "batch_size": 16, "optimiser": {"lr": 0.05}},
            "evaluate": {"every": 10**6, "server": False, "clients": "none"},
            "ray": {"actors": actors, "cpus": 0.5},
            "run": {"dir": str(runs), "name": f"{architecture}-{actors}"},
            "track": {"mlflow": False},
        }
    )


class BareLoop:
    """What a researcher writes without a framework: one model, one loop over clients, tensors in memory."""

    def __init__(self, config: Config, population: Population) -> None:
        self.clients = Clients(population, config)
        self.cohort = config.train.cohort_size(len(population))
        self.batch_size, self.lr = config.train.batch_size, config.train.optimiser.lr
        self.seed = config.run.seed
        self.model = build_models(config.build_method(), self.clients[0], self.seed)["model"]
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.data = []
        for index in range(len(population)):
            batch = population.data(index).train.batch(np.arange(population.num_examples(index)))
            self.data.append((batch.x, batch.y))
        self.round_index = 0

    def round(self) -> None:
        """One round of FedAvg."""
        rng = generator(self.seed, self.round_index, "", "plan")
        chosen = np.sort(rng.choice(len(self.data), size=self.cohort, replace=False))
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self.weights.items()}
        total = 0
        for index in chosen:
            x, y = self.data[index]
            order = generator(self.seed, self.round_index, self.clients[int(index)].id, "train").permutation(len(y))
            self.model.load_state_dict(self.weights)
            self.model.train()
            optimiser = torch.optim.SGD(self.model.parameters(), lr=self.lr)
            for start in range(0, len(y), self.batch_size):
                batch = torch.from_numpy(order[start : start + self.batch_size])
                optimiser.zero_grad()
                F.cross_entropy(self.model(x[batch]), y[batch]).backward()
                optimiser.step()
            for name, value in self.model.state_dict().items():
                sums[name] += len(y) * value.double()
            total += len(y)
        self.weights = {name: (value / total).float() for name, value in sums.items()}
        self.round_index += 1


def measure(architecture: str, root: Path, runs: Path, turns: int, rounds: int) -> None:
    """Interleave the contestants and print the table of one architecture."""
    configs = {actors: configuration(root, runs, architecture, actors) for actors in (1, 2)}
    folders = {actors: create(config, Progress("quiet")) for actors, config in configs.items()}
    bare = BareLoop(configs[1], Population.load(folders[1] / "population"))
    servers = {}
    for actors, config in configs.items():
        actor = ray.remote(ServerActor).options(num_cpus=0)
        servers[actors] = actor.remote(str(folders[actors]), config.model_dump(mode="json"))
        ray.get(servers[actors].open.remote())
    done = dict.fromkeys(servers, 0)

    def federated(actors: int) -> Callable[[], None]:
        def one() -> None:
            ray.get(servers[actors].round.remote(done[actors]))
            done[actors] += 1

        return one

    contestants = {"bare loop": bare.round, "raydfl, 1 actor": federated(1), "raydfl, 2 actors": federated(2)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-1, turns):  # the first warms up
        for name, one in contestants.items():
            started = time.perf_counter()
            for _ in range(rounds):
                one()
            if turn >= 0:
                seconds[name].append((time.perf_counter() - started) / rounds)
    print(
        f"\n{architecture}, kernel 5: {turns} turns of {rounds} rounds; time of a round over the bare loop's of the same turn"
    )
    print(f"{'':18}{'ms (median)':>12}{'ratio (median)':>16}{'range':>16}")
    for name, times in seconds.items():
        ratios = [t / b for t, b in zip(times, seconds["bare loop"], strict=True)]
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        print(f"{name:18}{1000 * statistics.median(times):12.0f}{statistics.median(ratios):16.3f}{spread:>16}")
    for actors, server in servers.items():
        ray.get(server.close.remote())
        ray.kill(server)
        state = final_state(folders[actors]).tensors["global"]
        largest = max(float((state[f"model/{n}"] - w).abs().max()) for n, w in bare.weights.items())
        print(f"largest difference of the global model to the bare loop's, {actors} actor(s): {largest:.1e}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the Free Spoken Digit Dataset")
    parser.add_argument("--turns", type=int, default=8, help="timed turns of each contestant")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in a turn")
    parser.add_argument("--architectures", nargs="+", default=["crnn_base", "crnn_lite"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ray.init("local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="raydfl-benchmark-") as runs:
        for architecture in arguments.architectures:
            measure(architecture, arguments.root.resolve(), Path(runs), arguments.turns, arguments.rounds)
    ray.shutdown()


if __name__ == "__main__":
    main()
