"""The work in Flower's simulation, as in its tutorials: Ray backend, two client slots of one CPU, the FedAvg strategy.

    PYTHONPATH=benchmarks .venv-peers/bin/python -m peers.flower WORK

It follows the protocol of peers/turns.py.
"""

from __future__ import annotations

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # read when flwr is imported

import sys
from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from peers.flower_client import app as client_app
from peers.turns import serve
from peers.work import Work

SLOTS = 2


class ChosenCohorts(FedAvg):
    """FedAvg with the work's cohorts in place of its own draw."""

    def __init__(self, work: Work, path: str) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.work, self.path, self.rounds_before = work, path, 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each client of the cohort. In a simulation any node can play any client."""
        round_index = self.rounds_before + server_round - 1
        nodes = sorted(grid.get_node_ids())
        for node, client in zip(nodes, self.work.cohorts[round_index], strict=False):
            order = ConfigRecord({"work": self.path, "client": client, "round": round_index})
            content = RecordDict({"arrays": arrays, "config": order})
            yield Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node)


def main() -> None:
    """Start the simulation; its server follows the protocol."""
    path = sys.argv[1]
    work = Work.load(path)
    app = ServerApp()

    @app.main()
    def server(grid: Grid, context: Context) -> None:
        strategy = ChosenCohorts(work, path)
        arrays = ArrayRecord(work.build().state_dict())

        def run(rounds: int) -> None:
            nonlocal arrays
            arrays = strategy.start(grid, arrays, num_rounds=rounds).arrays
            strategy.rounds_before += rounds

        def weights() -> Mapping[str, Tensor]:
            return arrays.to_torch_state_dict()

        serve(run, weights)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    ray = {"address": "local", "num_cpus": SLOTS, "object_store_memory": 500_000_000}
    run_simulation(app, client_app, len(work.offsets) - 1, backend_config={**resources, "init_args": ray})


if __name__ == "__main__":
    main()
