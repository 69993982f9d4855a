"""raydfl as a contestant: a server actor and client actors on a separate Ray, in a separate process.

Each turn is a process, as for every contestant and for a user's ``raydfl run``. The driver of the benchmark once ended
with a segmentation fault, after its table was printed, when it had opened and closed Ray 27 times: every
``ray.shutdown()`` leaves about ten native threads of Ray behind (gRPC, its client of the GCS), which still exist when
the process ends. It is not known whether they were the cause.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import ray
import torch
from torch import Tensor

from peers.turns import serve
from raydfl import Config, load_config
from raydfl.cluster.server import _CALL_S, ServerActor
from raydfl.cluster.session import start_local_ray
from raydfl.engine.storage.folder import final_state
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress


class Actors:
    """The actors of one federation."""

    def __init__(self, config: Config) -> None:
        start_local_ray(logging_level="ERROR", log_to_driver=False)
        self._folder = create(config, Progress("quiet"))
        self._several = "fusion" in config.models
        actor = ray.remote(ServerActor).options(num_cpus=0)
        self._server = actor.remote()
        self._done = ray.get(self._server.open.remote(str(self._folder), config))[0]

    def run(self, rounds: int) -> None:
        """Do the given number of rounds, requested like ``raydfl run`` does: several short rounds in one call."""
        until = self._done + rounds
        while self._done < until:
            self._done = ray.get(self._server.rounds.remote(self._done, until, _CALL_S))[-1].round

    def weights(self) -> Mapping[str, Tensor]:
        """Return the model of the last commit; several networks are returned with their names."""
        ray.get(self._server.finish.remote(self._done))
        trained = final_state(self._folder).tensors["global"]
        return dict(trained) if self._several else {name.partition("/")[2]: value for name, value in trained.items()}

    def close(self) -> None:
        """End the actors and Ray."""
        ray.get(self._server.close.remote())
        ray.shutdown()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    actors = Actors(load_config(arguments.config))
    try:
        serve(actors.run, actors.weights)
    finally:
        actors.close()


if __name__ == "__main__":
    main()
